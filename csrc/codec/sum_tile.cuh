// decode_sum(), the inner step: a window tile of 1024 values, as nearly all tiles of coded inputs are, added to the
// sums that a warp holds. fast_decode.cuh says what a tile is and decodes all the others.
//
// A lane has 32 values, 256 k + 8 lane + j for k = 0..3, j = 0..7, and bit 8 k + j of each plane word of its own. The
// order in which exponents come out of the planes is the cheapest one, as sums, unlike values, need not lie next to
// each other: four exponents of a word are those of the values j and j + 4 of two loads, 2 h and 2 h + 1.
#pragma once

#include "codec/fast_decode.cuh"
#include "codec/hopper.cuh"
#include "format/float16.h"

namespace zipccl {
namespace cuda {

constexpr int kRuns = kTile / kWarpSize / 8;  // of 8 values, to a lane

// A lane's sums: those of the values 256 k + 8 lane + 0..7 of the tile in sum[k].
struct LaneSums {
  float sum[kRuns][8];
};

// Shared memory by address, where one is made of bits.
__device__ __forceinline__ void store_four(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ uint4 load_four(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// Unless condition is 0. The compiler would branch.
__device__ __forceinline__ void store_byte_if(uint32_t condition, uint32_t address, uint32_t byte) {
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.shared.u8 [%1], %2; }" ::"r"(condition),
      "r"(address), "r"(byte)
      : "memory");
}

// Where a lane patches its exponents, 32 bytes: the exponent of bit b lies at own_exponents ^ exponent_of_bit(b). Half
// of the lanes have their two vectors the other way round, so that no two of eight lanes meet in a bank. `space` is
// aligned to 32.
__device__ __forceinline__ uint32_t own_exponents(const Exponents* space, int lane) {
  return shared_address(space) + (32 * lane ^ (lane & 4) << 2);
}
// Five bits, rotated: b % 4 says which pair of words, the rest which byte of it.
__device__ __forceinline__ uint32_t exponent_of_bit(uint32_t b) { return b * 33 >> 2 & 31u; }

// Two values, each in half a word, added to two sums.
template <bool kScaled>
__device__ __forceinline__ void add_two(uint32_t two, float scale, float* low, float* high) {
  const float a = bits_float(two << 16), b = bits_float(two & 0xFFFF0000u);
  *low = __fadd_rn(*low, kScaled ? __fmul_rn(a, scale) : a);
  *high = __fadd_rn(*high, kScaled ? __fmul_rn(b, scale) : b);
}

// unit, dynamic: the tile's, in shared memory; behind its dynamic bytes, up to kTile + 3 of them can be read.
// exponents: own_exponents(). False, to one lane, and sums worth nothing: the planes have another number of escapes
// than the tables say.
template <bool kScaled>
__device__ __forceinline__ bool add_window_tile(uint32_t base, uint32_t dynamic_size, const uint8_t* unit,
                                                const uint8_t* dynamic, uint32_t exponents, float scale, int lane,
                                                LaneSums* sums) {
  const uint32_t* const planes = reinterpret_cast<const uint32_t*>(unit + kTile) + lane;
  const uint32_t p[3] = {planes[0], planes[kPlaneWords], planes[2 * kPlaneWords]};
  uint32_t escapes = none_of(p[0], p[1], p[2]);
  const uint32_t own = __popc(escapes);
  const uint32_t up_to_own = warp_inclusive_sum(own);

  uint32_t x[4];  // codes: nibble n of x[j] is that of bit 4 n + j
  transpose_planes(p, x);
  const Window window(base);
  uint32_t e[4][2];  // e[j][h], bytes: values j, j + 4 of load 2 h, values j, j + 4 of load 2 h + 1
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    e[j][0] = window.exponents(x[j]);
    e[j][1] = window.exponents(x[j] >> 16);
  }
  if (dynamic_size != 0) {
    store_four(exponents, e[0][0], e[0][1], e[1][0], e[1][1]);
    store_four(exponents ^ 16u, e[2][0], e[2][1], e[3][0], e[3][1]);
    // Four escapes at a time, whether a lane has them or not: of 1024 values with 3.7 % escapes the lane that has most
    // has 3.7 of them on average.
    constexpr int kAtOnce = 4;
    const uint8_t* from = dynamic + (up_to_own - own);
    do {
      uint32_t exponent[kAtOnce], bit[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) exponent[i] = from[i];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        bit[i] = escapes & (0u - escapes);
        escapes ^= bit[i];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        store_byte_if(bit[i], exponents ^ exponent_of_bit(31 - __clz(bit[i])), exponent[i]);
      }
      from += kAtOnce;
    } while (escapes != 0);
    const uint4 a = load_four(exponents), b = load_four(exponents ^ 16u);
    e[0][0] = a.x, e[0][1] = a.y, e[1][0] = a.z, e[1][1] = a.w;
    e[2][0] = b.x, e[2][1] = b.y, e[3][0] = b.z, e[3][1] = b.w;
  }

  uint2 sm[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) sm[k] = *reinterpret_cast<const uint2*>(unit + 256 * k + 8 * lane);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pick = 0x4400 + 0x1111 * j;  // byte j of either load, twice
      const uint2 even = sm[2 * h], odd = sm[2 * h + 1];
      float *const low = sums->sum[2 * h], *const high = sums->sum[2 * h + 1];
      add_two<kScaled>(select_bits(kBf16Exponents, e[j][h] << 7, __byte_perm(even.x, odd.x, pick)), scale, low + j,
                       high + j);
      add_two<kScaled>(select_bits(kBf16Exponents, e[j][h] >> 1, __byte_perm(even.y, odd.y, pick)), scale, low + j + 4,
                       high + j + 4);
    }
  }
  return lane != kWarpSize - 1 || up_to_own == dynamic_size;
}

}  // namespace cuda
}  // namespace zipccl
