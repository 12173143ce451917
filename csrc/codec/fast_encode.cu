// Code::fast, tensor to frame. A block owns a group of 32 tiles, a warp a tile at a time, a lane 32 values of it: one
// word of each plane.
//
//   1. Every tile is copied into a slot of shared memory and encoded in place: its unit, then its dynamic bytes, which
//      together never exceed the bytes of its values.
//   2. The sizes of the group's tiles give the size of its part of the frame. Where the part begins follows from the
//      groups before it, by decoupled look-back (Merrill and Garland, "Single-pass parallel prefix scan with
//      decoupled look-back", 2016).
//   3. Units and dynamic bytes go from shared memory to the frame.
//
// Timing decides who waits for whom, never where a byte goes.
#include <cuda_pipeline.h>

#include "codec/cuda_device.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kTiles = static_cast<int>(kGroupTiles);
constexpr uint32_t kTile = static_cast<uint32_t>(kTileValues);
constexpr uint32_t kSlotBytes = 2 * kTile;
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

// The rule of tile.h. The candidates are b, b + 1 and b + 2, fewer at the ends of the range. What tells them apart is
// how many samples have e - b = 0, 1, 7 and 8: b holds the 0s and 1s, b + 1 the 1s and 7s, b + 2 the 7s and 8s.
__device__ __forceinline__ uint32_t choose_base(const LaneValues& v, uint32_t m) {
  uint32_t sums = 0, nonzero = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t e = exponents(v.w[k][0]);  // i % 8 < 2: the first word
    sums += e;
    nonzero += __viaddmin_u16x2(e, 0, 0x00010001u);
  }
  // At most 256 samples: either total fits 16 bits.
  const uint32_t lane_sum = (sums & 0xFFFFu) + (sums >> 16);
  const uint32_t lane_nonzero = (nonzero & 0xFFFFu) + (nonzero >> 16);
  const uint32_t totals = warp_sum(lane_sum + (lane_nonzero << 16));
  const uint32_t mean = quick_mean(totals & 0xFFFFu, totals >> 16);
  const uint32_t base = candidate_base(mean, 0);
  const uint32_t steps = candidate_base(mean, kBaseCandidates - 1) - base;

  // Histograms of e - b: bins 0 to 8, and 9 for the rest, 3 bits a bin, which 4 samples cannot overflow.
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t bins = 3 * __viaddmin_u16x2(exponents(v.w[k][0]), both_halves(0u - base), 0x00090009u);
    low += 1u << (bins & 31u);
    high += 1u << (bins >> 16);
  }
  constexpr uint32_t kFields = 0x071C71C7u;                               // every other bin
  const uint32_t even = (low & kFields) + (high & kFields);               // bin 2 i at bit 6 i
  const uint32_t odd = ((low >> 3) & kFields) + ((high >> 3) & kFields);  // bin 2 i + 1 at bit 6 i
  const uint32_t zeros_minus_sevens = (even & 63u) - ((odd >> 18) & 63u);
  const uint32_t ones_minus_eights = (odd & 63u) - (even >> 24);
  const uint32_t both = warp_sum(zeros_minus_sevens + (ones_minus_eights << 16));
  int first = static_cast<int16_t>(both & 0xFFFFu);
  const int second = static_cast<int>(both - static_cast<uint32_t>(first)) >> 16;
  if (base == 0) first -= 256 - static_cast<int>(m / 8 * 2 + min(m % 8, 2u));  // values past m read as zeros

  if (steps == 0) return base;
  const bool one_beats = first < 0;
  if (steps == 1) return base + one_beats;
  const bool two_beats = (one_beats ? 0 : first) + second < 0;
  return two_beats ? base + 2 : base + one_beats;
}

struct Planes {
  uint32_t p[3];
};

