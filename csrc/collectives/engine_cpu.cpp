#include <ATen/ATen.h>

#include "collectives/engine.h"
#include "collectives/error.h"
#include "collectives/torch_threads.h"
#include "transport/scratch.h"

namespace zipccl {

namespace {
struct TypeRow {
  at::ScalarType torch;
  DType frame;
};
constexpr TypeRow kTypes[] = {
    {at::kByte, DType::u8},
    {at::kChar, DType::i8},
    {at::kShort, DType::i16},
    {at::kInt, DType::i32},
    {at::kLong, DType::i64},
    {at::kHalf, DType::f16},
    {at::kFloat, DType::f32},
    {at::kDouble, DType::f64},
    {at::kComplexHalf, DType::c32},
    {at::kComplexFloat, DType::c64},
    {at::kComplexDouble, DType::c128},
    {at::kBool, DType::boolean},
    {at::kBFloat16, DType::bf16},
    {at::kFloat8_e4m3fn, DType::f8_e4m3fn},
    {at::kFloat8_e5m2, DType::f8_e5m2},
    {at::kFloat8_e4m3fnuz, DType::f8_e4m3fnuz},
    {at::kFloat8_e5m2fnuz, DType::f8_e5m2fnuz},
    {at::kFloat8_e8m0fnu, DType::f8_e8m0fnu},
    {at::kUInt16, DType::u16},
    {at::kUInt32, DType::u32},
    {at::kUInt64, DType::u64},
};

// Throws for a frame that could not be decoded; what it holds instead can be told here, where its header is at hand.
void refuse(Status status, const at::Tensor& frame, DType dtype, int64_t count, const std::string& what) {
  FrameInfo info;
  if (status != Status::unexpected || read_header(frame.const_data_ptr(), frame.numel(), &info) != Status::ok)
    return check(status, what);
  throw FrameError(what + ": " + status_text(status) + ": " + std::to_string(info.count) + " values of " +
                   toString(scalar_type(info.dtype)) + ", not " + std::to_string(count) + " of " +
                   toString(scalar_type(dtype)));
}

class CpuEngine : public Engine {
 public:
  at::Tensor empty(int64_t n, at::ScalarType type) override { return pool_.empty(n, type); }

  void encode(const std::vector<at::Tensor>& src, const FrameOptions& options, const std::vector<at::Tensor>& frames,
              at::Tensor sizes) override {
    auto* out = sizes.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < src.size(); ++i) {
      uint64_t written = 0;
      check(zipccl::encode(src[i].const_data_ptr(), src[i].numel(), options, frames[i].mutable_data_ptr(),
                           frames[i].numel(), &written, Isa::best, torch_threads(src[i].nbytes())),
            "zipccl encode");
      out[i] = static_cast<int64_t>(written);
    }
  }

  void decode(const std::vector<Decode>& jobs, const FrameOptions& options, const std::string& what) override {
    for (const Decode& job : jobs) {
      Status s = zipccl::decode(job.frame.const_data_ptr(), job.frame.numel(), options.dtype, job.dst.numel(),
                                job.dst.mutable_data_ptr(), Isa::best, torch_threads(job.dst.nbytes()));
      if (s != Status::ok) refuse(s, job.frame, options.dtype, job.dst.numel(), what + ": frame from " + job.from);
    }
  }

  void decode_sum(const std::vector<Addend>& addends, const SumOptions& options, at::Tensor dst,
                  const std::string& what, Code) override {
    std::vector<SumInput> inputs;
    for (const Addend& a : addends)
      inputs.push_back({a.data.const_data_ptr(), static_cast<uint64_t>(a.data.nbytes()), a.is_frame});
    int bad;
    Status s = zipccl::decode_sum(inputs.data(), static_cast<int>(inputs.size()), dst.numel(), options,
                                  dst.mutable_data_ptr(), &bad, Isa::best, torch_threads(dst.nbytes() * inputs.size()));
    if (s == Status::ok) return;
    if (bad < 0) check(s, what);
    refuse(s, addends[bad].data, options.in, dst.numel(), what + ": frame from " + addends[bad].from);
  }

  std::vector<int64_t> to_host(const at::Tensor& values) override {
    const int64_t* p = values.const_data_ptr<int64_t>();
    return {p, p + values.numel()};
  }

  uint64_t scratch_bytes() const override { return pool_.usage().held; }
  void release_scratch() override { pool_.release(); }

 private:
  ScratchPool pool_;
};
}  // namespace

bool frame_dtype(at::ScalarType type, DType* out) {
  for (const TypeRow& row : kTypes)
    if (row.torch == type) {
      *out = row.frame;
      return true;
    }
  return false;
}

at::ScalarType scalar_type(DType dtype) {
  for (const TypeRow& row : kTypes)
    if (row.frame == dtype) return row.torch;
  throw Error("zipccl: unknown dtype in a frame");
}

std::unique_ptr<Engine> make_cpu_engine() { return std::make_unique<CpuEngine>(); }

}  // namespace zipccl
