#include "backend/raw_work.h"

#include <utility>

#include "backend/perform.h"
#include "collectives/error.h"

namespace zipccl {

RawUnderWay::RawUnderWay(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<Lockstep> step)
    : inner_(std::move(inner)), step_(std::move(step)) {}

c10::intrusive_ptr<c10d::Work> RawUnderWay::inner() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return inner_;
}

void RawUnderWay::let_go() {
  std::lock_guard<std::mutex> lock(mutex_);
  inner_.reset();  // the caller's handle has it, too
}

bool RawUnderWay::over() {
  const auto work = inner();
  return !work || work->isCompleted();
}

void RawUnderWay::finish() {
  if (const auto work = inner()) {
    try {
      work->wait();
    } catch (const std::exception&) {
      step_->lose();
    }
  }
  // The step is the group's, which whoever keeps a handle must not keep.
  std::shared_ptr<Lockstep> step = std::move(step_);
}

RawWork::RawWork(int rank, c10d::OpType op, c10::intrusive_ptr<c10d::Work> inner,
                 std::shared_ptr<RawUnderWay> under_way, Worker::Reporter report, Name name)
    : Work(rank, op),
      inner_(std::move(inner)),
      under_way_(std::move(under_way)),
      report_(std::move(report)),
      name_(std::move(name)) {}

bool RawWork::wait(std::chrono::milliseconds timeout) {
  try {
    inner_->wait(timeout);
  } catch (...) {
    std::rethrow_exception(named(name_(), std::current_exception()));
  }
  under_way_->let_go();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) future->wait();  // soon: who has waited finds the future done
  return true;
}

std::exception_ptr RawWork::exception() const {
  const std::exception_ptr error = inner_->exception();
  return error ? named(name_(), error) : nullptr;
}

void RawWork::abort() { throw Error("zipccl: abort the process group, not a single work"); }

c10::intrusive_ptr<c10::ivalue::Future> RawWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  const auto theirs = inner_->getFuture();
  future_ = theirs->createInstance(theirs->elementType());
  const auto complete = [ours = future_, name = name_](c10::ivalue::Future& ended) {
    if (ended.hasError())
      ours->setErrorIfNeeded(named(name(), ended.exception_ptr()));
    else
      ours->markCompleted(ended.value(), ended.storages());
  };
  if (inner_->isCompleted()) {
    complete(*theirs);
  } else {
    // The handle is completed a little later than its future, and is_completed() must hold when callbacks run.
    theirs->addCallback([complete, inner = inner_, report = report_](c10::ivalue::Future&) {
      report([complete, inner] {
        try {
          inner->wait();
        } catch (const std::exception&) {  // the future has it, too
        }
        complete(*inner->getFuture());
      });
    });
  }
  return future_;
}

std::exception_ptr named(const std::string& what, const std::exception_ptr& error) {
  try {
    naming(what, [&] { std::rethrow_exception(error); });
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace zipccl
