// Code::raw: the tensor's bytes behind the header, padded with zeros.
#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint64_t share_of(uint64_t bytes, uint64_t begin) {
  const uint64_t left = bytes - begin;
  return left < kRawBlockBytes ? left : kRawBlockBytes;
}

__global__ void __launch_bounds__(kThreads) raw_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  const int i = find_job(launch, blockIdx.x);
  const EncodeJob& job = launch.job[i];
  const uint64_t block = blockIdx.x - launch.first_block[i];
  const uint64_t bytes = job.count * dtype_bytes(launch.header.dtype);
  const uint64_t begin = block * kRawBlockBytes;
  uint8_t* frame = static_cast<uint8_t*>(job.dst);
  block_copy(frame + kHeaderBytes + begin, static_cast<const uint8_t*>(job.src) + begin, share_of(bytes, begin));
  if (block != 0) return;
  const uint64_t frame_bytes = raw_frame_bytes(launch.header.dtype, job.count);
  for (uint64_t b = kHeaderBytes + bytes + threadIdx.x; b < frame_bytes; b += kThreads) frame[b] = 0;
  if (threadIdx.x == 0) {
    write_header(launch.header, job.count, frame_bytes, 0, frame);
    if (launch.frame_bytes != nullptr) launch.frame_bytes[i] = frame_bytes;
  }
}

__global__ void __launch_bounds__(kThreads) raw_decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  const int i = find_job(launch, blockIdx.x);
  const DecodeJob& job = launch.job[i];
  const uint64_t begin = (blockIdx.x - launch.first_block[i]) * kRawBlockBytes;
  const uint8_t* frame = static_cast<const uint8_t*>(job.frame);
  __shared__ Status status;
  if (threadIdx.x < kWarpSize) {
    const int lane = threadIdx.x;
    Status found = Status::truncated;
    if (job.available >= kHeaderBytes) {
      const FrameHeader h = load_header(frame);
      found = check_header(h, job.available, launch.dtype, job.count);
      if (found == Status::ok && (h.flags & kFlagChecksum)) {
        found = verify_checksum(launch.sums, i, h, lane);
        if (found != Status::ok && lane == 0) report(launch.status + i, found);
      }
    }
    wait_for_previous();
    if (lane == 0) status = found;
  }
  __syncthreads();
  if (status != Status::ok) return;
  const uint64_t bytes = job.count * dtype_bytes(launch.dtype);
  block_copy(static_cast<uint8_t*>(job.dst) + begin, frame + kHeaderBytes + begin, share_of(bytes, begin));
}

}  // namespace

cudaError_t launch_raw_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  raw_encode_kernel<<<static_cast<unsigned>(launch.first_block[launch.n]), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_raw_decode(const DecodeLaunch& launch, cudaStream_t stream) {
  return launch_behind(raw_decode_kernel, launch.first_block[launch.n], 1, kThreads, 0, stream, launch);
}

}  // namespace cuda
}  // namespace zipccl
