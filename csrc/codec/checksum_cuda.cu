// Payload checksum, and the header check ahead of every decode, which is where a checksum is verified.
//
// The checksum is a sum modulo 2^64, so its value does not depend on the order in which blocks add to it.
#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kAddThreads = 256;
constexpr uint64_t kAddBlockBytes = 64 << 10;  // least work worth a block
constexpr int kCheckThreads = 1024;
constexpr uint64_t kWordsPerVector = 4;

__device__ __forceinline__ uint64_t vector_sum(uint4 v, uint64_t word) {
  return static_cast<uint64_t>(v.x) * checksum_key(word) + static_cast<uint64_t>(v.y) * checksum_key(word + 1) +
         static_cast<uint64_t>(v.z) * checksum_key(word + 2) + static_cast<uint64_t>(v.w) * checksum_key(word + 3);
}

// A thread's part of the sum over a frame's payload: vectors first, first + step, ...
__device__ __forceinline__ uint64_t strided_sum(const uint8_t* frame, uint64_t frame_bytes, uint64_t first,
                                                uint64_t step) {
  const uint4* payload = reinterpret_cast<const uint4*>(frame + kHeaderBytes);
  const uint64_t n = (frame_bytes - kHeaderBytes) / sizeof(uint4);
  uint64_t sum = 0;
#pragma unroll 8
  for (uint64_t i = first; i < n; i += step) sum += vector_sum(payload[i], kWordsPerVector * i);
  return sum;
}

// The sum over a block, in thread 0.
template <int kThreads>
__device__ __forceinline__ uint64_t block_sum(uint64_t v) {
  __shared__ uint64_t sums[kThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  v = warp_sum(v);
  if (lane == 0) sums[warp] = v;
  __syncthreads();
  return warp == 0 ? warp_sum(lane < kThreads / kWarpSize ? sums[lane] : uint64_t{0}) : 0;
}

// Grid: (blocks, jobs). The block that adds last writes the header again, with the sum.
__global__ void __launch_bounds__(kAddThreads) add_checksum_kernel(const __grid_constant__ EncodeLaunch launch) {
  const EncodeJob& job = launch.job[blockIdx.y];
  unsigned long long* total = reinterpret_cast<unsigned long long*>(launch.checksums + kChecksumWords * blockIdx.y);
  const uint64_t frame_bytes = load_header(job.dst).frame_bytes;
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kAddThreads + threadIdx.x;
  const uint64_t sum = block_sum<kAddThreads>(strided_sum(static_cast<const uint8_t*>(job.dst), frame_bytes, thread,
                                                          static_cast<uint64_t>(gridDim.x) * kAddThreads));
  if (threadIdx.x != 0) return;
  atomicAdd(&total[0], sum);
  __threadfence();
  if (atomicAdd(&total[1], 1ull) + 1 < gridDim.x) return;
  __threadfence();
  write_header(launch.header, job.count, frame_bytes, atomicAdd(&total[0], 0ull), job.dst);
}

// One block per job or input. It says nothing about tables and tiles; the decoders check those where they use them.
template <typename Launch>
__global__ void __launch_bounds__(kCheckThreads) check_frames_kernel(const __grid_constant__ Launch launch) {
  const Received in = received(launch, blockIdx.x);
  Status status = readable(in, launch.dtype) ? Status::ok : Status::truncated;
  if (status == Status::ok && in.is_frame) {
    const FrameHeader h = load_header(in.data);
    status = check_header(h, in.available, launch.dtype, in.count);
    if (status == Status::ok && (h.flags & kFlagChecksum)) {
      const uint64_t sum = block_sum<kCheckThreads>(strided_sum(in.data, h.frame_bytes, threadIdx.x, kCheckThreads));
      if (sum != h.checksum) status = Status::bad_checksum;  // of interest in thread 0 alone
    }
  }
  if (threadIdx.x == 0) launch.status[blockIdx.x] = static_cast<int32_t>(status);
}

}  // namespace

cudaError_t launch_add_checksum(const EncodeLaunch& launch, uint64_t most_frame_bytes, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = processor_count(&processors);
  if (error != cudaSuccess) return error;
  const uint64_t wanted = at_least_one(ceil_div(most_frame_bytes, kAddBlockBytes)), most = 8 * processors;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most), static_cast<unsigned>(launch.n));
  add_checksum_kernel<<<grid, kAddThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_check_frames(const DecodeLaunch& launch, cudaStream_t stream) {
  check_frames_kernel<<<launch.n, kCheckThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_check_frames(const SumLaunch& launch, cudaStream_t stream) {
  check_frames_kernel<<<launch.n, kCheckThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zipccl
