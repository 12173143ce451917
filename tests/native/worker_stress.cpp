// csrc/backend/worker.cpp under load, to be built with ThreadSanitizer (tests/test_worker_native.py).
//
// Patience is without limit wherever nothing may have to be waited for: a mistake is a hang, which the caller ends.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backend/worker.h"

namespace {
using zipccl::Worker;
constexpr double kForEver = 1e6;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

// Unprotected on purpose: the worker promises that jobs never overlap, ThreadSanitizer checks that it keeps it.
struct Journal {
  std::vector<int> entries;
  void add(int i) { entries.push_back(i); }
};

void order_and_errors(int n) {
  Journal journal;
  std::atomic<int> reports{0}, errors{0};
  Worker worker;
  for (int i = 0; i < n; ++i) {
    auto run = [&journal, i] {
      journal.add(i);
      if (i % 7 == 0) throw std::runtime_error("seventh");
    };
    auto done = [&, i](std::exception_ptr e) {
      require(text_of(e) == (i % 7 == 0 ? "seventh" : ""), "a job's own error is reported");
      errors += e != nullptr;
      ++reports;
    };
    if (i % 3 != 0 || !worker.run_here(run, done)) worker.submit(run, done);
  }
  Worker::drain_all(kForEver);
  worker.stop(kForEver);
  require(reports == n && errors == (n + 6) / 7, "every job is reported once");
  require(static_cast<int>(journal.entries.size()) == n, "every job runs once");
  for (int i = 0; i < n; ++i) require(journal.entries[i] == i, "jobs run in the order of submission");
}

void many_callers(int callers, int n) {
  Journal journal;
  std::atomic<int> reports{0};
  {
    Worker worker;
    std::vector<std::thread> threads;
    for (int t = 0; t < callers; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < n; ++i) {
          auto run = [&journal, t] { journal.add(t); };
          auto done = [&](std::exception_ptr e) {
            require(!e, "no error");
            ++reports;
          };
          if (i % 2 || !worker.run_here(run, done)) worker.submit(run, done);
        }
      });
    for (std::thread& t : threads) t.join();
    Worker::drain_all(kForEver);
  }
  require(reports == callers * n && static_cast<int>(journal.entries.size()) == callers * n, "nothing gets lost");
}

// As hooks do: a report submits jobs, waits for them, and waits for jobs submitted after its own.
void reports_that_wait(int n) {
  Worker worker;
  for (int i = 0; i < n; ++i) {
    std::promise<void> later, nested;
    std::promise<std::string> all;
    worker.submit([] {},
                  [&](std::exception_ptr) {
                    later.get_future().wait();
                    worker.submit([] {}, [&](std::exception_ptr) { nested.set_value(); });
                    nested.get_future().wait();
                    all.set_value("done");
                  });
    worker.submit([] {}, [&](std::exception_ptr) { later.set_value(); });
    require(all.get_future().get() == "done", "a report may wait for later jobs");
  }
  worker.stop(kForEver);
}

void stop_among_submits(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    auto worker = std::make_unique<Worker>();
    std::atomic<int> ran{0}, done{0}, cancelled{0};
    constexpr int kCallers = 3, kJobs = 40;
    std::vector<std::thread> threads;
    for (int t = 0; t < kCallers; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < kJobs; ++i)
          worker->submit([&] { ++ran; },
                         [&](std::exception_ptr e) {
                           cancelled += text_of(e).find("shut down before this call ran") != std::string::npos;
                           ++done;
                         });
      });
    std::thread stopper([&] { worker->stop(kForEver); });
    for (std::thread& t : threads) t.join();
    stopper.join();
    worker->stop(kForEver);  // again
    require(done == kCallers * kJobs, "every job is reported once, run or not");
    require(ran + cancelled == done, "what did not run was cancelled");
    worker.reset();
    require(done == kCallers * kJobs, "and never twice");
  }
}

// The last reference to a group may be dropped by a report: the worker's end comes on its own thread.
void end_inside_a_report(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    auto worker = std::make_shared<Worker>();
    std::promise<void> over, dropped;
    std::shared_future<void> may_go = dropped.get_future().share();
    std::atomic<int> cancelled{0};
    Worker& w = *worker;
    w.submit([may_go] { may_go.wait(); },
             [held = worker, &over](std::exception_ptr) mutable {
               held->stop(kForEver);
               held.reset();
               over.set_value();
             });
    auto behind = std::make_shared<std::promise<void>>();
    w.submit([] {}, [&cancelled, behind](std::exception_ptr e) {  // perhaps on a second thread, after `over`
      cancelled += e != nullptr;
      behind->set_value();
    });
    worker.reset();
    dropped.set_value();
    over.get_future().wait();
    behind->get_future().wait();
    require(cancelled <= 1, "a job behind is run or cancelled");
  }
}

