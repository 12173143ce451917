// Tiles of Code::fast in plain C++: the reference that every other implementation must equal byte for byte.
#include "codec/cpu.h"

namespace zipccl {
namespace cpu {
namespace {

bool all_equal(const uint16_t* src, uint32_t m) {
  for (uint32_t i = 1; i < m; ++i) {
    if (src[i] != src[0]) return false;
  }
  return true;
}

// 3-bit code of an exponent: 1..7 inside the window, else 0.
uint32_t code_of(uint32_t e, uint32_t base) { return e - base < kWindowExponents ? e - base + 1 : 0; }

uint32_t choose_base(const uint16_t* src, uint32_t m) {
  uint32_t sum = 0, nonzero = 0;
  for (uint32_t i = 0; i < m; ++i) {
    if (!sampled(i)) continue;
    sum += exponent(src[i]);
    nonzero += exponent(src[i]) != 0;
  }
  const uint32_t mean = mean_exponent(sum, nonzero);
  uint32_t best_base = 0, best_inside = 0;
  for (int k = 0; k < kBaseCandidates; ++k) {
    const uint32_t base = candidate_base(mean, k);
    uint32_t inside = 0;
    for (uint32_t i = 0; i < m; ++i) inside += sampled(i) && code_of(exponent(src[i]), base) != 0;
    if (k == 0 || inside > best_inside) {
      best_base = base;
      best_inside = inside;
    }
  }
  return best_base;
}

Tile encode(const uint16_t* src, uint32_t m, uint8_t* unit, uint8_t* dynamic) {
  if (all_equal(src, m)) {
    store(dynamic, src[0]);
    return {TileMode::constant, 0, 2};
  }
  const uint64_t planes_begin = align_up(m);
  for (uint32_t i = 0; i < m; ++i) unit[i] = static_cast<uint8_t>(sign_mantissa(src[i]));
  std::memset(unit + m, 0, planes_begin - m);

  const uint32_t base = choose_base(src, m);
  uint32_t planes[3][kPlaneWords] = {};
  uint32_t escapes = 0;
  for (uint32_t word = 0; word < kPlaneWords; ++word) {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      const uint32_t i = plane_value(word, bit);
      if (i >= m) continue;
      const uint32_t e = exponent(src[i]);
      const uint32_t code = code_of(e, base);
      for (uint32_t k = 0; k < 3; ++k) planes[k][word] |= ((code >> k) & 1u) << bit;
      if (code == 0) dynamic[escapes++] = static_cast<uint8_t>(e);
    }
  }
  if (window_pays(m, escapes)) {
    std::memcpy(unit + planes_begin, planes, kPlanesBytes);
    return {TileMode::window, static_cast<uint8_t>(base), static_cast<uint16_t>(escapes)};
  }
  for (uint32_t i = 0; i < m; ++i) dynamic[i] = static_cast<uint8_t>(exponent(src[i]));
  return {TileMode::raw, 0, static_cast<uint16_t>(m)};
}

bool decode_window(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m, uint16_t* dst) {
  uint32_t planes[3][kPlaneWords];
  std::memcpy(planes, unit + align_up(m), kPlanesBytes);
  uint32_t escapes = 0;
  for (uint32_t word = 0; word < kPlaneWords; ++word) {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      const uint32_t i = plane_value(word, bit);
      if (i >= m) continue;
      uint32_t code = 0;
      for (uint32_t k = 0; k < 3; ++k) code |= ((planes[k][word] >> bit) & 1u) << k;
      uint32_t e;
      if (code != 0) {
        e = tile.base + code - 1;
      } else {
        if (escapes == tile.dynamic) return false;
        e = dynamic[escapes++];
      }
      dst[i] = static_cast<uint16_t>(join(unit[i], e));
    }
  }
  return escapes == tile.dynamic;
}

bool decode(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m, uint16_t* dst) {
  switch (tile.mode) {
    case TileMode::window:
      return decode_window(tile, unit, dynamic, m, dst);
    case TileMode::held:
    case TileMode::constant:
      for (uint32_t i = 0; i < m; ++i) dst[i] = load<uint16_t>(dynamic);
      return true;
    case TileMode::raw:
      for (uint32_t i = 0; i < m; ++i) dst[i] = static_cast<uint16_t>(join(unit[i], dynamic[i]));
      return true;
  }
  return false;
}

}  // namespace

const TileKernels kScalarKernels = {encode, decode};

}  // namespace cpu
}  // namespace zipccl
