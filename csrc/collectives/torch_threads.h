// The codec's threads on the CPU: those of torch.
#pragma once

#include <cstdint>

#include "codec/codec.h"

namespace zipccl {

// Threads for work on `bytes` of values: at most torch.get_num_threads(), and one where few bytes would not keep more
// busy. Workers besides the calling thread come from torch's pool of inter-op threads.
Threads torch_threads(uint64_t bytes);

// While it lives, the calling thread has at most n: a call's, as its caller has them. (What torch.get_num_threads()
// says on another thread is what it was when that thread first asked.)
class ThreadLimit {
 public:
  explicit ThreadLimit(int n);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  const int before_;
};

}  // namespace zipccl
