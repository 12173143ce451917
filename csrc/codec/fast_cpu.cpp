// Code::fast above the tile: tables, groups and the two layouts. The tiles themselves are the kernels' business.
//
// The part of a group: its units and dynamic bytes in a compact frame, its dynamic bytes alone in a split one, whose
// units have places of their own. Parts follow each other.
#include <algorithm>

#include "codec/cpu.h"
#include "codec/workers.h"

namespace zipccl {
namespace cpu {
namespace {

constexpr uint64_t kGroupUnitBytes = kGroupTiles * kMaxUnitBytes;

// Place of a tile's unit in a split frame, and the bytes reserved for it.
uint64_t split_unit_begin(uint64_t count, uint64_t tile) { return tables_end(count) + tile * kMaxUnitBytes; }
uint64_t split_unit_bytes(uint64_t m) { return align_up(m) + kPlanesBytes; }

uint64_t group_end_tile(uint64_t count, uint64_t group) {
  return std::min((group + 1) * kGroupTiles, tile_count(count));
}

Tile read_tile(const uint8_t* frame, uint64_t count, uint64_t tile) {
  const uint16_t word = load<uint16_t>(frame + tile_word_begin(count) + 2 * tile);
  return {static_cast<TileMode>(tile_word_mode(word)), frame[tile_base_begin(count) + tile],
          static_cast<uint16_t>(tile_word_dynamic(word))};
}

bool valid_tile(const Tile& t, uint64_t m) {
  switch (t.mode) {
    case TileMode::window:
      return t.base <= kMaxBase && t.dynamic <= m;
    case TileMode::constant:
      return t.base == 0 && t.dynamic == 2;
    case TileMode::raw:
      return t.base == 0 && t.dynamic == m;
  }
  return false;
}

struct Encoder {
  const TileKernels& kernels;
  const uint16_t* src;
  uint64_t count;
  bool split;
  uint8_t* frame;

  uint64_t room(uint64_t) const { return split ? 0 : kGroupUnitBytes; }

  void encode_group(uint64_t g, uint8_t* units, uint8_t* dynamic, Part* part) const {
    const uint64_t first = g * kGroupTiles;
    for (uint64_t t = first; t < group_end_tile(count, g); ++t) {
      const uint64_t m = values_in_tile(count, t);
      uint8_t* const unit = units + part->units;
      const Tile tile = kernels.encode(src + t * kTileValues, static_cast<uint32_t>(m), unit, dynamic + part->dynamic);
      part->words[t - first] = pack_tile_word(tile.mode, tile.dynamic);
      part->bases[t - first] = tile.base;
      const uint64_t bytes = unit_bytes(static_cast<uint32_t>(tile.mode), m), reserved = split_unit_bytes(m);
      if (split) std::memset(unit + bytes, 0, reserved - bytes);
      part->units += split ? reserved : bytes;
      part->dynamic += tile.dynamic;
    }
  }

  uint64_t placed_bytes(const Part& part) const { return (split ? 0 : part.units) + align_up(part.dynamic); }
  uint8_t* unit_place(uint64_t g, uint64_t begin) const {
    return frame + (split ? split_unit_begin(count, g * kGroupTiles) : begin);
  }
  uint8_t* dynamic_place(const Part& part, uint64_t begin) const { return frame + begin + (split ? 0 : part.units); }
};

}  // namespace

Status encode_fast(const TileKernels& kernels, const uint16_t* src, uint64_t count, FrameLayout layout, uint8_t* frame,
                   uint64_t capacity, uint64_t* written, const Threads& threads) {
  const uint64_t parts_begin = fast_static_bytes(count, layout);
  if (capacity < parts_begin) return Status::no_room;
  std::memset(frame + kHeaderBytes, 0, tables_end(count) - kHeaderBytes);
  const Encoder encoder = {kernels, src, count, layout == FrameLayout::split, frame};
  GroupEncoder<kGroupUnitBytes, kGroupValues + kDynamicSlack, Encoder> groups(encoder, count, parts_begin, frame,
                                                                              capacity);
  return groups.run(threads, written);
}

Status FastFrame::decode_group(uint64_t g, uint16_t* dst) const {
  const bool split = layout_ == FrameLayout::split;
  const uint64_t parts_begin = fast_static_bytes(count_, layout_), parts_bytes = frame_bytes_ - parts_begin;
  const uint8_t* const table = frame_ + group_table_begin();
  const uint64_t first = g * kGroupTiles, end = group_end_tile(count_, g), begin = load<uint64_t>(table + 8 * g);
  if (begin > parts_bytes || (g == 0 && begin != 0)) return Status::bad_table;
  uint64_t units = 0, dynamic_bytes = 0;
  for (uint64_t t = first; t < end; ++t) {
    const uint64_t m = values_in_tile(count_, t);
    const Tile tile = read_tile(frame_, count_, t);
    if (!valid_tile(tile, m)) return Status::bad_tile;
    if (!split) units += unit_bytes(static_cast<uint32_t>(tile.mode), m);
    dynamic_bytes += tile.dynamic;
  }
  const uint64_t part_bytes = units + align_up(dynamic_bytes);
  if (parts_bytes - begin < part_bytes) return Status::bad_table;

  const uint8_t* unit = frame_ + parts_begin + begin;
  const uint8_t* dynamic = unit + units;
  uint8_t tail[kGroupValues + kDynamicSlack];
  if (parts_bytes - begin - units < dynamic_bytes + kDynamicSlack) {  // too near the end for the kernels' slack
    std::memcpy(tail, dynamic, dynamic_bytes);
    std::memset(tail + dynamic_bytes, 0, kDynamicSlack);
    dynamic = tail;
  }
  for (uint64_t t = first; t < end; ++t) {
    const uint64_t m = values_in_tile(count_, t);
    const Tile tile = read_tile(frame_, count_, t);
    if (split) unit = frame_ + split_unit_begin(count_, t);
    if (!kernels_.decode(tile, unit, dynamic, static_cast<uint32_t>(m), dst)) return Status::bad_escapes;
    unit += unit_bytes(static_cast<uint32_t>(tile.mode), m);
    dynamic += tile.dynamic;
    dst += m;
  }
  // Groups that all end where the next one begins, and the last one where the frame ends, leave no gaps.
  const uint64_t behind = g + 1 < group_count(count_) ? load<uint64_t>(table + 8 * (g + 1)) : parts_bytes;
  return begin + part_bytes == behind ? Status::ok : Status::bad_table;
}

}  // namespace cpu
}  // namespace zipccl
