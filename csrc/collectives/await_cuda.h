// Host waits for the GPU that end, with an error, when other ranks do not come. Compiled only when ZIPCCL_WITH_CUDA is
// defined.
#pragma once

#ifdef ZIPCCL_WITH_CUDA

#include <ATen/cuda/CUDAEvent.h>

#include <chrono>
#include <thread>

#include "collectives/engine.h"

namespace zipccl {

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
