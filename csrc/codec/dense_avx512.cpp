// Tiles of Code::dense with AVX-512 (VBMI2): the levels of codes, 64 symbols at a time. The two bits of 64 codes are
// two masks; a compression by the mask of unnamed codes gathers their symbols, and an expansion spreads them.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 and older, of their own immintrin.h (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "codec/bf16_avx512.h"
#include "codec/dense_simd.h"

#if defined(__x86_64__)

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kAtOnce = 64;

ZIPCCL_AVX512 bool all_equal(const uint8_t* src, uint32_t element_bytes) {
  const uint32_t bytes = element_bytes * kTileValues;
  if (std::memcmp(src, src + element_bytes, 64) != 0) return false;
  const __m512i first = load512(src);
  for (uint32_t i = 64; i < bytes; i += 64) {
    if (_mm512_cmpneq_epi64_mask(load512(src + i), first)) return false;
  }
  return true;
}

ZIPCCL_AVX512 inline uint32_t sum_u64(__m512i v) { return static_cast<uint32_t>(_mm512_reduce_add_epi64(v)); }

// Sums of bytes in each 64 bits.
ZIPCCL_AVX512 inline __m512i sums_of(__m512i v) { return _mm512_sad_epu8(v, _mm512_setzero_si512()); }

// How many of the tile's symbols are first, first + 1, ...: two counters of 4 bits to a byte, which half a tile does
// not overflow, so that a shuffle from a table and an addition count for two symbols.
ZIPCCL_AVX512 void count(const uint8_t* symbols, uint32_t first, uint32_t (&h)[dense::kCounted]) {
  constexpr uint32_t kCounters = dense::kCounted / 2, kHalf = kTileValues / 2;
  static_assert(kHalf / kAtOnce < 16 && dense::kCounted % 2 == 0, "");
  const __m512i start = all_bytes(static_cast<int>(first)), last = all_bytes(15), low = all_bytes(15);
  __m512i n[2][kCounters];
  for (uint32_t half = 0; half < 2; ++half) {
    for (uint32_t k = 0; k < kCounters; ++k) n[half][k] = _mm512_setzero_si512();
    for (uint32_t i = 0; i < kHalf; i += kAtOnce) {
      const __m512i place = _mm512_min_epu8(_mm512_sub_epi8(load512(symbols + half * kHalf + i), start), last);
      __m512i one = _mm512_set4_epi32(0, 0, 0, 0x1001);  // by place: 1 for the first of two, 16 for the second
      for (uint32_t k = 0; k < kCounters; ++k) {
        n[half][k] = _mm512_add_epi8(n[half][k], _mm512_shuffle_epi8(one, place));
        one = _mm512_bslli_epi128(one, 2);
      }
    }
  }
  for (uint32_t k = 0; k < kCounters; ++k) {
    const __m512i even = _mm512_add_epi8(_mm512_and_si512(n[0][k], low), _mm512_and_si512(n[1][k], low));
    const __m512i odd = _mm512_add_epi8(_mm512_and_si512(_mm512_srli_epi16(n[0][k], 4), low),
                                        _mm512_and_si512(_mm512_srli_epi16(n[1][k], 4), low));
    const uint64_t both = static_cast<uint64_t>(
        _mm512_reduce_add_epi64(_mm512_or_si512(sums_of(even), _mm512_slli_epi64(sums_of(odd), 32))));
    h[2 * k] = static_cast<uint32_t>(both);
    h[2 * k + 1] = static_cast<uint32_t>(both >> 32);
  }
}

ZIPCCL_AVX512 dense::Choice choose(const uint8_t* symbols) {
  __m512i sums = _mm512_setzero_si512(), nonzero_bytes = _mm512_setzero_si512();
  for (uint32_t i = 0; i < kTileValues; i += kAtOnce) {
    const __m512i v = load512(symbols + i);
    sums = _mm512_add_epi64(sums, sums_of(v));
    nonzero_bytes = _mm512_add_epi8(nonzero_bytes, _mm512_min_epu8(v, all_bytes(1)));
  }
  const uint32_t nonzero = sum_u64(sums_of(nonzero_bytes)), mean = mean_exponent(sum_u64(sums), nonzero);
  uint32_t h[dense::kCounted];
  count(symbols, mean - dense::kFirstCounted, h);
  return dense::choose(mean, h, kTileValues - nonzero, kTileValues);
}