// What was submitted runs, whichever thread is about to run it.
void drain_everything(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    Journal journal;
    Worker worker(round % 2 ? 10 : 0.0001);
    const int jobs = round % 20;
    auto run = [&journal] { journal.add(1); };
    auto done = [](std::exception_ptr e) { require(!e, "no error"); };
    for (int i = 0; i < jobs; ++i)
      if (i % 3 || !worker.run_here(run, done)) worker.submit(run, done);
    require(worker.drain(kForEver), "all jobs end");
    require(static_cast<int>(journal.entries.size()) == jobs, "drain() returns when all have run");
    worker.stop(kForEver);
  }
}

// A job that never ends must not hold up stop(): its thread is left alone.
void leave_a_stuck_job() {
  auto stuck = std::make_shared<std::promise<void>>();
  std::shared_future<void> never = stuck->get_future().share();
  auto reported = std::make_shared<std::promise<void>>();
  std::promise<void> begun;
  std::atomic<bool> cancelled{false};
  {
    Worker worker;
    worker.submit(
        [&begun, never] {
          begun.set_value();
          never.wait();
        },
        [reported](std::exception_ptr) { reported->set_value(); });
    worker.submit([] {}, [&](std::exception_ptr e) { cancelled = e != nullptr; });
    begun.get_future().wait();
    require(!worker.drain(0.01), "drain() tells of a job that does not end");
    require(!cancelled, "and cancels nothing");
    worker.stop(0.01);
    require(cancelled, "jobs behind a stuck one are cancelled at once");
    require(!worker.run_here([] {}, [](std::exception_ptr) {}), "nothing runs after stop()");
  }
  stuck->set_value();
  reported->get_future().wait();
}

// Something under way that another thread ends.
class Flight : public Worker::UnderWay {
 public:
  explicit Flight(std::function<void()> note) : note_(std::move(note)) {}
  ~Flight() override {
    if (flying_.joinable()) flying_.join();
  }
  void fly(unsigned microseconds) {
    flying_ = std::thread([this, microseconds] {
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
      land();
    });
  }
  void land() {
    std::lock_guard<std::mutex> lock(mutex_);
    landed_ = true;
    changed_.notify_all();
  }
  bool over() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return landed_;
  }
  void finish() override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return landed_; });
    note_();
  }

 private:
  std::function<void()> note_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool landed_ = false;
  std::thread flying_;
};

// What is under way ends beside others like it, but jobs begin when all of it has ended; nothing gets lost or mixed up.
void begin_among_jobs(int rounds, int calls) {
  std::mt19937 random(2);
  for (int round = 0; round < rounds; ++round) {
    Journal journal;
    int in_the_air = 0, together = 0, noted = 0;  // of who leads
    std::atomic<int> reports{0};
    Worker worker(round % 2 ? 10 : 0.0002);
    int jobs = 0, begun = 0;
    for (int i = 0; i < calls; ++i) {
      if (random() % 4) {
        auto flight = std::make_shared<Flight>([&] {
          --in_the_air;
          ++noted;
        });
        const bool done = worker.begin_here([&](bool beside) -> std::shared_ptr<Worker::UnderWay> {
          require(beside == (in_the_air > 0), "begin() knows whether it is alone");
          journal.add(i);
          if (i % 11 == 0) return nullptr;
          together += in_the_air++ > 0;
          flight->fly(random() % 100);
          return flight;
        });
        begun += done;
        if (done || i % 11 == 0) continue;
      }
      auto run = [&] {
        require(in_the_air == 0, "jobs wait for what is under way");
        journal.add(-1);
      };
      auto report = [&](std::exception_ptr e) {
        require(!e, "no error");
        ++reports;
      };
      ++jobs;
      if (random() % 2 || !worker.run_here(run, report)) worker.submit(run, report);
    }
    require(worker.drain(kForEver), "all of it ends");
    require(in_the_air == 0 && noted == begun, "drain() returns when nothing is under way");
    Worker::drain_all(kForEver);
    worker.stop(kForEver);
    require(reports == jobs && !worker.begin_here([](bool) { return nullptr; }), "nothing begins after stop()");
  }
}

