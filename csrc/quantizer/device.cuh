// Device functions shared by the kernels of the CUDA quantiser: a warp and a super-group, 8 coordinates to a lane.
//
// Lane l has coordinates 8 l to 8 l + 7, in v[0] to v[7]; two neighbouring lanes have a group of 16.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "quantizer/arithmetic.h"
#include "quantizer/layout.h"

namespace zipccl {
namespace quantizer {
namespace cuda {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kLaneValues = kSuperGroup / kWarp;

__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFullWarp, v);
#else
#pragma unroll
  for (uint32_t d = kWarp / 2; d > 0; d /= 2) v = max(v, __shfl_xor_sync(kFullWarp, v, d));
  return v;
#endif
}

// Sum of the lanes' values, neighbours first; lanes below `distance` hold equal values.
__device__ __forceinline__ float tree_sum(float v, uint32_t distance) {
  for (uint32_t d = distance; d < kWarp; d *= 2) v = add(v, __shfl_xor_sync(kFullWarp, v, d));
  return v;
}

// Where a part's arrays of scales begin, in the order of layout.h.
struct ScaleArrays {
  uint32_t first, second, third;
};
inline ScaleArrays scale_arrays(const Layout& l, Widths widths) {
  if (widths == Widths::fine)
    return {static_cast<uint32_t>(fine_scales_at(l, 0)), static_cast<uint32_t>(fine_directions_at(l, 0)),
            static_cast<uint32_t>(fine_exponents_at(l, 0))};
  return {static_cast<uint32_t>(paper_scales_at(l, 0)), static_cast<uint32_t>(paper_maxima_at(l, 0)), 0};
}

// ---- Values ---------------------------------------------------------------------------------------------------

// Values of a lane as they are in memory: 16 bytes of bf16 or f16, 32 of f32.
struct RawValues {
  uint4 low, high;
};

// kOnce: memory that is not read again before it is written anew (loads), or not soon (stores). It leaves the L2 cache
// first, so that what others will read stays there.
template <bool kOnce, typename T>
__device__ __forceinline__ T load(const T* at) {
  if constexpr (kOnce) return __ldcs(at);
  return *at;
}
template <bool kOnce>
__device__ __forceinline__ void store_16(uint4* at, uint4 v) {
  if constexpr (kOnce)
    __stcs(at, v);
  else
    *at = v;
}

// Values of a slot that begin at `data`. n: coordinates that exist; `vector`: whole lanes begin at 16 bytes.
template <bool kOnce = false>
__device__ __forceinline__ RawValues load_raw(const void* data, DType dtype, uint32_t n, bool vector, uint32_t lane) {
  RawValues raw = {};
  if (vector && n == kSuperGroup) {
    const uint4* at = static_cast<const uint4*>(data);
    if (dtype == DType::f32) {
      raw.low = load<kOnce>(at + 2 * lane);
      raw.high = load<kOnce>(at + 2 * lane + 1);
    } else {
      raw.low = load<kOnce>(at + lane);
    }
    return raw;
  }
  const uint32_t first = lane * kLaneValues;
  uint32_t words[kLaneValues];
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) {
    const bool exists = first + i < n;
    words[i] = !exists               ? 0
               : dtype == DType::f32 ? static_cast<const uint32_t*>(data)[first + i]
                                     : static_cast<const uint16_t*>(data)[first + i];
  }
  if (dtype == DType::f32) {
    raw.low = make_uint4(words[0], words[1], words[2], words[3]);
    raw.high = make_uint4(words[4], words[5], words[6], words[7]);
  } else {
    raw.low = make_uint4(words[0] | words[1] << 16, words[2] | words[3] << 16, words[4] | words[5] << 16,
                         words[6] | words[7] << 16);
  }
  return raw;
}

// Zeros in the coordinates that a super-group of n lacks.
__device__ __forceinline__ void clear_missing(uint32_t n, uint32_t lane, float (&v)[kLaneValues]) {
  if (n == kSuperGroup) return;
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i)
    if (lane * kLaneValues + i >= n) v[i] = 0;
}

__device__ __forceinline__ void to_floats(const RawValues& raw, DType dtype, float (&v)[kLaneValues]) {
  const uint32_t w[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  if (dtype == DType::f32) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = bits_float(w[i]);
  } else if (dtype == DType::bf16) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      v[2 * i] = bits_float(w[i] << 16);
      v[2 * i + 1] = bits_float(w[i] & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      v[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(w[i])));
      v[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(w[i] >> 16)));
    }
  }
}

__device__ __forceinline__ uint32_t round_pair(float low, float high, DType dtype) {
  if (dtype == DType::bf16) {
#if __CUDA_ARCH__ >= 800
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
#else
    return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
#endif
  }
  return __half_as_ushort(__float2half_rn(low)) | static_cast<uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
}

