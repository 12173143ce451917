// Tiles of Code::dense with AVX2: the levels of codes. Whole tiles only: the last, shorter tile of a tensor goes to the
// scalar kernels.
//
// A level takes an array of symbols, 32 at a time, packs their codes, and gathers the symbols that no code names in the
// array of the next level; the decoder goes through the levels backwards and spreads them. Both move 8 bytes at a time
// by a shuffle from a table.
#include "codec/dense_avx2.h"

#include <array>

#if defined(__x86_64__)

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kAtOnce = 32;
constexpr uint32_t kRoom = kTileValues + kAtOnce;  // kernels read and write that much behind an array

// For each set of 8 bytes: where they come from when those in the set are moved to the front, and, to undo that, where
// each byte of the set finds its own (0x80: not in the set, zero).
struct Shuffles {
  std::array<std::array<uint8_t, 8>, 256> gather, spread;
};
constexpr Shuffles make_shuffles() {
  Shuffles s{};
  for (uint32_t set = 0; set < 256; ++set) {
    uint8_t n = 0;
    for (uint8_t i = 0; i < 8; ++i) {
      s.spread[set][i] = 0x80;
      if (!(set >> i & 1)) continue;
      s.spread[set][i] = n;
      s.gather[set][n++] = i;
    }
  }
  return s;
}
alignas(64) constexpr Shuffles kShuffles = make_shuffles();

ZIPCCL_AVX2 inline __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }

ZIPCCL_AVX2 inline uint32_t sum_u64(__m256i v) {
  const __m128i s = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  return static_cast<uint32_t>(_mm_extract_epi64(s, 0) + _mm_extract_epi64(s, 1));
}

ZIPCCL_AVX2 inline __m256i add_bytes(__m256i sums, __m256i v) {
  return _mm256_add_epi64(sums, _mm256_sad_epu8(v, _mm256_setzero_si256()));
}

ZIPCCL_AVX2 bool all_equal(const uint8_t* src, uint32_t element_bytes) {
  const uint32_t bytes = element_bytes * kTileValues;
  if (std::memcmp(src, src + element_bytes, 32) != 0) return false;
  const __m256i first = load256(src);
  for (uint32_t i = 32; i < bytes; i += 32) {
    const __m256i differ = _mm256_xor_si256(load256(src + i), first);
    if (!_mm256_testz_si256(differ, differ)) return false;
  }
  return true;
}

ZIPCCL_AVX2 dense::Choice choose(const uint8_t* symbols) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sums = zero, zero_bytes = zero;
  for (uint32_t i = 0; i < kTileValues; i += kAtOnce) {
    const __m256i v = load256(symbols + i);
    sums = add_bytes(sums, v);
    zero_bytes = _mm256_sub_epi8(zero_bytes, _mm256_cmpeq_epi8(v, zero));
  }
  const uint32_t zeros = sum_u64(add_bytes(zero, zero_bytes));
  const uint32_t mean = mean_exponent(sum_u64(sums), kTileValues - zeros);
  const uint32_t first = mean - dense::kFirstCounted;
  uint32_t h[dense::kCounted];
  for (uint32_t k = 0; k < dense::kCounted; k += 5) {  // five sums stay in registers
    __m256i n[5], wanted[5];
    for (uint32_t j = 0; j < 5; ++j) {
      n[j] = zero;
      wanted[j] = bytes(static_cast<int>(first + k + j));
    }
    for (uint32_t i = 0; i < kTileValues; i += kAtOnce) {
      const __m256i v = load256(symbols + i);
      for (uint32_t j = 0; j < 5; ++j) n[j] = _mm256_sub_epi8(n[j], _mm256_cmpeq_epi8(v, wanted[j]));
    }
    for (uint32_t j = 0; j < 5; ++j) h[k + j] = sum_u64(add_bytes(zero, n[j]));
  }
  return dense::choose(mean, h, zeros, kTileValues);
}

// Codes of a level by the place of a symbol: its distance from base - 7, which is 0 to 11 for all that codes name.
struct LevelCodes {
  __m256i of_place;
  __m256i first;    // base - 7
  __m256i of_zero;  // for symbol 0, which shape zeros names at level 1: -1 where its place says nothing
};

ZIPCCL_AVX2 LevelCodes level_codes(dense::Choice choice, int level) {
  const uint32_t named = dense::level_symbols(choice.shape, choice.base, level);
  alignas(16) uint8_t codes[16];
  std::memset(codes, 3, sizeof(codes));
  const bool zeros = choice.shape == dense::Shape::zeros;
  for (int c = 2; c >= 0; --c) {
    if (zeros && level == 0 && c == 0) continue;
    codes[((named >> (8 * c)) - choice.base + 7) & 0xFF] = static_cast<uint8_t>(c);
  }
  const __m128i one = _mm_load_si128(reinterpret_cast<const __m128i*>(codes));
  return {_mm256_broadcastsi128_si256(one), bytes(choice.base - 7), bytes(zeros && level == 0 ? -1 : 0)};
}

