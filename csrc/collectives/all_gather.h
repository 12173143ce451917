// All-gather of frames: encode, agree on sizes, one padded byte all-gather, decode into place (ZipCCL section 4.2).
//
// On CUDA, calls that are not too large do not wait for the sizes: as much of every frame as the largest one is
// expected to have (forecast.h) goes while the sizes travel, a rest behind it only where that was too little.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "collectives/place.h"
#include "collectives/traffic.h"

namespace zipccl {

// One tensor to gather. Every rank passes inputs of the same dtype; counts may differ from rank to rank.
struct GatherItem {
  at::Tensor input;
  std::vector<at::Tensor> outputs;  // one per rank; outputs[r] has the dtype of the input and rank r's count
};

// All items must have one dtype that a frame can carry. Inputs and outputs may have any strides; an output may be the
// input itself (in place). Throws FrameError for a bad frame (CPU), Error when ranks disagree.
Traffic all_gather_zip(const Place& place, const std::vector<GatherItem>& items, const FrameOptions& options);

// As bytes, for inner backends that want equal shards or lack the dtype. CPU tensors.
void all_gather_padded(const Place& place, const GatherItem& item);

}  // namespace zipccl
