// Code::fast, tensor to frame. A block owns a group of 32 tiles, a warp a tile at a time, a lane 32 values of it: one
// word of each plane.
//
//   1. A tile is loaded into registers and encoded; its unit goes to the tile's slot of shared memory, its dynamic
//   bytes
//      to a pool that the group's tiles share. What does not fit (raw tiles, escapes that the pool has no room for) is
//      made again from the values in step 3. Small slots are what lets enough groups run at a time for one to work
//      while another waits.
//   2. The sizes of the group's tiles give the size of its part of the frame. Where the part begins follows from the
//      groups before it, by decoupled look-back (Merrill and Garland, "Single-pass parallel prefix scan with
//      decoupled look-back", 2016).
//   3. Units and dynamic bytes go from shared memory to the frame.
//
// Timing decides who waits for whom, and which tile gets room in the pool, but never where a byte of the frame goes.
#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerProcessor = 4;  // as many as shared memory holds on sm_90
constexpr int kTiles = static_cast<int>(kGroupTiles);
constexpr uint32_t kTile = static_cast<uint32_t>(kTileValues);
static_assert(kTiles == kWarpSize, "a warp plans a group, a lane each tile");
constexpr uint32_t kSlotBytes = static_cast<uint32_t>(kMaxUnitBytes);
constexpr uint32_t kPoolBytes = 11 << 10;  // 352 a tile
static_assert(kSlotBytes >= kTile, "a slot also holds a tile's exponents");

// ---- A tile ---------------------------------------------------------------------------------------------------

// A lane's values: w[k] holds values 256 k + 8 lane + 0..7 of the tile, two to a word.
struct LaneValues {
  uint32_t w[4][4];
};

// Exponents of the two values in a word, as 16-bit halves.
__device__ __forceinline__ uint32_t exponents(uint32_t w) { return (w >> 7) & 0x00FF00FFu; }

__device__ __forceinline__ uint32_t both_halves(uint32_t v) { return (v & 0xFFFFu) * 0x10001u; }

// mean_exponent() without an integer division. sum < 2^16 and n <= 256, so the approximate quotient is off by less
// than 1e-4, while a quotient that is no integer lies at least 1/256 below the next one.
__device__ __forceinline__ uint32_t quick_mean(uint32_t sum, uint32_t n) {
  if (n == 0) return 0;
  return static_cast<uint32_t>(__fdividef(static_cast<float>(sum + n / 2), static_cast<float>(n)) + 1.0f / 1024);
}

// First candidate for the base: mean_exponent() and candidate_base() of tile.h. Values past m are zero and do not
// count.
__device__ __forceinline__ uint32_t mean_of_samples(const LaneValues& v) {
  uint32_t sum = 0, nonzero = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t e = exponents(v.w[k][0]);  // i % 8 < 2: the first word
    sum = __dp4a(e, 0x01010101u, sum);
    nonzero = __dp4a(__viaddmin_u16x2(e, 0, 0x00010001u), 0x01010101u, nonzero);
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
  // Codes, shifted left by 7 because exponents stand there.
  const uint32_t shift = both_halves((1u - base) << 7);
  uint32_t u[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t code[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) code[q] = __viaddmin_u16x2(v.w[k][q] & 0x7F807F80u, shift, 0x07800780u);
    // A nibble per code; bytes hold the values (0, 4), (2, 6), (1, 5), (3, 7).
    u[k] = ((code[0] + 16 * code[2]) >> 7) + 2 * (code[1] + 16 * code[3]);
  }
  // Transpose bytes: byte k of x[j] holds the values (j, j + 4) of load k.
  const uint32_t u01 = __byte_perm(u[0], u[1], 0x5140), u23 = __byte_perm(u[2], u[3], 0x5140);
  const uint32_t v01 = __byte_perm(u[0], u[1], 0x7362), v23 = __byte_perm(u[2], u[3], 0x7362);
  const uint32_t x0 = __byte_perm(u01, u23, 0x5410), x2 = __byte_perm(u01, u23, 0x7632);
  const uint32_t x1 = __byte_perm(v01, v23, 0x5410), x3 = __byte_perm(v01, v23, 0x7632);
  // Transpose bits within nibbles: bit j of a nibble of plane p is bit p of the same nibble of x[j].
  const uint32_t x02 = select_bits(0x33333333u, x0, x2 << 2), x02_high = select_bits(0x33333333u, x0 >> 2, x2);
  const uint32_t x13 = select_bits(0x33333333u, x1, x3 << 2), x13_high = select_bits(0x33333333u, x1 >> 2, x3);
  return {{select_bits(0x55555555u, x02, x13 << 1), select_bits(0x55555555u, x02 >> 1, x13),
           select_bits(0x55555555u, x02_high, x13_high << 1), select_bits(0x55555555u, x02_high >> 1, x13_high)}};
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
  const uint32_t high[2] = {__byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531)};
  const uint32_t low[2] = {__byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420)};
  return make_uint2(select_bits(0xFEFEFEFEu, high[0] << 1, low[0] >> 7),
                    select_bits(0xFEFEFEFEu, high[1] << 1, low[1] >> 7));
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

