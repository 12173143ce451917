// Code::fast above the tile: tables, groups and the two layouts. The tiles themselves are the kernels' business.
//
// Groups are written one after the other. `pos` is where the next group's part begins: its units and dynamic bytes
// in a compact frame, its dynamic bytes alone in a split one, whose units have places of their own.
#include <algorithm>

#include "codec/cpu.h"

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

void write_tile(uint8_t* frame, uint64_t count, uint64_t tile, const Tile& t) {
  store(frame + tile_word_begin(count) + 2 * tile, pack_tile_word(t.mode, t.dynamic));
  frame[tile_base_begin(count) + tile] = t.base;
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

}  // namespace

Status encode_fast(const TileKernels& kernels, const uint16_t* src, uint64_t count, FrameLayout layout, uint8_t* frame,
                   uint64_t capacity, uint64_t* written) {
  const bool split = layout == FrameLayout::split;
  const uint64_t parts_begin = fast_static_bytes(count, layout);
  if (capacity < parts_begin) return Status::no_room;
  std::memset(frame + kHeaderBytes, 0, tables_end(count) - kHeaderBytes);

  // The dynamic bytes of a group follow its last unit, whose end is not known before the group is done.
  uint8_t dynamic[kGroupValues + kDynamicSlack];
  // Units go straight to their place unless the frame's end is too near to be sure that they fit.
  uint8_t units[kGroupUnitBytes];

  uint64_t pos = parts_begin;
  for (uint64_t g = 0; g < group_count(count); ++g) {
    store(frame + group_table_begin() + 8 * g, pos - parts_begin);
    const bool in_place = split || capacity - pos >= kGroupUnitBytes;
    uint8_t* const group_units = in_place ? frame + pos : units;
    uint64_t units_size = 0, dynamic_size = 0;
    for (uint64_t t = g * kGroupTiles; t < group_end_tile(count, g); ++t) {
      const uint64_t m = values_in_tile(count, t);
      uint8_t* unit = split ? frame + split_unit_begin(count, t) : group_units + units_size;
      const Tile tile = kernels.encode(src + t * kTileValues, static_cast<uint32_t>(m), unit, dynamic + dynamic_size);
      write_tile(frame, count, t, tile);
      const uint64_t unit_size = unit_bytes(static_cast<uint32_t>(tile.mode), m);
      if (split) {
        std::memset(unit + unit_size, 0, split_unit_bytes(m) - unit_size);
      } else {
        units_size += unit_size;
      }
      dynamic_size += tile.dynamic;
    }
    const uint64_t part = units_size + align_up(dynamic_size);
    if (capacity - pos < part) return Status::no_room;
    if (!in_place) std::memcpy(frame + pos, units, units_size);
    std::memcpy(frame + pos + units_size, dynamic, dynamic_size);
    std::memset(frame + pos + units_size + dynamic_size, 0, align_up(dynamic_size) - dynamic_size);
    pos += part;
  }
  *written = pos;
  return Status::ok;
}

FastReader::FastReader(const TileKernels& kernels, const uint8_t* frame, uint64_t frame_bytes, uint64_t count,
                       FrameLayout layout)
    : kernels_(kernels),
      frame_(frame),
      frame_bytes_(frame_bytes),
      count_(count),
      layout_(layout),
      pos_(fast_static_bytes(count, layout)) {}

Status FastReader::next_group(uint16_t* dst) {
  const bool split = layout_ == FrameLayout::split;
  const uint64_t parts_begin = fast_static_bytes(count_, layout_);
  const uint64_t first = group_ * kGroupTiles, end = group_end_tile(count_, group_);
  if (load<uint64_t>(frame_ + group_table_begin() + 8 * group_) != pos_ - parts_begin) return Status::bad_table;
  uint64_t units_size = 0, dynamic_size = 0;
  for (uint64_t t = first; t < end; ++t) {
    const uint64_t m = values_in_tile(count_, t);
    const Tile tile = read_tile(frame_, count_, t);
    if (!valid_tile(tile, m)) return Status::bad_tile;
    if (!split) units_size += unit_bytes(static_cast<uint32_t>(tile.mode), m);
    dynamic_size += tile.dynamic;
  }
  const uint64_t part = units_size + align_up(dynamic_size);
  if (frame_bytes_ - pos_ < part) return Status::bad_table;

  const uint8_t* unit = frame_ + pos_;
  const uint8_t* dynamic = frame_ + pos_ + units_size;
  uint8_t tail[kGroupValues + kDynamicSlack];
  if (frame_bytes_ - pos_ - units_size < dynamic_size + kDynamicSlack) {  // too near the end for the kernels' slack
    std::memcpy(tail, dynamic, dynamic_size);
    std::memset(tail + dynamic_size, 0, kDynamicSlack);
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
  pos_ += part;
  ++group_;
  return Status::ok;
}

Status decode_fast(const TileKernels& kernels, const uint8_t* frame, uint64_t frame_bytes, uint64_t count,
                   FrameLayout layout, uint16_t* dst) {
  FastReader reader(kernels, frame, frame_bytes, count, layout);
  for (uint64_t g = 0; g < group_count(count); ++g) {
    const Status status = reader.next_group(dst + g * kGroupValues);
    if (status != Status::ok) return status;
  }
  return reader.at_end() ? Status::ok : Status::bad_table;
}

}  // namespace cpu
}  // namespace zipccl
