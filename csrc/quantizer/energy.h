// The energy of a super-group as one byte (Widths::fine): docs/dynamiq.md, section 2. Host and device.
#pragma once

#include <cstdint>

#include "quantizer/arithmetic.h"

namespace zipccl {
namespace quantizer {

// sum: of the squares of the groups' largest magnitudes; most: bits of the largest magnitude of all.
// 0: zeros alone; 255: something is not finite; else 1 to 254 in half octaves, saturating, 1 being below 2^-79.5.
ZIPCCL_HD uint8_t energy_code(float sum, uint32_t most) {
  constexpr uint32_t kHalfOctave = 0x3504F3u;  // mantissa of the square root of 2
  constexpr int32_t kBias = 93;
  if (most == 0) return 0;
  if (most >= kInfinity) return 255;
  const uint32_t bits = float_bits(sum);
  const int32_t code = static_cast<int32_t>(bits >> 23) * 2 + ((bits & 0x7FFFFFu) >= kHalfOctave) - kBias;
  return static_cast<uint8_t>(code < 1 ? 1 : code > 254 ? 254 : code);
}

}  // namespace quantizer
}  // namespace zipccl
