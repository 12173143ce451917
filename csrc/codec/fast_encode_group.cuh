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
  FrameLayout layout;

  __device__ __forceinline__ uint32_t values_in(uint32_t t) const { return min(values - t * kTile, kTile); }
  // Full tiles only, for loads of 16 bytes.
  __device__ __forceinline__ bool whole() const { return values == kGroupValues && is_aligned(src, 16); }
};

__device__ __forceinline__ Group find_group(const EncodeLaunch& launch, uint64_t block) {
  const int i = find_job(launch, block);
  const EncodeJob& job = launch.job[i];
  const uint64_t index = block - launch.first_block[i];
  const uint32_t values = static_cast<uint32_t>(min(job.count - index * kGroupValues, kGroupValues));
  const FrameLayout layout = fast_layout(launch.layout, job.count);
  return {static_cast<const uint16_t*>(job.src) + index * kGroupValues,
          static_cast<uint8_t*>(job.dst),
          job.count,
          launch.states + launch.first_block[i],
          launch.frame_bytes == nullptr ? nullptr : launch.frame_bytes + i,
          index,
          static_cast<uint32_t>(tile_count(values)),
          values,
          layout};
}

// ---- Where its units lie --------------------------------------------------------------------------------------

// In a packed frame; of others all zero. See format/tile.h.
struct Slots {
  uint64_t before;      // those of the groups before this one
  uint64_t all;         // of the frame
  uint32_t first_half;  // of the group's tiles 0 to 15
  bool looked_at;       // whether constant full tiles of the group have none
};

// What plan_slots.cu has found out, by a whole warp, behind wait_for_previous().
__device__ __forceinline__ Slots find_slots(const EncodeLaunch& launch, uint64_t block, const Group& group, int lane) {
  const int i = find_job(launch, block);
  const uint32_t own = launch.slots.groups[block];
  const uint32_t chunks = launch.slots.first_chunk[i + 1] - launch.slots.first_chunk[i];
  const uint32_t chunk = static_cast<uint32_t>(group.index / chunk_groups(group.count));
  const uint4* const counts = reinterpret_cast<const uint4*>(launch.slots.counts + launch.slots.first_chunk[i]);
  uint32_t before = 0, all = 0;
#pragma unroll 4
  for (uint32_t c = 4 * lane; c < chunks; c += 4 * kWarpSize) {
    const uint4 four = counts[c / 4];
    const uint32_t n[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      all += n[k];
      if (c + k < chunk) before += n[k];
    }
  }
  return {warp_sum(before) + (own & (kLookedAt - 1)), warp_sum(all), own >> kHalfShift, (own & kLookedAt) != 0};
}

__device__ __forceinline__ uint8_t* units_place(const Group& group, const Slots& slots) {
  return group.frame + (group.layout == FrameLayout::packed
                            ? packed_units_begin(group.count) + slots.before * kMaxUnitBytes
                            : tables_end(group.count) + group.index * kGroupTiles * kMaxUnitBytes);
}
// Where the parts of all groups begin, from the beginning of the frame.
__device__ __forceinline__ uint64_t parts_begin(const Group& group, const Slots& slots) {
  return fast_static_bytes(group.count, group.layout) + slots.all * kMaxUnitBytes;
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
  uint32_t units;    // in its part: none if they lie apart
  uint32_t dynamic;  // without padding
  __device__ __forceinline__ uint32_t padding() const { return static_cast<uint32_t>(align_up(dynamic)) - dynamic; }
  __device__ __forceinline__ uint32_t all() const { return units + dynamic + padding(); }
};

// A lane's tile of a group, and the group.
struct TilePlace {
  uint32_t entry;
  uint32_t unit_begin;     // from the group's first unit on
  uint32_t dynamic_begin;  // from the group's first dynamic byte on
  PartSize size;
};

// What becomes of an entry in a packed frame: a raw tile's unit takes some of its exponents, and constant tiles may be
// held.
__device__ __forceinline__ uint32_t packed_entry(uint32_t entry, uint32_t m, bool looked_at) {
  const uint32_t mode = tile_word_mode(entry_word(entry));
  if (mode == static_cast<uint32_t>(TileMode::raw))
    return pack_entry(pack_tile_word(TileMode::raw, m - raw_in_unit(m)), 0);
  const bool held = mode == static_cast<uint32_t>(TileMode::constant) && !(looked_at && m == kTile);
  return held ? pack_entry(pack_tile_word(TileMode::held, 2), 0) : entry;
}

