// Tiles of Code::dense with AVX2: between elements and their symbols and rests. Whole tiles only.
//
// Doubles are left to the compiler: seven of their eight bytes are copied whatever one does.
#include "codec/dense_simd.h"

#if defined(__x86_64__)

namespace zipccl {
namespace cpu {
namespace {

constexpr uint32_t kAtOnce = 32;
constexpr uint32_t kTile = static_cast<uint32_t>(kTileValues);

// Quadwords 0 2 1 3: undoes, or prepares, what pack and unpack of two registers do across the 128-bit halves.
ZIPCCL_AVX2 inline __m256i swap_middle(__m256i v) { return _mm256_permute4x64_epi64(v, 0xD8); }

// 2 x 16 values below 256, or 4 x 8, -> 32 bytes in order.
ZIPCCL_AVX2 inline __m256i to_bytes(__m256i a, __m256i b) { return swap_middle(_mm256_packus_epi16(a, b)); }
ZIPCCL_AVX2 inline __m256i to_bytes(const __m256i (&v)[4]) {
  const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// The other way round, zero-extended.
ZIPCCL_AVX2 inline __m256i words_of(const void* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
ZIPCCL_AVX2 inline __m256i dwords_of(const void* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}

// ---- Arrays of fields of less than 8 bits: 32 fields at a time, a byte each outside ------------------------------

ZIPCCL_AVX2 inline void put_ones(uint8_t* array, uint32_t i, __m256i v) {
  store(array + i / 8, static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(v, 7))));
}
ZIPCCL_AVX2 inline void put_twos(uint8_t* array, uint32_t i, __m256i v) { store(array + i / 4, pack_twos(v)); }
ZIPCCL_AVX2 inline void put_fours(uint8_t* array, uint32_t i, __m256i v) {
  const __m256i pairs = _mm256_maddubs_epi16(v, _mm256_set1_epi16(0x1001));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(array + i / 2), _mm256_castsi256_si128(packed));
}

// -1 where the bit is set.
ZIPCCL_AVX2 inline __m256i get_ones(const uint8_t* array, uint32_t i) {
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i x = _mm256_shuffle_epi8(_mm256_set1_epi32(load<int32_t>(array + i / 8)), byte_of);
  return _mm256_cmpeq_epi8(_mm256_and_si256(x, bit_of), bit_of);
}
ZIPCCL_AVX2 inline __m256i get_twos(const uint8_t* array, uint32_t i) {
  __m256i bit0, bit1;
  spread_twos(load<uint64_t>(array + i / 4), &bit0, &bit1);
  return _mm256_or_si256(_mm256_and_si256(bit0, bytes(1)), _mm256_and_si256(bit1, bytes(2)));
}
ZIPCCL_AVX2 inline __m256i get_fours(const uint8_t* array, uint32_t i) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(array + i / 2));
  const __m128i low = _mm_and_si128(x, _mm_set1_epi8(15)),
                high = _mm_and_si128(_mm_srli_epi16(x, 4), _mm_set1_epi8(15));
  return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}

// Rests of 11 bits, as 2 x 16 values: an array of 8 bits, one of 2 and one of 1.
struct Eleven {
  static constexpr uint32_t kTwos = kTile, kOnes = kTwos + kTile / 4;
  ZIPCCL_AVX2 static inline void put(uint8_t* unit, uint32_t i, __m256i a, __m256i b) {
    const __m256i low = _mm256_set1_epi16(0xFF);
    store256(unit + i, to_bytes(_mm256_and_si256(a, low), _mm256_and_si256(b, low)));
    const __m256i high = to_bytes(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    put_twos(unit + kTwos, i, _mm256_and_si256(high, bytes(3)));
    put_ones(unit + kOnes, i, _mm256_srli_epi16(_mm256_and_si256(high, bytes(4)), 2));
  }
  ZIPCCL_AVX2 static inline void get(const uint8_t* unit, uint32_t i, __m256i* a, __m256i* b) {
    const __m256i low = swap_middle(load256(unit + i));
    const __m256i high =
        swap_middle(_mm256_or_si256(get_twos(unit + kTwos, i), _mm256_and_si256(get_ones(unit + kOnes, i), bytes(4))));
    *a = _mm256_unpacklo_epi8(low, high);
    *b = _mm256_unpackhi_epi8(low, high);
  }
};

// ---- 2-byte elements: bf16 and f16 -------------------------------------------------------------------------------

ZIPCCL_AVX2 void split_bf16(const uint8_t* src, uint8_t* symbols, uint8_t* unit) {
  const __m256i low_mask = _mm256_set1_epi16(0xFF);
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    const __m256i a = load256(src + 2 * i), b = load256(src + 2 * i + 32);
    const __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, low_mask), _mm256_and_si256(b, low_mask));
    const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    store256(unit + i, swap_middle(select(bytes(0x80), high, low)));
    const __m256i low_bit = _mm256_cmpgt_epi8(_mm256_setzero_si256(), low);  // -1 where set
    store256(symbols + i, swap_middle(_mm256_sub_epi8(_mm256_add_epi8(high, high), low_bit)));
  }
}
ZIPCCL_AVX2 void join_bf16(const uint8_t* unit, const uint8_t* symbols, uint8_t* dst) {
  const __m256i top = bytes(0x80);
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    const __m256i rest = swap_middle(load256(unit + i)), e = swap_middle(load256(symbols + i));
    const __m256i low = select(top, _mm256_slli_epi16(e, 7), rest);
    const __m256i high = select(top, rest, _mm256_srli_epi16(e, 1));
    store256(dst + 2 * i, _mm256_unpacklo_epi8(low, high));
    store256(dst + 2 * i + 32, _mm256_unpackhi_epi8(low, high));
  }
}

