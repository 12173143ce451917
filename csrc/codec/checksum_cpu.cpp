// Payload checksum: see checksum_key() in format/frame.h.
#include <algorithm>

#include "codec/cpu.h"
#include "codec/workers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zipccl {
namespace cpu {

uint64_t checksum_scalar(const uint8_t* from, uint64_t words, uint64_t first) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < words; ++i) sum += uint64_t{load<uint32_t>(from + 4 * i)} * checksum_key(first + i);
  return sum;
}

#if defined(__x86_64__)

ZIPCCL_AVX2 uint64_t checksum_avx2(const uint8_t* from, uint64_t words, uint64_t first) {
  constexpr uint32_t kStep = 0x9E3779B1u;  // checksum_key() begins with index * kStep, so eight indices add 8 * kStep
  constexpr uint64_t kBlock = uint64_t(1) << 32;  // the high half of the index is constant within one of these
  const __m256i step = _mm256_set1_epi32(static_cast<int>(8 * kStep));
  const __m256i mix = _mm256_set1_epi32(0x2C1B3C6D);
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i lanes =
      _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(static_cast<int>(kStep)));
  __m256i even = _mm256_setzero_si256(), odd = _mm256_setzero_si256();
  uint64_t sum = 0;
  while (words >= 8) {
    const uint64_t in_block = kBlock - first % kBlock, n = (words < in_block ? words : in_block) / 8 * 8;
    if (n == 0) {  // a vector across the end of a block
      sum += checksum_scalar(from, 8, first);
      from += 32;
      first += 8;
      words -= 8;
      continue;
    }
    const uint32_t begin = static_cast<uint32_t>(first) * kStep + static_cast<uint32_t>(first >> 32) * 0x85EBCA77u;
    __m256i start = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(begin)));
    for (const uint8_t* const end = from + 4 * n; from != end; from += 32) {
      __m256i key = _mm256_xor_si256(start, _mm256_srli_epi32(start, 15));
      key = _mm256_or_si256(_mm256_mullo_epi32(key, mix), one);
      start = _mm256_add_epi32(start, step);
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      even = _mm256_add_epi64(even, _mm256_mul_epu32(word, key));
      odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(word, 32), _mm256_srli_epi64(key, 32)));
    }
    first += n;
    words -= n;
  }
  uint64_t sums[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), _mm256_add_epi64(even, odd));
  return sum + sums[0] + sums[1] + sums[2] + sums[3] + checksum_scalar(from, words, first);
}

#endif

}  // namespace cpu

uint64_t cpu::checksum(Isa isa, const Threads& threads, const uint8_t* payload, uint64_t words) {
  constexpr uint64_t kShare = 256 << 10;  // words: 1 MiB
  const uint64_t n = ceil_div(words, kShare);
  Shares shares(n);
  std::atomic<uint64_t> sum{0};  // of any order, as addition is
  run_workers(threads, worker_count(threads, n), [&] {
    for (uint64_t i; shares.take(&i);) {
      const uint64_t first = i * kShare, m = std::min(kShare, words - first);
#if defined(__x86_64__)
      if (isa != Isa::scalar && has_isa(Isa::avx2)) {
        sum += checksum_avx2(payload + 4 * first, m, first);
        continue;
      }
#endif
      sum += checksum_scalar(payload + 4 * first, m, first);
    }
  });
  return sum;
}

uint64_t payload_checksum(const void* payload, uint64_t bytes) {
  return cpu::checksum(Isa::best, {}, static_cast<const uint8_t*>(payload), bytes / 4);
}

}  // namespace zipccl