// The lane's word of each plane. Bits of values past m are left undefined.
__device__ __forceinline__ Planes make_planes(const LaneValues& v, uint32_t base) {
  // Codes, 0 to 7, or 8 for an exponent outside, shifted left by 7 because exponents stand there.
  const uint32_t shift = both_halves((1u - base) << 7);
  uint32_t u[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t code[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) code[q] = __viaddmin_u16x2(v.w[k][q] & 0x7F807F80u, shift, 0x04000400u);
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
  Planes planes;
  planes.p[0] = select_bits(0x55555555u, x02, x13 << 1);
  planes.p[1] = select_bits(0x55555555u, x02 >> 1, x13);
  planes.p[2] = select_bits(0x55555555u, x02_high, x13_high << 1);
  return planes;
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

// Encodes the m values in `slot`, zeros behind them, in place. `staging`: kMostEscapes bytes of the warp.
__device__ __forceinline__ TileEntry encode_tile(uint8_t* slot, uint8_t* staging, uint32_t m, int lane) {
  LaneValues v;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 in = *reinterpret_cast<const uint4*>(slot + 512 * k + 16 * lane);
    v.w[k][0] = in.x, v.w[k][1] = in.y, v.w[k][2] = in.z, v.w[k][3] = in.w;
  }
  const uint32_t valid = m == kTile ? 0xFFFFFFFFu : valid_values(m, lane);

  if (all_equal(v, valid)) {  // the value's two bytes stand at the slot's begin already
    return {pack_tile_word(TileMode::constant, 2), 0};
  }

  const uint32_t base = choose_base(v, m);
  Planes planes = make_planes(v, base);
#pragma unroll
  for (int p = 0; p < 3; ++p) planes.p[p] &= valid;
  uint32_t escapes = ~(planes.p[0] | planes.p[1] | planes.p[2]) & valid;
  const uint32_t own = __popc(escapes);
  const uint32_t up_to_own = warp_inclusive_sum(own, lane);
  const uint32_t total = __shfl_sync(kFullWarp, up_to_own, kWarpSize - 1);
  const bool window = window_pays(m, total);

  if (window) {
    // A register cannot be chosen at run time; the values in shared memory can.
    const uint16_t* values = reinterpret_cast<const uint16_t*>(slot) + 8 * lane;
    for (uint32_t at = up_to_own - own; escapes != 0; ++at) {
      const uint32_t bit = __ffs(escapes) - 1;
      escapes &= escapes - 1;
      staging[at] = static_cast<uint8_t>(exponent(values[256 * (bit / 8) + bit % 8]));
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
    return {pack_tile_word(TileMode::window, total), static_cast<uint8_t>(base)};
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

// Size of all groups before group g, for a whole warp. Blocks number themselves in the order in which they begin, so
// the groups waited for here have blocks that run already and wait only for groups before them.
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
  const uint32_t to_word = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(dst)) & 3u;
  const uint32_t head = min(n, to_word);
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
  uint64_t units;    // frame offset of the group's first unit
  uint64_t dynamic;  // frame offset of its dynamic bytes
  uint32_t unit_begin[kTiles];
  uint32_t dynamic_begin[kTiles];
  TileEntry entry[kTiles];
};

struct Job {
  const uint16_t* src;
  uint8_t* frame;
  uint64_t count;
  uint64_t* states;
  uint64_t* frame_bytes;  // may be null
  bool split;
};

// By one warp: sizes, place, tables, and the header when the group is the last.
__device__ __forceinline__ void plan_group(const Job& job, const FrameHeader& header, uint64_t g, uint32_t tiles,
                                           GroupPlan* plan, int lane) {
  const uint64_t tile = g * kGroupTiles + lane;
  const bool exists = lane < tiles;
  const TileEntry entry = exists ? plan->entry[lane] : TileEntry{0, 0};
  const uint32_t dynamic = tile_word_dynamic(entry.word);
  uint32_t unit = exists ? unit_bytes(tile_word_mode(entry.word), values_in_tile(job.count, tile)) : 0;
  const uint32_t reserved = !job.split ? unit : (exists ? align_up(values_in_tile(job.count, tile)) + kPlanesBytes : 0);
  // One scan for both: the units of a group take less than 2^16 bytes, its dynamic bytes less than 2^16.
  const uint32_t both = reserved | dynamic << 16;
  const uint32_t up_to = warp_inclusive_sum(both, lane);
  const uint32_t all = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  plan->unit_begin[lane] = (up_to - both) & 0xFFFFu;
  plan->dynamic_begin[lane] = (up_to - both) >> 16;

  const uint64_t units_size = all & 0xFFFFu, dynamic_size = align_up(all >> 16);
  const uint64_t size = job.split ? dynamic_size : units_size + dynamic_size;
  const uint64_t begin = exclusive_prefix(job.states, g, size, lane);
  const uint64_t parts = fast_static_bytes(job.count, job.split ? FrameLayout::split : FrameLayout::compact);
  if (lane == 0) {
    plan->units = job.split ? tables_end(job.count) + g * kGroupTiles * kMaxUnitBytes : parts + begin;
    plan->dynamic = job.split ? parts + begin : parts + begin + units_size;
    *reinterpret_cast<uint64_t*>(job.frame + group_table_begin() + 8 * g) = begin;
  }
  uint8_t* words = job.frame + tile_word_begin(job.count);
  uint8_t* bases = job.frame + tile_base_begin(job.count);
  if (exists) {
    reinterpret_cast<uint16_t*>(words)[tile] = entry.word;
    bases[tile] = entry.base;
  }
  // Padding behind the group's dynamic bytes.
  zero_bytes(job.frame + (job.split ? 0 : units_size) + parts + begin + (all >> 16), dynamic_size - (all >> 16), lane);

  if (g + 1 < group_count(job.count)) return;
  const uint64_t groups_end = group_table_begin() + 8 * group_count(job.count);
  const uint64_t words_end = 2 * tile_count(job.count), bases_end = tile_count(job.count);
  zero_bytes(job.frame + groups_end, tile_word_begin(job.count) - groups_end, lane);
  zero_bytes(words + words_end, align_up(words_end) - words_end, lane);
  zero_bytes(bases + bases_end, align_up(bases_end) - bases_end, lane);
  if (lane == 0) {
    write_header(header, job.count, parts + begin + size, 0, job.frame);
    if (job.frame_bytes != nullptr) *job.frame_bytes = parts + begin + size;
  }
}

template <int kWarps>
constexpr uint32_t kSharedBytes = kTiles* kSlotBytes + kWarps* kMostEscapes;

template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize) fast_encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];  // slots, then each warp's staging
  __shared__ GroupPlan plan;
  __shared__ uint64_t ticket;

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned long long*>(launch.ticket), 1ull);
  __syncthreads();
  const int i = find_job(launch, ticket);
  const uint64_t g = ticket - launch.first_block[i];
  const Job job = {static_cast<const uint16_t*>(launch.job[i].src),
                   static_cast<uint8_t*>(launch.job[i].dst),
                   launch.job[i].count,
                   launch.states + launch.first_block[i],
                   launch.frame_bytes == nullptr ? nullptr : launch.frame_bytes + i,
                   (launch.header.flags & kFlagSplit) != 0};
  if (job.count == 0) {
    if (threadIdx.x == 0) {
      write_header(launch.header, 0, kHeaderBytes, 0, job.frame);
      if (job.frame_bytes != nullptr) *job.frame_bytes = kHeaderBytes;
    }
    return;
  }

  const uint64_t first_tile = g * kGroupTiles;
  const uint64_t tiles_left = tile_count(job.count) - first_tile;
  const int tiles = tiles_left < kGroupTiles ? static_cast<int>(tiles_left) : kTiles;
  const bool wide = is_aligned(job.src, 16);
  for (int t = warp; t < tiles; t += kWarps) {
    const uint64_t tile = first_tile + t;
    load_tile(shared + t * kSlotBytes, job.src + tile * kTileValues, values_in_tile(job.count, tile), wide, lane);
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  uint8_t* staging = shared + kTiles * kSlotBytes + warp * kMostEscapes;
  for (int t = warp; t < tiles; t += kWarps) {
    const uint32_t m = values_in_tile(job.count, first_tile + t);
    const TileEntry entry = encode_tile(shared + t * kSlotBytes, staging, m, lane);
    if (lane == 0) plan.entry[t] = entry;
  }
  __syncthreads();
  if (warp == 0) plan_group(job, launch.header, g, tiles, &plan, lane);
  __syncthreads();

  for (int t = warp; t < tiles; t += kWarps) {
    const uint32_t m = values_in_tile(job.count, first_tile + t);
    const uint32_t unit = unit_bytes(tile_word_mode(plan.entry[t].word), m);
    const uint32_t reserved = job.split ? align_up(m) + kPlanesBytes : unit;
    const uint8_t* slot = shared + t * kSlotBytes;
    uint8_t* to = job.frame + plan.units + plan.unit_begin[t];
    for (uint32_t b = 16 * lane; b < reserved; b += 16 * kWarpSize) {
      *reinterpret_cast<uint4*>(to + b) = b < unit ? *reinterpret_cast<const uint4*>(slot + b) : make_uint4(0, 0, 0, 0);
    }
    store_bytes(job.frame + plan.dynamic + plan.dynamic_begin[t], slot + unit, tile_word_dynamic(plan.entry[t].word),
                lane);
  }
}

template <int kWarps>
cudaError_t launch_with(const EncodeLaunch& launch, cudaStream_t stream) {
  const uint32_t shared = kSharedBytes<kWarps>;
  const cudaError_t error =
      cudaFuncSetAttribute(fast_encode_kernel<kWarps>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(launch.first_block[launch.n]);
  fast_encode_kernel<kWarps><<<blocks, kWarps * kWarpSize, shared, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_fast_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = processor_count(&processors);
  if (error != cudaSuccess) return error;
  // Few groups leave processors idle: more warps finish each sooner. Many groups: more blocks to a processor.
  return launch.first_block[launch.n] <= static_cast<uint64_t>(processors) ? launch_with<16>(launch, stream)
                                                                           : launch_with<8>(launch, stream);
}

}  // namespace cuda
}  // namespace zipccl
