// Widths::fine on the device: a slot by a warp. docs/dynamiq.md, sections 4 and 6; fine.h has the arithmetic of a
// group.
#pragma once

#include "quantizer/device.cuh"
#include "quantizer/fine.h"
#include "quantizer/random.h"

namespace zipccl {
namespace quantizer {
namespace cuda {

// What a lane of a slot rounds with.
struct LaneOffsets {
  uint32_t a, b;    // words of the super-group, hash(a, b, ...)
  Stratum stratum;  // of even coordinates, odd ones have it negated; scale 0 and shift 0: rounding to nearest
};

// w[i] becomes the offset of coordinate 8 l + i.
__device__ __forceinline__ void make_offsets(const LaneOffsets& o, float middle, uint32_t lane,
                                             float (&w)[kLaneValues]) {
  const Stratum even = {o.stratum.scale, add(o.stratum.shift, middle)};
  const Stratum odd = {-o.stratum.scale, sub(middle, o.stratum.shift)};
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; i += 4) {
    const Words2 words = hash(o.a, o.b, 2 * lane + i / 4);
    w[i] = offset(first_share(words.x), even);
    w[i + 1] = offset(first_share(words.y), odd);
    w[i + 2] = offset(bits_float(and_or(words.x << 7, 0x7FFF80u, 0x3F800000u)), even);  // second_share()
    w[i + 3] = offset(bits_float(and_or(words.y << 7, 0x7FFF80u, 0x3F800000u)), odd);
  }
}

// A slot's 11 bytes of scales are written by 11 lanes at once: every fourth one has a byte of group scales, lanes 1 and
// 2 the directions, lane 3 the exponent. Where lane's byte is: base + slot * stride.
struct FineScaleByte {
  uint32_t base, stride;
  bool any;
};
__device__ __forceinline__ FineScaleByte fine_scale_byte(const ScaleArrays& scales, uint32_t lane) {
  if (lane % 4 == 0) return {scales.first + lane / 4, 8, true};
  if (lane == 1 || lane == 2) return {scales.second + lane - 1, 2, true};
  return {scales.third, 1, lane == 3};
}

// What an encoder needs to know of a slot's width.
struct FineWidth {
  float reach;    // reach(), 0 for less than two bits
  float inverse;  // what inverse_step() multiplies with
  uint32_t width;
};

// A slot's scales to `part`, and its codes, as integers kRounderBits and more above the levels, to `raw`. As little as
// possible of this depends on the width: instructions that all widths share stay in the multiprocessor's cache.
__device__ __forceinline__ void fine_pack(const FineScaleByte& byte, uint32_t slot, uint8_t* part, FineWidth of,
                                          uint32_t lane, LaneOffsets offsets, float (&y)[kLaneValues],
                                          uint32_t (&raw)[kLaneValues]) {
  // As signed integers, positive floats are in order and negative ones below them; as unsigned ones, negative floats
  // are above.
  int32_t positive = 0;
  uint32_t negative = 0x80000000u;
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) {
    positive = max(positive, static_cast<int32_t>(float_bits(y[i])));
    negative = max(negative, float_bits(y[i]));
  }
  positive = max(positive, __shfl_xor_sync(kFullWarp, positive, 1));
  negative = max(negative, __shfl_xor_sync(kFullWarp, negative, 1)) & kMagnitude;
  GroupNeed need = group_need(static_cast<uint32_t>(positive), negative, of.width, of.reach);
  const bool finite = max(static_cast<uint32_t>(positive), negative) < kInfinity;
  const uint32_t most = warp_max(finite ? need.index : 4 * kNaNExponent);
  uint32_t exponent = exponent_of(most);
  if (exponent >= kNaNExponent) {
    exponent = kNaNExponent;
    need = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) {
      y[i] = 0;
      asm volatile("" : "+f"(y[i]));  // a branch that is hardly ever taken costs less than eight selections
    }
  }

  // As scale_code() and half_scale(), but for groups of zeros, which any scale turns into the same codes.
  const uint32_t base = 4 * max(exponent, kLeastExponent) - 12;
  const uint32_t index = max(need.index, base + 1);
  const uint32_t scale = need.index == 0 ? 0 : index - base;
  const uint32_t next = __shfl_down_sync(kFullWarp, scale, 2);
  const uint32_t directions = __ballot_sync(kFullWarp, __shfl_sync(kFullWarp, need.reversed, 2 * lane % kWarp) != 0);
  if (byte.any) {
    const uint32_t other = lane == 3 ? exponent : directions >> (lane == 2 ? 8 : 0);
    part[byte.base + slot * byte.stride] = static_cast<uint8_t>(lane % 4 == 0 ? scale | next << 4 : other);
  }

  float inverse = inverse_half(bits_float(index << kIndexShift), of.inverse);
  inverse = need.reversed ? -inverse : inverse;
  offsets.stratum = with_sign(offsets.stratum, need.reversed != 0);
  float w[kLaneValues];
  make_offsets(offsets, middle_of(of.width), lane, w);
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) raw[i] = float_bits(add(mul_add(y[i], inverse, w[i]), kRounder));
}