// In shared memory, a lane's exponents and its sign-mantissa bytes lie in the same places: of values 256 k + 8 lane, 8
// bytes each.
__device__ __forceinline__ void put_exponents(uint8_t* slot, const LaneValues& v, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) *reinterpret_cast<uint2*>(slot + 256 * k + 8 * lane) = exponent_bytes(v.w[k]);
}

// Copies a lane's escaped exponents from its places in `slot` to the bytes before `end`. The last escape first.
__device__ __forceinline__ void put_escapes(const uint8_t* slot, uint32_t escapes, uint8_t* end, int lane) {
  const uint8_t* from = slot + 8 * lane;
  while (escapes != 0) {
    const uint32_t bit = 31 - __clz(escapes);
    escapes ^= 1u << bit;
    *--end = from[bit + 31 * (bit & 24u)];  // byte of value 256 * (bit / 8) + bit % 8
  }
}

struct TileEntry {
  uint16_t word;
  uint8_t base;
};

constexpr uint32_t kNoPlace = 0xFFFFFFFFu;

// Room for n bytes in the pool, kNoPlace if there is none. For a whole warp.
__device__ __forceinline__ uint32_t take_from_pool(uint32_t* pool_used, uint32_t n, int lane) {
  uint32_t at = 0;
  if (lane == 0) at = atomicAdd(pool_used, (n + 3) & ~3u);
  at = __shfl_sync(kFullWarp, at, 0);
  return at + n <= kPoolBytes ? at : kNoPlace;
}

// Encodes the m values, zeros behind them: a window tile's unit into `slot`, its escapes into the pool, and a constant
// tile's value into both. *place: of the dynamic bytes in the pool. A full tile has m = kTile, known to the compiler.
template <bool kFull>
__device__ __forceinline__ TileEntry encode_tile(const LaneValues& v, uint8_t* slot, uint8_t* pool, uint32_t* pool_used,
                                                 uint32_t m, uint32_t* place, int lane) {
  if (kFull) m = kTile;
  *place = kNoPlace;
  const uint32_t valid = kFull ? 0xFFFFFFFFu : valid_values(m, lane);
  if (all_equal(v, valid)) {
    if (lane == 0) *reinterpret_cast<uint16_t*>(slot) = static_cast<uint16_t>(v.w[0][0]);
    return {pack_tile_word(TileMode::constant, 2), 0};
  }

  const uint32_t mean = mean_of_samples(v);
  const uint32_t first_base = candidate_base(mean, 0);
  Planes planes = make_planes(v, first_base);
  const uint32_t step = choose_step(planes, valid, candidate_base(mean, kBaseCandidates - 1) - first_base);
  settle(&planes, step, valid);
  const uint32_t escapes = ~(planes.p[0] | planes.p[1] | planes.p[2]) & valid;
  const uint32_t end = warp_inclusive_sum(__popc(escapes));
  const uint32_t total = __shfl_sync(kFullWarp, end, kWarpSize - 1);
  if (!window_pays(m, total)) return {pack_tile_word(TileMode::raw, m), 0};

  if (total != 0) {
    *place = take_from_pool(pool_used, total, lane);
    if (*place != kNoPlace) {
      put_exponents(slot, v, lane);
      put_escapes(slot, escapes, pool + *place + end, lane);
    }
  }
  const uint32_t padded = align_up(m);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < padded) *reinterpret_cast<uint2*>(slot + i) = sign_mantissas(v.w[k]);
  }
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    *reinterpret_cast<uint32_t*>(slot + padded + kPlaneBytes * p + 4 * lane) = planes.p[p];
  }
  return {pack_tile_word(TileMode::window, total), static_cast<uint8_t>(first_base + step)};
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

// ---- Where a group's part begins ------------------------------------------------------------------------------

// State of a group: 0, or its size, or the size of all groups up to it, with a flag in the low bits. Sizes are
// multiples of kFrameAlign. The word says all there is to say, so no other memory access needs ordering with it.
constexpr uint64_t kOwnSize = 1;
constexpr uint64_t kPrefix = 2;
constexpr uint64_t kFlags = 3;

