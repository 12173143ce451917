// Code::fast, tensor to frame. A block owns a group of 32 tiles, a warp a tile at a time, a lane 32 values of it: one
// word of each plane.
//
//   1. A tile is loaded into registers and encoded. Its unit goes to its slot of shared memory, its dynamic bytes to a
//      pool of the warp's tiles. What does not fit (raw tiles, escapes that the pool has no room for) is made again
//      from the values in step 3.
//   2. The sizes of the group's tiles give the size of its part of the frame. Where the part begins follows from the
//      groups before it, by decoupled look-back (Merrill and Garland, "Single-pass parallel prefix scan with
//      decoupled look-back", 2016).
//   3. Units and dynamic bytes go from shared memory to the frame.
//
// What keeps the multiprocessors waiting is 2: a group is done when all groups before it are encoded. Small slots let
// four groups share a multiprocessor, so that some work while others wait.
//
// Timing decides who waits for whom, never where a byte of the frame goes.
#include "codec/fast_encode.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarpsOfProcessor = 32;  // as many as 64 registers allow, and four blocks of 8 fit in shared memory
constexpr uint32_t kPoolOfTile = 352;

// ---- Where a group's part begins ------------------------------------------------------------------------------

// State of a group: 0, or its size, or the size of all groups up to it, with a flag in the low bits. Sizes are
// multiples of kFrameAlign. The word says all there is to say, so no other memory access needs ordering with it.
constexpr uint64_t kOwnSize = 1;
constexpr uint64_t kPrefix = 2;
constexpr uint64_t kFlags = 3;

