// Handles of zipped collectives on CUDA tensors. Compiled only when ZIPCCL_WITH_CUDA is defined.
#pragma once

#ifdef ZIPCCL_WITH_CUDA

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <list>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "collectives/engine.h"

namespace zipccl {

// Frames are decoded on the GPU, so a bad one is known only when the stream has passed the decoder. The statuses of
// all calls wait here; a bad one is thrown by the first call that looks after that: a wait(), the group's next
// collective, or shutdown().
class FrameChecks {
 public:
  void add(std::shared_ptr<at::cuda::CUDAEvent> done, Engine::Pending pending);
  // Throws FrameError for the oldest bad frame among the finished calls.
  void poll();
  // Among all calls: waits for them, as long as `watch` does not throw.
  void poll_all(const Engine::Watch& watch);

 private:
  struct Entry {
    std::shared_ptr<at::cuda::CUDAEvent> done;
    Engine::Pending pending;
  };
  void check_oldest();

  std::mutex mutex_;
  std::list<Entry> entries_;
};

class CudaWork : public c10d::Work {
 public:
  // To be made on `stream` when everything is enqueued there. `kept`: tensors the stream still uses and that are not
  // its own. `strict`: wait() blocks the host until frames are known to be good, or `watch` throws.
  CudaWork(int rank, c10d::OpType op, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs, std::vector<at::Tensor> kept, c10::cuda::CUDAStream stream,
           std::shared_ptr<FrameChecks> checks, Engine::Pending pending, bool strict, Engine::Watch watch);
  ~CudaWork() override;

  bool isCompleted() override { return done_->query(); }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> kept_;  // freed by the first wait(): the waiting stream is then behind ours
  std::mutex kept_mutex_;
  c10::cuda::CUDAStream stream_;
  std::shared_ptr<at::cuda::CUDAEvent> done_;
  std::shared_ptr<FrameChecks> checks_;
  bool strict_;
  Engine::Watch watch_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
