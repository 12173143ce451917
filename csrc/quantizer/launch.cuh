// What the launches of the CUDA quantiser share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "quantizer/device.cuh"
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

// Where a slot's values begin, in bytes. in_run: the slot's number in the call; begin: its first coordinate.
__device__ __forceinline__ uint64_t place_in(const Values& v, uint64_t in_run, uint64_t begin) {
  const uint64_t at = v.place == Place::bucket ? begin - v.first : in_run * kSuperGroup;
  return at * (v.dtype == DType::f32 ? 4 : 2);
}

// Blocks run in rounds, as many at a time as the device holds; slots are dealt so that the last round is full, too.
// warps: of a block; resident: blocks on a multiprocessor; most: slots of a warp, at least 8.
struct Grid {
  uint32_t batch;  // slots of a warp
  unsigned blocks;
};
inline Status deal(uint64_t slots, uint32_t warps, uint32_t resident, uint32_t most, Grid* grid) {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return Status::device_error;
  const uint64_t at_once = static_cast<uint64_t>(processors) * resident * warps;
  const uint64_t rounds = slots < 8 * at_once ? 1 : std::max<uint64_t>(2, ceil_div(slots, at_once * most));
  grid->batch = static_cast<uint32_t>(std::max<uint64_t>(4, ceil_div(slots, at_once * rounds)));
  const uint64_t blocks = ceil_div(slots, uint64_t{grid->batch} * warps);
  if (blocks > INT32_MAX) return Status::unsupported;
  grid->blocks = static_cast<unsigned>(blocks);
  return Status::ok;
}

// combine() of one packed input and nothing else; fine widths.
struct Unpack {
  Layout layout;
  ScaleArrays scales;
  Plan plan;
  uint32_t parts;  // of a domain
  uint64_t part;   // first of the run
  uint32_t slots;  // of the run
  Order order;     // of blocks
  const uint8_t* packed;
  float scale;  // finite, not 0
  Values out;
  bool out_vector;
  uint32_t batch;  // slots per warp, set by unpack()
};
Status unpack(const Unpack& p, cudaStream_t stream);

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