template <uint32_t kWidth>
__device__ __forceinline__ void fine_put(uint32_t (&raw)[kLaneValues], uint8_t* codes, uint32_t lane) {
  if constexpr (kWidth != 0) {
    constexpr uint32_t kLowest = kWidth == 1 ? 0 : 1u << (kWidth - 1);
    if constexpr (kWidth > 8) {  // as in fine_code(); integers that float in order are in order as bits
#pragma unroll
      for (uint32_t i = 0; i < kLaneValues; ++i) raw[i] = min(raw[i], kRounderBits + kLowest - 1);
    }
    put_codes<kWidth, kRounderBits - kLowest>(raw, codes, lane);
  }
}

// What a group's levels are multiplied with; scale: its code. A super-group that is not finite has NaN, so that no
// branch is needed.
__device__ __forceinline__ float fine_step(uint32_t scale, uint32_t exponent, uint32_t width, bool reversed) {
  const float finite = step(half_scale(width == 0 ? 0 : scale, exponent), width);
  const uint32_t bits = exponent == kNaNExponent ? kNaN : float_bits(finite);
  return bits_float(width > 1 && reversed ? bits ^ 0x80000000u : bits);
}

// The steps of a slot's groups, by kLanes lanes.
template <uint32_t kLanes>
__device__ __forceinline__ void fine_steps(const ScaleArrays& scales, uint32_t slot, const uint8_t* part,
                                           uint32_t width, uint32_t share, float* steps) {
  constexpr uint32_t kShare = kGroups / kLanes;
  const auto* first = part + scales.first + slot * 8 + kShare / 2 * share;
  uint2 codes = {};
  if constexpr (kShare == 4)
    codes.x = __ldcs(reinterpret_cast<const uint16_t*>(first));
  else if constexpr (kShare == 8)
    codes.x = __ldcs(reinterpret_cast<const uint32_t*>(first));
  else
    codes = __ldcs(reinterpret_cast<const uint2*>(first));
  const uint32_t directions = __ldcs(reinterpret_cast<const uint16_t*>(part + scales.second + slot * 2));
  const uint32_t exponent = __ldcs(part + scales.third + slot);
#pragma unroll
  for (uint32_t g = 0; g < kShare; ++g) {
    const uint32_t group = kShare * share + g;
    const bool reversed = (directions >> group & 1) != 0;
    steps[group] = fine_step((g < 8 ? codes.x : codes.y) >> 4 * (g % 8) & 15u, exponent, width, reversed);
  }
}

// A slot's scales on their way from memory. The next slots' are in the same sectors: they stay in the cache.
struct FineScales {
  uint32_t scale, directions, exponent;

  __device__ __forceinline__ void load(const ScaleArrays& scales, uint32_t slot, const uint8_t* part, uint32_t lane) {
    scale = part[scales.first + slot * 8 + lane / 4];
    directions = *reinterpret_cast<const uint16_t*>(part + scales.second + slot * 2);
    exponent = part[scales.third + slot];
  }

  // Of the lane's group.
  __device__ __forceinline__ float step(uint32_t width, uint32_t lane) const {
    return fine_step(scale >> 2 * (lane & 2) & 15u, exponent, width, (directions >> lane / 2 & 1) != 0);
  }
};

template <uint32_t kWidth>
struct Width {
  static constexpr uint32_t value = kWidth;
};

// Calls f with the width as a type.
template <typename F>
__device__ __forceinline__ void with_fine_width(uint32_t width, F f) {
#define ZIPCCL_WIDTH(width) \
  case width:               \
    f(Width<width>());      \
    break;
  switch (width) {
    ZIPCCL_WIDTH(0)
    ZIPCCL_WIDTH(1)
    ZIPCCL_WIDTH(2)
    ZIPCCL_WIDTH(3)
    ZIPCCL_WIDTH(4)
    ZIPCCL_WIDTH(5)
    ZIPCCL_WIDTH(6)
    ZIPCCL_WIDTH(7)
    ZIPCCL_WIDTH(8)
    ZIPCCL_WIDTH(9)
    ZIPCCL_WIDTH(10)
    ZIPCCL_WIDTH(11)
    ZIPCCL_WIDTH(12)
  }
#undef ZIPCCL_WIDTH
}

// Codes of a lane as multiples of the step. kOnce: device.cuh.
template <uint32_t kWidth, bool kOnce = true>
__device__ __forceinline__ void fine_levels(const uint8_t* codes, uint32_t lane, float (&level)[kLaneValues]) {
  if constexpr (kWidth == 0) {
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) level[i] = 0;
  } else {
    Codes<kWidth> c;
    c.template load<kOnce>(codes, lane);
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) level[i] = kWidth == 1 ? (c[i] != 0 ? 1.0f : -1.0f) : c.level(i);
  }
}

// The same of coordinates 4 l to 4 l + 3, and of those 128 further on. From shared memory.
template <uint32_t kWidth>
__device__ __forceinline__ void fine_quads(const uint8_t* codes, uint32_t lane, float (&level)[kLaneValues]) {
  if constexpr (kWidth == 0) {
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) level[i] = 0;
  } else {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      Codes<kWidth> c;
      c.template load<false>(codes, h * kWarp / 2 + lane / 2);
      c.keep_half(lane % 2);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) level[4 * h + i] = kWidth == 1 ? (c[i] != 0 ? 1.0f : -1.0f) : c.level(i);
    }
  }
}

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
