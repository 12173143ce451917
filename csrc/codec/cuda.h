// Internals of the CUDA codec, shared by its .cu files and by nobody else. The interface is codec.h.
//
// cuda_codec.cu      arguments, scratch, batches of jobs
// fast_encode.cu, fast_encode_many.cu, fast_encode_direct.cu, fast_decode.cu   Code::fast
// plan_slots.cu      where units of packed frames go, ahead of encoding
// sum_cuda.cu        decode_sum(); sum_tile.cuh: its inner step; sum_pipeline.cuh: how tiles reach it
// dense_encode.cu, dense_decode.cu   Code::dense
// raw_cuda.cu        Code::raw
// checksum_cuda.cu   payload checksum; header check ahead of every decode
// cuda_device.cuh    device functions they share
// fast_encode.cuh, fast_encode_group.cuh, fast_decode.cuh   those of Code::fast: tiles and groups
// dense_elements.cuh   those of Code::dense
// team.cuh           warps that share a group
// hopper.cuh         what only sm_90 and later have
//
// Jobs travel by value in kernel parameters, so a call copies nothing to the device and can be captured in a graph. A
// launch takes up to kJobsPerLaunch of them; job i owns blocks [first_block[i], first_block[i + 1]).
#pragma once

#include <cuda_runtime.h>

#include "codec/codec.h"

namespace zipccl {
namespace cuda {

constexpr int kJobsPerLaunch = 64;
constexpr uint64_t kRawBlockBytes = 64 << 10;  // bytes of a tensor that one block of a raw kernel copies

// Multiprocessors that a launch may use: all of them, or fewer, and then its kernels have no more blocks than that and
// do not overlap. Blocks of work are then shared out to the kernel's: each block takes those blockIdx.x, blockIdx.x +
// gridDim.x, ...
struct Processors {
  int n;
  bool limited;

