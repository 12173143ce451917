#include "collectives/quantizing.h"

#include "collectives/error.h"

#ifdef ZIPCCL_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace zipccl {

namespace {
#ifdef ZIPCCL_WITH_CUDA
void* stream_of(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }
#endif

// The CPU's function, or CUDA's with the current stream.
#ifdef ZIPCCL_WITH_CUDA
#define ZIPCCL_ON(device, function, ...) \
  ((device).is_cpu() ? quantizer::function(__VA_ARGS__) : quantizer::cuda::function(__VA_ARGS__, stream_of(device)))
#else
#define ZIPCCL_ON(device, function, ...) quantizer::function(__VA_ARGS__)
#endif
}  // namespace

bool can_quantize(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

quantizer::Values values_of(const at::Tensor& t, uint64_t first, float means) {
  quantizer::Values v;
  v.data = t.const_data_ptr();
  frame_dtype(t.scalar_type(), &v.dtype);
  v.first = first;
  v.means = means;
  return v;
}

Plan::Plan(const quantizer::Shape& shape, at::Device device, const std::string& what)
    : shape_(shape), device_(device), what_(what) {
  check(quantizer::check(shape), what + ": cannot be quantised");
  stats_ = quantizer::stats_format(shape);
  part_bytes_ = static_cast<int64_t>(quantizer::part_bytes(shape));
}

at::Tensor Plan::statistics(Engine& engine, const at::Tensor& bucket, quantizer::Order order) const {
  at::Tensor stats = engine.empty(static_cast<int64_t>(stats_.count), scalar_type(stats_.dtype));
  check(ZIPCCL_ON(device_, statistics, shape_, values_of(bucket, 0, 0), stats.mutable_data_ptr(), order), what_);
  return stats;
}

void Plan::allocate(Engine& engine, const at::Tensor& stats, int ranks) {
  plan_ = engine.empty(static_cast<int64_t>(quantizer::plan_bytes(shape_)), at::kByte);
#ifdef ZIPCCL_WITH_CUDA
  const uint64_t bytes =
      device_.is_cpu() ? quantizer::plan_scratch_bytes(shape_) : quantizer::cuda::plan_scratch_bytes(shape_);
#else
  const uint64_t bytes = quantizer::plan_scratch_bytes(shape_);
#endif
  at::Tensor scratch = engine.empty(static_cast<int64_t>(bytes), at::kByte);
  check(ZIPCCL_ON(device_, allocate, shape_, stats.const_data_ptr(), static_cast<uint32_t>(ranks),
                  plan_.mutable_data_ptr(), scratch.mutable_data_ptr()),
        what_);
}

void Plan::combine(const quantizer::Combine& job) const {
  check(ZIPCCL_ON(device_, combine, shape_, plan_.const_data_ptr(), job), what_);
}

}  // namespace zipccl