// The NaN of docs/dynamiq.md, whatever the processor's own is.
__device__ __forceinline__ uint32_t round_pair_or_nan(float low, float high, DType dtype) {
  const uint32_t nan = dtype == DType::bf16 ? 0x7FC0u : 0x7E00u, pair = round_pair(low, high, dtype);
  const uint32_t l = low != low ? nan : pair & 0xFFFFu, h = high != high ? nan : pair >> 16;
  return l | h << 16;
}

__device__ __forceinline__ bool any_nan(const float (&v)[kLaneValues]) {
  bool nan = false;
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) nan |= v[i] != v[i];
  return nan;
}

// A lane's 32 bytes are a sector. Two lanes swap halves, so that each of the two stores writes whole sectors.
template <bool kOnce>
__device__ __forceinline__ void store_f32(uint4* data, uint32_t lane, const uint32_t (&words)[kLaneValues]) {
  const bool odd = lane % 2 != 0;
  uint32_t first[4], second[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? words[i] : words[4 + i], 1);
    first[i] = odd ? other : words[i];
    second[i] = odd ? words[4 + i] : other;
  }
  uint4* at = data + 2 * lane - odd;
  store_16<kOnce>(at, make_uint4(first[0], first[1], first[2], first[3]));
  store_16<kOnce>(at + 2, make_uint4(second[0], second[1], second[2], second[3]));
}

// nan: whether there may be one among the values.
template <bool kOnce = false>
__device__ __forceinline__ void store_values(void* data, DType dtype, uint32_t n, bool vector, uint32_t lane,
                                             const float (&v)[kLaneValues], bool nan) {
  uint32_t words[kLaneValues];
  if (dtype == DType::f32) {
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) words[i] = float_bits(v[i]);
    if (nan) {
#pragma unroll
      for (uint32_t i = 0; i < kLaneValues; ++i) words[i] = float_bits(canonical(v[i]));
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues / 2; ++i) words[i] = round_pair(v[2 * i], v[2 * i + 1], dtype);
    if (nan) {
#pragma unroll
      for (uint32_t i = 0; i < kLaneValues / 2; ++i) words[i] = round_pair_or_nan(v[2 * i], v[2 * i + 1], dtype);
    }
  }
  if (vector && n == kSuperGroup) {
    if (dtype == DType::f32) {
      store_f32<kOnce>(static_cast<uint4*>(data), lane, words);
    } else {
      store_16<kOnce>(static_cast<uint4*>(data) + lane, make_uint4(words[0], words[1], words[2], words[3]));
    }
    return;
  }
  const uint32_t first = lane * kLaneValues;
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) {
    if (first + i >= n) continue;
    if (dtype == DType::f32)
      static_cast<uint32_t*>(data)[first + i] = words[i];
    else
      static_cast<uint16_t*>(data)[first + i] = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
  }
}

// ---- Codes ----------------------------------------------------------------------------------------------------
// Codes of a lane's coordinates in words of 8 * width bits; runs as in layout.h.

template <uint32_t kWidth>
__device__ __forceinline__ void put_word(uint32_t low, uint32_t high, uint8_t* codes, uint32_t lane) {
  if constexpr (kWidth == 8) {
    reinterpret_cast<uint2*>(codes)[lane] = make_uint2(low, high);
  } else {
    if constexpr ((kWidth & 4) != 0) reinterpret_cast<uint32_t*>(codes)[lane] = low;
    const uint32_t rest = (kWidth & 4) != 0 ? high : low;
    uint8_t* after = codes + kWarp * (kWidth & 4);
    if constexpr ((kWidth & 2) != 0) reinterpret_cast<uint16_t*>(after)[lane] = static_cast<uint16_t>(rest);
    if constexpr ((kWidth & 1) != 0)
      after[kWarp * (kWidth & 2) + lane] = static_cast<uint8_t>(rest >> 8 * (kWidth & 2));
  }
}

template <uint32_t kWidth, bool kOnce>
__device__ __forceinline__ uint2 get_word(const uint8_t* codes, uint32_t lane) {
  if constexpr (kWidth == 8) {
    return load<kOnce>(reinterpret_cast<const uint2*>(codes) + lane);
  } else {
    uint32_t rest = 0;
    const uint8_t* after = codes + kWarp * (kWidth & 4);
    if constexpr ((kWidth & 2) != 0) rest = load<kOnce>(reinterpret_cast<const uint16_t*>(after) + lane);
    if constexpr ((kWidth & 1) != 0)
      rest |= static_cast<uint32_t>(load<kOnce>(after + kWarp * (kWidth & 2) + lane)) << 8 * (kWidth & 2);
    if constexpr ((kWidth & 4) != 0)
      return make_uint2(load<kOnce>(reinterpret_cast<const uint32_t*>(codes) + lane), rest);
    return make_uint2(rest, 0);
  }
}

