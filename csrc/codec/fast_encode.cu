// Code::fast, tensor to frame. A block of 16 warps takes a group of 32 tiles; a warp has two of them, a lane 32 values
// of a tile: one word of each plane. bf16: 2 bytes are read and 1.41 written.
//
//   1. A tile is encoded: its sign-mantissa bytes stay in registers, its planes and dynamic bytes go to shared memory.
//      Then the group's size is known.
//   2. The sizes of the group's tiles and those of the groups before it say where its bytes go: fast_encode_group.cuh.
//   3. All of them go to the frame.
//
// For tensors whose groups all run at the same time, which this makes as short as possible. Where there are more, most
// of a group's time is spent waiting in step 2, and what counts is how many share a multiprocessor:
// fast_encode_many.cu, and, for split frames, fast_encode_direct.cu.
#include "codec/fast_encode_group.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTilesOfWarp = kTiles / kWarps;
constexpr int kBlocks = 2;        // of 64 registers a lane, on a multiprocessor
constexpr int kDirectGroups = 5;  // a multiprocessor: from here on units had better not wait

// What is made of a tile in shared memory.
struct TileSpace {
  uint32_t planes[3][kPlaneWords];
  uint8_t dynamic[kTile];
};

struct alignas(16) Space {
  TileSpace tiles[kTiles];
  uint8_t exponents[kWarps][kTile];  // of each warp's tile
  uint32_t entries[kTiles];
  uint32_t unit_begin[kTiles];
  uint32_t dynamic_begin[kTiles];
  GroupPlace place;
};

// A lane's sign-mantissa bytes: of values 256 k + 8 lane + 0..7 in of[k].
struct SignMantissas {
  uint2 of[4];
};
__device__ __forceinline__ SignMantissas all_sign_mantissas(const LaneValues& v) {
  return {{sign_mantissas(v.w[0]), sign_mantissas(v.w[1]), sign_mantissas(v.w[2]), sign_mantissas(v.w[3])}};
}

// A tile but for its sign-mantissa bytes. Returns its entry.
template <bool kFull>
__device__ __forceinline__ uint32_t encode_tile(const LaneValues& v, uint32_t m, uint8_t* exponents, TileSpace* space,
                                                int lane) {
  const PlannedTile tile = plan_tile<kFull>(v, m, lane);
  const uint32_t padded = static_cast<uint32_t>(align_up(m));
  if (tile.is(TileMode::window)) {
#pragma unroll
    for (int p = 0; p < 3; ++p) space->planes[p][lane] = tile.planes[p];
    if (tile.dynamic() != 0) {
      put_exponents(exponents, v, padded, lane);
      const uint32_t valid = kFull ? 0xFFFFFFFFu : valid_values(m, lane);
      put_escapes(exponents, tile.escapes(valid), space->dynamic + tile.end, lane);
    }
  } else if (tile.is(TileMode::raw)) {
    put_exponents(space->dynamic, v, padded, lane);
  } else if (lane == 0) {
    *reinterpret_cast<uint16_t*>(space->dynamic) = static_cast<uint16_t>(v.w[0][0]);
  }
  return tile.entry;
}

// A tile that is not full, or not aligned. Not inlined, so that the others keep their registers.
static __device__ __noinline__ uint32_t encode_any_tile(const uint16_t* src, uint32_t m, uint8_t* exponents,
                                                        TileSpace* space, int lane) {
  return encode_tile<false>(load_values<false>(src, m, lane), m, exponents, space, lane);
}

__device__ __forceinline__ void store_tile(const SignMantissas& bytes, const TileSpace& space, uint32_t entry,
                                           uint32_t m, bool split, uint8_t* unit, uint8_t* dynamic, int lane) {
  const uint32_t mode = tile_word_mode(entry_word(entry)), padded = static_cast<uint32_t>(align_up(m));
  if (mode != static_cast<uint32_t>(TileMode::constant)) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t i = 256 * k + 8 * lane;
      if (i < padded) *reinterpret_cast<uint2*>(unit + i) = bytes.of[k];
    }
  }
  if (mode == static_cast<uint32_t>(TileMode::window) && lane < kPlanesBytes32 / 16) {
    reinterpret_cast<uint4*>(unit + padded)[lane] = reinterpret_cast<const uint4*>(space.planes)[lane];
  }
  if (split) zero_hole(unit, static_cast<uint32_t>(unit_bytes(mode, m)), m, lane);
  store_bytes(dynamic, space.dynamic, tile_word_dynamic(entry_word(entry)), lane);
}

// Grid: a block for each group.
__global__ void __launch_bounds__(kThreads, kBlocks) fast_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];
  Space* const space = reinterpret_cast<Space*>(shared);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const Group group = find_group(launch, blockIdx.x);
  const int first = warp * kTilesOfWarp;
  SignMantissas bytes[kTilesOfWarp] = {};
  if (group.whole()) {
    LaneValues v[kTilesOfWarp];
#pragma unroll
    for (int r = 0; r < kTilesOfWarp; ++r) v[r] = load_values<true>(group.src + (first + r) * kTile, kTile, lane);
#pragma unroll
    for (int r = 0; r < kTilesOfWarp; ++r) {
      bytes[r] = all_sign_mantissas(v[r]);
      const uint32_t entry = encode_tile<true>(v[r], kTile, space->exponents[warp], &space->tiles[first + r], lane);
      if (lane == 0) space->entries[first + r] = entry;
    }
  } else {
#pragma unroll
    for (int r = 0; r < kTilesOfWarp; ++r) {
      const int t = first + r;
      if (t >= group.tiles) continue;
      const uint16_t* const src = group.src + t * kTile;
      const uint32_t m = group.values_in(t);
      const uint32_t entry = encode_any_tile(src, m, space->exponents[warp], &space->tiles[t], lane);
      bytes[r] = all_sign_mantissas(load_values<false>(src, m, lane));
      if (lane == 0) space->entries[t] = entry;
    }
  }
  __syncthreads();
  if (warp == 0) place_tiles<2>(launch, group, Slots(), space->entries[lane], space, lane);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kTilesOfWarp; ++r) {
    const int t = first + r;
    if (t >= group.tiles) continue;
    store_tile(bytes[r], space->tiles[t], space->entries[t], group.values_in(t), group.layout == FrameLayout::split,
               space->place.units + space->unit_begin[t], space->place.dynamic + space->dynamic_begin[t], lane);
  }
  wait_for_previous();
}

}  // namespace

cudaError_t launch_fast_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  const Processors& processors = launch.processors;
  const uint64_t groups = launch.first_block[launch.n];
  bool compact = false, packed = false;
  for (int i = 0; i < launch.n; ++i) {
    const FrameLayout layout = fast_layout(launch.layout, launch.job[i].count);
    compact |= layout == FrameLayout::compact;
    packed |= layout == FrameLayout::packed;
  }
  if (!compact && !processors.limited && groups > static_cast<uint64_t>(kDirectGroups) * processors.n) {
    return launch_fast_encode_direct(launch, stream);
  }
  if (packed || processors.limited || groups > static_cast<uint64_t>(kBlocks) * processors.n) {
    return launch_fast_encode_many(launch, stream);
  }
  const cudaError_t error =
      cudaFuncSetAttribute(fast_encode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Space));
  if (error != cudaSuccess) return error;
  return launch_behind(fast_encode_kernel, processors, groups, kThreads, sizeof(Space), stream, launch);
}

}  // namespace cuda
}  // namespace zipccl
