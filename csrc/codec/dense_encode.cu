// Code::dense, tensor to frame, in three launches:
//
//   plan     modes, bases and dynamic sizes of all tiles, into the frame's tables, and the size of every group
//   place    where groups begin: one block a job adds up their sizes; header and padding of the tables
//   encode   every tile goes to its place
//
// A block of 8 warps takes a group of 32 tiles, in the last launch also a part of one; a warp a tile at a time; a lane
// four runs of 8 elements (dense_elements.cuh). bf16 values are read twice, 4 bytes, and leave as 1.35. No block waits
// for another, and nothing is written twice.
#include "codec/dense_elements.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPlaceThreads = 1024;
constexpr uint64_t kManyGroups = 4;  // per processor: then a block takes a whole group
static_assert(kGroupTiles == kWarpSize, "a warp adds up a group, a lane for each tile");

// ---- A tile: bytes of a word at once ----------------------------------------------------------------------------

// min(byte - first, most) of each byte, modulo 256, most < 16. Two bytes at a time, on top of 16 bits each: what stands
// below them changes nothing above.
__device__ __forceinline__ uint32_t places(uint32_t symbols, uint32_t first, uint32_t most) {
  const uint32_t shift = ((0u - first) & 0xFFu) * 0x01000100u, limit = most * 0x01000100u;
  const uint32_t odd = __viaddmin_u16x2(symbols, shift, limit), even = __viaddmin_u16x2(symbols << 8, shift, limit);
  return select_bytes(even, odd, 0x7351);
}

// 0xFF in each byte that is zero.
__device__ __forceinline__ uint32_t zero_bytes_of(uint32_t v) {
  const uint32_t nonzero = (((v & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | v) & 0x80808080u;  // top bit
  return ~((nonzero >> 7) * 0xFFu);
}

// 0xFF in the bytes of a run that belong to elements.
__device__ __forceinline__ uint2 valid_bytes(uint32_t i, uint32_t m) {
  const uint32_t n = i >= m ? 0 : min(m - i, kRunElements);
  const uint64_t mask = n == kRunElements ? ~uint64_t{0} : (uint64_t{1} << (8 * n)) - 1;
  return make_uint2(static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32));
}

// A lane's elements as bits: bit p of an element's place is a bit of p[p], of all its 32 elements in the same order.
struct Planes {
  uint32_t p[4];
};

// `nibbles`: places of a run's elements, in any order.
__device__ __forceinline__ Planes make_planes(const uint32_t (&nibbles)[kRuns]) {
  const uint32_t* x = nibbles;
  const uint32_t x02 = select_bits(0x33333333u, x[0], x[2] << 2), x02_high = select_bits(0x33333333u, x[0] >> 2, x[2]);
  const uint32_t x13 = select_bits(0x33333333u, x[1], x[3] << 2), x13_high = select_bits(0x33333333u, x[1] >> 2, x[3]);
  return {{select_bits(0x55555555u, x02, x13 << 1), select_bits(0x55555555u, x02 >> 1, x13),
           select_bits(0x55555555u, x02_high, x13_high << 1), select_bits(0x55555555u, x02_high >> 1, x13_high)}};
}

// Elements whose place is v.
__device__ __forceinline__ uint32_t at_place(const Planes& planes, uint32_t v) {
  const uint32_t flip[4] = {v & 1 ? 0 : ~0u, v & 2 ? 0 : ~0u, v & 4 ? 0 : ~0u, v & 8 ? 0 : ~0u};
  return (planes.p[0] ^ flip[0]) & (planes.p[1] ^ flip[1]) & (planes.p[2] ^ flip[2]) & (planes.p[3] ^ flip[3]);
}

// A lane's symbols, and which of them there are.
struct Symbols {
  uint2 of[kRuns];
  uint2 valid[kRuns];
};

template <bool kFull>
__device__ __forceinline__ Planes planes_from(const Symbols& s, uint32_t first) {
  uint32_t nibbles[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    uint32_t low = places(s.of[k].x, first, 15), high = places(s.of[k].y, first, 15);
    if (!kFull) {
      low |= ~s.valid[k].x & 0x0F0F0F0Fu;
      high |= ~s.valid[k].y & 0x0F0F0F0Fu;
    }
    nibbles[k] = low | high << 4;
  }
  return make_planes(nibbles);
}

// mean_exponent(). sum < 2^18 and n <= 1024: the approximate quotient is off by less than 1e-4, while a quotient that
// is no integer lies at least 1/1024 below the next one.
__device__ __forceinline__ uint32_t quick_mean(uint32_t sum, uint32_t n) {
  if (n == 0) return 0;
  return static_cast<uint32_t>(__fdividef(static_cast<float>(sum + n / 2), static_cast<float>(n)) + 1.0f / 4096);
}

template <bool kFull>
__device__ __forceinline__ dense::Choice choose(const Symbols& s, uint32_t m) {
  uint32_t sum = 0, zero_bits = 0;  // a bit of every byte for each word
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const uint32_t w[2] = {s.of[k].x, s.of[k].y}, valid[2] = {s.valid[k].x, s.valid[k].y};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum = __dp4a(w[h], 0x01010101u, sum);
      zero_bits |= zero_bytes_of(w[h]) & (kFull ? ~0u : valid[h]) & (0x01010101u << (2 * k + h));
    }
  }
  sum = warp_sum(sum);
  const uint32_t zeros = warp_sum(static_cast<uint32_t>(__popc(zero_bits)));
  const uint32_t mean = quick_mean(sum, m - zeros);
  const Planes planes = planes_from<kFull>(s, mean - dense::kFirstCounted);
  uint32_t h[dense::kCounted];
