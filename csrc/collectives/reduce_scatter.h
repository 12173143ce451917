// Reduce-scatter as an all-to-all of frames and a local sum (ZipCCL section 4.2): nothing is added on the way, so the
// result is the fp32 sum in rank order, rounded once, the same whatever the topology. All-reduce: that, and an
// all-gather of the sums.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "collectives/all_to_all.h"
#include "collectives/place.h"
#include "collectives/traffic.h"

namespace zipccl {

struct ReduceOptions {
  bool average = false;   // divide the sum by the number of ranks
  float premultiply = 1;  // every input is multiplied by this before it is added
  // Dtype that inputs travel in, own ones included (the paper's precision factor s). Lossy where it is narrower.
  std::optional<at::ScalarType> wire_dtype;
};

// Input dtypes: fp32, bf16, fp16.
bool can_reduce(at::ScalarType input, const ReduceOptions& options);

// inputs[r] (any strides) is this rank's part of what rank r sums up; output has the same count and dtype.
Traffic reduce_scatter_zip(const Place& place, const std::vector<at::Tensor>& inputs, at::Tensor output,
                           const PairOptions& pair, const ReduceOptions& reduce);

// In place. With a wire dtype the sums are rounded to it as well, so that all ranks hold the same values.
Traffic all_reduce_zip(const Place& place, at::Tensor tensor, const PairOptions& pair, const ReduceOptions& reduce);

}  // namespace zipccl
