// Payload checksum, and the check of headers ahead of every decode, which adds up the checksums of what came in.
//
// The checksum is a sum modulo 2^64, so its value does not depend on the order in which blocks add to it.
#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kAddBlockBytes = 64 << 10;  // least work worth a block
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
__device__ __forceinline__ uint64_t block_sum(uint64_t v) {
  __shared__ uint64_t sums[kThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  v = warp_sum(v);
  __syncthreads();  // the sums before these have been read
  if (lane == 0) sums[warp] = v;
  __syncthreads();
  return warp == 0 ? warp_sum(lane < kThreads / kWarpSize ? sums[lane] : uint64_t{0}) : 0;
}

// Share `share` of `shares` of job i. The one that adds last writes the header again, with the sum.
__device__ __forceinline__ void add_checksum(const EncodeLaunch& launch, int i, uint32_t share, uint32_t shares) {
  const EncodeJob& job = launch.job[i];
  unsigned long long* total = reinterpret_cast<unsigned long long*>(launch.checksums + kChecksumWords * i);
  const FrameHeader header = load_header(job.dst);
  const uint64_t sum = block_sum(strided_sum(static_cast<const uint8_t*>(job.dst), header.frame_bytes,
                                             uint64_t{share} * kThreads + threadIdx.x, uint64_t{shares} * kThreads));
  if (threadIdx.x != 0) return;
  atomicAdd(&total[0], sum);
  __threadfence();
  if (atomicAdd(&total[1], 1ull) + 1 < shares) return;
  __threadfence();
  write_header(header, job.count, header.frame_bytes, atomicAdd(&total[0], 0ull), job.dst);
}

// Of job or input i. It says nothing about tables and tiles; the decoders check those where they use them.
template <typename Launch>
__device__ __forceinline__ void check_frame(const Launch& launch, int i, uint32_t share) {
  const Received in = received(launch, i);
  Status status = readable(in, launch.dtype) ? Status::ok : Status::truncated;
  FrameHeader h = {};
  if (status == Status::ok && in.is_frame) {
    h = load_header(in.data);
    const bool has_checksum = (h.flags & kFlagChecksum) != 0;
    if (!has_checksum && share != 0) return;
    status = check_header(h, in.available, launch.dtype, in.count, in.code);
    if (status == Status::ok && has_checksum) {
      const uint32_t shares = launch.sums.per_job;
      const uint64_t sum = block_sum(
          strided_sum(in.data, h.frame_bytes, uint64_t{share} * kThreads + threadIdx.x, uint64_t{shares} * kThreads));
      if (threadIdx.x == 0) launch.sums.of[static_cast<uint64_t>(i) * shares + share] = sum;
    }
    // A frame without values has no decoder to look at it. Nothing follows its header, so its checksum is 0.
    if (status == Status::ok && in.count == 0) {
      if (h.checksum != 0) status = Status::bad_checksum;
      if (h.frame_bytes != kHeaderBytes) status = Status::bad_table;
    }
  }
  if (threadIdx.x == 0 && share == 0) launch.status[i] = static_cast<int32_t>(status);
}

// Grids: any number of blocks, for the shares of one job after those of another.
__global__ void __launch_bounds__(kThreads)
    add_checksum_kernel(const __grid_constant__ EncodeLaunch launch, uint32_t shares) {
  for (uint32_t work = blockIdx.x; work < shares * launch.n; work += gridDim.x) {
    add_checksum(launch, work / shares, work % shares, shares);
  }
}
template <typename Launch>
__global__ void __launch_bounds__(kThreads) check_frames_kernel(const __grid_constant__ Launch launch) {
  let_next_begin();
  const uint32_t shares = launch.sums.per_job;
  for (uint32_t work = blockIdx.x; work < shares * launch.n; work += gridDim.x) {
    check_frame(launch, work / shares, work % shares);
  }
}

template <typename Launch>
cudaError_t check(const Launch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.processors.blocks_for(uint64_t{launch.sums.per_job} * launch.n);
  check_frames_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_add_checksum(const EncodeLaunch& launch, uint64_t most_frame_bytes, cudaStream_t stream) {
  const uint64_t wanted = at_least_one(ceil_div(most_frame_bytes, kAddBlockBytes)), most = 8 * launch.processors.n;
  const uint32_t shares = static_cast<uint32_t>(wanted < most ? wanted : most);
  const uint64_t blocks = launch.processors.blocks_for(uint64_t{shares} * launch.n);
  add_checksum_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(launch, shares);
  return cudaGetLastError();
}

cudaError_t launch_check_frames(const DecodeLaunch& launch, cudaStream_t stream) { return check(launch, stream); }
cudaError_t launch_check_frames(const SumLaunch& launch, cudaStream_t stream) { return check(launch, stream); }

}  // namespace cuda
}  // namespace zipccl