#pragma unroll
  for (uint32_t v = 0; v < dense::kCounted; v += 2) {
    const uint32_t own = __popc(at_place(planes, v)) | __popc(at_place(planes, v + 1)) << 16;
    const uint32_t two = warp_sum(own);
    h[v] = two & 0xFFFFu;
    h[v + 1] = two >> 16;
  }
  return dense::choose(mean, h, zeros, m);
}

// Dynamic bytes of a window tile.
template <bool kFull>
__device__ __forceinline__ uint32_t dynamic_bytes(const Symbols& s, dense::Choice choice) {
  // Places are distances from base - 7.
  const bool zeros = choice.shape == dense::Shape::zeros, far = choice.shape == dense::Shape::far;
  const Planes planes = planes_from<kFull>(s, choice.base - 7u);
  uint32_t named[dense::kLevels];
  uint32_t valid = ~0u;
  if (!kFull) {
    uint32_t nibbles[kRuns];
#pragma unroll
    for (int k = 0; k < kRuns; ++k) nibbles[k] = (s.valid[k].x & 0x0F0F0F0Fu) | (s.valid[k].y & 0xF0F0F0F0u);
    valid = make_planes(nibbles).p[0];
  }
  const auto at = [&](uint32_t v) { return at_place(planes, v); };
  if (zeros) {
    uint32_t nibbles[kRuns];
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
      nibbles[k] = (zero_bytes_of(s.of[k].x) & 0x0F0F0F0Fu) | (zero_bytes_of(s.of[k].y) & 0xF0F0F0F0u);
    }
    named[0] = make_planes(nibbles).p[0] | at(8) | at(9);
    named[1] = at(7) | at(6) | at(5);
    named[2] = at(10) | at(4) | at(3);
    named[3] = at(2) | at(1) | at(0);
  } else {
    named[0] = at(7) | at(8) | at(9);
    named[1] = at(6) | at(5) | (far ? at(4) : at(10));
    named[2] = (far ? at(10) : at(4)) | at(3) | at(2);
    named[3] = at(1) | at(0) | at(11);
  }
  uint32_t left = valid, count[dense::kLevels];
#pragma unroll
  for (int level = 0; level < dense::kLevels; ++level) {
    left &= ~named[level];
    count[level] = __popc(left);
  }
  const uint32_t first = warp_sum(count[0] | count[1] << 16), last = warp_sum(count[2] | count[3] << 16);
  return dense::level_bytes(first & 0xFFFFu) + dense::level_bytes(first >> 16) + dense::level_bytes(last & 0xFFFFu) +
         (last >> 16);
}