ZIPCCL_AVX2 inline __m256i code_of(const LevelCodes& codes, __m256i symbols) {
  const __m256i place = _mm256_min_epu8(_mm256_sub_epi8(symbols, codes.first), bytes(15));
  const __m256i zero = _mm256_and_si256(_mm256_cmpeq_epi8(symbols, _mm256_setzero_si256()), codes.of_zero);
  return _mm256_andnot_si256(zero, _mm256_shuffle_epi8(codes.of_place, place));
}

// Moves those of 32 bytes that are in the set to `to`; returns its end. Up to 8 bytes behind it are overwritten.
ZIPCCL_AVX2 inline uint8_t* gather(const uint8_t* from, uint32_t set, uint8_t* to) {
  for (uint32_t b = 0; b < 4; ++b, set >>= 8) {
    const __m128i moved = _mm_shuffle_epi8(load64(from + 8 * b), load64(kShuffles.gather[set & 0xFF].data()));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), moved);
    to += _mm_popcnt_u32(set & 0xFF);
  }
  return to;
}

// The other way round: the next bytes of *from to the places in the set, zero elsewhere.
ZIPCCL_AVX2 inline __m256i spread(const uint8_t** from, uint32_t set) {
  __m128i part[4];
  for (uint32_t b = 0; b < 4; ++b, set >>= 8) {
    part[b] = _mm_shuffle_epi8(load64(*from), load64(kShuffles.spread[set & 0xFF].data()));
    *from += _mm_popcnt_u32(set & 0xFF);
  }
  return _mm256_set_m128i(_mm_unpacklo_epi64(part[2], part[3]), _mm_unpacklo_epi64(part[0], part[1]));
}

// -1 in the first n bytes.
ZIPCCL_AVX2 inline __m256i first_bytes(uint32_t n) {
  const __m256i i = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
                                     23, 24, 25, 26, 27, 28, 29, 30, 31);
  return _mm256_cmpgt_epi8(bytes(static_cast<int>(n < kAtOnce ? n : kAtOnce)), i);
}

// One level: codes of symbols[n] to `to`, up to 8 bytes more than it has; unnamed symbols to `left`, whose number it
// returns. `left` may be `symbols`: it is written no further than it has been read, 8 bytes at a time.
ZIPCCL_AVX2 uint32_t encode_level(const LevelCodes& codes, const uint8_t* symbols, uint32_t n, uint8_t* to,
                                  uint8_t* left) {
  uint8_t* end = left;
  for (uint32_t i = 0; i < n; i += kAtOnce) {
    const __m256i v = load256(symbols + i);
    __m256i code = code_of(codes, v);
    if (n - i < kAtOnce) code = _mm256_and_si256(code, first_bytes(n - i));
    store(to + i / 4, pack_twos(code));
    const uint32_t unnamed = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, bytes(3))));
    end = gather(symbols + i, unnamed, end);
  }
  return static_cast<uint32_t>(end - left);
}

// Unnamed codes among the first n.
ZIPCCL_AVX2 inline uint32_t count_unnamed(const uint8_t* codes, uint32_t n) {
  uint64_t count = 0;
  uint32_t i = 0;
  for (; i + kAtOnce <= n; i += kAtOnce) {
    const uint64_t x = load<uint64_t>(codes + i / 4);
    count += static_cast<uint64_t>(_mm_popcnt_u64(x & x >> 1 & 0x5555555555555555));
  }
  if (i < n) {
    const uint64_t x = _bzhi_u64(load<uint64_t>(codes + i / 4), 2 * (n - i));
    count += static_cast<uint64_t>(_mm_popcnt_u64(x & x >> 1 & 0x5555555555555555));
  }
  return static_cast<uint32_t>(count);
}

