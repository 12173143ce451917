// Code::fast, values to frame: a tile. A warp encodes one, a lane 32 values of it: one word of each plane. What becomes
// of tiles is in fast_encode.cu and fast_encode_many.cu.
#pragma once

#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {

constexpr int kTiles = static_cast<int>(kGroupTiles);
constexpr uint32_t kTile = static_cast<uint32_t>(kTileValues);
static_assert(kTiles == kWarpSize, "a warp plans a group, a lane each tile");
constexpr uint32_t kPlanesBytes32 = static_cast<uint32_t>(kPlanesBytes);

// ---- A tile ---------------------------------------------------------------------------------------------------

// A lane's values: w[k] holds values 256 k + 8 lane + 0..7 of the tile, two to a word.
struct LaneValues {
  uint32_t w[4][4];
};

__device__ __forceinline__ uint32_t both_halves(uint32_t v) { return (v & 0xFFFFu) * 0x10001u; }

// A word's two values without their signs: exponents in the bytes 1 and 3, bits of no interest in the others. A
// multiplication, because the units for logic are the busy ones.
__device__ __forceinline__ uint32_t exponents_on_top(uint32_t w) { return w * 2; }

// mean_exponent(). sum < 2^16 and n <= 256, so the approximate quotient is off by less than 1e-4, while a quotient that
// is no integer lies at least 1/256 below the next one.
__device__ __forceinline__ uint32_t quick_mean(uint32_t sum, uint32_t n) {
  if (n == 256) return (sum + 128) / 256;
  if (n == 0) return 0;
  return static_cast<uint32_t>(__fdividef(static_cast<float>(sum + n / 2), static_cast<float>(n)) + 1.0f / 1024);
}

// mean_exponent() of tile.h. Values past m are zero and do not count.
__device__ __forceinline__ uint32_t mean_of_samples(const LaneValues& v) {
  uint32_t sum = 0, nonzero = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t e = exponents_on_top(v.w[k][0]);  // i % 8 < 2: the first word
    sum = __dp4a(e, 0x01000100u, sum);
    nonzero = __dp4a(__vminu2(e, 0x01000100u), 0x01000100u, nonzero);
  }
  const uint32_t totals = warp_sum(sum + (nonzero << 16));  // at most 256 samples: either total fits 16 bits
  return quick_mean(totals & 0xFFFFu, totals >> 16);
}

// A lane's word of each bit plane of its values' codes, relative to some base: exponent - base + 1, and 15 for all that
// are not in 0..14. Codes over 7 exist only until the base is settled.
struct Planes {
  uint32_t p[4];
};

__device__ __forceinline__ Planes make_planes(const LaneValues& v, uint32_t base) {
  const uint32_t shift = both_halves((1u - base) << 8);
  uint32_t x[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t nibbles[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      // Codes of the words `half` and `half` + 2 of two runs, a byte each; then a nibble each.
      uint32_t code[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t a = __viaddmin_u16x2(exponents_on_top(v.w[2 * pair][half + 2 * h]), shift, 0x0F000F00u);
        const uint32_t b = __viaddmin_u16x2(exponents_on_top(v.w[2 * pair + 1][half + 2 * h]), shift, 0x0F000F00u);
        code[h] = __byte_perm(a, b, 0x7531);
      }
      nibbles[pair] = code[0] + 16 * code[1];
    }
    // Byte k of x[j] holds the values (j, j + 4) of run k.
    x[2 * half] = __byte_perm(nibbles[0], nibbles[1], 0x6420);
    x[2 * half + 1] = __byte_perm(nibbles[0], nibbles[1], 0x7531);
  }
  // Transpose bits within nibbles: bit j of a nibble of plane p is bit p of the same nibble of x[j].
  const uint32_t x02 = select_bits(0x33333333u, x[0], x[2] * 4), x02_high = select_bits(0x33333333u, x[0] >> 2, x[2]);
  const uint32_t x13 = select_bits(0x33333333u, x[1], x[3] * 4), x13_high = select_bits(0x33333333u, x[1] >> 2, x[3]);
  return {{select_bits(0x55555555u, x02, x13 * 2), select_bits(0x55555555u, x02 >> 1, x13),
           select_bits(0x55555555u, x02_high, x13_high * 2), select_bits(0x55555555u, x02_high >> 1, x13_high)}};
}

