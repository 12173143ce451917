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

__device__ __forceinline__ void encode_share(const EncodeLaunch& launch, uint64_t work) {
  const int i = find_job(launch, work);
  const EncodeJob& job = launch.job[i];
  const uint64_t share = work - launch.first_block[i];
  const uint64_t bytes = job.count * dtype_bytes(launch.header.dtype);
  const uint64_t begin = share * kRawBlockBytes;
  uint8_t* frame = static_cast<uint8_t*>(job.dst);
  copy_by(kThreads, threadIdx.x, frame + kHeaderBytes + begin, static_cast<const uint8_t*>(job.src) + begin,
          share_of(bytes, begin));
  if (share != 0) return;
  const uint64_t frame_bytes = raw_frame_bytes(launch.header.dtype, job.count);
  for (uint64_t b = kHeaderBytes + bytes + threadIdx.x; b < frame_bytes; b += kThreads) frame[b] = 0;
  if (threadIdx.x == 0) {
    write_header(launch.header, job.count, frame_bytes, 0, frame);
    if (launch.frame_bytes != nullptr) launch.frame_bytes[i] = frame_bytes;
  }
}

__device__ __forceinline__ void decode_share(const DecodeLaunch& launch, uint64_t work) {
  const int i = find_job(launch, work);
  const DecodeJob& job = launch.job[i];
  const uint64_t begin = (work - launch.first_block[i]) * kRawBlockBytes;
  const uint8_t* frame = static_cast<const uint8_t*>(job.frame);
  __shared__ Status status;
  __syncthreads();  // the status before this one has been read
  if (threadIdx.x < kWarpSize) {
    const int lane = threadIdx.x;
    Status found = Status::truncated;
    if (job.available >= kHeaderBytes) {
      const FrameHeader h = load_header(frame);
      found = check_header(h, job.available, launch.dtype, job.count, Code::raw);
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
  copy_by(kThreads, threadIdx.x, static_cast<uint8_t*>(job.dst) + begin, frame + kHeaderBytes + begin,
          share_of(bytes, begin));
}

// Grids: any number of blocks.
__global__ void __launch_bounds__(kThreads) raw_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  for (uint64_t work = blockIdx.x; work < launch.first_block[launch.n]; work += gridDim.x) encode_share(launch, work);
}
__global__ void __launch_bounds__(kThreads) raw_decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  for (uint64_t work = blockIdx.x; work < launch.first_block[launch.n]; work += gridDim.x) decode_share(launch, work);
}

}  // namespace

cudaError_t launch_raw_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.processors.blocks_for(launch.first_block[launch.n]);
  raw_encode_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_raw_decode(const DecodeLaunch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.processors.blocks_for(launch.first_block[launch.n]);
  return launch_behind(raw_decode_kernel, launch.processors, blocks, kThreads, 0, stream, launch);
}

}  // namespace cuda
}  // namespace zipccl
