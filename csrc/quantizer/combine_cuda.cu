// combine() on CUDA: docs/dynamiq.md, section 8. Any mix of inputs, one kernel per kind of output and of widths; but
// one packed input alone is unpack_cuda.cu's.
//
// Data layout     plain values, in the bucket's places or part by part; packed parts: layout.h
// Thread mapping  a warp and a slot, 8 coordinates to a lane (device.cuh). A warp takes up to 32 slots that follow each
//                 other in their parts: first each lane works out one slot's super-group, width, place and random
//                 keys, and the steps of its 16 groups where there is one packed input, which go to shared memory;
//                 then the warp does the slots one by one. Slots of a part are sorted by width, so that warps seldom
//                 change the width they are compiled for.
// Bytes moved     per coordinate: each plain input and output once (2 or 4), each packed one once (bits / 8)
#include <cmath>

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
  uint32_t slots;  // of the run
  uint32_t batch;  // slots per warp, at most 32
  Order order;     // of blocks
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
  uint8_t clear;    // units of the part that this slot's warp clears, and kClearPadding
  uint32_t own[2];  // random words
  union {
    FineWidth of;
    struct {
      uint32_t own[2];  // of scales
      float mean;
    } paper;
  };
  uint32_t clear_at;  // in units
  float shift;        // of the stratum
  uint32_t signs;     // bit l: of lane l's offsets
};
constexpr uint8_t kClearPadding = 0x80;  // the bytes behind the scales, too
static_assert(sizeof(Task) == 64, "four loads");

// Plain input: of one dtype, of one of the two 16-bit dtypes, or any of these, or none.
enum class X { f32, half, any };

// Packed inputs: none, one (fine widths alone; its steps are worked out beforehand, like a Task), or any number.
enum class In { none, one, any };
constexpr uint32_t kStepStride = kGroups + 1;  // from slot to slot: lanes that write at the same time, to other banks

// Blocks that a multiprocessor is to hold at a time.
constexpr uint32_t resident(bool pack) { return pack ? 4 : 6; }

