// decode_sum(): the values of n inputs, added in their order, in one pass. A warp owns a tile of the output, a lane 32
// of its values, whose fp32 sums stay in registers while input after input is decoded and added. Nothing else is
// written, so the inputs are read once and the output is written once.
//
// The result is sum_cpu.cpp's, bit for bit: every product, sum and quotient is rounded by itself. Left out are only
// operations that change no bit: a multiplication or division by 1, and -0 stands for the sum of nothing, as -0 + x is
// x whatever x is.
#include <type_traits>

#include "codec/fast_decode.cuh"
#include "format/float16.h"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerProcessor = 3;
constexpr int kRuns = kTile / kWarpSize / 8;  // of 8 values, to a lane
constexpr int kBatch = 64;                    // inputs whose plans shared memory holds at a time
constexpr uint64_t kMostBlocks = uint64_t{1} << 31;
constexpr uint64_t kManyGroups = 16;  // per processor: then a block takes a whole group

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

// How many values of a tile of m there are from i on.
__device__ __forceinline__ uint32_t values_from(uint32_t i, uint32_t m) { return i < m ? m - i : 0; }

// ---- Inputs ---------------------------------------------------------------------------------------------------

enum class Kind { bad, coded, values };

// What one input holds for the block's group.
struct Source {
  Kind kind;
  GroupPlace place;       // coded
  const uint8_t* values;  // values: of the whole tensor
};

// By one warp. Whatever is wrong with the input, its Source says nothing that leads outside of it.
template <DType kIn>
__device__ __forceinline__ void plan_source(const SumLaunch& launch, int i, uint64_t g, Source* source, TilePlan* plan,
                                            int lane) {
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
        if (kIn == DType::bf16 && status == Status::ok && h.code == static_cast<uint8_t>(Code::fast)) {
          kind = Kind::coded;
          status = plan_group(in.data, h, g, tables, &source->place, plan, lane);
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
constexpr int kStages = 2;
struct Stage {
  uint4 units[kWarps * kMaxUnitBytes / sizeof(uint4)];
  uint4 dynamic[kWarps * kTile / sizeof(uint4) + 2];
};

// What to copy for a stage, in vectors of 16 bytes. All of it lies inside the frame: so do units and dynamic bytes, and
// the frame is aligned at both ends.
struct Extent {
  const uint4* units;
  const uint4* dynamic;
  uint32_t unit_vectors;
  uint32_t dynamic_vectors;
};

__device__ __forceinline__ const uint4* vector_at(const uint8_t* p) {
  return reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{15});
}

__device__ __forceinline__ Extent extent_of(const Tile& first, const Tile& last, uint32_t values_in_last) {
  Extent x;
  x.units = vector_at(first.unit);
  x.unit_vectors = static_cast<uint32_t>(vector_at(last.unit + unit_bytes(last.mode, values_in_last)) - x.units);
  x.dynamic = vector_at(first.dynamic);
  x.dynamic_vectors = static_cast<uint32_t>(vector_at(last.dynamic + last.dynamic_size + 15) - x.dynamic);
  return x;
}

[[maybe_unused]] __device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The stages of a block, used in turn. Every warp goes through the same steps, 0, 1, ...: wait(), read, release();
// one thread begins the copies, each after the step that read the stage before.
struct Pipeline {
  uint64_t full[kStages];   // barriers: has been copied
  uint64_t empty[kStages];  // has been read by all warps
  Stage stages[kStages];

#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void wait_for(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
  }
  static __device__ __forceinline__ void copy(uint4* to, const uint4* from, uint32_t vectors, uint64_t* barrier) {
    if (vectors == 0) return;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(16 * vectors), "r"(shared_address(barrier))
                 : "memory");
  }

  // By one thread, with a barrier of the block behind it.
  __device__ __forceinline__ void init() {
    for (int s = 0; s < kStages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&empty[s])), "n"(kWarps) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // By one thread.
  __device__ __forceinline__ void begin(uint32_t step, const Extent& x) {
    const uint32_t s = step % kStages;
    if (step >= kStages) wait_for(&empty[s], (step / kStages - 1) & 1u);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full[s])),
                 "r"(16 * (x.unit_vectors + x.dynamic_vectors))
                 : "memory");
    copy(stages[s].units, x.units, x.unit_vectors, &full[s]);
    copy(stages[s].dynamic, x.dynamic, x.dynamic_vectors, &full[s]);
  }
  __device__ __forceinline__ const Stage& wait(uint32_t step, const Extent&) {
    wait_for(&full[step % kStages], step / kStages & 1u);
    return stages[step % kStages];
  }
  __device__ __forceinline__ void release(uint32_t step, int lane) {
    __syncwarp();
    if (lane == 0) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[step % kStages])) : "memory");
    }
  }
