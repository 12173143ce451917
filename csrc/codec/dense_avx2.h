// What dense_avx2.cpp and dense_elements_avx2.cpp share. Whole tiles of kTileValues elements only.
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

// Symbols of a tile of elements that have an exponent, and all their mantissas by or (where a shorter rest is offered).
// False: an exponent has no symbol.
bool dense_symbols(const dense::Format& format, const uint8_t* src, uint8_t* symbols, uint64_t* mantissas);

// Rests of `bits` bits to their arrays, and back, with the symbols, to elements.
void dense_write_rests(const dense::Format& format, uint32_t bits, const uint8_t* src, uint8_t* unit);
void dense_join(const dense::Format& format, uint32_t bits, const uint8_t* unit, const uint8_t* symbols, uint8_t* dst);

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