__device__ __forceinline__ TilePlace place_tile(const Group& group, const Slots& slots, uint32_t entry, int lane) {
  const bool exists = lane < group.tiles, packed = group.layout == FrameLayout::packed;
  TilePlace place = {};
  const uint32_t m = exists ? group.values_in(lane) : 0;
  place.entry = !exists ? 0 : packed ? packed_entry(entry, m, slots.looked_at) : entry;
  const uint32_t mode = tile_word_mode(entry_word(place.entry));
  const uint32_t unit = !exists ? 0 : static_cast<uint32_t>(packed ? packed_unit_bytes(mode, m) : unit_bytes(mode, m));
  // One scan for both: the units of a group take less than 2^16 bytes, its dynamic bytes less than 2^16.
  const uint32_t both = unit | tile_word_dynamic(entry_word(place.entry)) << 16;
  const uint32_t up_to = warp_inclusive_sum(both);
  const uint32_t all = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  const bool split = group.layout == FrameLayout::split;
  place.unit_begin = split ? lane * static_cast<uint32_t>(kMaxUnitBytes) : (up_to - both) & 0xFFFFu;
  place.dynamic_begin = (up_to - both) >> 16;
  place.size = {group.layout == FrameLayout::compact ? all & 0xFFFFu : 0, all >> 16};
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

__device__ __forceinline__ GroupPlace place_group(const Group& group, const Slots& slots, const PartSize& size,
                                                  uint64_t begin) {
  uint8_t* const part = group.frame + parts_begin(group, slots) + begin;
  return {group.layout == FrameLayout::compact ? part : units_place(group, slots), part + size.units};
}

// What the tables say of a group's tiles.
__device__ __forceinline__ void store_entries(const Group& group, uint32_t entry, int lane) {
  if (lane >= group.tiles) return;
  const uint64_t tile = group.index * kGroupTiles + lane;
  reinterpret_cast<uint16_t*>(group.frame + tile_word_begin(group.count))[tile] = entry_word(entry);
  group.frame[tile_base_begin(group.count) + tile] = entry_base(entry);
}

// Where the group begins, and what ends its part; behind the last one what ends the tables, and the header.
__device__ __forceinline__ void store_begin(const Group& group, const Slots& slots, const FrameHeader& header,
                                            uint64_t begin, const PartSize& size, const GroupPlace& place, int lane) {
  if (lane < size.padding()) place.dynamic[size.dynamic + lane] = 0;
  if (group.count != 0 && lane == 0) {
    *reinterpret_cast<uint64_t*>(group.frame + group_table_begin() + 8 * group.index) = begin;
  }
  const uint64_t groups = group_count(group.count), tiles = tile_count(group.count);
  uint64_t* const slot_table = reinterpret_cast<uint64_t*>(group.frame + slot_table_begin(group.count));
  const bool packed = group.layout == FrameLayout::packed && group.count != 0;
  if (packed && lane == 0) slot_table[group.index] = slots.before;
  if (group.index + 1 < groups) return;
  const uint64_t groups_end = group_table_begin() + 8 * groups;
  const uint64_t words_end = tile_word_begin(group.count) + 2 * tiles;
  const uint64_t bases_end = tile_base_begin(group.count) + tiles;
  zero_bytes(group.frame + groups_end, tile_word_begin(group.count) - groups_end, lane);
  zero_bytes(group.frame + words_end, tile_base_begin(group.count) - words_end, lane);
  zero_bytes(group.frame + bases_end, tables_end(group.count) - bases_end, lane);
  if (packed && lane < packed_units_begin(group.count) / 8 - slot_table_begin(group.count) / 8 - groups) {
    slot_table[groups + lane] = lane == 0 ? slots.all : 0;  // and padding
  }
  if (lane == 0) {
    const uint64_t end = parts_begin(group, slots) + begin + size.all();
    FrameHeader own = header;
    own.flags = (header.flags & ~kLayoutFlags) | layout_flags(group.layout);
    write_header(own, group.count, end, 0, group.frame);
    if (group.frame_bytes != nullptr) *group.frame_bytes = end;
  }
}

// Step 2 of the kernels, by one warp, a lane for each tile of that entry. Space: what the kernel keeps of a group.
template <int kWindows, typename Space>
__device__ __forceinline__ void place_tiles(const EncodeLaunch& launch, const Group& group, const Slots& slots,
                                            uint32_t entry, Space* space, int lane) {
  const TilePlace place = place_tile(group, slots, entry, lane);
  space->unit_begin[lane] = place.unit_begin;
  space->dynamic_begin[lane] = place.dynamic_begin;
  wait_for_previous();  // which clears the states
  publish(group.states, group.index, place.size.all(), lane);
  store_entries(group, place.entry, lane);
  const uint64_t begin = look_back<kWindows>(group.states, group.index, place.size.all(), lane);
  const GroupPlace parts = place_group(group, slots, place.size, begin);
  if (lane == 0) space->place = parts;
  store_begin(group, slots, launch.header, begin, place.size, parts, lane);
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

// Zeros between a tile's unit and the end of its place.
__device__ __forceinline__ void zero_hole(uint8_t* unit, uint32_t unit_size, uint32_t m, int lane) {
  const uint32_t reserved = static_cast<uint32_t>(align_up(m) + kPlanesBytes);
  for (uint32_t b = unit_size + 16 * lane; b < reserved; b += 16 * kWarpSize) {
    *reinterpret_cast<uint4*>(unit + b) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace cuda
}  // namespace zipccl
