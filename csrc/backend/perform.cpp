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
                    Switcher* switcher, std::optional<Code>* code) {
  if (!switcher->measured()) measure(place, frame, switcher, options.choose_code ? code : nullptr);
  const uint64_t least = options.threshold(Mode::automatic);
  BackendOptions automatic = options;
  automatic.mode[static_cast<int>(op)] = Mode::automatic;
  Decision d = switcher->explain(op, place.world(), {bytes, op != Op::all_to_all}, choices(op, automatic));
  const uint64_t counted = op == Op::all_gather ? bytes * place.world() : bytes;  // as the calls themselves count
  if (counted < least)
    d = {Choice::raw, "below min_bytes (" + std::to_string(least) + ")", d.raw_seconds, d.zip_seconds};
  if (const Mode mode = options.of(op); mode != Mode::automatic)
    d.reason += std::string("; not asked here: this group has ") + op_name(op) + "=\"" +
                (mode == Mode::raw ? "raw" : "zip") + "\"";
  return d;
}

bool measures_first(Op op, CallSize size, const BackendOptions& options, const Switcher& switcher) {
  return switcher.wants_measurements(op, size, choices(op, options), options.threshold(options.of(op)));
}

Decision decide(const Place& place, Op op, CallSize size, const FrameOptions& frame, const BackendOptions& options,
                Switcher* switcher, std::optional<Code>* code) {
  const Switcher::Choices allowed = choices(op, options);
  const uint64_t least = options.threshold(options.of(op));
  if (measures_first(op, size, options, *switcher))
    measure(place, frame, switcher, options.choose_code ? code : nullptr);
  const bool say = options.log_decisions && place.rank() == 0;
  Decision d = switcher->decide(op, place.world(), size, allowed, least, say);
  if (say)
    std::fprintf(stderr, "zipccl: %s of %llu bytes: %s (%s)\n", op_name(op),
                 static_cast<unsigned long long>(size.bytes),
                 d.choice == Choice::raw       ? "raw"
                 : d.choice == Choice::zip_two ? "zip, design 2"
                                               : "zip",
                 d.reason.c_str());
  return d;
}

void agree(const Place& place, Op op, CallSize size, Switcher* switcher) {
  if (!switcher->wants_agreement(op, size)) return;
  if (!size.shared) switcher->agree_sizes(op, largest(place, switcher->own_sizes(op)));
  const std::vector<double> seen = switcher->seen(op, size);
  switcher->agree(op, size, seen.empty() ? seen : largest(place, seen));
}

}  // namespace zipccl
