// Tiles of Code::dense with vector instructions: what dense_avx2.cpp, dense_avx512.cpp and dense_elements_avx2.cpp
// share. Whole tiles only: the last, shorter tile of a tensor goes to the scalar kernels.
//
// A level takes an array of symbols, packs their codes, and gathers the symbols that no code names in the array of the
// next level; the decoder goes through the levels backwards and spreads them. That is what the instruction sets do
// differently. Elements of both go to symbols and rests, and back, in dense_elements_avx2.cpp.
#pragma once

#include "codec/cpu.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace zipccl {
namespace cpu {

ZIPCCL_AVX2 inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
ZIPCCL_AVX2 inline void store256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
ZIPCCL_AVX2 inline __m256i bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }

// a | b by bits of mask: mask ? a : b
ZIPCCL_AVX2 inline __m256i select(__m256i mask, __m256i a, __m256i b) {
  return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}

// 32 bytes below 4 -> 8 bytes, four to each.
ZIPCCL_AVX2 inline uint64_t pack_twos(__m256i v) {
  const __m256i pairs = _mm256_maddubs_epi16(v, _mm256_set1_epi16(0x0401));
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
  const __m256i first_bytes = _mm256_shuffle_epi8(fours, _mm256_set1_epi32(0x0C080400));
  return static_cast<uint32_t>(_mm256_cvtsi256_si32(first_bytes)) |
         static_cast<uint64_t>(static_cast<uint32_t>(_mm256_extract_epi32(first_bytes, 4))) << 32;
}

// The other way round, as masks: -1 in a byte where bit 0, or bit 1, of its field is set.
ZIPCCL_AVX2 inline void spread_twos(uint64_t packed, __m256i* bit0, __m256i* bit1) {
  const __m256i byte_of =
      _mm256_setr_epi64x(0x0101010100000000, 0x0303030302020202, 0x0505050504040404, 0x0707070706060606);
  const __m256i x = _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<int64_t>(packed)), byte_of);
  const __m256i low = _mm256_set1_epi32(0x40100401), high = _mm256_set1_epi32(static_cast<int>(0x80200802u));
  *bit0 = _mm256_cmpeq_epi8(_mm256_and_si256(x, low), low);
  *bit1 = _mm256_cmpeq_epi8(_mm256_and_si256(x, high), high);
}

// Symbols of a tile of elements that have an exponent. Formats with one rest: their rests, too, to the arrays that
// begin at `unit`; others: all mantissas by or. False: an exponent has no symbol.
bool dense_split(const dense::Format& format, const uint8_t* src, uint8_t* symbols, uint8_t* unit, uint64_t* mantissas);
inline bool has_one_rest(const dense::Format& format) { return format.bytes < 4; }

// Rests of `bits` bits, of other formats, to their arrays.
void dense_write_rests(const dense::Format& format, uint32_t bits, const uint8_t* src, uint8_t* unit);

// From rests and symbols to elements.
void dense_join(const dense::Format& format, uint32_t bits, const uint8_t* unit, const uint8_t* symbols, uint8_t* dst);

// Unnamed codes among the first n.
ZIPCCL_AVX2 inline uint32_t count_unnamed(const uint8_t* codes, uint32_t n) {
  uint64_t count = 0;
  uint32_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const uint64_t x = load<uint64_t>(codes + i / 4);
    count += static_cast<uint64_t>(_mm_popcnt_u64(x & x >> 1 & 0x5555555555555555));
  }
  if (i < n) {
    const uint64_t x = _bzhi_u64(load<uint64_t>(codes + i / 4), 2 * (n - i));
    count += static_cast<uint64_t>(_mm_popcnt_u64(x & x >> 1 & 0x5555555555555555));
  }
  return static_cast<uint32_t>(count);
}

// Whether code 0 of a level means symbol 0, which its place says nothing of.
inline bool names_zero(dense::Choice choice, int level) { return choice.shape == dense::Shape::zeros && level == 0; }

// Codes of a level by the place of a symbol: its distance from base - 7, which is 0 to 11 for all that codes name, and
// 15 for all that are further away.
inline void level_codes(dense::Choice choice, int level, uint8_t (&codes)[16]) {
  const uint32_t named = dense::level_symbols(choice.shape, choice.base, level);
  std::memset(codes, 3, sizeof(codes));
  for (int c = 2; c >= 0; --c) {
    if (names_zero(choice, level) && c == 0) continue;
    codes[((named >> (8 * c)) - choice.base + 7) & 0xFF] = static_cast<uint8_t>(c);
  }
}

// Arrays of a tile's symbols; kernels read and write up to 64 bytes behind their end.
constexpr uint32_t kSymbolsRoom = kTileValues + 64;

