#include "collectives/all_gather.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "collectives/words.h"

namespace zipccl {

namespace {
using Tensors = std::vector<at::Tensor>;

// Raw bytes of a rank up to which sending at once pays: what a forecast is too large by costs more than the sizes' way
// in larger calls.
constexpr uint64_t kMostAhead = 16 << 20;
constexpr auto kAll = Forecast::Way::all;

int64_t largest_count(const GatherItem& item) {
  int64_t count = 0;
  for (const at::Tensor& out : item.outputs) count = std::max(count, out.numel());
  return count;
}

// Bytes of each rank's frame of each item to send before sizes are known; empty: none. Alike on all ranks.
std::vector<int64_t> bytes_ahead(const Forecast& forecast, const std::vector<GatherItem>& items,
                                 const FrameOptions& options) {
  std::vector<int64_t> ahead;
  if (!forecast.knows(kAll, 0, options)) return ahead;
  uint64_t raw_bytes = 0;
  for (const GatherItem& item : items) {
    const int64_t count = largest_count(item);
    raw_bytes += static_cast<uint64_t>(count) * item.input.itemsize();
    // Where a forecast would be wrong, the bound is no large mistake.
    ahead.push_back(static_cast<int64_t>(count < Forecast::kLeastCount ? frame_bound(options, count)
                                                                       : forecast.bytes(kAll, 0, options, count)));
  }
  return raw_bytes <= kMostAhead ? ahead : std::vector<int64_t>();
}

// [world][bytes] and [world][more] to [world][bytes + more].
at::Tensor joined(const at::Tensor& first, const at::Tensor& more, int world) {
  return at::cat({first.view({world, -1}), more.view({world, -1})}, 1).view({-1});
}

void append_counts(const GatherItem& item, std::vector<int64_t>* counts) {
  for (const at::Tensor& out : item.outputs) counts->push_back(out.numel());
}

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
  Tensors src, slots;
  std::vector<int64_t> counts;
  for (const GatherItem& item : items) {
    append_counts(item, &counts);
    src.push_back(plain(item.input));
    slots.push_back(engine.empty(static_cast<int64_t>(frame_bound(options, largest_count(item))), at::kByte));
  }
  auto own_sizes = engine.empty(n, at::kLong);
  engine.encode(src, options, slots, own_sizes);
  traffic.encode = watch.lap();

  // Sends [begin, end) of each slot and receives as much from every rank: [world][end - begin], undefined for nothing.
  const auto gather = [&](const std::vector<int64_t>& begin, const std::vector<int64_t>& end) {
    Tensors received(n), sends, receives;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t bytes = end[i] - begin[i];
      if (bytes == 0) continue;
      received[i] = engine.empty(bytes * world, at::kByte);
      receives.push_back(received[i]);
      sends.push_back(slots[i].narrow(0, begin[i], bytes));
      traffic.wire_bytes += static_cast<uint64_t>(bytes) * (world - 1);
    }
    if (!sends.empty()) place.messages.all_gather(receives, sends);
    traffic.transfer += watch.lap();
    return received;
  };
  const Engine::Reading learn_sizes = begin_all_gather_words(place, own_sizes, place.call.of(options.dtype, counts));
  Forecast* const forecast = src[0].is_cpu() ? nullptr : place.forecast;
  const std::vector<int64_t> ahead = forecast ? bytes_ahead(*forecast, items, options) : std::vector<int64_t>();
  Tensors received;
  if (!ahead.empty()) received = gather(std::vector<int64_t>(n), ahead);
  const std::vector<int64_t> sizes = learn_sizes();  // [world][items]
  traffic.sizes = watch.lap();

  std::vector<int64_t> largest(n);  // of each item's frames
  for (int64_t i = 0; i < n; ++i) {
    for (int r = 0; r < world; ++r) {
      const int64_t bytes = sizes[r * n + i];
      check_frame_size(bytes, options, items[i].outputs[r].numel(), r, place.what);
      largest[i] = std::max(largest[i], bytes);
      if (r != rank) traffic.raw_bytes += items[i].outputs[r].nbytes();
    }
    if (forecast) forecast->learn(kAll, 0, options, largest_count(items[i]), static_cast<uint64_t>(largest[i]));
  }
  if (ahead.empty()) {
    received = gather(std::vector<int64_t>(n), largest);
  } else {
    for (int64_t i = 0; i < n; ++i) largest[i] = std::max(largest[i], ahead[i]);
    const Tensors rest = gather(ahead, largest);
    for (int64_t i = 0; i < n; ++i)
      if (rest[i].defined()) received[i] = joined(received[i], rest[i], world);
  }

  std::vector<Decode> jobs;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // strided outputs: (output, decoded)
  for (int64_t i = 0; i < n; ++i) {
    const int64_t stride = received[i].numel() / world;
    for (int r = 0; r < world; ++r) {
      at::Tensor out = items[i].outputs[r];
      if (r == rank && same_memory(out, items[i].input)) continue;
      if (!is_plain(out)) {
        auto dense = at::empty(out.sizes(), out.options());
        copies.emplace_back(out, dense);
        out = dense;
      }
      jobs.push_back({received[i].narrow(0, r * stride, sizes[r * n + i]), out, "rank " + std::to_string(r)});
    }
  }
  engine.decode(jobs, options, place.what);
  for (auto& [out, dense] : copies) out.copy_(dense, /*non_blocking=*/true);
  traffic.decode = watch.lap();
  return traffic;
}

void all_gather_padded(const Place& place, const GatherItem& item) {
  at::NoGradGuard no_grad;
  const at::Tensor& input = item.input;
  DType dtype = DType::u8;
  frame_dtype(input.scalar_type(), &dtype);
  std::vector<int64_t> counts;
  append_counts(item, &counts);
  // No size is to be learnt, but whether this is everybody's call; of one word, as those of zipped calls are.
  all_gather_words(place, place.engine.empty(1, at::kLong).zero_(), place.call.of(dtype, counts));
  int64_t largest = 0;
  for (const at::Tensor& out : item.outputs) largest = std::max<int64_t>(largest, out.nbytes());
  if (largest == 0) return;
  at::Tensor send = place.engine.empty(largest, at::kByte);
  at::Tensor received = place.engine.empty(largest * place.world(), at::kByte);
  send.narrow(0, 0, input.nbytes()).copy_(as_bytes(plain(input)), /*non_blocking=*/true);
  place.messages.all_gather(received, send);
  for (int r = 0; r < place.world(); ++r) {
    at::Tensor out = item.outputs[r];
    at::Tensor dense = plain_target(out);
    as_bytes(dense).copy_(received.narrow(0, r * largest, out.nbytes()), /*non_blocking=*/true);
    if (!dense.is_same(out)) out.copy_(dense, /*non_blocking=*/true);
  }
}

}  // namespace zipccl
