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
  std::condition_variable wake;     // a job or report, or the end
  std::condition_variable changed;  // a job has run, or what was under way has ended; a thread became idle, or left
  std::deque<Job> jobs;
  std::deque<Run> reports;                          // of what is no job
  std::deque<std::shared_ptr<UnderWay>> under_way;  // for who leads alone
  size_t open = 0;                                  // how many those are, for others
  const std::chrono::duration<double> patience;     // of idle threads
  size_t running = 0;                               // threads that have not left loop()
  size_t idle = 0;
  size_t reporting = 0;  // of `reports`
  size_t draining = 0;   // who waits for what is under way, besides jobs
  uint64_t begun = 0;    // jobs; and what was under way and has ended
  bool led = false;
  bool stop = false;

  explicit State(double idle_s) : patience(idle_s) {}

  // All below with the mutex held, but for what they call.

  // One thread is left for jobs, for which reports may wait.
  bool has_report() const { return !reports.empty() && reporting < kMostThreads - 1; }

  bool has_work() const {
    const bool finish = open > 0 && (stop || draining > 0);
    return has_report() || (!led && (finish || !jobs.empty()));
  }

  // False where there is no thread for what is to do, and the machine has none.
  static bool find_thread(const std::shared_ptr<State>& s) {
    if (!s->has_work()) return true;
    if (s->idle > 0) {
      s->wake.notify_one();
    } else if (s->running < kMostThreads) {  // otherwise the next thread that has reported takes over
      ++s->running;
      try {
        std::thread([s] { loop(s); }).detach();
      } catch (const std::system_error&) {
        return --s->running > 0;
      }
    }
    return true;
  }

  static void need_thread(const std::shared_ptr<State>& s) {
    if (!find_thread(s)) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  }

  static void give_up_lead(const std::shared_ptr<State>& s) {
    s->led = false;
    s->changed.notify_all();
    need_thread(s);
  }

  // Of who leads: waits for all that is under way, or takes note of what is over.
  void finish(std::unique_lock<std::mutex>& lock, bool wait) {
    lock.unlock();
    while (!under_way.empty() && (wait || under_way.front()->over())) {
      under_way.front()->finish();
      under_way.pop_front();
      lock.lock();
      --open;
      ++begun;
      changed.notify_all();
      lock.unlock();
    }
    lock.lock();
  }

  // Of the thread itself: the worker it belongs to.
  static thread_local const State* own;

  static void loop(const std::shared_ptr<State>& s) {
    own = s.get();
    std::unique_lock<std::mutex> lock(s->mutex);
    for (;;) {
      ++s->idle;
      s->changed.notify_all();
      s->wake.wait_for(lock, s->patience, [&] { return s->stop || s->has_work(); });
      --s->idle;
      if (!s->has_work()) break;
      if (s->has_report()) {
        Run report = std::move(s->reports.front());
        s->reports.pop_front();
        ++s->reporting;
        find_thread(s);
        lock.unlock();
        report();
        report = nullptr;
        lock.lock();
        --s->reporting;
        continue;
      }
      s->led = true;
      s->finish(lock, /*wait=*/true);
      if (s->jobs.empty()) {
        give_up_lead(s);
        continue;
      }
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
        give_up_lead(s);
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
    ++s->draining;
    State::find_thread(s);
    s->changed.wait_until(
        lock, deadline, [&] { return s->jobs.empty() && s->open == 0 && s->reports.empty() && s->idle == s->running; });
    --s->draining;
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
      State::need_thread(state_);
      return [s = state_, number = state_->begun + state_->open + state_->jobs.size()] {
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
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (state_->stop || state_->led || !state_->jobs.empty()) return false;
    state_->led = true;
    state_->finish(lock, /*wait=*/true);
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
    State::give_up_lead(state_);
  }
  done(error);
  return true;
}

bool Worker::begin_here(const Begin& begin) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->stop || state_->led || !state_->jobs.empty()) return false;
  state_->led = true;
  state_->finish(lock, /*wait=*/false);
  lock.unlock();
  std::shared_ptr<UnderWay> begun;
  std::exception_ptr error;
  try {
    begun = begin(!state_->under_way.empty());
    if (begun) state_->under_way.push_back(begun);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  state_->open = state_->under_way.size();
  State::give_up_lead(state_);
  if (error) std::rethrow_exception(error);
  return begun != nullptr;
}

Worker::Reporter Worker::reporter() const { return Reporter(state_); }

void Worker::Reporter::operator()(Run report) const {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->reports.push_back(report);
    if (State::find_thread(state_)) return;
    state_->reports.pop_back();
  }
  report();
}

bool Worker::drain(double patience_s) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  ++state_->draining;
  State::find_thread(state_);
  auto left = [this] { return state_->jobs.size() + state_->open + state_->led; };
  bool drained = true;
  while (size_t before = left()) {
    drained =
        state_->changed.wait_for(lock, std::chrono::duration<double>(patience_s), [&] { return left() < before; });
    if (!drained) break;
  }
  --state_->draining;
  return drained;
}

void Worker::stop(double patience_s) {
  std::deque<State::Job> cancelled;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
    cancelled.swap(state_->jobs);
    state_->wake.notify_all();
    State::find_thread(state_);  // for what is under way
  }
  for (State::Job& job : cancelled) job.done(shut_down());
  // A report may drop the last reference to the group, and so end up here on one of the threads, which cannot wait for
  // itself.
  if (State::own == state_.get()) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait_for(lock, std::chrono::duration<double>(patience_s), [&] { return state_->running == 0; });
}

}  // namespace zipccl
