// bf16 values in AVX-512 registers: what fast_avx512.cpp and dense_avx512.cpp share.
#pragma once

#include "codec/cpu.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace zipccl {
namespace cpu {

ZIPCCL_AVX512 inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
ZIPCCL_AVX512 inline void store512(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
ZIPCCL_AVX512 inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
ZIPCCL_AVX512 inline void store128(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
ZIPCCL_AVX512 inline __m512i all_bytes(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }

// mask ? a : b, bit by bit
ZIPCCL_AVX512 inline __m512i select(__m512i mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(mask, a, b, 0xCA);
}

// The low bytes of 64 words, and their high bytes.
ZIPCCL_AVX512 inline __m512i low_bytes(__m512i a, __m512i b) {
  const __m512i even =
      _mm512_setr_epi64(0x0E0C0A0806040200, 0x1E1C1A1816141210, 0x2E2C2A2826242220, 0x3E3C3A3836343230,
                        0x4E4C4A4846444240, 0x5E5C5A5856545250, 0x6E6C6A6866646260, 0x7E7C7A7876747270);
  return _mm512_permutex2var_epi8(a, even, b);
}
ZIPCCL_AVX512 inline __m512i high_bytes(__m512i a, __m512i b) {
  const __m512i odd = _mm512_setr_epi64(0x0F0D0B0907050301, 0x1F1D1B1917151311, 0x2F2D2B2927252321, 0x3F3D3B3937353331,
                                        0x4F4D4B4947454341, 0x5F5D5B5957555351, 0x6F6D6B6967656361, 0x7F7D7B7977757371);
  return _mm512_permutex2var_epi8(a, odd, b);
}

struct SplitBf16 {
  __m512i sign_mantissas, exponents;  // a byte each, in order
};

// Of 64 values in two registers.
ZIPCCL_AVX512 inline __m512i sign_mantissas(__m512i a, __m512i b) {
  return select(all_bytes(0x80), high_bytes(a, b), low_bytes(a, b));
}
ZIPCCL_AVX512 inline SplitBf16 split_bf16(const void* src) {
  const __m512i a = load512(src), b = load512(static_cast<const uint8_t*>(src) + 64);
  // The exponent is the high byte of the word doubled.
  return {sign_mantissas(a, b), high_bytes(_mm512_add_epi16(a, a), _mm512_add_epi16(b, b))};
}

ZIPCCL_AVX512 inline void join_bf16(__m512i sign_mantissas, __m512i exponents, void* dst) {
  const __m512i top = all_bytes(0x80);
  const __m512i low = select(top, _mm512_slli_epi16(exponents, 7), sign_mantissas);
  const __m512i high = select(top, sign_mantissas, _mm512_srli_epi16(exponents, 1));
  const __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
  store512(dst, _mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second));
  store512(static_cast<uint8_t*>(dst) + 64,
           _mm512_permutex2var_epi64(first, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), second));
}

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
