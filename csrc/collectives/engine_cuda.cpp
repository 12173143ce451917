// The codec on CUDA tensors. Compiled only when ZIPCCL_WITH_CUDA is defined.
#ifdef ZIPCCL_WITH_CUDA

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include "collectives/await_cuda.h"
#include "collectives/engine.h"
#include "collectives/error.h"

namespace zipccl {

namespace {
class CudaEngine : public Engine {
 public:
  explicit CudaEngine(at::Device device) : device_(device) {}

  void limit_sms(int max_sms) override { max_sms_ = max_sms; }

  at::Tensor empty(int64_t n, at::ScalarType type) override {
    return at::empty({n}, at::TensorOptions(type).device(device_));
  }

  void encode(const std::vector<at::Tensor>& src, const FrameOptions& options, const std::vector<at::Tensor>& frames,
              at::Tensor sizes) override {
    std::vector<EncodeJob> jobs;
    jobs.reserve(src.size());
    for (size_t i = 0; i < src.size(); ++i)
      jobs.push_back({src[i].const_data_ptr(), static_cast<uint64_t>(src[i].numel()), frames[i].mutable_data_ptr()});
    int n = static_cast<int>(jobs.size());
    auto scratch = empty(static_cast<int64_t>(cuda::encode_scratch_bytes(jobs.data(), n, options)), at::kByte);
    check(cuda::encode(jobs.data(), n, options, scratch.mutable_data_ptr(),
                       reinterpret_cast<uint64_t*>(sizes.mutable_data_ptr<int64_t>()), stream(), max_sms_),
          "zipccl encode");
  }

  void decode(const std::vector<Decode>& jobs, const FrameOptions& options, const std::string& what) override {
    if (jobs.empty()) return;
    std::vector<DecodeJob> list;
    std::vector<std::string> from;
    list.reserve(jobs.size());
    for (const Decode& job : jobs) {
      list.push_back({job.frame.const_data_ptr(), static_cast<uint64_t>(job.frame.numel()), job.dst.mutable_data_ptr(),
                      static_cast<uint64_t>(job.dst.numel())});
      from.push_back(job.from);
    }
    int n = static_cast<int>(list.size());
    auto statuses = empty(n, at::kInt);
    auto scratch = decode_scratch();
    check(cuda::decode(list.data(), n, options.dtype, statuses.mutable_data_ptr<int32_t>(), scratch.mutable_data_ptr(),
                       stream(), max_sms_, options.code),
          what);
    expect(statuses, what, from);
  }

  void decode_sum(const std::vector<Addend>& addends, const SumOptions& options, at::Tensor dst,
                  const std::string& what, Code code) override {
    if (code == Code::dense) return sum_decoded(addends, options, dst, what);
    sum(addends, options, dst, what);
  }

  // The one host wait of a collective whose sizes depend on the data.
  std::vector<int64_t> to_host(const at::Tensor& values) override { return begin_to_host(values)(); }

  Reading begin_to_host(const at::Tensor& values) override {
    auto host = at::empty(values.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
    host.copy_(values, /*non_blocking=*/true);
    auto ready = std::make_shared<at::cuda::CUDAEvent>();
    ready->record(c10::cuda::getCurrentCUDAStream(device_.index()));
    return [this, host, ready]() -> std::vector<int64_t> {
      await(*ready, watch_);
      const int64_t* p = host.const_data_ptr<int64_t>();
      return {p, p + host.numel()};
    };
  }

  void set_watch(Watch watch) override { watch_ = std::move(watch); }

  Pending take_statuses() override {
    if (statuses_.empty()) return {};
    auto all = statuses_.size() == 1 ? statuses_[0] : at::cat(statuses_);
    auto host = at::empty(all.sizes(), at::TensorOptions(at::kInt).pinned_memory(true));
    host.copy_(all, /*non_blocking=*/true);
    statuses_.clear();
    return {host, std::move(what_)};
  }

 private:
  void sum(const std::vector<Addend>& addends, const SumOptions& options, at::Tensor dst, const std::string& what) {
    std::vector<SumInput> inputs;
    std::vector<std::string> from;
    for (const Addend& a : addends) {
      inputs.push_back({a.data.const_data_ptr(), static_cast<uint64_t>(a.data.nbytes()), a.is_frame});
      from.push_back(a.from);
    }
    int n = static_cast<int>(inputs.size());
    auto statuses = empty(n, at::kInt);
    auto scratch = decode_scratch();
    check(cuda::decode_sum(inputs.data(), n, dst.numel(), options, dst.mutable_data_ptr(),
                           statuses.mutable_data_ptr<int32_t>(), scratch.mutable_data_ptr(), stream(), max_sms_),
          what);
    expect(statuses, what, from);
  }

  // Dense frames are decoded to scratch first.
  void sum_decoded(std::vector<Addend> addends, const SumOptions& options, at::Tensor dst, const std::string& what) {
    std::vector<Decode> jobs;
    for (Addend& a : addends) {
      if (!a.is_frame) continue;
      at::Tensor values = empty(dst.numel(), scalar_type(options.in));
      jobs.push_back({a.data, values, a.from});
      a.data = values;
      a.is_frame = false;
    }
    FrameOptions frames;
    frames.dtype = options.in;
    frames.code = Code::dense;
    decode(jobs, frames, what);
    sum(addends, options, dst, what);
  }

  // One text per status, so only when the kernels that write them are enqueued.
  void expect(const at::Tensor& statuses, const std::string& what, const std::vector<std::string>& from) {
    statuses_.push_back(statuses);
    for (const std::string& who : from) what_.push_back(what + ": frame from " + who);
  }

  at::Tensor decode_scratch() { return empty(static_cast<int64_t>(cuda::decode_scratch_bytes()), at::kByte); }
  void* stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  at::Device device_;
  int max_sms_ = 0;
  Watch watch_;
  std::vector<at::Tensor> statuses_;
  std::vector<std::string> what_;
};
}  // namespace

std::unique_ptr<Engine> make_cuda_engine(at::Device device) { return std::make_unique<CudaEngine>(device); }

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
