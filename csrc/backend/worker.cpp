#include "backend/worker.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "collectives/error.h"

namespace zipccl {

// One thread leads: it takes a job and runs it. Then it gives up the lead and reports; another takes over at once where
// there is work, and is made where there is none. So there is one thread, unless a report takes long. Threads that find
// nothing to do for a while end. They are detached: whoever must know waits for `running`.
namespace {
// Threads whose reports take long at once: callbacks that wait for Python, or for later calls.
constexpr size_t kMostThreads = 16;
}  // namespace

struct Worker::State {
  struct Job {
    Run run;
    Done done;
  };
  std::mutex mutex;
  std::condition_variable wake;     // a job, or the end
  std::condition_variable changed;  // a job has run; a thread became idle, or left
  std::deque<Job> jobs;
  const std::chrono::duration<double> patience;  // of idle threads
  size_t running = 0;                            // threads that have not left loop()
  size_t idle = 0;
  uint64_t begun = 0;  // jobs
  bool led = false;
  bool stop = false;

  explicit State(double idle_s) : patience(idle_s) {}

  // With the mutex held.
  static void find_leader(const std::shared_ptr<State>& s) {
    if (s->led || s->jobs.empty() || s->stop) return;
    if (s->idle > 0) {
      s->wake.notify_one();
    } else if (s->running < kMostThreads) {  // otherwise the next thread that has reported takes over
      ++s->running;
      try {
        std::thread([s] { loop(s); }).detach();
      } catch (const std::system_error&) {  // the machine has no more
        if (--s->running == 0) throw;
      }
    }
  }

  // Of the thread itself: the worker it belongs to.
  static thread_local const State* own;

  static void loop(const std::shared_ptr<State>& s) {
    own = s.get();
    std::unique_lock<std::mutex> lock(s->mutex);
    for (;;) {
      ++s->idle;
      s->changed.notify_all();
      const bool woken = s->wake.wait_for(lock, s->patience, [&] { return s->stop || (!s->led && !s->jobs.empty()); });
      --s->idle;
      if (s->stop || !woken) break;
      s->led = true;
      ++s->begun;
      {
        Job job = std::move(s->jobs.front());
        s->jobs.pop_front();
        lock.unlock();
        std::exception_ptr error;
        try {
          job.run();
        } catch (...) {
          error = std::current_exception();
        }
        lock.lock();
        s->led = false;
        s->changed.notify_all();
        find_leader(s);
        lock.unlock();
        job.done(error);  // and the job's captures die before the lock is taken again
      }
      lock.lock();
    }
    --s->running;
    s->changed.notify_all();
  }
};

thread_local const Worker::State* Worker::State::own = nullptr;

// Never destroyed: workers may outlive static objects.
struct Worker::Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<State>> workers;

  static Registry& get() {
    static auto* registry = new Registry;
    return *registry;
  }
};

Worker::Worker(double idle_s) : state_(std::make_shared<State>(idle_s)) {
  Registry& all = Registry::get();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.workers.erase(
      std::remove_if(all.workers.begin(), all.workers.end(), [](const auto& worker) { return worker.expired(); }),
      all.workers.end());
  all.workers.push_back(state_);
}

Worker::~Worker() {
  bool stopped;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    stopped = state_->stop;
  }
  if (!stopped) stop(2.0);
}

void Worker::drain_all(double patience_s) {
  auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience_s);
  std::vector<std::weak_ptr<State>> workers;
  {
    std::lock_guard<std::mutex> lock(Registry::get().mutex);
    workers = Registry::get().workers;
  }
  for (const auto& worker : workers) {
    auto s = worker.lock();
    if (!s) continue;
    std::unique_lock<std::mutex> lock(s->mutex);
    s->changed.wait_until(lock, deadline, [&] { return s->jobs.empty() && s->idle == s->running; });
  }
}

namespace {
std::exception_ptr shut_down() {
  return std::make_exception_ptr(Error("zipccl: the process group was shut down before this call ran"));
}
}  // namespace

Worker::Queued Worker::submit(Run run, Done done) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->stop) {
      state_->jobs.push_back({std::move(run), std::move(done)});
      State::find_leader(state_);
      return [s = state_, number = state_->begun + state_->jobs.size()] {
        std::lock_guard<std::mutex> lock(s->mutex);
        return number - std::min(number, s->begun);
      };
    }
  }
  done(shut_down());
  return [] { return uint64_t{0}; };
}

bool Worker::run_here(const Run& run, const Done& done) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->stop || state_->led || !state_->jobs.empty()) return false;
    state_->led = true;
    ++state_->begun;
  }
  std::exception_ptr error;
  try {
    run();
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->led = false;
    state_->changed.notify_all();
    State::find_leader(state_);
  }
  done(error);
  return true;
}

bool Worker::drain(double patience_s) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  auto left = [this] { return state_->jobs.size() + state_->led; };
  while (size_t before = left()) {
    const bool fewer =
        state_->changed.wait_for(lock, std::chrono::duration<double>(patience_s), [&] { return left() < before; });
    if (!fewer) return false;
  }
  return true;
}

void Worker::stop(double patience_s) {
  std::deque<State::Job> cancelled;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
    cancelled.swap(state_->jobs);
    state_->wake.notify_all();
  }
  for (State::Job& job : cancelled) job.done(shut_down());
  // A report may drop the last reference to the group, and so end up here on one of the threads, which cannot wait for
  // itself.
  if (State::own == state_.get()) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait_for(lock, std::chrono::duration<double>(patience_s), [&] { return state_->running == 0; });
}

}  // namespace zipccl