// ---- A group ----------------------------------------------------------------------------------------------------

struct Group {
  const uint8_t* src;  // of the job
  uint8_t* frame;
  uint64_t elements;  // of the job
  uint64_t* sizes;    // of the job's groups
  uint64_t index;
  bool wide;  // 16-byte loads

  __device__ __forceinline__ uint32_t tiles() const {
    const uint64_t left = tile_count(elements) - index * kGroupTiles;
    return left < kGroupTiles ? static_cast<uint32_t>(left) : static_cast<uint32_t>(kGroupTiles);
  }
  __device__ __forceinline__ uint32_t elements_in(uint32_t t) const {
    return static_cast<uint32_t>(values_in_tile(elements, index * kGroupTiles + t));
  }
  template <typename E>
  __device__ __forceinline__ const uint8_t* tile(uint32_t t) const {
    return src + (index * kGroupTiles + t) * kTileValues * E::kBytes;
  }
  __device__ __forceinline__ uint16_t* words() const {
    return reinterpret_cast<uint16_t*>(frame + tile_word_begin(elements)) + index * kGroupTiles;
  }
  __device__ __forceinline__ uint8_t* bases() const { return frame + tile_base_begin(elements) + index * kGroupTiles; }
};

__device__ __forceinline__ Group find_group(const EncodeLaunch& launch, uint64_t block) {
  const int i = find_job(launch, block);
  const EncodeJob& job = launch.job[i];
  return {static_cast<const uint8_t*>(job.src),
          static_cast<uint8_t*>(job.dst),
          dense::element_count(static_cast<DType>(launch.header.dtype), job.count),
          launch.states + launch.first_block[i],
          block - launch.first_block[i],
          is_aligned(job.src, 16)};
}

// ---- First launch -----------------------------------------------------------------------------------------------

struct Entry {
  uint32_t mode, base, dynamic;
};

template <typename E>
__device__ __forceinline__ bool all_equal(const Run<E> (&runs)[kRuns], uint32_t m, int lane) {
  const uint64_t own = element(runs[0], 0);
  const uint32_t low = __shfl_sync(kFullWarp, static_cast<uint32_t>(own), 0);
  const uint32_t high = E::kBytes == 8 ? __shfl_sync(kFullWarp, static_cast<uint32_t>(own >> 32), 0) : 0;
  const uint64_t first = low | static_cast<uint64_t>(high) << 32;
  // Nearly every tile differs somewhere among the first elements of the lanes already.
  if (!__all_sync(kFullWarp, own == first || run_begin(0, lane) >= m)) return false;
  bool equal = true;
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
#pragma unroll
    for (int j = 0; j < 8; ++j) equal &= element(runs[k], j) == first || run_begin(k, lane) + j >= m;
  }
  return __all_sync(kFullWarp, equal);
}

template <typename E, bool kFull>
__device__ __forceinline__ Entry plan_tile(const uint8_t* tile, uint32_t m, bool wide, int lane) {
  if (kFull) m = kTileElements;
  Run<E> runs[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) runs[k] = load_run<E>(tile, run_begin(k, lane), m, wide);
  if (all_equal(runs, m, lane)) return {dense::kConstant, 0, E::kBytes};
  if (!E::kCoded) return {dense::kRaw, 0, 0};
  Symbols s;
  bool missing = false;
  uint64_t mantissas = 0;
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    s.of[k] = symbols_of(runs[k], &missing);
    s.valid[k] = kFull ? make_uint2(~0u, ~0u) : valid_bytes(run_begin(k, lane), m);
    if (E::kShortens) {
#pragma unroll
      for (int j = 0; j < 8; ++j) mantissas |= element(runs[k], j);
    }
  }
  if (__any_sync(kFullWarp, missing)) return {dense::kRaw, 0, 0};
  uint32_t rest = 0;
  if (E::kShortens) {
    uint64_t all = 0;
    const uint32_t low = __reduce_or_sync(kFullWarp, static_cast<uint32_t>(mantissas));
    all = low;
    if (E::kBytes == 8) {
      all |= static_cast<uint64_t>(__reduce_or_sync(kFullWarp, static_cast<uint32_t>(mantissas >> 32))) << 32;
    }
    rest = dense::choose_rest(E::format(), all & ((uint64_t{1} << E::kMantissa) - 1));
  }
  const dense::Choice choice = choose<kFull>(s, m);
  const uint32_t dynamic = dynamic_bytes<kFull>(s, choice);
  if (!dense::window_pays(E::format(), dense::rest_bits(E::format(), rest), dynamic, m)) return {dense::kRaw, 0, 0};
  return {dense::kShapes * rest + static_cast<uint32_t>(choice.shape), choice.base, dynamic};
}

