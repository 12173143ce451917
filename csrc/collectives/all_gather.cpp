#include "collectives/all_gather.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "collectives/words.h"

namespace zipccl {

namespace {
bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.is_contiguous() && b.is_contiguous();
}
}  // namespace

Traffic all_gather_zip(const Place& place, const std::vector<GatherItem>& items, const FrameOptions& given) {
  at::NoGradGuard no_grad;
  const FrameOptions options = place.frames(given);
  const int world = place.world(), rank = place.rank();
  Engine& engine = place.engine;
  const int64_t n = static_cast<int64_t>(items.size());
  Traffic traffic;
  Stopwatch watch;

  // Frames are padded to the largest of all ranks, so a slot must hold the bound of the largest count.
  std::vector<at::Tensor> src, slots;
  for (const GatherItem& item : items) {
    uint64_t bound = 0;
    for (const at::Tensor& out : item.outputs) bound = std::max(bound, frame_bound(options, out.numel()));
    src.push_back(plain(item.input));
    slots.push_back(engine.empty(static_cast<int64_t>(bound), at::kByte));
  }
  auto own_sizes = engine.empty(n, at::kLong);
  engine.encode(src, options, slots, own_sizes);
  traffic.encode = watch.lap();

  const std::vector<int64_t> sizes = all_gather_words(place, own_sizes);  // [world][items]
  traffic.sizes = watch.lap();

  std::vector<at::Tensor> sends, receives;
  for (int64_t i = 0; i < n; ++i) {
    int64_t largest = 0;
    for (int r = 0; r < world; ++r) {
      int64_t bytes = sizes[r * n + i];
      check_frame_size(bytes, options, items[i].outputs[r].numel(), r, place.what);
      largest = std::max(largest, bytes);
      if (r != rank) traffic.raw_bytes += items[i].outputs[r].nbytes();
    }
    traffic.wire_bytes += static_cast<uint64_t>(largest) * (world - 1);
    sends.push_back(slots[i].narrow(0, 0, largest));
    receives.push_back(engine.empty(largest * world, at::kByte));
  }
  place.messages.all_gather(receives, sends);
  traffic.transfer = watch.lap();

  std::vector<Decode> jobs;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // strided outputs: (output, decoded)
  for (int64_t i = 0; i < n; ++i) {
    int64_t stride = sends[i].numel();
    for (int r = 0; r < world; ++r) {
      at::Tensor out = items[i].outputs[r];
      if (r == rank && same_memory(out, items[i].input)) continue;
      if (!is_plain(out)) {
        auto dense = at::empty(out.sizes(), out.options());
        copies.emplace_back(out, dense);
        out = dense;
      }
      jobs.push_back({receives[i].narrow(0, r * stride, sizes[r * n + i]), out, "rank " + std::to_string(r)});
    }
  }
  engine.decode(jobs, options, place.what);
  for (auto& [out, dense] : copies) out.copy_(dense, /*non_blocking=*/true);
  traffic.decode = watch.lap();
  return traffic;
}

void all_gather_padded(const Place& place, const at::Tensor& input, const std::vector<at::Tensor>& outputs) {
  at::NoGradGuard no_grad;
  int64_t largest = 0;
  for (const at::Tensor& out : outputs) largest = std::max<int64_t>(largest, out.nbytes());
  if (largest == 0) return;
  at::Tensor send = place.engine.empty(largest, at::kByte);
  at::Tensor received = place.engine.empty(largest * place.world(), at::kByte);
  send.narrow(0, 0, input.nbytes()).copy_(as_bytes(plain(input)), /*non_blocking=*/true);
  place.messages.all_gather(received, send);
  for (int r = 0; r < place.world(); ++r) {
    at::Tensor out = outputs[r];
    at::Tensor dense = plain_target(out);
    as_bytes(dense).copy_(received.narrow(0, r * largest, out.nbytes()), /*non_blocking=*/true);
    if (!dense.is_same(out)) out.copy_(dense, /*non_blocking=*/true);
  }
}

}  // namespace zipccl
