// Code::fast, frame to values: what fast_decode.cu and sum_cuda.cu share. Frames come from the network: no byte of one
// is believed before it is checked, and no address follows from one that is not.
//
// A warp checks the header and the tables of a group and turns them into places; then a warp decodes a tile, a lane 32
// values of it: one word of each plane. Escaped exponents come as a run of bytes in shared memory, from where each lane
// patches its own exponents, there as well: registers cannot be addressed at run time.
#pragma once

#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {

constexpr uint32_t kTile = static_cast<uint32_t>(kTileValues);
static_assert(kGroupTiles == kWarpSize, "a warp plans a group, a lane each tile");

// What the tables say about a tile, and where its parts begin in the group's.
struct TilePlan {
  uint16_t unit;
  uint16_t dynamic;
  uint16_t word;
  uint16_t base;
};

// Where the units and the dynamic bytes of a group begin.
struct GroupPlace {
  const uint8_t* units;
  const uint8_t* dynamic;
};

// How a tile is to be decoded.
struct TileCode {
  uint32_t mode;
  uint32_t base;
  uint32_t dynamic_size;
};
__device__ __forceinline__ TileCode tile_code(const TilePlan& plan) {
  return {tile_word_mode(plan.word), plan.base, tile_word_dynamic(plan.word)};
}

// A tile ready to be read.
struct Tile {
  uint32_t mode;
  uint32_t base;
  uint32_t dynamic_size;
  const uint8_t* unit;
  const uint8_t* dynamic;

  // Whether the unit has kPlanesBytes behind the sign-mantissa bytes: planes, or exponents.
  __device__ __forceinline__ bool has_more(uint32_t m) const {
    return mode == static_cast<uint32_t>(TileMode::window) ||
           (mode == static_cast<uint32_t>(TileMode::raw) && dynamic_size != m);
  }
};

__device__ __forceinline__ Tile find_tile(const GroupPlace& place, const TilePlan& plan) {
  return {tile_word_mode(plan.word), plan.base, tile_word_dynamic(plan.word), place.units + plan.unit,
          place.dynamic + plan.dynamic};
}

// A lane's share of the tables of a group.
struct LaneTables {
  uint64_t begin;  // of the group's part
  uint64_t next;   // of the next group's part; undefined for the last group
  uint32_t word;
  uint32_t base;
};

// Of a frame of any layout, before its header is known; zeros where it is too short to have them.
__device__ __forceinline__ LaneTables load_tables(const uint8_t* frame, uint64_t available, uint64_t count, uint64_t g,
                                                  int lane) {
  LaneTables tables = {};
  if (available < tables_end(count)) return tables;
  const uint64_t* offsets = reinterpret_cast<const uint64_t*>(frame + group_table_begin());
  const uint64_t tile = g * kGroupTiles + lane;
  tables.begin = offsets[g];
  if (g + 1 < group_count(count)) tables.next = offsets[g + 1];
  if (tile < tile_count(count)) {
    tables.word = reinterpret_cast<const uint16_t*>(frame + tile_word_begin(count))[tile];
    tables.base = frame[tile_base_begin(count) + tile];
  }
  return tables;
}

