// Levels and scales of Widths::paper: docs/dynamiq.md, section 7. Host and device.
//
// A value is the group's largest magnitude times a sign times one of the levels
//   f(r) = ((1 + 2 e^2)^r - 1) / ((1 + 2 e^2)^R - 1),  r = 0 .. R = 2^(b-1) - 1,
// which lie closer together near zero. The largest magnitude is sent as an 8-bit fraction of the super-group's, rounded
// stochastically and independently of the values, and that one as a bf16.
#pragma once

#include <cstdint>

#include "quantizer/arithmetic.h"

namespace zipccl {
namespace quantizer {

// e for 4 and 8 bits. The paper does not give it; these are the values of its authors' simulation. Two bits have the
// levels 0 and 1 whatever e is.
constexpr double kEpsilon4 = 0.20;
constexpr double kEpsilon8 = 0.08;

constexpr uint32_t kCells = 1024;  // of LevelTable::at_or_below; finer than any two levels lie

template <uint32_t kTop>  // R
struct LevelTable {
  float level[kTop + 1];            // f(r)
  float inverse_gap[kTop];          // 1 / (f(r + 1) - f(r))
  uint8_t at_or_below[kCells + 1];  // largest r below R with f(r) <= i / kCells
};

template <uint32_t kTop>
constexpr LevelTable<kTop> make_levels(double epsilon) {
  LevelTable<kTop> t = {};
  const double base = 1 + 2 * epsilon * epsilon;
  double power[kTop + 1] = {1};
  for (uint32_t r = 1; r <= kTop; ++r) power[r] = power[r - 1] * base;
  for (uint32_t r = 0; r <= kTop; ++r) t.level[r] = static_cast<float>((power[r] - 1) / (power[kTop] - 1));
  for (uint32_t r = 0; r < kTop; ++r)
    t.inverse_gap[r] = static_cast<float>(1 / (static_cast<double>(t.level[r + 1]) - static_cast<double>(t.level[r])));
  uint32_t r = 0;
  for (uint32_t i = 0; i <= kCells; ++i) {
    while (r + 1 < kTop && t.level[r + 1] <= static_cast<float>(i) / kCells) ++r;
    t.at_or_below[i] = static_cast<uint8_t>(r);
  }
  return t;
}

// Magnitudes below this are not divided by: a super-group's scale is at least this, groups below it are sent as zeros.
constexpr float kLeastScale = 0x1p-100f;

// bf16 bits of a super-group's scale, the largest magnitude rounded up; the NaN of bf16 when it is not finite there.
ZIPCCL_HD uint32_t paper_maximum(uint32_t most) {
  if (most == 0) return 0;
  const uint32_t least = float_bits(kLeastScale);
  const uint32_t up = ((most < least ? least : most) + 0xFFFFu) >> 16;
  return up >= kInfinity >> 16 ? kNaN >> 16 : up;
}

// r_G of a group with largest magnitude `most`; inverse = 255 / the super-group's scale, 0 for 0. u in [0, 1).
ZIPCCL_HD uint32_t paper_scale(float most, float inverse, float u) {
  const float r = mul(most, inverse);
  const float up = add(r < 255.0f ? r : 255.0f, u);
  return most < kLeastScale ? 0u : static_cast<uint32_t>(up);
}

// u of a group's scale.
ZIPCCL_HD float scale_uniform(uint32_t word) { return mul(static_cast<float>(word >> 16), 0x1p-16f); }

// sf_G = r_G * sf / 255.
ZIPCCL_HD float paper_group_scale(uint32_t r, float maximum) {
  return mul(static_cast<float>(r), mul(maximum, 0x1.010102p-8f));
}

// Code of a value: sign in bit b - 1, magnitude below it. inverse = 1 / largest magnitude of the group, 0 for a group
// sent as zeros; w from offset(), 0 for rounding to nearest.
template <uint32_t kTop>
ZIPCCL_HD uint32_t paper_code(float v, float inverse, float w, const LevelTable<kTop>& t) {
  const float ratio = mul(bits_float(float_bits(v) & kMagnitude), inverse);
  const float z = ratio < 1.0f ? ratio : 1.0f;
  uint32_t r = t.at_or_below[static_cast<uint32_t>(mul(z, static_cast<float>(kCells)))];
  if (r + 1 < kTop && t.level[r + 1] <= z) ++r;
  const float u = sub(0.5f, bits_float(float_bits(w) ^ (float_bits(v) & ~kMagnitude)));
  r += u < mul(sub(z, t.level[r]), t.inverse_gap[r]);
  return r | (float_bits(v) >> 31) * (kTop + 1);
}

}  // namespace quantizer
}  // namespace zipccl
