#include "collectives/reduce_scatter.h"

#include <ATen/core/grad_mode.h>

#include <cstring>

#include "collectives/all_gather.h"
#include "collectives/error.h"

namespace zipccl {

namespace {
DType dtype_of(at::ScalarType type) {
  DType d = DType::u8;
  frame_dtype(type, &d);
  return d;
}

at::ScalarType wire_type(at::ScalarType input, const ReduceOptions& reduce) {
  return reduce.wire_dtype.value_or(input);
}

// Alike for reductions whose sums are alike, never 0.
uint16_t use_of(const ReduceOptions& reduce) {
  uint32_t factor;
  std::memcpy(&factor, &reduce.premultiply, sizeof factor);
  return static_cast<uint16_t>(1 | (reduce.average ? 2 : 0) | (factor ^ factor >> 16) << 2);
}

// Sums what the ranks have for this one into `output` (contiguous, fp32, bf16 or fp16).
Traffic sum_shards(const Place& place, const std::vector<at::Tensor>& wire, at::Tensor output, const PairOptions& pair,
                   const ReduceOptions& reduce) {
  const int world = place.world(), rank = place.rank();
  Traffic traffic;
  PairOptions options = pair;
  options.use = use_of(reduce);
  options.frame.dtype = dtype_of(wire[0].scalar_type());
  options.frame = place.frames(options.frame);
  // A code that does not make this dtype smaller would only copy it.
  if (effective_code(options.frame) == Code::raw) options.min_bytes = PairOptions::kNever;
  // Messages that are not zipped arrive in tensors; for the others a tensor of the right size without memory says what
  // to expect.
  std::vector<at::Tensor> raw(world);
  const bool zipped = static_cast<uint64_t>(output.numel() * wire[0].itemsize()) >= options.min_bytes;
  for (int r = 0; r < world; ++r)
    raw[r] = r == rank || zipped ? at::empty({1}, wire[0].options()).expand({output.numel()})
                                 : at::empty({output.numel()}, wire[0].options());
  const std::vector<at::Tensor> frames = exchange(place, wire, raw, options, &traffic);

  Stopwatch watch;
  std::vector<Engine::Addend> addends;
  for (int r = 0; r < world; ++r) {
    if (frames[r].defined())
      addends.push_back({frames[r], true, "rank " + std::to_string(r)});
    else
      addends.push_back({r == rank ? wire[r] : raw[r], false, "rank " + std::to_string(r)});
  }
  SumOptions sum;
  sum.in = options.frame.dtype;
  sum.out = dtype_of(output.scalar_type());
  sum.scale = reduce.premultiply;
  sum.divisor = reduce.average ? static_cast<float>(world) : 1.0f;
  place.engine.decode_sum(addends, sum, output, place.what, options.frame.code);
  traffic.decode += watch.lap();
  return traffic;
}
}  // namespace

bool can_reduce(at::ScalarType input, const ReduceOptions& reduce) {
  DType in, out;
  return frame_dtype(wire_type(input, reduce), &in) && frame_dtype(input, &out) && can_sum(in, out);
}

Traffic reduce_scatter_zip(const Place& place, const std::vector<at::Tensor>& inputs, at::Tensor output,
                           const PairOptions& pair, const ReduceOptions& reduce) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> wire;
  for (const at::Tensor& t : inputs)
    wire.push_back(plain(t.resolve_neg()).view({-1}).to(wire_type(t.scalar_type(), reduce)));
  // The own part is read while the output is written: the same memory is fine, memory that overlaps it is not.
  const at::Tensor& own = wire[place.rank()];
  const bool overlaps = output.storage().is_alias_of(own.storage()) && output.const_data_ptr() != own.const_data_ptr();
  at::Tensor dense = overlaps ? at::empty(output.sizes(), output.options()) : plain_target(output);
  Traffic traffic = sum_shards(place, wire, dense, pair, reduce);
  // Raw bytes are what the caller's dtype would have cost.
  traffic.raw_bytes = static_cast<uint64_t>(output.nbytes()) * (place.world() - 1);
  if (!dense.is_same(output)) output.copy_(dense, /*non_blocking=*/true);
  return traffic;
}

Traffic all_reduce_zip(const Place& place, at::Tensor tensor, const PairOptions& pair, const ReduceOptions& reduce) {
  at::NoGradGuard no_grad;
  const int world = place.world(), rank = place.rank();
  const int64_t count = tensor.numel(), shard = (count + world - 1) / world;
  const at::ScalarType wire_dtype = wire_type(tensor.scalar_type(), reduce);

  // Equal shards: the last one is filled up.
  at::Tensor flat = at::empty({shard * world}, tensor.options().dtype(wire_dtype));
  flat.narrow(0, 0, count).copy_(tensor.reshape({-1}), /*non_blocking=*/true);
  if (shard * world > count) flat.narrow(0, count, shard * world - count).zero_();
  std::vector<at::Tensor> shards;
  for (int r = 0; r < world; ++r) shards.push_back(flat.narrow(0, r * shard, shard));
  at::Tensor own = at::empty({shard}, flat.options());
  Traffic traffic = with_more_to_come([&] { return sum_shards(place, shards, own, pair, reduce); });

  FrameOptions frame = pair.frame;
  frame.dtype = dtype_of(wire_dtype);
  frame.layout = FrameLayout::compact;
  shards[rank].copy_(own, /*non_blocking=*/true);
  traffic += all_gather_zip(place, {{shards[rank], shards}}, frame);
  tensor.copy_(flat.narrow(0, 0, count).view(tensor.sizes()), /*non_blocking=*/true);
  traffic.raw_bytes = 2 * static_cast<uint64_t>(tensor.nbytes()) * (world - 1) / world;
  return traffic;
}

}  // namespace zipccl
