// Code::dense, frame to tensor. The first warp of a block checks headers and tables and plans the group's tiles; then a
// warp decodes a tile, a lane four runs of 8 elements (dense_elements.cuh). bf16: 1.35 bytes are read and 2 written.
//
// Levels are decoded backwards, 32 elements at a time: those that a code names take its symbol, the others the next one
// in line of the level behind. Frames come from the network: no byte of one is believed before it is checked.
#include "codec/dense_elements.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr uint64_t kManyGroups = 4;  // per processor: then a block takes a whole group
static_assert(kGroupTiles == kWarpSize, "a warp plans a group, a lane each tile");

struct Plan {
  const uint8_t* units;
  const uint8_t* dynamic;
  uint32_t unit_begin[kGroupTiles];
  uint32_t dynamic_begin[kGroupTiles];
  uint16_t word[kGroupTiles];
  uint8_t base[kGroupTiles];
};

// By one warp: checks the tables of group g of a frame whose header is in order, and plans its tiles.
template <typename E>
__device__ Status plan_group(const uint8_t* frame, const FrameHeader& h, uint64_t elements, uint64_t g, Plan* plan,
                             int lane) {
  const uint64_t* const offsets = reinterpret_cast<const uint64_t*>(frame + group_table_begin());
  const uint64_t parts_size = h.frame_bytes - tables_end(elements);
  const uint64_t begin = offsets[g], end = g + 1 < group_count(elements) ? offsets[g + 1] : parts_size;
  const uint64_t tile = g * kGroupTiles + lane;
  uint32_t unit = 0, dynamic = 0;
  uint16_t word = 0;
  uint8_t base = 0;
  bool valid = true;
  if (tile < tile_count(elements)) {
    word = reinterpret_cast<const uint16_t*>(frame + tile_word_begin(elements))[tile];
    base = frame[tile_base_begin(elements) + tile];
    const uint32_t m = static_cast<uint32_t>(values_in_tile(elements, tile));
    dynamic = tile_word_dynamic(word);
    valid = dense::valid_tile(E::format(), tile_word_mode(word), base, dynamic, m);
    if (valid) unit = dense::unit_bytes(E::format(), tile_word_mode(word), m);
  }
  if (!__all_sync(kFullWarp, valid)) return Status::bad_tile;
  const uint32_t units_up_to = warp_inclusive_sum(unit), dynamic_up_to = warp_inclusive_sum(dynamic);
  const uint64_t units = __shfl_sync(kFullWarp, units_up_to, kWarpSize - 1);
  const uint64_t size = units + align_up(__shfl_sync(kFullWarp, dynamic_up_to, kWarpSize - 1));
  // Every group is a multiple of kFrameAlign, so where all are chained, all are aligned; but this one is read whatever
  // becomes of the others.
  const bool chained = (g > 0 || begin == 0) && begin % kFrameAlign == 0 && begin <= parts_size &&
                       size <= parts_size - begin && begin + size == end;
  if (!chained) return Status::bad_table;
  plan->unit_begin[lane] = units_up_to - unit;
  plan->dynamic_begin[lane] = dynamic_up_to - dynamic;
  plan->word[lane] = word;
  plan->base[lane] = base;
  if (lane == 0) {
    plan->units = frame + tables_end(elements) + begin;
    plan->dynamic = plan->units + units;
  }
  return Status::ok;
}

constexpr uint32_t kDynamicWords = dense::kMaxDynamic / 4 + 2;  // they may begin within a word

// A warp's place for a tile: its dynamic bytes, and symbols of a level's elements with room for 8 bytes' reading.
struct WarpSpace {
  uint32_t dynamic[kDynamicWords];
  uint32_t symbols[kTileElements / 4 + 3];
};

// Puts the tile's dynamic bytes into shared memory. They are read as the aligned words that hold them, which lie inside
// the frame because it is aligned at both ends.
__device__ __forceinline__ const uint8_t* gather_dynamic(const uint8_t* from, uint32_t size, WarpSpace* space,
                                                         int lane) {
  const uint32_t misalignment = reinterpret_cast<uintptr_t>(from) & 3u;
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(from - misalignment);
  const uint32_t n = (misalignment + size + 3) / 4;
  __syncwarp();  // the warp's tile before this one has been read
  for (uint32_t i = lane; i < n; i += kWarpSize) space->dynamic[i] = words[i];
  __syncwarp();
  return reinterpret_cast<const uint8_t*>(space->dynamic) + misalignment;
}

