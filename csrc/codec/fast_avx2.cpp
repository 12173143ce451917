// Tiles of Code::fast with AVX2. Whole tiles only: the last, shorter tile of a tensor goes to the scalar kernels.
//
// In both directions the exponents pass through a buffer of 1024 bytes in plane order: byte 32 * w + b is the
// exponent of the value with bit b of plane word w. A plane word is then the movemask of 32 neighbouring bytes, and
// escapes are met in the order in which the frame stores them. Between value order and plane order lies a 4 x 4
// transpose of 8-byte pieces: four runs of 32 values, 256 apart, are four plane words.
#include "codec/cpu.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kRuns = 4;                 // a plane word gathers 8 values from each of 4 runs...
constexpr uint32_t kRunValues = 256;          // ...this far apart
constexpr uint32_t kSteps = kPlaneWords / 4;  // four words a step
constexpr uint32_t kEscapesAtOnce = 4;        // escapes of a plane word handled without a branch

ZIPCCL_AVX2 inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
ZIPCCL_AVX2 inline void store256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
ZIPCCL_AVX2 inline __m256i bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }

// Quadwords 0 2 1 3: undoes, or prepares, what pack and unpack do across the two 128-bit halves.
ZIPCCL_AVX2 inline __m256i swap_middle(__m256i v) { return _mm256_permute4x64_epi64(v, 0xD8); }

// a | b by bits of mask: mask ? a : b
ZIPCCL_AVX2 inline __m256i select(__m256i mask, __m256i a, __m256i b) {
  return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}

ZIPCCL_AVX2 inline uint32_t sum_u64(__m256i v) {
  const __m128i s = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  return static_cast<uint32_t>(_mm_extract_epi64(s, 0) + _mm_extract_epi64(s, 1));
}

// Sum of 32 unsigned bytes.
ZIPCCL_AVX2 inline uint32_t sum_bytes(__m256i v) { return sum_u64(_mm256_sad_epu8(v, _mm256_setzero_si256())); }

ZIPCCL_AVX2 bool all_equal(const uint16_t* src) {
  if (src[0] != src[kTileValues - 1]) return false;
  const __m256i first = _mm256_set1_epi16(static_cast<int16_t>(src[0]));
  for (uint32_t i = 0; i < kTileValues; i += 32) {
    const __m256i differ =
        _mm256_or_si256(_mm256_xor_si256(load256(src + i), first), _mm256_xor_si256(load256(src + i + 16), first));
    if (!_mm256_testz_si256(differ, differ)) return false;
  }
  return true;
}

// 32 values -> their sign-mantissa bytes in order, and their exponents as quadwords 0 2 1 3.
ZIPCCL_AVX2 inline __m256i split_values(const uint16_t* src, uint8_t* sign_mantissas) {
  const __m256i a = load256(src), b = load256(src + 16), low_mask = _mm256_set1_epi16(0xFF);
  const __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, low_mask), _mm256_and_si256(b, low_mask));
  const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
  store256(sign_mantissas, swap_middle(select(bytes(0x80), high, low)));
  // Exponent: seven bits of the high byte, and the top bit of the low one, which is its sign as a signed byte.
  const __m256i low_bit = _mm256_cmpgt_epi8(_mm256_setzero_si256(), low);  // -1 where set
  return _mm256_sub_epi8(_mm256_add_epi8(high, high), low_bit);
}

