// Handles of zipped collectives: c10d::Work with a future, as DDP, FSDP and functional collectives use them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace zipccl {

// CPU: the worker thread completes it.
class CpuWork : public c10d::Work {
 public:
  CpuWork(int rank, c10d::OpType op, const char* title = nullptr, at::TensorList inputs = {},
          at::TensorList outputs = {});

  // queued: the place in the queue, 0 when the call has begun. wait() gives up where that stays the same for `timeout`,
  // as when a call ahead was given more time. `what` names the call in the error.
  void behind(std::function<uint64_t()> queued, std::chrono::milliseconds timeout, std::string what);

  void complete(std::exception_ptr error);

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
  void complete_future();

  std::vector<at::Tensor> outputs_;
  std::function<uint64_t()> queued_;
  std::chrono::milliseconds patience_{0};
  std::string what_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace zipccl
