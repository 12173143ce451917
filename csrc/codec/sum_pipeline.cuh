// decode_sum(), how coded tiles reach the warps: through shared memory. Those of a team's warps from one input, which
// lie next to each other in the frame, are a stage, and while one is decoded the next ones are copied.
#pragma once

#include "codec/fast_decode.cuh"
#include "codec/hopper.cuh"
#include "codec/team.cuh"

namespace zipccl {
namespace cuda {

// What to copy of a coded input for a round: the tiles of a block's warps, which lie next to each other in the frame.
// In vectors of 16 bytes, all of them inside the frame: so are units and dynamic bytes, and it is aligned at both ends.
struct Extent {
  const uint4* units;
  const uint4* dynamic;
  uint32_t unit_vectors;
  uint32_t dynamic_vectors;
};

constexpr int kStages = 3;
struct Stage {
  uint4 units[kWarps * kMaxUnitBytes / sizeof(uint4)];
  uint4 dynamic[kWarps * kTile / sizeof(uint4) + 2];
};

// Steps 0, 1, ... use the stages in turn. Phases of a stage's barriers alternate between parity 0 and 1.
struct Turn {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ Turn after(int steps) const {
    Turn t = *this;
    for (int i = 0; i < steps; ++i) t.advance();
    return t;
  }
};

// The stages of a team. Every warp goes through the same steps: wait(), read, release(); one thread begins each copy,
// after the step that read the stage before.
struct Pipeline {
  uint64_t full[kStages];   // barriers: has been copied
  uint64_t empty[kStages];  // has been read by all warps
  Stage stages[kStages];

#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void copy(uint4* to, const uint4* from, uint32_t vectors, uint64_t* barrier) {
    if (vectors != 0) copy_in(to, from, 16 * vectors, barrier);
  }

  // By one thread, with a barrier of the team behind it.
  __device__ __forceinline__ void init() {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(&full[s], 1);
      init_barrier(&empty[s], kWarps);
    }
  }
  // By one thread. A stage that has never been used counts as read: its barrier is past a phase of parity 1.
  __device__ __forceinline__ void begin(const Turn& t, const Extent& x) {
    wait_for(&empty[t.stage], t.parity ^ 1u);
    expect_bytes(&full[t.stage], 16 * (x.unit_vectors + x.dynamic_vectors));
    copy(stages[t.stage].units, x.units, x.unit_vectors, &full[t.stage]);
    copy(stages[t.stage].dynamic, x.dynamic, x.dynamic_vectors, &full[t.stage]);
  }
  template <typename Team>
  __device__ __forceinline__ const Stage& wait(const Turn& t, const Team&, const Extent&) {
    wait_for(&full[t.stage], t.parity);
    return stages[t.stage];
  }
  // One arrival for the warp: __syncwarp() puts the reads of all its lanes before it.
  __device__ __forceinline__ void release(const Turn& t, int lane) {
    __syncwarp();
    if (lane == 0) arrive(&empty[t.stage]);
  }
#else
  // Without asynchronous copies of this kind: by the whole team, when the stage is needed.
  __device__ __forceinline__ void init() {}
  __device__ __forceinline__ void begin(const Turn&, const Extent&) {}
  template <typename Team>
  __device__ __forceinline__ const Stage& wait(const Turn& t, const Team& team, const Extent& x) {
    Stage& stage = stages[t.stage];
    team.sync();
    for (uint32_t i = team.thread(); i < x.unit_vectors; i += kTeamThreads) stage.units[i] = x.units[i];
    for (uint32_t i = team.thread(); i < x.dynamic_vectors; i += kTeamThreads) stage.dynamic[i] = x.dynamic[i];
    team.sync();
    return stage;
  }
  __device__ __forceinline__ void release(const Turn&, int) {}
#endif
};

}  // namespace cuda
}  // namespace zipccl