// The encoder's choice of window (format/tile.h) from the 256 sampled exponents.
ZIPCCL_AVX2 uint32_t choose_base(const __m256i sample[kSteps]) {
  __m256i sums = _mm256_setzero_si256(), zeros = _mm256_setzero_si256();
  for (uint32_t s = 0; s < kSteps; ++s) {
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(sample[s], _mm256_setzero_si256()));
    zeros = _mm256_sub_epi8(zeros, _mm256_cmpeq_epi8(sample[s], _mm256_setzero_si256()));
  }
  const uint32_t mean = mean_exponent(sum_u64(sums), 32 * kSteps - sum_bytes(zeros));
  uint32_t best_base = 0, best_inside = 0;
  for (int k = 0; k < kBaseCandidates; ++k) {
    const uint32_t base = candidate_base(mean, k);
    const __m256i first = bytes(static_cast<int>(base)), last = bytes(kWindowExponents - 1);
    __m256i inside_bytes = _mm256_setzero_si256();
    for (uint32_t s = 0; s < kSteps; ++s) {
      const __m256i place = _mm256_sub_epi8(sample[s], first);
      inside_bytes = _mm256_sub_epi8(inside_bytes, _mm256_cmpeq_epi8(_mm256_min_epu8(place, last), place));
    }
    const uint32_t inside = sum_bytes(inside_bytes);
    if (k == 0 || inside > best_inside) {
      best_base = base;
      best_inside = inside;
    }
  }
  return best_base;
}

// Writes the planes and the escaped exponents, returns the number of the latter. `exponents` in plane order.
ZIPCCL_AVX2 uint32_t encode_planes(const uint8_t* exponents, uint32_t base, uint8_t* planes, uint8_t* dynamic) {
  const __m256i before = bytes(static_cast<int>(base) - 1);  // code = exponent - before, where that is 1..7
  const __m256i low_bits = bytes(7);
  const uint8_t* const begin = dynamic;
  for (uint32_t w = 0; w < kPlaneWords; ++w) {
    const __m256i place = _mm256_sub_epi8(load256(exponents + 32 * w), before);
    const __m256i fits = _mm256_cmpeq_epi8(_mm256_min_epu8(place, low_bits), place);  // 0..7, and 0 is an escape
    const __m256i code = _mm256_and_si256(place, fits);
    const uint32_t plane0 = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(code, 7)));
    const uint32_t plane1 = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(code, 6)));
    const uint32_t plane2 = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(code, 5)));
    store(planes + 4 * w, plane0);
    store(planes + kPlaneBytes + 4 * w, plane1);
    store(planes + 2 * kPlaneBytes + 4 * w, plane2);

    uint32_t escapes = ~(plane0 | plane1 | plane2);
    const uint32_t n = static_cast<uint32_t>(_mm_popcnt_u32(escapes));
    // Nearly every word has 0 to 4 escapes. Four copies are made unasked: of no escape, the byte behind the word.
    const uint8_t* word = exponents + 32 * w;
    for (uint32_t k = 0; k < kEscapesAtOnce; ++k) {
      dynamic[k] = word[_tzcnt_u32(escapes)];
      escapes = _blsr_u32(escapes);
    }
    for (uint32_t k = kEscapesAtOnce; k < n; ++k) {
      dynamic[k] = word[_tzcnt_u32(escapes)];
      escapes = _blsr_u32(escapes);
    }
    dynamic += n;
  }
  return static_cast<uint32_t>(dynamic - begin);
}