// By one warp: checks the tables of group g of a frame that is_safe(), and plans its tiles: plan[kGroupTiles].
__device__ __forceinline__ Status plan_group(const uint8_t* frame, const FrameHeader& h, uint64_t g,
                                             const LaneTables& tables, GroupPlace* place, TilePlan* plan, int lane) {
  const FrameLayout layout = layout_of(h.flags);
  const bool packed = layout == FrameLayout::packed;
  uint64_t parts = fast_static_bytes(h.count, layout), slot = 0, next_slot = 0;
  if (parts > h.frame_bytes) return Status::bad_table;
  if (packed) {
    const uint64_t* slots = reinterpret_cast<const uint64_t*>(frame + slot_table_begin(h.count));
    const uint64_t all = slots[group_count(h.count)];
    slot = slots[g], next_slot = slots[g + 1];
    if (all > tile_count(h.count) || next_slot > all || slot > next_slot || (g == 0 && slot != 0))
      return Status::bad_table;
    parts += all * kMaxUnitBytes;
    if (parts > h.frame_bytes) return Status::bad_table;
  }
  const uint64_t parts_size = h.frame_bytes - parts;
  const uint64_t begin = tables.begin;
  const uint64_t end = g + 1 < group_count(h.count) ? tables.next : parts_size;

  const uint64_t tile = g * kGroupTiles + lane;
  const uint32_t mode = tile_word_mode(tables.word), dynamic_size = tile_word_dynamic(tables.word);
  uint32_t unit = 0;
  bool valid = true, full = false;
  if (tile < tile_count(h.count)) {
    const uint32_t m = values_in_tile(h.count, tile);
    valid = valid_tile(mode, tables.base, dynamic_size, m, packed);
    full = m == kTile;
    unit = packed ? packed_unit_bytes(mode, m) : unit_bytes(mode, m);
  }
  if (!__all_sync(kFullWarp, valid)) return Status::bad_tile;
  if (packed && next_slot - slot != __popc(__ballot_sync(kFullWarp, full && unit != 0))) return Status::bad_table;

  // Of valid tiles: the units of a group take less than 2^16 bytes, its dynamic bytes less than 2^16. One scan.
  const uint32_t own = unit | dynamic_size << 16;
  const uint32_t up_to = warp_inclusive_sum(own);
  const uint32_t all = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  const uint64_t units_size = layout == FrameLayout::compact ? all & 0xFFFFu : 0;
  const uint64_t size = units_size + align_up(all >> 16);
  // Every group is a multiple of kFrameAlign, so where all are chained, all are aligned; but this one is read whatever
  // becomes of the others.
  const bool chained = (g > 0 || begin == 0) && begin % kFrameAlign == 0 && begin <= parts_size &&
                       size <= parts_size - begin && begin + size == end;
  if (!chained) return Status::bad_table;

  const uint32_t unit_begin = layout == FrameLayout::split ? lane * kMaxUnitBytes : (up_to - own) & 0xFFFFu;
  // Of a held tile is left what it is without its place.
  const bool held = mode == static_cast<uint32_t>(TileMode::held);
  const uint16_t word = held ? pack_tile_word(TileMode::constant, dynamic_size) : static_cast<uint16_t>(tables.word);
  plan[lane] = {static_cast<uint16_t>(unit_begin), static_cast<uint16_t>((up_to - own) >> 16), word,
                static_cast<uint16_t>(tables.base)};
  if (lane == 0) {
    const uint64_t units = packed                         ? packed_units_begin(h.count) + slot * kMaxUnitBytes
                           : layout == FrameLayout::split ? tables_end(h.count) + g * kGroupTiles * kMaxUnitBytes
                                                          : parts + begin;
    place->units = frame + units;
    place->dynamic = frame + parts + begin + units_size;
  }
  return Status::ok;
}

// ---- A tile ---------------------------------------------------------------------------------------------------

// A lane's exponents: e[2 k] holds the values 0, 4, 1, 5 and e[2 k + 1] the values 2, 6, 3, 7 of load k, a byte each.
// Byte of value j among those 8.
__device__ __forceinline__ uint32_t exponent_place(uint32_t j) { return (j & 3u) << 1 | j >> 2; }

// Transposes bits within nibbles: bit p of a nibble of x[j] is bit j of the same nibble of plane p, so that byte k of
// x[j] holds the codes of values j and j + 4 of load k. The inverse of make_planes() in fast_encode.cuh.
__device__ __forceinline__ void transpose_planes(const uint32_t (&p)[3], uint32_t (&x)[4]) {
  const uint32_t x02 = select_bits(0x55555555u, p[0], p[1] << 1), x02_high = p[2] & 0x55555555u;
  const uint32_t x13 = select_bits(0x55555555u, p[0] >> 1, p[1]), x13_high = (p[2] >> 1) & 0x55555555u;
  x[0] = select_bits(0x33333333u, x02, x02_high << 2);
  x[1] = select_bits(0x33333333u, x13, x13_high << 2);
  x[2] = select_bits(0x33333333u, x02 >> 2, x02_high);
  x[3] = select_bits(0x33333333u, x13 >> 2, x13_high);
}

