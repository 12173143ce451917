// Code::dense on CUDA: elements, their symbols and their rests. A lane holds runs of 8 elements: run k of lane l is the
// elements 256 k + 8 l to 256 k + 8 l + 7 of a tile, so a warp reads and writes whole lines of every array.
//
// Symbols stand in bytes: of a run, elements 0 to 3 in x and 4 to 7 in y of a uint2.
#pragma once

#include "codec/cuda_device.cuh"
#include "format/dense.h"

namespace zipccl {
namespace cuda {

constexpr int kRuns = 4;
constexpr uint32_t kRunElements = 8;
constexpr uint32_t kTileElements = static_cast<uint32_t>(kTileValues);

__device__ __forceinline__ uint32_t run_begin(int k, int lane) { return 256 * k + kRunElements * lane; }

template <int kBytes_, int kExponent_, int kMantissa_>
struct Element {
  static constexpr int kBytes = kBytes_;
  static constexpr int kExponent = kExponent_;
  static constexpr int kMantissa = kMantissa_;
  static constexpr bool kCoded = kExponent > 0;
  static constexpr bool kShortens = kCoded && kBytes >= 4;  // may have rests of a shorter type
  static constexpr int kWords = 2 * kBytes;                 // 32-bit words of a run

  __device__ static dense::Format format() {
    return {static_cast<uint8_t>(kBytes), static_cast<uint8_t>(kExponent), static_cast<uint8_t>(kMantissa), 1};
  }
};
using Bf16 = Element<2, 8, 7>;
using F16 = Element<2, 5, 10>;
using F32 = Element<4, 8, 23>;
using F64 = Element<8, 11, 52>;
using E4m3 = Element<1, 4, 3>;
using E5m2 = Element<1, 5, 2>;
template <int kBytes>
using Opaque = Element<kBytes, 0, 0>;

// Calls f with the element type of a dtype, as a value.
template <typename F>
cudaError_t with_element(DType dtype, const F& f) {
  const dense::Format format = dense::format_of(dtype);
  switch (format.mantissa_bits) {
    case 7:
      return f(Bf16());
    case 10:
      return f(F16());
    case 23:
      return f(F32());
    case 52:
      return f(F64());
    case 3:
      return f(E4m3());
    case 2:
      return f(E5m2());
  }
  switch (format.bytes) {
    case 1:
      return f(Opaque<1>());
    case 2:
      return f(Opaque<2>());
    case 4:
      return f(Opaque<4>());
    default:
      return f(Opaque<8>());
  }
}

template <typename E>
struct Run {
  uint32_t w[E::kWords];
};

// Element j of a run, in 32 or 64 bits.
template <typename E>
__device__ __forceinline__ uint64_t element(const Run<E>& run, int j) {
  if (E::kBytes == 1) return (run.w[j / 4] >> (8 * (j % 4))) & 0xFFu;
  if (E::kBytes == 2) return (run.w[j / 2] >> (16 * (j % 2))) & 0xFFFFu;
  if (E::kBytes == 4) return run.w[j % E::kWords];
  return run.w[2 * j % E::kWords] | static_cast<uint64_t>(run.w[(2 * j + 1) % E::kWords]) << 32;
}
template <typename E>
__device__ __forceinline__ void set_element(Run<E>* run, int j, uint64_t v) {
  const uint32_t low = static_cast<uint32_t>(v);
  if (E::kBytes == 1) run->w[j / 4] |= low << (8 * (j % 4));
  if (E::kBytes == 2) run->w[j / 2] |= low << (16 * (j % 2));
  if (E::kBytes >= 4) run->w[(E::kBytes / 4) * j % E::kWords] = low;
  if (E::kBytes == 8) run->w[(2 * j + 1) % E::kWords] = static_cast<uint32_t>(v >> 32);
}

// Elements i .. i + 7 of a tile of m; those from m on come out zero. wide: 16-byte accesses are allowed.
template <typename E>
__device__ __forceinline__ Run<E> load_run(const uint8_t* tile, uint32_t i, uint32_t m, bool wide) {
  Run<E> run = {};
  const uint8_t* from = tile + E::kBytes * i;
  if (wide && i + kRunElements <= m) {
    if (E::kBytes == 1) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      run.w[0] = v.x, run.w[1] = v.y;
    } else {
#pragma unroll
      for (int q = 0; q < E::kWords / 4; ++q) {
        const uint4 v = reinterpret_cast<const uint4*>(from)[q];
        run.w[4 * q] = v.x, run.w[4 * q + 1] = v.y, run.w[4 * q + 2] = v.z, run.w[4 * q + 3] = v.w;
      }
    }
    return run;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (i + j >= m) continue;
    uint64_t v = 0;
    if (E::kBytes == 1) v = from[j];
    if (E::kBytes == 2) v = reinterpret_cast<const uint16_t*>(from)[j];
    if (E::kBytes == 4) v = reinterpret_cast<const uint32_t*>(from)[j];
    if (E::kBytes == 8) v = reinterpret_cast<const uint64_t*>(from)[j];
    set_element(&run, j, v);
  }
  return run;
}

template <typename E>
__device__ __forceinline__ void store_run(uint8_t* tile, uint32_t i, uint32_t m, bool wide, const Run<E>& run) {
  uint8_t* to = tile + E::kBytes * i;
  if (wide && i + kRunElements <= m) {
    if (E::kBytes == 1) {
      *reinterpret_cast<uint2*>(to) = make_uint2(run.w[0], run.w[1]);
    } else {
#pragma unroll
      for (int q = 0; q < E::kWords / 4; ++q) {
        reinterpret_cast<uint4*>(to)[q] =
            make_uint4(run.w[4 * q], run.w[4 * q + 1], run.w[4 * q + 2], run.w[4 * q + 3]);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (i + j >= m) continue;
    const uint64_t v = element(run, j);
    if (E::kBytes == 1) to[j] = static_cast<uint8_t>(v);
    if (E::kBytes == 2) reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(v);
    if (E::kBytes == 4) reinterpret_cast<uint32_t*>(to)[j] = static_cast<uint32_t>(v);
    if (E::kBytes == 8) reinterpret_cast<uint64_t*>(to)[j] = v;
  }
}

// ---- Symbols --------------------------------------------------------------------------------------------------

// *missing is set where an exponent has no symbol.
template <typename E>
__device__ __forceinline__ uint2 symbols_of(const Run<E>& run, bool* missing) {
  if (E::kMantissa == 7) {
    return make_uint2(select_bytes(run.w[0] * 2, run.w[1] * 2, 0x7531),
                      select_bytes(run.w[2] * 2, run.w[3] * 2, 0x7531));
  }
  if (E::kMantissa == 23) {
    uint32_t s[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q = 4 * h % E::kWords;
      const uint32_t low = select_bytes(run.w[q] * 2, run.w[q + 1] * 2, 0x0073);
      const uint32_t high = select_bytes(run.w[q + 2] * 2, run.w[q + 3] * 2, 0x0073);
      s[h] = select_bytes(low, high, 0x5410);
    }
    return make_uint2(s[0], s[1]);
  }
  uint32_t s[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t symbol = static_cast<uint32_t>(element(run, j) >> E::kMantissa) & ((1u << E::kExponent) - 1);
    if (E::kExponent > 8) {
      symbol = dense::narrow_exponent(symbol);
      *missing |= symbol > 255;
      symbol &= 255u;
    }
    s[j / 4] |= symbol << (8 * (j % 4));
  }
  return make_uint2(s[0], s[1]);
}

// ---- Rests ----------------------------------------------------------------------------------------------------

// Sign and upper mantissa bits of element j, `bits` of them.
template <typename E>
__device__ __forceinline__ uint64_t rest_of(const Run<E>& run, int j, uint32_t bits) {
  const uint64_t v = element(run, j);
  const uint64_t mantissa = v & ((uint64_t{1} << E::kMantissa) - 1);
  return v >> (8 * E::kBytes - 1) << (bits - 1) | mantissa >> (E::kMantissa + 1 - bits);
}

// Writes a run's rests to the arrays of the unit. Fields of elements from m on are zero, as the elements are.
template <typename E>
__device__ __forceinline__ void store_rests(uint8_t* unit, uint32_t bits, uint32_t i, uint32_t m, const Run<E>& run) {
  if constexpr (E::kMantissa == 7) {
    const uint32_t top = 0x80808080u;
    const uint32_t x =
        select_bits(top, select_bytes(run.w[0], run.w[1], 0x7531), select_bytes(run.w[0], run.w[1], 0x6420));
    const uint32_t y =
        select_bits(top, select_bytes(run.w[2], run.w[3], 0x7531), select_bytes(run.w[2], run.w[3], 0x6420));
    if (i < dense::array_bytes(8, m)) *reinterpret_cast<uint2*>(unit + i) = make_uint2(x, y);
  } else {
    uint64_t rest[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) rest[j] = rest_of(run, j, bits);
    const uint32_t padded = dense::array_bytes(8, m);
    for (uint32_t b = 0; b < bits / 8; ++b, unit += padded) {
      uint32_t w[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        w[j / 4] |= (static_cast<uint32_t>(rest[j]) & 0xFFu) << (8 * (j % 4));
        rest[j] >>= 8;
      }
      if (i < padded) *reinterpret_cast<uint2*>(unit + i) = make_uint2(w[0], w[1]);
    }
#pragma unroll
    for (uint32_t width = 4; width > 0; width /= 2) {
      if (!(bits & width)) continue;
      uint32_t packed = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        packed |= (static_cast<uint32_t>(rest[j]) & ((1u << width) - 1)) << (width * j);
        rest[j] >>= width;
      }
      const uint32_t size = dense::array_bytes(width, m);
      uint8_t* const to = unit + width * i / 8;
      if (width * i / 8 < size) {
        if (width == 4) *reinterpret_cast<uint32_t*>(to) = packed;
        if (width == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(packed);
        if (width == 1) *to = static_cast<uint8_t>(packed);
      }
      unit += size;
    }
  }
}

// A run of elements from its symbols and the rests in the unit. Elements from m on are not to be looked at.
template <typename E>
__device__ __forceinline__ Run<E> join_run(const uint8_t* unit, uint32_t bits, uint32_t i, uint32_t m, uint2 symbols) {
  Run<E> run = {};
  if constexpr (E::kMantissa == 7) {
    uint2 sm = make_uint2(0, 0);
    if (i < dense::array_bytes(8, m)) sm = *reinterpret_cast<const uint2*>(unit + i);
    const uint32_t s[2] = {symbols.x, symbols.y}, rest[2] = {sm.x, sm.y};
    constexpr uint32_t kExponents = 0x7F807F80u;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Symbols to the upper byte of each half, then down by one bit; signs and mantissas around them.
      const uint32_t e0 = select_bytes(s[h], 0, 0x1404) >> 1, e1 = select_bytes(s[h], 0, 0x3424) >> 1;
      run.w[2 * h] = select_bits(kExponents, e0, select_bytes(rest[h], 0, 0x1100));
      run.w[2 * h + 1] = select_bits(kExponents, e1, select_bytes(rest[h], 0, 0x3322));
    }
  } else {
    uint64_t rest[8] = {};
    uint32_t low = 0;
    const uint32_t padded = dense::array_bytes(8, m);
    for (uint32_t b = 0; b < bits / 8; ++b, unit += padded, low += 8) {
      uint2 v = make_uint2(0, 0);
      if (i < padded) v = *reinterpret_cast<const uint2*>(unit + i);
      const uint32_t w[2] = {v.x, v.y};
#pragma unroll
      for (int j = 0; j < 8; ++j) rest[j] |= static_cast<uint64_t>((w[j / 4] >> (8 * (j % 4))) & 0xFFu) << low;
    }
#pragma unroll
    for (uint32_t width = 4; width > 0; width /= 2) {
      if (!(bits & width)) continue;
      const uint32_t size = dense::array_bytes(width, m);
      const uint8_t* const from = unit + width * i / 8;
      uint32_t packed = 0;
      if (width * i / 8 < size) {
        if (width == 4) packed = *reinterpret_cast<const uint32_t*>(from);
        if (width == 2) packed = *reinterpret_cast<const uint16_t*>(from);
        if (width == 1) packed = *from;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        rest[j] |= static_cast<uint64_t>((packed >> (width * j)) & ((1u << width) - 1)) << low;
      }
      low += width;
      unit += size;
    }
    const uint32_t s[2] = {symbols.x, symbols.y};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint64_t e = (s[j / 4] >> (8 * (j % 4))) & 0xFFu;
      if (E::kExponent > 8) e = dense::widen_exponent(static_cast<uint32_t>(e));
      e &= (uint64_t{1} << E::kExponent) - 1;
      const uint64_t mantissa = (rest[j] & ((uint64_t{1} << (bits - 1)) - 1)) << (E::kMantissa + 1 - bits);
      set_element(&run, j, rest[j] >> (bits - 1) << (8 * E::kBytes - 1) | e << E::kMantissa | mantissa);
    }
  }
  return run;
}

}  // namespace cuda
}  // namespace zipccl
