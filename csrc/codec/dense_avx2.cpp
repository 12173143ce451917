// Tiles of Code::dense with AVX2: the levels of codes, 32 symbols at a time. Unnamed symbols are gathered and spread by
// shuffles from a table, 8 at a time.
#include <array>

#include "codec/dense_simd.h"

#if defined(__x86_64__)

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kAtOnce = 32;

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

struct LevelCodes {
  __m256i of_place;  // level_codes()
  __m256i first;     // base - 7
  __m256i of_zero;   // -1 where names_zero()
};

ZIPCCL_AVX2 LevelCodes codes_of_level(dense::Choice choice, int level) {
  alignas(16) uint8_t codes[16];
  level_codes(choice, level, codes);
  const __m128i one = _mm_load_si128(reinterpret_cast<const __m128i*>(codes));
  return {_mm256_broadcastsi128_si256(one), bytes(choice.base - 7), bytes(names_zero(choice, level) ? -1 : 0)};
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

ZIPCCL_AVX2 uint32_t encode_level(dense::Choice choice, int level, const uint8_t* symbols, uint32_t n, uint8_t* to,
                                  uint8_t* left) {
  const LevelCodes codes = codes_of_level(choice, level);
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

struct Levels {
  static constexpr auto all_equal = cpu::all_equal;
  static constexpr auto choose = cpu::choose;
  static constexpr auto encode_level = cpu::encode_level;
  static constexpr auto decode_level = cpu::decode_level;
  static constexpr auto split = dense_split;
  static constexpr auto join = dense_join;
};

}  // namespace

const DenseKernels kDenseAvx2 = {encode_dense_tile<Levels>, decode_dense_tile<Levels>};

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
