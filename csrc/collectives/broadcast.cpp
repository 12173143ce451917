#include "collectives/broadcast.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "collectives/words.h"

namespace zipccl {

namespace {
int64_t bound(const FrameOptions& options, const at::Tensor& t) {
  return static_cast<int64_t>(frame_bound(options, t.numel()));
}

CallId rooted_call(const Place& place, DType dtype, int64_t count, int root) {
  return place.call.of(dtype, {count, root});
}

// Decodes into tensors of any strides; what NCCL would fill as it lies, as it lies.
void decode_into(const Place& place, const std::vector<Decode>& wanted, const FrameOptions& options) {
  std::vector<Decode> jobs = wanted;
  std::vector<at::Tensor> places;
  for (Decode& job : jobs) {
    places.push_back(as_it_lies(job.dst));
    job.dst = plain_target(places.back());
  }
  place.engine.decode(jobs, options, place.what);
  for (size_t i = 0; i < jobs.size(); ++i)
    if (!jobs[i].dst.is_same(places[i])) places[i].copy_(jobs[i].dst, /*non_blocking=*/true);
}
}  // namespace

void check_rooted(const Place& place, const at::Tensor& like, int root) {
  DType dtype = DType::u8;
  frame_dtype(like.scalar_type(), &dtype);
  check_in_step(place, rooted_call(place, dtype, like.numel(), root));
}

Traffic broadcast_zip(const Place& place, at::Tensor tensor, int root, const FrameOptions& given) {
  at::NoGradGuard no_grad;
  const FrameOptions options = place.frames(given);
  Engine& engine = place.engine;
  const bool sender = place.rank() == root;
  Traffic traffic;
  Stopwatch watch;
  at::Tensor slot = engine.empty(bound(options, tensor), at::kByte), size = engine.empty(1, at::kLong);
  if (sender) engine.encode({plain(as_it_lies(tensor))}, options, {slot}, size);
  traffic.encode = watch.lap();
  const int64_t bytes = broadcast_words(place, size, root, rooted_call(place, options.dtype, tensor.numel(), root))[0];
  check_frame_size(bytes, options, tensor.numel(), root, place.what);
  traffic.sizes = watch.lap();
  at::Tensor frame = slot.narrow(0, 0, bytes);
  place.messages.broadcast(frame, root);
  traffic.transfer = watch.lap();
  if (!sender) {
    traffic.raw_bytes = tensor.nbytes();
    traffic.wire_bytes = static_cast<uint64_t>(bytes);
    decode_into(place, {{frame, tensor, "rank " + std::to_string(root)}}, options);
  }
  traffic.decode = watch.lap();
  return traffic;
}

Traffic scatter_zip(const Place& place, at::Tensor output, const std::vector<at::Tensor>& inputs, int root,
                    const FrameOptions& given) {
  at::NoGradGuard no_grad;
  const FrameOptions options = place.frames(given);
  Engine& engine = place.engine;
  const int world = place.world(), rank = place.rank();
  Traffic traffic;
  Stopwatch watch;
  at::Tensor sizes = engine.empty(world, at::kLong);
  std::vector<at::Tensor> slots;
  if (rank == root) {
    std::vector<at::Tensor> src;
    for (const at::Tensor& t : inputs) {
      src.push_back(plain(as_it_lies(t)));
      slots.push_back(engine.empty(bound(options, t), at::kByte));
    }
    engine.encode(src, options, slots, sizes);
  }
  traffic.encode = watch.lap();
  const std::vector<int64_t> bytes =
      broadcast_words(place, sizes, root, rooted_call(place, options.dtype, output.numel(), root));
  for (int64_t b : bytes) check_frame_size(b, options, output.numel(), root, place.what);
  traffic.sizes = watch.lap();
  const int64_t largest = *std::max_element(bytes.begin(), bytes.end());
  for (at::Tensor& slot : slots) slot = slot.narrow(0, 0, largest);
  at::Tensor frame = engine.empty(largest, at::kByte);
  place.messages.scatter(frame, slots, root);
  traffic.transfer = watch.lap();
  if (rank == root) {
    output.copy_(inputs[rank], /*non_blocking=*/true);  // by value, as NCCL does
  } else {
    traffic.raw_bytes = output.nbytes();
    traffic.wire_bytes = static_cast<uint64_t>(largest);
    decode_into(place, {{frame.narrow(0, 0, bytes[rank]), output, "rank " + std::to_string(root)}}, options);
  }
  traffic.decode = watch.lap();
  return traffic;
}

Traffic gather_zip(const Place& place, const std::vector<at::Tensor>& outputs, at::Tensor input, int root,
                   const FrameOptions& given) {
  at::NoGradGuard no_grad;
  const FrameOptions options = place.frames(given);
  Engine& engine = place.engine;
  const int world = place.world(), rank = place.rank();
  Traffic traffic;
  Stopwatch watch;
  at::Tensor slot = engine.empty(bound(options, input), at::kByte), size = engine.empty(1, at::kLong);
  engine.encode({plain(as_it_lies(input))}, options, {slot}, size);
  traffic.encode = watch.lap();
  const std::vector<int64_t> bytes =
      // All pad to the largest, so all must know it.
      all_gather_words(place, size, rooted_call(place, options.dtype, input.numel(), root));
  for (int r = 0; r < world; ++r) check_frame_size(bytes[r], options, input.numel(), r, place.what);
  traffic.sizes = watch.lap();
  const int64_t largest = *std::max_element(bytes.begin(), bytes.end());
  std::vector<at::Tensor> frames;
  if (rank == root)
    for (int r = 0; r < world; ++r) frames.push_back(engine.empty(largest, at::kByte));
  place.messages.gather(frames, slot.narrow(0, 0, largest), root);
  traffic.transfer = watch.lap();
  if (rank == root) {
    // By value, as NCCL does, and before the others', whose outputs may lie where the input does.
    outputs[rank].copy_(input, /*non_blocking=*/true);
    std::vector<Decode> jobs;
    for (int r = 0; r < world; ++r) {
      if (r == rank) continue;
      jobs.push_back({frames[r].narrow(0, 0, bytes[r]), outputs[r], "rank " + std::to_string(r)});
      traffic.raw_bytes += outputs[r].nbytes();
      traffic.wire_bytes += static_cast<uint64_t>(largest);
    }
    decode_into(place, jobs, options);
  }
  traffic.decode = watch.lap();
  return traffic;
}

}  // namespace zipccl
