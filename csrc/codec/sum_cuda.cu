// decode_sum(): the values of n inputs, added in their order, in one pass. A warp owns a tile of the output, a lane 32
// of its values, whose fp32 sums stay in registers while input after input is decoded and added. Nothing else is
// written, so the inputs are read once and the output is written once.
//
// The result is sum_cpu.cpp's, bit for bit: every product, sum and quotient is rounded by itself. Left out are only
// operations that change no bit: a multiplication or division by 1, and -0 stands for the sum of nothing, as -0 + x is
// x whatever x is.
#include <cmath>
#include <type_traits>

#include "codec/fast_decode.cuh"
#include "codec/hopper.cuh"
#include "codec/team.cuh"
#include "format/float16.h"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kMostTeams = 3;                 // on a multiprocessor
constexpr int kRuns = kTile / kWarpSize / 8;  // of 8 values, to a lane
constexpr int kBatch = 64;                    // inputs whose plans shared memory holds at a time
constexpr uint64_t kMostBlocks = uint64_t{1} << 31;

// ---- Values ---------------------------------------------------------------------------------------------------

template <DType kType>
using Bits = std::conditional_t<kType == DType::f32, uint32_t, uint16_t>;

template <DType kType>
__device__ __forceinline__ float to_float(Bits<kType> bits) {
  if constexpr (kType == DType::bf16) return bf16_to_float(bits);
  if constexpr (kType == DType::f16) return f16_to_float(bits);
  if constexpr (kType == DType::f32) return bits_float(bits);
}

template <DType kType>
__device__ __forceinline__ Bits<kType> from_float(float f) {
  if constexpr (kType == DType::bf16) return float_to_bf16(f);
  if constexpr (kType == DType::f16) return float_to_f16(f);
  if constexpr (kType == DType::f32) return float_bits(canonical(f));
}

// Eight values in a row, of which the first n exist; as few accesses as the alignment allows.
template <typename T>
struct alignas(16) Eight {
  T v[8];
};

template <typename T>
__device__ __forceinline__ Eight<T> load_eight(const T* from, uint32_t n) {
  if (n >= 8 && is_aligned(from, 16)) return *reinterpret_cast<const Eight<T>*>(from);
  Eight<T> x;
#pragma unroll
  for (int j = 0; j < 8; ++j) x.v[j] = j < n ? from[j] : T{0};
  return x;
}

template <typename T>
__device__ __forceinline__ void store_eight(T* to, uint32_t n, const Eight<T>& x) {
  if (n >= 8 && is_aligned(to, 16)) {
    *reinterpret_cast<Eight<T>*>(to) = x;
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < n) to[j] = x.v[j];
  }
}

// Eight sums, rounded. The hardware's conversions agree with format/float16.h but for NaN.
template <DType kType>
__device__ __forceinline__ Eight<Bits<kType>> round_eight(const float (&f)[8]) {
  Eight<Bits<kType>> x;
#if __CUDA_ARCH__ >= 800
  bool nan = false;
#pragma unroll
  for (int j = 0; j < 8; ++j) nan |= isnan(f[j]);
  if (kType != DType::f32 && !nan) {
    uint32_t two[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kType == DType::bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two[j]) : "f"(f[2 * j + 1]), "f"(f[2 * j]));
      } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two[j]) : "f"(f[2 * j + 1]), "f"(f[2 * j]));
      }
    }
    memcpy(&x, two, sizeof(two));
    return x;
  }
#endif
#pragma unroll
  for (int j = 0; j < 8; ++j) x.v[j] = from_float<kType>(f[j]);
  return x;
}

// How many values of a tile of m there are from i on.
__device__ __forceinline__ uint32_t values_from(uint32_t i, uint32_t m) { return i < m ? m - i : 0; }

// ---- Inputs ---------------------------------------------------------------------------------------------------

enum class Kind { bad, coded, values };

// What to copy of a coded input for a round: the tiles of a block's warps, which lie next to each other in the frame.
// In vectors of 16 bytes, all of them inside the frame: so are units and dynamic bytes, and it is aligned at both ends.
struct Extent {
  const uint4* units;
  const uint4* dynamic;
  uint32_t unit_vectors;
  uint32_t dynamic_vectors;
};
constexpr int kRounds = static_cast<int>(kGroupTiles) / kWarps;