// The rule of tile.h: how far above its first candidate, to which `planes` is relative, the base lies; at most `most`.
// What tells the candidates apart is how many samples have the codes 1, 2, 8 and 9: the first holds the 1s and 2s, the
// second the 2s and 8s, the third the 8s and 9s.
__device__ __forceinline__ uint32_t choose_step(const Planes& planes, uint32_t valid, uint32_t most) {
  const uint32_t* p = planes.p;
  const uint32_t samples = 0x03030303u & valid;
  const uint32_t low = samples & ~p[3] & ~p[2], high = samples & p[3] & ~p[2] & ~p[1];
  const int first = __popc(low & ~p[1] & p[0]) - __popc(high & ~p[0]);  // 1s less 8s
  const int second = __popc(low & p[1] & ~p[0]) - __popc(high & p[0]);  // 2s less 9s
  const uint32_t totals = warp_sum(static_cast<uint32_t>(first + second * 65536));
  const int all_first = static_cast<int16_t>(totals & 0xFFFFu);
  const int all_second = static_cast<int>(totals - static_cast<uint32_t>(all_first)) >> 16;
  const uint32_t step = all_first < 0 && most > 0;
  return most > 1 && (step ? 0 : all_first) + all_second < 0 ? 2 : step;
}

// Makes the codes relative to a base `step` higher, then those over 7 zero.
__device__ __forceinline__ void settle(Planes* planes, uint32_t step, uint32_t valid) {
  uint32_t* p = planes->p;
  if (step == 1) {
    p[3] ^= ~(p[2] | p[1] | p[0]);
    p[2] ^= ~(p[1] | p[0]);
    p[1] ^= ~p[0];
    p[0] = ~p[0];
  } else if (step == 2) {
    p[3] ^= ~(p[2] | p[1]);
    p[2] ^= ~p[1];
    p[1] = ~p[1];
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) p[i] &= valid & ~p[3];
}

__device__ __forceinline__ uint2 sign_mantissas(const uint32_t (&w)[4]) {
  const uint32_t a = select_bits(0x80808080u, __byte_perm(w[0], w[1], 0x7531), __byte_perm(w[0], w[1], 0x6420));
  const uint32_t b = select_bits(0x80808080u, __byte_perm(w[2], w[3], 0x7531), __byte_perm(w[2], w[3], 0x6420));
  return make_uint2(a, b);
}

__device__ __forceinline__ uint2 exponent_bytes(const uint32_t (&w)[4]) {
  return make_uint2(__byte_perm(exponents_on_top(w[0]), exponents_on_top(w[1]), 0x7531),
                    __byte_perm(exponents_on_top(w[2]), exponents_on_top(w[3]), 0x7531));
}

// Are all m values equal to the first?
__device__ __forceinline__ bool all_equal(const LaneValues& v, uint32_t valid) {
  const uint32_t first = __shfl_sync(kFullWarp, v.w[0][0] & 0xFFFFu, 0);
  // Nearly every tile differs somewhere among the first values of the lanes already.
  if (!__all_sync(kFullWarp, (v.w[0][0] & 0xFFFFu) == first || !(valid & 1u))) return false;
  uint32_t differs = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t two = valid >> (8 * k + 2 * q);
      const uint32_t mask = (two & 1u ? 0x0000FFFFu : 0u) | (two & 2u ? 0xFFFF0000u : 0u);
      differs |= (v.w[k][q] ^ both_halves(first)) & mask;
    }
  }
  return __all_sync(kFullWarp, differs == 0);
}

// Writes a lane's exponents, up to `padded` of the tile's: 8 bytes each of values 256 k + 8 lane on.
__device__ __forceinline__ void put_exponents(uint8_t* to, const LaneValues& v, uint32_t padded, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < padded) *reinterpret_cast<uint2*>(to + i) = exponent_bytes(v.w[k]);
  }
}