// DenseKernels::encode. Levels:
//   bool all_equal(src, element_bytes)         whether all elements of the tile are
//   Choice choose(symbols)                     base and shape of the tile's
//   uint32_t encode_level(choice, level, symbols, n, to, left)
//                                              codes of symbols[n] to `to`, up to 16 bytes more than it has; unnamed
//                                              symbols to `left`, whose number it returns
//   void decode_level(named, codes, n, left, symbols)
//                                              symbols[n] from their codes and the symbols of the unnamed ones
//   split, join                                as dense_split(), dense_join()
template <typename Levels>
DenseTile encode_dense_tile(const dense::Format& format, const uint8_t* src, uint32_t m, uint8_t* unit,
                            uint8_t* dynamic) {
  if (m != kTileValues) return kDenseScalar.encode(format, src, m, unit, dynamic);
  if (Levels::all_equal(src, format.bytes)) {
    std::memcpy(dynamic, src, format.bytes);
    return {dense::kConstant, 0, format.bytes};
  }
  const auto raw = [&]() -> DenseTile {
    std::memcpy(unit, src, static_cast<size_t>(format.bytes) * kTileValues);
    return {dense::kRaw, 0, 0};
  };
  if (format.exponent_bits == 0) return raw();

  alignas(64) uint8_t symbols[kSymbolsRoom];
  uint64_t mantissas = 0;
  if (!Levels::split(format, src, symbols, unit, &mantissas)) return raw();
  const uint32_t rest = dense::choose_rest(format, mantissas), bits = dense::rest_bits(format, rest);
  const uint32_t rests = dense::rest_bytes(bits, kTileValues);
  const dense::Choice choice = Levels::choose(symbols);

  alignas(64) uint8_t codes[kTileValues / 4];
  alignas(64) uint8_t left[kSymbolsRoom];
  uint32_t n = Levels::encode_level(choice, 0, symbols, kTileValues, codes, left), size = 0;
  for (int level = 1; level < dense::kLevels; ++level) {
    uint8_t* const to = dynamic + size;
    size += dense::level_bytes(n);
    n = Levels::encode_level(choice, level, left, n, to, left);  // written no further than it has been read
  }
  if (!dense::window_pays(format, bits, size + n, kTileValues)) return raw();
  std::memcpy(dynamic + size, left, n);
  if (!has_one_rest(format)) dense_write_rests(format, bits, src, unit);
  std::memcpy(unit + rests, codes, sizeof(codes));
  return {static_cast<uint8_t>(dense::kShapes * rest + static_cast<uint32_t>(choice.shape)), choice.base,
          static_cast<uint16_t>(size + n)};
}

template <typename Levels>
bool decode_dense_symbols(DenseTile tile, const uint8_t* codes, const uint8_t* dynamic, uint8_t* symbols) {
  const uint8_t* level_codes[dense::kLevels] = {codes};
  uint32_t count[dense::kLevels + 1] = {kTileValues, count_unnamed(codes, kTileValues)}, used = 0;
  for (int level = 1; level < dense::kLevels; ++level) {
    level_codes[level] = dynamic + used;
    used += dense::level_bytes(count[level]);
    if (used > tile.dynamic) return false;
    count[level + 1] = count_unnamed(level_codes[level], count[level]);
  }
  if (used + count[dense::kLevels] != tile.dynamic) return false;

  alignas(64) uint8_t room[2][kSymbolsRoom];
  const uint8_t* left = dynamic + used;
  for (int level = dense::kLevels - 1; level >= 0; --level) {
    uint8_t* const to = level == 0 ? symbols : room[level % 2];
    const uint32_t named = dense::level_symbols(dense::shape_of(tile.mode), tile.base, level);
    Levels::decode_level(named, level_codes[level], count[level], left, to);
    left = to;
  }
  return true;
}

// DenseKernels::decode.
template <typename Levels>
bool decode_dense_tile(const dense::Format& format, DenseTile tile, const uint8_t* unit, const uint8_t* dynamic,
                       uint32_t m, uint8_t* dst) {
  if (m != kTileValues || tile.mode == dense::kConstant) {
    return kDenseScalar.decode(format, tile, unit, dynamic, m, dst);
  }
  if (tile.mode == dense::kRaw) {
    std::memcpy(dst, unit, static_cast<size_t>(format.bytes) * kTileValues);
    return true;
  }
  const uint32_t bits = dense::rest_bits(format, dense::rest_of(tile.mode));
  alignas(64) uint8_t symbols[kSymbolsRoom];
  if (!decode_dense_symbols<Levels>(tile, unit + dense::rest_bytes(bits, kTileValues), dynamic, symbols)) return false;
  Levels::join(format, bits, unit, symbols, dst);
  return true;
}

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
