// Times the CUDA codec without torch, against a copy kernel in the same run:
//   codec_cuda FILE [MiB ...]        FILE: bf16 values, repeated to each size
// Device time of one call inside a CUDA graph, median of 30 replays after 5; the L2 cache is left to what the calls
// themselves do, so sizes below it are warm. GB/s count the tensor's bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <vector>

#include "codec/codec.h"

namespace {

void check(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}
#define CUDA(call) check((call) == cudaSuccess, #call)

__global__ void copy_kernel(const uint4* src, uint4* dst, uint64_t n) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
    dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
  }
  for (; i < n; i += step) dst[i] = src[i];
}

double median_seconds(const std::function<void(cudaStream_t)>& enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue(stream);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  std::vector<double> seconds;
  for (int i = 0; i < 35; ++i) {
    float ms = 0;
    CUDA(cudaEventRecord(begin, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(end, stream));
    CUDA(cudaEventSynchronize(end));
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 5) seconds.push_back(1e-3 * ms);
  }
  CUDA(cudaEventDestroy(begin));
  CUDA(cudaEventDestroy(end));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void run(const std::vector<char>& values, uint64_t bytes) {
  const uint64_t count = bytes / 2;
  const zipccl::FrameOptions options;
  const uint64_t bound = zipccl::frame_bound(options, count);
  char *src, *dst, *frame, *scratch;
  uint64_t* size;
  int32_t* status;
  CUDA(cudaMalloc(&src, bytes));
  CUDA(cudaMalloc(&dst, bytes));
  CUDA(cudaMalloc(&frame, bound));
  CUDA(cudaMalloc(&size, sizeof(*size)));
  CUDA(cudaMalloc(&status, sizeof(*status)));
  for (uint64_t at = 0; at < bytes; at += values.size()) {
    CUDA(cudaMemcpy(src + at, values.data(), std::min<uint64_t>(values.size(), bytes - at), cudaMemcpyHostToDevice));
  }
  const zipccl::EncodeJob encode = {src, count, frame};
  const zipccl::DecodeJob decode = {frame, bound, dst, count};
  CUDA(cudaMalloc(&scratch, zipccl::cuda::encode_scratch_bytes(&encode, 1, options)));

  const double copy_s = median_seconds([&](cudaStream_t s) {
    copy_kernel<<<132 * 8, 256, 0, s>>>(reinterpret_cast<uint4*>(src), reinterpret_cast<uint4*>(dst), bytes / 16);
    CUDA(cudaGetLastError());
  });
  CUDA(cudaMemset(dst, 0xA5, bytes));
  const double encode_s = median_seconds([&](cudaStream_t s) {
    check(zipccl::cuda::encode(&encode, 1, options, scratch, size, s) == zipccl::Status::ok, "encode");
  });
  const double decode_s = median_seconds([&](cudaStream_t s) {
    check(zipccl::cuda::decode(&decode, 1, options.dtype, status, s) == zipccl::Status::ok, "decode");
  });
  uint64_t frame_bytes;
  int32_t host_status;
  CUDA(cudaMemcpy(&frame_bytes, size, sizeof(frame_bytes), cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(&host_status, status, sizeof(host_status), cudaMemcpyDeviceToHost));
  std::vector<char> a(bytes), b(bytes);
  CUDA(cudaMemcpy(a.data(), src, bytes, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(b.data(), dst, bytes, cudaMemcpyDeviceToHost));
  // What the copy kernel's rate allows: each side reads or writes the tensor and the frame once.
  const double allowed_s = copy_s * (bytes + frame_bytes) / (2.0 * bytes);
  std::printf("%8.2f MiB  %6.3f bits  copy %7.1f GB/s  encode %7.1f GB/s (%3.0f %%)  decode %7.1f GB/s (%3.0f %%)\n",
              bytes / 1048576.0, 8.0 * frame_bytes / count, bytes / copy_s * 1e-9, bytes / encode_s * 1e-9,
              100 * allowed_s / encode_s, bytes / decode_s * 1e-9, 100 * allowed_s / decode_s);
  check(host_status == 0 && a == b, "values come back");
  for (void* p : {static_cast<void*>(src), static_cast<void*>(dst), static_cast<void*>(frame),
                  static_cast<void*>(scratch), static_cast<void*>(size), static_cast<void*>(status)}) {
    CUDA(cudaFree(p));
  }
}

}  // namespace

int main(int argc, char** argv) {
  check(argc > 1, "usage: codec_cuda FILE [MiB ...]");
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> values((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  check(!values.empty(), "FILE cannot be read");
  std::vector<double> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::atof(argv[i]));
  if (sizes.empty()) sizes = {1, 4, 16, 64, 256};
  for (double mib : sizes) run(values, static_cast<uint64_t>(mib * 1048576) / 16 * 16);
  return 0;
}