template <typename E>
__device__ __forceinline__ void plan_tiles(const EncodeLaunch& launch, uint64_t block) {
  __shared__ uint32_t unit_bytes[kWarps], dynamic_bytes[kWarps];
  const Group group = find_group(launch, block);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint32_t tiles = group.tiles();
  uint32_t units = 0, dynamic = 0;
  for (uint32_t t = warp; t < tiles; t += kWarps) {
    const uint32_t m = group.elements_in(t);
    const uint8_t* const tile = group.tile<E>(t);
    const Entry e = m == kTileElements && group.wide ? plan_tile<E, true>(tile, m, true, lane)
                                                     : plan_tile<E, false>(tile, m, group.wide, lane);
    units += dense::unit_bytes(E::format(), e.mode, m);
    dynamic += e.dynamic;
    if (lane == 0) {
      group.words()[t] = static_cast<uint16_t>(e.dynamic | e.mode << 12);
      group.bases()[t] = static_cast<uint8_t>(e.base);
    }
  }
  if (lane == 0) {
    unit_bytes[warp] = units;
    dynamic_bytes[warp] = dynamic;
  }
  __syncthreads();
  if (threadIdx.x == 0 && tiles != 0) {
    for (int w = 1; w < kWarps; ++w) {
      units += unit_bytes[w];
      dynamic += dynamic_bytes[w];
    }
    group.sizes[group.index] = units + align_up(dynamic);
  }
}

template <typename E>
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ EncodeLaunch launch) {
  for (uint64_t block = blockIdx.x; block < launch.first_block[launch.n]; block += gridDim.x) {
    plan_tiles<E>(launch, block);
    __syncthreads();  // before shared memory is used again
  }
}

// ---- Second launch ----------------------------------------------------------------------------------------------

