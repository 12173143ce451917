// Random numbers of the quantiser, the same on host and device: docs/dynamiq.md, section 5.
//
// A number depends on (seed, step, bucket, index) through a pair of 64-bit keys made once per call, on the super-group
// through one Philox block per key, and on the coordinate through a 32-bit hash of that block.
#pragma once

#include <cstdint>

#include "format/float16.h"
#include "quantizer/arithmetic.h"
#include "quantizer/quantizer.h"

namespace zipccl {
namespace quantizer {

struct Words4 {
  uint32_t w[4];
};

// Philox4x32-10 (Salmon et al., SC 2011).
ZIPCCL_HD Words4 philox(uint32_t key0, uint32_t key1, Words4 c) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c.w[0], b = static_cast<uint64_t>(0xCD9E8D57u) * c.w[2];
    c = {{static_cast<uint32_t>(b >> 32) ^ c.w[1] ^ key0, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.w[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// What all super-groups of a call have in common.
struct Rounds {
  uint32_t own[2];     // key of this index's numbers
  uint32_t shared[2];  // key of what all indices have in common: who gets which stratum
  uint32_t index, of;
  uint32_t nearest;
};

// Constants of the map from a random word to a rounding offset; see offset().
struct Stratum {
  float scale, shift;
};

inline Rounds make_rounds(const Key& key) {
  const uint32_t low = static_cast<uint32_t>(key.seed), high = static_cast<uint32_t>(key.seed >> 32);
  const uint32_t step = static_cast<uint32_t>(key.step), step_high = static_cast<uint32_t>(key.step >> 32);
  const Words4 own = philox(low, high, {{step, step_high, key.bucket, key.index}});
  const Words4 shared = philox(low, high, {{step, step_high, key.bucket, UINT32_MAX}});
  return {{own.w[0], own.w[1]}, {shared.w[0], shared.w[1]}, key.index, key.of, key.rounding == Rounding::nearest};
}

ZIPCCL_HD Words4 super_group_words(const uint32_t (&key)[2], uint32_t super_group) {
  return philox(key[0], key[1], {{super_group, 0, 0, 0}});
}

// Where a random permutation of [0, of) takes `index`: keyed rounds on the next power of two, repeated until the result
// is below `of`, then a rotation, which makes every place exactly as likely.
ZIPCCL_HD uint32_t permuted(uint32_t index, uint32_t of, const Words4& keys) {
  if (of == 1) return 0;
  uint32_t bits = 1;
  while ((of - 1) >> bits != 0) ++bits;
  const uint32_t mask = (1u << bits) - 1, shift = (bits + 1) / 2;
  uint32_t x = index;
  do {
    for (int round = 0; round < 6; ++round) {
      const int next = round == 5 ? 0 : round + 1;
      const uint32_t add = keys.w[round / 2] >> 16 * (round & 1) & 0xFFFFu;
      const uint32_t factor = (keys.w[next / 2] >> 16 * (next & 1) & 0xFFFFu) >> 8 | 1u;
      x = (x + add) * factor & mask;
      x ^= x >> shift;
    }
  } while (x >= of);
  x += static_cast<uint32_t>(static_cast<uint64_t>(keys.w[3]) * of >> 32);
  return x >= of ? x - of : x;
}

// The offsets of a coordinate's `of` roundings lie in `of` equal intervals, one in each; this index's is `place`.
constexpr float kSpread = 0.999969482421875f;  // 1 - 2^-15, see offset()
inline float stratum_scale(uint32_t of) { return mul(div(1.0f, static_cast<float>(of)), kSpread); }
ZIPCCL_HD Stratum make_stratum(uint32_t place, float scale) {
  return {scale, sub(mul(static_cast<float>(place), scale), add(scale, 0.5f * kSpread))};
}

// Two words for four coordinates (or the first for a group's scale). a, b: words of the super-group. The upper and the
// lower ends of the words are what is used: both products spread every bit of the sum that far.
struct Words2 {
  uint32_t x, y;
};
ZIPCCL_HD Words2 hash(uint32_t a, uint32_t b, uint32_t i) {
  const uint64_t product = static_cast<uint64_t>(a + i * 0x9E3779B9u) * 0xD2511F53u;
  const uint32_t mixed = static_cast<uint32_t>(product) ^ static_cast<uint32_t>(product >> 32) ^ b;
  return {mixed * 0x846CA68Bu, mixed * 0x9E3779B1u};
}

// Coordinates 4 j to 4 j + 3 of a super-group make these of the words of hash(.., j): first x, first y, second x,
// second y; numbers in [1, 2).
ZIPCCL_HD float first_share(uint32_t word) { return bits_float(0x3F800000u | word >> 9); }
ZIPCCL_HD float second_share(uint32_t word) { return bits_float(0x3F800000u | (word << 7 & 0x7FFFFFu)); }

// Rounding offset: what is added before rounding to the nearest integer, within +-(0.5 - 2^-16 + 2^-22). The little
// room on both sides makes sure that integers up to 128 stay what they are in spite of fp32's own rounding.
ZIPCCL_HD float offset(float share, Stratum s) { return mul_add(share, s.scale, s.shift); }

// One permutation serves a whole super-group, so a rank would round its coordinates up together or down together.
// Therefore every other offset is negated: the odd ones of each 8 coordinates, or, where bit (coordinate / 8) is set,
// the even ones. shared: words that all indices share.
ZIPCCL_HD uint32_t signs_of(const Words4& shared) { return hash(shared.w[0], shared.w[1], 0).x; }
ZIPCCL_HD Stratum with_sign(Stratum s, bool negative) {
  return {negative ? -s.scale : s.scale, negative ? -s.shift : s.shift};
}

}  // namespace quantizer
}  // namespace zipccl