ZIPCCL_AVX512 uint32_t encode_level(dense::Choice choice, int level, const uint8_t* symbols, uint32_t n, uint8_t* to,
                                    uint8_t* left) {
  alignas(16) uint8_t codes[16];
  level_codes(choice, level, codes);
  const __m512i code_of = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i first = all_bytes(choice.base - 7), last = all_bytes(15);
  const bool zero_has_code = names_zero(choice, level);
  uint8_t* end = left;
  for (uint32_t i = 0; i < n; i += kAtOnce) {
    const __m512i v = load512(symbols + i);
    const __m512i place = _mm512_min_epu8(_mm512_sub_epi8(v, first), last);
    __mmask64 coded = n - i < kAtOnce ? _bzhi_u64(~uint64_t{0}, n - i) : ~uint64_t{0};
    if (zero_has_code) coded &= _mm512_test_epi8_mask(v, v);
    const __m512i code = _mm512_maskz_shuffle_epi8(coded, code_of, place);
    const __m512i pairs = _mm512_maddubs_epi16(code, _mm512_set1_epi16(0x0401));
    const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i / 4), _mm512_cvtepi32_epi8(fours));
    const __mmask64 unnamed = _mm512_cmpeq_epi8_mask(code, all_bytes(3));
    store512(end, _mm512_maskz_compress_epi8(unnamed, v));
    end += _mm_popcnt_u64(unnamed);
  }
  return static_cast<uint32_t>(end - left);
}

ZIPCCL_AVX512 void decode_level(uint32_t named, const uint8_t* codes, uint32_t n, const uint8_t* left,
                                uint8_t* symbols) {
  constexpr uint64_t kBit0 = 0x5555555555555555, kBit1 = 2 * kBit0;
  const __m512i s0 = all_bytes(static_cast<int>(named)), s1 = all_bytes(static_cast<int>(named >> 8)),
                s2 = all_bytes(static_cast<int>(named >> 16));
  for (uint32_t i = 0; i < n; i += kAtOnce) {
    const uint64_t low = load<uint64_t>(codes + i / 4), high = load<uint64_t>(codes + i / 4 + 8);
    const __mmask64 bit0 = _pext_u64(low, kBit0) | _pext_u64(high, kBit0) << 32;
    const __mmask64 bit1 = _pext_u64(low, kBit1) | _pext_u64(high, kBit1) << 32;
    const __mmask64 unnamed = bit0 & bit1;
    const __m512i symbol = _mm512_mask_mov_epi8(_mm512_mask_mov_epi8(s0, bit0, s1), bit1, s2);
    store512(symbols + i, _mm512_mask_expand_epi8(symbol, unnamed, load512(left)));
    left += _mm_popcnt_u64(unnamed);
  }
}

// ---- bf16 elements; others as with AVX2 -----------------------------------------------------------------------------

bool is_bf16(const dense::Format& format) { return format.mantissa_bits == 7; }

ZIPCCL_AVX512 bool split(const dense::Format& format, const uint8_t* src, uint8_t* symbols, uint8_t* unit,
                         uint64_t* mantissas) {
  if (!is_bf16(format)) return dense_split(format, src, symbols, unit, mantissas);
  for (uint32_t i = 0; i < kTileValues; i += kAtOnce) {
    const SplitBf16 values = split_bf16(src + 2 * i);
    store512(symbols + i, values.exponents);
    store512(unit + i, values.sign_mantissas);
  }
  return true;
}

ZIPCCL_AVX512 void join(const dense::Format& format, uint32_t bits, const uint8_t* unit, const uint8_t* symbols,
                        uint8_t* dst) {
  if (!is_bf16(format)) return dense_join(format, bits, unit, symbols, dst);
  for (uint32_t i = 0; i < kTileValues; i += kAtOnce) join_bf16(load512(unit + i), load512(symbols + i), dst + 2 * i);
}

struct Levels {
  static constexpr auto all_equal = cpu::all_equal;
  static constexpr auto choose = cpu::choose;
  static constexpr auto encode_level = cpu::encode_level;
  static constexpr auto decode_level = cpu::decode_level;
  static constexpr auto split = cpu::split;
  static constexpr auto join = cpu::join;
};

}  // namespace

const DenseKernels kDenseAvx512 = {encode_dense_tile<Levels>, decode_dense_tile<Levels>};

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
