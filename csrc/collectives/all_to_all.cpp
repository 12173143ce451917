#include "collectives/all_to_all.h"

#include <ATen/core/grad_mode.h>

#include "collectives/error.h"
#include "collectives/words.h"

namespace zipccl {

namespace {
using Tensors = std::vector<at::Tensor>;

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

// gloo ends the process when a message is longer than its receiver expects. So ranks first tell each other what they
// will send, while frames are encoded.
class Announcement {
 public:
  Announcement(const Place& place, const Tensors& inputs, const std::vector<bool>& zipped, Design design)
      : place_(place), design_(design) {
    if (!inputs[0].is_cpu()) return;
    const int world = place.world();
    told_ = place.engine.empty(world, at::kLong);
    heard_ = place.engine.empty(world, at::kLong);
    for (int r = 0; r < world; ++r) told_.mutable_data_ptr<int64_t>()[r] = word(inputs[r], zipped[r]);
    work_ = place.messages.begin_all_to_all_words(heard_, told_);
  }

  // Waits, and throws for the first rank that will send anything but what is expected.
  void compare(const Tensors& outputs, const std::vector<bool>& zipped) {
    if (!work_) return;
    work_->wait();
    for (int r = 0; r < place_.world(); ++r) {
      const int64_t heard = heard_.const_data_ptr<int64_t>()[r], expected = word(outputs[r], zipped[r]);
      if (r != place_.rank() && heard != expected)
        throw Error(place_.what + ": rank " + std::to_string(r) + " sends " + text(heard) + ", expected were " +
                    text(expected) + "; do all ranks pass the same shapes and options?");
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
  at::Tensor told_, heard_;
  c10::intrusive_ptr<c10d::Work> work_;
};

int64_t static_size(const FrameOptions& options, const at::Tensor& t) {
  return static_cast<int64_t>(static_bytes(options, t.numel()));
}
}  // namespace

std::vector<at::Tensor> exchange(const Place& place, const Tensors& inputs, const Tensors& outputs,
                                 const PairOptions& pair, Traffic* traffic) {
  const int world = place.world(), rank = place.rank();
  Engine& engine = place.engine;
  Stopwatch watch;
  FrameOptions options = place.frames(pair.frame);
  options.layout = pair.design == Design::two ? FrameLayout::split : FrameLayout::compact;

  auto zips = [&](int r, const at::Tensor& t) { return r != rank && t.numel() > 0 && t.nbytes() >= pair.min_bytes; };
  std::vector<bool> send_zipped(world), receive_zipped(world);
  for (int r = 0; r < world; ++r) {
    send_zipped[r] = zips(r, inputs[r]);
    receive_zipped[r] = zips(r, outputs[r]);
    if (r != rank) traffic->raw_bytes += outputs[r].nbytes();
  }
  Announcement announcement(place, inputs, send_zipped, pair.design);
  const Frames frames = encode_some(engine, inputs, send_zipped, options);
  traffic->encode += watch.lap();
  announcement.compare(outputs, receive_zipped);
  traffic->sizes += watch.lap();

  // Raw messages go and arrive as they are, in the first exchange that carries data.
  const at::Tensor nothing = engine.empty(0, at::kByte);
  Tensors sends(world, nothing), receives(world, nothing), received(world);
  for (int r = 0; r < world; ++r) {
    if (r == rank) continue;
    if (!send_zipped[r] && inputs[r].numel() > 0) sends[r] = as_bytes(inputs[r]);
    if (!receive_zipped[r] && outputs[r].numel() > 0) receives[r] = as_bytes(outputs[r]);
    if (!receive_zipped[r]) traffic->wire_bytes += outputs[r].nbytes();
  }

  if (pair.min_bytes == PairOptions::kNever) {
    place.messages.all_to_all(receives, sends);
    traffic->transfer += watch.lap();
    return received;
  }

  if (pair.design == Design::one) {
    const std::vector<int64_t> sizes = all_to_all_words(place, frames.sizes);
    traffic->sizes += watch.lap();
    for (int r = 0; r < world; ++r) {
      if (send_zipped[r]) sends[r] = frames.slots[r].narrow(0, 0, sizes[r]);
      if (!receive_zipped[r]) continue;
      check_frame_size(sizes[world + r], options, outputs[r].numel(), r, place.what);
      receives[r] = received[r] = engine.empty(sizes[world + r], at::kByte);
      traffic->wire_bytes += received[r].nbytes();
    }
    place.messages.all_to_all(receives, sends);
    traffic->transfer += watch.lap();
    return received;
  }

  // Design 2. Frames arrive in slots that hold any frame of that count, static part first.
  for (int r = 0; r < world; ++r) {
    if (send_zipped[r]) sends[r] = frames.slots[r].narrow(0, 0, static_size(options, inputs[r]));
    if (!receive_zipped[r]) continue;
    received[r] = engine.empty(static_cast<int64_t>(frame_bound(options, outputs[r].numel())), at::kByte);
    receives[r] = received[r].narrow(0, 0, static_size(options, outputs[r]));
    traffic->wire_bytes += receives[r].nbytes();
  }
  place.messages.all_to_all(receives, sends);
  traffic->transfer += watch.lap();

  // The headers tell how much is left: FrameHeader::frame_bytes, 16 bytes in.
  Tensors known{frames.sizes};
  for (int r = 0; r < world; ++r)
    if (receive_zipped[r]) known.push_back(received[r].narrow(0, 16, 8).view(at::kLong));
  bool any = known.size() > 1;
  for (int r = 0; r < world; ++r) any = any || send_zipped[r];
  const std::vector<int64_t> sizes = any ? engine.to_host(at::cat(known)) : std::vector<int64_t>(world, 0);
  traffic->sizes += watch.lap();

  size_t next = world;
  for (int r = 0; r < world; ++r) {
    sends[r] = receives[r] = nothing;
    if (send_zipped[r]) {
      const int64_t gone = static_size(options, inputs[r]);
      sends[r] = frames.slots[r].narrow(0, gone, sizes[r] - gone);
    }
    if (!receive_zipped[r]) continue;
    const int64_t here = static_size(options, outputs[r]), whole = sizes[next++];
    check_frame_size(whole, options, outputs[r].numel(), r, place.what);
    if (whole < here)
      throw Error(place.what + ": frame from rank " + std::to_string(r) + ": " + status_text(Status::bad_header));
    receives[r] = received[r].narrow(0, here, whole - here);
    received[r] = received[r].narrow(0, 0, whole);
    traffic->wire_bytes += receives[r].nbytes();
  }
  place.messages.all_to_all(receives, sends);
  traffic->transfer += watch.lap();
  return received;
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
  all_to_all_zip(place, inputs, outputs, never);
}

}  // namespace zipccl
