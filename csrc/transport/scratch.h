// CPU scratch that is used again: fresh memory costs a page fault per 4 KiB, more than the codec itself.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

namespace zipccl {

// Tensors come from blocks of earlier tensors where one fits (at least as large, at most twice as large). A block
// returns when its tensor dies, also on another thread and after the pool. Blocks not in use never hold more bytes than
// the tensors that were alive at the busiest moment.
class ScratchPool {
 public:
  ScratchPool();
  at::Tensor empty(int64_t n, at::ScalarType type);

  // Gives up what is not in use, and forgets how much that was.
  void release();

  struct Usage {
    uint64_t held;  // bytes of all blocks, in use or not
    uint64_t peak;  // of those in use at once
  };
  Usage usage() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace zipccl