ZIPCCL_AVX2 Tile encode(const uint16_t* src, uint32_t m, uint8_t* unit, uint8_t* dynamic) {
  if (m != kTileValues) return kScalarKernels.encode(src, m, unit, dynamic);
  if (all_equal(src)) {
    store(dynamic, src[0]);
    return {TileMode::constant, 0, 2};
  }
  // From front to back first: memory likes one stream better than four.
  alignas(32) uint8_t ordered[kTileValues], exponents[kTileValues + 32];
  for (uint32_t i = 0; i < kTileValues; i += 32) store256(ordered + i, split_values(src + i, unit + i));
  store256(exponents + kTileValues, _mm256_setzero_si256());
  __m256i sample[kSteps];
  const __m256i first_pair = _mm256_set1_epi64x(0xFFFF);  // sampled(): the first two of every eight
  for (uint32_t s = 0; s < kSteps; ++s) {
    __m256i e[kRuns];
    for (uint32_t j = 0; j < kRuns; ++j) e[j] = load256(ordered + kRunValues * j + 32 * s);
    const __m256i pairs01 =
        _mm256_or_si256(_mm256_and_si256(e[0], first_pair), _mm256_slli_epi64(_mm256_and_si256(e[1], first_pair), 16));
    const __m256i pairs23 =
        _mm256_or_si256(_mm256_and_si256(e[2], first_pair), _mm256_slli_epi64(_mm256_and_si256(e[3], first_pair), 16));
    sample[s] = _mm256_or_si256(pairs01, _mm256_slli_epi64(pairs23, 32));

    // Quadword w of run j (stored as 0 2 1 3) becomes quadword j of word w.
    const __m256i words01_runs01 = _mm256_unpacklo_epi64(e[0], e[1]),
                  words01_runs23 = _mm256_unpacklo_epi64(e[2], e[3]);
    const __m256i words23_runs01 = _mm256_unpackhi_epi64(e[0], e[1]),
                  words23_runs23 = _mm256_unpackhi_epi64(e[2], e[3]);
    uint8_t* out = exponents + 128 * s;
    store256(out, _mm256_permute2x128_si256(words01_runs01, words01_runs23, 0x20));
    store256(out + 32, _mm256_permute2x128_si256(words01_runs01, words01_runs23, 0x31));
    store256(out + 64, _mm256_permute2x128_si256(words23_runs01, words23_runs23, 0x20));
    store256(out + 96, _mm256_permute2x128_si256(words23_runs01, words23_runs23, 0x31));
  }
  const uint32_t base = choose_base(sample);
  const uint32_t escapes = encode_planes(exponents, base, unit + kTileValues, dynamic);
  if (window_pays(kTileValues, escapes)) {
    return {TileMode::window, static_cast<uint8_t>(base), static_cast<uint16_t>(escapes)};
  }
  for (uint32_t i = 0; i < kTileValues; ++i) dynamic[i] = static_cast<uint8_t>(exponent(src[i]));
  return {TileMode::raw, 0, kTileValues};
}

// Joins 32 sign-mantissa bytes with 32 exponents, the latter as quadwords 0 2 1 3.
ZIPCCL_AVX2 inline void join_values(const uint8_t* sign_mantissas, __m256i e, uint16_t* dst) {
  const __m256i sm = swap_middle(load256(sign_mantissas));
  const __m256i top = bytes(0x80);
  const __m256i low = select(top, _mm256_slli_epi16(e, 7), sm);
  const __m256i high = select(top, sm, _mm256_srli_epi16(e, 1));
  store256(dst, _mm256_unpacklo_epi8(low, high));
  store256(dst + 16, _mm256_unpackhi_epi8(low, high));
}

// 32 bits -> 32 bytes: -1 where the bit is set.
ZIPCCL_AVX2 inline __m256i spread_bits(uint32_t word) {
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(word)), byte_of);
  return _mm256_cmpeq_epi8(_mm256_and_si256(v, bit_of), bit_of);
}