// Unnamed ones among n codes, four to a byte. By a warp.
__device__ __forceinline__ uint32_t count_unnamed(const uint8_t* codes, uint32_t n, int lane) {
  uint32_t count = 0;
  for (uint32_t i = lane; 4 * i < n; i += kWarpSize) {
    const uint32_t left = n - 4 * i, code = codes[i] & (left >= 4 ? 0xFFu : (1u << (2 * left)) - 1);
    count += __popc(code & code >> 1 & 0x55u);
  }
  return warp_sum(count);
}

// Symbols of a level's n elements, to symbols[n]. `next`: those that are unnamed, in order; it may be `symbols`, as it
// is read no later than overwritten when one goes backwards.
__device__ __forceinline__ void decode_level(uint32_t named, const uint8_t* codes, uint32_t n, const uint8_t* next,
                                             uint32_t unnamed, uint8_t* symbols, int lane) {
  const uint32_t below = (1u << lane) - 1;
#pragma unroll 1
  for (uint32_t chunk = (n + kWarpSize - 1) / kWarpSize; chunk-- > 0;) {
    const uint32_t i = kWarpSize * chunk + lane;
    const uint32_t code = i < n ? codes[i / 4] >> (2 * (i % 4)) & 3u : 0;
    const uint32_t left = __ballot_sync(kFullWarp, code == 3);
    unnamed -= __popc(left);
    const uint32_t symbol = code == 3 ? next[unnamed + __popc(left & below)] : named >> (8 * code);
    __syncwarp();
    if (i < n) symbols[i] = static_cast<uint8_t>(symbol);
  }
  __syncwarp();
}

// Four 2-bit codes spread to nibbles.
__device__ __forceinline__ uint32_t spread_codes(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00FF00FFu;
  codes = (codes | codes << 4) & 0x0F0F0F0Fu;
  return (codes | codes << 2) & 0x33333333u;
}

// Symbols of a run from its 8 codes of level 1, and the symbols of the unnamed ones, which begin at next[begin].
__device__ __forceinline__ uint2 run_symbols(uint32_t codes, uint32_t named, const uint32_t* next, uint32_t begin) {
  const uint32_t selector = spread_codes(codes);
  const uint32_t unnamed = selector & selector >> 1 & 0x11111111u;
  const uint32_t rank = unnamed * 0x11111110u;  // of each element among them: how many come before it
  const uint32_t w0 = next[begin / 4], w1 = next[begin / 4 + 1], w2 = next[begin / 4 + 2], shift = 8 * (begin % 4);
  const uint32_t low = __funnelshift_r(w0, w1, shift), high = __funnelshift_r(w1, w2, shift);
  const uint32_t masks = 0xFF000000u;  // by code
  const uint32_t x = select_bits(select_bytes(masks, 0, selector), select_bytes(low, high, rank & 0x7777u),
                                 select_bytes(named, 0, selector));
  const uint32_t y = select_bits(select_bytes(masks, 0, selector >> 16), select_bytes(low, high, rank >> 16 & 0x7777u),
                                 select_bytes(named, 0, selector >> 16));
  return make_uint2(x, y);
}

