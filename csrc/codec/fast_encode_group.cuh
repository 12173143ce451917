// Code::fast, values to frame: a group of 32 tiles. Its place in the frame, its tables, and the way of its bytes from
// shared memory to the frame. One warp finds its place, a lane for each tile.
//
// Where a group's part begins follows from the groups before it, by decoupled look-back (Merrill and Garland,
// "Single-pass parallel prefix scan with decoupled look-back", 2016). Timing decides who waits for whom, never where a
// byte of the frame goes.
#pragma once

#include "codec/fast_encode.cuh"

namespace zipccl {
namespace cuda {

// A group and the job that it belongs to.
struct Group {
  const uint16_t* src;  // of the group
  uint8_t* frame;
  uint64_t count;  // of the job
  uint64_t* states;
  uint64_t* frame_bytes;  // may be null
  uint64_t index;
  uint32_t tiles;   // in the group; none only in a job without values
  uint32_t values;  // in the group
  bool split;

  __device__ __forceinline__ uint32_t values_in(uint32_t t) const { return min(values - t * kTile, kTile); }
  // Full tiles only, for loads of 16 bytes.
  __device__ __forceinline__ bool whole() const { return values == kGroupValues && is_aligned(src, 16); }
};

__device__ __forceinline__ Group find_group(const EncodeLaunch& launch, uint64_t block) {
  const int i = find_job(launch, block);
  const EncodeJob& job = launch.job[i];
  const uint64_t index = block - launch.first_block[i];
  const uint32_t values = static_cast<uint32_t>(min(job.count - index * kGroupValues, kGroupValues));
  return {static_cast<const uint16_t*>(job.src) + index * kGroupValues,
          static_cast<uint8_t*>(job.dst),
          job.count,
          launch.states + launch.first_block[i],
          launch.frame_bytes == nullptr ? nullptr : launch.frame_bytes + i,
          index,
          static_cast<uint32_t>(tile_count(values)),
          values,
          (launch.header.flags & kFlagSplit) != 0};
}

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

// Makes a group's size known to those behind it.
__device__ __forceinline__ void publish(uint64_t* states, uint64_t g, uint64_t size, int lane) {
  if (lane == 0) store_state(states + g, size | (g == 0 ? kPrefix : kOwnSize));
}

// Size of all groups before group g, for a whole warp, which has published the group's own. kWindows * 32 groups are
// looked at at a time, and only what is not known yet is asked for again: hundreds of warps wait for the same few
// words.
template <int kWindows>
__device__ __forceinline__ uint64_t look_back(uint64_t* states, uint64_t g, uint64_t size, int lane) {
  uint64_t before = 0;
  if (g == 0) return 0;
  for (uint64_t end = g;; end -= kWindows * kWarpSize) {
    // Lane i looks at group end - 1 - i, and at those kWarpSize, 2 * kWarpSize, ... before that.
    uint64_t state[kWindows];
    const auto load = [&](int w) {
      const uint64_t back = w * kWarpSize + lane;
      state[w] = back < end ? load_state(states + (end - 1 - back)) : kPrefix;
    };
#pragma unroll
    for (int w = 0; w < kWindows; ++w) load(w);
    uint32_t prefixes[kWindows], wanted[kWindows], found;  // wanted: lanes up to the nearest known prefix
    while (true) {
      found = 0;
#pragma unroll
      for (int w = 0; w < kWindows; ++w) {
        prefixes[w] = __ballot_sync(kFullWarp, (state[w] & kFlags) == kPrefix);
        wanted[w] = found != 0 ? 0 : prefixes[w] != 0 ? prefixes[w] ^ (prefixes[w] - 1) : kFullWarp;
        found |= prefixes[w];
      }
      uint32_t missing = 0;
#pragma unroll
      for (int w = 0; w < kWindows; ++w) {
        missing |= __ballot_sync(kFullWarp, (state[w] & kFlags) == 0) & wanted[w];
      }
      if (missing == 0) break;
#pragma unroll
      for (int w = 0; w < kWindows; ++w) {
        if ((state[w] & kFlags) == 0 && (wanted[w] >> lane & 1u)) load(w);
      }
    }
    uint64_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWindows; ++w) sum += (wanted[w] >> lane) & 1u ? state[w] & ~kFlags : uint64_t{0};
    before += warp_sum(sum);
    if (found != 0) break;
  }
  if (lane == 0) store_state(states + g, (before + size) | kPrefix);
  return before;
}

// ---- Places and tables ----------------------------------------------------------------------------------------

// Sizes of a group's two kinds of bytes.
struct PartSize {
  uint32_t units;    // in its part: none in a split frame
  uint32_t dynamic;  // without padding
  __device__ __forceinline__ uint32_t padding() const { return static_cast<uint32_t>(align_up(dynamic)) - dynamic; }
  __device__ __forceinline__ uint32_t all() const { return units + dynamic + padding(); }
};

// A lane's tile of a group, and the group.
struct TilePlace {
  uint32_t entry;
  uint32_t unit;           // bytes of it
  uint32_t unit_begin;     // from the group's first unit on
  uint32_t dynamic_begin;  // from the group's first dynamic byte on
  PartSize size;
};

__device__ __forceinline__ TilePlace place_tile(const Group& group, uint32_t entry, int lane) {
  const bool exists = lane < group.tiles;
  TilePlace place = {};
  place.entry = exists ? entry : 0;
  const uint32_t m = exists ? group.values_in(lane) : 0;
  place.unit = exists ? static_cast<uint32_t>(unit_bytes(tile_word_mode(entry_word(entry)), m)) : 0;
  // One scan for both: the units of a group take less than 2^16 bytes, its dynamic bytes less than 2^16.
  const uint32_t both = place.unit | tile_word_dynamic(entry_word(place.entry)) << 16;
  const uint32_t up_to = warp_inclusive_sum(both);
  const uint32_t all = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  place.unit_begin = group.split ? lane * static_cast<uint32_t>(kMaxUnitBytes) : (up_to - both) & 0xFFFFu;
  place.dynamic_begin = (up_to - both) >> 16;
  place.size = {group.split ? 0 : all & 0xFFFFu, all >> 16};
  return place;
}

__device__ __forceinline__ void zero_bytes(uint8_t* dst, uint64_t n, int lane) {
  for (uint64_t i = lane; i < n; i += kWarpSize) dst[i] = 0;
}

// Where the parts of a group go.
struct GroupPlace {
  uint8_t* units;
  uint8_t* dynamic;
};

__device__ __forceinline__ GroupPlace place_group(const Group& group, const PartSize& size, uint64_t begin) {
  uint8_t* const part =
      group.frame + fast_static_bytes(group.count, group.split ? FrameLayout::split : FrameLayout::compact) + begin;
  return {group.split ? group.frame + tables_end(group.count) + group.index * kGroupTiles * kMaxUnitBytes : part,
          part + size.units};
}

// What the tables say of a group's tiles.
__device__ __forceinline__ void store_entries(const Group& group, uint32_t entry, int lane) {
  if (lane >= group.tiles) return;
  const uint64_t tile = group.index * kGroupTiles + lane;
  reinterpret_cast<uint16_t*>(group.frame + tile_word_begin(group.count))[tile] = entry_word(entry);
  group.frame[tile_base_begin(group.count) + tile] = entry_base(entry);
}

// Where the group begins, and what ends its part; behind the last one what ends the tables, and the header.
__device__ __forceinline__ void store_begin(const Group& group, const FrameHeader& header, uint64_t begin,
                                            const PartSize& size, const GroupPlace& place, int lane) {
  if (lane < size.padding()) place.dynamic[size.dynamic + lane] = 0;
  if (group.count != 0 && lane == 0) {
    *reinterpret_cast<uint64_t*>(group.frame + group_table_begin() + 8 * group.index) = begin;
  }
  const uint64_t groups = group_count(group.count), tiles = tile_count(group.count);
  if (group.index + 1 < groups) return;
  const uint64_t groups_end = group_table_begin() + 8 * groups;
  const uint64_t words_end = tile_word_begin(group.count) + 2 * tiles;
  const uint64_t bases_end = tile_base_begin(group.count) + tiles;
  zero_bytes(group.frame + groups_end, tile_word_begin(group.count) - groups_end, lane);
  zero_bytes(group.frame + words_end, tile_base_begin(group.count) - words_end, lane);
  zero_bytes(group.frame + bases_end, tables_end(group.count) - bases_end, lane);
  if (lane == 0) {
    const FrameLayout layout = group.split ? FrameLayout::split : FrameLayout::compact;
    const uint64_t end = fast_static_bytes(group.count, layout) + begin + size.all();
    write_header(header, group.count, end, 0, group.frame);
    if (group.frame_bytes != nullptr) *group.frame_bytes = end;
  }
}

// Step 2 of the kernels, by one warp, a lane for each tile of that entry. Space: what the kernel keeps of a group.
template <int kWindows, typename Space>
__device__ __forceinline__ void place_tiles(const EncodeLaunch& launch, const Group& group, uint32_t entry,
                                            Space* space, int lane) {
  const TilePlace place = place_tile(group, entry, lane);
  space->unit_begin[lane] = place.unit_begin;
  space->dynamic_begin[lane] = place.dynamic_begin;
  wait_for_previous();  // which clears the states
  publish(group.states, group.index, place.size.all(), lane);
  store_entries(group, place.entry, lane);
  const uint64_t begin = look_back<kWindows>(group.states, group.index, place.size.all(), lane);
  const GroupPlace parts = place_group(group, place.size, begin);
  if (lane == 0) space->place = parts;
  store_begin(group, launch.header, begin, place.size, parts, lane);
}

// ---- Bytes ----------------------------------------------------------------------------------------------------

// Copies n bytes of shared memory, src aligned to 4, to any address, by a warp.
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

// Zeros in a split frame between a tile's unit and the end of its place.
__device__ __forceinline__ void zero_hole(uint8_t* unit, uint32_t unit_size, uint32_t m, int lane) {
  const uint32_t reserved = static_cast<uint32_t>(align_up(m) + kPlanesBytes);
  for (uint32_t b = unit_size + 16 * lane; b < reserved; b += 16 * kWarpSize) {
    *reinterpret_cast<uint4*>(unit + b) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace cuda
}  // namespace zipccl
