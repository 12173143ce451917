// Handles of zipped collectives: c10d::Work with a future, as DDP, FSDP and functional collectives use them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace zipccl {

// CPU: the worker completes it, or one of gloo's threads.
class CpuWork : public c10d::Work {
 public:
  CpuWork(int rank, c10d::OpType op, const char* title = nullptr, at::TensorList inputs = {},
          at::TensorList outputs = {});

  // queued: the place in the queue, 0 when the call has begun. wait() gives up where that stays the same for `timeout`,
  // as when a call ahead was given more time. `what` names the call in the error.
  void behind(std::function<uint64_t()> queued, std::chrono::milliseconds timeout, std::string what);

  void complete(std::exception_ptr error);
  // The same in two steps, of which the second may take its time, as callbacks of the future do. True: it is wanted.
  bool complete_but_future(std::exception_ptr error);
  void complete_future();

  // The inner backend's handle of the same call. Kept, so that its tensors end where the caller drops this one's,
  // rather than on the thread that carried the call out.
  void carried_by(c10::intrusive_ptr<c10d::Work> inner) { inner_ = std::move(inner); }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void wait_for_turn(std::unique_lock<std::mutex>& lock);

  std::vector<at::Tensor> outputs_;
  std::function<uint64_t()> queued_;
  std::chrono::milliseconds patience_{0};
  std::string what_;
  c10::intrusive_ptr<c10d::Work> inner_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace zipccl