// Sum of v over the threads before this one; *all: over all.
__device__ __forceinline__ uint64_t block_exclusive_sum(uint64_t v, uint64_t* all) {
  __shared__ uint64_t sums[kPlaceThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  uint64_t up_to = v;
#pragma unroll
  for (int d = 1; d < kWarpSize; d *= 2) {
    const uint64_t below = __shfl_up_sync(kFullWarp, up_to, d);
    if (lane >= d) up_to += below;
  }
  if (lane == kWarpSize - 1) sums[warp] = up_to;
  __syncthreads();
  uint64_t before = 0, total = 0;
  for (int w = 0; w < kPlaceThreads / kWarpSize; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  __syncthreads();
  *all = total;
  return before + up_to - v;
}

__device__ __forceinline__ void place_groups(const EncodeLaunch& launch, int i) {
  const EncodeJob& job = launch.job[i];
  uint8_t* const frame = static_cast<uint8_t*>(job.dst);
  const uint64_t elements = dense::element_count(static_cast<DType>(launch.header.dtype), job.count);
  const uint64_t groups = group_count(elements), tiles = tile_count(elements);
  const uint64_t* const sizes = launch.states + launch.first_block[i];
  uint64_t* const offsets = reinterpret_cast<uint64_t*>(frame + group_table_begin());
  uint64_t begin = 0;
  for (uint64_t first = 0; first < groups; first += kPlaceThreads) {
    const uint64_t g = first + threadIdx.x;
    uint64_t all;
    const uint64_t before = block_exclusive_sum(g < groups ? sizes[g] : 0, &all);
    if (g < groups) offsets[g] = begin + before;
    begin += all;
  }
  const uint64_t ends[3] = {group_table_begin() + 8 * groups, tile_word_begin(elements) + 2 * tiles,
                            tile_base_begin(elements) + tiles};
  for (uint64_t end : ends) {
    if (threadIdx.x < align_up(end) - end) frame[end + threadIdx.x] = 0;
  }
  if (threadIdx.x != 0) return;
  const uint64_t frame_bytes = tables_end(elements) + begin;
  write_header(launch.header, job.count, frame_bytes, 0, frame);
  if (launch.frame_bytes != nullptr) launch.frame_bytes[i] = frame_bytes;
}

__global__ void __launch_bounds__(kPlaceThreads) place_kernel(const __grid_constant__ EncodeLaunch launch) {
  for (int i = static_cast<int>(blockIdx.x); i < launch.n; i += static_cast<int>(gridDim.x)) place_groups(launch, i);
}

// ---- Third launch -----------------------------------------------------------------------------------------------

// Codes of level 2, 3 or 4 by place, two bits each; places are min(symbol - (base - 7), 15).
__device__ __forceinline__ uint32_t level_codes(dense::Shape shape, int level) {
  uint32_t codes = ~0u;
  const uint32_t named = dense::level_symbols(shape, 7, level);  // symbols are places now
#pragma unroll
  for (int c = 2; c >= 0; --c) {
    const uint32_t at = 2 * (named >> (8 * c) & 0xFFu);
    codes = (codes & ~(3u << at)) | static_cast<uint32_t>(c) << at;
  }
  return codes;
}

struct GroupPlan {
  uint8_t* units;    // the group's first unit
  uint8_t* dynamic;  // its dynamic bytes
  uint32_t unit_begin[kGroupTiles];
  uint32_t dynamic_begin[kGroupTiles];
  Entry entry[kGroupTiles];
};

// By one warp, a lane a tile, from the tables. The block that has the group's first tile also writes its padding.
template <typename E>
__device__ __forceinline__ void read_plan(const Group& group, bool first, GroupPlan* plan, int lane) {
  Entry e = {0, 0, 0};
  uint32_t unit = 0;
  if (lane < group.tiles()) {
    const uint16_t word = group.words()[lane];
    e = {tile_word_mode(word), group.bases()[lane], tile_word_dynamic(word)};
    unit = dense::unit_bytes(E::format(), e.mode, group.elements_in(lane));
  }
  const uint32_t units = warp_inclusive_sum(unit), dynamic = warp_inclusive_sum(e.dynamic);
  const uint32_t all_units = __shfl_sync(kFullWarp, units, kWarpSize - 1);
  const uint32_t all_dynamic = __shfl_sync(kFullWarp, dynamic, kWarpSize - 1);
  plan->unit_begin[lane] = units - unit;
  plan->dynamic_begin[lane] = dynamic - e.dynamic;
  plan->entry[lane] = e;
  const uint64_t begin = reinterpret_cast<const uint64_t*>(group.frame + group_table_begin())[group.index];
  uint8_t* const part = group.frame + tables_end(group.elements) + begin;
  if (lane == 0) {
    plan->units = part;
    plan->dynamic = part + all_units;
  }
  const uint32_t padding = static_cast<uint32_t>(align_up(all_dynamic)) - all_dynamic;
  if (first && lane < padding) part[all_units + all_dynamic + lane] = 0;
}

// Codes of level 1 of a run's symbols, two bits each.
__device__ __forceinline__ uint32_t first_codes(uint2 symbols, dense::Shape shape, uint32_t base, uint2 valid) {
  uint32_t c[2] = {places(symbols.x, base, 3), places(symbols.y, base, 3)};
  if (shape == dense::Shape::zeros) {
    c[0] = (c[0] | (zero_bytes_of(c[0]) & 0x03030303u)) & ~zero_bytes_of(symbols.x);
    c[1] = (c[1] | (zero_bytes_of(c[1]) & 0x03030303u)) & ~zero_bytes_of(symbols.y);
  }
  // The product has the four codes of a word side by side on top.
  constexpr uint32_t kGather = 0x01041040u;
  return ((c[0] & valid.x) * kGather >> 24) | ((c[1] & valid.y) * kGather >> 24) << 8;
}

template <typename E>
__device__ __forceinline__ void encode_window(const Run<E> (&runs)[kRuns], uint32_t m, const Entry& e, uint8_t* unit,
                                              uint8_t* dynamic, uint8_t* stage, int lane) {
  const uint32_t bits = dense::rest_bits(E::format(), dense::rest_of(e.mode));
  const dense::Shape shape = dense::shape_of(e.mode);
  uint8_t* const codes = unit + dense::rest_bytes(bits, m);
  const uint32_t codes_size = dense::array_bytes(2, m);
  uint2 symbols[kRuns];
  uint32_t unnamed[kRuns];  // bit 2 j: no code of level 1 for element j
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const uint32_t i = run_begin(k, lane);
    store_rests(unit, bits, i, m, runs[k]);
    bool missing = false;
    symbols[k] = symbols_of(runs[k], &missing);
    const uint32_t code = first_codes(symbols[k], shape, e.base, valid_bytes(i, m));
    if (i / 4 < codes_size) *reinterpret_cast<uint16_t*>(codes + i / 4) = static_cast<uint16_t>(code);
    unnamed[k] = code & code >> 1 & 0x5555u;
  }
  // What is left goes to shared memory, in order: all of run 0, then of run 1, ...
  const uint32_t own01 = __popc(unnamed[0]) | __popc(unnamed[1]) << 16;
  const uint32_t own23 = __popc(unnamed[2]) | __popc(unnamed[3]) << 16;
  const uint32_t up_to01 = warp_inclusive_sum(own01), up_to23 = warp_inclusive_sum(own23);
  const uint32_t all01 = __shfl_sync(kFullWarp, up_to01, kWarpSize - 1);
  const uint32_t all23 = __shfl_sync(kFullWarp, up_to23, kWarpSize - 1);
  const uint32_t before01 = up_to01 - own01, before23 = up_to23 - own23;
  const uint32_t run2 = (all01 & 0xFFFFu) + (all01 >> 16);
  const uint32_t begin[kRuns] = {before01 & 0xFFFFu, (all01 & 0xFFFFu) + (before01 >> 16), run2 + (before23 & 0xFFFFu),
                                 run2 + (all23 & 0xFFFFu) + (before23 >> 16)};
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    uint8_t* to = stage + begin[k];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (unnamed[k] >> (2 * j) & 1u)
        *to++ = static_cast<uint8_t>((j < 4 ? symbols[k].x : symbols[k].y) >> (8 * (j % 4)));
    }
  }
  __syncwarp();
  uint32_t n = run2 + (all23 & 0xFFFFu) + (all23 >> 16);
  // Four symbols a lane.