__device__ __forceinline__ const uint4* vector_at(const uint8_t* p) {
  return reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{15});
}

// A warp's room for what plan_group() says, until plan_rounds() has made of it what stays.
struct Planning {
  TilePlan plan[kGroupTiles];
  GroupPlace place;
};

// A tile of a coded input: where it begins in its stage, and how it is to be decoded. 16 bytes, one load.
struct alignas(16) StagedTile {
  uint16_t unit;
  uint16_t dynamic;
  TileCode code;
};

// What one input holds for the team's group. kCoded: it may be coded.
template <bool kCoded>
struct Source {
  Kind kind;
  const uint8_t* values;  // Kind::values: of the whole tensor
};
template <>
struct Source<true> {
  Kind kind;
  const uint8_t* values;
  Extent extents[kRounds];  // Kind::coded, and so is
  StagedTile tiles[kGroupTiles];
};

// By one warp, a lane a tile: what to copy for each round, and where the tiles are then.
__device__ __forceinline__ void plan_rounds(const Planning& planning, Source<true>* source, uint32_t tiles, uint32_t m,
                                            int lane) {
  __syncwarp();
  const TilePlan own = planning.plan[lane];
  const Tile t = find_tile(planning.place, own);
  const int first = lane / kWarps * kWarps;
  const uint8_t* const units = planning.place.units + planning.plan[first].unit;
  const uint8_t* const dynamic =
      reinterpret_cast<const uint8_t*>(vector_at(planning.place.dynamic + planning.plan[first].dynamic));
  Extent* extent = &source->extents[lane / kWarps];
  if (lane == first) {
    extent->units = vector_at(units);
    extent->dynamic = vector_at(dynamic);
    if (first >= tiles) extent->unit_vectors = extent->dynamic_vectors = 0;
  }
  if (lane < tiles && (lane == first + kWarps - 1 || lane + 1 == tiles)) {  // the last of its round
    extent->unit_vectors = static_cast<uint32_t>(t.unit + unit_bytes(t.mode, m) - units) / sizeof(uint4);
    extent->dynamic_vectors = static_cast<uint32_t>(vector_at(t.dynamic + t.dynamic_size + 15) - vector_at(dynamic));
  }
  source->tiles[lane] = {static_cast<uint16_t>(t.unit - units), static_cast<uint16_t>(t.dynamic - dynamic),
                         tile_code(own)};
  __syncwarp();  // `planning` has been read
}

// By one warp. Whatever is wrong with the input, its Source says nothing that leads outside of it.
template <DType kIn>
__device__ __forceinline__ void plan_source(const SumLaunch& launch, int i, uint64_t g,
                                            Source<kIn == DType::bf16>* source, Planning* planning, int lane) {
  const Received in = received(launch, i);
  Kind kind = Kind::bad;
  const uint8_t* values = in.data;
  if (readable(in, launch.dtype)) {
    kind = Kind::values;
    if (in.is_frame) {
      LaneTables tables = {};
      if (kIn == DType::bf16 && in.available >= tables_end(in.count)) tables = load_tables(in.data, in.count, g, lane);
      const FrameHeader h = load_header(in.data);
      Status status = check_header(h, in.available, launch.dtype, in.count);
      values = in.data + kHeaderBytes;
      if (status == Status::ok) {
        if (h.flags & kFlagChecksum) status = verify_checksum(launch.sums, i, h, lane);
        if constexpr (kIn == DType::bf16) {
          if (status == Status::ok && h.code == static_cast<uint8_t>(Code::fast)) {
            kind = Kind::coded;
            status = plan_group(in.data, h, g, tables, &planning->place, planning->plan, lane);
            if (status == Status::ok) {
              const uint64_t tiles = min(tile_count(in.count) - g * kGroupTiles, uint64_t{kGroupTiles});
              const uint32_t m = lane < tiles ? values_in_tile(in.count, g * kGroupTiles + lane) : 0;
              plan_rounds(*planning, source, static_cast<uint32_t>(tiles), m, lane);
            }
          }
        }
        if (status != Status::ok && lane == 0) report(launch.status + i, status);
      }
      if (status != Status::ok) kind = Kind::bad;
    }
  }
  if (lane == 0) {
    source->kind = kind;
    source->values = values;
  }
}

