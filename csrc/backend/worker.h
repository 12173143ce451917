// Runs jobs one at a time in the order they were given: the CPU side's equivalent of a CUDA stream.
//
// All zipped CPU collectives of a group run here over their own inner gloo instance, so the order of their messages is
// the order of the calls, which is the same on every rank, whatever the caller's thread does beside it.
//
// What need not be waited for between its beginning and its end (a raw call, which gloo's own threads carry out) may be
// begun on the caller's thread instead, where no job is ahead of it, and go on beside others like it.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

namespace zipccl {

class Worker {
 public:
  using Run = std::function<void()>;
  using Done = std::function<void(std::exception_ptr)>;

  // Threads end when they have had nothing to do for `idle_s`, and are made again when there is.
  explicit Worker(double idle_s = 10);
  // Ends the threads, if stop() has not.
  ~Worker();

  // Calls `run` when all earlier jobs have run and nothing is under way, then `done` with what it threw (null:
  // nothing). `done` may take its time and wait for later jobs, as callbacks of futures do: the next job does not wait
  // for it. A job that never ran is done too, with an Error. Returns the job's place in the queue: 0 when it has begun.
  using Queued = std::function<uint64_t()>;
  Queued submit(Run run, Done done);

  // The same on the calling thread, now, if no job is waiting or running; false if one is.
  bool run_here(const Run& run, const Done& done);

  // What was begun and goes on by itself.
  class UnderWay {
   public:
    virtual ~UnderWay() = default;
    virtual bool over() = 0;  // whether it has ended
    virtual void
    finish() = 0;  // waits for that and takes note of how it went; called once, as jobs are; throws nothing
  };
  // Calls `begin` on the calling thread, now, if no job is waiting or running. `beside`: whether something begun so is
  // still under way. False if nothing was begun, since a job is there or `begin` has begun nothing.
  using Begin = std::function<std::shared_ptr<UnderWay>(bool beside)>;
  bool begin_here(const Begin& begin);

  // Runs what may take its time, or wait for jobs, on one of the threads, beside the jobs. Outlives the Worker.
  class Reporter;
  Reporter reporter() const;

  // Waits until every job that was submitted has run and nothing is under way, as long as none takes longer than
  // `patience_s`; false if one does. No jobs may be submitted meanwhile.
  bool drain(double patience_s);

  // Cancels what has not started, lets the running job and what is under way end. Waits `patience_s` for that, then
  // leaves the thread alone (it owns what it needs): a peer that died must not hold up the end of this process.
  void stop(double patience_s);

  // Waits until no worker of this process has anything to do, or `patience_s` is over. For the end of Python, which
  // threads that still hold tensors do not survive.
  static void drain_all(double patience_s);

 private:
  struct State;
  struct Registry;  // of all workers
  std::shared_ptr<State> state_;
};

class Worker::Reporter {
 public:
  explicit Reporter(std::shared_ptr<State> state) : state_(std::move(state)) {}
  void operator()(Run report) const;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace zipccl
