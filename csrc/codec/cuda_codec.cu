// The CUDA half of codec.h: arguments, scratch, and batches of jobs. The kernels are in the other .cu files.
#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kClearThreads = 256;

__global__ void __launch_bounds__(kClearThreads) clear_kernel(uint64_t* words, uint64_t n) {
  let_next_begin();
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kClearThreads;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kClearThreads + threadIdx.x; i < n; i += step) words[i] = 0;
}

// In all jobs of a call: far beyond any device's memory, and a grid's limit of 2^31 even where a group takes 32 blocks.
constexpr uint64_t kMostBlocks = uint64_t{1} << 26;

bool aligned(const void* p, uint64_t a) { return reinterpret_cast<uintptr_t>(p) % a == 0; }

uint64_t alignment(DType dtype) {
  const uint64_t bytes = dtype_bytes(static_cast<uint8_t>(dtype));
  const bool complex = dtype == DType::c32 || dtype == DType::c64 || dtype == DType::c128;
  return complex ? bytes / 2 : bytes;  // complex values are aligned like their parts
}

bool valid_values(const void* p, uint64_t count, DType dtype) {
  return count == 0 || (p != nullptr && aligned(p, alignment(dtype)));
}

uint64_t encode_blocks(const FrameOptions& options, uint64_t count) {
  switch (effective_code(options)) {
    case Code::fast:
      return fast_encode_blocks(count);
    case Code::dense:
      return dense_encode_blocks(options.dtype, count);
    default:
      return raw_encode_blocks(count * dtype_bytes(static_cast<uint8_t>(options.dtype)));
  }
}

// Scratch of encode():
//   checksums   kChecksumWords per job, cleared    with checksum
//   of each launch, in codes fast and dense:
//     states    one per group, and one more; cleared in code fast
//     slots     slot_scratch()    if a frame of the call is packed
struct Scratch {
  uint64_t states, words;  // 64-bit words: where states begin, and the size of all
  bool packs = false;

  Scratch(const EncodeJob* jobs, int n, const FrameOptions& options) {
    states = words = options.checksum ? kChecksumWords * n : 0;  // even
    const Code code = effective_code(options);
    if (code == Code::raw) return;
    for (int i = 0; i < n; ++i) {
      packs |= code == Code::fast && fast_layout(options.layout, jobs[i].count) == FrameLayout::packed;
    }
    for (int first = 0; first < n; first += kJobsPerLaunch) {
      uint64_t blocks = 0, chunks = 0;
      for (int i = first; i < n && i < first + kJobsPerLaunch; ++i) {
        blocks += encode_blocks(options, jobs[i].count);
        chunks += chunks_of(fast_layout(options.layout, jobs[i].count), jobs[i].count);
      }
      words += packs ? align_up(blocks + 1, 2) + slot_scratch(blocks, chunks) : blocks + 1;
    }
  }
};

template <typename Job, typename Blocks>
uint64_t total_blocks(const Job* jobs, int n, Blocks blocks_of) {
  uint64_t blocks = 0;
  for (int i = 0; i < n; ++i) blocks += blocks_of(jobs[i].count);
  return blocks;
}

// Fills first_block and returns the number of blocks.
template <typename Launch, typename Blocks>
uint64_t number_blocks(Launch* launch, Blocks blocks_of) {
  uint64_t blocks = 0;
  for (int i = 0; i < launch->n; ++i) {
    launch->first_block[i] = blocks;
    blocks += blocks_of(launch->job[i].count);
  }
  launch->first_block[launch->n] = blocks;
  return blocks;
}

}  // namespace

cudaError_t launch_clear(uint64_t* words, uint64_t n, Processors processors, cudaStream_t stream) {
  const uint64_t blocks = processors.blocks_for(ceil_div(n, kClearThreads));
  clear_kernel<<<static_cast<unsigned>(blocks), kClearThreads, 0, stream>>>(words, n);
  return cudaGetLastError();
}

uint64_t encode_scratch_bytes(const EncodeJob* jobs, int n, const FrameOptions& options) {
  if (jobs == nullptr || n <= 0) return 0;
  return align_up(sizeof(uint64_t) * Scratch(jobs, n, options).words);
}

