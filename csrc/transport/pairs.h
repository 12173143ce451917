// Messages between pairs of ranks, begun now and waited for later: what multi-hop collectives are made of.
//
// gloo: tagged sends and receives, which its own thread carries while the caller computes. NCCL: one group of sends and
// receives on the group's communicator, on NCCL's stream; wait() makes the current stream wait, not the host.
#pragma once

#include <atomic>
#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace zipccl {

class Pairs {
 public:
  // tag: of the first exchange, where messages must not meet those of other Pairs (gloo).
  explicit Pairs(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds timeout = c10d::kUnsetTimeout,
                 int tag = 0)
      : inner_(std::move(inner)), timeout_(timeout), tag_(tag) {}

  int rank() const { return inner_->getRank(); }
  int world() const { return inner_->getSize(); }
  // Of exchanges begun from now on.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  const c10::intrusive_ptr<c10d::Backend>& inner() const { return inner_; }

  // uint8, 1-D, contiguous. At most one parcel to and one from each rank in an exchange; both ends know its size, and
  // empty ones do not travel.
  struct Parcel {
    int rank;
    at::Tensor bytes;
  };

  // Parcels on the way. Dropped without a wait() where something else went wrong: backends keep what they still use.
  class Exchange {
   public:
    // Waits for all of it, then throws the first error; of tagged messages, with the ranks that were not reached.
    void wait();

   private:
    friend class Pairs;
    struct Begun {
      c10::intrusive_ptr<c10d::Work> work;
      int rank = -1;  // the other end; -1: many
      bool receives = false;
    };
    std::vector<Begun> works_;
    std::vector<at::Tensor> kept_;
    std::chrono::milliseconds timeout_ = kNoTimeout;
  };

  // Every rank must begin the same exchanges in the same order; it need not have a part in each. `device`: where the
  // parcels lie.
  Exchange begin(const std::vector<Parcel>& sends, const std::vector<Parcel>& receives, at::Device device);
  // An exchange in which this rank has no part.
  void skip() { next_tag(); }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  int next_tag();

  std::atomic<std::chrono::milliseconds> timeout_;
  int tag_;  // of the next exchange (gloo)
};

}  // namespace zipccl
