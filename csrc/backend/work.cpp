#include "backend/work.h"

#include <ATen/record_function.h>

#include "collectives/error.h"

namespace zipccl {

namespace {
using Inputs = std::optional<std::vector<at::Tensor>>;
}

// Titles and inputs are for profilers.
CpuWork::CpuWork(int rank, c10d::OpType op, const char* title, at::TensorList inputs, at::TensorList outputs)
    : Work(rank, op, at::hasCallbacks() ? title : nullptr, at::hasCallbacks() ? Inputs(inputs.vec()) : std::nullopt),
      outputs_(outputs.vec()) {}

void CpuWork::complete(std::exception_ptr error) {
  // The base class first: isCompleted() must hold when callbacks of the future run.
  finish(std::move(error));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!future_ || future_->completed()) return;  // made since, it is complete
  }
  complete_future();
}

void CpuWork::complete_future() {
  if (exception_)
    future_->setErrorIfNeeded(exception_);
  else
    future_->markCompleted(c10::IValue(outputs_));
}

// Made for those who ask: most wait.
c10::intrusive_ptr<c10::ivalue::Future> CpuWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) complete_future();
  }
  return future_;
}

void CpuWork::behind(std::function<uint64_t()> queued, std::chrono::milliseconds timeout, std::string what) {
  queued_ = std::move(queued);
  patience_ = timeout;
  what_ = std::move(what);
}

void CpuWork::wait_for_turn(std::unique_lock<std::mutex>& lock) {
  if (!queued_) return;
  for (uint64_t before = queued_(); before > 0;) {
    if (cv_.wait_for(lock, patience_, [&] { return completed_; })) return;
    const uint64_t now = queued_();
    if (now == before)
      throw Error(what_ + ": timed out behind earlier calls of the group, none of which ended within " +
                  std::to_string(patience_.count()) + " ms");
    before = now;
  }
}

bool CpuWork::isCompleted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

bool CpuWork::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr CpuWork::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

bool CpuWork::wait(std::chrono::milliseconds timeout) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (timeout == kNoTimeout) {
      wait_for_turn(lock);
      cv_.wait(lock, [&] { return completed_; });
    } else if (!cv_.wait_for(lock, timeout, [&] { return completed_; })) {
      throw Error("zipccl: operation timed out after " + std::to_string(timeout.count()) + " ms");
    }
    future = future_;
  }
  if (future) future->wait();  // at once: complete() is there. Who has waited finds the future done.
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void CpuWork::abort() { throw Error("zipccl: abort the process group, not a single work"); }

}  // namespace zipccl
