#include "backend/perform.h"

#include <cstdio>

#include "collectives/probe.h"

namespace zipccl {

Switcher::Choices choices(Op op, const BackendOptions& options) {
  const bool raw = options.of(op) != Mode::zip, zip = options.of(op) != Mode::raw;
  // Designs differ for all-to-all and what is built on it.
  const bool two = op == Op::all_to_all && options.design != DesignChoice::one;
  const bool one = !two || options.design == DesignChoice::automatic;
  return {raw, zip && one, zip && two};
}

bool is_timed(Op op, const BackendOptions& options) {
  const Switcher::Choices c = choices(op, options);
  return c[0] + c[1] + c[2] > 1;
}

Decision explain_at(const Place& place, Op op, uint64_t bytes, const FrameOptions& frame, const BackendOptions& options,
                    Switcher* switcher) {
  if (!switcher->measured()) measure(place, frame, switcher);
  const uint64_t least = options.threshold(Mode::automatic);
  Decision d = switcher->explain(op, place.world(), bytes, choices(op, options));
  const uint64_t counted = op == Op::all_gather ? bytes * place.world() : bytes;  // as the calls themselves count
  if (counted < least)
    d = {Choice::raw, "below min_bytes (" + std::to_string(least) + ")", d.raw_seconds, d.zip_seconds};
  return d;
}

Decision decide(const Place& place, Op op, uint64_t bytes, const FrameOptions& frame, const BackendOptions& options,
                Switcher* switcher) {
  const Switcher::Choices allowed = choices(op, options);
  if (options.of(op) == Mode::automatic && !switcher->measured()) measure(place, frame, switcher);
  Decision d = switcher->decide(op, place.world(), bytes, allowed);
  if (options.log_decisions && place.rank() == 0)
    std::fprintf(stderr, "zipccl: %s of %llu bytes: %s (%s)\n", op_name(op), static_cast<unsigned long long>(bytes),
                 d.choice == Choice::raw       ? "raw"
                 : d.choice == Choice::zip_two ? "zip, design 2"
                                               : "zip",
                 d.reason.c_str());
  return d;
}

void agree(const Place& place, Op op, uint64_t bytes, Switcher* switcher) {
  if (!switcher->wants_agreement(op, bytes)) return;
  Switcher::Seen s = switcher->seen(op, bytes);
  at::Tensor host = at::tensor({s.seconds[0], s.seconds[1], s.seconds[2], s.ratio}, at::kDouble);
  at::Tensor shared = place.engine.empty(host.numel(), at::kDouble).copy_(host);
  place.messages.all_reduce_max(shared);
  host.copy_(shared);
  const double* v = host.const_data_ptr<double>();
  switcher->agree(op, bytes, {{v[0], v[1], v[2]}, v[3]});
}

}  // namespace zipccl
