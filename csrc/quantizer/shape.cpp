// Sizes: docs/dynamiq.md, section 2. Checks of arguments.
#include "quantizer/arguments.h"
#include "quantizer/layout.h"

namespace zipccl {
namespace quantizer {

namespace {
constexpr uint64_t kMostSuperGroups = UINT32_MAX - 1;  // numbers of super-groups are 32-bit
constexpr uint64_t kMostCount = kMostSuperGroups * kSuperGroup / 2;
// One bit cannot say zero. (3 is meant, less what few members' statistics take: collectives/dynamiq.cpp.)
constexpr float kExactZeros = 2.9f;

uint64_t stats_bytes(Widths widths, uint64_t super_groups) { return super_groups * (widths == Widths::fine ? 1 : 4); }

bool finite_in(float v, float low, float high) { return v >= low && v <= high; }
}  // namespace

Status check(const Shape& shape) {
  if (shape.domains < 1 || shape.parts < 1 || shape.count % shape.domains != 0 || shape.count > kMostCount ||
      !finite_in(shape.bits, 1, 16) || (shape.widths != Widths::fine && shape.widths != Widths::paper))
    return Status::bad_argument;
  const uint64_t domain_groups = ceil_div(shape.count / shape.domains, kSuperGroup);
  const uint64_t slots = ceil_div(domain_groups, shape.parts);
  if (shape.count != 0 && slots * shape.parts > kMostSuperGroups / shape.domains) return Status::bad_argument;
  return Status::ok;
}

Layout layout_of(const Shape& shape) {
  Layout l = {};
  if (shape.count == 0) return l;
  l.domain_count = shape.count / shape.domains;
  l.domain_groups = ceil_div(l.domain_count, kSuperGroup);
  l.slots = ceil_div(l.domain_groups, shape.parts);

  const uint64_t super_groups = shape.domains * l.domain_groups, all_parts = uint64_t{shape.domains} * shape.parts;
  const uint64_t budget = static_cast<uint64_t>(static_cast<double>(shape.bits) * static_cast<double>(shape.count)) / 8;
  const uint64_t stats = stats_bytes(shape.widths, super_groups);
  const uint64_t available = budget > stats ? (budget - stats) / all_parts / kFrameAlign * kFrameAlign : 0;
  const uint64_t scales = align_up(scale_bytes(shape.widths) * l.slots);
  const bool fine = shape.widths == Widths::fine;
  l.lowest = fine && shape.bits < kExactZeros ? 1 : 2;
  l.units = available > scales ? (available - scales) / kUnitBytes : 0;
  if (l.units < l.lowest * l.slots) l.units = l.lowest * l.slots;
  if (fine && l.units >= 4 * l.slots) l.lowest = 3;
  const uint64_t widest = fine ? kMaxWidth : kMaxPaperWidth;
  if (l.units > widest * l.slots) l.units = widest * l.slots;
  l.part_bytes = l.units * kUnitBytes + scales;

  l.orders_at = align_up(sizeof(Rows) * shape.domains);
  l.means_at = l.orders_at + align_up(sizeof(uint32_t) * all_parts * l.slots);
  l.plan_bytes = l.means_at + (shape.widths == Widths::paper ? align_up(sizeof(float) * super_groups) : 0);
  return l;
}

uint64_t super_groups(const Shape& shape) { return shape.domains * layout_of(shape).domain_groups; }
uint64_t slots(const Shape& shape) { return layout_of(shape).slots; }
uint64_t part_bytes(const Shape& shape) { return layout_of(shape).part_bytes; }
uint64_t plan_bytes(const Shape& shape) { return layout_of(shape).plan_bytes; }

StatsFormat stats_format(const Shape& shape) {
  const uint64_t n = super_groups(shape);
  if (shape.widths == Widths::fine) return {DType::u8, true, n, n};
  return {DType::bf16, false, 2 * n, 4 * n};
}

// ---- Arguments ------------------------------------------------------------------------------------------------

bool valid(const Values& v) {
  const uint64_t bytes = v.dtype == DType::f32 ? 4 : v.dtype == DType::bf16 || v.dtype == DType::f16 ? 2 : 0;
  return bytes != 0 && (v.place == Place::bucket || v.place == Place::parts) &&
         reinterpret_cast<uintptr_t>(v.data) % bytes == 0;
}

Status check_statistics(const Shape& shape, const Values& values, const void* stats) {
  if (check(shape) != Status::ok || !valid(values) || values.place != Place::bucket || values.first != 0)
    return Status::bad_argument;
  return shape.count != 0 && (values.data == nullptr || stats == nullptr) ? Status::bad_argument : Status::ok;
}

Status check_allocate(const Shape& shape, const void* stats, uint32_t ranks, const void* plan, const void* scratch) {
  if (check(shape) != Status::ok || ranks == 0) return Status::bad_argument;
  return shape.count != 0 && (stats == nullptr || !aligned(plan) || !aligned(scratch)) ? Status::bad_argument
                                                                                       : Status::ok;
}

Status check_combine(const Shape& shape, const void* plan, const Combine& job) {
  if (check(shape) != Status::ok) return Status::bad_argument;
  const uint64_t all = uint64_t{shape.domains} * shape.parts;
  if (job.parts > all || job.part > all - job.parts) return Status::bad_argument;
  if (shape.count == 0 || job.parts == 0) return Status::ok;
  const bool packs = job.packed_out != nullptr;
  if (!aligned(plan) || !valid(job.x) || !valid(job.out) || packs == (job.out.data != nullptr))
    return Status::bad_argument;
  if (packs && (!aligned(job.packed_out) || job.key.of < 1 || job.key.of > 65536 || job.key.index >= job.key.of))
    return Status::bad_argument;
  if (job.packed.n != 0 && (!aligned(job.packed.data) || job.packed.stride % kFrameAlign != 0))
    return Status::bad_argument;
  const uint64_t begin = job.part / shape.parts * (shape.count / shape.domains);  // of the first part's domain
  if ((job.x.data != nullptr && job.x.place == Place::bucket && job.x.first > begin) ||
      (job.out.data != nullptr && job.out.place == Place::bucket && job.out.first > begin))
    return Status::bad_argument;
  if (job.residual != nullptr &&
      (!packs || job.residual_first > begin || reinterpret_cast<uintptr_t>(job.residual) % sizeof(float) != 0))
    return Status::bad_argument;
  return Status::ok;
}

}  // namespace quantizer
}  // namespace zipccl