__device__ __forceinline__ uint64_t load_state(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_state(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Size of all groups before group g, for a whole warp. Blocks begin in the order of their numbers, so the groups waited
// for here have blocks that run already and wait only for groups before them. CUDA does not promise that order, but its
// own library of scans, CUB, looks back over the same numbers.
__device__ uint64_t exclusive_prefix(uint64_t* states, uint64_t g, uint64_t size, int lane) {
  uint64_t before = 0;
  if (g > 0) {
    if (lane == 0) store_state(states + g, size | kOwnSize);
    for (uint64_t end = g;; end -= kWarpSize) {
      // Lane i looks at group end - 1 - i.
      const bool exists = static_cast<uint64_t>(lane) < end;
      uint64_t state;
      uint32_t wanted;  // lanes up to the nearest known prefix
      bool found;
      do {
        state = exists ? load_state(states + (end - 1 - lane)) : kPrefix;
        const uint32_t prefixes = __ballot_sync(kFullWarp, (state & kFlags) == kPrefix);
        found = prefixes != 0;
        wanted = found ? prefixes ^ (prefixes - 1) : kFullWarp;
      } while (__ballot_sync(kFullWarp, (state & kFlags) == 0) & wanted);
      before += warp_sum((wanted >> lane) & 1u ? state & ~kFlags : uint64_t{0});
      if (found) break;
    }
  }
  if (lane == 0) store_state(states + g, (before + size) | kPrefix);
  return before;
}

// ---- A group --------------------------------------------------------------------------------------------------

// Copies n bytes of shared memory, src aligned to 16, to any address, by a warp.
__device__ __forceinline__ void store_bytes(uint8_t* dst, const uint8_t* src, uint32_t n, int lane) {
  if (n <= 4 * kWarpSize) {  // bytes that meet in a memory access anyway
#pragma unroll
    for (uint32_t r = 0; r < 4 * kWarpSize; r += kWarpSize) {
      if (r >= n) break;
      if (r + lane < n) dst[r + lane] = src[r + lane];
    }
    return;
  }
  const uint32_t head = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(dst)) & 3u;
  const uint32_t words = (n - head) / 4;
  const uint32_t tail = n - head - 4 * words;
  if (lane < head) dst[lane] = src[lane];
  const uint32_t* from = reinterpret_cast<const uint32_t*>(src);
  uint32_t* to = reinterpret_cast<uint32_t*>(dst + head);
  for (uint32_t i = lane; i < words; i += kWarpSize) {
    const uint32_t low = from[i];
    to[i] = head == 0 ? low : __funnelshift_r(low, from[i + 1], 8 * head);
  }
  if (lane < tail) dst[n - tail + lane] = src[n - tail + lane];
}

__device__ __forceinline__ void zero_bytes(uint8_t* dst, uint64_t n, int lane) {
  for (uint64_t i = lane; i < n; i += kWarpSize) dst[i] = 0;
}

// Places within the group's part, and of it.
struct GroupPlan {
  uint8_t* units;    // the group's first unit
  uint8_t* dynamic;  // its dynamic bytes
  uint32_t unit_begin[kTiles];
  uint32_t dynamic_begin[kTiles];
  uint32_t place[kTiles];  // of the dynamic bytes in the pool
  TileEntry entry[kTiles];
};

// A group and the job that it belongs to.
struct Group {
  const uint16_t* src;  // of the job
  uint8_t* frame;
  uint64_t count;
  uint64_t* states;
  uint64_t* frame_bytes;  // may be null
  bool split;
  uint64_t index;
  uint32_t tiles;  // in the group; none only in a job without values

  __device__ __forceinline__ uint64_t tile(uint32_t t) const { return index * kGroupTiles + t; }
  __device__ __forceinline__ uint32_t values_in(uint32_t t) const { return values_in_tile(count, tile(t)); }
};

__device__ __forceinline__ Group find_group(const EncodeLaunch& launch, uint64_t block) {
  const int i = find_job(launch, block);
  const EncodeJob& job = launch.job[i];
  const uint64_t index = block - launch.first_block[i];
  const uint64_t tiles_left = tile_count(job.count) - index * kGroupTiles;
  return {static_cast<const uint16_t*>(job.src),
          static_cast<uint8_t*>(job.dst),
          job.count,
          launch.states + launch.first_block[i],
          launch.frame_bytes == nullptr ? nullptr : launch.frame_bytes + i,
          (launch.header.flags & kFlagSplit) != 0,
          index,
          tiles_left < kGroupTiles ? static_cast<uint32_t>(tiles_left) : kTiles};
}

// By one warp: sizes, place, tables, and the header when the group is the last.
__device__ __forceinline__ void plan_group(const Group& group, const FrameHeader& header, GroupPlan* plan, int lane) {
  if (group.count == 0) {
    if (lane == 0) write_header(header, 0, kHeaderBytes, 0, group.frame);
    if (lane == 0 && group.frame_bytes != nullptr) *group.frame_bytes = kHeaderBytes;
    return;
  }
  const uint64_t g = group.index, tile = group.tile(lane);
  const bool exists = lane < group.tiles;
  const TileEntry entry = exists ? plan->entry[lane] : TileEntry{0, 0};
  const uint32_t dynamic = tile_word_dynamic(entry.word);
  uint32_t unit = exists ? unit_bytes(tile_word_mode(entry.word), values_in_tile(group.count, tile)) : 0;
  const uint32_t reserved =
      !group.split ? unit : (exists ? align_up(values_in_tile(group.count, tile)) + kPlanesBytes : 0);
  // One scan for both: the units of a group take less than 2^16 bytes, its dynamic bytes less than 2^16.
  const uint32_t both = reserved | dynamic << 16;
  const uint32_t up_to = warp_inclusive_sum(both);
  const uint32_t all = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  plan->unit_begin[lane] = (up_to - both) & 0xFFFFu;
  plan->dynamic_begin[lane] = (up_to - both) >> 16;

  const uint64_t units_size = all & 0xFFFFu, dynamic_size = align_up(all >> 16);
  const uint64_t size = group.split ? dynamic_size : units_size + dynamic_size;
  wait_for_previous();  // which clears the states
  const uint64_t begin = exclusive_prefix(group.states, g, size, lane);
  const uint64_t parts = fast_static_bytes(group.count, group.split ? FrameLayout::split : FrameLayout::compact);
  if (lane == 0) {
    uint8_t* const part = group.frame + parts + begin;
    plan->units = group.split ? group.frame + tables_end(group.count) + g * kGroupTiles * kMaxUnitBytes : part;
    plan->dynamic = group.split ? part : part + units_size;
    *reinterpret_cast<uint64_t*>(group.frame + group_table_begin() + 8 * g) = begin;
  }
  uint8_t* words = group.frame + tile_word_begin(group.count);
  uint8_t* bases = group.frame + tile_base_begin(group.count);
  if (exists) {
    reinterpret_cast<uint16_t*>(words)[tile] = entry.word;
    bases[tile] = entry.base;
  }
  // Padding behind the group's dynamic bytes.
  zero_bytes(group.frame + (group.split ? 0 : units_size) + parts + begin + (all >> 16), dynamic_size - (all >> 16),
             lane);

  if (g + 1 < group_count(group.count)) return;
  const uint64_t groups_end = group_table_begin() + 8 * group_count(group.count);
  const uint64_t words_end = 2 * tile_count(group.count), bases_end = tile_count(group.count);
  zero_bytes(group.frame + groups_end, tile_word_begin(group.count) - groups_end, lane);
  zero_bytes(words + words_end, align_up(words_end) - words_end, lane);
  zero_bytes(bases + bases_end, align_up(bases_end) - bases_end, lane);
  if (lane == 0) {
    write_header(header, group.count, parts + begin + size, 0, group.frame);
    if (group.frame_bytes != nullptr) *group.frame_bytes = parts + begin + size;
  }
}

// ---- A block --------------------------------------------------------------------------------------------------

// What a block keeps of a group. A warp reads only the slots and the pool that it has written.
struct alignas(16) Space {
  uint8_t slots[kTiles][kSlotBytes];
  uint8_t pools[kTiles * kPoolOfTile];
  GroupPlan plan;
};
static_assert(kPoolOfTile % 16 == 0 && kSlotBytes % 16 == 0, "copied 16 bytes at a time");

template <int kWarps>
constexpr uint32_t kPoolBytes = kTiles / kWarps* kPoolOfTile;  // of a warp

// kFull: all tiles of the group exist and are full, and the values are aligned to 16 bytes, so that the compiler has
// less to ask for.

template <int kWarps, bool kFull>
__device__ __forceinline__ void encode_tiles(const Group& group, Space* space, int warp, int lane) {
  const auto load = [&](uint32_t t) {
    return load_values<kFull>(group.src + group.tile(t) * kTileValues, kFull ? kTile : group.values_in(t), lane);
  };
  const uint32_t tiles = kFull ? kTiles : group.tiles;
  Pool pool = {space->pools + warp * kPoolBytes<kWarps>, kPoolBytes<kWarps>, 0};
  LaneValues next = {};
  if (warp < tiles) next = load(warp);
#pragma unroll 1
  for (uint32_t t = warp; t < tiles; t += kWarps) {
    const LaneValues v = next;
    if (t + kWarps < tiles) next = load(t + kWarps);  // on its way while this one is encoded
    uint32_t place;
    const TileEntry entry =
        encode_tile<kFull>(v, space->slots[t], &pool, kFull ? kTile : group.values_in(t), &place, lane);
    if (lane == 0) {
      space->plan.entry[t] = entry;
      space->plan.place[t] = place;
    }
  }
}

// Dynamic bytes that are not in the pool: made again from the values. The slot is free by now.
__device__ void store_again(const Group& group, uint32_t t, TileEntry entry, uint8_t* slot, uint8_t* unit,
                            uint8_t* dynamic, int lane) {
  const uint32_t m = group.values_in(t), padded = align_up(m);
  uint32_t escapes = 0;
  if (tile_word_mode(entry.word) == static_cast<uint32_t>(TileMode::window)) {
    for (int p = 0; p < 3; ++p)
      escapes |= *reinterpret_cast<const uint32_t*>(slot + padded + kPlaneBytes * p + 4 * lane);
    escapes = ~escapes & valid_values(m, lane);
  }
  const LaneValues v = load_values<false>(group.src + group.tile(t) * kTileValues, m, lane);
  __syncwarp();
  put_exponents(slot, v, padded, lane);
  __syncwarp();
  if (tile_word_mode(entry.word) == static_cast<uint32_t>(TileMode::window)) {
    put_escapes(slot, escapes, dynamic + warp_inclusive_sum(__popc(escapes)), lane);
    return;
  }
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < padded) *reinterpret_cast<uint2*>(unit + i) = sign_mantissas(v.w[k]);
  }
  store_bytes(dynamic, slot, m, lane);
}

