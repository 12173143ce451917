// Tiles of Code::fast with AVX-512 (VBMI and VBMI2: Ice Lake, Zen 4 and later). Whole tiles only: the last, shorter
// tile of a tensor goes to the scalar kernels.
//
// Exponents are in plane order as in fast_avx2.cpp: 64 bytes are the exponents of two plane words, so a comparison's
// 64-bit mask is a piece of a plane, and a compression by the mask of escapes is what goes to the dynamic bytes.
// Between value order and plane order lies a 4 x 8 transpose of 8-byte pieces: 64 values of each of four runs, 256
// apart, are eight plane words.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 and older, of their own immintrin.h (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "codec/bf16_avx512.h"

#if defined(__x86_64__)

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kRuns = 4;                 // a plane word gathers 8 values from each of 4 runs...
constexpr uint32_t kRunValues = 256;          // ...this far apart
constexpr uint32_t kSteps = kPlaneWords / 8;  // eight words a step
constexpr uint32_t kPairs = kPlaneWords / 2;  // of words

ZIPCCL_AVX512 bool all_equal(const uint16_t* src) {
  if (src[0] != src[kTileValues - 1]) return false;
  const __m512i first = _mm512_set1_epi16(static_cast<int16_t>(src[0]));
  for (uint32_t i = 0; i < kTileValues; i += 64) {
    if (_mm512_cmpneq_epi16_mask(load512(src + i), first) | _mm512_cmpneq_epi16_mask(load512(src + i + 32), first)) {
      return false;
    }
  }
  return true;
}

// The encoder's choice of window (format/tile.h) from the 256 sampled exponents.
ZIPCCL_AVX512 uint32_t choose_base(const __m512i sample[kSteps]) {
  __m512i sums = _mm512_setzero_si512();
  uint64_t nonzero = 0;
  for (uint32_t s = 0; s < kSteps; ++s) {
    sums = _mm512_add_epi64(sums, _mm512_sad_epu8(sample[s], _mm512_setzero_si512()));
    nonzero += static_cast<uint64_t>(_mm_popcnt_u64(_mm512_test_epi8_mask(sample[s], sample[s])));
  }
  const uint32_t mean =
      mean_exponent(static_cast<uint32_t>(_mm512_reduce_add_epi64(sums)), static_cast<uint32_t>(nonzero));
  uint32_t best_base = 0;
  int64_t best_inside = 0;
  for (int k = 0; k < kBaseCandidates; ++k) {
    const uint32_t base = candidate_base(mean, k);
    const __m512i first = all_bytes(static_cast<int>(base)), last = all_bytes(kWindowExponents - 1);
    int64_t inside = 0;
    for (uint32_t s = 0; s < kSteps; ++s) {
      inside += _mm_popcnt_u64(_mm512_cmple_epu8_mask(_mm512_sub_epi8(sample[s], first), last));
    }
    if (k == 0 || inside > best_inside) {
      best_base = base;
      best_inside = inside;
    }
  }
  return best_base;
}

// Writes the planes and the escaped exponents, returns the number of the latter. `exponents` in plane order.
ZIPCCL_AVX512 uint32_t encode_planes(const uint8_t* exponents, uint32_t base, uint8_t* planes, uint8_t* dynamic) {
  const __m512i before = all_bytes(static_cast<int>(base) - 1);  // code = exponent - before, where that is 1..7
  const uint8_t* const begin = dynamic;
  for (uint32_t p = 0; p < kPairs; ++p) {
    const __m512i e = load512(exponents + 64 * p);
    const __m512i code = _mm512_sub_epi8(e, before);
    const __mmask64 fits = _mm512_cmple_epu8_mask(code, all_bytes(kWindowExponents));  // and 0 is an escape
    const __mmask64 plane0 = _mm512_mask_test_epi8_mask(fits, code, all_bytes(1));
    const __mmask64 plane1 = _mm512_mask_test_epi8_mask(fits, code, all_bytes(2));
    const __mmask64 plane2 = _mm512_mask_test_epi8_mask(fits, code, all_bytes(4));
    store<uint64_t>(planes + 8 * p, plane0);
    store<uint64_t>(planes + kPlaneBytes + 8 * p, plane1);
    store<uint64_t>(planes + 2 * kPlaneBytes + 8 * p, plane2);
    const __mmask64 escapes = ~(plane0 | plane1 | plane2);
    store512(dynamic, _mm512_maskz_compress_epi8(escapes, e));  // in a register: compressing to memory is slow
    dynamic += _mm_popcnt_u64(escapes);
  }
  return static_cast<uint32_t>(dynamic - begin);
}

