// Times the CUDA codec without torch, against a copy kernel in the same run:
//   codec_cuda FILE [MiB ...]        FILE: bf16 values, repeated to each size
// For each size: encode and decode of one tensor, and the sum of eight frames.
// Device time of one call inside a CUDA graph, median of 30 replays after 5; the L2 cache is left to what the calls
// themselves do, so sizes below it are warm. GB/s count the tensors' bytes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <vector>

#include "codec/codec.h"
#include "timing.cuh"

namespace {

__global__ void copy_kernel(const uint4* src, uint4* dst, uint64_t n) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
    dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
  }
  for (; i < n; i += step) dst[i] = src[i];
}

double median_seconds(const std::function<void(cudaStream_t)>& enqueue) { return ::median_seconds(5, 30, enqueue); }

constexpr int kAddends = 8;

class Memory {
 public:
  explicit Memory(uint64_t bytes) { CUDA(cudaMalloc(&p_, bytes)); }
  Memory(Memory&& other) noexcept : p_(other.p_) { other.p_ = nullptr; }
  ~Memory() { cudaFree(p_); }
  template <typename T = char>
  T* get() const {
    return static_cast<T*>(p_);
  }

 private:
  void* p_ = nullptr;
};

// `from`: byte of the file to begin with.
void fill(const std::vector<char>& values, uint64_t from, uint64_t bytes, char* dst) {
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t n = std::min<uint64_t>(values.size() - from, bytes - at);
    CUDA(cudaMemcpy(dst + at, values.data() + from, n, cudaMemcpyHostToDevice));
    at += n;
    from = 0;
  }
}

void run(const std::vector<char>& values, uint64_t bytes) {
  const uint64_t count = bytes / 2;
  const zipccl::FrameOptions options;
  const uint64_t bound = zipccl::frame_bound(options, count);
  const Memory src(bytes), dst(bytes), size(sizeof(uint64_t)), status(sizeof(int32_t) * kAddends);
  std::vector<Memory> frames;
  for (int i = 0; i < kAddends; ++i) frames.emplace_back(bound);
  const auto job = [&](int i) { return zipccl::EncodeJob{src.get(), count, frames[i].get()}; };
  const zipccl::EncodeJob encode = job(0);
  const zipccl::DecodeJob decode = {frames[0].get(), bound, dst.get(), count};
  const Memory scratch(zipccl::cuda::encode_scratch_bytes(&encode, 1, options));
  const Memory decode_scratch(zipccl::cuda::decode_scratch_bytes());

  fill(values, 0, bytes, src.get());
  const double copy_s = median_seconds([&](cudaStream_t s) {
    copy_kernel<<<132 * 8, 256, 0, s>>>(src.get<uint4>(), dst.get<uint4>(), bytes / 16);
    CUDA(cudaGetLastError());
  });
  CUDA(cudaMemset(dst.get(), 0xA5, bytes));
  const double encode_s = median_seconds([&](cudaStream_t s) {
    check(zipccl::cuda::encode(&encode, 1, options, scratch.get(), size.get<uint64_t>(), s) == zipccl::Status::ok,
          "encode");
  });
  const double decode_s = median_seconds([&](cudaStream_t s) {
    check(zipccl::cuda::decode(&decode, 1, options.dtype, status.get<int32_t>(), decode_scratch.get(), s) ==
              zipccl::Status::ok,
          "decode");
  });
  uint64_t frame_bytes;
  std::vector<int32_t> host_status(kAddends);
  CUDA(cudaMemcpy(&frame_bytes, size.get(), sizeof(frame_bytes), cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(host_status.data(), status.get(), sizeof(int32_t), cudaMemcpyDeviceToHost));
  std::vector<char> a(bytes), b(bytes);
  CUDA(cudaMemcpy(a.data(), src.get(), bytes, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(b.data(), dst.get(), bytes, cudaMemcpyDeviceToHost));
  check(host_status[0] == 0 && a == b, "values come back");

  uint64_t all_frames = frame_bytes;
  std::vector<zipccl::SumInput> addends = {{frames[0].get(), bound, true}};
  for (int i = 1; i < kAddends; ++i) {
    fill(values, values.size() / kAddends / 2 * 2 * i, bytes, src.get());
    const zipccl::EncodeJob addend = job(i);
    check(zipccl::cuda::encode(&addend, 1, options, scratch.get(), size.get<uint64_t>(), nullptr) == zipccl::Status::ok,
          "encode");
    uint64_t n;
    CUDA(cudaMemcpy(&n, size.get(), sizeof(n), cudaMemcpyDeviceToHost));
    all_frames += n;
    addends.push_back({frames[i].get(), bound, true});
  }
  const double sum_s = median_seconds([&](cudaStream_t s) {
    check(zipccl::cuda::decode_sum(addends.data(), kAddends, count, {}, dst.get(), status.get<int32_t>(),
                                   decode_scratch.get(), s) == zipccl::Status::ok,
          "decode_sum");
  });
  CUDA(cudaMemcpy(host_status.data(), status.get(), sizeof(int32_t) * kAddends, cudaMemcpyDeviceToHost));
  check(std::count(host_status.begin(), host_status.end(), 0) == kAddends, "frames can be added");

  // What the copy kernel's rate allows: every tensor and every frame is read or written once.
  const double byte_s = copy_s / (2.0 * bytes);
  const double allowed_s = byte_s * (bytes + frame_bytes), sum_allowed_s = byte_s * (bytes + all_frames);
  std::printf(
      "%8.2f MiB  %6.3f bits  copy %6.1f GB/s  encode %6.1f (%3.0f %%)  decode %6.1f (%3.0f %%)  sum %6.1f (%3.0f "
      "%%)\n",
      bytes / 1048576.0, 8.0 * frame_bytes / count, bytes / copy_s * 1e-9, bytes / encode_s * 1e-9,
      100 * allowed_s / encode_s, bytes / decode_s * 1e-9, 100 * allowed_s / decode_s, kAddends * bytes / sum_s * 1e-9,
      100 * sum_allowed_s / sum_s);
}

}  // namespace

int main(int argc, char** argv) {
  check(argc > 1, "usage: codec_cuda FILE [MiB ...]");
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> values((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  check(!values.empty(), "FILE cannot be read");
  std::vector<double> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::atof(argv[i]));
  if (sizes.empty()) sizes = {1, 4, 16, 32, 64, 256};
  for (double mib : sizes) run(values, static_cast<uint64_t>(mib * 1048576) / 16 * 16);
  return 0;
}
