// What the launches of the CUDA quantiser share, on the host.
#pragma once

#include <cuda_runtime.h>

#include "quantizer/layout.h"

namespace zipccl {
namespace quantizer {
namespace cuda {

inline Status launched() { return cudaGetLastError() == cudaSuccess ? Status::ok : Status::device_error; }

// Whether 8 neighbouring values of a super-group always begin at 16 bytes.
inline bool whole_vectors(const Layout& l, const Shape& shape, const Values& v) {
  const uint64_t bytes = dtype_bytes(static_cast<uint8_t>(v.dtype));
  if (reinterpret_cast<uintptr_t>(v.data) % 16 != 0) return false;
  return v.place == Place::parts ||
         (v.first * bytes % 16 == 0 && (shape.domains == 1 || l.domain_count * bytes % 16 == 0));
}

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
