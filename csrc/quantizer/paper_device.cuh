// Widths::paper on the device: a slot by a warp. docs/dynamiq.md, sections 4 and 7; paper.h has the arithmetic.
#pragma once

#include "quantizer/fine_device.cuh"
#include "quantizer/paper.h"

namespace zipccl {
namespace quantizer {
namespace cuda {

// Tables, in shared memory as every lane looks up its own entries.
struct PaperTables {
  LevelTable<1> two;
  LevelTable<7> four;
  LevelTable<127> eight;

  template <uint32_t kWidth>
  __device__ __forceinline__ const auto& of() const {
    if constexpr (kWidth == 2) {
      return two;
    } else if constexpr (kWidth == 4) {
      return four;
    } else {
      return eight;
    }
  }
};
static __device__ const PaperTables kPaperTables = {make_levels<1>(kEpsilon4), make_levels<7>(kEpsilon4),
                                                    make_levels<127>(kEpsilon8)};
static_assert(sizeof(PaperTables) % 4 == 0, "copied word by word");

template <uint32_t kWidth>
__device__ __forceinline__ void paper_pack(const ScaleArrays& scales, uint32_t slot, uint8_t* part, uint8_t* codes,
                                           uint32_t lane, const LaneOffsets& offsets, uint32_t scale_a,
                                           uint32_t scale_b, bool nearest, const PaperTables& tables,
                                           float (&y)[kLaneValues]) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) most = max(most, float_bits(y[i]) & kMagnitude);
  most = max(most, __shfl_xor_sync(kFullWarp, most, 1));
  const uint32_t maximum = paper_maximum(warp_max(most));
  const bool finite = maximum != kNaN >> 16;
  if (!finite) {
    most = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = 0;
  }
  const float inverse_maximum =
      maximum == 0 || !finite ? 0.0f : div(255.0f, bf16_to_float(static_cast<uint16_t>(maximum)));
  const float m = bits_float(most);
  const float u = nearest ? 0.5f : scale_uniform(hash(scale_a, scale_b, lane / 2).x);
  if (lane % 2 == 0)
    part[scales.first + slot * kGroups + lane / 2] = static_cast<uint8_t>(paper_scale(m, inverse_maximum, u));
  if (lane == 0) *reinterpret_cast<uint16_t*>(part + scales.second + slot * 2) = static_cast<uint16_t>(maximum);

  const float inverse = m < kLeastScale ? 0.0f : div(1.0f, m);
  float w[kLaneValues];
  make_offsets(offsets, 0, lane, w);
  uint32_t code[kLaneValues];
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) code[i] = paper_code(y[i], inverse, w[i], tables.of<kWidth>());
  put_codes<kWidth, 0>(code, codes, lane);
}

template <uint32_t kWidth>
struct PaperInput {
  Codes<kWidth> codes;
  uint32_t scale, maximum;

  __device__ __forceinline__ void load(const ScaleArrays& scales, uint32_t slot, const uint8_t* part, const uint8_t* at,
                                       uint32_t lane) {
    codes.template load<false>(at, lane);  // kOnce costs 2 % here
    scale = part[scales.first + slot * kGroups + lane / 2];
    maximum = *reinterpret_cast<const uint16_t*>(part + scales.second + slot * 2);
  }

  __device__ __forceinline__ void add_to(const PaperTables& tables, float (&y)[kLaneValues]) const {
    constexpr uint32_t kTop = (1u << (kWidth - 1)) - 1;
    const float s = paper_group_scale(scale, bf16_to_float(static_cast<uint16_t>(maximum)));
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) {
      const uint32_t code = codes[i];
      const float magnitude = mul(tables.of<kWidth>().level[code & kTop], s);
      y[i] = add(y[i], code > kTop ? -magnitude : magnitude);
    }
  }
};

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
