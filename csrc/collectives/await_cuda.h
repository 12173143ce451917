// Host waits for the GPU that end, with an error, when other ranks do not come. Compiled only when ZIPCCL_WITH_CUDA is
// defined.
#pragma once

#ifdef ZIPCCL_WITH_CUDA

#include <ATen/cuda/CUDAEvent.h>

#include <chrono>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/engine.h"
#include "collectives/error.h"

namespace zipccl {

// NCCL's own watchdog ends the process where torch is so configured, as by default; where it is not, or is slower, the
// host must not wait for ever for a rank that does not come. timeout: unset means the group's.
inline Engine::Watch watch_nccl(c10::intrusive_ptr<c10d::Backend> nccl, const std::string& what,
                                std::chrono::milliseconds timeout) {
  return [what, timeout, nccl = std::move(nccl)](std::chrono::milliseconds waited) {
    if (nccl->getError() != c10d::ErrorType::SUCCESS)
      throw Error(what + ": NCCL has met an error, which its watchdog has logged");
    const auto limit = timeout == c10d::kUnsetTimeout ? nccl->getBackendOptions()->timeout : timeout;
    if (waited > limit)
      throw Error(what + ": timed out after " + std::to_string(limit.count()) + " ms of waiting for other ranks");
  };
}

// Returns when the GPU has passed `event`; throws what `watch` throws.
inline void await(const at::cuda::CUDAEvent& event, const Engine::Watch& watch) {
  using std::chrono::milliseconds;
  constexpr milliseconds kPatience{100};  // longer than any wait that should be quick
  const auto began = std::chrono::steady_clock::now();
  for (bool watched = false;;) {
    const bool passed = event.query();
    if (passed && !watched) return;
    const auto waited = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - began);
    if (waited < kPatience) continue;
    if (watch) watch(waited);
    if (passed) return;  // once more behind a long wait: the GPU also goes on when NCCL gave up, with nothing received
    watched = true;
    std::this_thread::sleep_for(milliseconds(1));
  }
}

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