// Copies a lane's escaped exponents from where put_exponents() has put them to the bytes before `end`. The last escape
// first: the highest bit is found by one instruction.
__device__ __forceinline__ void put_escapes(const uint8_t* exponents, uint32_t escapes, uint8_t* end, int lane) {
  const uint8_t* from = exponents + 8 * lane;
  while (escapes != 0) {
    const uint32_t bit = 31 - __clz(escapes);
    escapes ^= 1u << bit;
    *--end = from[bit + 31 * (bit & 24u)];  // byte of value 256 * (bit / 8) + bit % 8
  }
}

// What the tables say about a tile: its word in the low half, its base above.
__device__ __forceinline__ uint32_t pack_entry(uint16_t word, uint32_t base) { return word | base << 16; }
__device__ __forceinline__ uint16_t entry_word(uint32_t entry) { return static_cast<uint16_t>(entry); }
__device__ __forceinline__ uint8_t entry_base(uint32_t entry) { return static_cast<uint8_t>(entry >> 16); }

__device__ __forceinline__ void put_sign_mantissas(uint8_t* to, const LaneValues& v, uint32_t padded, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < padded) *reinterpret_cast<uint2*>(to + i) = sign_mantissas(v.w[k]);
  }
}

// What a tile becomes.
struct PlannedTile {
  uint32_t entry;
  uint32_t planes[3];  // window: the lane's word of each
  uint32_t end;        // window: escapes of the lanes up to this one
  __device__ __forceinline__ uint32_t mode() const { return tile_word_mode(entry_word(entry)); }
  __device__ __forceinline__ uint32_t dynamic() const { return tile_word_dynamic(entry_word(entry)); }
  __device__ __forceinline__ bool is(TileMode m) const { return mode() == static_cast<uint32_t>(m); }
  __device__ __forceinline__ uint32_t escapes(uint32_t valid) const {
    return ~(planes[0] | planes[1] | planes[2]) & valid;
  }
};

// Of m values, zeros behind them; a full tile has m = kTile, known to the compiler.
template <bool kFull>
__device__ __forceinline__ PlannedTile plan_tile(const LaneValues& v, uint32_t m, int lane) {
  if (kFull) m = kTile;
  const uint32_t valid = kFull ? 0xFFFFFFFFu : valid_values(m, lane);
  if (all_equal(v, valid)) return {pack_entry(pack_tile_word(TileMode::constant, 2), 0), {}, 0};
  const uint32_t mean = mean_of_samples(v);
  const uint32_t first_base = candidate_base(mean, 0);
  Planes planes = make_planes(v, first_base);
  const uint32_t step = choose_step(planes, valid, candidate_base(mean, kBaseCandidates - 1) - first_base);
  settle(&planes, step, valid);
  PlannedTile tile = {0, {planes.p[0], planes.p[1], planes.p[2]}, 0};
  tile.end = warp_inclusive_sum(__popc(tile.escapes(valid)));
  const uint32_t total = __shfl_sync(kFullWarp, tile.end, kWarpSize - 1);
  tile.entry = m <= kPlanesBytes32 + total  // not window_pays()
                   ? pack_entry(pack_tile_word(TileMode::raw, m), 0)
                   : pack_entry(pack_tile_word(TileMode::window, total), first_base + step);
  return tile;
}

// The values that a lane works on.
template <bool kFull>
__device__ __forceinline__ LaneValues load_values(const uint16_t* src, uint32_t m, int lane) {
  LaneValues v;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if constexpr (kFull) {
      const uint4 in = *reinterpret_cast<const uint4*>(src + i);
      v.w[k][0] = in.x, v.w[k][1] = in.y, v.w[k][2] = in.z, v.w[k][3] = in.w;
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint32_t j = i + 2 * q;
        v.w[k][q] = (j < m ? src[j] : 0u) | (j + 1 < m ? static_cast<uint32_t>(src[j + 1]) << 16 : 0u);
      }
    }
  }
  return v;
}

}  // namespace cuda
}  // namespace zipccl
