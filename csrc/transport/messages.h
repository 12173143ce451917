// Bytes to other ranks through an inner c10d backend (gloo for CPU tensors, NCCL for CUDA tensors).
//
// Calls return when the result is usable where the caller works: on the CPU when the bytes have arrived, on CUDA when
// the current stream has been made to wait for them. No gradient graph is recorded.
//
// Words (int64, a few from each rank) are what ranks tell each other before data moves. In host memory they travel as
// sends whose tag says how many there are: where ranks make different calls, they meet no other message, nor one of
// another length, which gloo would take for an error of the process.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "transport/pairs.h"

namespace zipccl {

class Messages {
 public:
  Messages(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds timeout)
      : inner_(std::move(inner)), timeout_(timeout) {}

  int rank() const { return inner_->getRank(); }
  int world() const { return inner_->getSize(); }
  c10d::Backend& inner() const { return *inner_; }

  // out[world * in.numel()] on every rank.
  void all_gather(at::Tensor out, at::Tensor in) const;
  // As many all-gathers as tensors, on CUDA in one inner call.
  void all_gather(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins) const;

  // sends[r] goes to rank r, receives[r] comes from it: uint8, contiguous, any sizes, the own ones empty. Every rank
  // must call, with nothing to send too.
  void all_to_all(std::vector<at::Tensor> receives, std::vector<at::Tensor> sends) const;
  // The same where most have nothing to say: only ranks that have take part.
  void between_some(std::vector<at::Tensor> receives, std::vector<at::Tensor> sends) const;

  // out[world * n] on every rank, of in[n].
  void all_gather_words(at::Tensor out, at::Tensor in) const;
  // out[world * n] gets in[world * n] transposed over ranks, n words each.
  void all_to_all_words(at::Tensor out, at::Tensor in) const;
  // The same in host memory, begun.
  Pairs::Exchange begin_all_to_all_words(at::Tensor out, at::Tensor in) const;
  // words[n] of the root to all.
  void broadcast_words(at::Tensor words, int root) const;

  void broadcast(at::Tensor values, int root) const;
  // parts: world tensors of out's size on the root, empty elsewhere.
  void scatter(at::Tensor out, std::vector<at::Tensor> parts, int root) const;
  void gather(std::vector<at::Tensor> parts, at::Tensor in, int root) const;

  void all_reduce_max(at::Tensor values) const;

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::chrono::milliseconds timeout_;  // per call; c10d::kUnsetTimeout: the inner backend's own
};

}  // namespace zipccl