// A code is a selector of one of 8 bytes, the exponents of a window. Code 0 stands for none.
struct Window {
  uint32_t low, high;

  __device__ __forceinline__ explicit Window(uint32_t base)
      : low(base * 0x01010100u + 0x02010000u), high(base * 0x01010101u + 0x06050403u) {}
  // Of the four codes in the lower half of a word, a byte each.
  __device__ __forceinline__ uint32_t exponents(uint32_t codes) const { return select_bytes(low, high, codes); }
};

__device__ __forceinline__ void expand_planes(const uint32_t (&p)[3], uint32_t base, uint32_t (&e)[8]) {
  uint32_t x[4];
  transpose_planes(p, x);
  // Transpose bytes: codes[k] holds the values (0, 4), (1, 5), (2, 6), (3, 7) of load k.
  const uint32_t x01 = __byte_perm(x[0], x[1], 0x5140), y01 = __byte_perm(x[0], x[1], 0x7362);
  const uint32_t x23 = __byte_perm(x[2], x[3], 0x5140), y23 = __byte_perm(x[2], x[3], 0x7362);
  const uint32_t codes[4] = {__byte_perm(x01, x23, 0x5410), __byte_perm(x01, x23, 0x7632),
                             __byte_perm(y01, y23, 0x5410), __byte_perm(y01, y23, 0x7632)};
  const Window window(base);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    e[2 * k] = window.exponents(codes[k]);
    e[2 * k + 1] = window.exponents(codes[k] >> 16);
  }
}

constexpr uint32_t kBf16Exponents = 0x7F807F80u;  // the exponents of two values

// 8 values from their sign-mantissa bytes and their exponents in the order above.
__device__ __forceinline__ uint4 join_values(uint2 sm, uint32_t e0, uint32_t e1) {
  return make_uint4(select_bits(kBf16Exponents, e0 << 7, __byte_perm(sm.x, 0, 0x1100)),
                    select_bits(kBf16Exponents, e1 << 7, __byte_perm(sm.x, 0, 0x3322)),
                    select_bits(kBf16Exponents, e0 >> 1, __byte_perm(sm.y, 0, 0x1100)),
                    select_bits(kBf16Exponents, e1 >> 1, __byte_perm(sm.y, 0, 0x3322)));
}

// The dynamic bytes of a tile begin anywhere; they are read as the aligned words that hold them, which lie inside the
// frame because it is aligned at both ends.
__device__ __forceinline__ uint32_t misalignment(const uint8_t* p) { return reinterpret_cast<uintptr_t>(p) & 3u; }
__device__ __forceinline__ uint32_t dynamic_word(const Tile& t, uint32_t i) {
  return reinterpret_cast<const uint32_t*>(t.dynamic - misalignment(t.dynamic))[i];
}
__device__ __forceinline__ uint32_t dynamic_words(const Tile& t) {
  return (misalignment(t.dynamic) + t.dynamic_size + 3) / 4;
}

// A warp's exponents of a tile, for escapes to be patched in: a lane's e[0..3] and e[4..7].
struct Exponents {
  uint4 e[2][kWarpSize];
};

// Of every bit of a lane's planes, where its exponent lies, from the lane's first on. One for a block; a load is
// cheaper than the arithmetic.
struct EscapePlaces {
  uint16_t of[32];

  __device__ __forceinline__ void set(uint32_t bit) {
    of[bit] = static_cast<uint16_t>(sizeof(Exponents::e[0]) * (bit / 16) + (bit & 8u) + exponent_place(bit % 8));
  }
};

constexpr uint32_t kDynamicWords = kTile / 4 + 1;  // one more, for bytes that begin within a word

