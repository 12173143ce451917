// decode_sum(): the values of n inputs, added in their order, in one pass. A warp owns a tile of the output, a lane 32
// of its values, whose fp32 sums stay in registers while input after input is decoded and added. Nothing else is
// written, so the inputs are read once and the output is written once.
//
// The result is sum_cpu.cpp's, bit for bit: every product, sum and quotient is rounded by itself. Left out are only
// operations that change no bit: a multiplication or division by 1, and -0 stands for the sum of nothing, as -0 + x is
// x whatever x is.
#include <cmath>
#include <type_traits>

#include "codec/sum_pipeline.cuh"
#include "codec/sum_tile.cuh"
#include "format/float16.h"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kMostTeams = 3;  // on a multiprocessor
constexpr int kBatch = 64;     // inputs whose plans shared memory holds at a time
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
    // By an intrinsic: of an assignment the compiler may make a store for each value, which costs a fifth of the rate.
    uint4 v[sizeof(x) / sizeof(uint4)];
    memcpy(v, &x, sizeof(x));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(x) / sizeof(uint4)); ++i)
      __stwb(reinterpret_cast<uint4*>(to) + i, v[i]);
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
constexpr int kRounds = static_cast<int>(kGroupTiles) / kWarps;

__device__ __forceinline__ const uint4* vector_at(const uint8_t* p) {
  return reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{15});
}

// A warp's room for what plan_group() says, until plan_rounds() has made of it what stays.
struct Planning {
  TilePlan plan[kGroupTiles];
  GroupPlace place;
};

// A tile of an input: where it begins in its stage, and how it is to be decoded. 16 bytes, one load.
struct alignas(16) StagedTile {
  uint16_t unit;
  uint16_t dynamic;
  uint16_t whole_window;  // whether it is a window tile of kTile values of a coded input
  uint16_t mode;
  uint32_t base;
  uint32_t dynamic_size;
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
  StagedTile tiles[kGroupTiles];
};

// Of each round of one input. Those of a round's inputs lie next to each other, in the order in which they are needed.
struct RoundExtents {
  Extent* first;
  int inputs;

  __device__ __forceinline__ Extent& of(int round) const { return first[round * inputs]; }
};

// By one warp, a lane a tile: what to copy for each round, and where the tiles are then.
__device__ __forceinline__ void plan_rounds(const Planning& planning, Source<true>* source, const RoundExtents& extents,
                                            uint32_t tiles, uint32_t m, int lane) {
  __syncwarp();
  const TilePlan own = planning.plan[lane];
  const Tile t = find_tile(planning.place, own);
  const int first = lane / kWarps * kWarps;
  const uint8_t* const units = planning.place.units + planning.plan[first].unit;
  const uint8_t* const dynamic =
      reinterpret_cast<const uint8_t*>(vector_at(planning.place.dynamic + planning.plan[first].dynamic));
  Extent* extent = &extents.of(lane / kWarps);
  if (lane == first) {
    extent->units = vector_at(units);
    extent->dynamic = vector_at(dynamic);
    if (first >= tiles) extent->unit_vectors = extent->dynamic_vectors = 0;
  }
  if (lane < tiles && (lane == first + kWarps - 1 || lane + 1 == tiles)) {  // the last of its round
    const uint64_t unit = t.has_more(m) ? align_up(m) + kPlanesBytes : unit_bytes(t.mode, m);
    extent->unit_vectors = static_cast<uint32_t>(t.unit + unit - units) / sizeof(uint4);
    extent->dynamic_vectors = static_cast<uint32_t>(vector_at(t.dynamic + t.dynamic_size + 15) - vector_at(dynamic));
  }
  const bool whole_window = m == kTile && t.mode == static_cast<uint32_t>(TileMode::window);
  source->tiles[lane] = {static_cast<uint16_t>(t.unit - units),
                         static_cast<uint16_t>(t.dynamic - dynamic),
                         whole_window,
                         static_cast<uint16_t>(t.mode),
                         t.base,
                         t.dynamic_size};
  __syncwarp();  // `planning` has been read
}

