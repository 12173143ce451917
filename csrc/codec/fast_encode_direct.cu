// Code::fast, tensor to split or packed frame, where there are many more groups than run at the same time. A block of 2
// warps takes a group of 32 tiles; a warp encodes 16 in a row, one at a time, a lane 32 values of it: one word of each
// plane. bf16: 2 bytes are read and 1.41 written.
//
//   1. A tile is encoded, and its unit goes from registers to the frame: where a unit belongs follows from the tile's
//      number and, in a packed frame, from what plan_slots.cu has found out. Its dynamic bytes go to a pool of the
//      warp's tiles in shared memory.
//   2. The sizes of the group's tiles and those of the groups before it say where its dynamic bytes go:
//      fast_encode_group.cuh.
//   3. They go there from the pool; those of tiles that did not fit it are made again from the values.
//
// Nearly all that is written has gone out when a block begins to wait in 2, and small blocks leave 15 others on the
// multiprocessor that go on meanwhile.
#include "codec/fast_encode_group.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 2;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocks = 16;  // of 64 registers a lane, on a multiprocessor
constexpr int kTilesOfWarp = kTiles / kWarps;
constexpr uint32_t kUnit = static_cast<uint32_t>(kMaxUnitBytes);
constexpr uint32_t kPoolBytes = 160 * kTilesOfWarp;  // of a warp

struct alignas(16) Space {
  uint8_t exponents[kWarps][kTile];
  uint8_t pools[kWarps][kPoolBytes + 16];  // store_bytes() reads ahead
  uint32_t entries[kTiles];
  uint32_t unit_begin[kTiles];
  uint32_t dynamic_begin[kTiles];
  GroupPlace place;
};

// How units are placed.
struct Placing {
  bool packed;
  bool looked_at;  // Slots::looked_at

  // Whether a tile has no place.
  __device__ __forceinline__ bool none(const PlannedTile& tile, uint32_t m) const {
    return looked_at && m == kTile && tile.is(TileMode::constant);
  }
};

// Stores a tile's unit and returns the place of the next one.
__device__ __forceinline__ uint8_t* store_unit(const PlannedTile& tile, const LaneValues& v, uint32_t m,
                                               const Placing& placing, uint8_t* unit, int lane) {
  const uint32_t padded = static_cast<uint32_t>(align_up(m));
  if (tile.is(TileMode::window)) {
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      *reinterpret_cast<uint32_t*>(unit + padded + kPlaneBytes * p + 4 * lane) = tile.planes[p];
    }
  } else if (placing.none(tile, m)) {
    return unit;
  } else if (placing.packed && tile.is(TileMode::raw)) {
    put_exponents(unit + padded, v, kPlanesBytes32, lane);  // of values behind the last one: padding
  } else {
    zero_hole(unit, static_cast<uint32_t>(unit_bytes(tile.mode(), m)), m, lane);
  }
  if (!tile.is(TileMode::constant)) put_sign_mantissas(unit, v, padded, lane);
  return unit + kUnit;
}

// What the pool of a warp holds: dynamic bytes of some of its tiles, a bit each, in order and without gaps.
struct Pooled {
  uint32_t tiles;
  uint32_t bytes;
};
constexpr uint32_t kAllTiles = (1u << kTilesOfWarp) - 1;

// Encodes a warp's tiles of a whole group, of which the first one has been loaded.
__device__ __forceinline__ Pooled encode_run(const uint16_t* src, LaneValues next, Placing placing, uint8_t* unit,
                                             uint8_t* exponents, uint8_t* pool, uint32_t* entries, int lane) {
  Pooled pooled = {0, 0};
#pragma unroll 1
  for (int r = 0; r < kTilesOfWarp; ++r) {
    const LaneValues v = next;
    if (r + 1 < kTilesOfWarp) next = load_values<true>(src + (r + 1) * kTile, kTile, lane);
    const PlannedTile tile = plan_tile<true>(v, kTile, lane);
    if (lane == 0) entries[r] = tile.entry;
    const uint32_t n = tile.dynamic();
    if (pooled.bytes + n <= kPoolBytes && !tile.is(TileMode::raw)) {
      uint8_t* const to = pool + pooled.bytes;
      if (tile.is(TileMode::constant)) {
        if (lane < 2) to[lane] = static_cast<uint8_t>(v.w[0][0] >> (8 * lane));
      } else if (n != 0) {
        put_exponents(exponents, v, kTile, lane);
        put_escapes(exponents, tile.escapes(kFullWarp), to + tile.end, lane);
      }
      pooled.tiles |= 1u << r;
      pooled.bytes += n;
    }
    unit = store_unit(tile, v, kTile, placing, unit, lane);
  }
  return pooled;
}

