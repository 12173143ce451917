// statistics() on CUDA.
//
// Data layout     a bucket of f32, bf16 or f16 in; one byte (fine) or two bf16 (paper) per super-group out
// Thread mapping  a warp per super-group, 8 coordinates to a lane; a warp takes kAhead super-groups at a time, whose
//                 loads are all under way before the first is used
// Bytes moved     the values once: 4 or 2 per coordinate, and 1/256 or 4/256 out
#include "quantizer/arguments.h"
#include "quantizer/device.cuh"
#include "quantizer/energy.h"
#include "quantizer/launch.cuh"

namespace zipccl {
namespace quantizer {
namespace cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kAhead = 4;

// All lanes get it.
__device__ __forceinline__ uint8_t fine_energy(const float (&v)[kLaneValues]) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t i = 0; i < kLaneValues; ++i) most = max(most, float_bits(v[i]) & kMagnitude);
  most = max(most, __shfl_xor_sync(kFullWarp, most, 1));
  const float m = bits_float(most);
  return energy_code(tree_sum(mul(m, m), 2), warp_max(most));
}

__device__ __forceinline__ float squared_norm(const float (&v)[kLaneValues]) {
  float sum = mul(v[0], v[0]);
#pragma unroll
  for (uint32_t i = 1; i < kLaneValues; ++i) sum = add(sum, mul(v[i], v[i]));
  return tree_sum(sum, 1);
}

__device__ __forceinline__ float plain_sum(const float (&v)[kLaneValues]) {
  float sum = v[0];
#pragma unroll
  for (uint32_t i = 1; i < kLaneValues; ++i) sum = add(sum, v[i]);
  return tree_sum(sum, 1);
}

template <Widths kWidths, DType kDType>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(Layout layout, uint64_t super_groups, const void* data, bool vector, void* stats, Order order) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint64_t block = order == Order::descending ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint64_t first = (block * (kThreads / kWarp) + threadIdx.x / kWarp) * kAhead;
  RawValues raw[kAhead];
  uint32_t n[kAhead];
#pragma unroll
  for (uint32_t a = 0; a < kAhead; ++a) {
    n[a] = 0;
    uint64_t begin = 0;
    if (first + a < super_groups) {
      const Span span = span_of(layout, (first + a) / layout.domain_groups, static_cast<uint32_t>(first + a));
      begin = span.begin;
      n[a] = static_cast<uint32_t>(span.end - span.begin);
    }
    constexpr uint64_t kBytes = kDType == DType::f32 ? 4 : 2;
    raw[a] = load_raw(static_cast<const uint8_t*>(data) + begin * kBytes, kDType, n[a], vector, lane);
  }
#pragma unroll
  for (uint32_t a = 0; a < kAhead; ++a) {
    if (first + a >= super_groups) return;
    float v[kLaneValues];
    to_floats(raw[a], kDType, v);
    if constexpr (kWidths == Widths::fine) {
      const uint8_t code = fine_energy(v);
      if (lane == 0) static_cast<uint8_t*>(stats)[first + a] = code;
    } else {
      const float norm = squared_norm(v), mean = div(plain_sum(v), static_cast<float>(n[a]));
      if (lane == 0) static_cast<uint16_t*>(stats)[first + a] = float_to_bf16(norm);
      if (lane == 0) static_cast<uint16_t*>(stats)[super_groups + first + a] = float_to_bf16(mean);
    }
  }
}

template <Widths kWidths>
void launch(const Layout& layout, uint64_t super_groups, const Values& values, bool vector, void* stats, Order order,
            cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(super_groups, kAhead * (kThreads / kWarp)));
  if (values.dtype == DType::f32)
    statistics_kernel<kWidths, DType::f32>
        <<<blocks, kThreads, 0, stream>>>(layout, super_groups, values.data, vector, stats, order);
  else if (values.dtype == DType::bf16)
    statistics_kernel<kWidths, DType::bf16>
        <<<blocks, kThreads, 0, stream>>>(layout, super_groups, values.data, vector, stats, order);
  else
    statistics_kernel<kWidths, DType::f16>
        <<<blocks, kThreads, 0, stream>>>(layout, super_groups, values.data, vector, stats, order);
}

}  // namespace

Status statistics(const Shape& shape, const Values& values, void* stats, Order order, void* stream) {
  const Status status = check_statistics(shape, values, stats);
  if (status != Status::ok || shape.count == 0) return status;
  const Layout l = layout_of(shape);
  const uint64_t n = shape.domains * l.domain_groups;
  if (shape.widths == Widths::fine)
    launch<Widths::fine>(l, n, values, whole_vectors(l, shape, values), stats, order,
                         static_cast<cudaStream_t>(stream));
  else
    launch<Widths::paper>(l, n, values, whole_vectors(l, shape, values), stats, order,
                          static_cast<cudaStream_t>(stream));
  return launched();
}

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
