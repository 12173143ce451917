// Decompression on CUDA: combine() of one packed input and nothing else, fine widths. docs/dynamiq.md, sections 6 to 9.
//
// Data layout     packed parts in: layout.h; plain values out, in the bucket's places or part by part
// Thread mapping  a warp and a slot. A warp takes up to kSlots slots that follow each other in their parts. First
//                 kLanes lanes to a slot find out where its codes and values are, and the steps of its groups, while
//                 the first codes are already on their way; then the warp does the slots one by one. Codes come to
//                 shared memory by asynchronous copies, kAhead slots ahead: reads take 2 us beside so many writes. Of
//                 16-bit values a lane makes coordinates 8 l to 8 l + 7; of fp32 4 l to 4 l + 3, and those 128 further
//                 on. Either way a store of the warp writes 512 bytes in a row.
// Bytes moved     per coordinate: bits / 8 in, 2 or 4 out
#include "quantizer/fine_device.cuh"
#include "quantizer/launch.cuh"

namespace zipccl {
namespace quantizer {
namespace cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarp;
constexpr uint32_t kResident = 6;  // blocks on a multiprocessor

// What a warp has in shared memory.
template <bool kF32>
struct Batch {
  static constexpr uint32_t kSlots = kF32 ? 8 : 16;   // of a warp, at most
  static constexpr uint32_t kLanes = kWarp / kSlots;  // that prepare a slot
  static constexpr uint32_t kAhead = kF32 ? 5 : 3;    // slots whose codes are on their way

  struct Slot {
    uint64_t codes, out;  // where they begin, in bytes
    uint16_t n;           // coordinates
    uint8_t width;
  };
  static constexpr uint32_t kStepStride = kGroups + 1;  // lanes that write at the same time, to other banks
  static constexpr uint32_t kBuffers = kAhead + 1;

