// Code::fast, tensor to frame. A block owns a group of 32 tiles, or, where there are few, a cluster of two blocks does;
// a warp owns a tile at a time, a lane 32 values of it: one word of each plane.
//
//   1. Every tile is copied into a slot of shared memory and encoded in place: its unit, then its dynamic bytes, which
//      together never exceed the bytes of its values.
//   2. The sizes of the group's tiles give the size of its part of the frame. Where the part begins follows from the
//      groups before it, by decoupled look-back (Merrill and Garland, "Single-pass parallel prefix scan with
//      decoupled look-back", 2016).
//   3. Units and dynamic bytes go from shared memory to the frame.
//
// Timing decides who waits for whom, never where a byte goes.
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerProcessor = 3;  // as many as shared memory holds on sm_90
constexpr uint64_t kFewGroups = 1;      // per processor: up to there two blocks share a group
constexpr int kTiles = static_cast<int>(kGroupTiles);
constexpr uint32_t kTile = static_cast<uint32_t>(kTileValues);
constexpr uint32_t kSlotBytes = 2 * kTile;
static_assert(kTiles == kWarpSize, "a warp plans a group, a lane each tile");
// A window tile that pays has fewer escapes than this.
constexpr uint32_t kMostEscapes = kTile - kPlanesBytes;
static_assert(kMaxUnitBytes + kMostEscapes <= kSlotBytes, "an encoded tile fits its slot");

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
  return make_uint2(__byte_perm(exponents(w[0]), exponents(w[1]), 0x6420),
                    __byte_perm(exponents(w[2]), exponents(w[3]), 0x6420));
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

struct TileEntry {
  uint16_t word;
  uint8_t base;
};

// Encodes the m values in `slot`, zeros behind them, in place. `staging`: kMostEscapes bytes of the warp. A full tile
// has m = kTile, known to the compiler.
template <bool kFull>
__device__ __forceinline__ TileEntry encode_tile(uint8_t* slot, uint8_t* staging, uint32_t m, int lane) {
  if (kFull) m = kTile;
  LaneValues v;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 in = *reinterpret_cast<const uint4*>(slot + 512 * k + 16 * lane);
    v.w[k][0] = in.x, v.w[k][1] = in.y, v.w[k][2] = in.z, v.w[k][3] = in.w;
  }
  const uint32_t valid = kFull ? 0xFFFFFFFFu : valid_values(m, lane);

  if (all_equal(v, valid)) {  // the value's two bytes stand at the slot's begin already
    return {pack_tile_word(TileMode::constant, 2), 0};
  }

  const uint32_t mean = mean_of_samples(v);
  const uint32_t first_base = candidate_base(mean, 0);
  Planes planes = make_planes(v, first_base);
  const uint32_t step = choose_step(planes, valid, candidate_base(mean, kBaseCandidates - 1) - first_base);
  settle(&planes, step, valid);
  uint32_t escapes = ~(planes.p[0] | planes.p[1] | planes.p[2]) & valid;
  uint32_t end = warp_inclusive_sum(__popc(escapes));
  const uint32_t total = __shfl_sync(kFullWarp, end, kWarpSize - 1);
  const bool window = window_pays(m, total);

  if (window) {
    // A register cannot be chosen at run time; the values in shared memory can. Last escape first.
    const uint8_t* values = slot + 16 * lane;
    while (escapes != 0) {
      const uint32_t bit = 31 - __clz(escapes);
      escapes ^= 1u << bit;
      const uint32_t at = 2 * bit + 62 * (bit & 24u);  // byte of value 256 * (bit / 8) + bit % 8
      staging[--end] = static_cast<uint8_t>(exponent(*reinterpret_cast<const uint16_t*>(values + at)));
    }
  }
  __syncwarp();  // from here on the values in the slot are overwritten
  const uint32_t padded = align_up(m);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < padded) *reinterpret_cast<uint2*>(slot + i) = sign_mantissas(v.w[k]);
  }
  uint8_t* behind = slot + padded;
  if (window) {
#pragma unroll
    for (int p = 0; p < 3; ++p) *reinterpret_cast<uint32_t*>(behind + kPlaneBytes * p + 4 * lane) = planes.p[p];
    behind += kPlanesBytes;
    for (uint32_t b = 4 * lane; b < total; b += 4 * kWarpSize) {
      *reinterpret_cast<uint32_t*>(behind + b) = *reinterpret_cast<const uint32_t*>(staging + b);
    }
    __syncwarp();  // before the next tile's escapes
    return {pack_tile_word(TileMode::window, total), static_cast<uint8_t>(first_base + step)};
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < m) *reinterpret_cast<uint2*>(behind + i) = exponent_bytes(v.w[k]);
  }
  return {pack_tile_word(TileMode::raw, m), 0};
}

