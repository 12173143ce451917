#include "collectives/all_to_all.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

#include "collectives/error.h"
#include "collectives/words.h"

namespace zipccl {

namespace {
using Tensors = std::vector<at::Tensor>;

constexpr int kUseShift = 48;  // of PairOptions::use in the word of a size, which is far smaller

// Frames of some of the inputs, in slots of frame_bound() bytes; undefined elsewhere.
struct Frames {
  Tensors slots;
  at::Tensor sizes;  // int64 [world], 0 where there is no frame
};

Frames encode_some(Engine& engine, const Tensors& inputs, const std::vector<bool>& chosen,
                   const FrameOptions& options) {
  const int64_t world = static_cast<int64_t>(inputs.size());
  Frames f{Tensors(world), engine.empty(world, at::kLong).zero_()};
  Tensors src, slots;
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < world; ++r) {
    if (!chosen[r]) continue;
    f.slots[r] = engine.empty(static_cast<int64_t>(frame_bound(options, inputs[r].numel())), at::kByte);
    src.push_back(inputs[r]);
    slots.push_back(f.slots[r]);
    ranks.push_back(r);
  }
  if (src.empty()) return f;
  const int64_t n = static_cast<int64_t>(src.size());
  at::Tensor sizes = engine.empty(n, at::kLong);
  engine.encode(src, options, slots, sizes);
  // To their places, a run of ranks at a time: two runs, around the own rank, where all messages are zipped.
  for (int64_t i = 0, run; i < n; i += run) {
    run = 1;
    while (i + run < n && ranks[i + run] == ranks[i] + run) ++run;
    f.sizes.narrow(0, ranks[i], run).copy_(sizes.narrow(0, i, run), /*non_blocking=*/true);
  }
  return f;
}

// What goes ahead of a frame's size, by rank. Design 1: nothing.
struct Ahead {
  std::vector<int64_t> sent, received;
};

// Where one rank finds such another, all find one.
SharedError differing_use(const Place& place, int rank) {
  return SharedError(place.what + ": rank " + std::to_string(rank) +
                     " passes another reduce op or factor than this rank");
}

// gloo ends the process when a message is longer than its receiver expects. So ranks first tell each other what they
// will send, while frames are encoded.
class Announcement {
 public:
  Announcement(const Place& place, const Tensors& inputs, const std::vector<bool>& zipped, const PairOptions& pair,
               const std::vector<int64_t>& ahead)
      : place_(place), design_(pair.design), use_(pair.use) {
    if (!inputs[0].is_cpu()) return;
    std::vector<Opening::Words> told;
    for (int r = 0; r < place.world(); ++r) told.push_back({word(inputs[r], zipped[r]), ahead[r], use_});
    opening_.emplace(place, place.call.of(pair.frame.dtype, {}), told);
  }

  // Waits, and throws for the first rank that will send anything but what is expected. *ahead: what this rank expected
  // to come ahead; the word of a rank that knows better counts.
  void compare(const Tensors& outputs, const std::vector<bool>& zipped, const FrameOptions& options,
               std::vector<int64_t>* ahead) {
    if (!opening_) return;
    const std::vector<Opening::Words> heard = opening_->hear();
    for (int r = 0; r < place_.world(); ++r) {
      if (r == place_.rank()) continue;
      const auto [sends, comes_ahead, use] = heard[r];
      const int64_t expected = word(outputs[r], zipped[r]);
      if (sends != expected)
        throw Error(place_.what + ": rank " + std::to_string(r) + " sends " + text(sends) + ", expected were " +
                    text(expected) + "; do all ranks pass the same shapes, dtypes and options?");
      if (use != use_) throw differing_use(place_, r);
      if (!zipped[r] || design_ == Design::one) continue;
      check_frame_size(comes_ahead, options, outputs[r].numel(), r, place_.what);
      (*ahead)[r] = comes_ahead;
    }
  }

 private:
  int64_t word(const at::Tensor& t, bool zipped) const {
    return static_cast<int64_t>(t.nbytes()) << 2 | (zipped ? static_cast<int64_t>(design_) : 0);
  }
  static std::string text(int64_t word) {
    const int64_t how = word & 3;
    return std::to_string(word >> 2) + " bytes " + (how ? "zipped by design " + std::to_string(how) : "raw");
  }

