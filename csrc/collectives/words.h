// A few words (sizes) from every rank to the host of every rank: what a collective of frames must know before it can
// move them. Over the tensors' own backend, or, for CUDA tensors where that is faster, over the host's: reading the own
// words and sending them as CPU tensors spares a kernel and waiting for the GPUs of others.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "collectives/place.h"

namespace zipccl {

// own: int64 [n], from the engine. Returns [world][n].
std::vector<int64_t> all_gather_words(const Place& place, const at::Tensor& own);
// The same in two steps: CUDA messages that are enqueued before the result is called are not waited for. CPU messages
// come after that.
Engine::Reading begin_all_gather_words(const Place& place, const at::Tensor& own);

// own: int64 [world], one for each rank. Returns own, then what each rank had for this one.
std::vector<int64_t> all_to_all_words(const Place& place, const at::Tensor& own);
// The same in two steps, as above.
Engine::Reading begin_all_to_all_words(const Place& place, const at::Tensor& own);

// words: int64 [n], the root's are everybody's.
std::vector<int64_t> broadcast_words(const Place& place, at::Tensor words, int root);

}  // namespace zipccl