// Hands the values 256 k + 8 lane + 0..7 to take(k, values) for k = 0..3, some of them behind the tile's end.
// False, and nothing handed out: the planes have another number of escapes than the tables say.
// unit: the lane's plane(p) and sign_mantissas(k); dynamic: the tile's dynamic bytes, in shared memory.
template <typename Unit, typename Take>
__device__ __forceinline__ bool decode_tile(const TileCode& code, const Unit& unit, const uint8_t* dynamic, uint32_t m,
                                            const EscapePlaces& places, Exponents* space, int lane, const Take& take) {
  const uint32_t mode = code.mode, dynamic_size = code.dynamic_size;
  if (mode == static_cast<uint32_t>(TileMode::constant)) {
    const uint32_t two = (dynamic[0] | dynamic[1] << 8) * 0x10001u;
#pragma unroll
    for (int k = 0; k < 4; ++k) take(k, make_uint4(two, two, two, two));
    return true;
  }
  uint32_t e[8];
  if (mode == static_cast<uint32_t>(TileMode::window)) {
    const uint32_t planes[3] = {unit.plane(0), unit.plane(1), unit.plane(2)};
    const uint32_t valid = m == kTile ? 0xFFFFFFFFu : valid_values(m, lane);
    uint32_t escapes = ~(planes[0] | planes[1] | planes[2]) & valid;
    const uint32_t own = __popc(escapes);
    const uint32_t up_to_own = warp_inclusive_sum(own);
    if (__shfl_sync(kFullWarp, up_to_own, kWarpSize - 1) != dynamic_size) return false;
    expand_planes(planes, code.base, e);
    if (dynamic_size != 0) {
      space->e[0][lane] = make_uint4(e[0], e[1], e[2], e[3]);
      space->e[1][lane] = make_uint4(e[4], e[5], e[6], e[7]);
      uint8_t* bytes = reinterpret_cast<uint8_t*>(&space->e[0][lane]);
      // The first and the last one at a time, so that two loads are on their way; the only one twice.
      const uint8_t *begin = dynamic + (up_to_own - own), *end = dynamic + up_to_own;
      while (escapes != 0) {
        const uint32_t first = 31 - __clz(escapes & (0u - escapes)), last = 31 - __clz(escapes);
        const uint8_t first_exponent = *begin++, last_exponent = *--end;
        bytes[places.of[first]] = first_exponent;
        bytes[places.of[last]] = last_exponent;
        escapes &= ~(1u << first | 1u << last);
      }
      const uint4 a = space->e[0][lane], b = space->e[1][lane];
      e[0] = a.x, e[1] = a.y, e[2] = a.z, e[3] = a.w;
      e[4] = b.x, e[5] = b.y, e[6] = b.z, e[7] = b.w;
    }
  } else {
    const uint8_t* exponents = dynamic;
    const bool packed = dynamic_size != m;  // then the first ones are where others have planes
    if (packed) {
      __syncwarp();  // all lanes have read theirs of the tile before
      uint8_t* const all = reinterpret_cast<uint8_t*>(space);
#pragma unroll
      for (int p = 0; p < 3; ++p) reinterpret_cast<uint32_t*>(all)[kPlaneWords * p + lane] = unit.plane(p);
      __syncwarp();  // of fewer values some of these are padding
      for (uint32_t b = lane; b < dynamic_size; b += kWarpSize) all[m - dynamic_size + b] = dynamic[b];
      __syncwarp();
      exponents = all;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      e[2 * k] = e[2 * k + 1] = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t i = 256 * k + 8 * lane + j;
        if (i < m)
          e[2 * k + exponent_place(j) / 4] |= static_cast<uint32_t>(exponents[i]) << (8 * (exponent_place(j) % 4));
      }
    }
    if (packed) __syncwarp();  // before they are overwritten
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) take(k, join_values(unit.sign_mantissas(k), e[2 * k], e[2 * k + 1]));
  return true;
}

}  // namespace cuda
}  // namespace zipccl
