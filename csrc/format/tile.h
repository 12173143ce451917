// Code "fast" for bf16: what one tile of up to 1024 values looks like. docs/format.md, section "Tiles".
//
// A bf16 value is sign(1) exponent(8) mantissa(7). Its sign and mantissa travel as one byte, its exponent as a
// 3-bit code in three bit planes: code c in 1..7 means exponent base + c - 1, code 0 (escape) means the exponent
// byte stands in the dynamic part.
//
//   unit of a window tile   sign-mantissa bytes u8 [m], padded to 16 | plane 0 | plane 1 | plane 2 (u32 [32] each)
//   unit of a raw tile      sign-mantissa bytes u8 [m], padded to 16
//   unit of a constant tile nothing
//   unit of a held tile     padding, as many bytes as a window tile has; only in a packed frame
//   unit of a raw tile of a packed frame   sign-mantissa bytes, padded to 16 | 384 bytes: exponents of the first values
//   dynamic bytes           window: escaped exponents in plane order; raw: m exponents in value order,
//                           less those in the unit; constant, held: the value's 2 bytes
//
// Plane order: value i of the tile has bit 8 * (i / 256) + i % 8 of word (i / 8) % 32. A warp lane that loads
// 8 consecutive values four times, 256 apart, then owns exactly one word of each plane.
#pragma once

#include "format/frame.h"

