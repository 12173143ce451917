// bf16 values in AVX-512 registers: what fast_avx512.cpp and dense_avx512.cpp share.
#pragma once

#include "codec/cpu.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace zipccl {
namespace cpu {

ZIPCCL_AVX512 inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
ZIPCCL_AVX512 inline void store512(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
ZIPCCL_AVX512 inline __m512i all_bytes(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }

// mask ? a : b, bit by bit
ZIPCCL_AVX512 inline __m512i select(__m512i mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(mask, a, b, 0xCA);
}

struct SplitBf16 {
  __m512i sign_mantissas, exponents;  // a byte each, in order
};

// Of 64 values.
ZIPCCL_AVX512 inline SplitBf16 split_bf16(const void* src) {
  const __m512i a = load512(src), b = load512(static_cast<const uint8_t*>(src) + 64);
  // Bytes 0, 2, 4 ... of both: eight times 0 2 4 ... 14, the k-th time from byte 16 k on.
  const __m512i sixteens =
      _mm512_setr_epi64(0, 0x1010101010101010, 0x2020202020202020, 0x3030303030303030, 0x4040404040404040,
                        0x5050505050505050, 0x6060606060606060, 0x7070707070707070);
  const __m512i even = _mm512_or_si512(sixteens, _mm512_set1_epi64(0x0E0C0A0806040200));
  const __m512i low = _mm512_permutex2var_epi8(a, even, b);
  const __m512i high = _mm512_permutex2var_epi8(a, _mm512_or_si512(even, all_bytes(1)), b);
  // Exponent: seven bits of the high byte, and the top bit of the low one.
  const __m512i twice = _mm512_add_epi8(high, high);
  return {select(all_bytes(0x80), high, low),
          _mm512_mask_add_epi8(twice, _mm512_movepi8_mask(low), twice, all_bytes(1))};
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