#pragma unroll 1
  for (int level = 1; level < dense::kLevels; ++level) {
    const uint32_t table = level_codes(shape, level);
    uint32_t kept = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < n; first += 4 * kWarpSize) {
      const uint32_t i = first + 4 * lane;
      const uint32_t four = *reinterpret_cast<const uint32_t*>(stage + i);
      const uint32_t shifts = 2 * places(four, e.base - 7u, 15);
      uint32_t code = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) code |= (table >> (shifts >> (8 * j) & 31u) & 3u) << (2 * j);
      if (i + 4 > n) code &= i >= n ? 0 : (1u << (2 * (n - i))) - 1;
      if (i < n) dynamic[i / 4] = static_cast<uint8_t>(code);
      const uint32_t left = code & code >> 1 & 0x55u;
      const uint32_t own = __popc(left), up_to = warp_inclusive_sum(own);
      uint8_t* to = stage + kept + up_to - own;
      __syncwarp();  // what is overwritten has been read
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (left >> (2 * j) & 1u) *to++ = static_cast<uint8_t>(four >> (8 * j));
      }
      kept += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    }
    __syncwarp();
    dynamic += dense::level_bytes(n);
    n = kept;
  }
  for (uint32_t i = lane; i < n; i += kWarpSize) dynamic[i] = stage[i];
  __syncwarp();  // before the next tile's
}

