// One thread that runs jobs in the order they were given: the CPU side's equivalent of a CUDA stream.
//
// All zipped CPU collectives of a group run here over their own inner gloo instance, so the order of their messages is
// the order of the calls, which is the same on every rank, whatever the caller's thread does beside it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace zipccl {

class Worker {
 public:
  Worker();
  // Ends the thread; see stop().
  ~Worker();

  // `job` runs on the thread; `cancel` runs instead, on the caller of stop(), if the worker ends first.
  void submit(std::function<void()> job, std::function<void()> cancel);

  // Cancels what has not started, lets the running job end. Waits `patience_s` for it, then leaves the thread alone
  // (it owns what it needs): a peer that died must not hold up the end of this process.
  void stop(double patience_s);

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace zipccl