__device__ __forceinline__ uint64_t load_state(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_state(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Size of all groups before group g, for a whole warp. Blocks begin in the order of their numbers, so the groups waited
// for here have blocks that run already and wait only for groups before them. CUDA does not promise that order, but its
// own library of scans, CUB, looks back over the same numbers.
__device__ uint64_t exclusive_prefix(uint64_t* states, uint64_t g, uint64_t size, int lane) {
  uint64_t before = 0;
  if (g > 0) {
    if (lane == 0) store_state(states + g, size | kOwnSize);
    for (uint64_t end = g;; end -= kWarpSize) {
      // Lane i looks at group end - 1 - i.
      const bool exists = static_cast<uint64_t>(lane) < end;
      uint64_t state;
      uint32_t wanted;  // lanes up to the nearest known prefix
      bool found;
      do {
        state = exists ? load_state(states + (end - 1 - lane)) : kPrefix;
        const uint32_t prefixes = __ballot_sync(kFullWarp, (state & kFlags) == kPrefix);
        found = prefixes != 0;
        wanted = found ? prefixes ^ (prefixes - 1) : kFullWarp;
      } while (__ballot_sync(kFullWarp, (state & kFlags) == 0) & wanted);
      before += warp_sum((wanted >> lane) & 1u ? state & ~kFlags : uint64_t{0});
      if (found) break;
    }
  }
  if (lane == 0) store_state(states + g, (before + size) | kPrefix);
  return before;
}

// ---- A group --------------------------------------------------------------------------------------------------

// Copies n bytes of shared memory, src aligned to 16, to any address, by a warp.
__device__ __forceinline__ void store_bytes(uint8_t* dst, const uint8_t* src, uint32_t n, int lane) {
  if (n <= 4 * kWarpSize) {  // bytes that meet in a memory access anyway
#pragma unroll
    for (uint32_t r = 0; r < 4 * kWarpSize; r += kWarpSize) {
      if (r >= n) break;
      if (r + lane < n) dst[r + lane] = src[r + lane];
    }
    return;
  }
  const uint32_t head = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(dst)) & 3u;
  const uint32_t words = (n - head) / 4;
  const uint32_t tail = n - head - 4 * words;
  if (lane < head) dst[lane] = src[lane];
  const uint32_t* from = reinterpret_cast<const uint32_t*>(src);
  uint32_t* to = reinterpret_cast<uint32_t*>(dst + head);
  for (uint32_t i = lane; i < words; i += kWarpSize) {
    const uint32_t low = from[i];
    to[i] = head == 0 ? low : __funnelshift_r(low, from[i + 1], 8 * head);
  }
  if (lane < tail) dst[n - tail + lane] = src[n - tail + lane];
}

__device__ __forceinline__ void zero_bytes(uint8_t* dst, uint64_t n, int lane) {
  for (uint64_t i = lane; i < n; i += kWarpSize) dst[i] = 0;
}

// Places within the group's part, and of it.
struct GroupPlan {
  uint8_t* units;    // the group's first unit
  uint8_t* dynamic;  // its dynamic bytes
  uint32_t unit_begin[kTiles];
  uint32_t dynamic_begin[kTiles];
  uint32_t place[kTiles];  // of the dynamic bytes in the pool
  TileEntry entry[kTiles];
  uint32_t pool_used;
};

// A group and the job that it belongs to.
struct Group {
  const uint16_t* src;  // of the job
  uint8_t* frame;
  uint64_t count;
  uint64_t* states;
  uint64_t* frame_bytes;  // may be null
  bool split;
  uint64_t index;
  uint32_t tiles;  // in the group; none only in a job without values

  __device__ __forceinline__ uint64_t tile(uint32_t t) const { return index * kGroupTiles + t; }
  __device__ __forceinline__ uint32_t values_in(uint32_t t) const { return values_in_tile(count, tile(t)); }
};

__device__ __forceinline__ Group find_group(const EncodeLaunch& launch, uint64_t block) {
  const int i = find_job(launch, block);
  const EncodeJob& job = launch.job[i];
  const uint64_t index = block - launch.first_block[i];
  const uint64_t tiles_left = tile_count(job.count) - index * kGroupTiles;
  return {static_cast<const uint16_t*>(job.src),
          static_cast<uint8_t*>(job.dst),
          job.count,
          launch.states + launch.first_block[i],
          launch.frame_bytes == nullptr ? nullptr : launch.frame_bytes + i,
          (launch.header.flags & kFlagSplit) != 0,
          index,
          tiles_left < kGroupTiles ? static_cast<uint32_t>(tiles_left) : kTiles};
}

// By one warp: sizes, place, tables, and the header when the group is the last.
__device__ __forceinline__ void plan_group(const Group& group, const FrameHeader& header, GroupPlan* plan, int lane) {
  if (group.count == 0) {
    if (lane == 0) write_header(header, 0, kHeaderBytes, 0, group.frame);
    if (lane == 0 && group.frame_bytes != nullptr) *group.frame_bytes = kHeaderBytes;
    return;
  }
  const uint64_t g = group.index, tile = group.tile(lane);
  const bool exists = lane < group.tiles;
  const TileEntry entry = exists ? plan->entry[lane] : TileEntry{0, 0};
  const uint32_t dynamic = tile_word_dynamic(entry.word);
  uint32_t unit = exists ? unit_bytes(tile_word_mode(entry.word), values_in_tile(group.count, tile)) : 0;
  const uint32_t reserved =
      !group.split ? unit : (exists ? align_up(values_in_tile(group.count, tile)) + kPlanesBytes : 0);
  // One scan for both: the units of a group take less than 2^16 bytes, its dynamic bytes less than 2^16.
  const uint32_t both = reserved | dynamic << 16;
  const uint32_t up_to = warp_inclusive_sum(both);
  const uint32_t all = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  plan->unit_begin[lane] = (up_to - both) & 0xFFFFu;
  plan->dynamic_begin[lane] = (up_to - both) >> 16;

  const uint64_t units_size = all & 0xFFFFu, dynamic_size = align_up(all >> 16);
  const uint64_t size = group.split ? dynamic_size : units_size + dynamic_size;
  wait_for_previous();  // which clears the states
  const uint64_t begin = exclusive_prefix(group.states, g, size, lane);
  const uint64_t parts = fast_static_bytes(group.count, group.split ? FrameLayout::split : FrameLayout::compact);
  if (lane == 0) {
    uint8_t* const part = group.frame + parts + begin;
    plan->units = group.split ? group.frame + tables_end(group.count) + g * kGroupTiles * kMaxUnitBytes : part;
    plan->dynamic = group.split ? part : part + units_size;
    *reinterpret_cast<uint64_t*>(group.frame + group_table_begin() + 8 * g) = begin;
  }
  uint8_t* words = group.frame + tile_word_begin(group.count);
  uint8_t* bases = group.frame + tile_base_begin(group.count);
  if (exists) {
    reinterpret_cast<uint16_t*>(words)[tile] = entry.word;
    bases[tile] = entry.base;
  }
  // Padding behind the group's dynamic bytes.
  zero_bytes(group.frame + (group.split ? 0 : units_size) + parts + begin + (all >> 16), dynamic_size - (all >> 16),
             lane);

  if (g + 1 < group_count(group.count)) return;
  const uint64_t groups_end = group_table_begin() + 8 * group_count(group.count);
  const uint64_t words_end = 2 * tile_count(group.count), bases_end = tile_count(group.count);
  zero_bytes(group.frame + groups_end, tile_word_begin(group.count) - groups_end, lane);
  zero_bytes(words + words_end, align_up(words_end) - words_end, lane);
  zero_bytes(bases + bases_end, align_up(bases_end) - bases_end, lane);
  if (lane == 0) {
    write_header(header, group.count, parts + begin + size, 0, group.frame);
    if (group.frame_bytes != nullptr) *group.frame_bytes = parts + begin + size;
  }
}

// ---- A block --------------------------------------------------------------------------------------------------

struct Shared {
  uint8_t* slots;
  uint8_t* pool;
  GroupPlan* plan;
};

// kFull: all tiles of the group exist and are full, and the values are aligned to 16 bytes, so that the compiler has
// less to ask for.

template <bool kFull>
__device__ __forceinline__ void encode_tiles(const Group& group, const Shared& shared, int warp, int lane) {
  const auto load = [&](uint32_t t) {
    return load_values<kFull>(group.src + group.tile(t) * kTileValues, kFull ? kTile : group.values_in(t), lane);
  };
  const uint32_t tiles = kFull ? kTiles : group.tiles;
  LaneValues next = {};
  if (warp < tiles) next = load(warp);
#pragma unroll 1
  for (uint32_t t = warp; t < tiles; t += kWarps) {
    const LaneValues v = next;
    if (t + kWarps < tiles) next = load(t + kWarps);  // on its way while this one is encoded
    uint32_t place;
    const TileEntry entry = encode_tile<kFull>(v, shared.slots + t * kSlotBytes, shared.pool, &shared.plan->pool_used,
                                               group.values_in(t), &place, lane);
    if (lane == 0) {
      shared.plan->entry[t] = entry;
      shared.plan->place[t] = place;
    }
  }
}

// Dynamic bytes that are not in the pool: made again from the values. The slot is free by now.
__device__ void store_again(const Group& group, uint32_t t, TileEntry entry, uint8_t* slot, uint8_t* unit,
                            uint8_t* dynamic, int lane) {
  const uint32_t m = group.values_in(t), padded = align_up(m);
  uint32_t escapes = 0;
  if (tile_word_mode(entry.word) == static_cast<uint32_t>(TileMode::window)) {
    for (int p = 0; p < 3; ++p)
      escapes |= *reinterpret_cast<const uint32_t*>(slot + padded + kPlaneBytes * p + 4 * lane);
    escapes = ~escapes & valid_values(m, lane);
  }
  const LaneValues v = load_values<false>(group.src + group.tile(t) * kTileValues, m, lane);
  __syncwarp();
  put_exponents(slot, v, lane);
  __syncwarp();
  if (tile_word_mode(entry.word) == static_cast<uint32_t>(TileMode::window)) {
    put_escapes(slot, escapes, dynamic + warp_inclusive_sum(__popc(escapes)), lane);
    return;
  }
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < padded) *reinterpret_cast<uint2*>(unit + i) = sign_mantissas(v.w[k]);
  }
  store_bytes(dynamic, slot, m, lane);
}

