// Code::fast, tensor to frame. A team of warps owns a group of 32 tiles, or two teams in a cluster do; a warp encodes a
// tile at a time, a lane 32 values of it: one word of each plane.
//
//   1. A tile is loaded into registers and encoded. Its unit goes to its slot of shared memory, its dynamic bytes to a
//      pool of the warp's tiles. What does not fit is made again from the values in step 3.
//   2. The sizes of the group's tiles and those of the groups before it say where its bytes go: fast_encode_group.cuh.
//   3. Units and dynamic bytes go from shared memory to the frame.
//
// What keeps the multiprocessors waiting is 2: a group is done when all groups before it are encoded. Small slots let
// four groups share a multiprocessor, so that some work while others wait.
#include "codec/fast_encode_group.cuh"
#include "codec/hopper.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarpsOfProcessor = 32;  // as many as 64 registers allow, and four teams of 8 fit in shared memory
constexpr uint32_t kPoolOfTile = 352;

// The warps that work on the same group. A block has one team, or, where there may be only one block to a
// multiprocessor, as many as fit.
template <int kWarps, int kTeams>
struct Team {
  int index = kTeams == 1 ? 0 : threadIdx.x / (kWarps * kWarpSize);
  int warp = threadIdx.x / kWarpSize % kWarps;
  int lane = threadIdx.x % kWarpSize;

  __device__ __forceinline__ void sync() const {
    if (kTeams == 1) {
      __syncthreads();
    } else {
      asm volatile("barrier.sync %0, %1;" ::"r"(index), "n"(kWarps * kWarpSize) : "memory");
    }
  }
};

// What a team keeps of its group, or of one of kParts that share it. A warp reads only the slots and the pool that it
// has written.
template <int kWarps, int kParts>
struct alignas(16) Space {
  static constexpr int kTeamTiles = kTiles / kParts;
  static constexpr uint32_t kPoolBytes = kTeamTiles / kWarps * kPoolOfTile;  // of a warp
  uint8_t slots[kTeamTiles][kSlotBytes];
  uint8_t pools[kWarps][kPoolBytes];
  EncodedTile tiles[kTeamTiles];
  GroupPlace place;
  uint64_t next;  // the team's next group
  uint32_t unit_begin[kTiles];
  uint32_t dynamic_begin[kTiles];
};
static_assert(kPoolOfTile % 4 == 0 && kSlotBytes % 16 == 0, "copied by words and by 16 bytes");

template <bool kFull, int kWarps, int kParts>
__device__ __forceinline__ void encode_tiles(const Group& group, Space<kWarps, kParts>* space, int first, int warp,
                                             int lane) {
  constexpr int kTeamTiles = Space<kWarps, kParts>::kTeamTiles;
  uint32_t used = 0;
  const auto take = [&](uint32_t n) {
    if (used + n > Space<kWarps, kParts>::kPoolBytes) return kNoPlace;
    const uint32_t at = used;
    used += (n + 3) & ~3u;  // words
    return at;
  };
  const auto values_in = [&](int t) { return kFull ? kTile : group.values_in(first + t); };
  const auto load = [&](int t) { return load_values<kFull>(group.src + (first + t) * kTile, values_in(t), lane); };
  const int end = kFull ? kTeamTiles : min(kTeamTiles, static_cast<int>(group.tiles) - first);
  LaneValues next = {};
  if (warp < end) next = load(warp);
#pragma unroll 1
  for (int t = warp; t < end; t += kWarps) {
    const LaneValues v = next;
    if (t + kWarps < end) next = load(t + kWarps);  // on its way while this one is encoded
    const EncodedTile tile = encode_tile<kFull>(v, space->slots[t], space->pools[warp], take, values_in(t), lane);
    if (lane == 0) space->tiles[t] = tile;
  }
}

template <int kWarps, int kParts>
__device__ __forceinline__ void store_tiles(const Group& group, Space<kWarps, kParts>* space, int first, int warp,
                                            int lane) {
  __syncwarp();  // the warp's lanes have written each other's part
  for (int t = warp; t < Space<kWarps, kParts>::kTeamTiles && first + t < group.tiles; t += kWarps) {
    const uint32_t m = group.values_in(first + t);
    const EncodedTile tile = space->tiles[t];
    const uint32_t mode = tile_word_mode(entry_word(tile.entry)), n = tile_word_dynamic(entry_word(tile.entry));
    const uint32_t unit = static_cast<uint32_t>(unit_bytes(mode, m));
    uint8_t* const slot = space->slots[t];
    uint8_t* const to = space->place.units + space->unit_begin[first + t];
    uint8_t* const dynamic = space->place.dynamic + space->dynamic_begin[first + t];
#pragma unroll
    for (uint32_t r = 0; r < kSlotBytes; r += 16 * kWarpSize) {
      const uint32_t b = r + 16 * lane;
      if (b < unit) *reinterpret_cast<uint4*>(to + b) = *reinterpret_cast<const uint4*>(slot + b);
    }
    if (group.split) zero_hole(to, unit, m, lane);
    if (tile.place != kNoPlace) {
      store_bytes(dynamic, space->pools[warp] + tile.place, n, lane);
    } else {
      store_again(group.src + (first + t) * kTile, m, tile.entry, slot, dynamic, lane);
    }
  }
}