// The transpose between eight quadwords of each of four runs and four quadwords of each of eight words; in both
// directions v[p] holds words 2 p and 2 p + 1, each a quadword from every run.
ZIPCCL_AVX512 inline void to_planes(const __m512i (&run)[kRuns], uint8_t* out) {
  const __m512i even01 = _mm512_unpacklo_epi64(run[0], run[1]), odd01 = _mm512_unpackhi_epi64(run[0], run[1]);
  const __m512i even23 = _mm512_unpacklo_epi64(run[2], run[3]), odd23 = _mm512_unpackhi_epi64(run[2], run[3]);
  // Lane q of even01: word 2 q of runs 0 and 1. Words 2 q and 2 q + 1 are lanes q of even01, even23, odd01, odd23.
  const __m512i even_low = _mm512_shuffle_i64x2(even01, even23, 0x44),
                odd_low = _mm512_shuffle_i64x2(odd01, odd23, 0x44);
  const __m512i even_high = _mm512_shuffle_i64x2(even01, even23, 0xEE),
                odd_high = _mm512_shuffle_i64x2(odd01, odd23, 0xEE);
  store512(out, _mm512_shuffle_i64x2(even_low, odd_low, 0x88));
  store512(out + 64, _mm512_shuffle_i64x2(even_low, odd_low, 0xDD));
  store512(out + 128, _mm512_shuffle_i64x2(even_high, odd_high, 0x88));
  store512(out + 192, _mm512_shuffle_i64x2(even_high, odd_high, 0xDD));
}

ZIPCCL_AVX512 inline void to_runs(const __m512i (&pair)[4], __m512i (&run)[kRuns]) {
  // Lanes of pair p: word 2 p of runs 01, of runs 23, word 2 p + 1 of runs 01, of runs 23.
  const __m512i low = _mm512_shuffle_i64x2(pair[0], pair[1], 0x88),
                low_odd = _mm512_shuffle_i64x2(pair[0], pair[1], 0xDD);
  const __m512i high = _mm512_shuffle_i64x2(pair[2], pair[3], 0x88),
                high_odd = _mm512_shuffle_i64x2(pair[2], pair[3], 0xDD);
  // low: runs 01 of words 0 1 2 3; low_odd: runs 23 of words 0 1 2 3; high, high_odd: of words 4 5 6 7.
  const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
  run[0] = _mm512_permutex2var_epi64(low, even, high);
  run[1] = _mm512_permutex2var_epi64(low, odd, high);
  run[2] = _mm512_permutex2var_epi64(low_odd, even, high_odd);
  run[3] = _mm512_permutex2var_epi64(low_odd, odd, high_odd);
}

