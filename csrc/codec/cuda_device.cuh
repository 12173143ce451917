// Device functions shared by the kernels of the CUDA codec.
#pragma once

#include "codec/cuda.h"

namespace zipccl {
namespace cuda {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;

// Bits of a where mask is set, of b elsewhere. From the formula the compiler makes two instructions.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}

// ~(a | b | c), one instruction.
__device__ __forceinline__ uint32_t none_of(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x01;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Hides where a value comes from, so that the compiler keeps it in a register instead of computing it again, or, other
// way round, keeps nothing in registers that follows from it where it is not hidden.
template <typename T>
__device__ __forceinline__ T opaque(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// __byte_perm() for a selector that is known to have no bit 3 in any nibble, which that one clears first.
__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t v) {
#pragma unroll
  for (int d = 1; d < kWarpSize; d *= 2) {
    // The instruction itself says whether there is such a lane.
    asm volatile(
        "{ .reg .u32 below; .reg .pred exists;\n"
        "shfl.sync.up.b32 below|exists, %0, %1, 0, 0xFFFFFFFF;\n"
        "@exists add.u32 %0, %0, below; }"
        : "+r"(v)
        : "r"(d));
  }
  return v;
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t v) {
#pragma unroll
  for (int d = kWarpSize / 2; d > 0; d /= 2) v += __shfl_xor_sync(kFullWarp, v, d);
  return v;
}

__device__ __forceinline__ uint32_t warp_sum(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kFullWarp, v);
#else
#pragma unroll
  for (int d = kWarpSize / 2; d > 0; d /= 2) v += __shfl_xor_sync(kFullWarp, v, d);
  return v;
#endif
}

__device__ __forceinline__ bool is_aligned(const void* p, uint64_t a) {
  return reinterpret_cast<uintptr_t>(p) % a == 0;
}

// The job that owns a block: the last one whose first block is not behind it. Jobs without blocks own none.
template <typename Launch>
__device__ __forceinline__ int find_job(const Launch& launch, uint64_t block) {
  int lo = 0, hi = launch.n;
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    if (launch.first_block[mid] <= block) {
      lo = mid;
    } else {
      hi = mid;
    }
  }
  return lo;
}

// Bits of a lane's 32 values that lie below m: 4 runs of 8 values, 256 apart (tile.h, plane order).
__device__ __forceinline__ uint32_t valid_values(uint32_t m, int lane) {
  uint32_t valid = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int left = static_cast<int>(m) - 256 * k - 8 * lane;
    const uint32_t n = left < 0 ? 0 : (left > 8 ? 8 : left);
    valid |= ((1u << n) - 1u) << (8 * k);
  }
  return valid;
}

// ---- Dependent launches: launch_behind() in cuda.h --------------------------------------------------------------

// In the kernel before: the one behind may begin.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// In the kernel behind: waits until the one before has ended and its writes are seen.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Copies by many threads -----------------------------------------------------------------------------------

template <typename T>
__device__ void copy_as(uint32_t threads, uint32_t thread, uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  T* d = reinterpret_cast<T*>(dst);
  const T* s = reinterpret_cast<const T*>(src);
  const uint64_t n = bytes / sizeof(T);
  constexpr int kUnroll = 4;
  uint64_t i = thread;
  for (; i + (kUnroll - 1) * threads < n; i += kUnroll * threads) {
    T v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = s[i + u * threads];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) d[i + u * threads] = v[u];
  }
  for (; i < n; i += threads) d[i] = s[i];
  const uint64_t done = n * sizeof(T);
  for (uint64_t b = done + thread; b < bytes; b += threads) dst[b] = src[b];
}

// By the widest access that both addresses allow.
__device__ inline void copy_by(uint32_t threads, uint32_t thread, uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src);
  if (bits % 16 == 0) {
    copy_as<uint4>(threads, thread, dst, src, bytes);
  } else if (bits % 8 == 0) {
    copy_as<uint2>(threads, thread, dst, src, bytes);
  } else if (bits % 4 == 0) {
    copy_as<uint32_t>(threads, thread, dst, src, bytes);
  } else if (bits % 2 == 0) {
    copy_as<uint16_t>(threads, thread, dst, src, bytes);
  } else {
    copy_as<uint8_t>(threads, thread, dst, src, bytes);
  }
}

// ---- Header ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t raw_frame_bytes(uint8_t dtype, uint64_t count) {
  return align_up(kHeaderBytes + count * dtype_bytes(dtype));
}

// Frames are 16-byte aligned.
__device__ __forceinline__ FrameHeader load_header(const void* frame) {
  uint4 words[4];
  const uint4* from = reinterpret_cast<const uint4*>(frame);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = from[i];
  FrameHeader h;
  memcpy(&h, words, kHeaderBytes);
  return h;
}

