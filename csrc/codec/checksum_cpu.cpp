// Payload checksum: see checksum_key() in format/frame.h.
#include "codec/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zipccl {
namespace cpu {

uint64_t checksum_scalar(const uint8_t* payload, uint64_t words, uint64_t first_index) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < words; ++i) {
    sum += uint64_t{load<uint32_t>(payload + 4 * i)} * checksum_key(first_index + i);
  }
  return sum;
}

#if defined(__x86_64__)

ZIPCCL_AVX2 uint64_t checksum_avx2(const uint8_t* payload, uint64_t words) {
  constexpr uint32_t kStep = 0x9E3779B1u;  // checksum_key() begins with index * kStep, so eight indices add 8 * kStep
  constexpr uint64_t kBlock = uint64_t(1) << 32;  // the high half of the index is constant within one of these
  const __m256i step = _mm256_set1_epi32(static_cast<int>(8 * kStep));
  const __m256i mix = _mm256_set1_epi32(0x2C1B3C6D);
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i lanes =
      _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(static_cast<int>(kStep)));
  __m256i even = _mm256_setzero_si256(), odd = _mm256_setzero_si256();
  const uint64_t vectors_end = words / 8 * 8;
  for (uint64_t begin = 0; begin < vectors_end; begin += kBlock) {
    const uint64_t end = vectors_end - begin < kBlock ? vectors_end : begin + kBlock;
    const uint32_t high = static_cast<uint32_t>(begin >> 32) * 0x85EBCA77u;
    __m256i start = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(high)));
    for (uint64_t i = begin; i < end; i += 8) {
      __m256i key = _mm256_xor_si256(start, _mm256_srli_epi32(start, 15));
      key = _mm256_or_si256(_mm256_mullo_epi32(key, mix), one);
      start = _mm256_add_epi32(start, step);
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(payload + 4 * i));
      even = _mm256_add_epi64(even, _mm256_mul_epu32(word, key));
      odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(word, 32), _mm256_srli_epi64(key, 32)));
    }
  }
  uint64_t sums[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), _mm256_add_epi64(even, odd));
  return sums[0] + sums[1] + sums[2] + sums[3] +
         checksum_scalar(payload + 4 * vectors_end, words - vectors_end, vectors_end);
}

#endif

}  // namespace cpu

uint64_t payload_checksum(const void* payload, uint64_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(payload);
#if defined(__x86_64__)
  if (cpu::has_avx2()) return cpu::checksum_avx2(p, bytes / 4);
#endif
  return cpu::checksum_scalar(p, bytes / 4, 0);
}

}  // namespace zipccl
