// Broadcast, scatter and gather of frames. The root's sizes travel first, so that the others know what to expect.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "collectives/place.h"
#include "collectives/traffic.h"

namespace zipccl {

// `tensor` (any strides) of rank `root` to every rank's.
Traffic broadcast_zip(const Place& place, at::Tensor tensor, int root, const FrameOptions& options);

// inputs[r] of the root to rank r's output; all of one dtype and count. inputs: empty elsewhere.
Traffic scatter_zip(const Place& place, at::Tensor output, const std::vector<at::Tensor>& inputs, int root,
                    const FrameOptions& options);

// Rank r's input to outputs[r] of the root; all of one dtype and count. outputs: empty elsewhere.
Traffic gather_zip(const Place& place, const std::vector<at::Tensor>& outputs, at::Tensor input, int root,
                   const FrameOptions& options);

// Throws where CPU ranks are not all at this call, by its root and a tensor like those that each of them passes. For
// calls that are raw on every rank, but not gloo's own.
void check_rooted(const Place& place, const at::Tensor& like, int root);

}  // namespace zipccl
