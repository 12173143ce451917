// A few words (sizes) from every rank to the host of every rank: what a collective of frames must know before it can
// move them. Over the tensors' own backend, or, for CUDA tensors where that is faster, over the host's: reading the own
// words and sending them as CPU tensors spares a kernel and waiting for the GPUs of others.
//
// Words of CPU tensors come with the call they belong to, and ranks that find others at another call throw.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "collectives/error.h"
#include "collectives/place.h"

namespace zipccl {

// own: int64 [n], from the engine; call: what all ranks must be at, with dtype and counts. Returns [world][n].
std::vector<int64_t> all_gather_words(const Place& place, const at::Tensor& own, const CallId& call);
// The same in two steps: CUDA messages that are enqueued before the result is called are not waited for. CPU messages
// come after that.
Engine::Reading begin_all_gather_words(const Place& place, const at::Tensor& own, const CallId& call);

// own: int64 [world], one for each rank. Returns own, then what each rank had for this one. Not compared.
std::vector<int64_t> all_to_all_words(const Place& place, const at::Tensor& own);
// The same in two steps, as above.
Engine::Reading begin_all_to_all_words(const Place& place, const at::Tensor& own);

// words: int64 [n], the root's are everybody's.
std::vector<int64_t> broadcast_words(const Place& place, at::Tensor words, int root);

// Throws where some ranks are at other calls than this one; then every rank finds some. calls: `stride` words apart.
void check_same_calls(const Place& place, const CallId& own, const int64_t* calls, int64_t stride);

}  // namespace zipccl
