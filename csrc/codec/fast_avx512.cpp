// Tiles of Code::fast with AVX-512 (VBMI, VBMI2 and GFNI: Ice Lake, Zen 4 and later). Whole tiles only: the last,
// shorter tile of a tensor goes to the scalar kernels.
//
// A plane word has 8 values from each of four runs of 256. Exponents are held in plane order, 64 a register: two words,
// each with eight bytes from every run. So a comparison's mask is in plane order, and what compressing by it leaves are
// dynamic bytes; and each eight codes of three bits are the rows of a bit matrix whose columns are bytes of the planes,
// which GFNI transposes. All exponents of a tile are in registers between reading and writing it, both from front to
// back: memory likes one stream better than four. In: 2 bytes a value read, 1.375 and the escapes written.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 and older, of their own immintrin.h (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <algorithm>

#include "codec/bf16_avx512.h"

#if defined(__x86_64__)

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kRuns = 4;                 // a plane word gathers 8 values from each of 4 runs...
constexpr uint32_t kRunValues = 256;          // ...this far apart
constexpr uint32_t kSteps = kPlaneWords / 8;  // eight words a step
constexpr uint32_t kPairs = kPlaneWords / 2;  // of words

// Of the 8 x 8 bits of each quadword: bit b of byte i is bit i of the byte 7 - b given.
ZIPCCL_AVX512 inline __m512i transpose_bits(__m512i rows) {
  return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201)), rows, 0);
}
// Bit b of each byte is bit 7 - b of the one given.
ZIPCCL_AVX512 inline __m512i reverse_bits(__m512i bytes) {
  return _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201)), 0);
}

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

// Writes the planes and the escaped exponents, returns the number of the latter.
ZIPCCL_AVX512 inline uint32_t encode_planes(const __m512i (&exponents)[kPairs], uint32_t base, uint8_t* planes,
                                            uint8_t* dynamic) {
  const __m512i first = all_bytes(static_cast<int>(base)), before = all_bytes(static_cast<int>(base) - 1);
  // Byte k of each of the 16 quadwords of two registers, for k = 0, 1, 2.
  const __m512i by_plane = _mm512_setr_epi64(0x3830282018100800, 0x7870686058504840, 0x3931292119110901,
                                             0x7971696159514941, 0x3A322A221A120A02, 0x7A726A625A524A42, 0, 0);
  const uint8_t* const begin = dynamic;
#pragma GCC unroll 8
  for (uint32_t p = 0; p < kPairs; p += 2) {
    __m512i bits[2];
#pragma GCC unroll 2
    for (uint32_t k = 0; k < 2; ++k) {
      const __m512i e = exponents[p + k];
      const __mmask64 escapes = _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(e, first), all_bytes(kWindowExponents - 1));
      bits[k] = transpose_bits(_mm512_maskz_sub_epi8(~escapes, e, before));
      store512(dynamic, _mm512_maskz_compress_epi8(escapes, e));  // in a register: compressing to memory is slow
      dynamic += _mm_popcnt_u64(escapes);
    }
    const __m512i words = reverse_bits(_mm512_permutex2var_epi8(bits[0], by_plane, bits[1]));
    store128(planes + 8 * p, _mm512_castsi512_si128(words));
    store128(planes + kPlaneBytes + 8 * p, _mm512_extracti32x4_epi32(words, 1));
    store128(planes + 2 * kPlaneBytes + 8 * p, _mm512_extracti32x4_epi32(words, 2));
  }
  return static_cast<uint32_t>(dynamic - begin);
}