ZIPCCL_AVX2 inline __m256i rest_of_f16(__m256i v) {
  return _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi16(0x3FF)),
                         _mm256_slli_epi16(_mm256_srli_epi16(v, 15), 10));
}
ZIPCCL_AVX2 void split_f16(const uint8_t* src, uint8_t* symbols, uint8_t* unit) {
  const __m256i mask = _mm256_set1_epi16(31);
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    const __m256i a = load256(src + 2 * i), b = load256(src + 2 * i + 32);
    Eleven::put(unit, i, rest_of_f16(a), rest_of_f16(b));
    store256(symbols + i, to_bytes(_mm256_and_si256(_mm256_srli_epi16(a, 10), mask),
                                   _mm256_and_si256(_mm256_srli_epi16(b, 10), mask)));
  }
}
ZIPCCL_AVX2 inline __m256i join_words_f16(__m256i rest, __m256i e) {
  const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(rest, 10), 15);
  return _mm256_or_si256(_mm256_or_si256(sign, _mm256_and_si256(rest, _mm256_set1_epi16(0x3FF))),
                         _mm256_slli_epi16(_mm256_and_si256(e, _mm256_set1_epi16(31)), 10));
}
ZIPCCL_AVX2 void join_f16(const uint8_t* unit, const uint8_t* symbols, uint8_t* dst) {
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    __m256i a, b;
    Eleven::get(unit, i, &a, &b);
    store256(dst + 2 * i, join_words_f16(a, words_of(symbols + i)));
    store256(dst + 2 * i + 32, join_words_f16(b, words_of(symbols + i + 16)));
  }
}

// ---- 1-byte elements: e4m3 (rests of 4 bits) and e5m2 (of 3) ----------------------------------------------------

ZIPCCL_AVX2 void split_e4m3(const uint8_t* src, uint8_t* symbols, uint8_t* unit) {
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    const __m256i v = load256(src + i);
    put_fours(unit, i,
              _mm256_or_si256(_mm256_and_si256(v, bytes(7)), _mm256_and_si256(_mm256_srli_epi16(v, 4), bytes(8))));
    store256(symbols + i, _mm256_and_si256(_mm256_srli_epi16(v, 3), bytes(15)));
  }
}
ZIPCCL_AVX2 void join_e4m3(const uint8_t* unit, const uint8_t* symbols, uint8_t* dst) {
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    const __m256i rest = get_fours(unit, i), e = _mm256_and_si256(load256(symbols + i), bytes(15));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(rest, bytes(8)), 4);
    store256(dst + i,
             _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(e, 3)), _mm256_and_si256(rest, bytes(7))));
  }
}
ZIPCCL_AVX2 void split_e5m2(const uint8_t* src, uint8_t* symbols, uint8_t* unit) {
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    const __m256i v = load256(src + i);
    put_twos(unit, i, _mm256_and_si256(v, bytes(3)));
    store(unit + kTile / 4 + i / 8, static_cast<uint32_t>(_mm256_movemask_epi8(v)));
    store256(symbols + i, _mm256_and_si256(_mm256_srli_epi16(v, 2), bytes(31)));
  }
}
ZIPCCL_AVX2 void join_e5m2(const uint8_t* unit, const uint8_t* symbols, uint8_t* dst) {
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    const __m256i e = _mm256_and_si256(load256(symbols + i), bytes(31));
    const __m256i sign = _mm256_and_si256(get_ones(unit + kTile / 4, i), bytes(0x80));
    store256(dst + i, _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(e, 2)), get_twos(unit, i)));
  }
}