  const Place& place_;
  Design design_;
  int64_t use_;
  std::optional<Opening> opening_;
};

// Own sizes, then those that the headers of frames in host memory tell, of which `arrived` bytes are there; 0 where
// there is none. A header that cannot be right says nothing of a rest: the decoder then reports what has arrived.
std::vector<int64_t> sizes_in_headers(const at::Tensor& own, const Tensors& slots, const Tensors& outputs,
                                      const std::vector<int64_t>& arrived, const FrameOptions& options) {
  const auto* p = own.const_data_ptr<int64_t>();
  std::vector<int64_t> sizes(p, p + own.numel());
  for (size_t r = 0; r < slots.size(); ++r) {
    sizes.push_back(arrived[r]);
    FrameInfo info;
    if (slots[r].defined() && read_header(slots[r].const_data_ptr(), arrived[r], &info) == Status::ok &&
        info.dtype == options.dtype && info.count == static_cast<uint64_t>(outputs[r].numel()) &&
        info.frame_bytes <= static_cast<uint64_t>(slots[r].numel()))
      sizes.back() = static_cast<int64_t>(info.frame_bytes);
  }
  return sizes;
}
}  // namespace

std::vector<at::Tensor> exchange(const Place& place, const Tensors& inputs, const Tensors& outputs,
                                 const PairOptions& pair, Traffic* traffic) {
  using Way = Forecast::Way;
  const int world = place.world(), rank = place.rank();
  Engine& engine = place.engine;
  Stopwatch watch;
  const FrameOptions options = place.frames(pair.frame);
  const bool two = pair.design == Design::two;
  Forecast nothing_known;
  Forecast& forecast = place.forecast ? *place.forecast : nothing_known;

  auto zips = [&](int r, const at::Tensor& t) { return r != rank && t.numel() > 0 && t.nbytes() >= pair.min_bytes; };
  std::vector<bool> send_zipped(world), receive_zipped(world);
  Ahead ahead{std::vector<int64_t>(world), std::vector<int64_t>(world)};
  for (int r = 0; r < world; ++r) {
    send_zipped[r] = zips(r, inputs[r]);
    receive_zipped[r] = zips(r, outputs[r]);
    if (two && send_zipped[r])
      ahead.sent[r] = static_cast<int64_t>(forecast.bytes(Way::to, r, options, inputs[r].numel()));
    if (two && receive_zipped[r])
      ahead.received[r] = static_cast<int64_t>(forecast.bytes(Way::from, r, options, outputs[r].numel()));
    if (r != rank) traffic->raw_bytes += outputs[r].nbytes();
  }
  Announcement announcement(place, inputs, send_zipped, pair, ahead.sent);
  const Frames frames = encode_some(engine, inputs, send_zipped, options);
  traffic->encode += watch.lap();
  announcement.compare(outputs, receive_zipped, options, &ahead.received);
  traffic->sizes += watch.lap();

  // Raw messages go and arrive as they are, in the first exchange.
  const at::Tensor nothing = engine.empty(0, at::kByte);
  Tensors sends(world, nothing), receives(world, nothing), slots(world);
  for (int r = 0; r < world; ++r) {
    if (r == rank) continue;
    if (!send_zipped[r] && inputs[r].numel() > 0) sends[r] = as_bytes(inputs[r]);
    if (!receive_zipped[r] && outputs[r].numel() > 0) receives[r] = as_bytes(outputs[r]);
    if (!receive_zipped[r]) traffic->wire_bytes += outputs[r].nbytes();
  }
  if (pair.min_bytes == PairOptions::kNever) {
    place.messages.all_to_all(receives, sends);
    traffic->transfer += watch.lap();
    return slots;
  }

  // Sizes: sent ones, then received ones. On CUDA the exchange below is enqueued, and runs, while the host learns them.
  // On the CPU they come with what is sent ahead, and the use has been compared.
  const int64_t use = inputs[0].is_cpu() ? 0 : static_cast<int64_t>(uint64_t{pair.use} << kUseShift);
  if (use != 0) frames.sizes.add_(use);
  Engine::Reading learn_sizes;
  if (!two || !inputs[0].is_cpu()) learn_sizes = begin_all_to_all_words(place, frames.sizes);

  if (two) {
    for (int r = 0; r < world; ++r) {
      if (send_zipped[r]) {
        sends[r] = frames.slots[r].narrow(0, 0, ahead.sent[r]);
        // What goes behind a frame that is smaller than expected is nobody's; on CUDA its size is not known here.
        const int64_t size = sends[r].is_cpu() ? frames.sizes.const_data_ptr<int64_t>()[r] : ahead.sent[r];
        if (size < ahead.sent[r]) sends[r].narrow(0, size, ahead.sent[r] - size).zero_();
      }
      if (!receive_zipped[r]) continue;
      slots[r] = engine.empty(static_cast<int64_t>(frame_bound(options, outputs[r].numel())), at::kByte);
      receives[r] = slots[r].narrow(0, 0, ahead.received[r]);
      traffic->wire_bytes += receives[r].nbytes();
    }
    place.messages.all_to_all(receives, sends);
    std::fill(sends.begin(), sends.end(), nothing);
    std::fill(receives.begin(), receives.end(), nothing);
    traffic->transfer += watch.lap();
  }

  std::vector<int64_t> sizes =
      learn_sizes ? learn_sizes() : sizes_in_headers(frames.sizes, slots, outputs, ahead.received, options);
  traffic->sizes += watch.lap();
  for (int r = 0; r < world; ++r) {
    sizes[r] -= use;
    sizes[world + r] ^= use;
    if (use != 0 && receive_zipped[r] && sizes[world + r] >> kUseShift != 0) throw differing_use(place, r);
    if (receive_zipped[r]) check_frame_size(sizes[world + r], options, outputs[r].numel(), r, place.what);
  }

  // Design 1: everything. Design 2: what the forecasts fell short of.
  for (int r = 0; r < world; ++r) {
    const int64_t to = sizes[r], from = sizes[world + r];
    if (send_zipped[r]) {
      if (to > ahead.sent[r]) sends[r] = frames.slots[r].narrow(0, ahead.sent[r], to - ahead.sent[r]);
      forecast.learn(Way::to, r, options, inputs[r].numel(), to);
    }
    if (!receive_zipped[r]) continue;
    if (!two) slots[r] = engine.empty(from, at::kByte);
    if (from > ahead.received[r]) receives[r] = slots[r].narrow(0, ahead.received[r], from - ahead.received[r]);
    slots[r] = slots[r].narrow(0, 0, from);
    traffic->wire_bytes += receives[r].nbytes();
    forecast.learn(Way::from, r, options, outputs[r].numel(), from);
  }
  if (two)
    place.messages.between_some(receives, sends);
  else
    place.messages.all_to_all(receives, sends);
  traffic->transfer += watch.lap();
  return slots;
}

