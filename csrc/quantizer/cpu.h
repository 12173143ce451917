// Internals of the CPU quantiser, shared by its .cpp files and by nobody else. The interface is quantizer.h.
//
// statistics_cpu.cpp   statistics()
// allocate_cpu.cpp     allocate()
// combine_cpu.cpp      combine(): a slot at a time
// slots_cpu.cpp        one slot: values <-> codes and scales, once per instruction set
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "format/float16.h"
#include "quantizer/arguments.h"
#include "quantizer/layout.h"
#include "quantizer/random.h"

namespace zipccl {
namespace quantizer {

// x[0 .. n): values.data[at .. at + n) in fp32; zeros up to kSuperGroup.
void load(const Values& values, uint64_t at, uint64_t n, float* x);
// values.data[at .. at + n): x rounded to the dtype.
void store(const Values& values, uint64_t at, uint64_t n, const float* x);

// A slot of a packed part.
struct Slot {
  uint32_t number;
  uint32_t width;
  uint64_t codes_at;
};

// Random numbers of a slot's super-group.
struct Draw {
  Words4 own, shared;
  Stratum stratum;
  bool nearest;
};
inline Draw draw_of(const Rounds& rounds, uint32_t super_group) {
  const Words4 own = super_group_words(rounds.own, super_group), shared = super_group_words(rounds.shared, super_group);
  const uint32_t place = permuted(rounds.index, rounds.of, shared);
  return {own, shared, make_stratum(place, stratum_scale(rounds.of)), rounds.nearest != 0};
}

struct SlotKernels {
  // y[kSuperGroup] to the slot's codes and scales in `part`.
  void (*pack)(Widths widths, const Layout& layout, const Slot& slot, const Draw& draw, const float* y, uint8_t* part);
  // The other way round: adds to y.
  void (*unpack)(Widths widths, const Layout& layout, const Slot& slot, const uint8_t* part, float* y);
};
const SlotKernels& slot_kernels();

}  // namespace quantizer
}  // namespace zipccl