Status encode(const EncodeJob* jobs, int n, const FrameOptions& options, void* scratch, uint64_t* frame_bytes,
              void* stream, int max_sms) {
  if (n == 0) return Status::ok;
  if (jobs == nullptr || n < 0 || max_sms < 0) return Status::bad_argument;
  const auto blocks_of = [&](uint64_t count) { return encode_blocks(options, count); };
  uint64_t most_frame_bytes = 0;
  for (int i = 0; i < n; ++i) {
    const EncodeJob& job = jobs[i];
    const uint64_t bound = frame_bound(options, job.count);  // 0: invalid options or count
    if (bound == 0 || !valid_values(job.src, job.count, options.dtype)) return Status::bad_argument;
    if (job.dst == nullptr || !aligned(job.dst, kFrameAlign)) return Status::bad_argument;
    if (bound > most_frame_bytes) most_frame_bytes = bound;
  }
  if (total_blocks(jobs, n, blocks_of) > kMostBlocks) return Status::unsupported;
  const Scratch sizes(jobs, n, options);
  uint64_t* words = static_cast<uint64_t*>(scratch);
  if (sizes.words != 0 && (words == nullptr || !aligned(words, 16))) return Status::bad_argument;

  Processors processors;
  if (processors_of_device(max_sms, &processors) != cudaSuccess) return Status::device_error;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const Code code = effective_code(options);
  const uint64_t cleared = code == Code::dense || sizes.packs ? sizes.states : sizes.words;
  if (cleared != 0 && launch_clear(words, cleared, processors, cuda_stream) != cudaSuccess) return Status::device_error;
  const auto launch_encode = code == Code::fast    ? launch_fast_encode
                             : code == Code::dense ? launch_dense_encode
                                                   : launch_raw_encode;
  uint64_t* states = words + sizes.states;
  for (int first = 0; first < n; first += kJobsPerLaunch) {
    EncodeLaunch launch = {};
    launch.header = make_header(options, 0, 0, 0);
    launch.processors = processors;
    launch.n = n - first < kJobsPerLaunch ? n - first : kJobsPerLaunch;
    for (int i = 0; i < launch.n; ++i) launch.job[i] = jobs[first + i];
    launch.frame_bytes = frame_bytes == nullptr ? nullptr : frame_bytes + first;
    launch.checksums = options.checksum ? words + kChecksumWords * first : nullptr;
    launch.layout = options.layout;
    launch.states = states;
    const uint64_t blocks = number_blocks(&launch, blocks_of);
    states += blocks + 1;
    if (sizes.packs) {
      uint32_t chunks = 0;
      for (int i = 0; i < launch.n; ++i) {
        launch.slots.first_chunk[i] = chunks;
        chunks +=
            static_cast<uint32_t>(chunks_of(fast_layout(options.layout, launch.job[i].count), launch.job[i].count));
      }
      launch.slots.first_chunk[launch.n] = chunks;
      launch.slots.counts = reinterpret_cast<uint32_t*>(launch.states + align_up(blocks + 1, 2));
      launch.slots.groups = launch.slots.counts + chunks;
      states = launch.states + align_up(blocks + 1, 2) + slot_scratch(blocks, chunks);
      if (launch_plan_slots(launch, cuda_stream) != cudaSuccess) return Status::device_error;
    }
    if (launch_encode(launch, cuda_stream) != cudaSuccess) return Status::device_error;
    if (options.checksum && launch_add_checksum(launch, most_frame_bytes, cuda_stream) != cudaSuccess) {
      return Status::device_error;
    }
  }
  return Status::ok;
}

uint64_t decode_scratch_bytes() { return sizeof(uint64_t) * kMostSums; }

Status decode(const DecodeJob* jobs, int n, DType dtype, int32_t* device_status, void* scratch, void* stream,
              int max_sms, Code wanted) {
  if (n == 0) return Status::ok;
  const uint64_t value_bytes = dtype_bytes(static_cast<uint8_t>(dtype));
  if (jobs == nullptr || n < 0 || device_status == nullptr || value_bytes == 0 || max_sms < 0) {
    return Status::bad_argument;
  }
  if (scratch == nullptr || !aligned(scratch, 16)) return Status::bad_argument;
  const Code code = effective_code({dtype, wanted});  // decoders take raw frames, too
  const auto launch_decode = code == Code::fast    ? launch_fast_decode
                             : code == Code::dense ? launch_dense_decode
                                                   : launch_raw_decode;
  const auto blocks_of = [&](uint64_t count) {
    if (code == Code::fast) return fast_decode_blocks(count);
    return code == Code::dense ? dense_decode_blocks(dtype, count) : raw_decode_blocks(count * value_bytes);
  };
  for (int i = 0; i < n; ++i) {
    const DecodeJob& job = jobs[i];
    if (job.count > kMaxCount || !valid_values(job.dst, job.count, dtype)) return Status::bad_argument;
    if (job.frame == nullptr || !aligned(job.frame, kFrameAlign)) return Status::bad_argument;
  }
  if (total_blocks(jobs, n, blocks_of) > kMostBlocks) return Status::unsupported;

  Processors processors;
  if (processors_of_device(max_sms, &processors) != cudaSuccess) return Status::device_error;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  for (int first = 0; first < n; first += kJobsPerLaunch) {
    DecodeLaunch launch = {};
    launch.processors = processors;
    launch.dtype = static_cast<uint8_t>(dtype);
    launch.code = code;
    launch.status = device_status + first;
    launch.n = n - first < kJobsPerLaunch ? n - first : kJobsPerLaunch;
    uint64_t most_available = 0;
    for (int i = 0; i < launch.n; ++i) {
      launch.job[i] = jobs[first + i];
      if (jobs[first + i].available > most_available) most_available = jobs[first + i].available;
    }
    launch.sums = {static_cast<uint64_t*>(scratch), sums_per_job(launch.n, most_available)};
    const uint64_t blocks = number_blocks(&launch, blocks_of);
    if (launch_check_frames(launch, cuda_stream) != cudaSuccess) return Status::device_error;
    if (blocks != 0 && launch_decode(launch, cuda_stream) != cudaSuccess) {
      return Status::device_error;
    }
  }
  return Status::ok;
}

}  // namespace cuda
}  // namespace zipccl