#else
  // Without asynchronous copies of this kind: by the whole block, when the stage is needed.
  __device__ __forceinline__ void init() {}
  __device__ __forceinline__ void begin(uint32_t, const Extent&) {}
  __device__ __forceinline__ const Stage& wait(uint32_t step, const Extent& x) {
    Stage& stage = stages[step % kStages];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < x.unit_vectors; i += kThreads) stage.units[i] = x.units[i];
    for (uint32_t i = threadIdx.x; i < x.dynamic_vectors; i += kThreads) stage.dynamic[i] = x.dynamic[i];
    __syncthreads();
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
    Eight<Bits<kOut>> x;
#pragma unroll
    for (int j = 0; j < 8; ++j) x.v[j] = from_float<kOut>(sums.sum[k][j]);
    store_eight(to + i, values_from(i, m), x);
  }
}

__device__ __forceinline__ void finish(const SumLaunch& launch, uint64_t tile, uint32_t m, LaneSums* sums, int lane) {
  if (launch.divisor != 1) {
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums->sum[k][j] = __fdiv_rn(sums->sum[k][j], launch.divisor);
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

// Shared memory, in front of the plans.
template <bool kCoded>
struct SharedSpace {
  Source sources[kBatch];
};
template <>
struct SharedSpace<true> {
  Exponents exponents[kWarps];
  Pipeline pipeline;
  EscapePlaces places;
  Source sources[kBatch];
};

// `parts` blocks share a group. A block's warps take its tiles in rounds, a tile each.
template <DType kIn, bool kScaled>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    sum_kernel(const __grid_constant__ SumLaunch launch, int parts) {
  constexpr bool kCoded = kIn == DType::bf16;
  extern __shared__ __align__(16) uint8_t shared[];
  SharedSpace<kCoded>& space = *reinterpret_cast<SharedSpace<kCoded>*>(shared);
  TilePlan* plans = reinterpret_cast<TilePlan*>(shared + sizeof(space));  // kGroupTiles for each of a batch

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint64_t g = blockIdx.x / parts;
  const uint32_t block_tiles = static_cast<uint32_t>(kGroupTiles) / parts;
  const uint32_t first_in_group = blockIdx.x % parts * block_tiles;
  const uint64_t tiles_left = tile_count(launch.count) - g * kGroupTiles;
  const uint32_t end_in_group = static_cast<uint32_t>(min(tiles_left, uint64_t{first_in_group + block_tiles}));
  if constexpr (kCoded) {
    if (threadIdx.x < 32) space.places.set(threadIdx.x);
    if (threadIdx.x == 0) space.pipeline.init();
  }

  uint32_t step = 0;  // of the pipeline
  for (uint32_t round = first_in_group; round < end_in_group; round += kWarps) {
    const uint32_t in_group = round + warp;
    const uint64_t tile = g * kGroupTiles + in_group;
    const uint32_t m = in_group < end_in_group ? static_cast<uint32_t>(values_in_tile(launch.count, tile)) : 0;
    LaneSums sums;
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums.sum[k][j] = -0.0f;
    }
    for (int first = 0; first < launch.n; first += kBatch) {
      const int n = min(launch.n - first, kBatch);
      if (round == first_in_group || launch.n > kBatch) {
        __syncthreads();  // the plans before these have been used
        for (int i = warp; i < n; i += kWarps) {
          plan_source<kIn>(launch, first + i, g, &space.sources[i], plans + i * kGroupTiles, lane);
        }
        __syncthreads();
      }

      const auto extent = [&](int i) {
        const Source& source = space.sources[i];
        if (source.kind != Kind::coded) return Extent{};
        const uint32_t last = min(round + kWarps, end_in_group) - 1;
        return extent_of(find_tile(source.place, plans[i * kGroupTiles + round]),
                         find_tile(source.place, plans[i * kGroupTiles + last]),
                         static_cast<uint32_t>(values_in_tile(launch.count, g * kGroupTiles + last)));
      };
      if constexpr (kCoded) {
        if (threadIdx.x == 0) {
          for (int i = 0; i < min(n, kStages - 1); ++i) space.pipeline.begin(step + i, extent(i));
        }
      }
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        const Source& source = space.sources[i];
        if (source.kind == Kind::values && m != 0) {
          add_values<kIn, kScaled>(source.values, tile, m, launch.scale, lane, &sums);
        }
        if constexpr (kCoded) {
          const int ahead = i + kStages - 1;
          if (threadIdx.x == 0 && ahead < n) space.pipeline.begin(step + kStages - 1, extent(ahead));
          const Stage& stage = space.pipeline.wait(step, extent(i));
          if (source.kind == Kind::coded && m != 0) {
            const TilePlan plan = plans[i * kGroupTiles + in_group], plan0 = plans[i * kGroupTiles + round];
            const StagedUnit unit = {reinterpret_cast<const uint8_t*>(stage.units) + (plan.unit - plan0.unit),
                                     static_cast<uint32_t>(align_up(m)), lane};
            const uint8_t* dynamic =
                reinterpret_cast<const uint8_t*>(stage.dynamic) + (plan.dynamic - (plan0.dynamic & ~15));
            const bool good =
                decode_tile(find_tile(source.place, plan), unit, dynamic, m, space.places, &space.exponents[warp], lane,
                            [&](int k, uint4 v) { add<kScaled>(v, launch.scale, sums.sum[k]); });
            if (!good && lane == 0) report(launch.status + first + i, Status::bad_escapes);
          }
          space.pipeline.release(step++, lane);
        }
      }
    }
    if (m != 0) finish(launch, tile, m, &sums, lane);
  }
  wait_for_previous();
}