Traffic all_to_all_zip(const Place& place, const Tensors& user_inputs, const Tensors& user_outputs,
                       const PairOptions& options) {
  at::NoGradGuard no_grad;
  const int world = place.world(), rank = place.rank();
  Traffic traffic;
  Tensors inputs, outputs;
  for (const at::Tensor& t : user_inputs) inputs.push_back(plain(t));
  for (const at::Tensor& t : user_outputs) outputs.push_back(plain_target(t));
  const Tensors frames = exchange(place, inputs, outputs, options, &traffic);

  Stopwatch watch;
  // Before the others', whose outputs may lie where the input does.
  outputs[rank].copy_(inputs[rank].view(outputs[rank].sizes()), /*non_blocking=*/true);
  std::vector<Decode> jobs;
  for (int r = 0; r < world; ++r)
    if (frames[r].defined()) jobs.push_back({frames[r], outputs[r], "rank " + std::to_string(r)});
  place.engine.decode(jobs, place.frames(options.frame), place.what);
  for (int r = 0; r < world; ++r)
    if (!outputs[r].is_same(user_outputs[r])) user_outputs[r].copy_(outputs[r], /*non_blocking=*/true);
  traffic.decode += watch.lap();
  return traffic;
}

void all_to_all_raw(const Place& place, const Tensors& inputs, const Tensors& outputs) {
  PairOptions never;
  never.min_bytes = PairOptions::kNever;
  frame_dtype(inputs[0].scalar_type(), &never.frame.dtype);  // for the ranks to compare
  all_to_all_zip(place, inputs, outputs, never);
}

}  // namespace zipccl