// ---- f32: rests of 24, 11 and 8 bits -----------------------------------------------------------------------------

ZIPCCL_AVX2 void symbols_of_f32(const uint8_t* src, uint8_t* symbols, uint64_t* mantissas) {
  const __m256i mask = _mm256_set1_epi32(0xFF);
  __m256i all = _mm256_setzero_si256();
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    __m256i v[4];
    for (uint32_t j = 0; j < 4; ++j) {
      v[j] = load256(src + 4 * i + 32 * j);
      all = _mm256_or_si256(all, v[j]);
      v[j] = _mm256_and_si256(_mm256_srli_epi32(v[j], 23), mask);
    }
    store256(symbols + i, to_bytes(v));
  }
  alignas(32) uint32_t lanes[8];
  store256(lanes, all);
  for (uint32_t lane : lanes) *mantissas |= lane & 0x7FFFFF;
}

// The top `bits` bits of sign and mantissa.
template <int kBits>
ZIPCCL_AVX2 inline __m256i rest_of_f32(__m256i v) {
  const __m256i mantissa = _mm256_srli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x7FFFFF)), 24 - kBits);
  return _mm256_or_si256(mantissa, _mm256_slli_epi32(_mm256_srli_epi32(v, 31), kBits - 1));
}
template <int kBits>
ZIPCCL_AVX2 inline __m256i join_dwords_f32(__m256i rest, __m256i e) {
  const __m256i mantissa = _mm256_and_si256(_mm256_slli_epi32(rest, 24 - kBits), _mm256_set1_epi32(0x7FFFFF));
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(rest, kBits - 1), 31);
  return _mm256_or_si256(_mm256_or_si256(sign, mantissa), _mm256_slli_epi32(e, 23));
}

template <int kBits>
ZIPCCL_AVX2 void write_rests_f32(const uint8_t* src, uint8_t* unit) {
  const __m256i low = _mm256_set1_epi32(0xFF);
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    __m256i v[4];
    for (uint32_t j = 0; j < 4; ++j) v[j] = rest_of_f32<kBits>(load256(src + 4 * i + 32 * j));
    if (kBits == 11) {
      Eleven::put(unit, i, swap_middle(_mm256_packus_epi32(v[0], v[1])), swap_middle(_mm256_packus_epi32(v[2], v[3])));
      continue;
    }
    for (uint32_t k = 0; k < kBits / 8; ++k) {
      __m256i byte[4];
      for (uint32_t j = 0; j < 4; ++j)
        byte[j] = _mm256_and_si256(_mm256_srli_epi32(v[j], static_cast<int>(8 * k)), low);
      store256(unit + k * kTile + i, to_bytes(byte));
    }
  }
}

template <int kBits>
ZIPCCL_AVX2 void join_f32(const uint8_t* unit, const uint8_t* symbols, uint8_t* dst) {
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    __m256i rest[4];
    if (kBits == 11) {
      __m256i a, b;
      Eleven::get(unit, i, &a, &b);
      rest[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(a));
      rest[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1));
      rest[2] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(b));
      rest[3] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(b, 1));
    } else {
      for (uint32_t j = 0; j < 4; ++j) {
        rest[j] = dwords_of(unit + i + 8 * j);
        for (uint32_t k = 1; k < kBits / 8; ++k) {
          const __m256i byte = dwords_of(unit + k * kTile + i + 8 * j);
          rest[j] = _mm256_or_si256(rest[j], _mm256_slli_epi32(byte, static_cast<int>(8 * k)));
        }
      }
    }
    for (uint32_t j = 0; j < 4; ++j) {
      store256(dst + 4 * i + 32 * j, join_dwords_f32<kBits>(rest[j], dwords_of(symbols + i + 8 * j)));
    }
  }
}

// ---- f64: rests of 53, 24, 11 and 8 bits -------------------------------------------------------------------------

constexpr uint64_t kMantissa64 = (uint64_t{1} << 52) - 1;

ZIPCCL_AVX2 bool symbols_of_f64(const uint8_t* src, uint8_t* symbols, uint64_t* mantissas) {
  uint64_t all = 0;
  uint32_t beyond = 0;
  for (uint32_t i = 0; i < kTile; ++i) {
    const uint64_t v = load<uint64_t>(src + 8 * i);
    all |= v & kMantissa64;
    const uint32_t symbol = dense::narrow_exponent(static_cast<uint32_t>(v >> 52 & 0x7FF));
    beyond |= symbol;
    symbols[i] = static_cast<uint8_t>(symbol);
  }
  *mantissas = all;
  return beyond < 256;
}