// By one warp. Whatever is wrong with the input, its Source says nothing that leads outside of it.
template <DType kIn>
__device__ __forceinline__ void plan_source(const SumLaunch& launch, int i, uint64_t g,
                                            Source<kIn == DType::bf16>* source, const RoundExtents& extents,
                                            Planning* planning, int lane) {
  const Received in = received(launch, i);
  Kind kind = Kind::bad;
  const uint8_t* values = in.data;
  if (readable(in, launch.dtype)) {
    kind = Kind::values;
    if (in.is_frame) {
      LaneTables tables = {};
      if (kIn == DType::bf16) tables = load_tables(in.data, in.available, in.count, g, lane);
      const FrameHeader h = load_header(in.data);
      Status status = Status::bad_header;
      values = in.data + kHeaderBytes;
      if (is_safe(h, in.available, launch.dtype, in.count)) {
        status = Status::ok;
        if (h.flags & kFlagChecksum) status = verify_checksum(launch.sums, i, h, lane);
        if constexpr (kIn == DType::bf16) {
          if (status == Status::ok && h.code == static_cast<uint8_t>(Code::fast)) {
            kind = Kind::coded;
            status = plan_group(in.data, h, g, tables, &planning->place, planning->plan, lane);
            if (status == Status::ok) {
              const uint64_t tiles = min(tile_count(in.count) - g * kGroupTiles, uint64_t{kGroupTiles});
              const uint32_t m = lane < tiles ? values_in_tile(in.count, g * kGroupTiles + lane) : 0;
              plan_rounds(*planning, source, extents, static_cast<uint32_t>(tiles), m, lane);
            }
          }
        }
        if (status != Status::ok && lane == 0) report(launch.status + i, status);
      }
      if (status != Status::ok) kind = Kind::bad;
    }
  }
  if constexpr (kIn == DType::bf16) {
    if (kind != Kind::coded) {
      source->tiles[lane] = {};
      if (lane < kRounds) extents.of(lane) = {};
    }
  }
  if (lane == 0) {
    source->kind = kind;
    source->values = values;
  }
}

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

// A team's shared memory; behind it, for each input of a batch, a Source, and then kRounds times an Extent.
template <bool kCoded>
struct TeamSpace {
  uint4 nothing;
};
template <>
struct TeamSpace<true> {
  Pipeline pipeline;
  union {  // of each warp
    alignas(32) Exponents exponents[kWarps];
    Planning planning[kWarps];
  };
  EscapePlaces places;
};

template <bool kCoded>
ZIPCCL_HD size_t team_bytes(int n) {
  constexpr size_t kInput = sizeof(Source<kCoded>) + (kCoded ? kRounds * sizeof(Extent) : 0);
  return align_up(sizeof(TeamSpace<kCoded>) + kInput * (n < kBatch ? n : kBatch), alignof(TeamSpace<kCoded>));
}

// An input's part of a tile, whatever the input holds.
template <DType kIn, bool kScaled>
__device__ __forceinline__ void add_values_of(const SumLaunch& launch, const Source<kIn == DType::bf16>& source,
                                              uint64_t tile, uint32_t m, int lane, LaneSums* sums) {
  if (source.kind == Kind::values && m != 0) {
    add_values<kIn, kScaled>(source.values, tile, m, launch.scale, lane, sums);
  }
}