template <typename E>
__device__ __forceinline__ void encode_tile(const uint8_t* tile, uint32_t m, bool wide, const Entry& e, uint8_t* unit,
                                            uint8_t* dynamic, uint8_t* stage, int lane) {
  if (e.mode == dense::kConstant) {
    if (lane < E::kBytes) dynamic[lane] = tile[lane];
    return;
  }
  Run<E> runs[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) runs[k] = load_run<E>(tile, run_begin(k, lane), m, wide);
  if (!E::kCoded || e.mode == dense::kRaw) {
    const uint32_t padded = static_cast<uint32_t>(align_up(static_cast<uint64_t>(E::kBytes) * m)) / E::kBytes;
#pragma unroll
    for (int k = 0; k < kRuns; ++k) store_run(unit, run_begin(k, lane), padded, true, runs[k]);
    return;
  }
  if constexpr (E::kCoded) encode_window(runs, m, e, unit, dynamic, stage, lane);
}

// kParts blocks share a group.
template <typename E, int kParts>
__device__ __forceinline__ void encode_tiles(const EncodeLaunch& launch, uint64_t block) {
  constexpr uint32_t kBlockTiles = kGroupTiles / kParts;
  __shared__ GroupPlan plan;
  __shared__ __align__(4) uint8_t stages[kWarps][kTileElements];
  const Group group = find_group(launch, block / kParts);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint32_t first = static_cast<uint32_t>(block % kParts) * kBlockTiles;
  const uint32_t tiles = min(group.tiles(), first + kBlockTiles);
  if (first >= tiles) return;
  if (warp == 0) read_plan<E>(group, first == 0, &plan, lane);
  __syncthreads();
#pragma unroll 1
  for (uint32_t t = first + warp; t < tiles; t += kWarps) {
    const uint32_t m = group.elements_in(t);
    uint8_t* const unit = plan.units + plan.unit_begin[t];
    uint8_t* const dynamic = plan.dynamic + plan.dynamic_begin[t];
    if (m == kTileElements && group.wide) {
      encode_tile<E>(group.tile<E>(t), kTileElements, true, plan.entry[t], unit, dynamic, stages[warp], lane);
    } else {
      encode_tile<E>(group.tile<E>(t), m, group.wide, plan.entry[t], unit, dynamic, stages[warp], lane);
    }
  }
}

template <typename E, int kParts>
__global__ void __launch_bounds__(kThreads) encode_kernel(const __grid_constant__ EncodeLaunch launch) {
  for (uint64_t block = blockIdx.x; block < kParts * launch.first_block[launch.n]; block += gridDim.x) {
    encode_tiles<E, kParts>(launch, block);
    __syncthreads();  // before shared memory is used again
  }
}

}  // namespace

cudaError_t launch_dense_encode(const EncodeLaunch& launch, cudaStream_t stream) {
  const Processors& processors = launch.processors;
  const uint64_t groups = launch.first_block[launch.n];
  const auto blocks = [&](uint64_t work) { return static_cast<unsigned>(processors.blocks_for(work)); };
  return with_element(static_cast<DType>(launch.header.dtype), [&](auto element) {
    using E = decltype(element);
    plan_kernel<E><<<blocks(groups), kThreads, 0, stream>>>(launch);
    place_kernel<<<blocks(launch.n), kPlaceThreads, 0, stream>>>(launch);
    if (groups > kManyGroups * processors.n) {
      encode_kernel<E, 1><<<blocks(groups), kThreads, 0, stream>>>(launch);
    } else {
      encode_kernel<E, 4><<<blocks(4 * groups), kThreads, 0, stream>>>(launch);
    }
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace zipccl