template <bool kFull>
__device__ __forceinline__ void store_tiles(const Group& group, const Shared& shared, int warp, int lane) {
  const GroupPlan& plan = *shared.plan;
  const uint32_t tiles = kFull ? kTiles : group.tiles;
  for (uint32_t t = warp; t < tiles; t += kWarps) {
    const uint32_t m = kFull ? kTile : group.values_in(t);
    const TileEntry entry = plan.entry[t];
    const uint32_t mode = tile_word_mode(entry.word), n = tile_word_dynamic(entry.word);
    const uint32_t unit = unit_bytes(mode, m);
    uint8_t* slot = shared.slots + t * kSlotBytes;
    uint8_t* to = plan.units + plan.unit_begin[t];
    uint8_t* dynamic = plan.dynamic + plan.dynamic_begin[t];
    if (mode == static_cast<uint32_t>(TileMode::window)) {
#pragma unroll
      for (uint32_t r = 0; r < kSlotBytes; r += 16 * kWarpSize) {
        const uint32_t b = r + 16 * lane;
        if (b < unit) *reinterpret_cast<uint4*>(to + b) = *reinterpret_cast<const uint4*>(slot + b);
      }
    } else if (group.split) {  // the unit's place is larger
      const uint32_t reserved = align_up(m) + kPlanesBytes;
      for (uint32_t b = unit + 16 * lane; b < reserved; b += 16 * kWarpSize) {
        *reinterpret_cast<uint4*>(to + b) = make_uint4(0, 0, 0, 0);
      }
    }
    if (mode == static_cast<uint32_t>(TileMode::constant)) {
      store_bytes(dynamic, slot, n, lane);
    } else if (plan.place[t] != kNoPlace) {
      store_bytes(dynamic, shared.pool + plan.place[t], n, lane);
    } else if (n != 0) {
      store_again(group, t, entry, slot, to, dynamic, lane);
    }
  }
}