ZIPCCL_AVX512 Tile encode(const uint16_t* src, uint32_t m, uint8_t* unit, uint8_t* dynamic) {
  if (m != kTileValues) return kScalarKernels.encode(src, m, unit, dynamic);
  if (all_equal(src)) {
    store(dynamic, src[0]);
    return {TileMode::constant, 0, 2};
  }
  // From front to back first: memory likes one stream better than four.
  alignas(64) uint8_t ordered[kTileValues], exponents[kTileValues];
  for (uint32_t i = 0; i < kTileValues; i += 64) {
    const SplitBf16 values = split_bf16(src + i);
    store512(unit + i, values.sign_mantissas);
    store512(ordered + i, values.exponents);
  }
  __m512i sample[kSteps];
  for (uint32_t s = 0; s < kSteps; ++s) {
    __m512i run[kRuns];
    for (uint32_t j = 0; j < kRuns; ++j) run[j] = load512(ordered + kRunValues * j + 64 * s);
    to_planes(run, exponents + 256 * s);
    // sampled(): the first two of every eight.
    const __m512i pairs01 = _mm512_mask_blend_epi16(0x22222222, run[0], _mm512_slli_epi64(run[1], 16));
    const __m512i pairs23 = _mm512_mask_blend_epi16(0x22222222, run[2], _mm512_slli_epi64(run[3], 16));
    sample[s] = _mm512_mask_blend_epi32(0xAAAA, pairs01, _mm512_slli_epi64(pairs23, 32));
  }
  const uint32_t base = choose_base(sample);
  const uint32_t escapes = encode_planes(exponents, base, unit + kTileValues, dynamic);
  if (window_pays(kTileValues, escapes)) {
    return {TileMode::window, static_cast<uint8_t>(base), static_cast<uint16_t>(escapes)};
  }
  for (uint32_t i = 0; i < kTileValues; ++i) dynamic[i] = static_cast<uint8_t>(exponent(src[i]));
  return {TileMode::raw, 0, kTileValues};
}

ZIPCCL_AVX512 bool decode_window(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint16_t* dst) {
  const uint8_t* planes = unit + kTileValues;
  // Planes before the bytes in front of them, tile after tile, is a pattern that hardware prefetchers do not follow.
  for (uint64_t i = 0; i < kMaxUnitBytes; i += 64) __builtin_prefetch(unit + 2 * kMaxUnitBytes + i);
  int64_t coded = 0;
  for (uint64_t i = 0; i < kPlaneBytes; i += 8) {
    coded += _mm_popcnt_u64(load<uint64_t>(planes + i) | load<uint64_t>(planes + kPlaneBytes + i) |
                            load<uint64_t>(planes + 2 * kPlaneBytes + i));
  }
  if (static_cast<int64_t>(kTileValues) - coded != tile.dynamic) return false;

  alignas(64) uint8_t exponents[kTileValues];       // in value order
  const __m512i before = all_bytes(tile.base - 1);  // exponent = before + code
  for (uint32_t s = 0; s < kSteps; ++s) {
    __m512i pair[4], run[kRuns];
    for (uint32_t p = 0; p < 4; ++p) {
      const uint8_t* word = planes + 8 * (4 * s + p);
      const __mmask64 plane0 = load<uint64_t>(word), plane1 = load<uint64_t>(word + kPlaneBytes),
                      plane2 = load<uint64_t>(word + 2 * kPlaneBytes), escapes = ~(plane0 | plane1 | plane2);
      __m512i e = _mm512_mask_add_epi8(before, plane0, before, all_bytes(1));
      e = _mm512_mask_add_epi8(e, plane1, e, all_bytes(2));
      e = _mm512_mask_add_epi8(e, plane2, e, all_bytes(4));
      pair[p] = _mm512_mask_expand_epi8(e, escapes, load512(dynamic));
      dynamic += _mm_popcnt_u64(escapes);
    }
    to_runs(pair, run);
    for (uint32_t j = 0; j < kRuns; ++j) store512(exponents + kRunValues * j + 64 * s, run[j]);
  }
  // As in encode(), from front to back.
  for (uint32_t i = 0; i < kTileValues; i += 64) join_bf16(load512(unit + i), load512(exponents + i), dst + i);
  return true;
}

ZIPCCL_AVX512 bool decode(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m, uint16_t* dst) {
  if (m != kTileValues) return kScalarKernels.decode(tile, unit, dynamic, m, dst);
  switch (tile.mode) {
    case TileMode::window:
      return decode_window(tile, unit, dynamic, dst);
    case TileMode::constant: {
      const __m512i value = _mm512_set1_epi16(load<int16_t>(dynamic));
      for (uint32_t i = 0; i < kTileValues; i += 32) store512(dst + i, value);
      return true;
    }
    case TileMode::raw:
      for (uint32_t i = 0; i < kTileValues; i += 64) join_bf16(load512(unit + i), load512(dynamic + i), dst + i);
      return true;
  }
  return false;
}

}  // namespace

const TileKernels kAvx512Kernels = {encode, decode};

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
