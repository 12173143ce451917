#include "collectives/torch_threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace zipccl {

// at::parallel_for() is a template over the OpenMP of whoever compiles it. An extension would bring a second OpenMP
// beside torch's, whose threads spin while they wait and know nothing of torch.set_num_threads(). at::launch() hands a
// function to threads that torch has anyway, and that sleep.
namespace {
constexpr uint64_t kBytesPerThread = 512 << 10;  // 50 to 100 us of work; to wake a thread takes 10 or more

thread_local int limit = 0;  // 0: none

// The work of one call. Helpers that come late find it closed, so the caller waits for those at work only, and never
// for a thread that is busy elsewhere.
struct Job {
  std::mutex mutex;
  std::condition_variable changed;
  bool closed = false;
  int helping = 0;
};

void run(int n, void (*work)(void*), void* argument) {
  const auto job = std::make_shared<Job>();
  for (int i = 1; i < n; ++i) {
    at::launch([job, work, argument] {
      {
        const std::lock_guard<std::mutex> lock(job->mutex);
        if (job->closed) return;
        ++job->helping;
      }
      work(argument);
      const std::lock_guard<std::mutex> lock(job->mutex);
      --job->helping;
      job->changed.notify_one();
    });
  }
  work(argument);
  std::unique_lock<std::mutex> lock(job->mutex);
  job->closed = true;
  job->changed.wait(lock, [&] { return job->helping == 0; });
}
}  // namespace

Threads torch_threads(uint64_t bytes) {
  const uint64_t most = std::max<uint64_t>(1, bytes / kBytesPerThread);
  if (most == 1 || at::in_parallel_region()) return {};
  const int allowed = limit != 0 ? limit : at::get_num_threads();
  return {static_cast<int>(std::min(most, static_cast<uint64_t>(allowed))), &run};
}

ThreadLimit::ThreadLimit(int n) : before_(limit) { limit = n; }
ThreadLimit::~ThreadLimit() { limit = before_; }

}  // namespace zipccl
