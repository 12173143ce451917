// Code::dense above the tile: tables and groups. The tiles themselves are the kernels' business.
//
// The part of a group: the units of its tiles, then their dynamic bytes. Parts follow each other.
#include <algorithm>

#include "codec/cpu.h"
#include "codec/workers.h"

namespace zipccl {
namespace cpu {
namespace {

constexpr uint64_t kMostUnitsBytes = 8 * kGroupValues;  // elements have at most 8 bytes

uint64_t group_end_tile(uint64_t elements, uint64_t group) {
  return std::min((group + 1) * kGroupTiles, tile_count(elements));
}

DenseTile read_tile(const uint8_t* frame, uint64_t elements, uint64_t tile) {
  const uint16_t word = load<uint16_t>(frame + tile_word_begin(elements) + 2 * tile);
  return {static_cast<uint8_t>(tile_word_mode(word)), frame[tile_base_begin(elements) + tile],
          static_cast<uint16_t>(tile_word_dynamic(word))};
}

struct Encoder {
  const DenseKernels& kernels;
  const dense::Format format;
  const uint8_t* src;
  uint64_t elements;
  uint8_t* frame;

  uint64_t room(uint64_t g) const {
    return align_up(format.bytes * std::min(kGroupValues, elements - g * kGroupValues));
  }

  void encode_group(uint64_t g, uint8_t* units, uint8_t* dynamic, Part* part) const {
    const uint64_t first = g * kGroupTiles;
    for (uint64_t t = first; t < group_end_tile(elements, g); ++t) {
      const uint32_t m = static_cast<uint32_t>(values_in_tile(elements, t));
      const DenseTile tile =
          kernels.encode(format, src + format.bytes * kTileValues * t, m, units + part->units, dynamic + part->dynamic);
      part->words[t - first] = static_cast<uint16_t>(tile.dynamic | tile.mode << 12);
      part->bases[t - first] = tile.base;
      part->units += dense::unit_bytes(format, tile.mode, m);
      part->dynamic += tile.dynamic;
    }
  }

  uint8_t* unit_place(uint64_t, uint64_t begin) const { return frame + begin; }
};

}  // namespace

Status encode_dense(const DenseKernels& kernels, const void* src, DType dtype, uint64_t count, uint8_t* frame,
                    uint64_t capacity, uint64_t* written, const Threads& threads) {
  const uint64_t elements = dense::element_count(dtype, count), parts_begin = tables_end(elements);
  if (capacity < parts_begin) return Status::no_room;
  std::memset(frame + kHeaderBytes, 0, parts_begin - kHeaderBytes);
  const Encoder encoder = {kernels, dense::format_of(dtype), static_cast<const uint8_t*>(src), elements, frame};
  GroupEncoder<kMostUnitsBytes, kGroupTiles * dense::kMaxDynamic + kDenseSlack, Encoder> groups(
      encoder, elements, parts_begin, frame, capacity);
  return groups.run(threads, written);
}

DenseFrame::DenseFrame(const DenseKernels& kernels, const uint8_t* frame, uint64_t frame_bytes, DType dtype,
                       uint64_t count)
    : kernels_(kernels),
      frame_(frame),
      frame_bytes_(frame_bytes),
      format_(dense::format_of(dtype)),
      elements_(dense::element_count(dtype, count)) {}

Status DenseFrame::decode_group(uint64_t g, uint8_t* dst) const {
  const uint64_t parts_begin = tables_end(elements_), parts_bytes = frame_bytes_ - parts_begin;
  const uint8_t* const table = frame_ + group_table_begin();
  const uint64_t first = g * kGroupTiles, end = group_end_tile(elements_, g), begin = load<uint64_t>(table + 8 * g);
  if (begin > parts_bytes || (g == 0 && begin != 0)) return Status::bad_table;
  uint64_t units = 0, dynamic_bytes = 0;
  for (uint64_t t = first; t < end; ++t) {
    const uint32_t m = static_cast<uint32_t>(values_in_tile(elements_, t));
    const DenseTile tile = read_tile(frame_, elements_, t);
    if (!dense::valid_tile(format_, tile.mode, tile.base, tile.dynamic, m)) return Status::bad_tile;
    units += dense::unit_bytes(format_, tile.mode, m);
    dynamic_bytes += tile.dynamic;
  }
  const uint64_t part_bytes = units + align_up(dynamic_bytes);
  if (parts_bytes - begin < part_bytes) return Status::bad_table;

  const uint8_t* unit = frame_ + parts_begin + begin;
  const uint8_t* dynamic = unit + units;
  uint8_t tail[kGroupTiles * dense::kMaxDynamic + kDenseSlack];
  if (parts_bytes - begin - units < dynamic_bytes + kDenseSlack) {  // too near the end for the kernels' slack
    std::memcpy(tail, dynamic, dynamic_bytes);
    std::memset(tail + dynamic_bytes, 0, kDenseSlack);
    dynamic = tail;
  }
  for (uint64_t t = first; t < end; ++t) {
    const uint32_t m = static_cast<uint32_t>(values_in_tile(elements_, t));
    const DenseTile tile = read_tile(frame_, elements_, t);
    if (!kernels_.decode(format_, tile, unit, dynamic, m, dst)) return Status::bad_escapes;
    unit += dense::unit_bytes(format_, tile.mode, m);
    dynamic += tile.dynamic;
    dst += static_cast<uint64_t>(format_.bytes) * m;
  }
  // Groups that all end where the next one begins, and the last one where the frame ends, leave no gaps.
  const uint64_t behind = g + 1 < group_count(elements_) ? load<uint64_t>(table + 8 * (g + 1)) : parts_bytes;
  return begin + part_bytes == behind ? Status::ok : Status::bad_table;
}

}  // namespace cpu
}  // namespace zipccl