// Coded tiles reach the warps through shared memory: those of a block from one input, which lie next to each other in
// the frame, are a stage, and while one is decoded the next ones are copied.
constexpr int kStages = 3;
struct Stage {
  uint4 units[kWarps * kMaxUnitBytes / sizeof(uint4)];
  uint4 dynamic[kWarps * kTile / sizeof(uint4) + 2];
};

// The stages of a team, used in turn. Every warp goes through the same steps, 0, 1, ...: wait(), read, release(); one
// thread begins each copy, after the step that read the stage before.
struct Pipeline {
  uint64_t full[kStages];   // barriers: has been copied
  uint64_t empty[kStages];  // has been read by all warps
  Stage stages[kStages];

#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void copy(uint4* to, const uint4* from, uint32_t vectors, uint64_t* barrier) {
    if (vectors != 0) copy_in(to, from, 16 * vectors, barrier);
  }

  // By one thread, with a barrier of the team behind it.
  __device__ __forceinline__ void init() {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(&full[s], 1);
      init_barrier(&empty[s], kWarps);
    }
  }
  // By one thread.
  __device__ __forceinline__ void begin(uint32_t step, const Extent& x) {
    const uint32_t s = step % kStages;
    if (step >= kStages) wait_for(&empty[s], (step / kStages - 1) & 1u);
    expect_bytes(&full[s], 16 * (x.unit_vectors + x.dynamic_vectors));
    copy(stages[s].units, x.units, x.unit_vectors, &full[s]);
    copy(stages[s].dynamic, x.dynamic, x.dynamic_vectors, &full[s]);
  }
  template <typename Team, typename ExtentOf>
  __device__ __forceinline__ const Stage& wait(uint32_t step, const Team&, const ExtentOf&) {
    wait_for(&full[step % kStages], step / kStages & 1u);
    return stages[step % kStages];
  }
  // One arrival for the warp: __syncwarp() puts the reads of all its lanes before it.
  __device__ __forceinline__ void release(uint32_t step, int lane) {
    __syncwarp();
    if (lane == 0) arrive(&empty[step % kStages]);
  }
#else
  // Without asynchronous copies of this kind: by the whole team, when the stage is needed.
  __device__ __forceinline__ void init() {}
  __device__ __forceinline__ void begin(uint32_t, const Extent&) {}
  template <typename Team, typename ExtentOf>
  __device__ __forceinline__ const Stage& wait(uint32_t step, const Team& team, const ExtentOf& extent_of) {
    Stage& stage = stages[step % kStages];
    const Extent x = extent_of();
    team.sync();
    for (uint32_t i = team.thread(); i < x.unit_vectors; i += kTeamThreads) stage.units[i] = x.units[i];
    for (uint32_t i = team.thread(); i < x.dynamic_vectors; i += kTeamThreads) stage.dynamic[i] = x.dynamic[i];
    team.sync();
    return stage;
  }
  __device__ __forceinline__ void release(uint32_t, int) {}
#endif
};

// A lane's view of a staged unit.
struct StagedUnit {
  const uint8_t* unit;
  uint32_t planes;  // where they begin
  int lane;

  __device__ __forceinline__ uint2 sign_mantissas(int k) const {
    return *reinterpret_cast<const uint2*>(unit + 256 * k + 8 * lane);
  }
  __device__ __forceinline__ uint32_t plane(int p) const {
    return *reinterpret_cast<const uint32_t*>(unit + planes + kPlaneBytes * p + 4 * lane);
  }
};

// ---- A block --------------------------------------------------------------------------------------------------

// A lane's sums: those of the values 256 k + 8 lane + 0..7 of the tile in sum[k].
struct LaneSums {
  float sum[kRuns][8];
};

__device__ __forceinline__ void clear(LaneSums* sums) {
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums->sum[k][j] = -0.0f;
  }
}

template <DType kIn, bool kScaled>
__device__ __forceinline__ void add(const Eight<Bits<kIn>>& x, float scale, float (&sum)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float f = to_float<kIn>(x.v[j]);
    sum[j] = __fadd_rn(sum[j], kScaled ? __fmul_rn(f, scale) : f);
  }
}

