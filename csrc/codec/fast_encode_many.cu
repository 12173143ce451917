// Code::fast, tensor to frame, where there are more groups than run at the same time, or few multiprocessors to use. A
// team of 8 warps owns a group of 32 tiles; a warp encodes a tile at a time, a lane 32 values of it: one word of each
// plane. bf16: 2 bytes are read and 1.41 written.
//
//   1. A tile is loaded into registers and encoded. Its unit goes to its slot of shared memory, its dynamic bytes to a
//      pool of the warp's tiles. What does not fit is made again from the values in step 3.
//   2. The sizes of the group's tiles and those of the groups before it say where its bytes go: fast_encode_group.cuh.
//   3. Units and dynamic bytes go from shared memory to the frame.
//
// What keeps the multiprocessors waiting is 2: a group is done when all groups before it are encoded. Small slots let
// four groups share a multiprocessor, so that some work while others wait.
#include "codec/fast_encode_group.cuh"
#include "codec/team.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kTeamsOfProcessor = 4;  // with 64 registers a lane, and what a team keeps, for certain
constexpr uint32_t kSlotBytes = static_cast<uint32_t>(kMaxUnitBytes);
constexpr uint32_t kPoolBytes = kTiles / kWarps * 352;  // of a warp
constexpr uint32_t kNoPlace = 0xFFFFFFFFu;
static_assert(kPoolBytes % 4 == 0 && kSlotBytes % 16 == 0, "copied by words and by 16 bytes");
static_assert(kSlotBytes >= kTile, "a slot also holds a tile's exponents");

struct EncodedTile {
  uint32_t entry;
  uint32_t place;  // of the dynamic bytes in the warp's pool, kNoPlace: nowhere
};

// What a team keeps of its group. A warp reads only the slots and the pool that it has written.
struct alignas(16) Space {
  uint8_t slots[kTiles][kSlotBytes];
  uint8_t pools[kWarps][kPoolBytes];
  EncodedTile tiles[kTiles];
  GroupPlace place;
  uint64_t next;   // the team's next group
  bool looked_at;  // Slots::looked_at
  uint32_t unit_begin[kTiles];
  uint32_t dynamic_begin[kTiles];
};

// Encodes the m values, zeros behind them: the unit into `slot`, the dynamic bytes of window and constant tiles to
// where take(n) says, if it finds a place for n bytes: pool + place.
//
// In shared memory a lane's exponents and its sign-mantissa bytes lie in the same places, so it may go from one to the
// other without waiting for the rest of the warp.
template <bool kFull, typename Take>
__device__ __forceinline__ EncodedTile encode_tile(const LaneValues& v, uint8_t* slot, uint8_t* pool, const Take& take,
                                                   uint32_t m, int lane) {
  if (kFull) m = kTile;
  const PlannedTile tile = plan_tile<kFull>(v, m, lane);
  const uint32_t padded = static_cast<uint32_t>(align_up(m)), n = tile.dynamic();
  if (tile.is(TileMode::constant)) {
    const uint32_t place = take(n);
    if (place != kNoPlace && lane == 0) *reinterpret_cast<uint16_t*>(pool + place) = static_cast<uint16_t>(v.w[0][0]);
    return {tile.entry, place};
  }
  uint32_t place = kNoPlace;
  if (tile.is(TileMode::window)) {
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      *reinterpret_cast<uint32_t*>(slot + padded + kPlaneBytes * p + 4 * lane) = tile.planes[p];
    }
    place = n != 0 ? take(n) : 0;
    if (n != 0 && place != kNoPlace) {
      put_exponents(slot, v, padded, lane);
      const uint32_t valid = kFull ? 0xFFFFFFFFu : valid_values(m, lane);
      put_escapes(slot, tile.escapes(valid), pool + place + tile.end, lane);
    }
  }
  put_sign_mantissas(slot, v, padded, lane);
  return {tile.entry, place};
}

