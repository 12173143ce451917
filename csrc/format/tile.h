// Code "fast" for bf16: what one tile of up to 1024 values looks like. docs/format.md, section "Tiles".
//
// A bf16 value is sign(1) exponent(8) mantissa(7). Its sign and mantissa travel as one byte, its exponent as a
// 3-bit code in three bit planes: code c in 1..7 means exponent base + c - 1, code 0 (escape) means the exponent
// byte stands in the dynamic part.
//
//   unit of a window tile   sign-mantissa bytes u8 [m], padded to 16 | plane 0 | plane 1 | plane 2 (u32 [32] each)
//   unit of a raw tile      sign-mantissa bytes u8 [m], padded to 16
//   unit of a constant tile nothing
//   dynamic bytes           window: escaped exponents in plane order; raw: m exponents in value order;
//                           constant: the value's 2 bytes
//
// Plane order: value i of the tile has bit 8 * (i / 256) + i % 8 of word (i / 8) % 32. A warp lane that loads
// 8 consecutive values four times, 256 apart, then owns exactly one word of each plane.
#pragma once

#include "format/frame.h"

namespace zipccl {

enum class TileMode : uint8_t { window = 0, constant = 1, raw = 2 };
constexpr uint8_t kTileModeCount = 3;

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

// Bytes of the unit of a tile of m values; 0 for unknown modes, which the decoder refuses before it asks.
ZIPCCL_HD uint64_t unit_bytes(uint32_t mode, uint64_t m) {
  if (mode == static_cast<uint32_t>(TileMode::window)) return align_up(m) + kPlanesBytes;
  if (mode == static_cast<uint32_t>(TileMode::raw)) return align_up(m);
  return 0;
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

// Upper bound of a "fast" frame and the size of its static part. See FrameLayout.
ZIPCCL_HD uint64_t units_capacity(uint64_t count) {
  uint64_t full = count / kTileValues, rest = count % kTileValues;
  return full * kMaxUnitBytes + (rest ? align_up(rest) + kPlanesBytes : 0);
}
ZIPCCL_HD uint64_t fast_static_bytes(uint64_t count, FrameLayout layout) {
  return tables_end(count) + (layout == FrameLayout::split ? units_capacity(count) : 0);
}
ZIPCCL_HD uint64_t fast_bound(uint64_t count, FrameLayout layout) {
  // A raw tile is the largest: r16(m) unit and m dynamic bytes (2 for m = 1 constant). Each group's dynamic bytes
  // are padded to 16.
  uint64_t dynamic = count + 2 + kFrameAlign * group_count(count);
  uint64_t units =
      layout == FrameLayout::split ? units_capacity(count) : count + kFrameAlign * (count % kTileValues != 0);
  return align_up(tables_end(count) + units + dynamic);
}

}  // namespace zipccl