template <int kWarps, bool kFull>
__device__ __forceinline__ void store_tiles(const Group& group, Space* space, int warp, int lane) {
  const GroupPlan& plan = space->plan;
  __syncwarp();  // the warp's lanes have written each other's part
  const uint32_t tiles = kFull ? kTiles : group.tiles;
  for (uint32_t t = warp; t < tiles; t += kWarps) {
    const uint32_t m = kFull ? kTile : group.values_in(t);
    const TileEntry entry = plan.entry[t];
    const uint32_t mode = tile_word_mode(entry.word), n = tile_word_dynamic(entry.word);
    const uint32_t unit = unit_bytes(mode, m);
    uint8_t* slot = space->slots[t];
    uint8_t* to = plan.units + plan.unit_begin[t];
    uint8_t* dynamic = plan.dynamic + plan.dynamic_begin[t];
    if (mode == static_cast<uint32_t>(TileMode::window)) {
#pragma unroll
      for (uint32_t r = 0; r < kSlotBytes; r += 16 * kWarpSize) {
        const uint32_t b = r + 16 * lane;
        if (b < unit) *reinterpret_cast<uint4*>(to + b) = *reinterpret_cast<const uint4*>(slot + b);
      }
    } else if (group.split) {  // the unit's place is larger
      const uint32_t reserved = align_up(m) + kPlanesBytes;
      for (uint32_t b = unit + 16 * lane; b < reserved; b += 16 * kWarpSize) {
        *reinterpret_cast<uint4*>(to + b) = make_uint4(0, 0, 0, 0);
      }
    }
    if (mode == static_cast<uint32_t>(TileMode::constant)) {
      store_bytes(dynamic, slot, n, lane);
    } else if (plan.place[t] != kNoPlace) {
      store_bytes(dynamic, space->pools + warp * kPoolBytes<kWarps> + plan.place[t], n, lane);
    } else if (n != 0) {
      store_again(group, t, entry, slot, to, dynamic, lane);
    }
  }
}

