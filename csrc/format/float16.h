// fp32 <-> bf16 and fp16 bits, round to nearest even, the same on host and device. NaN becomes one quiet NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "format/frame.h"

namespace zipccl {

ZIPCCL_HD uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}
ZIPCCL_HD float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

// Which NaN an operation gives differs between processors.
ZIPCCL_HD float canonical(float f) { return (float_bits(f) & 0x7FFFFFFFu) > 0x7F800000u ? bits_float(0x7FC00000u) : f; }

ZIPCCL_HD float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

ZIPCCL_HD uint16_t float_to_bf16(float f) {
  uint32_t u = float_bits(f);
  uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// Denormals: the integer mantissa times 2^-24 is exact in fp32.
ZIPCCL_HD float f16_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3FFu;
  if (e == 31) return bits_float(sign | 0x7F800000u | (m << 13));
  if (e != 0) return bits_float(sign | ((e + 112) << 23) | (m << 13));
  float magnitude = static_cast<float>(m) * 5.9604644775390625e-8f;
  return bits_float(sign | float_bits(magnitude));
}

ZIPCCL_HD uint16_t float_to_f16(float f) {
  uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return 0x7E00u;
  if (a >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to 65536 or more
  if (a >= 0x38800000u) return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13));
  // Denormal result: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
  return static_cast<uint16_t>(sign | (float_bits(bits_float(a) + 0.5f) - 0x3F000000u));
}

}  // namespace zipccl