ZIPCCL_AVX512 Tile encode(const uint16_t* src, uint32_t m, uint8_t* unit, uint8_t* dynamic) {
  if (m != kTileValues) return kScalarKernels.encode(src, m, unit, dynamic);
  if (all_equal(src)) {
    store(dynamic, src[0]);
    return {TileMode::constant, 0, 2};
  }
  // High bytes of two runs of 32 values, eight of the one and eight of the other in turns: four words, half of each.
  const __m512i halves =
      _mm512_setr_epi64(0x0F0D0B0907050301, 0x4F4D4B4947454341, 0x1F1D1B1917151311, 0x5F5D5B5957555351,
                        0x2F2D2B2927252321, 0x6F6D6B6967656361, 0x3F3D3B3937353331, 0x7F7D7B7977757371);
  // Of 32 values each: of runs 0 and 1, of runs 2 and 3; of the first run alone until the second is there.
  __m512i runs01[2 * kSteps], runs23[2 * kSteps];
#pragma GCC unroll 4
  for (uint32_t j = 0; j < kRuns; ++j) {
    __m512i* const runs = j < 2 ? runs01 : runs23;
#pragma GCC unroll 4
    for (uint32_t s = 0; s < kSteps; ++s) {
      const uint32_t i = kRunValues * j + 64 * s;
      const __m512i values[2] = {load512(src + i), load512(src + i + 32)};
      store512(unit + i, sign_mantissas(values[0], values[1]));
#pragma GCC unroll 2
      for (uint32_t h = 0; h < 2; ++h) {
        const __m512i twice = _mm512_add_epi16(values[h], values[h]);  // the exponent is the high byte
        runs[2 * s + h] = j % 2 == 0 ? twice : _mm512_permutex2var_epi8(runs[2 * s + h], halves, twice);
      }
    }
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  __m512i exponents[kPairs], sample[kSteps];
#pragma GCC unroll 4
  for (uint32_t s = 0; s < kSteps; ++s) {
    __m512i* const e = exponents + 4 * s;
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; ++h) {
      e[2 * h] = _mm512_permutex2var_epi64(runs01[2 * s + h], low, runs23[2 * s + h]);
      e[2 * h + 1] = _mm512_permutex2var_epi64(runs01[2 * s + h], high, runs23[2 * s + h]);
    }
    // sampled(): the first two of every eight.
    const __m512i twos01 = _mm512_mask_blend_epi16(0x22222222, e[0], _mm512_slli_epi64(e[1], 16));
    const __m512i twos23 = _mm512_mask_blend_epi16(0x22222222, e[2], _mm512_slli_epi64(e[3], 16));
    sample[s] = _mm512_mask_blend_epi32(0xAAAA, twos01, _mm512_slli_epi64(twos23, 32));
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
  // From 16 bytes of each plane to eight quadwords with a byte of each, where transpose_bits() makes bits 0, 1, 2 of
  // them.
  const __m512i by_word =
      _mm512_setr_epi64(0x0010200000000000, 0x0111210000000000, 0x0212220000000000, 0x0313230000000000,
                        0x0414240000000000, 0x0515250000000000, 0x0616260000000000, 0x0717270000000000);
  constexpr __mmask64 kThreeOfEight = 0xE0E0E0E0E0E0E0E0;
  const __m512i before = all_bytes(tile.base - 1);  // exponent = before + code
  const uint8_t* const end = dynamic + tile.dynamic;
  int64_t escaped = 0;
  __m512i exponents[kPairs];
#pragma GCC unroll 8
  for (uint32_t p = 0; p < kPairs; p += 2) {
    __m512i bytes = _mm512_castsi128_si512(load128(planes + 8 * p));
    bytes = _mm512_inserti32x4(bytes, load128(planes + kPlaneBytes + 8 * p), 1);
    bytes = _mm512_inserti32x4(bytes, load128(planes + 2 * kPlaneBytes + 8 * p), 2);
#pragma GCC unroll 2
    for (uint32_t k = 0; k < 2; ++k) {
      const __m512i from = k == 0 ? by_word : _mm512_add_epi8(by_word, all_bytes(8));
      const __m512i code = transpose_bits(_mm512_maskz_permutexvar_epi8(kThreeOfEight, from, bytes));
      const __mmask64 escapes = _mm512_testn_epi8_mask(code, code);
      exponents[p + k] = _mm512_mask_expand_epi8(_mm512_add_epi8(before, code), escapes, load512(dynamic));
      const int64_t n = _mm_popcnt_u64(escapes);
      escaped += n;
      dynamic = std::min(dynamic + n, end);  // too many are noticed at the end
    }
  }
  // 32 values of a run from four words: their exponents twice, and their sign-mantissa bytes twice.
  const __m512i of_run =
      _mm512_setr_epi64(0x0303020201010000, 0x0707060605050404, 0x2323222221212020, 0x2727262625252424,
                        0x4343424241414040, 0x4747464645454444, 0x6363626261616060, 0x6767666665656464);
  const __m512i doubled =
      _mm512_setr_epi64(0x0303020201010000, 0x0707060605050404, 0x0B0B0A0A09090808, 0x0F0F0E0E0D0D0C0C,
                        0x1313121211111010, 0x1717161615151414, 0x1B1B1A1A19191818, 0x1F1F1E1E1D1D1C1C);
  const __m512i exponent_bits = _mm512_set1_epi16(0x7F80);
#pragma GCC unroll 4
  for (uint32_t j = 0; j < kRuns; ++j) {
    const __m512i of_this = _mm512_add_epi8(of_run, all_bytes(static_cast<int>(8 * j)));
#pragma GCC unroll 4
    for (uint32_t s = 0; s < kSteps; ++s) {
      const uint32_t i = kRunValues * j + 64 * s;
      const __m512i sign_mantissas = load512(unit + i);
#pragma GCC unroll 2
      for (uint32_t h = 0; h < 2; ++h) {
        const __m512i e = _mm512_permutex2var_epi8(exponents[4 * s + 2 * h], of_this, exponents[4 * s + 2 * h + 1]);
        const __m512i which = h == 0 ? doubled : _mm512_add_epi8(doubled, all_bytes(32));
        const __m512i others = _mm512_permutexvar_epi8(which, sign_mantissas);
        store512(dst + i + 32 * h, select(exponent_bits, _mm512_srli_epi16(e, 1), others));
      }
    }
  }
  return escaped == tile.dynamic;
}

ZIPCCL_AVX512 bool decode(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m, uint16_t* dst) {
  if (m != kTileValues) return kScalarKernels.decode(tile, unit, dynamic, m, dst);
  switch (tile.mode) {
    case TileMode::window:
      return decode_window(tile, unit, dynamic, dst);
    case TileMode::held:
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
