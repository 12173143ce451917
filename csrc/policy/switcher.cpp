#include "policy/switcher.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace zipccl {

namespace {
// Zip only when it is expected to win by this factor: a tie is not worth the codec's memory traffic.
constexpr double kMargin = 1.03;
// Leave the current choice only when the other one is this much better.
constexpr double kHysteresis = 1.05;
// Try the other choice only where it is not expected to be this much worse.
constexpr double kHopeless = 1.5;
constexpr double kRatioWeight = 0.25;  // of the newest observation
constexpr double kTimeWeight = 0.5;    // of the newest agreement

double blend(double old, double fresh, double weight) {
  if (fresh <= 0) return old;
  return old <= 0 ? fresh : old + weight * (fresh - old);
}

Choice better(const Switcher::Times& t, double margin) {
  return t.zip * margin < t.raw ? Choice::zip : Choice::raw;
}
}  // namespace

void Switcher::set_measurements(const LinkModel& link, const CodecModel& codec) {
  link_ = link;
  codec_ = codec;
  measured_ = true;
}

Switcher::Key Switcher::key(Op op, uint64_t bytes) {
  int size_class = 0;
  while (bytes > 1) {
    bytes >>= 1;
    ++size_class;
  }
  return {op, size_class};
}

double Switcher::ratio(Op op) const {
  auto it = ratio_.find(op);
  return it == ratio_.end() ? prior_ratio_ : it->second;
}

Switcher::Times Switcher::expected(Op op, int world, uint64_t bytes, const Class* c) const {
  const Shape s = shape_of(op, world, static_cast<double>(bytes));
  Times t{raw_seconds(link_, s), zip_seconds(link_, codec_, s, ratio(op))};
  if (!c) return t;
  // The model errs by some factor that both choices share (other traffic, slow peers): carry it over from the one
  // that was timed to the one that was not.
  const Times model = t;
  if (c->agreed.raw > 0) t.raw = c->agreed.raw;
  if (c->agreed.zip > 0) t.zip = c->agreed.zip;
  if (c->agreed.raw > 0 && c->agreed.zip <= 0) t.zip = model.zip * c->agreed.raw / model.raw;
  if (c->agreed.zip > 0 && c->agreed.raw <= 0) t.raw = model.raw * c->agreed.zip / model.zip;
  return t;
}

std::string Switcher::describe(Op op, int world, uint64_t bytes, const Times& t, const Class* c) const {
  const Shape s = shape_of(op, world, static_cast<double>(bytes));
  char text[320];
  std::snprintf(text, sizeof text,
                "raw %.3f ms%s, zip %.3f ms%s expected; link measured at %.3f GB/s, %.3f of the bytes travel, zip pays "
                "below %.3f GB/s",
                t.raw * 1e3, c && c->agreed.raw > 0 ? " (timed)" : "", t.zip * 1e3,
                c && c->agreed.zip > 0 ? " (timed)" : "", link_.bytes_per_s / 1e9, ratio(op),
                break_even(codec_, s, ratio(op)) / 1e9);
  return text;
}

Decision Switcher::explain(Op op, int world, uint64_t bytes) const {
  auto it = classes_.find(key(op, bytes));
  const Class* c = it == classes_.end() ? nullptr : &it->second;
  Times t = expected(op, world, bytes, c);
  Choice choice = c && c->decided ? c->current : better(t, kMargin);
  return {choice, describe(op, world, bytes, t, c), t.raw, t.zip};
}

Decision Switcher::decide(Op op, int world, uint64_t bytes) {
  Class& c = classes_[key(op, bytes)];
  const Times t = expected(op, world, bytes, &c);
  if (!c.decided) {
    c.current = better(t, kMargin);
    c.decided = true;
  } else if (c.current == Choice::raw ? t.zip * kMargin * kHysteresis < t.raw : t.raw * kHysteresis < t.zip * kMargin) {
    c.current = c.current == Choice::raw ? Choice::zip : Choice::raw;
  }
  ++c.calls;
  Decision d{c.current, describe(op, world, bytes, t, &c), t.raw, t.zip};
  const double worse = c.current == Choice::raw ? t.zip / t.raw : t.raw / t.zip;
  if (c.calls % kExploreEvery == 0 && worse < kHopeless) {
    d.choice = c.current == Choice::raw ? Choice::zip : Choice::raw;
    d.reason = "trying the other choice; " + d.reason;
  }
  return d;
}

void Switcher::observe(Op op, uint64_t raw_bytes, uint64_t wire_bytes) {
  if (raw_bytes == 0) return;
  const double seen = std::min(static_cast<double>(wire_bytes) / static_cast<double>(raw_bytes), 1.5);
  ratio_[op] = ratio(op) + kRatioWeight * (seen - ratio(op));
}

void Switcher::record(Op op, uint64_t bytes, Choice choice, double seconds) {
  Class& c = classes_[key(op, bytes)];
  Mean& mean = choice == Choice::zip ? c.zip : c.raw;
  mean.sum += seconds;
  ++mean.n;
}

bool Switcher::wants_agreement(Op op, uint64_t bytes) const {
  auto it = classes_.find(key(op, bytes));
  return it != classes_.end() && it->second.calls > 0 && it->second.calls % kAgreeEvery == 0;
}

Switcher::Times Switcher::local_times(Op op, uint64_t bytes) const {
  auto it = classes_.find(key(op, bytes));
  if (it == classes_.end()) return {};
  return {it->second.raw.value(), it->second.zip.value()};
}

void Switcher::agree(Op op, uint64_t bytes, const Times& slowest) {
  Class& c = classes_[key(op, bytes)];
  c.agreed.raw = blend(c.agreed.raw, slowest.raw, kTimeWeight);
  c.agreed.zip = blend(c.agreed.zip, slowest.zip, kTimeWeight);
  c.raw = {};
  c.zip = {};
}

}  // namespace zipccl
