// Checks of arguments, the same for both devices.
#pragma once

#include <cstdint>

#include "quantizer/quantizer.h"

namespace zipccl {
namespace quantizer {

inline bool aligned(const void* p) { return p != nullptr && reinterpret_cast<uintptr_t>(p) % kFrameAlign == 0; }

// Dtype, place and alignment; data may be null.
bool valid(const Values& v);

// bad_argument, or ok.
Status check_statistics(const Shape& shape, const Values& values, const void* stats);
Status check_allocate(const Shape& shape, const void* stats, uint32_t ranks, const void* plan, const void* scratch);
Status check_combine(const Shape& shape, const void* plan, const Combine& job);

}  // namespace quantizer
}  // namespace zipccl