// Starts copying a tile into its slot. Every lane copies the values that it will work on.
__device__ __forceinline__ void load_tile(uint8_t* slot, const uint16_t* src, uint32_t m, bool wide, int lane) {
  if (wide && m == kTile) {
#pragma unroll
    for (int k = 0; k < 4; ++k) __pipeline_memcpy_async(slot + 512 * k + 16 * lane, src + 256 * k + 8 * lane, 16);
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    uint32_t value[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = i + j < m ? src[i + j] : 0;
    *reinterpret_cast<uint4*>(slot + 2 * i) = make_uint4(value[0] | value[1] << 16, value[2] | value[3] << 16,
                                                         value[4] | value[5] << 16, value[6] | value[7] << 16);
  }
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
  TileEntry entry[kTiles];
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

// Blocks of a group: one, or a cluster of kParts, whose shared memory all of them can write to.
template <int kParts>
struct Team {
  static constexpr uint32_t kBlockTiles = kTiles / kParts;

  uint32_t rank;

  __device__ __forceinline__ uint32_t first_tile() const { return rank * kBlockTiles; }

  // Nobody has left, or not yet begun, between two of these.
  __device__ __forceinline__ void begin() const {
#if __CUDA_ARCH__ >= 900
    if (kParts > 1) asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
    if (kParts > 1) {
      cooperative_groups::this_cluster().sync();
      return;
    }
#endif
    __syncthreads();
  }
  // Writes to the same variable in every block's shared memory.
  template <typename T>
  __device__ __forceinline__ void write(T* variable, const T& value) const {
#if __CUDA_ARCH__ >= 900
    if (kParts > 1) {
      for (int r = 0; r < kParts; ++r) *cooperative_groups::this_cluster().map_shared_rank(variable, r) = value;
      return;
    }
#endif
    *variable = value;
  }
};

// By one warp of every block of a team: places within the group. The first block also finds the group's place, and
// writes the tables, and the header when the group is the last.
template <int kParts>
__device__ __forceinline__ void plan_group(const Group& group, const Team<kParts>& team, const FrameHeader& header,
                                           GroupPlan* plan, int lane) {
  if (group.count == 0) {
    if (team.rank != 0 || lane != 0) return;
    write_header(header, 0, kHeaderBytes, 0, group.frame);
    if (group.frame_bytes != nullptr) *group.frame_bytes = kHeaderBytes;
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
  if (team.rank != 0) return;

  const uint64_t units_size = all & 0xFFFFu, dynamic_size = align_up(all >> 16);
  const uint64_t size = group.split ? dynamic_size : units_size + dynamic_size;
  wait_for_previous();  // which clears the states
  const uint64_t begin = exclusive_prefix(group.states, g, size, lane);
  const uint64_t parts = fast_static_bytes(group.count, group.split ? FrameLayout::split : FrameLayout::compact);
  if (lane == 0) {
    uint8_t* const part = group.frame + parts + begin;
    team.write(&plan->units,
               group.split ? group.frame + tables_end(group.count) + g * kGroupTiles * kMaxUnitBytes : part);
    team.write(&plan->dynamic, group.split ? part : part + units_size);
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

// A block's tiles are shared out to its warps; a tile's number counts from the block's first. kFull: all its tiles
// exist and are full, and the values are aligned to 16 bytes; the compiler then has less to ask for.
template <int kParts, bool kFull>
struct Block {
  Group group;
  Team<kParts> team;
  uint32_t some_tiles;
  int warp, lane;

  __device__ __forceinline__ uint32_t tiles() const { return kFull ? Team<kParts>::kBlockTiles : some_tiles; }
  __device__ __forceinline__ uint32_t in_group(uint32_t t) const { return team.first_tile() + t; }
  __device__ __forceinline__ uint32_t values_in(uint32_t t) const {
    return kFull ? kTile : group.values_in(in_group(t));
  }
};

template <int kParts, bool kFull>
__device__ __forceinline__ void load_tiles(const Block<kParts, kFull>& block, uint8_t* slots) {
  const bool wide = kFull || is_aligned(block.group.src, 16);
  for (uint32_t t = block.warp; t < block.tiles(); t += kWarps) {
    load_tile(slots + t * kSlotBytes, block.group.src + block.group.tile(block.in_group(t)) * kTileValues,
              block.values_in(t), wide, block.lane);
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

template <int kParts, bool kFull>
__device__ __forceinline__ void encode_tiles(const Block<kParts, kFull>& block, uint8_t* slots, uint8_t* staging,
                                             GroupPlan* plan) {
  for (uint32_t t = block.warp; t < block.tiles(); t += kWarps) {
    const uint32_t m = block.values_in(t);
    uint8_t* slot = slots + t * kSlotBytes;
    const TileEntry entry = encode_tile<kFull>(slot, staging, m, block.lane);
    if (block.lane == 0) block.team.write(&plan->entry[block.in_group(t)], entry);
  }
}

template <int kParts, bool kFull>
__device__ __forceinline__ void store_tiles(const Block<kParts, kFull>& block, const uint8_t* slots,
                                            const GroupPlan& plan) {
  uint8_t* const units = plan.units + 16 * block.lane;
  slots += 16 * block.lane;
  for (uint32_t t = block.warp; t < block.tiles(); t += kWarps) {
    const uint32_t m = block.values_in(t), in_group = block.in_group(t);
    const TileEntry entry = plan.entry[in_group];
    const uint32_t unit = unit_bytes(tile_word_mode(entry.word), m);
    const uint8_t* from = slots + t * kSlotBytes;
    uint8_t* to = units + plan.unit_begin[in_group];
#pragma unroll
    for (uint32_t r = 0; r < kMaxUnitBytes; r += 16 * kWarpSize) {
      if (r + 16 * block.lane < unit) *reinterpret_cast<uint4*>(to + r) = *reinterpret_cast<const uint4*>(from + r);
    }
    if (block.group.split) {  // the unit's place may be larger
      const uint32_t reserved = align_up(m) + kPlanesBytes;
      for (uint32_t b = unit; b + 16 * block.lane < reserved; b += 16 * kWarpSize) {
        *reinterpret_cast<uint4*>(to + b) = make_uint4(0, 0, 0, 0);
      }
    }
    store_bytes(plan.dynamic + plan.dynamic_begin[in_group], from - 16 * block.lane + unit,
                tile_word_dynamic(entry.word), block.lane);
  }
}

template <int kParts>
constexpr uint32_t kSlotsBytes = Team<kParts>::kBlockTiles* kSlotBytes;
template <int kParts>
constexpr uint32_t kSharedBytes = kSlotsBytes<kParts> + kWarps* kMostEscapes;

template <int kParts, bool kFull>
__device__ __forceinline__ void encode_block(const EncodeLaunch& launch, const Group& group, uint32_t rank,
                                             uint32_t tiles, uint8_t* slots, GroupPlan* plan) {
  Block<kParts, kFull> block = {
      group, {rank}, tiles, static_cast<int>(threadIdx.x / kWarpSize), static_cast<int>(threadIdx.x % kWarpSize)};
  load_tiles(block, slots);
  block.team.begin();
  encode_tiles(block, slots, slots + kSlotsBytes<kParts> + block.warp * kMostEscapes, plan);
  block.team.sync();
  if (block.warp == 0) plan_group(block.group, block.team, launch.header, plan, block.lane);
  block.team.sync();
  store_tiles(block, slots, *plan);
}

template <int kParts>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    fast_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t slots[];  // and behind them each warp's staging
  __shared__ GroupPlan plan;

  const Group group = find_group(launch, blockIdx.x / kParts);
  const uint32_t rank = blockIdx.x % kParts;
  const uint32_t first = rank * Team<kParts>::kBlockTiles;
  const uint32_t tiles = group.tiles <= first ? 0 : min(group.tiles - first, Team<kParts>::kBlockTiles);
  if ((group.index + 1) * kGroupValues <= group.count && is_aligned(group.src, 16)) {
    encode_block<kParts, true>(launch, group, rank, tiles, slots, &plan);
  } else {
    encode_block<kParts, false>(launch, group, rank, tiles, slots, &plan);
  }
  wait_for_previous();
}

template <int kParts>
cudaError_t launch_with(const EncodeLaunch& launch, cudaStream_t stream) {
  const auto kernel = fast_encode_kernel<kParts>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kParts>);
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, launch.first_block[launch.n] * kParts, kParts, kThreads, kSharedBytes<kParts>, stream,
                       launch);
}

}  // namespace

cudaError_t launch_fast_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = processor_count(&processors);
  if (error != cudaSuccess) return error;
  const bool few = launch.first_block[launch.n] <= static_cast<uint64_t>(processors) * kFewGroups;
  return few && has_hopper_launches() ? launch_with<2>(launch, stream) : launch_with<1>(launch, stream);
}

}  // namespace cuda
}  // namespace zipccl