// False, and nothing written: the codes do not fit the dynamic bytes.
template <typename E>
__device__ __forceinline__ bool decode_window(uint32_t mode, uint32_t base, const uint8_t* unit, const uint8_t* dynamic,
                                              uint32_t size, uint32_t m, uint8_t* dst, bool wide, WarpSpace* space,
                                              int lane) {
  const uint32_t bits = dense::rest_bits(E::format(), dense::rest_of(mode));
  const uint8_t* const first_codes = unit + dense::rest_bytes(bits, m);
  const uint32_t codes_size = dense::array_bytes(2, m);
  uint32_t codes[kRuns], own[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const uint32_t i = run_begin(k, lane);
    codes[k] = i / 4 < codes_size ? *reinterpret_cast<const uint16_t*>(first_codes + i / 4) : 0;
    if (i + kRunElements > m) codes[k] &= i >= m ? 0 : (1u << (2 * (m - i))) - 1;
    own[k] = __popc(codes[k] & codes[k] >> 1 & 0x5555u);
  }
  const uint8_t* const bytes = gather_dynamic(dynamic, size, space, lane);

  const uint32_t own01 = own[0] | own[1] << 16, own23 = own[2] | own[3] << 16;
  const uint32_t up_to01 = warp_inclusive_sum(own01), up_to23 = warp_inclusive_sum(own23);
  const uint32_t all01 = __shfl_sync(kFullWarp, up_to01, kWarpSize - 1);
  const uint32_t all23 = __shfl_sync(kFullWarp, up_to23, kWarpSize - 1);
  const uint32_t before01 = up_to01 - own01, before23 = up_to23 - own23;
  const uint32_t run2 = (all01 & 0xFFFFu) + (all01 >> 16);
  const uint32_t begin[kRuns] = {before01 & 0xFFFFu, (all01 & 0xFFFFu) + (before01 >> 16), run2 + (before23 & 0xFFFFu),
                                 run2 + (all23 & 0xFFFFu) + (before23 >> 16)};

  // Forwards: how many codes each level has, and where.
  uint32_t count[dense::kLevels + 1], at[dense::kLevels] = {0}, used = 0;
  count[0] = m;
  count[1] = run2 + (all23 & 0xFFFFu) + (all23 >> 16);
#pragma unroll
  for (int level = 1; level < dense::kLevels; ++level) {
    at[level] = used;
    used += dense::level_bytes(count[level]);
    if (used > size) return false;
    count[level + 1] = count_unnamed(bytes + at[level], count[level], lane);
  }
  if (used + count[dense::kLevels] != size) return false;

  const dense::Shape shape = dense::shape_of(mode);
  uint8_t* const symbols = reinterpret_cast<uint8_t*>(space->symbols);
  const uint8_t* next = bytes + used;
#pragma unroll
  for (int level = dense::kLevels - 1; level > 0; --level) {
    decode_level(dense::level_symbols(shape, base, level), bytes + at[level], count[level], next, count[level + 1],
                 symbols, lane);
    next = symbols;
  }
  const uint32_t named = dense::level_symbols(shape, base, 0);
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const uint32_t i = run_begin(k, lane);
    const uint2 s = run_symbols(codes[k], named, space->symbols, begin[k]);
    store_run(dst, i, m, wide, join_run<E>(unit, bits, i, m, s));
  }
  return true;
}

template <typename E>
__device__ __forceinline__ bool decode_tile(const Plan& plan, uint32_t t, uint32_t m, uint8_t* dst, bool wide,
                                            WarpSpace* space, int lane) {
  const uint32_t mode = tile_word_mode(plan.word[t]);
  const uint8_t* const unit = plan.units + plan.unit_begin[t];
  const uint8_t* const dynamic = plan.dynamic + plan.dynamic_begin[t];
  if constexpr (E::kCoded) {
    if (dense::is_window(mode)) {
      return decode_window<E>(mode, plan.base[t], unit, dynamic, tile_word_dynamic(plan.word[t]), m, dst, wide, space,
                              lane);
    }
  }
  Run<E> run = {};
  if (mode == dense::kConstant) {
    uint64_t v = 0;
#pragma unroll
    for (int b = 0; b < E::kBytes; ++b) v |= static_cast<uint64_t>(dynamic[b]) << (8 * b);
#pragma unroll
    for (int j = 0; j < 8; ++j) set_element(&run, j, v);
  }
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const uint32_t i = run_begin(k, lane);
    if (mode == dense::kRaw) run = load_run<E>(unit, i, m, true);
    store_run(dst, i, m, wide, run);
  }
  return true;
}