ZIPCCL_AVX2 bool decode_window(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint16_t* dst) {
  const uint8_t* planes = unit + kTileValues;
  // Planes before the bytes in front of them, tile after tile, is a pattern that hardware prefetchers do not follow.
  for (uint64_t i = 0; i < kMaxUnitBytes; i += 64) __builtin_prefetch(unit + 2 * kMaxUnitBytes + i);
  uint32_t escapes_of[kPlaneWords];
  uint32_t total = 0;
  for (uint32_t w = 0; w < kPlaneWords; ++w) {
    escapes_of[w] = ~(load<uint32_t>(planes + 4 * w) | load<uint32_t>(planes + kPlaneBytes + 4 * w) |
                      load<uint32_t>(planes + 2 * kPlaneBytes + 4 * w));
    total += static_cast<uint32_t>(_mm_popcnt_u32(escapes_of[w]));
  }
  if (total != tile.dynamic) return false;

  alignas(32) uint8_t exponents[kTileValues + 32];
  const __m256i before = bytes(tile.base - 1);  // exponent = before + code
  for (uint32_t w = 0; w < kPlaneWords; ++w) {
    const __m256i bit0 = spread_bits(load<uint32_t>(planes + 4 * w));
    const __m256i bit1 = spread_bits(load<uint32_t>(planes + kPlaneBytes + 4 * w));
    const __m256i bit2 = spread_bits(load<uint32_t>(planes + 2 * kPlaneBytes + 4 * w));
    const __m256i upper = _mm256_or_si256(_mm256_and_si256(bit1, bytes(2)), _mm256_and_si256(bit2, bytes(4)));
    store256(exponents + 32 * w, _mm256_add_epi8(_mm256_sub_epi8(before, bit0), upper));

    // As in encode_planes(): a copy of no escape lands behind the word, where the next word is about to be written.
    uint32_t escapes = escapes_of[w];
    const uint32_t n = static_cast<uint32_t>(_mm_popcnt_u32(escapes));
    uint8_t* word = exponents + 32 * w;
    for (uint32_t k = 0; k < kEscapesAtOnce; ++k) {
      word[_tzcnt_u32(escapes)] = dynamic[k];
      escapes = _blsr_u32(escapes);
    }
    for (uint32_t k = kEscapesAtOnce; k < n; ++k) {
      word[_tzcnt_u32(escapes)] = dynamic[k];
      escapes = _blsr_u32(escapes);
    }
    dynamic += n;
  }

  // Into value order first, so that dst is written from front to back.
  alignas(32) uint8_t ordered[kTileValues];
  for (uint32_t s = 0; s < kSteps; ++s) {
    const uint8_t* in = exponents + 128 * s;
    uint8_t* out = ordered + 32 * s;
    const __m256i w0 = load256(in), w1 = load256(in + 32), w2 = load256(in + 64), w3 = load256(in + 96);
    // Quadword j of word w becomes quadword w of run j, in the order 0 2 1 3 that join_values() takes.
    const __m256i runs02_words02 = _mm256_unpacklo_epi64(w0, w2), runs02_words13 = _mm256_unpacklo_epi64(w1, w3);
    const __m256i runs13_words02 = _mm256_unpackhi_epi64(w0, w2), runs13_words13 = _mm256_unpackhi_epi64(w1, w3);
    store256(out, _mm256_permute2x128_si256(runs02_words02, runs02_words13, 0x20));
    store256(out + kRunValues, _mm256_permute2x128_si256(runs13_words02, runs13_words13, 0x20));
    store256(out + 2 * kRunValues, _mm256_permute2x128_si256(runs02_words02, runs02_words13, 0x31));
    store256(out + 3 * kRunValues, _mm256_permute2x128_si256(runs13_words02, runs13_words13, 0x31));
  }
  for (uint32_t i = 0; i < kTileValues; i += 32) join_values(unit + i, load256(ordered + i), dst + i);
  return true;
}

ZIPCCL_AVX2 bool decode(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m, uint16_t* dst) {
  if (m != kTileValues) return kScalarKernels.decode(tile, unit, dynamic, m, dst);
  switch (tile.mode) {
    case TileMode::window:
      return decode_window(tile, unit, dynamic, dst);
    case TileMode::held:
    case TileMode::constant: {
      const __m256i value = _mm256_set1_epi16(load<int16_t>(dynamic));
      for (uint32_t i = 0; i < kTileValues; i += 16) store256(dst + i, value);
      return true;
    }
    case TileMode::raw:
      for (uint32_t i = 0; i < kTileValues; i += 32) join_values(unit + i, swap_middle(load256(dynamic + i)), dst + i);
      return true;
  }
  return false;
}

}  // namespace

const TileKernels kAvx2Kernels = {encode, decode};

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
