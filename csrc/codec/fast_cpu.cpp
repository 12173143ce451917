// Code::fast above the tile: tables, groups and the three layouts. The tiles themselves are the kernels' business.
//
// The part of a group: its units and dynamic bytes in a compact frame, in the others its dynamic bytes alone: all units
// have places of their own, in front. Parts follow each other.
#include <algorithm>

#include "codec/cpu.h"
#include "codec/workers.h"

namespace zipccl {
namespace cpu {
namespace {

constexpr uint64_t kGroupUnitBytes = kGroupTiles * kMaxUnitBytes;

// Bytes reserved for the unit of a tile of m values in a split frame.
uint64_t split_unit_bytes(uint64_t m) { return align_up(m) + kPlanesBytes; }

uint64_t load_slot(const uint8_t* frame, uint64_t count, uint64_t g) {
  return load<uint64_t>(frame + slot_table_begin(count) + 8 * g);
}

uint64_t group_end_tile(uint64_t count, uint64_t group) {
  return std::min((group + 1) * kGroupTiles, tile_count(count));
}

Tile read_tile(const uint8_t* frame, uint64_t count, uint64_t tile) {
  const uint16_t word = load<uint16_t>(frame + tile_word_begin(count) + 2 * tile);
  return {static_cast<TileMode>(tile_word_mode(word)), frame[tile_base_begin(count) + tile],
          static_cast<uint16_t>(tile_word_dynamic(word))};
}

bool is_constant(const uint16_t* tile) {
  return tile[1] == tile[0] && std::memcmp(tile, tile + 1, 2 * (kTileValues - 1)) == 0;
}

// Whether constant full tiles of the group have no place in a packed frame.
bool is_looked_at(const uint16_t* src, uint64_t count, uint64_t g) {
  for (uint32_t i = 0; i < kProbes; ++i) {
    const uint64_t t = g * kGroupTiles + probe_tile(i);
    if (t >= count / kTileValues) break;
    const uint16_t* const v = src + t * kTileValues;
    uint32_t equal = 1;
    while (equal < kProbeValues && v[equal] == v[0]) ++equal;
    if (equal == kProbeValues) return true;
  }
  return false;
}

// Fills the fourth table of a packed frame, whose first entry is 0. Returns the last slot.
uint64_t write_slots(const uint16_t* src, uint64_t count, uint8_t* frame, const Threads& threads) {
  uint8_t* const slots = frame + slot_table_begin(count);
  const uint64_t groups = group_count(count);
  Shares shares(groups);
  run_workers(threads, worker_count(threads, groups), [&] {
    for (uint64_t g; shares.take(&g);) {
      const uint64_t end = std::min((g + 1) * kGroupTiles, count / kTileValues);
      uint64_t units = end - std::min(g * kGroupTiles, end);
      if (is_looked_at(src, count, g)) {
        for (uint64_t t = g * kGroupTiles; t < end; ++t) units -= is_constant(src + t * kTileValues);
      }
      store(slots + 8 * (g + 1), units);
    }
  });
  for (uint64_t g = 0; g < groups; ++g)
    store(slots + 8 * (g + 1), load_slot(frame, count, g) + load_slot(frame, count, g + 1));
  return load_slot(frame, count, groups);
}

// Bytes that a tile's unit takes.
uint64_t placed_unit_bytes(FrameLayout layout, TileMode mode, uint64_t m) {
  if (layout == FrameLayout::split) return split_unit_bytes(m);
  const uint32_t number = static_cast<uint32_t>(mode);
  return layout == FrameLayout::packed ? packed_unit_bytes(number, m) : unit_bytes(number, m);
}

struct Encoder {
  const TileKernels& kernels;
  const uint16_t* src;
  uint64_t count;
  FrameLayout layout;
  uint8_t* frame;

  uint64_t room(uint64_t g) const {
    if (layout != FrameLayout::packed) return layout == FrameLayout::compact ? kGroupUnitBytes : 0;
    // Kernels write to the units of constant tiles, too, where others may have bytes.
    const uint64_t tiles =
        std::min((g + 1) * kGroupTiles, count / kTileValues) - std::min(g * kGroupTiles, count / kTileValues);
    return load_slot(frame, count, g + 1) - load_slot(frame, count, g) == tiles ? 0 : ~uint64_t{0};
  }

  void encode_group(uint64_t g, uint8_t* units, uint8_t* dynamic, Part* part) const {
    const uint64_t first = g * kGroupTiles;
    part->apart = layout != FrameLayout::compact;
    const bool packed = layout == FrameLayout::packed, looked_at = packed && is_looked_at(src, count, g);
    for (uint64_t t = first; t < group_end_tile(count, g); ++t) {
      const uint64_t m = values_in_tile(count, t);
      uint8_t *const unit = units + part->units, *const exponents = dynamic + part->dynamic;
      Tile tile = kernels.encode(src + t * kTileValues, static_cast<uint32_t>(m), unit, exponents);
      uint64_t used = unit_bytes(static_cast<uint32_t>(tile.mode), m);
      if (packed && tile.mode == TileMode::constant && !(looked_at && m == kTileValues)) tile.mode = TileMode::held;
      if (packed && tile.mode == TileMode::raw) {
        const uint32_t moved = raw_in_unit(m);
        std::memcpy(unit + used, exponents, moved);
        std::memmove(exponents, exponents + moved, m - moved);
        tile.dynamic = static_cast<uint16_t>(m - moved);
        used += moved;
      }
      const uint64_t bytes = placed_unit_bytes(layout, tile.mode, m);
      if (part->apart) std::memset(unit + used, 0, bytes - used);
      part->words[t - first] = pack_tile_word(tile.mode, tile.dynamic);
      part->bases[t - first] = tile.base;
      part->units += bytes;
      part->dynamic += tile.dynamic;
    }
  }

