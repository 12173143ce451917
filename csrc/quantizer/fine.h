// Scales and codes of Widths::fine: docs/dynamiq.md, section 6. Host and device.
//
// A group of 16 has one step D > 0 and a direction d = +1 or -1. With b >= 2 bits its levels are d D k for
// k = -2^(b-1) .. 2^(b-1) - 1, the side that reaches further being put on the negative end; with one bit they are +-S.
// S = 2^(b-1) D, the group's scale, has two mantissa bits; a "scale index" is the upper part of a float's bits,
// exponent and two mantissa bits, of S / 2 (half of it, so that the largest floats have a scale).
#pragma once

#include <cstdint>

#include "quantizer/arithmetic.h"

namespace zipccl {
namespace quantizer {

constexpr uint32_t kIndexShift = 21;
constexpr uint32_t kLeastExponent = 16;  // of a super-group: keeps steps and their inverses normal floats
constexpr uint32_t kNaNExponent = 255;   // the super-group holds something that is not finite

// What group scales have to be multiplied with so that the positive end, L - 1 steps, reaches as far as the negative
// one, L = 2^(b-1) steps: half of L / (L - 1), rounded up by two units in the last place where it is not exact.
ZIPCCL_HD float reach(uint32_t width) {
  if (width < 2) return 0.0f;  // levels lie alike on both sides
  if (width == 2) return 1.0f;
  const float levels = static_cast<float>(1u << (width - 1));
  return bits_float(float_bits(div(levels, 2 * levels - 2)) + 2);
}

ZIPCCL_HD uint32_t scale_index(float half) { return (float_bits(half) + ((1u << kIndexShift) - 1)) >> kIndexShift; }

// What a group needs: index of S / 2, 0 for a group of zeros; and its direction.
struct GroupNeed {
  uint32_t index;
  uint32_t reversed;  // d = -1
};
// positive, negative: float bits of the largest magnitude on each side, 0 if there is none. Finite.
ZIPCCL_HD GroupNeed group_need(uint32_t positive, uint32_t negative, uint32_t width, float reach_of_width) {
  const bool reversed = width > 1 && positive > negative;
  const float most = bits_float(positive > negative ? positive : negative);
  const float other = bits_float(positive > negative ? negative : positive);
  const float half = mul(0.5f, most), other_half = mul(reach_of_width, other);
  return {most == 0.0f ? 0u : scale_index(half > other_half ? half : other_half), reversed};
}

// Exponent byte of a super-group whose largest index is `most`; kNaNExponent if there is no such float.
ZIPCCL_HD uint32_t exponent_of(uint32_t most) {
  const uint32_t e = most >> 2;
  return most == 0 ? 0 : e < kLeastExponent ? kLeastExponent : e;
}

// 4-bit scale of a group: 0 for zeros; else 1 to 15, the index counted so that 15 is the largest one of the exponent.
// Indices too small for that get 1.
ZIPCCL_HD uint32_t scale_code(uint32_t index, uint32_t exponent) {
  const uint32_t base = 4 * exponent - 12;  // the index that code 0 would have
  return index == 0 ? 0 : index <= base ? 1 : index - base;
}

// S / 2 of a code; 0 for code 0.
ZIPCCL_HD float half_scale(uint32_t code, uint32_t exponent) {
  const int32_t index = static_cast<int32_t>(4 * exponent + code) - 12;
  return bits_float(code == 0 || index < 0 ? 0u : static_cast<uint32_t>(index) << kIndexShift);
}

// 1 / D for a half_scale() an encoder may use, not 0, and inverse_factor() of the width: never above the true value, so
// that levels are never left. One bit: 1 / (2 S), the inverse of the distance of the two levels.
ZIPCCL_HD float inverse_factor(uint32_t width) {
  return width == 1 ? 0.125f : static_cast<float>(1u << width) * 0.125f;
}
ZIPCCL_HD float inverse_half(float half, float factor) {
  const uint32_t bits = float_bits(half);
  // 1, 1/1.25, 1/1.5, 1/1.75, the last three times 1 - 2^-20 and rounded to nearest.
  const uint32_t mantissa = bits >> kIndexShift & 3u;
  const float inverse = mantissa == 0   ? 1.0f
                        : mantissa == 1 ? 0x1.99998p-1f
                        : mantissa == 2 ? 0x1.55554p-1f
                                        : 0x1.249236p-1f;
  const float twice = mul(inverse, bits_float((255u - (bits >> 23)) << 23));  // 1 / (half / 2)
  return mul(twice, factor);
}

// D for b >= 2, S for one bit. Exact.
ZIPCCL_HD float step(float half, uint32_t width) { return mul(half, bits_float((129u - width) << 23)); }

// What is added to rounding offsets: the two levels of one bit lie half a distance from zero.
ZIPCCL_HD float middle_of(uint32_t width) { return width == 1 ? 0.5f : 0.0f; }

// Code of a value: `inverse` of the step, in the group's direction; `w` from offset(), in the group's direction, too,
// so that the same offset rounds the same way whatever the direction.
ZIPCCL_HD uint32_t fine_code(float v, float inverse, float w, uint32_t width) {
  if (width == 1) return static_cast<uint32_t>(nearest_integer(mul_add(v, inverse, w)));
  const uint32_t code = static_cast<uint32_t>(nearest_integer(mul_add(v, inverse, w)) + (1 << (width - 1)));
  // Beyond 8 bits the sum's own rounding can reach one level too far.
  const uint32_t last = (1u << width) - 1;
  return width <= 8 || code < last ? code : last;
}

// y and the value of a code; `step` with the group's direction as its sign.
ZIPCCL_HD float add_fine_value(float y, uint32_t code, float step, uint32_t width) {
  if (width == 1) return add(y, code != 0 ? step : -step);
  return mul_add(static_cast<float>(static_cast<int32_t>(code) - (1 << (width - 1))), step, y);
}

}  // namespace quantizer
}  // namespace zipccl