// Fields of 4, 2 and 1 bits behind the arrays of bytes.
ZIPCCL_AVX2 void write_rests_f64(uint32_t bits, const uint8_t* src, uint8_t* unit) {
  const uint32_t whole = bits / 8;
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    alignas(32) uint8_t last[kAtOnce];
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const uint64_t v = load<uint64_t>(src + 8 * (i + j));
      uint64_t rest = v >> 63 << (bits - 1) | (v & kMantissa64) >> (53 - bits);
      for (uint32_t k = 0; k < whole; ++k, rest >>= 8) unit[k * kTile + i + j] = static_cast<uint8_t>(rest);
      last[j] = static_cast<uint8_t>(rest);
    }
    __m256i v = load256(last);
    uint8_t* array = unit + whole * kTile;
    if (bits & 4) {
      put_fours(array, i, _mm256_and_si256(v, bytes(15)));
      array += kTile / 2;
      v = _mm256_and_si256(_mm256_srli_epi16(v, 4), bytes(15));
    }
    if (bits & 2) {
      put_twos(array, i, _mm256_and_si256(v, bytes(3)));
      array += kTile / 4;
      v = _mm256_and_si256(_mm256_srli_epi16(v, 2), bytes(3));
    }
    if (bits & 1) put_ones(array, i, v);
  }
}

ZIPCCL_AVX2 void join_f64(uint32_t bits, const uint8_t* unit, const uint8_t* symbols, uint8_t* dst) {
  const uint32_t whole = bits / 8;
  for (uint32_t i = 0; i < kTile; i += kAtOnce) {
    __m256i v = _mm256_setzero_si256();
    const uint8_t* array = unit + whole * kTile;
    int low = 0;
    if (bits & 4) {
      v = get_fours(array, i);
      array += kTile / 2;
      low = 4;
    }
    if (bits & 2) {
      v = _mm256_or_si256(v, _mm256_slli_epi16(get_twos(array, i), low));
      array += kTile / 4;
      low += 2;
    }
    if (bits & 1) v = _mm256_or_si256(v, _mm256_and_si256(get_ones(array, i), bytes(1 << low)));
    alignas(32) uint8_t last[kAtOnce];
    store256(last, v);
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      uint64_t rest = last[j];
      for (uint32_t k = whole; k-- > 0;) rest = rest << 8 | unit[k * kTile + i + j];
      const uint64_t mantissa = rest << (53 - bits) & kMantissa64;
      const uint64_t e = dense::widen_exponent(symbols[i + j]);
      store(dst + 8 * (i + j), rest >> (bits - 1) << 63 | e << 52 | mantissa);
    }
  }
}

}  // namespace

bool dense_split(const dense::Format& format, const uint8_t* src, uint8_t* symbols, uint8_t* unit,
                 uint64_t* mantissas) {
  switch (format.mantissa_bits) {
    case 7:
      split_bf16(src, symbols, unit);
      return true;
    case 10:
      split_f16(src, symbols, unit);
      return true;
    case 3:
      split_e4m3(src, symbols, unit);
      return true;
    case 2:
      split_e5m2(src, symbols, unit);
      return true;
    case 23:
      symbols_of_f32(src, symbols, mantissas);
      return true;
    default:
      return symbols_of_f64(src, symbols, mantissas);
  }
}

void dense_write_rests(const dense::Format& format, uint32_t bits, const uint8_t* src, uint8_t* unit) {
  if (format.mantissa_bits != 23) return write_rests_f64(bits, src, unit);
  return bits == 24   ? write_rests_f32<24>(src, unit)
         : bits == 11 ? write_rests_f32<11>(src, unit)
                      : write_rests_f32<8>(src, unit);
}

void dense_join(const dense::Format& format, uint32_t bits, const uint8_t* unit, const uint8_t* symbols, uint8_t* dst) {
  switch (format.mantissa_bits) {
    case 7:
      return join_bf16(unit, symbols, dst);
    case 10:
      return join_f16(unit, symbols, dst);
    case 3:
      return join_e4m3(unit, symbols, dst);
    case 2:
      return join_e5m2(unit, symbols, dst);
    case 23:
      return bits == 24   ? join_f32<24>(unit, symbols, dst)
             : bits == 11 ? join_f32<11>(unit, symbols, dst)
                          : join_f32<8>(unit, symbols, dst);
    default:
      return join_f64(bits, unit, symbols, dst);
  }
}

}  // namespace cpu
}  // namespace zipccl

#endif  // __x86_64__
