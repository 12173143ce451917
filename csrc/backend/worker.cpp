#include "backend/worker.h"

#include <chrono>

namespace zipccl {

struct Worker::State {
  struct Job {
    std::function<void()> run, cancel;
  };
  std::mutex mutex;
  std::condition_variable wake, ended_cv;
  std::deque<Job> jobs;
  bool stop = false;
  bool ended = false;
};

Worker::Worker() : state_(std::make_shared<State>()) {
  thread_ = std::thread([state = state_] {
    std::unique_lock<std::mutex> lock(state->mutex);
    for (;;) {
      state->wake.wait(lock, [&] { return state->stop || !state->jobs.empty(); });
      if (state->stop) break;
      {
        State::Job job = std::move(state->jobs.front());
        state->jobs.pop_front();
        lock.unlock();
        job.run();  // reports its own errors; the job's captures die before the lock is taken again
      }
      lock.lock();
    }
    state->ended = true;
    state->ended_cv.notify_all();
  });
}

Worker::~Worker() { stop(2.0); }

void Worker::submit(std::function<void()> job, std::function<void()> cancel) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->stop) {
      state_->jobs.push_back({std::move(job), std::move(cancel)});
      state_->wake.notify_one();
      return;
    }
  }
  cancel();
}

void Worker::stop(double patience_s) {
  std::deque<State::Job> cancelled;
  bool ended;
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->stop = true;
    cancelled.swap(state_->jobs);
    state_->wake.notify_all();
    ended = state_->ended_cv.wait_for(lock, std::chrono::duration<double>(patience_s), [&] { return state_->ended; });
  }
  for (State::Job& job : cancelled) job.cancel();
  if (!thread_.joinable()) return;
  if (ended)
    thread_.join();
  else
    thread_.detach();
}

}  // namespace zipccl
