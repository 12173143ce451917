// Raw calls on CPU tensors that gloo's threads carry out by themselves: the caller's handle, and the worker's.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/lockstep.h"
#include "backend/worker.h"

namespace zipccl {

// The worker's: when it has ended, and whether ranks are in step then.
class RawUnderWay : public Worker::UnderWay {
 public:
  // inner: null where nothing was begun.
  RawUnderWay(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<Lockstep> step);

  bool over() override;
  void finish() override;

  // It has ended well. Its tensors are not kept here any longer, though finish() may be far.
  void let_go();

 private:
  c10::intrusive_ptr<c10d::Work> inner() const;

  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> inner_;  // null: ended well
  std::shared_ptr<Lockstep> step_;        // null: finished
};

// The caller's: gloo's own, with errors that name the call. Callbacks of the future run on a thread of the worker, so
// that they may wait for calls that need gloo's.
class RawWork : public c10d::Work {
 public:
  // What errors call it, made when there is one.
  using Name = std::function<std::string()>;
  RawWork(int rank, c10d::OpType op, c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<RawUnderWay> under_way,
          Worker::Reporter report, Name name);

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return inner_->result(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<RawUnderWay> under_way_;
  Worker::Reporter report_;
  Name name_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// `error` with the call's name before its text.
std::exception_ptr named(const std::string& what, const std::exception_ptr& error);

}  // namespace zipccl