constexpr uint32_t kSlotsBytes = kTiles * kSlotBytes;
constexpr uint32_t kSharedBytes = kSlotsBytes + kPoolBytes + 16;  // words are read one ahead

template <bool kFull>
__device__ __forceinline__ void encode_group(const Group& group, const FrameHeader& header, const Shared& shared) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  encode_tiles<kFull>(group, shared, warp, lane);
  __syncthreads();
  if (warp == 0) plan_group(group, header, shared.plan, lane);
  __syncthreads();
  store_tiles<kFull>(group, shared, warp, lane);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    fast_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t slots[];
  __shared__ GroupPlan plan;

  const Shared shared = {slots, slots + kSlotsBytes, &plan};
  if (threadIdx.x == 0) plan.pool_used = 0;
  __syncthreads();
  const Group group = find_group(launch, blockIdx.x);
  if ((group.index + 1) * kGroupValues <= group.count && is_aligned(group.src, 16)) {
    encode_group<true>(group, launch.header, shared);
  } else {
    encode_group<false>(group, launch.header, shared);
  }
  wait_for_previous();
}

}  // namespace

cudaError_t launch_fast_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(fast_encode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch_behind(fast_encode_kernel, launch.first_block[launch.n], 1, kThreads, kSharedBytes, stream, launch);
}

}  // namespace cuda
}  // namespace zipccl