// Values in tile r of those that a warp has.
__device__ __forceinline__ uint32_t values_in(uint32_t values, uint32_t r) { return min(values - r * kTile, kTile); }

// Tiles of any other group. What is dynamic is left to step 3.
static __device__ __noinline__ void encode_any(const uint16_t* src, uint32_t values, Placing placing, uint8_t* unit,
                                               uint32_t* entries, int lane) {
  for (uint32_t r = 0; r * kTile < values; ++r) {
    const uint32_t m = values_in(values, r);
    const LaneValues v = load_values<false>(src + r * kTile, m, lane);
    const PlannedTile tile = plan_tile<false>(v, m, lane);
    if (lane == 0) entries[r] = tile.entry;
    unit = store_unit(tile, v, m, placing, unit, lane);
  }
}

__device__ __forceinline__ LaneValues load_any(const uint16_t* src, uint32_t m, int lane) {
  return m == kTile && is_aligned(src, 16) ? load_values<true>(src, m, lane) : load_values<false>(src, m, lane);
}

// Dynamic bytes of a warp's tiles, where not all of them are pooled: the others are made from the values.
static __device__ __noinline__ void store_again(const uint16_t* src, uint32_t values, bool packed, uint32_t pooled,
                                                const uint8_t* pool, const uint32_t* entries, uint8_t* exponents,
                                                uint8_t* dynamic, int lane) {
  for (uint32_t r = 0; r * kTile < values; ++r) {
    const uint32_t m = values_in(values, r), entry = packed ? packed_entry(entries[r], m, false) : entries[r];
    const uint32_t n = tile_word_dynamic(entry_word(entry));
    if (pooled >> r & 1u) {
      for (uint32_t b = lane; b < n; b += kWarpSize) dynamic[b] = pool[b];
      pool += n;
      dynamic += n;
      continue;
    }
    const LaneValues v = load_any(src + r * kTile, m, lane);
    const PlannedTile tile = plan_tile<false>(v, m, lane);
    __syncwarp();
    put_exponents(exponents, v, static_cast<uint32_t>(align_up(m)), lane);
    __syncwarp();
    if (tile.is(TileMode::window)) {
      put_escapes(exponents, tile.escapes(valid_values(m, lane)), dynamic + tile.end, lane);
    } else if (tile.is(TileMode::raw)) {
      store_bytes(dynamic, exponents + m - n, n, lane);
    } else if (lane == 0) {
      dynamic[0] = static_cast<uint8_t>(v.w[0][0]);
      dynamic[1] = static_cast<uint8_t>(v.w[0][0] >> 8);
    }
    dynamic += n;
  }
}

// Grid: a block for each group.
__global__ void __launch_bounds__(kThreads, kBlocks)
    fast_encode_direct_kernel(const __grid_constant__ EncodeLaunch launch) {
  __shared__ Space space;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const Group group = find_group(launch, blockIdx.x);
  const uint32_t first = warp * kTilesOfWarp;
  const uint16_t* const src = group.src + first * kTile;
  const uint32_t values = min(group.values - min(group.values, first * kTile), kTilesOfWarp * kTile);
  const bool packed = group.layout == FrameLayout::packed;
  LaneValues tile = {};
  if (group.whole()) tile = load_values<true>(src, kTile, lane);  // on its way
  Slots slots = {};
  if (packed) {
    wait_for_previous();
    slots = find_slots(launch, blockIdx.x, group, lane);
  }
  const Placing placing = {packed, slots.looked_at};
  const uint32_t units_before = warp == 0 ? 0 : packed ? slots.first_half : first;
  uint8_t* const units = units_place(group, slots) + units_before * kUnit;
  Pooled pooled = {0, 0};
  if (group.whole()) {
    pooled =
        encode_run(src, tile, placing, units, space.exponents[warp], space.pools[warp], space.entries + first, lane);
  } else {
    encode_any(src, values, placing, units, space.entries + first, lane);
  }
  __syncthreads();
  if (warp == 0) place_tiles<1>(launch, group, slots, space.entries[lane], &space, lane);
  __syncthreads();
  uint8_t* const to = space.place.dynamic + space.dynamic_begin[first];
  if (pooled.tiles == kAllTiles) {
    store_bytes(to, space.pools[warp], pooled.bytes, lane);
  } else {
    store_again(src, values, packed, pooled.tiles, space.pools[warp], space.entries + first, space.exponents[warp], to,
                lane);
  }
  wait_for_previous();
}

}  // namespace

cudaError_t launch_fast_encode_direct(const EncodeLaunch& launch, cudaStream_t stream) {
  const uint64_t groups = launch.first_block[launch.n];
  return launch_behind(fast_encode_direct_kernel, launch.processors, groups, kThreads, 0, stream, launch);
}

}  // namespace cuda
}  // namespace zipccl
