// Bytes to other ranks through an inner c10d backend (gloo for CPU tensors, NCCL for CUDA tensors).
//
// Calls return when the result is usable where the caller works: on the CPU when the bytes have arrived, on CUDA when
// the current stream has been made to wait for them. No gradient graph is recorded.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace zipccl {

class Messages {
 public:
  Messages(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds timeout)
      : inner_(std::move(inner)), timeout_(timeout) {}

  int rank() const { return inner_->getRank(); }
  int world() const { return inner_->getSize(); }

  // out[world * in.numel()] on every rank.
  void all_gather(at::Tensor out, at::Tensor in) const;
  // As many all-gathers as tensors, in one inner call.
  void all_gather(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins) const;
  void all_reduce_max(at::Tensor values) const;

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::chrono::milliseconds timeout_;  // per call; c10d::kUnsetTimeout: the inner backend's own
};

}  // namespace zipccl
