// A few words (sizes) from every rank to the host of every rank: what a collective of frames must know before it can
// move them. Over the tensors' own backend, or, for CUDA tensors where that is faster, over the host's: reading the own
// words and sending them as CPU tensors spares a kernel and waiting for the GPUs of others.
//
// Calls on CPU tensors open with the same four words between all ranks, whatever the collective: the call they belong
// to and three that the call needs. So words of any two calls meet, and ranks that find others at another call throw.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <vector>

#include "collectives/error.h"
#include "collectives/place.h"

namespace zipccl {

// The first words of a call on CPU tensors, begun.
class Opening {
 public:
  using Words = std::array<int64_t, 3>;

  // call: what all ranks must be at. told[r]: for rank r.
  Opening(const Place& place, const CallId& call, const std::vector<Words>& told);

  // Waits. What each rank tells this one, itself included. Throws SharedError where some ranks are at other calls: then
  // every rank finds some.
  std::vector<Words> hear();

 private:
  const Place& place_;
  CallId call_;
  at::Tensor told_, heard_;
  Pairs::Exchange exchange_;
};

// Throws SharedError where CPU ranks are at different calls, or have different histories.
void check_in_step(const Place& place, const CallId& call, uint64_t history = 0);

// own: int64 [n], from the engine; call: what all ranks must be at, with dtype and counts. Returns [world][n].
std::vector<int64_t> all_gather_words(const Place& place, const at::Tensor& own, const CallId& call);
// The same in two steps: CUDA messages that are enqueued before the result is called are not waited for. CPU messages
// come after that.
Engine::Reading begin_all_gather_words(const Place& place, const at::Tensor& own, const CallId& call);

// own: int64 [world], one for each rank. Returns own, then what each rank had for this one. Not compared.
std::vector<int64_t> all_to_all_words(const Place& place, const at::Tensor& own);
// The same in two steps, as above.
Engine::Reading begin_all_to_all_words(const Place& place, const at::Tensor& own);

// words: int64 [n], the root's are everybody's. call: as above.
std::vector<int64_t> broadcast_words(const Place& place, at::Tensor words, int root, const CallId& call);

}  // namespace zipccl
