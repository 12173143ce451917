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
  Stratum stratum;  // scale 0 and shift 0: rounding to nearest
  uint32_t signs;   // bit i for coordinate 8 l + i
};

// v[i] becomes the offset of coordinate 8 l + i.
__device__ __forceinline__ void make_offsets(const LaneOffsets& o, uint32_t lane, float (&w)[kLaneValues]) {
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t word = hash(o.a, o.b, 4 * lane + i);
    w[i] = with_sign(offset(first_share(word), o.stratum), o.signs, i);
    w[i + 4] = with_sign(offset(second_share(word), o.stratum), o.signs, i + 4);
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

template <uint32_t kWidth>
__device__ __forceinline__ void fine_pack(const FineScaleByte& byte, uint32_t slot, uint8_t* part, uint8_t* codes,
                                          uint32_t lane, LaneOffsets offsets, float (&y)[kLaneValues]) {
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
  GroupNeed need = group_need(static_cast<uint32_t>(positive), negative, kWidth);
  const bool finite = max(static_cast<uint32_t>(positive), negative) < kInfinity;
  const uint32_t most = warp_max(finite ? need.index : 4 * kNaNExponent);
  uint32_t exponent = exponent_of(most);
  if (exponent >= kNaNExponent) {
    exponent = kNaNExponent;
    need = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = 0;
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

  if constexpr (kWidth != 0) {
    float inverse = inverse_step(bits_float(index << kIndexShift), kWidth);
    if (need.reversed) {
      inverse = -inverse;
      offsets.signs = ~offsets.signs;
    }
    float w[kLaneValues];
    make_offsets(offsets, lane, w);
    constexpr uint32_t kLowest = kWidth == 1 ? 0 : 1u << (kWidth - 1);
    uint32_t raw[kLaneValues];
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) {
      if constexpr (kWidth == 1) w[i] = add(w[i], 0.5f);
      raw[i] = float_bits(add(add(mul(y[i], inverse), w[i]), kRounder));
      // As in fine_code(). Integers that float in order are in order as bits.
      if constexpr (kWidth > 8) raw[i] = min(raw[i], kRounderBits + kLowest - 1);
    }
    put_codes<kWidth, kRounderBits - kLowest>(raw, codes, lane);
  }
}

// A slot's codes and scales on their way from memory.
template <uint32_t kWidth>
struct FineInput {
  Codes<kWidth == 0 ? 1 : kWidth> codes;
  uint32_t scale, directions, exponent;

  __device__ __forceinline__ void load(const ScaleArrays& scales, uint32_t slot, const uint8_t* part, const uint8_t* at,
                                       uint32_t lane) {
    if constexpr (kWidth != 0) {
      codes.load(at, lane);
      scale = part[scales.first + slot * 8 + lane / 4];
      directions = *reinterpret_cast<const uint16_t*>(part + scales.second + slot * 2);
    }
    exponent = part[scales.third + slot];
  }

  // y[i] += the value of coordinate 8 l + i. Without a branch, so that all loads are under way at once: a super-group
  // that is not finite has NaN for a step.
  __device__ __forceinline__ void add_to(uint32_t lane, float (&y)[kLaneValues]) const {
    if constexpr (kWidth == 0) {
      const float v = exponent == kNaNExponent ? bits_float(kNaN) : 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = add(y[i], v);
    } else {
      const float half = half_scale(scale >> 2 * (lane & 2) & 15u, exponent);
      const float finite_step = step(half, kWidth);
      const float s = exponent == kNaNExponent ? bits_float(kNaN) : finite_step;
      if constexpr (kWidth == 1) {
        const float below = sub(0.0f, s);
#pragma unroll
        for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = add(y[i], codes[i] != 0 ? s : below);
      } else {
        // 2^23 + code as a float is its bits behind those of 2^23.
        constexpr float kZero = 8388608.0f + static_cast<float>(1u << (kWidth - 1));
        const float signed_step = bits_float(float_bits(s) ^ (directions << (31 - lane / 2) & 0x80000000u));
#pragma unroll
        for (uint32_t i = 0; i < kLaneValues; ++i)
          y[i] = add(y[i], mul(sub(bits_float(codes.with(i, 0x4B000000u)), kZero), signed_step));
      }
    }
  }
};

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
