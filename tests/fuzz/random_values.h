// Random tensors for fuzz_decode.cpp.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "codec/codec.h"

namespace zipccl {

using Bytes = std::vector<uint8_t>;

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }

 private:
  uint64_t state_;
};

// bf16 values, tile by tile of another kind. In half of the groups no tile is constant; some are but for their ends.
inline Bytes random_bf16(Random* r, uint64_t count) {
  Bytes bytes(2 * count);
  bool constants = true;
  for (uint64_t begin = 0; begin < count; begin += kTileValues) {
    if (begin % kGroupValues == 0) constants = r->below(2) != 0;
    const uint64_t kind = constants ? r->below(6) : 1 + r->below(5);
    const uint64_t equal = r->below(8) != 0 ? 0 : begin + 1 + r->below(kTileValues);
    const uint32_t constant = static_cast<uint32_t>(r->next());
    const uint32_t top = static_cast<uint32_t>(r->below(256));
    for (uint64_t i = begin; i < count && i < begin + kTileValues; ++i) {
      const uint64_t bits = r->next();
      const uint32_t steps = static_cast<uint32_t>(__builtin_ctzll(bits | (uint64_t(1) << 40)));
      const uint32_t e = (top - steps) & 0xFF;  // as in real tensors: half as many values each step down
      uint32_t v = static_cast<uint32_t>(bits >> 41) & 0x807F;
      if (kind == 1) v = static_cast<uint32_t>(bits >> 41);                          // random bits
      if (kind == 2) v |= (top + static_cast<uint32_t>(bits >> 60) % 4) % 256 << 7;  // no escapes
      if (kind == 3) v |= ((bits >> 58) % 9 == 0 ? static_cast<uint32_t>(bits) & 0xFF : e) << 7;
      if (kind >= 4) v |= e << 7;
      if (kind == 0 || i < equal) v = constant;
      const uint16_t value = static_cast<uint16_t>(v);
      std::memcpy(&bytes[2 * i], &value, 2);
    }
  }
  return bytes;
}

// Elements of code dense, tile by tile of another kind: equal, any bits, or one exponent half as often as the next one,
// with mantissas that a shorter type may hold, and zeros between.
inline Bytes random_elements(Random* r, const dense::Format& f, uint64_t elements) {
  Bytes bytes(elements * f.bytes);
  for (uint64_t begin = 0; begin < elements; begin += kTileValues) {
    const uint64_t kind = r->below(7), constant = r->next(), top = r->below(uint64_t{1} << f.exponent_bits);
    for (uint64_t i = begin; i < elements && i < begin + kTileValues; ++i) {
      const uint64_t bits = r->next(), sign_mantissa = r->next();
      const uint64_t e = top - static_cast<uint64_t>(__builtin_ctzll(bits | uint64_t{1} << 40));
      const uint64_t exponent_mask = (uint64_t{1} << f.exponent_bits) - 1;
      uint64_t mantissa = sign_mantissa & ((uint64_t{1} << f.mantissa_bits) - 1);
      const uint32_t kept = kind == 3 ? 7 : kind == 4 ? 10 : kind == 5 ? 23 : 52;
      if (kept < f.mantissa_bits) mantissa &= ~uint64_t{0} << (f.mantissa_bits - kept);
      uint64_t v = sign_mantissa >> 63 << (8 * f.bytes - 1) | (e & exponent_mask) << f.mantissa_bits | mantissa;
      if (kind == 0) v = constant;
      if (kind == 1 || f.exponent_bits == 0) v = bits;
      if (kind == 6 && bits >> 60 < 5) v = 0;
      std::memcpy(&bytes[f.bytes * i], &v, f.bytes);
    }
  }
  return bytes;
}

}  // namespace zipccl
