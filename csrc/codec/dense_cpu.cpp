// Code::dense above the tile: tables and groups. The tiles themselves are the kernels' business.
//
// Groups are written one after the other, each the units of its tiles, then their dynamic bytes.
#include <algorithm>

#include "codec/cpu.h"

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kMostUnitBytes = 8 * kTileValues;  // elements have at most 8 bytes

uint64_t group_end_tile(uint64_t elements, uint64_t group) {
  return std::min((group + 1) * kGroupTiles, tile_count(elements));
}

DenseTile read_tile(const uint8_t* frame, uint64_t elements, uint64_t tile) {
  const uint16_t word = load<uint16_t>(frame + tile_word_begin(elements) + 2 * tile);
  return {static_cast<uint8_t>(tile_word_mode(word)), frame[tile_base_begin(elements) + tile],
          static_cast<uint16_t>(tile_word_dynamic(word))};
}

void write_tile(uint8_t* frame, uint64_t elements, uint64_t tile, const DenseTile& t) {
  store(frame + tile_word_begin(elements) + 2 * tile, static_cast<uint16_t>(t.dynamic | t.mode << 12));
  frame[tile_base_begin(elements) + tile] = t.base;
}

}  // namespace

Status encode_dense(const DenseKernels& kernels, const void* src, DType dtype, uint64_t count, uint8_t* frame,
                    uint64_t capacity, uint64_t* written) {
  const dense::Format format = dense::format_of(dtype);
  const uint64_t elements = dense::element_count(dtype, count), parts_begin = tables_end(elements);
  if (capacity < parts_begin) return Status::no_room;
  std::memset(frame + kHeaderBytes, 0, parts_begin - kHeaderBytes);

  // The dynamic bytes of a group follow its last unit, whose end is not known before the group is done.
  uint8_t dynamic[kGroupTiles * dense::kMaxDynamic + kDenseSlack];
  // A unit goes straight to its place unless the frame's end is too near to be sure that it fits.
  uint8_t spare[kMostUnitBytes];

  const uint8_t* values = static_cast<const uint8_t*>(src);
  uint64_t pos = parts_begin;
  for (uint64_t g = 0; g < group_count(elements); ++g) {
    store(frame + group_table_begin() + 8 * g, pos - parts_begin);
    uint64_t dynamic_size = 0;
    for (uint64_t t = g * kGroupTiles; t < group_end_tile(elements, g); ++t) {
      const uint32_t m = static_cast<uint32_t>(values_in_tile(elements, t));
      const bool in_place = capacity - pos >= kMostUnitBytes;
      uint8_t* const unit = in_place ? frame + pos : spare;
      const DenseTile tile = kernels.encode(format, values, m, unit, dynamic + dynamic_size);
      const uint32_t size = dense::unit_bytes(format, tile.mode, m);
      if (!in_place) {
        if (capacity - pos < size) return Status::no_room;
        std::memcpy(frame + pos, spare, size);
      }
      write_tile(frame, elements, t, tile);
      pos += size;
      dynamic_size += tile.dynamic;
      values += static_cast<uint64_t>(format.bytes) * m;
    }
    if (capacity - pos < align_up(dynamic_size)) return Status::no_room;
    std::memcpy(frame + pos, dynamic, dynamic_size);
    std::memset(frame + pos + dynamic_size, 0, align_up(dynamic_size) - dynamic_size);
    pos += align_up(dynamic_size);
  }
  *written = pos;
  return Status::ok;
}

DenseReader::DenseReader(const DenseKernels& kernels, const uint8_t* frame, uint64_t frame_bytes, DType dtype,
                         uint64_t count)
    : kernels_(kernels),
      frame_(frame),
      frame_bytes_(frame_bytes),
      format_(dense::format_of(dtype)),
      elements_(dense::element_count(dtype, count)),
      pos_(tables_end(elements_)) {}

Status DenseReader::next_group(void* dst) {
  const uint64_t first = group_ * kGroupTiles, end = group_end_tile(elements_, group_);
  if (load<uint64_t>(frame_ + group_table_begin() + 8 * group_) != pos_ - tables_end(elements_)) {
    return Status::bad_table;
  }
  uint64_t units_size = 0, dynamic_size = 0;
  for (uint64_t t = first; t < end; ++t) {
    const uint32_t m = static_cast<uint32_t>(values_in_tile(elements_, t));
    const DenseTile tile = read_tile(frame_, elements_, t);
    if (!dense::valid_tile(format_, tile.mode, tile.base, tile.dynamic, m)) return Status::bad_tile;
    units_size += dense::unit_bytes(format_, tile.mode, m);
    dynamic_size += tile.dynamic;
  }
  const uint64_t part = units_size + align_up(dynamic_size);
  if (frame_bytes_ - pos_ < part) return Status::bad_table;

  const uint8_t* unit = frame_ + pos_;
  const uint8_t* dynamic = unit + units_size;
  uint8_t tail[kGroupTiles * dense::kMaxDynamic + kDenseSlack];
  if (frame_bytes_ - pos_ - units_size < dynamic_size + kDenseSlack) {  // too near the end for the kernels' slack
    std::memcpy(tail, dynamic, dynamic_size);
    std::memset(tail + dynamic_size, 0, kDenseSlack);
    dynamic = tail;
  }
  uint8_t* to = static_cast<uint8_t*>(dst);
  for (uint64_t t = first; t < end; ++t) {
    const uint32_t m = static_cast<uint32_t>(values_in_tile(elements_, t));
    const DenseTile tile = read_tile(frame_, elements_, t);
    if (!kernels_.decode(format_, tile, unit, dynamic, m, to)) return Status::bad_escapes;
    unit += dense::unit_bytes(format_, tile.mode, m);
    dynamic += tile.dynamic;
    to += static_cast<uint64_t>(format_.bytes) * m;
  }
  pos_ += part;
  ++group_;
  return Status::ok;
}

Status decode_dense(const DenseKernels& kernels, const uint8_t* frame, uint64_t frame_bytes, DType dtype,
                    uint64_t count, void* dst) {
  DenseReader reader(kernels, frame, frame_bytes, dtype, count);
  const uint64_t elements = dense::element_count(dtype, count);
  const uint64_t group_bytes = kGroupValues * dense::format_of(dtype).bytes;
  for (uint64_t g = 0; g < group_count(elements); ++g) {
    const Status status = reader.next_group(static_cast<uint8_t*>(dst) + g * group_bytes);
    if (status != Status::ok) return status;
  }
  return reader.at_end() ? Status::ok : Status::bad_table;
}

}  // namespace cpu
}  // namespace zipccl