// Eight bf16 values.
template <bool kScaled>
__device__ __forceinline__ void add(uint4 v, float scale, float (&sum)[8]) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float f = bits_float(j % 2 == 0 ? w[j / 2] << 16 : w[j / 2] & 0xFFFF0000u);
    sum[j] = __fadd_rn(sum[j], kScaled ? __fmul_rn(f, scale) : f);
  }
}

template <DType kIn, bool kScaled>
__device__ __forceinline__ void add_values(const uint8_t* values, uint64_t tile, uint32_t m, float scale, int lane,
                                           LaneSums* sums) {
  const Bits<kIn>* from = reinterpret_cast<const Bits<kIn>*>(values) + tile * kTileValues;
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    add<kIn, kScaled>(load_eight(from + i, values_from(i, m)), scale, sums->sum[k]);
  }
}

template <DType kOut>
__device__ __forceinline__ void store_sums(void* dst, uint64_t tile, uint32_t m, const LaneSums& sums, int lane) {
  Bits<kOut>* to = static_cast<Bits<kOut>*>(dst) + tile * kTileValues;
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    store_eight(to + i, values_from(i, m), round_eight<kOut>(sums.sum[k]));
  }
}

__device__ __forceinline__ void finish(const SumLaunch& launch, uint64_t tile, uint32_t m, LaneSums* sums, int lane) {
  if (launch.divisor != 1) {
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums->sum[k][j] = __fdiv_rn(sums->sum[k][j], launch.divisor);
    }
  } else if (launch.factor != 1) {
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums->sum[k][j] = __fmul_rn(sums->sum[k][j], launch.factor);
    }
  }
  if (launch.out == static_cast<uint8_t>(DType::bf16)) {
    store_sums<DType::bf16>(launch.dst, tile, m, *sums, lane);
  } else if (launch.out == static_cast<uint8_t>(DType::f16)) {
    store_sums<DType::f16>(launch.dst, tile, m, *sums, lane);
  } else {
    store_sums<DType::f32>(launch.dst, tile, m, *sums, lane);
  }
}

// A team's shared memory; behind it a Source for each input of a batch.
template <bool kCoded>
struct TeamSpace {
  uint4 nothing;
};
template <>
struct TeamSpace<true> {
  Pipeline pipeline;
  union {  // of each warp
    Exponents exponents[kWarps];
    Planning planning[kWarps];
  };
  EscapePlaces places;
};

template <bool kCoded>
ZIPCCL_HD size_t team_bytes(int n) {
  return align_up(sizeof(TeamSpace<kCoded>) + sizeof(Source<kCoded>) * (n < kBatch ? n : kBatch));
}

