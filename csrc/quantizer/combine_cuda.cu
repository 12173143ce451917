// combine() on CUDA: docs/dynamiq.md, section 8. Any mix of inputs, one kernel per kind of output and of widths.
//
// Data layout     plain values, in the bucket's places or part by part; packed parts: layout.h
// Thread mapping  a warp and a slot, 8 coordinates to a lane (device.cuh). A warp takes up to 32 slots that follow each
//                 other in their parts: first each lane works out one slot's super-group, width, place and random
//                 keys, which go to shared memory; then the warp does the slots one by one. Slots of a part are sorted
//                 by width, so that warps seldom change the width they are compiled for.
// Bytes moved     per coordinate: each plain input and output once (2 or 4), each packed one once (bits / 8)
#include "quantizer/arguments.h"
#include "quantizer/launch.cuh"
#include "quantizer/paper_device.cuh"

namespace zipccl {
namespace quantizer {
namespace cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarp;

struct Launch {
  Layout layout;
  ScaleArrays scales;
  Plan plan;
  uint32_t parts;  // of a domain
  uint64_t part;   // first of the run
  uint64_t slots;  // of the run
  uint32_t batch;  // slots per warp, at most 32
  Values x, out;
  bool has_x;
  bool x_vector, out_vector, residual_vector;
  Packed packed;
  float scale;
  uint8_t* packed_out;
  Rounds rounds;
  float stratum_scale;
  float* residual;
  uint64_t residual_first;
};

// A slot of the run, worked out by one lane for all.
struct alignas(16) Task {
  uint64_t x_at;    // where the slot's values begin in x.data, in bytes
  uint64_t out_at;  // and in out.data or residual
  uint32_t part;    // where its part begins in the run, in 16 bytes
  uint32_t codes;   // where its codes begin in the part
  uint32_t slot;
  uint16_t n;  // coordinates
  uint8_t width;
  uint8_t clear;               // units of the part that this slot's warp clears, and kClearPadding
  uint32_t own[4], shared[2];  // random words
  float shift;                 // of the stratum
  union {
    float mean;         // paper
    uint32_t clear_at;  // fine; in units
  };
};
constexpr uint8_t kClearPadding = 0x80;  // the bytes behind the scales, too
static_assert(sizeof(Task) == 64, "four loads");

// Where a slot's values begin, in bytes; begin: its first coordinate.
__device__ __forceinline__ uint64_t place_in(const Values& v, uint64_t in_run, uint64_t begin) {
  const uint64_t at = v.place == Place::bucket ? begin - v.first : in_run * kSuperGroup;
  return at * (v.dtype == DType::f32 ? 4 : 2);
}

// in_run: the slot's number in the run.
template <Widths kWidths, bool kPack>
__device__ __forceinline__ Task task_of(const Launch& p, uint64_t in_run) {
  const Layout& l = p.layout;
  Task t = {};
  const uint64_t part_in_run = in_run / l.slots, part = p.part + part_in_run, domain = part / p.parts;
  t.part = static_cast<uint32_t>(part_in_run * (l.part_bytes / kFrameAlign));
  t.slot = static_cast<uint32_t>(in_run % l.slots);
  const Rows& rows = p.plan.rows[domain];
  t.width = static_cast<uint8_t>(width_of(rows, t.slot));
  t.codes = static_cast<uint32_t>(codes_at(rows, t.slot));
  const uint32_t super_group = p.plan.order[part * l.slots + t.slot];
  uint64_t begin = 0;
  if (super_group != kNoSuperGroup) {
    const Span span = span_of(l, domain, super_group);
    begin = span.begin;
    t.n = static_cast<uint16_t>(span.end - span.begin);
    if (kWidths == Widths::paper) t.mean = p.plan.means[super_group];
  }
  t.x_at = place_in(p.x, in_run, begin);
  t.out_at = kPack ? (begin - p.residual_first) * sizeof(float) : place_in(p.out, in_run, begin);
  if (kPack) {
    const Words4 own = super_group_words(p.rounds.own, super_group);
    const Words4 shared = super_group_words(p.rounds.shared, super_group);
    for (int k = 0; k < 4; ++k) t.own[k] = own.w[k];
    t.shared[0] = shared.w[0];
    t.shared[1] = shared.w[1];
    if (p.rounds.nearest == 0) t.shift = make_stratum(permuted(p.rounds.index, p.rounds.of, shared), p.rounds.of).shift;
    // A part's unused units are cleared by all its slots; with paper widths, where they are few, by the last one.
    uint64_t used = 0;
    for (uint32_t b = 0; b < kMaxWidth; ++b) used += rows.of[b];
    const uint64_t unused = l.units - used;
    if (kWidths == Widths::fine) {
      const uint64_t first = unused * t.slot / l.slots;
      t.clear = static_cast<uint8_t>(unused * (t.slot + 1) / l.slots - first);  // at most kMaxWidth
      t.clear_at = static_cast<uint32_t>(used + first);
    }
    if (t.slot + 1 == l.slots) t.clear |= kClearPadding;
  }
  return t;
}

__device__ __forceinline__ void add_mean(float means, float mean, bool subtract, float (&y)[kLaneValues]) {
  const float m = mul(means, mean);
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = subtract ? sub(y[i], m) : add(y[i], m);
}

template <uint32_t kWidth>
struct Width {
  static constexpr uint32_t value = kWidth;
};

// Calls f with the width as a type.
template <Widths kWidths, typename F>
__device__ __forceinline__ void with_width(uint32_t width, F f) {
  if constexpr (kWidths == Widths::paper) {
    if (width == 2)
      f(Width<2>());
    else if (width == 4)
      f(Width<4>());
    else
      f(Width<8>());
  } else {
#define ZIPCCL_WIDTH(width) \
  case width:               \
    f(Width<width>());      \
    break;
    switch (width) {
      ZIPCCL_WIDTH(0)
      ZIPCCL_WIDTH(1)
      ZIPCCL_WIDTH(2)
      ZIPCCL_WIDTH(3)
      ZIPCCL_WIDTH(4)
      ZIPCCL_WIDTH(5)
      ZIPCCL_WIDTH(6)
      ZIPCCL_WIDTH(7)
      ZIPCCL_WIDTH(8)
      ZIPCCL_WIDTH(9)
      ZIPCCL_WIDTH(10)
      ZIPCCL_WIDTH(11)
      ZIPCCL_WIDTH(12)
    }
#undef ZIPCCL_WIDTH
  }
}

// Adds the slot of one packed input to y; run: the input's bytes.
template <Widths kWidths>
__device__ __forceinline__ void add_packed(const Launch& p, const Task& t, const PaperTables* tables,
                                           const uint8_t* run, uint32_t lane, float (&y)[kLaneValues]) {
  const uint8_t* part = run + uint64_t{t.part} * kFrameAlign;
  with_width<kWidths>(t.width, [&](auto width) {
    constexpr uint32_t kWidth = decltype(width)::value;
    if constexpr (kWidths == Widths::fine) {
      FineInput<kWidth> input;
      input.load(p.scales, t.slot, part, part + t.codes, lane);
      input.add_to(lane, y);
    } else {
      PaperInput<kWidth> input;
      input.load(p.scales, t.slot, part, part + t.codes, lane);
      input.add_to(*tables, y);
    }
  });
}

// Zeros in the coordinates that the slot's super-group lacks.
__device__ __forceinline__ void clear_missing(const Task& t, uint32_t lane, float (&y)[kLaneValues]) {
  if (t.n == kSuperGroup) return;
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i)
    if (lane * kLaneValues + i >= t.n) y[i] = 0;
}

template <Widths kWidths>
__device__ __forceinline__ void write_values(const Launch& p, const Task& t, uint32_t lane, float (&y)[kLaneValues]) {
  if (kWidths == Widths::paper && p.out.means != 0) {
    add_mean(p.out.means, t.mean, false, y);
    clear_missing(t, lane, y);
  }
  const uint32_t n = p.out.place == Place::bucket ? t.n : kSuperGroup;
  uint8_t* values = static_cast<uint8_t*>(const_cast<void*>(p.out.data)) + t.out_at;
  store_values(values, p.out.dtype, n, p.out_vector, lane, y);
}

// The slot's codes and scales.
template <Widths kWidths>
__device__ __forceinline__ void write_codes(const Launch& p, const Task& t, const PaperTables* tables,
                                            const FineScaleByte& byte, uint32_t lane, float (&y)[kLaneValues]) {
  uint8_t* part = p.packed_out + uint64_t{t.part} * kFrameAlign;
  const LaneOffsets offsets = {t.own[0],
                               t.own[1],
                               {p.stratum_scale, t.shift},
                               signs_of(t.shared[0], t.shared[1], lane * kLaneValues) >> lane % 4 * kLaneValues};
  with_width<kWidths>(t.width, [&](auto width) {
    constexpr uint32_t kWidth = decltype(width)::value;
    if constexpr (kWidths == Widths::fine)
      fine_pack<kWidth>(byte, t.slot, part, part + t.codes, lane, offsets, y);
    else
      paper_pack<kWidth>(p.scales, t.slot, part, part + t.codes, lane, offsets, t.own[2], t.own[3],
                         p.rounds.nearest != 0, *tables, y);
  });
}

// Bytes of the packed output that no slot writes: units that no codes use, and padding behind the scales.
template <Widths kWidths>
__device__ void clear_unused(const Launch& p, const Task& t, uint32_t lane) {
  uint8_t* part = p.packed_out + uint64_t{t.part} * kFrameAlign;
  const uint32_t units_end = p.scales.first;
  if constexpr (kWidths == Widths::fine) {
    const uint32_t begin = t.clear_at * kUnitBytes, end = begin + (t.clear & ~kClearPadding) * kUnitBytes;
    for (uint32_t i = begin + lane; i < end; i += kWarp) part[i] = 0;
  } else {
    for (uint32_t i = t.codes + t.width * kUnitBytes + lane; i < units_end; i += kWarp) part[i] = 0;
  }
  if ((t.clear & kClearPadding) == 0) return;
  const uint32_t scales_end = units_end + static_cast<uint32_t>(p.layout.slots) * scale_bytes(kWidths);
  for (uint32_t i = scales_end + lane; i < p.layout.part_bytes; i += kWarp) part[i] = 0;
}

template <Widths kWidths, bool kPack, bool kResidual>
__device__ __forceinline__ void do_slot(const Launch& p, const Task& t, const PaperTables* tables,
                                        const FineScaleByte& byte, uint32_t lane) {
  float y[kLaneValues] = {};
  if (p.has_x) {
    const uint8_t* values = static_cast<const uint8_t*>(p.x.data) + t.x_at;
    to_floats(load_raw(values, p.x.dtype, t.n, p.x_vector, lane), p.x.dtype, y);
    if (kWidths == Widths::paper && p.x.means != 0) add_mean(p.x.means, t.mean, true, y);
  }
  for (uint32_t i = 0; i < p.packed.n; ++i) {
    if (i == p.packed.skip) continue;
    add_packed<kWidths>(p, t, tables, static_cast<const uint8_t*>(p.packed.data) + i * p.packed.stride, lane, y);
  }
  if (p.scale != 1) {
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = mul(y[i], p.scale);
  }
  clear_missing(t, lane, y);
  if constexpr (!kPack) {
    write_values<kWidths>(p, t, lane, y);
    return;
  }
  float kept[kLaneValues];
  if constexpr (kResidual) {
    float r[kLaneValues];
    const uint8_t* values = reinterpret_cast<const uint8_t*>(p.residual) + t.out_at;
    to_floats(load_raw(values, DType::f32, t.n, p.residual_vector, lane), DType::f32, r);
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) kept[i] = y[i] = add(y[i], r[i]);
  }
  write_codes<kWidths>(p, t, tables, byte, lane, y);
  if constexpr (kResidual) {
    __syncwarp();  // what this warp has written is read by other lanes of it
    float d[kLaneValues] = {};
    add_packed<kWidths>(p, t, tables, p.packed_out, lane, d);
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) kept[i] = sub(kept[i], d[i]);
    store_values(reinterpret_cast<uint8_t*>(p.residual) + t.out_at, DType::f32, t.n, p.residual_vector, lane, kept);
  }
  if (t.clear != 0) clear_unused<kWidths>(p, t, lane);
}