  uint8_t* unit_place(uint64_t g, uint64_t begin) const {
    if (layout == FrameLayout::compact) return frame + begin;
    if (layout == FrameLayout::split) return frame + tables_end(count) + g * kGroupUnitBytes;
    return frame + packed_units_begin(count) + load_slot(frame, count, g) * kMaxUnitBytes;
  }
};

}  // namespace

Status encode_fast(const TileKernels& kernels, const uint16_t* src, uint64_t count, FrameLayout layout, uint8_t* frame,
                   uint64_t capacity, uint64_t* written, const Threads& threads) {
  uint64_t parts_begin = fast_static_bytes(count, layout);
  if (capacity < parts_begin) return Status::no_room;
  std::memset(frame + kHeaderBytes, 0, tables_end(count) - kHeaderBytes);
  if (layout == FrameLayout::packed && count != 0) {
    const uint64_t tables = slot_table_begin(count);
    std::memset(frame + tables, 0, packed_units_begin(count) - tables);
    parts_begin = packed_parts_begin(count, write_slots(src, count, frame, threads));
    if (capacity < parts_begin) return Status::no_room;
  }
  const Encoder encoder = {kernels, src, count, layout, frame};
  GroupEncoder<kGroupUnitBytes, kGroupValues + kDynamicSlack, Encoder> groups(encoder, count, parts_begin, frame,
                                                                              capacity);
  return groups.run(threads, written);
}

Status FastFrame::decode_group(uint64_t g, uint16_t* dst) const {
  const bool packed = layout_ == FrameLayout::packed, apart = layout_ != FrameLayout::compact;
  uint64_t slot = 0, next_slot = 0, slots = 0;
  if (packed) {
    slot = load_slot(frame_, count_, g), next_slot = load_slot(frame_, count_, g + 1);
    slots = load_slot(frame_, count_, group_count(count_));
    if (slots > tile_count(count_) || next_slot > slots || slot > next_slot || (g == 0 && slot != 0))
      return Status::bad_table;
  }
  const uint64_t parts_begin = packed ? packed_parts_begin(count_, slots) : fast_static_bytes(count_, layout_);
  if (parts_begin > frame_bytes_) return Status::bad_table;
  const uint64_t parts_bytes = frame_bytes_ - parts_begin;
  const uint8_t* const table = frame_ + group_table_begin();
  const uint64_t first = g * kGroupTiles, end = group_end_tile(count_, g), begin = load<uint64_t>(table + 8 * g);
  if (begin > parts_bytes || (g == 0 && begin != 0)) return Status::bad_table;
  uint64_t units = 0, dynamic_bytes = 0, places = 0;
  for (uint64_t t = first; t < end; ++t) {
    const uint64_t m = values_in_tile(count_, t);
    const Tile tile = read_tile(frame_, count_, t);
    const uint32_t mode = static_cast<uint32_t>(tile.mode);
    if (!valid_tile(mode, tile.base, tile.dynamic, static_cast<uint32_t>(m), packed)) return Status::bad_tile;
    places += m == kTileValues && tile.mode != TileMode::constant;
    if (!apart) units += unit_bytes(mode, m);
    dynamic_bytes += tile.dynamic;
  }
  if (packed && next_slot != slot + places) return Status::bad_table;
  const uint64_t part_bytes = units + align_up(dynamic_bytes);
  if (parts_bytes - begin < part_bytes) return Status::bad_table;

  const uint8_t* unit = frame_ + parts_begin + begin;
  const uint8_t* dynamic = unit + units;
  if (packed) unit = frame_ + packed_units_begin(count_) + slot * kMaxUnitBytes;
  if (layout_ == FrameLayout::split) unit = frame_ + tables_end(count_) + g * kGroupUnitBytes;
  uint8_t tail[kGroupValues + kDynamicSlack];
  if (parts_bytes - begin - units < dynamic_bytes + kDynamicSlack) {  // too near the end for the kernels' slack
    std::memcpy(tail, dynamic, dynamic_bytes);
    std::memset(tail + dynamic_bytes, 0, kDynamicSlack);
    dynamic = tail;
  }
  for (uint64_t t = first; t < end; ++t) {
    const uint64_t m = values_in_tile(count_, t);
    Tile tile = read_tile(frame_, count_, t);
    const uint8_t* exponents = dynamic;
    uint8_t joined[kTileValues + kDynamicSlack];
    dynamic += tile.dynamic;
    if (packed && tile.mode == TileMode::raw) {
      const uint32_t in_unit = raw_in_unit(m);
      std::memcpy(joined, unit + align_up(m), in_unit);
      std::memcpy(joined + in_unit, exponents, tile.dynamic);
      std::memset(joined + m, 0, kDynamicSlack);
      exponents = joined;
      tile.dynamic = static_cast<uint16_t>(m);
    }
    if (!kernels_.decode(tile, unit, exponents, static_cast<uint32_t>(m), dst)) return Status::bad_escapes;
    unit += placed_unit_bytes(layout_, tile.mode, m);
    dst += m;
  }
  // Groups that all end where the next one begins, and the last one where the frame ends, leave no gaps.
  const uint64_t behind = g + 1 < group_count(count_) ? load<uint64_t>(table + 8 * (g + 1)) : parts_bytes;
  return begin + part_bytes == behind ? Status::ok : Status::bad_table;
}

}  // namespace cpu
}  // namespace zipccl
