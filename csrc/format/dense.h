// Code "dense": what one tile of up to 1024 elements looks like. docs/format.md, section "Code dense".
//
// An element is a floating-point number: a sign, an exponent and a mantissa. Its exponent, as a byte called symbol, is
// coded in up to four levels of 2-bit codes, each of which names one of three symbols or leaves the value to the next
// level; its sign and mantissa, called rest, travel as they are, without low mantissa bits that are zero in the whole
// tile. Elements of other dtypes have no exponent, so their tiles are constant or raw.
//
//   unit of a window tile   rest bits, in arrays of 8, 4, 2 and 1 bits each | codes of level 1, 2 bits each
//   unit of a raw tile      the elements as they are
//   unit of a constant tile nothing
//   dynamic bytes           window: codes of levels 2, 3 and 4, four to a byte, then the symbols that no code names;
//                           constant: the element
//
// Every array is in the order of the elements, its first bits lowest. Those of a unit are padded to 16 bytes.
#pragma once

#include "format/frame.h"
#include "format/tile.h"

namespace zipccl {
namespace dense {

struct Format {
  uint8_t bytes;          // of an element
  uint8_t exponent_bits;  // 0: elements without an exponent
  uint8_t mantissa_bits;
  uint8_t parts;  // elements of a value: complex numbers have two
};

// Elements of a dtype; {0, 0, 0, 0} for an unknown one.
ZIPCCL_HD Format format_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {2, 8, 7, 1};
    case DType::f16:
      return {2, 5, 10, 1};
    case DType::f32:
      return {4, 8, 23, 1};
    case DType::f64:
      return {8, 11, 52, 1};
    case DType::c32:
      return {2, 5, 10, 2};
    case DType::c64:
      return {4, 8, 23, 2};
    case DType::c128:
      return {8, 11, 52, 2};
    case DType::f8_e4m3fn:
    case DType::f8_e4m3fnuz:
      return {1, 4, 3, 1};
    case DType::f8_e5m2:
    case DType::f8_e5m2fnuz:
      return {1, 5, 2, 1};
    default:
      return {static_cast<uint8_t>(dtype_bytes(static_cast<uint8_t>(dtype))), 0, 0, 1};
  }
}

ZIPCCL_HD uint64_t element_count(DType dtype, uint64_t count) { return count * format_of(dtype).parts; }

// ---- Modes ----------------------------------------------------------------------------------------------------

// Mode of a tile: 3 * rest + shape for window tiles, and two more. rest: which bits of sign and mantissa travel.
constexpr uint32_t kShapes = 3;
constexpr uint32_t kRests = 4;
constexpr uint32_t kConstant = kShapes * kRests;
constexpr uint32_t kRaw = kConstant + 1;
constexpr uint32_t kModeCount = kRaw + 1;

// Which symbols the codes name. near and far differ in what becomes of base - 3 and base + 3; zeros is for tiles with
// many zeros, whose symbol is 0.
enum class Shape : uint8_t { near = 0, far = 1, zeros = 2 };

constexpr int kLevels = 4;

// The symbols that a level (0 to 3) names, one to a byte, that of code 0 lowest. Sums are modulo 256.
ZIPCCL_HD uint32_t level_symbols(Shape shape, uint32_t base, int level) {
  uint32_t offsets = 0;  // from the base
  if (level == 0) offsets = 0x020100;
  if (level == 1) offsets = shape == Shape::near ? 0x03FEFF : shape == Shape::far ? 0xFDFEFF : 0xFEFF00;
  if (level == 2) offsets = shape == Shape::near ? 0xFBFCFD : shape == Shape::far ? 0xFBFC03 : 0xFCFD03;
  if (level == 3) offsets = shape == Shape::zeros ? 0xF9FAFB : 0x04F9FA;
  const uint32_t bases = base * 0x010101;
  const uint32_t sums = ((offsets & 0x7F7F7F) + (bases & 0x7F7F7F)) ^ ((offsets ^ bases) & 0x808080);
  return shape == Shape::zeros && level == 0 ? sums & 0xFFFF00 : sums;  // code 0 of level 1 is symbol 0 itself
}

// Bits of sign and mantissa that travel: all, or those of a number that a shorter type holds. 0: not for this format.
ZIPCCL_HD uint32_t rest_bits(const Format& f, uint32_t rest) {
  const uint32_t all = 1 + f.mantissa_bits;
  const uint32_t bits = rest == 0 ? all : rest == 1 ? 8 : rest == 2 ? 11 : rest == 3 ? 24 : 0;  // bf16, f16, f32
  const bool offered = rest == 0 || (f.bytes >= 4 && bits < all);
  return offered ? bits : 0;
}

ZIPCCL_HD bool is_window(uint32_t mode) { return mode < kConstant; }
ZIPCCL_HD Shape shape_of(uint32_t mode) { return static_cast<Shape>(mode % kShapes); }
ZIPCCL_HD uint32_t rest_of(uint32_t mode) { return mode / kShapes; }

// ---- Sizes ----------------------------------------------------------------------------------------------------

// An array of m fields of the given bits, padded.
ZIPCCL_HD uint32_t array_bytes(uint32_t bits, uint32_t m) {
  return static_cast<uint32_t>(align_up((static_cast<uint64_t>(bits) * m + 7) / 8));
}

