// Tensor bytes <-> frame.
//
// INTRODUCTION
//   encode() turns `count` values of one dtype into a frame (docs/format.md); decode() gives back every bit. A frame
//   carries its dtype and count, so a decoder needs nothing beside it. The CPU functions are the specification: the
//   CUDA functions write the same bytes for the same input and options.
//
// CONTRACTS
//   - Memory is the caller's. encode() never writes outside [dst, dst + capacity), decode() never outside
//     [dst, dst + dst_bytes) and never reads outside [frame, frame + available), whatever the frame holds.
//   - src and dst of values must be aligned to their dtype; frames to 16 bytes on CUDA, to nothing on the CPU.
//   - Frames are deterministic: they depend on the input and FrameOptions alone, not on device, ISA, threads or timing.
//   - Bytes a frame does not use (padding, holes) are zero.
//   - Nothing here allocates (decode_sum() on the CPU: a record per input and room per thread), throws, or keeps state;
//   every function may be called from many threads.
//
// No torch in this layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/status.h"
#include "format/dense.h"
#include "format/frame.h"
#include "format/tile.h"

namespace zipccl {

struct FrameOptions {
  DType dtype = DType::bf16;
  Code code = Code::fast;                     // dtypes a code does not cover travel as Code::raw
  FrameLayout layout = FrameLayout::compact;  // large ones become packed: effective_layout()
  bool checksum = false;
};

// ---- Bounds ---------------------------------------------------------------------------------------------------

// The code encode() will really use: Code::fast covers bf16, of anything else it makes Code::raw.
Code effective_code(const FrameOptions& options);

// The layout encode() will really use: packed instead of compact for large frames of Code::fast.
FrameLayout effective_layout(const FrameOptions& options, uint64_t count);

// Most bytes encode() can write for `count` values. 0 if the arguments are invalid (see Status::bad_argument).
// Never more than count * dtype_bytes * (1 + 1/512) + 192 (1/256 for dense frames of one-byte values; 576 instead of
// 192 for packed fast ones), but for split fast frames, whose units keep their places whatever the tiles hold:
// about 1.19 times the values at worst.
uint64_t frame_bound(const FrameOptions& options, uint64_t count);

// Bytes of the part whose size does not depend on the data: everything for Code::raw, header, tables and tile units for
// split frames, header and tables for all others (and the place of a last tile that is not full, if packed).
uint64_t static_bytes(const FrameOptions& options, uint64_t count);

// ---- Header ---------------------------------------------------------------------------------------------------

struct FrameInfo {
  DType dtype;
  Code code;
  FrameLayout layout;
  bool checksum;
  uint64_t count;
  uint64_t raw_bytes;    // count * dtype_bytes
  uint64_t frame_bytes;  // from the header; checked against `available` only by decode()
};

// Checks and reads the header of a frame in host memory. `available`: readable bytes at `frame`.
Status read_header(const void* frame, uint64_t available, FrameInfo* info);

// A checked header for a frame of known size.
FrameHeader make_header(const FrameOptions& options, uint64_t count, uint64_t frame_bytes, uint64_t checksum);

// ---- CPU ------------------------------------------------------------------------------------------------------

enum class Isa { best, scalar, avx2, avx512 };

// The instruction set Isa::best stands for: the last of those that this processor has, or the one that the environment
// names by ZIPCCL_ISA=scalar, avx2 or avx512, where it has that.
Isa best_isa();
bool has_isa(Isa isa);

// Threads that a call may use. run() calls work(argument) on the calling thread and, at the same time or not, up to n -
// 1 times more on others, and returns when all calls have ended; null: no others. Results do not depend on it.
struct Threads {
  int n = 1;
  void (*run)(int n, void (*work)(void*), void* argument) = nullptr;
};

// Encodes src[count] into dst. *written gets the frame's size.
// Status: bad_argument, no_room (capacity below frame_bound() is allowed and fails only when really too small),
// unsupported (an ISA this processor lacks).
Status encode(const void* src, uint64_t count, const FrameOptions& options, void* dst, uint64_t capacity,
              uint64_t* written, Isa isa = Isa::best, const Threads& threads = {});

// Decodes a frame into dst. `available` may exceed the frame's size (padded collectives); fewer is Status::truncated.
// The frame must hold exactly (dtype, count), else Status::unexpected and dst is untouched. On any other error dst is
// partly written and must be discarded.
Status decode(const void* frame, uint64_t available, DType dtype, uint64_t count, void* dst, Isa isa = Isa::best,
              const Threads& threads = {});

// Sums what n ranks sent (ZipCCL section 4.2, reduce-scatter): for every value i
//   dst[i] = round((scale * x_0[i] + scale * x_1[i] + ... ) / divisor)
// in fp32, in the order of the inputs, each product and sum rounded to nearest (no fused multiply-add), and rounded
// once more to the output's dtype. NaN gives NaN.
struct SumInput {
  const void* data;    // a frame, or `count` values as they are, aligned to their dtype
  uint64_t available;  // readable bytes
  bool is_frame;
};

struct SumOptions {
  DType in = DType::bf16;   // bf16, f16 or f32
  DType out = DType::bf16;  // bf16, f16 or f32
  float scale = 1;
  float divisor = 1;
};

// Whether both dtypes are ones that decode_sum() takes.
bool can_sum(DType in, DType out);

// *bad gets the index of the input that was at fault, -1 if none was.
Status decode_sum(const SumInput* inputs, int n, uint64_t count, const SumOptions& options, void* dst, int* bad,
                  Isa isa = Isa::best, const Threads& threads = {});

// Checksum of format/frame.h over `bytes` bytes (a multiple of 4).
uint64_t payload_checksum(const void* payload, uint64_t bytes);

// ---- CUDA -----------------------------------------------------------------------------------------------------
// Asynchronous on `stream` (a cudaStream_t). Device errors inside a frame are not returned but written to device
// memory: *device_status (one int32 per job, zeroed by the call) holds a Status when the stream has passed the call.
// max_sms: how many multiprocessors the kernels may use at a time; 0: all.

struct EncodeJob {
  const void* src;  // device, aligned to 16 bytes for full speed, to its dtype at least
  uint64_t count;
  void* dst;  // device, 16-byte aligned, at least frame_bound() bytes
};

struct DecodeJob {
  const void* frame;   // device, 16-byte aligned
  uint64_t available;  // readable bytes at frame
  void* dst;           // device, aligned to its dtype
  uint64_t count;      // values the frame must hold
};

#ifdef ZIPCCL_WITH_CUDA
namespace cuda {

// Scratch for encode() of these jobs: device memory, 16-byte aligned, need not be cleared.
uint64_t encode_scratch_bytes(const EncodeJob* jobs, int n, const FrameOptions& options);

// Encodes n tensors of one dtype. The size of frame i is header.frame_bytes of jobs[i].dst, and, when frame_bytes is
// not null, also frame_bytes[i] (device memory).
Status encode(const EncodeJob* jobs, int n, const FrameOptions& options, void* scratch, uint64_t* frame_bytes,
              void* stream, int max_sms = 0);

// Scratch for decode() and decode_sum(), whatever they are given: device memory, 16-byte aligned, need not be cleared.
uint64_t decode_scratch_bytes();

// Decodes n frames of one dtype, in the given code or raw; other ones are Status::unexpected. device_status: int32 [n]
// in device memory (or mapped host memory).
Status decode(const DecodeJob* jobs, int n, DType dtype, int32_t* device_status, void* scratch, void* stream,
              int max_sms = 0, Code code = Code::fast);

// decode_sum() on device memory, at most 240 inputs (more: Status::unsupported) in one launch. Dense frames have to be
// decoded first. device_status: int32 [n], one per input.
Status decode_sum(const SumInput* inputs, int n, uint64_t count, const SumOptions& options, void* dst,
                  int32_t* device_status, void* scratch, void* stream, int max_sms = 0);

}  // namespace cuda
#endif

}  // namespace zipccl
