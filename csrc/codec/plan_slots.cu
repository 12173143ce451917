// Code::fast, ahead of encoding packed frames: which full tiles have a unit, and how many of them come before a group
// (format/tile.h). A block takes a chunk of groups, a warp 1/8 of them. A lane looks at the first 4 values of one of
// the four tiles by which a group is judged: 32 bytes of 16 KiB that are read, which the encoder finds in the L2 cache.
// Only where they are equal the warp looks at all tiles of the group in this way, and where these are equal, at all of
// the tile. Written are 4 bytes a group and 4 a chunk, from which an encoding block learns its place by loads that do
// not wait for each other: find_slots() in fast_encode_group.cuh.
#include "codec/fast_encode_group.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBlocks = 4;                                      // on a multiprocessor
constexpr int kAtOnce = kWarpSize / static_cast<int>(kProbes);  // groups that a warp judges at once
static_assert(kLeastChunkGroups == kWarps && kProbeValues == 4, "a group for each warp, a load for each tile");

// Whether the first kProbeValues values of a tile are equal.
__device__ __forceinline__ bool begins_equal(const uint16_t* tile, bool wide) {
  uint2 v;
  if (wide) {
    v = *reinterpret_cast<const uint2*>(tile);
  } else {
    v = {tile[0] | static_cast<uint32_t>(tile[1]) << 16, tile[2] | static_cast<uint32_t>(tile[3]) << 16};
  }
  return v.x == both_halves(v.x) && v.y == v.x;
}

// Whether all words of a lane's share of a tile are `two`.
__device__ __forceinline__ bool all_are(const LaneValues& v, uint32_t two) {
  uint32_t differs = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int q = 0; q < 4; ++q) differs |= v.w[k][q] ^ two;
  }
  return differs == 0;
}

// Of a group's tiles whose first values are equal, a bit each: those that are constant. By a whole warp, two at a time.
__device__ __forceinline__ uint32_t constant_ones(const uint16_t* group, uint32_t candidates, int lane) {
  uint32_t constant = 0;
#pragma unroll 1
  while (candidates != 0) {
    const uint32_t first = 31 - __clz(candidates & (0u - candidates)), last = 31 - __clz(candidates);
    candidates &= ~(1u << first | 1u << last);
    const LaneValues a = load_values<true>(group + first * kTile, kTile, lane);
    const LaneValues b = load_values<true>(group + last * kTile, kTile, lane);
    const uint32_t two_a = both_halves(__shfl_sync(kFullWarp, a.w[0][0], 0));
    const uint32_t two_b = both_halves(__shfl_sync(kFullWarp, b.w[0][0], 0));
    if (__all_sync(kFullWarp, all_are(a, two_a))) constant |= 1u << first;
    if (__all_sync(kFullWarp, all_are(b, two_b))) constant |= 1u << last;
  }
  return constant;
}

// The same of values at any address.
static __device__ __noinline__ uint32_t constant_ones_anywhere(const uint16_t* group, uint32_t candidates, int lane) {
  uint32_t constant = 0;
  for (; candidates != 0; candidates &= candidates - 1) {
    const uint32_t t = 31 - __clz(candidates & (0u - candidates));
    const uint16_t* const tile = group + t * kTile;
    bool differs = false;
#pragma unroll 1
    for (uint32_t i = lane; i < kTile; i += kWarpSize) differs |= tile[i] != tile[0];
    if (__all_sync(kFullWarp, !differs)) constant |= 1u << t;
  }
  return constant;
}

// The job of a chunk.
__device__ __forceinline__ int find_chunk_job(const EncodeLaunch& launch, uint64_t chunk) {
  int i = 0;
  while (launch.slots.first_chunk[i + 1] <= chunk) ++i;
  return i;
}

// Writes the entries of n groups of a job, of which `tiles` tiles are full. Returns how many of them have a unit.
__device__ __forceinline__ uint32_t plan_groups(const uint16_t* src, uint32_t tiles, uint32_t n, uint32_t* entries,
                                                int lane) {
  const bool wide = is_aligned(src, sizeof(uint4));
  const auto begins_equal_at = [&](uint32_t tile) {
    return tile < tiles && begins_equal(src + static_cast<uint64_t>(tile) * kTile, wide);
  };
  uint32_t before = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < n; first += kAtOnce) {
    const uint32_t probe = (first + lane / kProbes) * kWarpSize + probe_tile(lane % kProbes);
    const uint32_t equal = __ballot_sync(kFullWarp, begins_equal_at(probe));
#pragma unroll 1
    for (uint32_t g = first; g < n && g < first + kAtOnce; ++g) {
      uint32_t used = __ballot_sync(kFullWarp, g * kWarpSize + lane < tiles), looked_at = 0;
      if ((equal >> (g - first) * kProbes & ((1u << kProbes) - 1)) != 0) {
        const uint16_t* const group = src + static_cast<uint64_t>(g) * kGroupValues;
        const uint32_t candidates = __ballot_sync(kFullWarp, begins_equal_at(g * kWarpSize + lane));
        used &= ~(wide ? constant_ones(group, candidates, lane) : constant_ones_anywhere(group, candidates, lane));
        looked_at = kLookedAt;
      }
      if (lane == 0) entries[g] = before | looked_at | __popc(used & 0xFFFFu) << kHalfShift;
      before += __popc(used);
    }
  }
  return before;
}

// Grid: a block for each chunk, or fewer.
__global__ void __launch_bounds__(kThreads, kBlocks) plan_slots_kernel(const __grid_constant__ EncodeLaunch launch) {
  __shared__ uint32_t of_warp[kWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint64_t blocks = launch.first_block[launch.n], chunks = launch.slots.first_chunk[launch.n];
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  for (uint64_t b = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; b <= blocks; b += step) {
    launch.states[b] = 0;
  }
  for (uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int i = find_chunk_job(launch, chunk);
    const uint64_t count = launch.job[i].count, groups = group_count(count), full = count / kTileValues;
    const uint32_t most = static_cast<uint32_t>(chunk_groups(count) / kWarps);  // of a warp
    const uint64_t first = min(((chunk - launch.slots.first_chunk[i]) * kWarps + warp) * most, groups);
    const uint32_t n = static_cast<uint32_t>(min(groups - first, uint64_t{most}));
    const uint32_t tiles = static_cast<uint32_t>(min(full - min(full, first * kGroupTiles), n * kGroupTiles));
    uint32_t* const entries = launch.slots.groups + launch.first_block[i] + first;
    const uint16_t* const src = static_cast<const uint16_t*>(launch.job[i].src) + first * kGroupValues;
    const uint32_t used = plan_groups(src, tiles, n, entries, lane);
    if (lane == 0) of_warp[warp] = used;
    __syncthreads();
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += of_warp[w];
      all += of_warp[w];
    }
    for (uint32_t g = lane; g < n; g += kWarpSize) entries[g] += before;
    if (threadIdx.x == 0) launch.slots.counts[chunk] = all;
    __syncthreads();  // before it is written again
  }
  // Not earlier: encoding blocks that came while some multiprocessors are busy with this would crowd on the others.
  let_next_begin();
}

}  // namespace

cudaError_t launch_plan_slots(const EncodeLaunch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.processors.blocks_for(at_least_one(launch.slots.first_chunk[launch.n]));
  plan_slots_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zipccl