template <bool kFull>
__device__ __forceinline__ void encode_tiles(const Group& group, Space* space, int warp, int lane) {
  uint32_t used = 0;
  const auto take = [&](uint32_t n) {
    if (used + n > kPoolBytes) return kNoPlace;
    const uint32_t at = used;
    used += (n + 3) & ~3u;  // words
    return at;
  };
  const auto values_in = [&](int t) { return kFull ? kTile : group.values_in(t); };
  const auto load = [&](int t) { return load_values<kFull>(group.src + t * kTile, values_in(t), lane); };
  const int end = kFull ? kTiles : static_cast<int>(group.tiles);
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

// Dynamic bytes for which encode_tile() has found no place: made again from the values, by a warp. The slot, from which
// the unit has been copied, is overwritten. packed: the frame is, so a raw tile's unit takes some of them.
static __device__ __noinline__ void store_again(const uint16_t* values, uint32_t m, uint32_t entry, bool packed,
                                                uint8_t* slot, uint8_t* unit, uint8_t* dynamic, int lane) {
  const uint32_t padded = static_cast<uint32_t>(align_up(m));
  const LaneValues v = load_values<false>(values, m, lane);
  const bool window = tile_word_mode(entry_word(entry)) == static_cast<uint32_t>(TileMode::window);
  uint32_t escapes = 0;
  if (window) {
    for (int p = 0; p < 3; ++p) {
      escapes |= *reinterpret_cast<const uint32_t*>(slot + padded + kPlaneBytes * p + 4 * lane);
    }
    escapes = ~escapes & valid_values(m, lane);
  }
  __syncwarp();
  put_exponents(slot, v, padded, lane);
  __syncwarp();
  if (window) {
    put_escapes(slot, escapes, dynamic + warp_inclusive_sum(__popc(escapes)), lane);
  } else if (tile_word_mode(entry_word(entry)) == static_cast<uint32_t>(TileMode::raw)) {
    const uint32_t in_unit = packed ? raw_in_unit(m) : 0;
    if (packed && 16 * lane < kPlanesBytes32) {
      const uint4 padding = make_uint4(0, 0, 0, 0);
      reinterpret_cast<uint4*>(unit + padded)[lane] =
          16 * lane < padded ? reinterpret_cast<const uint4*>(slot)[lane] : padding;
    }
    store_bytes(dynamic, slot + in_unit, m - in_unit, lane);
  } else if (lane == 0) {
    dynamic[0] = static_cast<uint8_t>(values[0]);
    dynamic[1] = static_cast<uint8_t>(values[0] >> 8);
  }
  __syncwarp();
}

__device__ __forceinline__ void store_tiles(const Group& group, Space* space, int warp, int lane) {
  __syncwarp();  // the warp's lanes have written each other's part
  for (int t = warp; t < kTiles && t < group.tiles; t += kWarps) {
    const uint32_t m = group.values_in(t);
    const EncodedTile tile = space->tiles[t];
    const uint32_t mode = tile_word_mode(entry_word(tile.entry)), n = tile_word_dynamic(entry_word(tile.entry));
    const uint32_t unit = static_cast<uint32_t>(unit_bytes(mode, m));
    uint8_t* const slot = space->slots[t];
    uint8_t* const to = space->place.units + space->unit_begin[t];
    uint8_t* const dynamic = space->place.dynamic + space->dynamic_begin[t];
#pragma unroll
    for (uint32_t r = 0; r < kSlotBytes; r += 16 * kWarpSize) {
      const uint32_t b = r + 16 * lane;
      if (b < unit) *reinterpret_cast<uint4*>(to + b) = *reinterpret_cast<const uint4*>(slot + b);
    }
    const bool constant = mode == static_cast<uint32_t>(TileMode::constant);
    const bool held = constant && group.layout == FrameLayout::packed && !(space->looked_at && m == kTile);
    if (held || group.layout == FrameLayout::split) zero_hole(to, unit, m, lane);
    if (tile.place != kNoPlace) {
      store_bytes(dynamic, space->pools[warp] + tile.place, n, lane);
    } else {
      store_again(group.src + t * kTile, m, tile.entry, group.layout == FrameLayout::packed, slot, to, dynamic, lane);
    }
  }
}

template <int kTeams>
__device__ __forceinline__ void encode_group(const EncodeLaunch& launch, uint64_t work, Space* space,
                                             const Team<kTeams>& team) {
  const Group group = find_group(launch, work);
  if (group.whole()) {
    encode_tiles<true>(group, space, team.warp, team.lane);
  } else {
    encode_tiles<false>(group, space, team.warp, team.lane);
  }
  team.sync();
  if (team.warp == 0) {
    Slots slots = {};
    if (group.layout == FrameLayout::packed) {
      wait_for_previous();
      slots = find_slots(launch, work, group, team.lane);
      if (team.lane == 0) space->looked_at = slots.looked_at;
    }
    place_tiles<1>(launch, group, slots, space->tiles[team.lane].entry, space, team.lane);
  }
  team.sync();
  store_tiles(group, space, team.warp, team.lane);
}

// Grid: a block for each group.
__global__ void __launch_bounds__(kTeamThreads, kTeamsOfProcessor)
    fast_encode_many_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];
  encode_group(launch, blockIdx.x, reinterpret_cast<Space*>(shared), Team<1>());
  wait_for_previous();
}

// Grid: any number of blocks. Teams take the groups in turn: one that is waited for has a team that runs already.
// EncodeLaunch::states has the number of the next group behind the states.
template <int kTeams>
__global__ void __launch_bounds__(kTeams* kTeamThreads, 1)
    fast_encode_teams_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Team<kTeams> team;
  Space* const space = reinterpret_cast<Space*>(shared) + team.index;
  const uint64_t groups = launch.first_block[launch.n];
  auto* const next = reinterpret_cast<unsigned long long*>(launch.states + groups);
  wait_for_previous();
  while (true) {
    if (team.warp == 0 && team.lane == 0) space->next = atomicAdd(next, 1ull);
    team.sync();
    const uint64_t work = space->next;
    if (work >= groups) break;
    encode_group(launch, work, space, team);
    team.sync();  // before what it keeps is overwritten
  }
}

template <typename Kernel>
cudaError_t launch_with(Kernel kernel, const EncodeLaunch& launch, uint64_t blocks, int teams, cudaStream_t stream) {
  const int shared = teams * static_cast<int>(sizeof(Space));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, launch.processors, blocks, teams * kTeamThreads, shared, stream, launch);
}

template <int kTeams>
cudaError_t launch_teams(const EncodeLaunch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.processors.blocks_for(ceil_div(launch.first_block[launch.n], kTeams));
  return launch_with(fast_encode_teams_kernel<kTeams>, launch, blocks, kTeams, stream);
}

}  // namespace

cudaError_t launch_fast_encode_many(const EncodeLaunch& launch, cudaStream_t stream) {
  if (!launch.processors.limited) {
    return launch_with(fast_encode_many_kernel, launch, launch.first_block[launch.n], 1, stream);
  }
  return has_hopper_launches() ? launch_teams<kTeamsOfProcessor>(launch, stream) : launch_teams<1>(launch, stream);
}

}  // namespace cuda
}  // namespace zipccl