// kParts blocks share a group.
template <typename E, int kParts>
__device__ __forceinline__ void decode_tiles(const DecodeLaunch& launch, uint64_t part) {
  constexpr uint32_t kBlockTiles = kGroupTiles / kParts;
  __shared__ Plan plan;
  __shared__ WarpSpace spaces[kWarps];
  __shared__ Status shared_status;
  __shared__ bool shared_raw;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint64_t block = part / kParts;
  const int i = find_job(launch, block);
  const DecodeJob& job = launch.job[i];
  const DType dtype = static_cast<DType>(launch.dtype);
  const uint64_t elements = dense::element_count(dtype, job.count);
  const uint64_t g = block - launch.first_block[i];
  const uint32_t first = static_cast<uint32_t>(part % kParts) * kBlockTiles;
  const uint64_t first_tile = g * kGroupTiles + first;
  if (first_tile >= tile_count(elements)) return;

  const uint8_t* frame = static_cast<const uint8_t*>(job.frame);
  if (warp == 0) {
    Status status = Status::truncated;
    bool raw = false;
    if (job.available >= kHeaderBytes) {
      const FrameHeader h = load_header(frame);
      status = check_header(h, job.available, launch.dtype, job.count, Code::dense);
      if (status == Status::ok) {
        raw = h.code == static_cast<uint8_t>(Code::raw);
        if (h.flags & kFlagChecksum) status = verify_checksum(launch.sums, i, h, lane);
        if (status == Status::ok && !raw) status = plan_group<E>(frame, h, elements, g, &plan, lane);
        if (status != Status::ok && lane == 0) report(launch.status + i, status);
      }
    }
    if (lane == 0) {
      shared_status = status;
      shared_raw = raw;
    }
  }
  __syncthreads();
  if (shared_status != Status::ok) return;

  uint8_t* const dst = static_cast<uint8_t*>(job.dst) + first_tile * kTileValues * E::kBytes;
  const uint64_t left = elements - first_tile * kTileValues;
  if (shared_raw) {
    const uint64_t n = left < kBlockTiles * kTileValues ? left : kBlockTiles * kTileValues;
    copy_by(kThreads, threadIdx.x, dst, frame + kHeaderBytes + first_tile * kTileValues * E::kBytes, n * E::kBytes);
    return;
  }
  const bool wide = is_aligned(dst, 16);
  const uint64_t tiles_left = tile_count(elements) - first_tile;
  const uint32_t tiles = tiles_left < kBlockTiles ? static_cast<uint32_t>(tiles_left) : kBlockTiles;
  bool good = true;
#pragma unroll 1
  for (uint32_t t = warp; t < tiles; t += kWarps) {
    const uint32_t m = static_cast<uint32_t>(values_in_tile(elements, first_tile + t));
    uint8_t* const to = dst + t * kTileElements * E::kBytes;
    if (m == kTileElements && wide) {
      good &= decode_tile<E>(plan, first + t, kTileElements, to, true, &spaces[warp], lane);
    } else {
      good &= decode_tile<E>(plan, first + t, m, to, wide, &spaces[warp], lane);
    }
  }
  if (!good && lane == 0) report(launch.status + i, Status::bad_escapes);
}

// Blocks that are to share a multiprocessor: as many as registers allow without spills that matter.
template <typename E>
constexpr int kBlocks = E::kMantissa == 7 ? 5 : 3;

template <typename E, int kParts>
__global__ void __launch_bounds__(kThreads, kBlocks<E>) decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  for (uint64_t part = blockIdx.x; part < kParts * launch.first_block[launch.n]; part += gridDim.x) {
    decode_tiles<E, kParts>(launch, part);
    __syncthreads();  // before shared memory is used again
  }
  wait_for_previous();
}

}  // namespace

cudaError_t launch_dense_decode(const DecodeLaunch& launch, cudaStream_t stream) {
  const Processors& processors = launch.processors;
  const uint64_t groups = launch.first_block[launch.n];
  return with_element(static_cast<DType>(launch.dtype), [&](auto element) {
    using E = decltype(element);
    const auto launch_parts = [&](auto kernel, uint64_t parts) {
      return launch_behind(kernel, processors, processors.blocks_for(parts), kThreads, 0, stream, launch);
    };
    return groups > kManyGroups * processors.n ? launch_parts(decode_kernel<E, 1>, groups)
                                               : launch_parts(decode_kernel<E, 4>, 4 * groups);
  });
}

}  // namespace cuda
}  // namespace zipccl