template <int kWarps, bool kFull>
__device__ __forceinline__ void encode_group(const Group& group, const FrameHeader& header, Space* space) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  encode_tiles<kWarps, kFull>(group, space, warp, lane);
  __syncthreads();
  if (warp == 0) plan_group(group, header, &space->plan, lane);
  __syncthreads();
  store_tiles<kWarps, kFull>(group, space, warp, lane);
}

template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize, kWarpsOfProcessor / kWarps)
    fast_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];
  Space* const space = reinterpret_cast<Space*>(shared);
  const Group group = find_group(launch, blockIdx.x);
  if ((group.index + 1) * kGroupValues <= group.count && is_aligned(group.src, 16)) {
    encode_group<kWarps, true>(group, launch.header, space);
  } else {
    encode_group<kWarps, false>(group, launch.header, space);
  }
  wait_for_previous();
}

template <int kWarps>
cudaError_t launch_with(const EncodeLaunch& launch, cudaStream_t stream) {
  const auto kernel = fast_encode_kernel<kWarps>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Space)));
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, launch.first_block[launch.n], kWarps * kWarpSize, sizeof(Space), stream, launch);
}

}  // namespace

cudaError_t launch_fast_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = processor_count(&processors);
  if (error != cudaSuccess) return error;
  // More warps to a group while every group has a multiprocessor to itself.
  const bool few = launch.first_block[launch.n] <= static_cast<uint64_t>(processors);
  return few ? launch_with<16>(launch, stream) : launch_with<8>(launch, stream);
}

}  // namespace cuda
}  // namespace zipccl