namespace zipccl {

enum class TileMode : uint8_t { window = 0, constant = 1, raw = 2, held = 3 };  // held: constant, but with a place

constexpr uint64_t kPlaneWords = 32;
constexpr uint64_t kPlaneBytes = 4 * kPlaneWords;
constexpr uint64_t kPlanesBytes = 3 * kPlaneBytes;
constexpr uint64_t kMaxUnitBytes = kTileValues + kPlanesBytes;
constexpr uint32_t kWindowExponents = 7;
constexpr uint32_t kMaxBase = 256 - kWindowExponents;

// Tile word: dynamic bytes (0..1024) in the low 12 bits, mode in the high 4.
ZIPCCL_HD uint16_t pack_tile_word(TileMode mode, uint32_t dynamic_bytes) {
  return static_cast<uint16_t>(dynamic_bytes | (static_cast<uint32_t>(mode) << 12));
}
ZIPCCL_HD uint32_t tile_word_mode(uint16_t w) { return w >> 12; }
ZIPCCL_HD uint32_t tile_word_dynamic(uint16_t w) { return w & 0xFFFu; }

ZIPCCL_HD uint64_t values_in_tile(uint64_t count, uint64_t tile) {
  uint64_t left = count - tile * kTileValues;
  return left < kTileValues ? left : kTileValues;
}

// Bytes of the unit of a tile of m values, of a frame that is not packed; 0 for unknown modes, which the decoder
// refuses before it asks.
ZIPCCL_HD uint64_t unit_bytes(uint32_t mode, uint64_t m) {
  if (mode == static_cast<uint32_t>(TileMode::window)) return align_up(m) + kPlanesBytes;
  if (mode == static_cast<uint32_t>(TileMode::raw)) return align_up(m);
  return 0;
}

// The same of a packed frame.
ZIPCCL_HD uint64_t packed_unit_bytes(uint32_t mode, uint64_t m) {
  return mode == static_cast<uint32_t>(TileMode::constant) ? 0 : align_up(m) + kPlanesBytes;
}
// Exponents of a raw tile that take the place of planes there.
ZIPCCL_HD uint32_t raw_in_unit(uint64_t m) { return static_cast<uint32_t>(m < kPlanesBytes ? m : kPlanesBytes); }

ZIPCCL_HD bool valid_tile(uint32_t mode, uint32_t base, uint32_t dynamic, uint32_t m, bool packed) {
  if (mode == static_cast<uint32_t>(TileMode::window)) return base <= kMaxBase && dynamic <= m;
  if (mode == static_cast<uint32_t>(TileMode::constant))
    return base == 0 && dynamic == 2 && (!packed || m == kTileValues);
  if (mode == static_cast<uint32_t>(TileMode::held)) return base == 0 && dynamic == 2 && packed;
  return mode == static_cast<uint32_t>(TileMode::raw) && base == 0 && dynamic == (packed ? m - raw_in_unit(m) : m);
}

// A window tile must be smaller than the same tile raw.
ZIPCCL_HD bool window_pays(uint64_t m, uint64_t escapes) { return kPlanesBytes + escapes < m; }

// Place of value i of a tile in the planes.
ZIPCCL_HD uint32_t plane_word(uint32_t i) { return (i / 8) % 32; }
ZIPCCL_HD uint32_t plane_bit(uint32_t i) { return 8 * (i / 256) + i % 8; }
ZIPCCL_HD uint32_t plane_value(uint32_t word, uint32_t bit) { return 256 * (bit / 8) + 8 * word + bit % 8; }

// bf16 bits <-> (sign-mantissa byte, exponent byte)
ZIPCCL_HD uint32_t sign_mantissa(uint32_t v) { return ((v >> 8) & 0x80u) | (v & 0x7Fu); }
ZIPCCL_HD uint32_t exponent(uint32_t v) { return (v >> 7) & 0xFFu; }
ZIPCCL_HD uint32_t join(uint32_t sm, uint32_t e) { return ((sm & 0x80u) << 8) | (e << 7) | (sm & 0x7Fu); }

// The encoder's choice of window. Part of the encoder, not of the format: a decoder takes any base up to kMaxBase.
// It looks at a quarter of the values (i % 8 < 2): mean of the non-zero exponents, rounded to nearest, then the best
// of three bases around it by the number of sampled exponents inside the window, the lowest base on a tie.
constexpr int kBaseCandidates = 3;
ZIPCCL_HD bool sampled(uint32_t i) { return i % 8 < 2; }
ZIPCCL_HD uint32_t mean_exponent(uint32_t sum, uint32_t nonzero) { return nonzero ? (sum + nonzero / 2) / nonzero : 0; }
ZIPCCL_HD uint32_t candidate_base(uint32_t mean, int k) {
  int b = static_cast<int>(mean) - 4 + k;
  return b < 0 ? 0u : (b > static_cast<int>(kMaxBase) ? kMaxBase : static_cast<uint32_t>(b));
}

// ---- Layouts --------------------------------------------------------------------------------------------------
// FrameLayout::packed: slots[g] full tiles that are not constant come before group g, slots[groups] in all. Their units
// lie side by side, behind them the place of a last tile that is not full, behind that the dynamic parts of the groups.
ZIPCCL_HD uint64_t slot_table_begin(uint64_t count) { return tables_end(count); }
constexpr uint64_t kUnitsAlign = 32;  // what memory takes at least
ZIPCCL_HD uint64_t packed_units_begin(uint64_t count) {
  const uint64_t slots = slot_table_begin(count);
  return count == 0 ? slots : align_up(slots + 8 * (group_count(count) + 1), kUnitsAlign);
}
ZIPCCL_HD uint64_t packed_parts_begin(uint64_t count, uint64_t slots) {
  const uint64_t rest = count % kTileValues;
  return packed_units_begin(count) + slots * kMaxUnitBytes + (rest ? align_up(rest) + kPlanesBytes : 0);
}

// The encoder's choice which frames are packed that might be compact: where a GPU has enough groups to work on for it
// to pay.
constexpr uint64_t kPackedFrom = uint64_t{24} << 20;
ZIPCCL_HD FrameLayout fast_layout(FrameLayout asked, uint64_t count) {
  return asked == FrameLayout::compact && count >= kPackedFrom ? FrameLayout::packed : asked;
}

// And which tiles of equal values are constant there, not held: full ones of groups that are looked at closely, as the
// first values of one of four of their tiles are equal. So not all tiles have to be looked at ahead of encoding.
constexpr uint32_t kProbes = 4, kProbeValues = 4;
ZIPCCL_HD uint32_t probe_tile(uint32_t i) { return i < 2 ? 11 * i : 9 * i + 3; }  // 0, 11, 21, 30

// Upper bound of a "fast" frame and the size of its static part. See FrameLayout.
ZIPCCL_HD uint64_t units_capacity(uint64_t count) {
  uint64_t full = count / kTileValues, rest = count % kTileValues;
  return full * kMaxUnitBytes + (rest ? align_up(rest) + kPlanesBytes : 0);
}
ZIPCCL_HD uint64_t fast_static_bytes(uint64_t count, FrameLayout layout) {
  if (layout == FrameLayout::packed) return packed_parts_begin(count, 0);
  return tables_end(count) + (layout == FrameLayout::split ? units_capacity(count) : 0);
}
ZIPCCL_HD uint64_t fast_bound(uint64_t count, FrameLayout layout) {
  // A raw tile is the largest: r16(m) unit and m dynamic bytes (2 for m = 1 constant), or as many in a packed frame;
  // but there the place of a last tile is larger than many such. Each group's dynamic bytes are padded to 16.
  uint64_t dynamic = count + 2 + kFrameAlign * group_count(count);
  uint64_t rest = count % kTileValues, units = 0;
  if (layout == FrameLayout::compact) units = count + kFrameAlign * (rest != 0);
  if (layout == FrameLayout::packed) units = count - rest;
  return align_up(fast_static_bytes(count, layout) + units + dynamic);
}

}  // namespace zipccl
