#include "policy/switcher.h"

#include <algorithm>
#include <cstdio>

namespace zipccl {

namespace {
// Zip only when it is expected to win by this factor: a tie is not worth the codec's memory traffic.
constexpr double kMargin = 1.03;
// Leave the current choice only for one that is this much better.
constexpr double kHysteresis = 1.05;
// Try a choice only where it is not expected to be this much worse than the best.
constexpr double kHopeless = 1.5;
constexpr double kHopelessInTrial = 3.0;  // the model alone speaks
constexpr double kNewest = 0.5;           // weight of the newest agreement

double blend(double old, double fresh) {
  if (fresh <= 0) return old;
  return old <= 0 ? fresh : old + kNewest * (fresh - old);
}

const char* name(Choice c) { return c == Choice::raw ? "raw" : c == Choice::zip_one ? "zip" : "zip by design 2"; }
}  // namespace

void Switcher::set_measurements(const LinkModel& link, const CodecModel& codec) {
  link_ = link;
  codec_ = codec;
  measured_ = true;
}

Switcher::Key Switcher::key(Op op, uint64_t bytes) {
  int size_class = 0;
  for (; bytes > 1; bytes >>= 1) ++size_class;
  return {op, size_class};
}

const Switcher::Class* Switcher::find(Op op, uint64_t bytes) const {
  auto it = classes_.find(key(op, bytes));
  return it == classes_.end() ? nullptr : &it->second;
}

double Switcher::ratio(Op op) const {
  auto it = ratio_.find(op);
  return it == ratio_.end() ? prior_ratio_ : it->second;
}

std::array<double, kChoiceCount> Switcher::expected(Op op, int world, uint64_t bytes, const Class* c) const {
  std::array<double, kChoiceCount> t{};
  if (measured_) {
    const Shape s = shape_of(op, world, static_cast<double>(bytes));
    t = {raw_seconds(link_, s), zip_seconds(link_, codec_, s, ratio(op)), zip_seconds(link_, codec_, s, ratio(op))};
  }
  if (!c) return t;
  // What slows one choice against the model (slow peers, other traffic) slows the others too.
  double off = 0;
  for (int i = 0; i < kChoiceCount; ++i)
    if (c->agreed[i] > 0 && t[i] > 0) off = off > 0 ? std::min(off, c->agreed[i] / t[i]) : c->agreed[i] / t[i];
  for (int i = 0; i < kChoiceCount; ++i) t[i] = c->agreed[i] > 0 ? c->agreed[i] : off > 0 ? t[i] * off : t[i];
  return t;
}

// Design 2 comes first: with equal expectations it is the better one, since most bytes move before anybody waits.
Decision Switcher::settle(Op op, int world, uint64_t bytes, const Choices& allowed, const Class& c) const {
  const auto t = expected(op, world, bytes, &c);
  auto cost = [&](Choice k) {
    double margin = zips(k) ? kMargin : 1.0;
    if (c.decided && k == c.current) margin /= kHysteresis;
    return t[static_cast<int>(k)] * margin;
  };
  Decision d{Choice::raw, "", t[0], 0};
  bool found = false;
  for (Choice k : {Choice::zip_two, Choice::zip_one, Choice::raw}) {
    if (!allowed[static_cast<int>(k)]) continue;
    if (!found || cost(k) < cost(d.choice)) d.choice = k;
    found = true;
  }
  const Choice zip = zips(d.choice) ? d.choice : allowed[2] ? Choice::zip_two : Choice::zip_one;
  d.zip_seconds = t[static_cast<int>(zip)];
  if (!measured_) {
    d.reason = "raw is not allowed";
    return d;
  }
  char text[320];
  const Shape s = shape_of(op, world, static_cast<double>(bytes));
  std::snprintf(text, sizeof text,
                "raw %.3f ms%s, zip %.3f ms%s expected; link measured at %.3f GB/s, %.3f of the bytes travel, zip pays "
                "below %.3f GB/s",
                d.raw_seconds * 1e3, c.agreed[0] > 0 ? " (timed)" : "", d.zip_seconds * 1e3,
                c.agreed[static_cast<int>(zip)] > 0 ? " (timed)" : "", link_.bytes_per_s / 1e9, ratio(op),
                break_even(codec_, s, ratio(op)) / 1e9);
  d.reason = text;
  return d;
}

Decision Switcher::explain(Op op, int world, uint64_t bytes, const Choices& allowed) const {
  const Class* c = find(op, bytes);
  return settle(op, world, bytes, allowed, c ? *c : Class{});
}

Switcher::Choices Switcher::promising(Op op, int world, uint64_t bytes, const Choices& allowed, const Class& c) const {
  const auto t = expected(op, world, bytes, &c);
  double best = 0;
  for (int k = 0; k < kChoiceCount; ++k)
    if (allowed[k]) best = best > 0 ? std::min(best, t[k]) : t[k];
  Choices chosen{};
  const double limit = best * (c.calls <= kTrial ? kHopelessInTrial : kHopeless);
  for (int k = 0; k < kChoiceCount; ++k) chosen[k] = allowed[k] && t[k] <= limit;
  return chosen;
}

Decision Switcher::decide(Op op, int world, uint64_t bytes, const Choices& allowed) {
  Class& c = classes_[key(op, bytes)];
  Decision d = settle(op, world, bytes, allowed, c);
  c.current = d.choice;
  c.decided = true;
  const uint64_t call = c.calls++;
  const bool trial = call < kTrial, exploring = c.calls % kExploreEvery == 0;
  if (!trial && !exploring) return d;
  d.trial = true;
  const Choices chosen = promising(op, world, bytes, allowed, c);
  // In turn, from the choice that looks best: call 0 is that one, and exploring begins with the next.
  const int turns = static_cast<int>(trial ? call : 1 + c.calls / kExploreEvery % (kChoiceCount - 1));
  int k = static_cast<int>(d.choice);
  for (int turn = 0; turn < turns; ++turn) do
      k = (k + 1) % kChoiceCount;
    while (!chosen[k]);
  if (k == static_cast<int>(d.choice)) return d;
  d.choice = static_cast<Choice>(k);
  d.reason = std::string("trying ") + name(d.choice) + "; " + d.reason;
  return d;
}

void Switcher::record(Op op, uint64_t bytes, Choice choice, double seconds, uint64_t raw_bytes, uint64_t wire_bytes) {
  Class& c = classes_[key(op, bytes)];
  double& fastest = c.fastest[static_cast<int>(choice)];
  if (seconds > 0 && (fastest <= 0 || seconds < fastest)) fastest = seconds;
  if (raw_bytes > 0) {
    c.ratio.sum += std::min(static_cast<double>(wire_bytes) / static_cast<double>(raw_bytes), 1.5);
    ++c.ratio.n;
  }
}

bool Switcher::wants_agreement(Op op, uint64_t bytes) const {
  const Class* c = find(op, bytes);
  return c && (c->calls == kTrial || (c->calls > 0 && c->calls % kAgreeEvery == 0));
}

Switcher::Seen Switcher::seen(Op op, uint64_t bytes) const {
  Seen s;
  const Class* c = find(op, bytes);
  if (!c) return s;
  s.seconds = c->fastest;
  s.ratio = c->ratio.value();
  return s;
}

void Switcher::agree(Op op, uint64_t bytes, const Seen& largest) {
  Class& c = classes_[key(op, bytes)];
  for (int i = 0; i < kChoiceCount; ++i) c.agreed[i] = blend(c.agreed[i], largest.seconds[i]);
  if (largest.ratio > 0) ratio_[op] = blend(ratio_.count(op) ? ratio_[op] : 0, largest.ratio);
  c.fastest = {};
  c.ratio = {};
}

}  // namespace zipccl
