// Runs jobs one at a time in the order they were given: the CPU side's equivalent of a CUDA stream.
//
// All zipped CPU collectives of a group run here over their own inner gloo instance, so the order of their messages is
// the order of the calls, which is the same on every rank, whatever the caller's thread does beside it.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

namespace zipccl {

class Worker {
 public:
  using Run = std::function<void()>;
  using Done = std::function<void(std::exception_ptr)>;

  // Threads end when they have had nothing to do for `idle_s`, and are made again when there is.
  explicit Worker(double idle_s = 10);
  // Ends the threads, if stop() has not.
  ~Worker();

  // Calls `run` when all earlier jobs have run, then `done` with what it threw (null: nothing). `done` may take its
  // time and wait for later jobs, as callbacks of futures do: the next job does not wait for it. A job that never ran
  // is done too, with an Error. Returns the job's place in the queue: 0 when it has begun.
  using Queued = std::function<uint64_t()>;
  Queued submit(Run run, Done done);

  // The same on the calling thread, now, if no job is waiting or running; false if one is.
  bool run_here(const Run& run, const Done& done);

  // Waits until every job that was submitted has run, as long as none takes longer than `patience_s`; false if one
  // does. No jobs may be submitted meanwhile.
  bool drain(double patience_s);

  // Cancels what has not started, lets the running job end. Waits `patience_s` for it, then leaves its thread alone
  // (it owns what it needs): a peer that died must not hold up the end of this process.
  void stop(double patience_s);

  // Waits until no worker of this process has anything to do, or `patience_s` is over. For the end of Python, which
  // threads that still hold tensors do not survive.
  static void drain_all(double patience_s);

 private:
  struct State;
  struct Registry;  // of all workers
  std::shared_ptr<State> state_;
};

}  // namespace zipccl