// in_run: the slot's number in the run.
template <Widths kWidths, bool kPack>
__device__ __forceinline__ Task task_of(const Launch& p, uint32_t in_run) {
  const Layout& l = p.layout;
  Task t = {};
  const uint32_t slots = static_cast<uint32_t>(l.slots), part_in_run = in_run / slots;
  const uint64_t part = p.part + part_in_run;
  const uint32_t domain = static_cast<uint32_t>(part) / p.parts;  // parts are fewer than slots
  t.part = part_in_run * static_cast<uint32_t>(l.part_bytes / kFrameAlign);
  t.slot = in_run - part_in_run * slots;
  const Rows& rows = p.plan.rows[domain];
  t.width = static_cast<uint8_t>(width_of(rows, t.slot));
  t.codes = static_cast<uint32_t>(codes_at(rows, t.slot));
  const uint32_t super_group = p.plan.order[part * l.slots + t.slot];
  uint64_t begin = 0;
  if (super_group != kNoSuperGroup) {
    const Span span = span_of(l, domain, super_group);
    begin = span.begin;
    t.n = static_cast<uint16_t>(span.end - span.begin);
    if (kWidths == Widths::paper) t.paper.mean = p.plan.means[super_group];
  }
  t.x_at = place_in(p.x, in_run, begin);
  t.out_at = kPack ? (begin - p.residual_first) * sizeof(float) : place_in(p.out, in_run, begin);
  if (kPack) {
    const Words4 own = super_group_words(p.rounds.own, super_group);
    const Words4 shared = super_group_words(p.rounds.shared, super_group);
    for (int k = 0; k < 2; ++k) t.own[k] = own.w[k];
    if (kWidths == Widths::fine)
      t.of = {reach(t.width), inverse_factor(t.width), t.width};
    else
      for (int k = 0; k < 2; ++k) t.paper.own[k] = own.w[2 + k];
    t.signs = signs_of(shared);
    if (p.rounds.nearest == 0)
      t.shift = make_stratum(permuted(p.rounds.index, p.rounds.of, shared), p.stratum_scale).shift;
    // A part's unused units are cleared by all its slots; with paper widths, where they are few, by the last one.
    uint32_t used = 0;
    for (uint32_t b = 0; b < kMaxWidth; ++b) used += rows.of[b];
    const uint32_t unused = static_cast<uint32_t>(l.units) - used;
    if (kWidths == Widths::fine) {
      const uint32_t each = (unused + slots - 1) / slots;  // at most kMaxWidth
      const uint32_t first = min(each * t.slot, unused);
      t.clear = static_cast<uint8_t>(min(each, unused - first));
      t.clear_at = used + first;
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
    with_fine_width(width, f);
  }
}

// Adds the values of a slot's codes to y. step(): of the lane's group, asked for when the codes are on their way.
template <typename Step>
__device__ __forceinline__ void add_levels(const Task& t, const uint8_t* part, uint32_t lane, float (&y)[kLaneValues],
                                           Step step) {
  float level[kLaneValues];
  with_width<Widths::fine>(t.width,
                           [&](auto width) { fine_levels<decltype(width)::value>(part + t.codes, lane, level); });
  const float s = step();
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = mul_add(level[i], s, y[i]);
}

// Adds the slot of one packed input to y; run: the input's bytes.
template <Widths kWidths>
__device__ __forceinline__ void add_packed(const Launch& p, const Task& t, const PaperTables* tables,
                                           const uint8_t* run, uint32_t lane, float (&y)[kLaneValues]) {
  const uint8_t* part = run + uint64_t{t.part} * kFrameAlign;
  if constexpr (kWidths == Widths::fine) {
    FineScales scales;
    scales.load(p.scales, t.slot, part, lane);
    add_levels(t, part, lane, y, [&] { return scales.step(t.width, lane); });
  } else {
    with_width<kWidths>(t.width, [&](auto width) {
      PaperInput<decltype(width)::value> input;
      input.load(p.scales, t.slot, part, part + t.codes, lane);
      input.add_to(*tables, y);
    });
  }
}

// nan: whether there may be one among y.
__device__ __forceinline__ void write_values(const Launch& p, const Task& t, uint32_t lane,
                                             const float (&y)[kLaneValues], bool nan) {
  const uint32_t n = p.out.place == Place::bucket ? t.n : kSuperGroup;
  uint8_t* values = static_cast<uint8_t*>(const_cast<void*>(p.out.data)) + t.out_at;
  store_values(values, p.out.dtype, n, p.out_vector, lane, y, nan);
}

// The slot's codes and scales.
template <Widths kWidths>
__device__ __forceinline__ void write_codes(const Launch& p, const Task& t, const PaperTables* tables,
                                            const FineScaleByte& byte, uint32_t lane, float (&y)[kLaneValues]) {
  uint8_t* part = p.packed_out + uint64_t{t.part} * kFrameAlign;
  const Stratum stratum = with_sign({p.stratum_scale, t.shift}, (t.signs >> lane & 1) != 0);
  const LaneOffsets offsets = {t.own[0], t.own[1], stratum};
  if constexpr (kWidths == Widths::fine) {
    uint32_t raw[kLaneValues];
    fine_pack(byte, t.slot, part, t.of, lane, offsets, y, raw);
    with_width<kWidths>(t.width, [&](auto width) { fine_put<decltype(width)::value>(raw, part + t.codes, lane); });
  } else {
    with_width<kWidths>(t.width, [&](auto width) {
      paper_pack<decltype(width)::value>(p.scales, t.slot, part, part + t.codes, lane, offsets, t.paper.own[0],
                                         t.paper.own[1], p.rounds.nearest != 0, *tables, y);
    });
  }
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

// y: the plain input, zeros if there is none. What is packed is not read again: sums are written over it.
template <Widths kWidths, X kX, bool kPack>
__device__ __forceinline__ void read_x(const Launch& p, const Task& t, uint32_t lane, float (&y)[kLaneValues]) {
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = 0;
  if (kX == X::any && !p.has_x) return;
  const DType dtype = kX == X::f32 ? DType::f32 : p.x.dtype;
  if (kX == X::half && dtype == DType::f32) __builtin_unreachable();
  const uint8_t* values = static_cast<const uint8_t*>(p.x.data) + t.x_at;
  to_floats(load_raw<kPack>(values, dtype, t.n, p.x_vector, lane), dtype, y);
  if (kWidths == Widths::paper && p.x.means != 0) add_mean(p.x.means, t.paper.mean, true, y);
}

// steps: of the slot's groups, In::one alone.
template <Widths kWidths, bool kPack, bool kResidual, X kX, In kIn>
__device__ __forceinline__ void do_slot(const Launch& p, const Task& t, const PaperTables* tables, const float* steps,
                                        const FineScaleByte& byte, uint32_t lane) {
  float y[kLaneValues];
  read_x<kWidths, kX, kPack>(p, t, lane, y);
  float step = 0;
  if constexpr (kIn == In::one) {
    step = steps[lane / 2];
    const uint8_t* part = static_cast<const uint8_t*>(p.packed.data) + uint64_t{t.part} * kFrameAlign;
    add_levels(t, part, lane, y, [&] { return step; });
  } else if constexpr (kIn == In::any) {
    for (uint32_t i = 0; i < p.packed.n; ++i) {
      if (i == p.packed.skip) continue;
      add_packed<kWidths>(p, t, tables, static_cast<const uint8_t*>(p.packed.data) + i * p.packed.stride, lane, y);
    }
  }
  if (p.scale != 1) {
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) y[i] = mul(y[i], p.scale);
  }
  clear_missing(t.n, lane, y);
  if constexpr (!kPack) {
    if (kWidths == Widths::paper && p.out.means != 0) {  // a mean may be NaN, too: before NaN is looked for
      add_mean(p.out.means, t.paper.mean, false, y);
      clear_missing(t.n, lane, y);
    }
    write_values(p, t, lane, y, any_nan(y));
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
    store_values(reinterpret_cast<uint8_t*>(p.residual) + t.out_at, DType::f32, t.n, p.residual_vector, lane, kept,
                 any_nan(kept));
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

template <Widths kWidths, bool kPack, bool kResidual, X kX, In kIn>
__global__ void __launch_bounds__(kThreads, resident(kPack)) combine_kernel(const __grid_constant__ Launch p) {
  __shared__ Task tasks[kWarps][kWarp];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const PaperTables* tables = shared_tables<kWidths>();
  const uint64_t block = p.order == Order::ascending ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const uint64_t first = (block * kWarps + warp) * p.batch;
  if (first >= p.slots) return;
  const uint32_t n = min(p.batch, p.slots - static_cast<uint32_t>(first));
  __shared__ float steps[kIn == In::one ? kWarps : 1][kIn == In::one ? kWarp * kStepStride : 1];
  if (lane < n) {
    const Task t = task_of<kWidths, kPack>(p, static_cast<uint32_t>(first) + lane);
    tasks[warp][lane] = t;
    if constexpr (kIn == In::one) {
      const uint8_t* part = static_cast<const uint8_t*>(p.packed.data) + uint64_t{t.part} * kFrameAlign;
      fine_steps<1>(p.scales, t.slot, part, t.width, 0, steps[warp] + lane * kStepStride);
    }
  }
  __syncwarp();

  const FineScaleByte byte = fine_scale_byte(p.scales, lane);
#pragma unroll 1
  for (uint32_t s = 0; s < n; ++s) {
    const Task t = tasks[warp][s];
    const float* slot_steps = kIn == In::one ? steps[warp] + s * kStepStride : nullptr;
    do_slot<kWidths, kPack, kResidual, kX, kIn>(p, t, tables, slot_steps, byte, lane);
  }
}

template <Widths kWidths, bool kPack, bool kResidual, X kX, In kIn>
Status run(Launch p, cudaStream_t stream) {
  Grid grid;
  const Status status = deal(p.slots, kWarps, resident(kPack), kWarp, &grid);
  if (status != Status::ok) return status;
  p.batch = grid.batch;
  combine_kernel<kWidths, kPack, kResidual, kX, kIn><<<grid.blocks, kThreads, 0, stream>>>(p);
  return launched();
}

template <Widths kWidths, In kIn>
Status pack_x(const Launch& p, cudaStream_t stream) {
  return p.x.dtype == DType::f32 ? run<kWidths, true, false, X::f32, kIn>(p, stream)
                                 : run<kWidths, true, false, X::half, kIn>(p, stream);
}

// The kernel for these inputs. What every step of a synchronisation needs has one of its own.
template <Widths kWidths>
Status launch(const Launch& p, cudaStream_t stream) {
  constexpr bool kFine = kWidths == Widths::fine;
  [[maybe_unused]] const bool none = p.packed.n == 0 || (p.packed.n == 1 && p.packed.skip == 0);
  [[maybe_unused]] const bool one = p.packed.n == 1 && !none;
  if (p.packed_out == nullptr) {
    if constexpr (kFine)
      if (!p.has_x && one && p.scale != 0 && std::isfinite(p.scale))
        return unpack({p.layout, p.scales, p.plan, p.parts, p.part, p.slots, p.order,
                       static_cast<const uint8_t*>(p.packed.data), p.scale, p.out, p.out_vector, 0},
                      stream);
    return run<kWidths, false, false, X::any, In::any>(p, stream);
  }
  if (p.residual != nullptr) return run<kWidths, true, true, X::any, In::any>(p, stream);
  if constexpr (kFine) {
    if (p.has_x && none) return pack_x<kWidths, In::none>(p, stream);
    if (p.has_x && one) return pack_x<kWidths, In::one>(p, stream);
  } else {
    if (p.has_x) return pack_x<kWidths, In::any>(p, stream);
  }
  return run<kWidths, true, false, X::any, In::any>(p, stream);
}

}  // namespace

Status combine(const Shape& shape, const void* plan, const Combine& job, void* stream_) {
  const Status status = check_combine(shape, plan, job);
  if (status != Status::ok || shape.count == 0 || job.parts == 0) return status;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  Launch p = {};
  p.layout = layout_of(shape);
  // Places in a part and numbers of slots and parts are 32-bit here.
  if (p.layout.part_bytes > UINT32_MAX || uint64_t{shape.domains} * shape.parts > UINT32_MAX ||
      job.parts * p.layout.slots > UINT32_MAX)
    return Status::unsupported;
  p.scales = scale_arrays(p.layout, shape.widths);
  p.plan = plan_of(p.layout, plan);
  p.parts = shape.parts;
  p.part = job.part;
  p.order = job.order;
  p.slots = static_cast<uint32_t>(job.parts * p.layout.slots);
  p.x = job.x;
  p.out = job.out;
  p.has_x = job.x.data != nullptr;
  p.x_vector = whole_vectors(p.layout, shape, job.x);
  p.out_vector = whole_vectors(p.layout, shape, job.out);
  p.packed = job.packed;
  p.scale = job.scale;
  p.packed_out = static_cast<uint8_t*>(job.packed_out);
  p.rounds = make_rounds(job.key);
  p.stratum_scale = p.rounds.nearest != 0 ? 0.0f : stratum_scale(p.rounds.of);
  p.residual = job.residual;
  p.residual_first = job.residual_first;
  p.residual_vector = whole_vectors(p.layout, shape, {job.residual, DType::f32, Place::bucket, job.residual_first, 0});
  return shape.widths == Widths::fine ? launch<Widths::fine>(p, stream) : launch<Widths::paper>(p, stream);
}

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