// One level backwards: symbols of n elements from their codes and the symbols of the unnamed ones.
ZIPCCL_AVX2 void decode_level(uint32_t named, const uint8_t* codes, uint32_t n, const uint8_t* left, uint8_t* symbols) {
  const __m256i s0 = bytes(static_cast<int>(named)), s1 = bytes(static_cast<int>(named >> 8)),
                s2 = bytes(static_cast<int>(named >> 16));
  for (uint32_t i = 0; i < n; i += kAtOnce) {
    __m256i bit0, bit1;
    spread_twos(load<uint64_t>(codes + i / 4), &bit0, &bit1);
    const __m256i unnamed = _mm256_and_si256(bit0, bit1);
    const __m256i symbol = _mm256_blendv_epi8(_mm256_blendv_epi8(s0, s1, bit0), s2, bit1);
    const __m256i rest = spread(&left, static_cast<uint32_t>(_mm256_movemask_epi8(unnamed)));
    store256(symbols + i, _mm256_blendv_epi8(symbol, rest, unnamed));
  }
}

ZIPCCL_AVX2 DenseTile encode(const dense::Format& format, const uint8_t* src, uint32_t m, uint8_t* unit,
                             uint8_t* dynamic) {
  if (m != kTileValues) return kDenseScalar.encode(format, src, m, unit, dynamic);
  if (all_equal(src, format.bytes)) {
    std::memcpy(dynamic, src, format.bytes);
    return {dense::kConstant, 0, format.bytes};
  }
  const auto raw = [&]() -> DenseTile {
    std::memcpy(unit, src, static_cast<size_t>(format.bytes) * kTileValues);
    return {dense::kRaw, 0, 0};
  };
  if (format.exponent_bits == 0) return raw();

  alignas(32) uint8_t symbols[kRoom];
  uint64_t mantissas = 0;
  if (!dense_symbols(format, src, symbols, &mantissas)) return raw();
  const uint32_t rest = dense::choose_rest(format, mantissas), bits = dense::rest_bits(format, rest);
  const uint32_t rests = dense::rest_bytes(bits, kTileValues);
  const dense::Choice choice = choose(symbols);

  alignas(32) uint8_t codes[kTileValues / 4];
  alignas(32) uint8_t left[kRoom];
  uint32_t n = encode_level(level_codes(choice, 0), symbols, kTileValues, codes, left), size = 0;
  for (int level = 1; level < dense::kLevels; ++level) {
    uint8_t* const to = dynamic + size;
    size += dense::level_bytes(n);
    n = encode_level(level_codes(choice, level), left, n, to, left);
  }
  if (!dense::window_pays(format, bits, size + n, kTileValues)) return raw();
  std::memcpy(dynamic + size, left, n);
  dense_write_rests(format, bits, src, unit);
  std::memcpy(unit + rests, codes, sizeof(codes));
  return {static_cast<uint8_t>(dense::kShapes * rest + static_cast<uint32_t>(choice.shape)), choice.base,
          static_cast<uint16_t>(size + n)};
}

ZIPCCL_AVX2 bool decode_symbols(DenseTile tile, const uint8_t* codes, const uint8_t* dynamic, uint8_t* symbols) {
  const uint8_t* level_codes[dense::kLevels] = {codes};
  uint32_t count[dense::kLevels + 1] = {kTileValues, count_unnamed(codes, kTileValues)}, used = 0;
  for (int level = 1; level < dense::kLevels; ++level) {
    level_codes[level] = dynamic + used;
    used += dense::level_bytes(count[level]);
    if (used > tile.dynamic) return false;
    count[level + 1] = count_unnamed(level_codes[level], count[level]);
  }
  if (used + count[dense::kLevels] != tile.dynamic) return false;

  alignas(32) uint8_t room[2][kRoom];
  const uint8_t* left = dynamic + used;
  for (int level = dense::kLevels - 1; level >= 0; --level) {
    uint8_t* const to = level == 0 ? symbols : room[level % 2];
    const uint32_t named = dense::level_symbols(dense::shape_of(tile.mode), tile.base, level);
    decode_level(named, level_codes[level], count[level], left, to);
    left = to;
  }
  return true;
}

ZIPCCL_AVX2 bool decode(const dense::Format& format, DenseTile tile, const uint8_t* unit, const uint8_t* dynamic,
                        uint32_t m, uint8_t* dst) {
  if (m != kTileValues || tile.mode == dense::kConstant) {
    return kDenseScalar.decode(format, tile, unit, dynamic, m, dst);
  }
  if (tile.mode == dense::kRaw) {
    std::memcpy(dst, unit, static_cast<size_t>(format.bytes) * kTileValues);
    return true;
  }
  const uint32_t bits = dense::rest_bits(format, dense::rest_of(tile.mode));
  alignas(32) uint8_t symbols[kRoom];
  if (!decode_symbols(tile, unit + dense::rest_bytes(bits, kTileValues), dynamic, symbols)) return false;
  dense_join(format, bits, unit, symbols, dst);
  return true;
}

}  // namespace

const DenseKernels kDenseAvx2 = {encode, decode};

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