// `parts` teams share a group. A team's warps take its tiles in rounds, a tile each. More inputs than a batch need
// teams of one round, as each round has all the inputs.
template <DType kIn, bool kScaled, typename Team>
__device__ __forceinline__ void sum_share(const SumLaunch& launch, int parts, uint64_t work, uint8_t* shared,
                                          const Team& team, uint32_t* first_step) {
  constexpr bool kCoded = kIn == DType::bf16;
  TeamSpace<kCoded>& space = *reinterpret_cast<TeamSpace<kCoded>*>(shared);
  Source<kCoded>* const sources = reinterpret_cast<Source<kCoded>*>(shared + sizeof(space));

  const int lane = team.lane, warp = team.warp;
  const uint64_t g = work / parts;
  const int first_round = work % parts * (kRounds / parts);
  const uint64_t tiles_left = tile_count(launch.count) - g * kGroupTiles;
  const int end_round =
      min(first_round + kRounds / parts, static_cast<int>(ceil_div(min(tiles_left, kGroupTiles), kWarps)));
  const auto values_in = [&](uint32_t in_group) {
    return in_group < tiles_left ? static_cast<uint32_t>(values_in_tile(launch.count, g * kGroupTiles + in_group)) : 0;
  };

  LaneSums sums;
  clear(&sums);
  uint32_t step = *first_step;  // of the pipeline
  for (int first = 0; first < launch.n; first += kBatch) {
    const int n = min(launch.n - first, kBatch), steps = (end_round - first_round) * n;
    team.sync();  // the plans before these have been used
    for (int i = warp; i < n; i += kWarps) {
      Planning* planning = nullptr;
      if constexpr (kCoded) planning = &space.planning[warp];
      plan_source<kIn>(launch, first + i, g, &sources[i], planning, lane);
    }
    team.sync();

    // Step s adds input s % n to round s / n.
    const auto extent = [&](int s) {
      if constexpr (kCoded) {
        if (sources[s % n].kind == Kind::coded) return sources[s % n].extents[first_round + s / n];
      }
      return Extent{};
    };
    if constexpr (kCoded) {
      if (team.thread() == 0) {
        for (int s = 0; s < min(steps, kStages - 1); ++s) space.pipeline.begin(step + s, extent(s));
      }
    }
    int i = 0;
    uint32_t in_group = first_round * kWarps + warp;
    uint32_t m = values_in(in_group);
#pragma unroll 1
    for (int s = 0; s < steps; ++s, ++step) {
      const Source<kCoded>& source = sources[i];
      if (source.kind == Kind::values && m != 0) {
        add_values<kIn, kScaled>(source.values, g * kGroupTiles + in_group, m, launch.scale, lane, &sums);
      }
      if constexpr (kCoded) {
        const Stage& stage = space.pipeline.wait(step, team, [&] { return extent(s); });
        if (source.kind == Kind::coded && m != 0) {
          const StagedTile tile = source.tiles[in_group];
          const StagedUnit unit = {reinterpret_cast<const uint8_t*>(stage.units) + tile.unit,
                                   static_cast<uint32_t>(align_up(m)), lane};
          const uint8_t* dynamic = reinterpret_cast<const uint8_t*>(stage.dynamic) + tile.dynamic;
          const bool good = decode_tile(tile.code, unit, dynamic, m, space.places, &space.exponents[warp], lane,
                                        [&](int k, uint4 v) { add<kScaled>(v, launch.scale, sums.sum[k]); });
          if (!good && lane == 0) report(launch.status + first + i, Status::bad_escapes);
        }
        space.pipeline.release(step, lane);
        const int ahead = s + kStages - 1;
        // The warps take turns, so that none of them falls behind.
        if (lane == 0 && warp == s % kWarps && ahead < steps) space.pipeline.begin(step + kStages - 1, extent(ahead));
      }
      if (++i < n) continue;
      if (first + n < launch.n) continue;  // and this was the last step
      if (m != 0) finish(launch, g * kGroupTiles + in_group, m, &sums, lane);
      clear(&sums);
      i = 0;
      in_group += kWarps;
      m = values_in(in_group);
    }
  }
  *first_step = step;
}

// Grid: for each share of the work a block of one team, or any number of blocks of several teams.
template <DType kIn, bool kScaled, int kTeams>
__global__ void __launch_bounds__(kTeams* kTeamThreads, kMostTeams / kTeams)
    sum_kernel(const __grid_constant__ SumLaunch launch, int parts) {
  constexpr bool kCoded = kIn == DType::bf16;
  extern __shared__ __align__(16) uint8_t shared[];
  const Team<kTeams> team;
  const int teams = kTeams == 1 ? 1 : blockDim.x / kTeamThreads;
  uint8_t* const space = shared + (kTeams == 1 ? 0 : team.index * team_bytes<kCoded>(launch.n));
  if constexpr (kCoded) {
    TeamSpace<kCoded>* const coded = reinterpret_cast<TeamSpace<kCoded>*>(space);
    if (team.thread() < 32) coded->places.set(team.thread());
    if (team.thread() == 0) coded->pipeline.init();
  }
  uint32_t step_of_pipeline = 0;
  if (kTeams == 1) {  // and there are as many as there is work
    sum_share<kIn, kScaled>(launch, parts, blockIdx.x, space, team, &step_of_pipeline);
    return wait_for_previous();
  }
  const uint64_t end = group_count(launch.count) * parts, step = static_cast<uint64_t>(gridDim.x) * teams;
  for (uint64_t work = static_cast<uint64_t>(blockIdx.x) * teams + team.index; work < end; work += step) {
    sum_share<kIn, kScaled>(launch, parts, work, space, team, &step_of_pipeline);
  }
  wait_for_previous();
}