// `parts` teams share a group. A team's warps take its tiles in rounds, a tile each. More inputs than a batch need
// teams of one round, as each round has all the inputs.
template <DType kIn, bool kScaled, typename Team>
__device__ __forceinline__ void sum_share(const SumLaunch& launch, int parts, uint64_t work, uint8_t* shared,
                                          const Team& team, Turn* turn_of_pipeline) {
  constexpr bool kCoded = kIn == DType::bf16;
  TeamSpace<kCoded>& space = *reinterpret_cast<TeamSpace<kCoded>*>(shared);
  Source<kCoded>* const sources = reinterpret_cast<Source<kCoded>*>(shared + sizeof(space));
  Extent* const extents = reinterpret_cast<Extent*>(sources + min(launch.n, kBatch));

  const int lane = opaque(team.lane), warp = opaque(team.warp);
  uint32_t exponents = 0;
  if constexpr (kCoded) exponents = opaque(own_exponents(&space.exponents[warp], lane));
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
  Turn turn = *turn_of_pipeline;
  for (int first = 0; first < launch.n; first += kBatch) {
    const int n = min(launch.n - first, kBatch), steps = (end_round - first_round) * n;
    team.sync();  // the plans before these have been used
    for (int i = warp; i < n; i += kWarps) {
      Planning* planning = nullptr;
      if constexpr (kCoded) planning = &space.planning[warp];
      plan_source<kIn>(launch, first + i, g, &sources[i], {extents + i, n}, planning, lane);
    }
    team.sync();

    // Step s adds input s % n to round s / n.
    const Extent* const extent_of_step = extents + first_round * n;
    if constexpr (kCoded) {
      if (team.thread() == 0) {
        for (int s = 0; s < min(steps, kStages - 1); ++s) space.pipeline.begin(turn.after(s), extent_of_step[s]);
      }
    }
    uint32_t s = 0;
#pragma unroll 1
    for (int round = first_round; round < end_round; ++round) {
      const uint32_t in_group = round * kWarps + warp, m = values_in(in_group);
#pragma unroll 1
      for (int i = 0; i < n; ++i, ++s) {
        const Source<kCoded>& source = sources[i];
        if constexpr (!kCoded) {
          add_values_of<kIn, kScaled>(launch, source, g * kGroupTiles + in_group, m, lane, &sums);
        } else {
          const StagedTile tile = source.tiles[in_group];
          const Stage& stage = space.pipeline.wait(turn, team, extent_of_step[s]);
          const uint8_t* const unit = reinterpret_cast<const uint8_t*>(stage.units) + tile.unit;
          const uint8_t* const dynamic = reinterpret_cast<const uint8_t*>(stage.dynamic) + tile.dynamic;
          if (tile.whole_window) {
            const bool good = add_window_tile<kScaled>(tile.base, tile.dynamic_size, unit, dynamic, exponents,
                                                       launch.scale, lane, &sums);
            if (!good) report(launch.status + first + i, Status::bad_escapes);
          } else if (source.kind == Kind::coded && m != 0) {
            const int own_lane = opaque(team.lane);  // or parts of this would be kept in registers from step to step
            const StagedUnit view = {unit, static_cast<uint32_t>(align_up(m)), own_lane};
            const bool good = decode_tile({tile.mode, tile.base, tile.dynamic_size}, view, dynamic, m, space.places,
                                          &space.exponents[warp], own_lane,
                                          [&](int k, uint4 v) { add<kScaled>(v, launch.scale, sums.sum[k]); });
            if (!good && own_lane == 0) report(launch.status + first + i, Status::bad_escapes);
          } else {
            add_values_of<kIn, kScaled>(launch, source, g * kGroupTiles + in_group, m, opaque(team.lane), &sums);
          }
          space.pipeline.release(turn, lane);
          // The warps take turns, so that none of them falls behind.
          const uint32_t ahead = s + kStages - 1;
          if (lane == 0 && warp == s % kWarps && ahead < static_cast<uint32_t>(steps)) {
            space.pipeline.begin(turn.after(kStages - 1), extent_of_step[ahead]);
          }
          turn.advance();
        }
      }
      if (first + n < launch.n) continue;  // and this was the last round
      if (m != 0) finish(launch, g * kGroupTiles + in_group, m, &sums, lane);
      clear(&sums);
    }
  }
  *turn_of_pipeline = turn;
}

// Grid: for each share of the work a block of one team, or any number of blocks of several teams.
template <DType kIn, bool kScaled, int kTeams>
__global__ void __launch_bounds__(kTeams* kTeamThreads, kMostTeams / kTeams)
    sum_kernel(const __grid_constant__ SumLaunch launch, int parts) {
  constexpr bool kCoded = kIn == DType::bf16;
  extern __shared__ __align__(32) uint8_t shared[];
  const Team<kTeams> team;
  const int teams = kTeams == 1 ? 1 : blockDim.x / kTeamThreads;
  uint8_t* const space = shared + (kTeams == 1 ? 0 : team.index * team_bytes<kCoded>(launch.n));
  if constexpr (kCoded) {
    TeamSpace<kCoded>* const coded = reinterpret_cast<TeamSpace<kCoded>*>(space);
    if (team.thread() < 32) coded->places.set(team.thread());
    if (team.thread() == 0) coded->pipeline.init();
  }
  Turn turn;
  if (kTeams == 1) {  // and there are as many as there is work
    sum_share<kIn, kScaled>(launch, parts, blockIdx.x, space, team, &turn);
    return wait_for_previous();
  }
  const uint64_t end = group_count(launch.count) * parts, step = static_cast<uint64_t>(gridDim.x) * teams;
  for (uint64_t work = static_cast<uint64_t>(blockIdx.x) * teams + team.index; work < end; work += step) {
    sum_share<kIn, kScaled>(launch, parts, work, space, team, &turn);
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
