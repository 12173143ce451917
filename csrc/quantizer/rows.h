// How many bits go where: docs/dynamiq.md, section 3. Host and device; integers alone.
#pragma once

#include <cstdint>

#include "quantizer/layout.h"

namespace zipccl {
namespace quantizer {

// Super-groups are ranked by a key, a logarithm of their energy, 0 for one that holds zeros alone.
constexpr uint32_t kKeys = 4096;

// Key of an element of the (reduced) statistics. paper: exponent and four mantissa bits of the squared norm.
ZIPCCL_HD uint32_t key_of(uint8_t stat) { return stat; }
ZIPCCL_HD uint32_t key_of(uint16_t squared_norm) { return (squared_norm & 0x7FFFu) >> 3; }

// A super-group is promoted to more bits when its key plus `offset` reaches a threshold that is the same for all
// promotions: the offset is the logarithm of the error that one more bit takes away.
struct Promotion {
  uint32_t offset;
  uint32_t cost;         // bits
  uint32_t first, last;  // Rows::of[first - 1] to of[last - 1] count those promoted
};
constexpr uint32_t kMostPromotions = kMaxWidth - 1;
struct Promotions {
  uint32_t n;
  Promotion of[kMostPromotions];
};
ZIPCCL_HD Promotions promotions_of(Widths widths, uint32_t lowest) {
  if (widths == Widths::paper) return {2, {{79, 2, 3, 4}, {0, 4, 5, 8}}};  // T_4,8 / T_2,4 = 512/17 = 2^(78.6/16)
  // Twice the binary logarithm of the error of width b - 1 less that of width b, b = 2 .. 12, relative to the last.
  constexpr uint8_t kOffsets[] = {45, 38, 33, 28, 24, 20, 16, 12, 8, 4, 0};
  Promotions promotions = {kMaxWidth - lowest, {}};
  for (uint32_t p = 0; p < promotions.n; ++p) {
    const uint32_t width = lowest + 1 + p;
    promotions.of[p] = {kOffsets[width - 2], 1, width, width};
  }
  return promotions;
}

// The super-groups of the highest keys that get a width of at least b: all with a larger key, and `quota` of those with
// this key, in the bucket's order.
struct Boundary {
  uint32_t key, quota;
};
struct Allocation {
  Rows rows;
  Boundary at[kMaxWidth];  // at[b - 1]
};

// Rows that promotion p would get at threshold t.
ZIPCCL_HD uint32_t promoted_rows(const uint32_t* at_least, uint32_t t, const Promotion& p, uint32_t parts,
                                 uint32_t most) {
  uint32_t key = t > p.offset ? t - p.offset : 0;
  key = key < 1 ? 1 : key > kKeys ? kKeys : key;
  const uint64_t rows = (uint64_t{at_least[key]} + parts / 2) / parts;
  return rows < most ? static_cast<uint32_t>(rows) : most;
}

// at_least[k]: super-groups of the domain with a key of at least k, k = 0 .. kKeys.
ZIPCCL_HD Allocation allocate_domain(const Layout& layout, Widths widths, uint32_t parts, const uint32_t* at_least) {
  const Promotions promotions = promotions_of(widths, layout.lowest);
  const uint32_t slots = static_cast<uint32_t>(layout.slots);
  const uint32_t base = widths == Widths::paper ? slots : static_cast<uint32_t>(ceil_div(at_least[1], parts));
  const uint64_t rest = layout.units - uint64_t{layout.lowest} * base;

  // The lowest threshold that the rest pays for.
  uint32_t low = 1, high = kKeys + promotions.of[0].offset;
  while (low < high) {
    const uint32_t t = (low + high) / 2;
    uint64_t cost = 0;
    for (uint32_t p = 0; p < promotions.n; ++p)
      cost += uint64_t{promotions.of[p].cost} * promoted_rows(at_least, t, promotions.of[p], parts, base);
    if (cost <= rest)
      high = t;
    else
      low = t + 1;
  }

  uint32_t rows[kMostPromotions];
  uint64_t left = rest;
  for (uint32_t p = 0; p < promotions.n; ++p) {
    rows[p] = promoted_rows(at_least, low, promotions.of[p], parts, base);
    left -= uint64_t{promotions.of[p].cost} * rows[p];
  }
  // What is left goes to rows of the next lower threshold, then to any.
  for (uint32_t pass = 0; pass < 2; ++pass) {
    for (uint32_t p = 0; p < promotions.n; ++p) {
      const uint32_t limit = p == 0 ? base : rows[p - 1];
      const uint32_t next =
          pass == 1 || low == 1 ? limit : promoted_rows(at_least, low - 1, promotions.of[p], parts, base);
      const uint32_t most = next < limit ? next : limit;
      const uint64_t affordable = left / promotions.of[p].cost;
      const uint32_t wanted = most > rows[p] ? most - rows[p] : 0;
      const uint32_t more = wanted < affordable ? wanted : static_cast<uint32_t>(affordable);
      rows[p] += more;
      left -= uint64_t{promotions.of[p].cost} * more;
    }
  }

  Allocation a = {};
  for (uint32_t b = 1; b <= layout.lowest; ++b) a.rows.of[b - 1] = base;
  for (uint32_t p = 0; p < promotions.n; ++p)
    for (uint32_t b = promotions.of[p].first; b <= promotions.of[p].last; ++b) a.rows.of[b - 1] = rows[p];

  for (uint32_t b = 0; b < kMaxWidth; ++b) {
    const uint64_t places = uint64_t{a.rows.of[b]} * parts;
    const uint32_t wanted = places < at_least[0] ? static_cast<uint32_t>(places) : at_least[0];
    uint32_t key = 0, above = kKeys;  // at_least[key] >= wanted, at_least[above] < wanted, or above == kKeys
    while (key + 1 < above) {
      const uint32_t k = (key + above) / 2;
      if (at_least[k] >= wanted)
        key = k;
      else
        above = k;
    }
    a.at[b] = {key, wanted - at_least[key + 1]};
  }
  return a;
}

// Width of a super-group. equal[b - 1]: super-groups before it with key at[b - 1].key.
ZIPCCL_HD uint32_t allocated_width(const Allocation& a, uint32_t key, const uint32_t (&equal)[kMaxWidth]) {
  uint32_t width = 0;
  for (uint32_t b = 0; b < kMaxWidth; ++b)
    width += key > a.at[b].key || (key == a.at[b].key && equal[b] < a.at[b].quota);
  return width;
}

// Place, part of the domain times slots + slot, of the r-th super-group of a width. Those of one width fill their rows
// part by part, so that a part consists of a few runs of the bucket.
ZIPCCL_HD uint64_t place_of(const Rows& rows, uint64_t slots, uint32_t width, uint64_t r) {
  const uint64_t begin = width == kMaxWidth ? 0 : rows.of[width];
  const uint64_t height = (width == 0 ? slots : rows.of[width - 1]) - begin;
  return r / height * slots + begin + r % height;
}

}  // namespace quantizer
}  // namespace zipccl