// The block's copy of the tables; null where there are none.
template <Widths kWidths>
__device__ __forceinline__ const PaperTables* shared_tables() {
  if constexpr (kWidths == Widths::paper) {
    __shared__ PaperTables tables;
    for (uint32_t i = threadIdx.x; i < sizeof(PaperTables) / 4; i += kThreads)
      reinterpret_cast<uint32_t*>(&tables)[i] = reinterpret_cast<const uint32_t*>(&kPaperTables)[i];
    __syncthreads();
    return &tables;
  } else {
    return nullptr;
  }
}

template <Widths kWidths, bool kPack, bool kResidual>
__global__ void __launch_bounds__(kThreads, kPack ? 4 : 5) combine_kernel(const __grid_constant__ Launch p) {
  __shared__ Task tasks[kWarps][kWarp];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const PaperTables* tables = shared_tables<kWidths>();
  const uint64_t first = (static_cast<uint64_t>(blockIdx.x) * kWarps + warp) * p.batch;
  if (first >= p.slots) return;
  const uint32_t n = p.slots - first < p.batch ? static_cast<uint32_t>(p.slots - first) : p.batch;
  if (lane < n) tasks[warp][lane] = task_of<kWidths, kPack>(p, first + lane);
  __syncwarp();

  const FineScaleByte byte = fine_scale_byte(p.scales, lane);
  for (uint32_t s = 0; s < n; ++s) {
    const Task t = tasks[warp][s];
    do_slot<kWidths, kPack, kResidual>(p, t, tables, byte, lane);
  }
}

