// csrc/backend/worker.cpp under load, to be built with ThreadSanitizer (tests/test_worker_native.py).
//
// Patience is without limit wherever nothing may have to be waited for: a mistake is a hang, which the caller ends.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
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
  idle_threads_end(1000);
  workers_come_and_go(100);
  std::puts("all is well");
}
