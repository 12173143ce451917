// Where things lie in a plan and in a packed part: docs/dynamiq.md, sections 2 and 4. Host and device.
#pragma once

#include <cstdint>

#include "quantizer/quantizer.h"

namespace zipccl {
namespace quantizer {

constexpr uint32_t kMaxWidth = 12;                // Widths::fine
constexpr uint32_t kMaxPaperWidth = 8;            // Widths::paper
constexpr uint32_t kUnitBytes = kSuperGroup / 8;  // one bit for each coordinate of a super-group
constexpr uint32_t kNoSuperGroup = UINT32_MAX;
constexpr uint32_t kGroups = kSuperGroup / kGroup;  // of a super-group

// Bytes of a slot's scales.
constexpr uint32_t kFineScaleBytes = kGroups / 2 + kGroups / 8 + 1;  // 4-bit scale, direction; exponent
constexpr uint32_t kPaperScaleBytes = kGroups + 2;                   // 8-bit scale; bf16 maximum
ZIPCCL_HD uint32_t scale_bytes(Widths widths) { return widths == Widths::fine ? kFineScaleBytes : kPaperScaleBytes; }

// Everything that follows from a Shape. All zero for an empty bucket.
struct Layout {
  uint64_t domain_count;   // coordinates of a domain
  uint64_t domain_groups;  // super-groups of a domain
  uint64_t slots;          // of a part
  uint64_t units;          // of a part's codes
  uint64_t part_bytes;
  uint64_t orders_at, means_at, plan_bytes;  // in a plan
  uint32_t lowest;                           // width of any super-group that holds something
};
Layout layout_of(const Shape& shape);

// A plan in memory.
struct Rows {
  uint32_t of[kMaxWidth];  // of[b - 1]: slots with a width of at least b; never increasing
};
struct Plan {
  const Rows* rows;       // per domain
  const uint32_t* order;  // per slot, part by part: super-group of the bucket, or kNoSuperGroup
  const float* means;     // per super-group; Widths::paper alone
};
ZIPCCL_HD Plan plan_of(const Layout& layout, const void* plan) {
  const uint8_t* p = static_cast<const uint8_t*>(plan);
  return {reinterpret_cast<const Rows*>(p), reinterpret_cast<const uint32_t*>(p + layout.orders_at),
          reinterpret_cast<const float*>(p + layout.means_at)};
}

ZIPCCL_HD uint32_t width_of(const Rows& rows, uint32_t slot) {
  uint32_t width = 0;
  for (uint32_t b = 0; b < kMaxWidth; ++b) width += slot < rows.of[b];
  return width;
}

// Where a slot's codes begin in its part.
ZIPCCL_HD uint64_t codes_at(const Rows& rows, uint32_t slot) {
  uint64_t units = 0;
  for (uint32_t b = 0; b < kMaxWidth; ++b) units += slot < rows.of[b] ? slot : rows.of[b];
  return units * kUnitBytes;
}

// The codes of a slot, up to 8 bits wide: coordinates 8 l to 8 l + 7 make one word of 8 * width bits, and the words lie
// in up to three runs of 32 pieces each, of 8, 4, 2 or 1 bytes: the width's powers of two, from the largest and from
// the words' low ends. Wider codes: their low 8 bits like codes of 8 bits, and behind them the others. Where a slot's
// scales lie in its part, behind the codes: fine, three arrays; paper, two.
ZIPCCL_HD uint64_t fine_scales_at(const Layout& l, uint64_t slot) { return l.units * kUnitBytes + slot * 8; }
ZIPCCL_HD uint64_t fine_directions_at(const Layout& l, uint64_t slot) {
  return l.units * kUnitBytes + l.slots * 8 + slot * 2;
}
ZIPCCL_HD uint64_t fine_exponents_at(const Layout& l, uint64_t slot) {
  return l.units * kUnitBytes + l.slots * 10 + slot;
}
ZIPCCL_HD uint64_t paper_scales_at(const Layout& l, uint64_t slot) { return l.units * kUnitBytes + slot * kGroups; }
ZIPCCL_HD uint64_t paper_maxima_at(const Layout& l, uint64_t slot) {
  return l.units * kUnitBytes + l.slots * kGroups + slot * 2;
}

// Coordinates of the bucket in a slot's super-group: [begin, end), end - begin at most kSuperGroup.
struct Span {
  uint64_t begin, end;
};
ZIPCCL_HD Span span_of(const Layout& l, uint64_t domain, uint32_t super_group) {
  const uint64_t first = domain * l.domain_count,
                 begin = first + (super_group - domain * l.domain_groups) * kSuperGroup;
  const uint64_t last = first + l.domain_count;
  return {begin, begin + kSuperGroup < last ? begin + kSuperGroup : last};
}

}  // namespace quantizer
}  // namespace zipccl