  Slot slots[kSlots];
  float steps[kSlots][kStepStride];
  alignas(16) uint8_t codes[kBuffers][kMaxWidth * kUnitBytes];
};

// 16 bytes to shared memory, and from global memory what lies around them to the L2 cache: a warp's next slot does.
__device__ __forceinline__ void copy_async(uint8_t* shared, const uint8_t* global) {
#if __CUDA_ARCH__ >= 800
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *reinterpret_cast<uint4*>(shared) = *reinterpret_cast<const uint4*>(global);
#endif
}
// The copies begun since the last call become a group, which may be empty.
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all groups but the last kLeft have arrived.
template <uint32_t kLeft>
__device__ __forceinline__ void wait_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Four values to coordinates `first` and after. n: coordinates that exist, `end`: that there is memory for.
__device__ __forceinline__ void store_quad(float* values, uint32_t first, uint32_t n, uint32_t end, const float* v) {
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    if (first + i < end) values[first + i] = first + i < n ? v[i] : 0.0f;
}

template <bool kF32>
__device__ __forceinline__ void write_values(const Unpack& p, const typename Batch<kF32>::Slot& slot, uint32_t lane,
                                             float (&v)[kLaneValues], bool nan) {
  uint8_t* values = static_cast<uint8_t*>(const_cast<void*>(p.out.data)) + slot.out;
  const uint32_t end = p.out.place == Place::bucket ? slot.n : kSuperGroup;
  if constexpr (kF32) {
    if (nan) {
#pragma unroll
      for (uint32_t i = 0; i < kLaneValues; ++i) v[i] = canonical(v[i]);
    }
    if (p.out_vector && slot.n == kSuperGroup) {
      uint4* at = reinterpret_cast<uint4*>(values) + lane;
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h)
        store_16<true>(at + h * kWarp, make_uint4(float_bits(v[4 * h]), float_bits(v[4 * h + 1]),
                                                  float_bits(v[4 * h + 2]), float_bits(v[4 * h + 3])));
      return;
    }
    store_quad(reinterpret_cast<float*>(values), 4 * lane, slot.n, end, v);
    store_quad(reinterpret_cast<float*>(values), kSuperGroup / 2 + 4 * lane, slot.n, end, v + 4);
  } else {
    clear_missing(slot.n, lane, v);
    store_values<true>(values, p.out.dtype, end, p.out_vector, lane, v, nan);
  }
}

template <bool kF32>
__global__ void __launch_bounds__(kThreads, kResident) unpack_kernel(const __grid_constant__ Unpack p) {
  using Own = Batch<kF32>;
  __shared__ Own batches[kWarps];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint64_t block = p.order == Order::ascending ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const uint64_t first = (block * kWarps + warp) * p.batch;
  if (first >= p.slots) return;
  const uint32_t n = min(p.batch, p.slots - static_cast<uint32_t>(first));
  Own& b = batches[warp];

  // The lane's share of preparing b.slots[mine].
  const uint32_t mine = lane / Own::kLanes, share = lane % Own::kLanes;
  const uint32_t in_run = static_cast<uint32_t>(first) + mine, slots = static_cast<uint32_t>(p.layout.slots);
  const uint32_t part = in_run / slots, slot = in_run - part * slots;
  const uint32_t domain = static_cast<uint32_t>(p.part + part) / p.parts;
  const uint64_t part_at = part * p.layout.part_bytes;
  uint32_t width = 0;
  if (mine < n) {
    const Rows& rows = p.plan.rows[domain];
    width = width_of(rows, slot);
    b.slots[mine].codes = part_at + codes_at(rows, slot);
    b.slots[mine].width = static_cast<uint8_t>(width);
  }
  __syncwarp();
  const auto fetch = [&](uint32_t s) {
    if (s < n && lane < b.slots[s].width * (kUnitBytes / 16))
      copy_async(b.codes[s % Own::kBuffers] + 16 * lane, p.packed + b.slots[s].codes + 16 * lane);
    end_group();
  };
#pragma unroll
  for (uint32_t s = 0; s < Own::kAhead; ++s) fetch(s);

  if (mine < n) {
    fine_steps<Own::kLanes>(p.scales, slot, p.packed + part_at, width, share, b.steps[mine]);
    const uint32_t super_group = p.plan.order[(p.part + part) * slots + slot];
    Span span = {0, 0};
    if (super_group != kNoSuperGroup) span = span_of(p.layout, domain, super_group);
    b.slots[mine].out = place_in(p.out, in_run, span.begin);
    b.slots[mine].n = static_cast<uint16_t>(span.end - span.begin);
  }
#pragma unroll 1
  for (uint32_t s = 0; s < n; ++s) {
    wait_groups<Own::kAhead - 1>();
    __syncwarp();  // the slot's codes are here, and its predecessor's buffer has been read
    fetch(s + Own::kAhead);
    const typename Own::Slot t = b.slots[s];
    const uint8_t* codes = b.codes[s % Own::kBuffers];
    float v[kLaneValues];
    with_fine_width(t.width, [&](auto w) {
      if constexpr (kF32)
        fine_quads<decltype(w)::value>(codes, lane, v);
      else
        fine_levels<decltype(w)::value, false>(codes, lane, v);
    });
    const float low = b.steps[s][kF32 ? lane / 4 : lane / 2], high = kF32 ? b.steps[s][kGroups / 2 + lane / 4] : low;
#pragma unroll
    for (uint32_t i = 0; i < kLaneValues; ++i) v[i] = mul_add(v[i], i < 4 ? low : high, 0.0f);
    if (p.scale != 1) {
#pragma unroll
      for (uint32_t i = 0; i < kLaneValues; ++i) v[i] = mul(v[i], p.scale);
    }
    // Levels times a step that is a number, times a finite scale that is not 0, are numbers, or infinite.
    write_values<kF32>(p, t, lane, v, low != low || high != high);
  }
}

template <bool kF32>
Status launch(Unpack p, cudaStream_t stream) {
  Grid grid;
  const Status status = deal(p.slots, kWarps, kResident, Batch<kF32>::kSlots, &grid);
  if (status != Status::ok) return status;
  p.batch = grid.batch;
  unpack_kernel<kF32><<<grid.blocks, kThreads, 0, stream>>>(p);
  return launched();
}

}  // namespace

Status unpack(const Unpack& p, cudaStream_t stream) {
  return p.out.dtype == DType::f32 ? launch<true>(p, stream) : launch<false>(p, stream);
}

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
