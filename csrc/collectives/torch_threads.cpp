#include "collectives/torch_threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace zipccl {

// New threads for every call, which takes 10 or 20 us each. at::parallel_for() is a template over the OpenMP of whoever
// compiles it: an extension would bring a second OpenMP beside torch's, whose threads spin while they wait and know
// nothing of torch.set_num_threads(). at::launch() starts torch's inter-op pool, after which a program can no longer
// call torch.set_num_interop_threads(). And a pool of our own would not survive a fork.
namespace {
constexpr uint64_t kBytesPerThread = 1 << 20;  // at least 50 us of work

thread_local int limit = 0;  // 0: none

void run(int n, void (*work)(void*), void* argument) {
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < n; ++i) others.emplace_back(work, argument);
  } catch (const std::system_error&) {  // the machine has no more: those there are do all the work
  }
  work(argument);
  for (std::thread& other : others) other.join();
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