  uint64_t blocks_for(uint64_t work) const {
    return limited && work > static_cast<uint64_t>(n) ? static_cast<uint64_t>(n) : work;
  }
};

// What plan_slots.cu finds out about the full tiles of a launch's packed frames that are not constant, but maybe held.
// In scratch, counts at a multiple of 16 bytes.
struct SlotPlan {
  uint32_t* counts;  // of each chunk: some groups of one job; null: no frame of the launch is packed
  // For each block: how many such tiles there are in its chunk before its group in the lower bits, kLookedAt if
  // constant tiles of its group have no place, and how many such tiles are among the first 16 of its group from bit
  // kHalfShift on.
  uint32_t* groups;
  uint32_t first_chunk[kJobsPerLaunch + 1];  // of each job; multiples of 4, so that a load takes 4 counts
};
constexpr uint32_t kHalfShift = 27, kLookedAt = 1u << 26;

// Groups in a chunk of a packed job: few enough to share the work well, and enough for a job to have few chunks, as
// every encoding block looks at all of its job's.
constexpr uint64_t kLeastChunkGroups = 8, kMostChunks = 1024;
ZIPCCL_HD uint64_t chunk_groups(uint64_t count) {
  uint64_t n = kLeastChunkGroups;
  while (n * kMostChunks < group_count(count)) n *= 2;
  return n;
}
inline uint64_t chunks_of(FrameLayout layout, uint64_t count) {
  return layout == FrameLayout::packed ? align_up(ceil_div(group_count(count), chunk_groups(count)), 4) : 0;
}
// In 64-bit words.
inline uint64_t slot_scratch(uint64_t blocks, uint64_t chunks) { return align_up(ceil_div(blocks + chunks, 2), 2); }

struct EncodeLaunch {
  FrameHeader header;  // what the frames have in common: all but count, frame_bytes, checksum, header_check, and, in
                       // code fast, flags of the layout
  FrameLayout layout;  // as asked for; fast_layout() has a job's
  SlotPlan slots;
  uint64_t* frame_bytes;  // per job; may be null
  uint64_t* checksums;    // Checksum [n], cleared; null without checksum
  uint64_t* states;       // fast: one per group, then the number of the next group; cleared. fast_encode_group.cuh
                          // dense: sizes of groups, not cleared
  Processors processors;
  int n;
  uint64_t first_block[kJobsPerLaunch + 1];
  EncodeJob job[kJobsPerLaunch];
};

// Checksums of received frames are verified in two steps: blocks of launch_check_frames() add up a frame's words, each
// its share, and the decoder adds up theirs: Sums::of[sums.per_job * i + block]. Nothing has to be cleared.
struct Sums {
  uint64_t* of;
  uint32_t per_job;
};
constexpr uint32_t kMostSums = 1024;

struct DecodeLaunch {
  uint8_t dtype;
  Code code;  // of the frames that are not raw
  Processors processors;
  int32_t* status;  // per job
  Sums sums;
  int n;
  uint64_t first_block[kJobsPerLaunch + 1];
  DecodeJob job[kJobsPerLaunch];
};

// decode_sum() takes no more inputs: they have to fit one launch, as nothing holds fp32 sums between two.
constexpr int kMostSumInputs = 240;

struct SumLaunch {
  uint8_t dtype;  // of the inputs
  uint8_t out;
  Processors processors;
  float scale;
  float divisor;
  float factor;  // applied after it; one of the two is 1
  void* dst;
  uint64_t count;
  int32_t* status;  // per input
  Sums sums;
  int n;
  uint32_t is_frame[(kMostSumInputs + 31) / 32];
  const void* data[kMostSumInputs];
  uint64_t available[kMostSumInputs];
};

static_assert(sizeof(EncodeLaunch) <= 4096 && sizeof(DecodeLaunch) <= 4096 && sizeof(SumLaunch) <= 4096,
              "kernel parameters end at 4 KiB");

// 64-bit words of EncodeLaunch::checksums per job: the sum, and how many blocks have added to it.
constexpr uint64_t kChecksumWords = 2;

// Each returns the launch's error. Jobs of a launch have at least one block in all unless stated otherwise.
// Clears scratch; the kernel launched behind it may begin at once, see launch_behind().
cudaError_t launch_clear(uint64_t* words, uint64_t n, Processors processors, cudaStream_t stream);
cudaError_t launch_fast_encode(const EncodeLaunch& launch, cudaStream_t stream);
cudaError_t launch_fast_encode_many(const EncodeLaunch& launch, cudaStream_t stream);
cudaError_t launch_fast_encode_direct(const EncodeLaunch& launch, cudaStream_t stream);  // no compact frames
// Fills launch.slots, and clears the states; the kernel launched behind it may begin at once.
cudaError_t launch_plan_slots(const EncodeLaunch& launch, cudaStream_t stream);
cudaError_t launch_dense_encode(const EncodeLaunch& launch, cudaStream_t stream);
cudaError_t launch_raw_encode(const EncodeLaunch& launch, cudaStream_t stream);
// Adds the checksum to frames that are complete but for it.
cudaError_t launch_add_checksum(const EncodeLaunch& launch, uint64_t most_frame_bytes, cudaStream_t stream);

// Sets status of every job or input: ok, or what is wrong with the header; and sums of the frames that have a checksum.
// Needs no blocks in first_block. The decoder launched behind it may begin at once.
cudaError_t launch_check_frames(const DecodeLaunch& launch, cudaStream_t stream);
cudaError_t launch_check_frames(const SumLaunch& launch, cudaStream_t stream);
// Decode the jobs whose header and checksum are in order: bf16 in code fast, any dtype in code dense, any dtype; raw
// frames every one of them. Errors go to status.
cudaError_t launch_fast_decode(const DecodeLaunch& launch, cudaStream_t stream);
cudaError_t launch_dense_decode(const DecodeLaunch& launch, cudaStream_t stream);
cudaError_t launch_raw_decode(const DecodeLaunch& launch, cudaStream_t stream);

// Blocks of a job, for first_block. A job without values still needs one block to be encoded: it has a header.
inline uint64_t at_least_one(uint64_t n) { return n == 0 ? 1 : n; }
inline uint64_t fast_encode_blocks(uint64_t count) { return at_least_one(group_count(count)); }
inline uint64_t fast_decode_blocks(uint64_t count) { return group_count(count); }
inline uint64_t dense_encode_blocks(DType dtype, uint64_t count) {
  return at_least_one(group_count(dense::element_count(dtype, count)));
}
inline uint64_t dense_decode_blocks(DType dtype, uint64_t count) {
  return group_count(dense::element_count(dtype, count));
}
inline uint64_t raw_encode_blocks(uint64_t bytes) { return at_least_one(ceil_div(bytes, kRawBlockBytes)); }
inline uint64_t raw_decode_blocks(uint64_t bytes) { return ceil_div(bytes, kRawBlockBytes); }

// At most `most` multiprocessors of the current device; 0: all.
inline cudaError_t processors_of_device(int most, Processors* processors) {
  int device = 0, n = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
  const bool limited = most > 0 && most < n;
  *processors = {limited ? most : n, limited};
  return error;
}

// Shares of a frame of the launch's, for Sums::per_job.
inline uint32_t sums_per_job(int n, uint64_t most_available) {
  constexpr uint64_t kShareBytes = 64 << 10;  // least work worth a block
  const uint64_t wanted = at_least_one(ceil_div(most_available, kShareBytes)), most = kMostSums / n;
  return static_cast<uint32_t>(wanted < most ? wanted : most);
}

// Whether what this device runs was compiled for an architecture with programmatic dependent launches.
inline bool has_hopper_launches() {
#if defined(__CUDA_ARCH_LIST__) && CUDART_VERSION >= 12030
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) return false;
  for (int arch : kArchs) {
    if (arch >= 900 && arch <= 100 * major + 10 * minor) return true;
  }
#endif
  return false;
}

// Launches a kernel that begins when every block of the one before it in the stream has called let_next_begin(), so
// that their latencies overlap, unless processors are limited. It calls wait_for_previous() before it uses what that
// one writes, and before it ends.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_behind(void (*kernel)(Parameters...), Processors processors, uint64_t blocks, int threads,
                          size_t shared, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = processors.limited || !has_hopper_launches() ? 0 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace cuda
}  // namespace zipccl