// Word of codes that may have more bits than their width: code[i] = (raw[i] - kSubtract) with kWidth bits. The
// subtraction is done once for all.
template <uint32_t kWidth, uint32_t kSubtract>
__device__ __forceinline__ uint2 join(const uint32_t (&raw)[kLaneValues]) {
  uint32_t half[2];
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    uint32_t sum = 0, subtract = 0;
#pragma unroll
    for (uint32_t i = 4; i-- > 0;) {
      sum = (sum << kWidth) + raw[4 * h + i];
      subtract = (subtract << kWidth) + kSubtract;
    }
    half[h] = sum - subtract;
  }
  if constexpr (kWidth == 8) {
    return make_uint2(half[0], half[1]);
  } else {
    return make_uint2(half[0] | half[1] << 4 * kWidth, kWidth > 4 ? half[1] >> (32 - 4 * kWidth) % 32 : 0);
  }
}

// (a & mask) | bits in one instruction; the compiler makes two when both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
#else
  return (a & mask) | bits;
#endif
}

// 32 bits of a word from bit `shift` on; as few as `width` of them matter.
__device__ __forceinline__ uint32_t bits_from(uint2 word, uint32_t shift, uint32_t width) {
  return shift >= 32           ? word.y >> shift % 32
         : shift + width <= 32 ? word.x >> shift % 32
                               : __funnelshift_r(word.x, word.y, shift);
}

// Code i of a word.
template <uint32_t kWidth>
__device__ __forceinline__ uint32_t split(uint2 word, uint32_t i) {
  return bits_from(word, kWidth * i, kWidth) & ((1u << kWidth) - 1);
}

// Code i of a word less kMiddle, as a float. The bits of a float of 2^23 to 2^24 - 1 are those of 2^23 and behind them
// the number; one of 2^(23 - k) to 2^(24 - k) has room for k bits of fraction. So codes need not be shifted down to
// become numbers: of 23 bits of the word only the code's are kept, as a fraction's upper end.
template <uint32_t kWidth, uint32_t kMiddle>
__device__ __forceinline__ float split_level(uint2 word, uint32_t i) {
  constexpr uint32_t kTogether = 23 / kWidth;  // codes that share the shift
  const uint32_t first = i / kTogether * kTogether,
                 last = first + kTogether < kLaneValues ? first + kTogether : kLaneValues;
  const uint32_t below = (i - first) * kWidth;
  const uint32_t bits = bits_from(word, first * kWidth, (last - first) * kWidth);
  const float number = bits_float(and_or(bits, ((1u << kWidth) - 1) << below, (150 - below) << 23));
  return sub(number, static_cast<float>(1u << (23 - below)) + static_cast<float>(kMiddle));
}

template <uint32_t kWidth, uint32_t kSubtract>
__device__ __forceinline__ void put_codes(const uint32_t (&raw)[kLaneValues], uint8_t* codes, uint32_t lane) {
  if constexpr (kWidth <= 8) {
    const uint2 word = join<kWidth, kSubtract>(raw);
    put_word<kWidth>(word.x, word.y, codes, lane);
  } else {
    uint32_t low[kLaneValues], high[kLaneValues];
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) {
      low[i] = (raw[i] - kSubtract) & 0xFFu;
      high[i] = (raw[i] - kSubtract) >> 8;
    }
    const uint2 l = join<8, 0>(low), h = join<kWidth - 8, 0>(high);
    put_word<8>(l.x, l.y, codes, lane);
    put_word<kWidth - 8>(h.x, h.y, codes + 8 * kWarp, lane);
  }
}

template <uint32_t kWidth>
struct Codes {
  static constexpr uint32_t kLow = kWidth < 8 ? kWidth : 8;
  uint2 low, high;
  template <bool kOnce = true>
  __device__ __forceinline__ void load(const uint8_t* codes, uint32_t lane) {
    low = get_word<kLow, kOnce>(codes, lane);
    if constexpr (kWidth > 8) high = get_word<kWidth - 8, kOnce>(codes + 8 * kWarp, lane);
  }
  // Codes 4 h to 4 h + 3 become the first four; the others are lost.
  __device__ __forceinline__ void keep_half(uint32_t h) {
    low = make_uint2(__funnelshift_rc(low.x, low.y, 4 * kLow * h), 0);
    if constexpr (kWidth > 8) high = make_uint2(high.x >> 4 * (kWidth - 8) * h, 0);
  }
  __device__ __forceinline__ uint32_t operator[](uint32_t i) const {
    if constexpr (kWidth > 8) {
      return split<8>(low, i) | split<kWidth - 8>(high, i) << 8;
    } else {
      return split<kWidth>(low, i);
    }
  }
  // Code i less the one in the middle, as a float.
  __device__ __forceinline__ float level(uint32_t i) const {
    if constexpr (kWidth > 8) {
      constexpr uint32_t kMiddle = 1u << (kWidth - 9);  // of the upper ones, which count for 256 each
      return mul_add(split_level<kWidth - 8, kMiddle>(high, i), 256.0f, split_level<8, 0>(low, i));
    } else {
      return split_level<kWidth, 1u << (kWidth - 1)>(low, i);
    }
  }
};

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