template <DType kIn>
cudaError_t launch_sum(const SumLaunch& launch, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = processor_count(&processors);
  if (error != cudaSuccess) return error;
  const uint64_t groups = group_count(launch.count);
  const int parts = groups >= kManyGroups * processors ? 2 : static_cast<int>(kGroupTiles) / kWarps;
  const unsigned blocks = static_cast<unsigned>(groups * parts);
  constexpr bool kCoded = kIn == DType::bf16;
  const int planned = !kCoded ? 0 : launch.n < kBatch ? launch.n : kBatch;
  const size_t shared = sizeof(SharedSpace<kCoded>) + sizeof(TilePlan) * kGroupTiles * planned;
  const auto kernel = launch.scale == 1 ? sum_kernel<kIn, false> : sum_kernel<kIn, true>;
  const cudaError_t error_shared =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error_shared != cudaSuccess) return error_shared;
  return launch_behind(kernel, blocks, 1, kThreads, shared, stream, launch, parts);
}

bool aligned(const void* p, uint64_t a) { return reinterpret_cast<uintptr_t>(p) % a == 0; }

}  // namespace

Status decode_sum(const SumInput* inputs, int n, uint64_t count, const SumOptions& options, void* dst,
                  int32_t* device_status, void* scratch, void* stream) {
  if (inputs == nullptr || n < 1 || count > kMaxCount || device_status == nullptr ||
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
  launch.scale = options.scale;
  launch.divisor = options.divisor;
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