// Where the arrays of m rests of `bits` bits end: bits / 8 arrays of bytes, then one each of 4, 2 and 1 bits where that
// bit of `bits` is set.
ZIPCCL_HD uint32_t rest_bytes(uint32_t bits, uint32_t m) {
  uint32_t n = bits / 8 * array_bytes(8, m);
  for (uint32_t b = 4; b > 0; b /= 2) n += bits & b ? array_bytes(b, m) : 0;
  return n;
}

ZIPCCL_HD uint32_t window_bytes(uint32_t bits, uint32_t m) { return rest_bytes(bits, m) + array_bytes(2, m); }

// Of the unit of a tile whose mode is valid for its format.
ZIPCCL_HD uint32_t unit_bytes(const Format& f, uint32_t mode, uint32_t m) {
  if (mode == kRaw) return static_cast<uint32_t>(align_up(static_cast<uint64_t>(f.bytes) * m));
  return is_window(mode) ? window_bytes(rest_bits(f, rest_of(mode)), m) : 0;
}

ZIPCCL_HD uint32_t level_bytes(uint32_t codes) { return (codes + 3) / 4; }

// More dynamic bytes than this no tile has: all elements at every level, and no code names any.
constexpr uint32_t kMaxDynamic = 3 * kTileValues / 4 + kTileValues;
static_assert(kMaxDynamic < 4096, "a tile word has 12 bits for it");

// What the tables may say about a tile of m elements.
ZIPCCL_HD bool valid_tile(const Format& f, uint32_t mode, uint32_t base, uint32_t dynamic, uint32_t m) {
  if (mode == kConstant) return base == 0 && dynamic == f.bytes;
  if (mode == kRaw) return base == 0 && dynamic == 0;
  return is_window(mode) && f.exponent_bits != 0 && rest_bits(f, rest_of(mode)) != 0 &&
         dynamic <= 3 * level_bytes(m) + m;
}

// A window tile must be smaller than the same tile raw.
ZIPCCL_HD bool window_pays(const Format& f, uint32_t bits, uint32_t dynamic, uint32_t m) {
  return window_bytes(bits, m) + dynamic < f.bytes * m;
}

// Tables are those of code fast, for elements. Upper bound of a frame; raw tiles are the largest.
ZIPCCL_HD uint64_t frame_limit(DType dtype, uint64_t count) {
  const uint64_t elements = element_count(dtype, count), bytes = count * dtype_bytes(static_cast<uint8_t>(dtype));
  return align_up(tables_end(elements) + bytes + kFrameAlign * (group_count(elements) + 1));
}

// ---- Elements -------------------------------------------------------------------------------------------------

// Symbol of a double's exponent: that of the same number as a float, so only for exponents that floats have, and for
// zero, infinity and NaN. Not a byte (256 or more) otherwise.
ZIPCCL_HD uint32_t narrow_exponent(uint32_t e) {
  if (e == 0) return 0;
  if (e == 2047) return 255;
  return e >= 897 && e <= 1150 ? e - 896 : 256;
}
ZIPCCL_HD uint32_t widen_exponent(uint32_t symbol) { return symbol == 0 ? 0 : symbol == 255 ? 2047 : symbol + 896; }

// ---- The encoder's choices -------------------------------------------------------------------------------------
// Part of the encoder, not of the format.

// The shortest rest that loses nothing. `mantissas`: all of the tile, by or.
ZIPCCL_HD uint32_t choose_rest(const Format& f, uint64_t mantissas) {
  uint32_t best = 0;
  for (uint32_t rest = 1; rest < kRests; ++rest) {
    const uint32_t bits = rest_bits(f, rest);
    if (bits == 0 || (mantissas & ((uint64_t{1} << (f.mantissa_bits + 1 - bits)) - 1)) != 0) continue;
    if (bits < rest_bits(f, best)) best = rest;
  }
  return best;
}

// Base and shape. From h[i], the number of symbols of the tile that are mean - 5 + i modulo 256,
// mean being that of the symbols that are not 0.
constexpr uint32_t kCandidates = 4;
constexpr uint32_t kCounted = kCandidates + 6;
constexpr uint32_t kFirstCounted = 5;  // below the mean

struct Choice {
  Shape shape;
  uint8_t base;
};

ZIPCCL_HD Choice choose(uint32_t mean, const uint32_t (&h)[kCounted], uint32_t zeros, uint32_t m) {
  uint32_t best = 0, best_score = 0, below = 0, above = 0;  // base - 3 and base + 3
  for (uint32_t k = 0; k < kCandidates; ++k) {              // base = mean - 2 + k; h[k + 3] counts the base itself
    const uint32_t first = h[k + 3] + h[k + 4] + h[k + 5];
    const uint32_t second = h[k + 2] + h[k + 1] + (h[k] > h[k + 6] ? h[k] : h[k + 6]);
    const uint32_t score = 2 * first + second;  // elements named at level 1, and at level 1 or 2
    if (score > best_score) {
      best = k;
      best_score = score;
      below = h[k];
      above = h[k + 6];
    }
  }
  const uint8_t base = static_cast<uint8_t>(mean - 2 + best);
  if (32 * zeros > m) return {Shape::zeros, base};
  return {below > above ? Shape::far : Shape::near, base};
}

}  // namespace dense
}  // namespace zipccl