void throw_in_begin() {
  Worker worker;
  bool thrown = false;
  try {
    worker.begin_here([](bool) -> std::shared_ptr<Worker::UnderWay> { throw std::runtime_error("no"); });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  bool ran = false;
  require(thrown && worker.run_here([&] { ran = true; }, [](std::exception_ptr) {}) && ran, "the worker goes on");
}

// What never ends holds up neither the caller nor, for longer than it may, stop(). Somebody keeps it, as a stuck job.
void leave_what_is_under_way(bool drain) {
  std::weak_ptr<Flight> seen;
  std::promise<void> noted;
  std::shared_ptr<Flight> flight = std::make_shared<Flight>([&] { noted.set_value(); });
  std::atomic<bool> cancelled{false};
  {
    Worker worker;
    require(worker.begin_here([&](bool) { return flight; }), "it is begun");
    worker.submit([] {}, [&](std::exception_ptr e) { cancelled = e != nullptr; });
    if (drain) require(!worker.drain(0.01), "drain() tells of it");
    require(!cancelled, "a job behind waits");
    worker.stop(0.01);
    require(cancelled, "until stop() cancels it");
  }
  seen = flight;
  flight.reset();
  require(!seen.expired(), "what is under way is kept");
  seen.lock()->land();
  noted.get_future().wait();
  while (!seen.expired()) std::this_thread::yield();
}

// Reports from elsewhere run beside jobs, may wait for them, and run after the worker's end, too.
void reports_from_elsewhere(int n) {
  std::atomic<int> reported{0};
  auto worker = std::make_unique<Worker>();
  const Worker::Reporter report = worker->reporter();
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < n; ++i)
        report([&, i] {
          if (i % 10 == 0) {
            std::promise<void> job;
            worker->submit([] {}, [&](std::exception_ptr) { job.set_value(); });
            job.get_future().wait();
          }
          ++reported;
        });
    });
  for (std::thread& t : threads) t.join();
  while (reported < 2 * n) std::this_thread::yield();
  worker->stop(kForEver);
  worker.reset();
  std::promise<void> later;
  report([&] { later.set_value(); });
  later.get_future().wait();
}

int threads_of_process() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int n = 0;
  while (status >> word)
    if (word == "Threads:") status >> n;
  return n;
}

// Jobs that come about when threads lose their patience: none gets lost, and all threads are gone in the end.
void idle_threads_end(int jobs) {
  const int before = threads_of_process();
  Journal journal;
  std::atomic<int> reports{0};
  Worker worker(0.0002);
  std::mt19937 random(1);
  for (int i = 0; i < jobs; ++i) {
    std::promise<void> reported;
    auto run = [&journal, i] { journal.add(i); };
    auto done = [&](std::exception_ptr e) {
      require(!e, "no error");
      ++reports;
      reported.set_value();
    };
    if (i % 5 || !worker.run_here(run, done)) worker.submit(run, done);
    reported.get_future().wait();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  }
  require(reports == jobs && static_cast<int>(journal.entries.size()) == jobs, "nothing gets lost");
  while (threads_of_process() > before) std::this_thread::yield();
  std::promise<void> again;
  worker.submit([] {}, [&](std::exception_ptr) { again.set_value(); });
  again.get_future().wait();
  worker.stop(kForEver);
}

void workers_come_and_go(int rounds) {
  std::atomic<bool> over{false};
  std::thread drainer([&] {
    while (!over) Worker::drain_all(0.001);
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([rounds] {
      for (int round = 0; round < rounds; ++round) {
        std::atomic<int> n{0};
        Worker worker;
        for (int i = 0; i < 5; ++i) worker.submit([&] { ++n; }, [](std::exception_ptr) {});
        worker.stop(kForEver);
      }
    });
  for (std::thread& t : threads) t.join();
  over = true;
  drainer.join();
}
}  // namespace

int main() {
  order_and_errors(3000);
  many_callers(4, 500);
  reports_that_wait(200);
  stop_among_submits(60);
  end_inside_a_report(100);
  drain_everything(200);
  leave_a_stuck_job();
  begin_among_jobs(20, 200);
  throw_in_begin();
  leave_what_is_under_way(true);
  leave_what_is_under_way(false);
  reports_from_elsewhere(300);
  idle_threads_end(1000);
  workers_come_and_go(100);
  std::puts("all is well");
}
