// The quantiser on tensors: dispatch by device, checks of status, scratch.
//
// CPU: a call is done when it returns. CUDA: it is enqueued on the current stream, and none waits for the device.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "collectives/engine.h"
#include "quantizer/quantizer.h"

namespace zipccl {

// Whether the quantiser takes tensors of this dtype: fp32, bf16 and fp16.
bool can_quantize(at::ScalarType type);

// Contiguous values in the bucket's places; `first`: coordinate of the first.
quantizer::Values values_of(const at::Tensor& t, uint64_t first, float means);

// A bucket's shape with what all ranks have agreed on.
class Plan {
 public:
  Plan(const quantizer::Shape& shape, at::Device device, const std::string& what);

  const quantizer::Shape& shape() const { return shape_; }
  int64_t part_bytes() const { return part_bytes_; }

  // This rank's statistics of the bucket, 1-D, in the dtype they are to be reduced in (by maximum if stats_maximum()).
  at::Tensor statistics(Engine& engine, const at::Tensor& bucket, quantizer::Order order) const;
  bool stats_maximum() const { return stats_.maximum; }
  // `stats`: those of so many ranks, reduced.
  void allocate(Engine& engine, const at::Tensor& stats, int ranks);

  void combine(const quantizer::Combine& job) const;

 private:
  quantizer::Shape shape_;
  quantizer::StatsFormat stats_;
  int64_t part_bytes_;
  at::Device device_;
  std::string what_;
  at::Tensor plan_;
};

}  // namespace zipccl