// By one warp of a team, between the other two steps. Of a cluster's teams each places the whole group for itself.
template <int kWarps, int kParts>
__device__ __forceinline__ void place_tiles(const EncodeLaunch& launch, const Group& group,
                                            Space<kWarps, kParts>* space, int rank, int lane) {
  const EncodedTile* tiles = space->tiles;
  if constexpr (kParts > 1) {
    constexpr int kTeamTiles = Space<kWarps, kParts>::kTeamTiles;
    tiles = of_block(space->tiles, lane / kTeamTiles) - lane / kTeamTiles * kTeamTiles;
  }
  const TilePlace place = place_tile(group, tiles[lane].entry, lane);
  space->unit_begin[lane] = place.unit_begin;
  space->dynamic_begin[lane] = place.dynamic_begin;
  wait_for_previous();  // which clears the states
  if (rank == 0) {
    publish(group.states, group.index, place.part_size(), lane);
    store_entries(group, place.entry, lane);
  }
  const uint64_t begin = look_back(group.states, group.index, place.part_size(), lane);
  const GroupPlace parts = place_group(group, place, begin);
  if (lane == 0) space->place = parts;
  if (rank == 0) {
    zero_bytes(parts.dynamic + place.dynamic_size, align_up(place.dynamic_size) - place.dynamic_size, lane);
    store_begin(group, launch.header, begin, place.part_size(), lane);
  }
}

template <int kWarps, int kParts, int kTeams>
__device__ __forceinline__ void encode_group(const EncodeLaunch& launch, uint64_t work, int rank,
                                             Space<kWarps, kParts>* space, const Team<kWarps, kTeams>& team) {
  const int first = rank * Space<kWarps, kParts>::kTeamTiles;
  const Group group = find_group(launch, work);
  if (group.full() && is_aligned(group.src, 16)) {
    encode_tiles<true>(group, space, first, team.warp, team.lane);
  } else {
    encode_tiles<false>(group, space, first, team.warp, team.lane);
  }
  if constexpr (kParts > 1) {
    sync_cluster();
  } else {
    team.sync();
  }
  if (team.warp == 0) place_tiles(launch, group, space, rank, team.lane);
  team.sync();
  store_tiles(group, space, first, team.warp, team.lane);
}

// Grid: a block, or kParts in a cluster, for each group.
template <int kWarps, int kParts>
__global__ void __launch_bounds__(kWarps* kWarpSize, kWarpsOfProcessor / kWarps)
    fast_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto* const space = reinterpret_cast<Space<kWarps, kParts>*>(shared);
  encode_group(launch, blockIdx.x / kParts, blockIdx.x % kParts, space, Team<kWarps, 1>());
  wait_for_previous();
  if constexpr (kParts > 1) sync_cluster();  // the other block has read this one's tiles
}

// Grid: any number of blocks. Teams take the groups in turn: one that is waited for has a team that runs already.
// EncodeLaunch::states has the number of the next group behind the states.
template <int kWarps, int kTeams>
__global__ void __launch_bounds__(kWarps* kTeams* kWarpSize, 1)
    fast_encode_teams_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Team<kWarps, kTeams> team;
  auto* const space = reinterpret_cast<Space<kWarps, 1>*>(shared) + team.index;
  const uint64_t groups = launch.first_block[launch.n];
  auto* const next = reinterpret_cast<unsigned long long*>(launch.states + groups);
  wait_for_previous();
  while (true) {
    if (team.warp == 0 && team.lane == 0) space->next = atomicAdd(next, 1ull);
    team.sync();
    const uint64_t work = space->next;
    if (work >= groups) break;
    encode_group(launch, work, 0, space, team);
    team.sync();  // before what it keeps is overwritten
  }
}

template <typename Kernel>
cudaError_t launch_with(Kernel kernel, const EncodeLaunch& launch, uint64_t blocks, int parts, int threads,
                        size_t shared, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, launch.processors, blocks, parts, threads, shared, stream, launch);
}

template <int kWarps, int kParts>
cudaError_t launch_groups(const EncodeLaunch& launch, cudaStream_t stream) {
  return launch_with(fast_encode_kernel<kWarps, kParts>, launch, launch.first_block[launch.n] * kParts, kParts,
                     kWarps * kWarpSize, sizeof(Space<kWarps, kParts>), stream);
}

template <int kWarps, int kTeams>
cudaError_t launch_teams(const EncodeLaunch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.processors.blocks_for(ceil_div(launch.first_block[launch.n], kTeams));
  return launch_with(fast_encode_teams_kernel<kWarps, kTeams>, launch, blocks, 1, kWarps * kTeams * kWarpSize,
                     kTeams * sizeof(Space<kWarps, 1>), stream);
}

}  // namespace

cudaError_t launch_fast_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  const uint64_t groups = launch.first_block[launch.n], processors = launch.processors.n;
  if (launch.processors.limited) {
    // As many teams as shared memory holds for certain.
    return has_hopper_launches() ? launch_teams<8, 4>(launch, stream) : launch_teams<8, 1>(launch, stream);
  }
  // More warps to a group, and two multiprocessors, where there are few.
  if (2 * groups <= processors && has_hopper_launches()) return launch_groups<16, 2>(launch, stream);
  return groups <= processors ? launch_groups<16, 1>(launch, stream) : launch_groups<8, 1>(launch, stream);
}

}  // namespace cuda
}  // namespace zipccl