template <DType kIn, bool kScaled, int kTeams>
cudaError_t launch_with(const SumLaunch& launch, int parts, int teams, cudaStream_t stream) {
  const auto kernel = sum_kernel<kIn, kScaled, kTeams>;
  const size_t shared = teams * team_bytes<kIn == DType::bf16>(launch.n);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  const uint64_t blocks = launch.processors.blocks_for(ceil_div(group_count(launch.count) * parts, teams));
  return launch_behind(kernel, launch.processors, blocks, teams * kTeamThreads, shared, stream, launch, parts);
}

template <DType kIn, bool kScaled>
cudaError_t launch_scaled(const SumLaunch& launch, cudaStream_t stream) {
  const uint64_t groups = group_count(launch.count), processors = launch.processors.n;
  // Fewer parts share the work on headers and tables, more keep all processors busy to the end.
  const int parts = launch.n > kBatch || groups < 3 * processors ? kRounds : groups < 16 * processors ? 2 : 1;
  if (!launch.processors.limited) return launch_with<kIn, kScaled, 1>(launch, parts, 1, stream);
  int device = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const int fit = static_cast<int>(shared / team_bytes<kIn == DType::bf16>(launch.n));
  return launch_with<kIn, kScaled, kMostTeams>(launch, parts, fit < kMostTeams ? fit : kMostTeams, stream);
}

template <DType kIn>
cudaError_t launch_sum(const SumLaunch& launch, cudaStream_t stream) {
  return launch.scale == 1 ? launch_scaled<kIn, false>(launch, stream) : launch_scaled<kIn, true>(launch, stream);
}

bool aligned(const void* p, uint64_t a) { return reinterpret_cast<uintptr_t>(p) % a == 0; }

}  // namespace

Status decode_sum(const SumInput* inputs, int n, uint64_t count, const SumOptions& options, void* dst,
                  int32_t* device_status, void* scratch, void* stream, int max_sms) {
  if (inputs == nullptr || n < 1 || count > kMaxCount || device_status == nullptr || max_sms < 0 ||
      !can_sum(options.in, options.out)) {
    return Status::bad_argument;
  }
  const uint64_t in_bytes = dtype_bytes(static_cast<uint8_t>(options.in));
  if (count != 0 && (dst == nullptr || !aligned(dst, dtype_bytes(static_cast<uint8_t>(options.out))))) {
    return Status::bad_argument;
  }
  if (scratch == nullptr || !aligned(scratch, 16)) return Status::bad_argument;
  if (n > kMostSumInputs || kGroupTiles * group_count(count) > kMostBlocks) return Status::unsupported;

  SumLaunch launch = {};
  launch.dtype = static_cast<uint8_t>(options.in);
  launch.out = static_cast<uint8_t>(options.out);
  if (processors_of_device(max_sms, &launch.processors) != cudaSuccess) return Status::device_error;
  launch.scale = options.scale;
  launch.divisor = options.divisor;
  launch.factor = 1;
  int exponent = 0;
  if (std::fabs(std::frexp(options.divisor, &exponent)) == 0.5f && exponent > -100 && exponent < 100) {
    launch.factor = 1 / options.divisor;  // of a power of two: the product is rounded as the quotient is
    launch.divisor = 1;
  }
  launch.dst = dst;
  launch.count = count;
  launch.status = device_status;
  launch.n = n;
  uint64_t most_available = 0;
  for (int i = 0; i < n; ++i) {
    const SumInput& input = inputs[i];
    const bool needed = input.is_frame || count != 0;
    if (needed && (input.data == nullptr || !aligned(input.data, input.is_frame ? kFrameAlign : in_bytes))) {
      return Status::bad_argument;
    }
    launch.data[i] = input.data;
    launch.available[i] = input.available;
    if (input.is_frame && input.available > most_available) most_available = input.available;
    if (input.is_frame) launch.is_frame[i / 32] |= 1u << i % 32;
  }

  launch.sums = {static_cast<uint64_t*>(scratch), sums_per_job(n, most_available)};

  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (launch_check_frames(launch, cuda_stream) != cudaSuccess) return Status::device_error;
  if (count == 0) return Status::ok;
  const auto launch_of = options.in == DType::bf16  ? launch_sum<DType::bf16>
                         : options.in == DType::f16 ? launch_sum<DType::f16>
                                                    : launch_sum<DType::f32>;
  return launch_of(launch, cuda_stream) == cudaSuccess ? Status::ok : Status::device_error;
}

}  // namespace cuda
}  // namespace zipccl
