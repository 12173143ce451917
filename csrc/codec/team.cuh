// Eight warps of a block that work on the same group. A block has one team, or, where there may be only one block to a
// multiprocessor, as many as fit.
#pragma once

#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {

constexpr int kWarps = 8;  // of a team
constexpr int kTeamThreads = kWarps * kWarpSize;

template <int kTeams>
struct Team {
  int index = kTeams == 1 ? 0 : threadIdx.x / kTeamThreads;
  int warp = threadIdx.x / kWarpSize % kWarps;
  int lane = threadIdx.x % kWarpSize;

  __device__ __forceinline__ int thread() const { return warp * kWarpSize + lane; }
  __device__ __forceinline__ void sync() const {
    if (kTeams == 1) {
      __syncthreads();
    } else {
      asm volatile("barrier.sync %0, %1;" ::"r"(index), "n"(kTeamThreads) : "memory");
    }
  }
};

}  // namespace cuda
}  // namespace zipccl
