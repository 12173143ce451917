// combine() on the CPU: docs/dynamiq.md, section 8. One slot at a time, so that a super-group stays in the cache.
#include "format/float_mode.h"
#include "quantizer/cpu.h"

namespace zipccl {
namespace quantizer {

namespace {
template <typename T, float (*to_float)(T)>
void load_as(const void* data, uint64_t at, uint64_t n, float* x) {
  const T* values = static_cast<const T*>(data) + at;
  for (uint64_t i = 0; i < n; ++i) x[i] = to_float(values[i]);
}
template <typename T, T (*from_float)(float)>
void store_as(const void* data, uint64_t at, uint64_t n, const float* x) {
  T* values = static_cast<T*>(const_cast<void*>(data)) + at;
  for (uint64_t i = 0; i < n; ++i) values[i] = from_float(x[i]);
}
float same(float v) { return v; }

void add_to(float* y, const float* d, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) y[i] = add(y[i], d[i]);
}
void add_to(float* y, float d, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) y[i] = add(y[i], d);
}
}  // namespace

void load(const Values& values, uint64_t at, uint64_t n, float* x) {
  if (values.dtype == DType::bf16)
    load_as<uint16_t, bf16_to_float>(values.data, at, n, x);
  else if (values.dtype == DType::f16)
    load_as<uint16_t, f16_to_float>(values.data, at, n, x);
  else
    load_as<float, same>(values.data, at, n, x);
  std::fill(x + n, x + kSuperGroup, 0.0f);
}

void store(const Values& values, uint64_t at, uint64_t n, const float* x) {
  if (values.dtype == DType::bf16)
    store_as<uint16_t, float_to_bf16>(values.data, at, n, x);
  else if (values.dtype == DType::f16)
    store_as<uint16_t, float_to_f16>(values.data, at, n, x);
  else
    store_as<float, canonical>(values.data, at, n, x);
}

Status combine(const Shape& shape, const void* plan, const Combine& job) {
  const Status status = check_combine(shape, plan, job);
  if (status != Status::ok || shape.count == 0) return status;
  const KeepDenormals keep;
  const Layout l = layout_of(shape);
  const Plan p = plan_of(l, plan);
  const SlotKernels& kernels = slot_kernels();
  const Rounds rounds = make_rounds(job.key);
  const bool has_means = shape.widths == Widths::paper;
  float y[kSuperGroup], d[kSuperGroup];

  for (uint64_t k = 0; k < job.parts; ++k) {
    const uint64_t part = job.part + k, domain = part / shape.parts;
    const Rows& rows = p.rows[domain];
    uint8_t* packed_out = static_cast<uint8_t*>(job.packed_out) + k * l.part_bytes;
    Slot slot = {};
    for (uint32_t s = 0; s < l.slots; ++s) {
      slot.number = s;
      slot.width = width_of(rows, s);
      const uint32_t super_group = p.order[part * l.slots + s];
      const bool filled = super_group != kNoSuperGroup;
      const Span span = filled ? span_of(l, domain, super_group) : Span{0, 0};
      const uint64_t n = span.end - span.begin;
      const float mean = has_means && filled ? p.means[super_group] : 0.0f;
      const uint64_t in_parts = (k * l.slots + s) * kSuperGroup;
      const auto at = [&](const Values& v) { return v.place == Place::bucket ? span.begin - v.first : in_parts; };

      if (job.x.data != nullptr) {
        load(job.x, at(job.x), n, y);
        if (has_means && job.x.means != 0) add_to(y, -mul(job.x.means, mean), n);
      } else {
        std::fill(y, y + kSuperGroup, 0.0f);
      }
      for (uint32_t i = 0; i < job.packed.n; ++i) {
        if (i == job.packed.skip) continue;
        kernels.unpack(shape.widths, l, slot,
                       static_cast<const uint8_t*>(job.packed.data) + i * job.packed.stride + k * l.part_bytes, y);
      }
      for (uint32_t i = 0; i < kSuperGroup; ++i) y[i] = mul(y[i], job.scale);
      std::fill(y + n, y + kSuperGroup, 0.0f);

      if (job.packed_out == nullptr) {
        if (has_means && job.out.means != 0) add_to(y, mul(job.out.means, mean), n);
        store(job.out, at(job.out), job.out.place == Place::bucket ? n : kSuperGroup, y);
      } else {
        float* residual =
            job.residual == nullptr || n == 0 ? nullptr : job.residual + (span.begin - job.residual_first);
        if (residual != nullptr) add_to(y, residual, n);
        kernels.pack(shape.widths, l, slot, draw_of(rounds, super_group), y, packed_out);
        if (residual != nullptr) {
          std::fill(d, d + kSuperGroup, 0.0f);
          kernels.unpack(shape.widths, l, slot, packed_out, d);
          for (uint64_t i = 0; i < n; ++i) residual[i] = canonical(sub(y[i], d[i]));
        }
      }
      slot.codes_at += uint64_t{slot.width} * kUnitBytes;
    }
    if (job.packed_out != nullptr) {
      std::memset(packed_out + slot.codes_at, 0, l.units * kUnitBytes - slot.codes_at);
      const uint64_t scales = l.units * kUnitBytes + l.slots * scale_bytes(shape.widths);
      std::memset(packed_out + scales, 0, l.part_bytes - scales);
    }
  }
  return Status::ok;
}

}  // namespace quantizer
}  // namespace zipccl
