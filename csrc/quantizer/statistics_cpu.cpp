// statistics() on the CPU: docs/dynamiq.md, section 2.
#include "format/float_mode.h"
#include "quantizer/cpu.h"
#include "quantizer/energy.h"

namespace zipccl {
namespace quantizer {

namespace {
// Sum of n values (a power of two), neighbours first.
float tree_sum(float* v, uint32_t n) {
  for (; n > 1; n /= 2)
    for (uint32_t i = 0; i < n / 2; ++i) v[i] = add(v[2 * i], v[2 * i + 1]);
  return v[0];
}

uint8_t fine_energy(const float* x) {
  float squares[kGroups];
  uint32_t most = 0;
  for (uint32_t g = 0; g < kGroups; ++g) {
    uint32_t m = 0;
    for (uint32_t i = 0; i < kGroup; ++i) m = std::max(m, float_bits(x[g * kGroup + i]) & kMagnitude);
    squares[g] = mul(bits_float(m), bits_float(m));
    most = std::max(most, m);
  }
  return energy_code(tree_sum(squares, kGroups), most);
}

float lane_sum(const float* x, bool squared) {
  float lanes[kSuperGroup / 8];
  for (uint32_t l = 0; l < kSuperGroup / 8; ++l) {
    float sum = squared ? mul(x[8 * l], x[8 * l]) : x[8 * l];
    for (uint32_t i = 1; i < 8; ++i) sum = add(sum, squared ? mul(x[8 * l + i], x[8 * l + i]) : x[8 * l + i]);
    lanes[l] = sum;
  }
  return tree_sum(lanes, kSuperGroup / 8);
}
}  // namespace

Status statistics(const Shape& shape, const Values& values, void* stats, Order) {
  const Status status = check_statistics(shape, values, stats);
  if (status != Status::ok || shape.count == 0) return status;
  const KeepDenormals keep;
  const Layout l = layout_of(shape);
  const uint64_t n = shape.domains * l.domain_groups;
  float x[kSuperGroup];
  for (uint64_t j = 0; j < n; ++j) {
    const Span span = span_of(l, j / l.domain_groups, static_cast<uint32_t>(j));
    load(values, span.begin, span.end - span.begin, x);
    if (shape.widths == Widths::fine) {
      static_cast<uint8_t*>(stats)[j] = fine_energy(x);
    } else {
      static_cast<uint16_t*>(stats)[j] = float_to_bf16(lane_sum(x, true));
      static_cast<uint16_t*>(stats)[n + j] =
          float_to_bf16(div(lane_sum(x, false), static_cast<float>(span.end - span.begin)));
    }
  }
  return Status::ok;
}

}  // namespace quantizer
}  // namespace zipccl