__device__ __forceinline__ void write_header(FrameHeader h, uint64_t count, uint64_t frame_bytes, uint64_t checksum,
                                             void* frame) {
  h.count = count;
  h.frame_bytes = frame_bytes;
  h.checksum = checksum;
  h.header_check = header_check(h);
  uint4 words[4];
  memcpy(words, &h, kHeaderBytes);
  uint4* to = reinterpret_cast<uint4*>(frame);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = words[i];
}

// The checks of read_header() and decode() in frame.cpp, in their order, for frames of code raw or the given one.
__device__ inline Status check_header(const FrameHeader& h, uint64_t available, uint8_t dtype, uint64_t count,
                                      Code code = Code::fast) {
  if (h.magic != kFrameMagic) return Status::bad_magic;
  if (h.version != kFrameVersion) return Status::bad_version;
  if (h.header_check != header_check(h)) return Status::bad_header;
  if (h.dtype >= kDTypeCount || h.code >= kCodeCount || h.count > kMaxCount) return Status::bad_header;
  uint32_t reserved = 0;
#pragma unroll
  for (int i = 0; i < 28; ++i) reserved |= h.reserved[i];
  if (!known_flags(h.flags) || reserved != 0) return Status::bad_header;
  if (!(h.flags & kFlagChecksum) && h.checksum != 0) return Status::bad_header;
  if (h.frame_bytes % kFrameAlign != 0) return Status::bad_header;
  if (h.code == static_cast<uint8_t>(Code::raw)) {
    if (h.frame_bytes != raw_frame_bytes(h.dtype, h.count)) return Status::bad_header;
  } else if (h.code == static_cast<uint8_t>(Code::dense)) {
    const DType known = static_cast<DType>(h.dtype);
    if (h.frame_bytes < tables_end(dense::element_count(known, h.count))) return Status::bad_header;
    if (h.frame_bytes > dense::frame_limit(known, h.count)) return Status::bad_header;
  } else {
    const FrameLayout layout = layout_of(h.flags);
    if (h.dtype != static_cast<uint8_t>(DType::bf16)) return Status::bad_header;
    if (h.frame_bytes < fast_static_bytes(h.count, layout)) return Status::bad_header;
    if (h.frame_bytes > fast_bound(h.count, layout)) return Status::bad_header;
  }
  if (available < h.frame_bytes) return Status::truncated;
  if (h.dtype != dtype || h.count != count) return Status::unexpected;
  if (h.code != static_cast<uint8_t>(Code::raw) && h.code != static_cast<uint8_t>(code)) return Status::unexpected;
  return Status::ok;
}

// What of check_header() a block must know before it reads a frame of code fast, or raw: that it is one, of `count`
// values, and ends where it may be read. launch_check_frames() reports what is wrong with a header, this or else.
__device__ __forceinline__ bool is_safe(const FrameHeader& h, uint64_t available, uint8_t dtype, uint64_t count) {
  if (h.dtype != dtype || h.count != count || available < h.frame_bytes || h.frame_bytes % kFrameAlign != 0)
    return false;
  if (h.code == static_cast<uint8_t>(Code::raw)) return h.frame_bytes == raw_frame_bytes(dtype, count);
  return h.code == static_cast<uint8_t>(Code::fast) && dtype == static_cast<uint8_t>(DType::bf16);
}

// What came in for job or input i of a launch: a frame, or values as they are.
struct Received {
  const uint8_t* data;
  uint64_t available;
  uint64_t count;
  bool is_frame;
  Code code;  // or raw
};
__device__ __forceinline__ Received received(const DecodeLaunch& launch, int i) {
  const DecodeJob& job = launch.job[i];
  return {static_cast<const uint8_t*>(job.frame), job.available, job.count, true, launch.code};
}
__device__ __forceinline__ Received received(const SumLaunch& launch, int i) {
  return {static_cast<const uint8_t*>(launch.data[i]), launch.available[i], launch.count,
          (launch.is_frame[i / 32] >> (i % 32) & 1u) != 0, Code::fast};
}

// Whether what came in is large enough to be looked at.
__device__ __forceinline__ bool readable(const Received& in, uint8_t dtype) {
  return in.available >= (in.is_frame ? kHeaderBytes : in.count * dtype_bytes(dtype));
}

// For a frame with a checksum whose header is in order, by a whole warp: do the shares add up to it?
__device__ __forceinline__ Status verify_checksum(const Sums& sums, int i, const FrameHeader& h, int lane) {
  wait_for_previous();
  uint64_t sum = 0;
  for (uint32_t b = lane; b < sums.per_job; b += kWarpSize) sum += sums.of[static_cast<uint64_t>(i) * sums.per_job + b];
  return warp_sum(sum) == h.checksum ? Status::ok : Status::bad_checksum;
}

// The first error of a job stays.
__device__ __forceinline__ void report(int32_t* status, Status s) {
  wait_for_previous();  // which sets the status
  atomicCAS(status, static_cast<int32_t>(Status::ok), static_cast<int32_t>(s));
}

}  // namespace cuda
}  // namespace zipccl