// Slots per warp: as many as leave every multiprocessor enough warps.
Status batch_of(uint64_t slots, uint32_t* batch) {
  constexpr uint64_t kWarpsWanted = 64;  // per multiprocessor
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return Status::device_error;
  const uint64_t even = slots / (static_cast<uint64_t>(processors) * kWarpsWanted);
  *batch = even >= 32 ? 32 : even >= 16 ? 16 : even >= 8 ? 8 : 4;
  return Status::ok;
}

template <Widths kWidths>
void launch(const Launch& p, unsigned grid, cudaStream_t stream) {
  if (p.packed_out == nullptr)
    combine_kernel<kWidths, false, false><<<grid, kThreads, 0, stream>>>(p);
  else if (p.residual == nullptr)
    combine_kernel<kWidths, true, false><<<grid, kThreads, 0, stream>>>(p);
  else
    combine_kernel<kWidths, true, true><<<grid, kThreads, 0, stream>>>(p);
}

}  // namespace

Status combine(const Shape& shape, const void* plan, const Combine& job, void* stream_) {
  const Status status = check_combine(shape, plan, job);
  if (status != Status::ok || shape.count == 0 || job.parts == 0) return status;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  Launch p = {};
  p.layout = layout_of(shape);
  if (p.layout.part_bytes > UINT32_MAX) return Status::unsupported;  // places in a part are 32-bit here
  p.scales = scale_arrays(p.layout, shape.widths);
  p.plan = plan_of(p.layout, plan);
  p.parts = shape.parts;
  p.part = job.part;
  p.slots = job.parts * p.layout.slots;
  p.x = job.x;
  p.out = job.out;
  p.has_x = job.x.data != nullptr;
  p.x_vector = whole_vectors(p.layout, shape, job.x);
  p.out_vector = whole_vectors(p.layout, shape, job.out);
  p.packed = job.packed;
  p.scale = job.scale;
  p.packed_out = static_cast<uint8_t*>(job.packed_out);
  p.rounds = make_rounds(job.key);
  p.stratum_scale = p.rounds.nearest != 0 ? 0.0f : make_stratum(0, p.rounds.of).scale;
  p.residual = job.residual;
  p.residual_first = job.residual_first;
  p.residual_vector = whole_vectors(p.layout, shape, {job.residual, DType::f32, Place::bucket, job.residual_first, 0});
  const Status batched = batch_of(p.slots, &p.batch);
  if (batched != Status::ok) return batched;

  const uint64_t blocks = ceil_div(p.slots, uint64_t{p.batch} * kWarps);
  if (blocks > INT32_MAX) return Status::unsupported;
  const unsigned grid = static_cast<unsigned>(blocks);
  if (shape.widths == Widths::fine)
    launch<Widths::fine>(p, grid, stream);
  else
    launch<Widths::paper>(p, grid, stream);
  return launched();
}

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
