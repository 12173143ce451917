// allocate() on the CPU: docs/dynamiq.md, section 3.
#include <algorithm>
#include <cstring>

#include "format/float_mode.h"
#include "quantizer/cpu.h"
#include "quantizer/rows.h"

namespace zipccl {
namespace quantizer {

namespace {
// Keys of a domain's super-groups, from what statistics() laid out.
class Keys {
 public:
  Keys(const Shape& shape, const void* stats) : widths_(shape.widths), stats_(stats) {}
  uint32_t operator[](uint64_t super_group) const {
    return widths_ == Widths::fine ? key_of(static_cast<const uint8_t*>(stats_)[super_group])
                                   : key_of(static_cast<const uint16_t*>(stats_)[super_group]);
  }

 private:
  Widths widths_;
  const void* stats_;
};
}  // namespace

uint64_t plan_scratch_bytes(const Shape& shape) {
  return shape.count == 0 ? 0 : align_up((kKeys + 1) * sizeof(uint32_t));
}

Status allocate(const Shape& shape, const void* stats, uint32_t ranks, void* plan, void* scratch) {
  const Status status = check_allocate(shape, stats, ranks, plan, scratch);
  if (status != Status::ok || shape.count == 0) return status;
  const KeepDenormals keep;
  const Layout l = layout_of(shape);
  const Keys keys(shape, stats);
  uint32_t* at_least = static_cast<uint32_t*>(scratch);
  std::memset(plan, 0, l.orders_at);
  Rows* rows = static_cast<Rows*>(plan);
  uint32_t* order = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(plan) + l.orders_at);
  const uint64_t places = l.slots * shape.parts;  // of a domain

  for (uint64_t d = 0; d < shape.domains; ++d, order += places) {
    const uint64_t first = d * l.domain_groups;
    std::memset(at_least, 0, (kKeys + 1) * sizeof(uint32_t));
    for (uint64_t j = 0; j < l.domain_groups; ++j) ++at_least[keys[first + j]];
    for (uint32_t k = kKeys; k > 0; --k) at_least[k - 1] += at_least[k];
    const Allocation a = allocate_domain(l, shape.widths, shape.parts, at_least);
    rows[d] = a.rows;

    uint32_t equal[kMaxWidth] = {};
    uint64_t of_width[kMaxWidth + 1] = {};
    for (uint64_t j = 0; j < l.domain_groups; ++j) {
      const uint32_t key = keys[first + j], width = allocated_width(a, key, equal);
      for (uint32_t b = 0; b < kMaxWidth; ++b) equal[b] += key == a.at[b].key;
      order[place_of(a.rows, l.slots, width, of_width[width]++)] = static_cast<uint32_t>(first + j);
    }
    // What the super-groups leave over of the rows of each width.
    for (uint32_t width = 0; width <= kMaxWidth; ++width) {
      const uint64_t height =
          (width == 0 ? l.slots : a.rows.of[width - 1]) - (width == kMaxWidth ? 0 : a.rows.of[width]);
      for (uint64_t r = of_width[width]; r < height * shape.parts; ++r)
        order[place_of(a.rows, l.slots, width, r)] = kNoSuperGroup;
    }
  }

  if (shape.widths == Widths::paper) {
    const uint64_t n = shape.domains * l.domain_groups;
    const uint16_t* sums = static_cast<const uint16_t*>(stats) + n;
    float* means = reinterpret_cast<float*>(static_cast<uint8_t*>(plan) + l.means_at);
    for (uint64_t j = 0; j < n; ++j) means[j] = div(bf16_to_float(sums[j]), static_cast<float>(ranks));
  }
  return Status::ok;
}

}  // namespace quantizer
}  // namespace zipccl
