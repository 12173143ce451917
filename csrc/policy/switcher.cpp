#include "policy/switcher.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace zipccl {

namespace {
// Zip only when it is expected to win by this factor: a tie is not worth the codec's memory traffic.
constexpr double kMargin = 1.03;
// Leave the current choice only for one that is this much better.
constexpr double kHysteresis = 1.05;
// Try a choice only where it is not expected to be this much worse than the best.
constexpr double kHopeless = 1.5;
constexpr double kHopelessInTrial = 3.0;  // the model alone speaks
// One exploration in so many goes to a choice that was given up: perhaps it was seen on a bad day.
constexpr uint64_t kSecondChance = 4;
constexpr double kNewest = 0.5;  // weight of the newest agreement
constexpr double kDrift = 1.3;   // times this much off what was agreed before are news

double blend(double old, double fresh) {
  if (fresh <= 0) return old;
  return old <= 0 ? fresh : old + kNewest * (fresh - old);
}

// Of seconds. Calls are slow by accident, but not fast.
double blend_seconds(double old, double fresh) { return fresh > 0 && kDrift * fresh < old ? fresh : blend(old, fresh); }

const char* name(Choice c) { return c == Choice::raw ? "raw" : c == Choice::zip_one ? "zip" : "zip by design 2"; }
}  // namespace

void Switcher::set_measurements(const LinkModel& link, const CodecModel& codec) {
  link_ = link;
  codec_ = codec;
  measured_ = true;
  ++knowledge_;
}

double Switcher::ratio(Op op) const {
  auto it = ratio_.find(op);
  return it == ratio_.end() ? prior_ratio_ : it->second;
}

// ---- flows and size classes ----

int Switcher::size_class(uint64_t bytes) {
  int n = 0;
  for (; bytes > 1; bytes >>= 1) ++n;
  return n;
}

Switcher::Key Switcher::flow_key(Op op, CallSize size) {
  return {op, size.shared, size.shared ? size_class(size.bytes) : kAnyClass};
}

const Switcher::Flow* Switcher::find_flow(Op op, CallSize size) const {
  auto it = flows_.find(flow_key(op, size));
  return it == flows_.end() ? nullptr : &it->second;
}

const Switcher::Timing* Switcher::find_timing(Op op, bool shared, int size_class) const {
  auto it = timings_.find({op, shared, size_class});
  return it == timings_.end() ? nullptr : &it->second;
}

Switcher::Mix Switcher::mix_of(const Flow* flow, CallSize size) {
  if (size.shared) return {{size_class(size.bytes), static_cast<double>(size.bytes), 1}};
  return flow ? flow->mix : Mix{};
}

bool Switcher::all_below(const Mix& mix, uint64_t least) {
  for (const Part& part : mix)
    if (part.bytes >= static_cast<double>(least) * part.calls) return false;
  return true;
}

void Switcher::Timing::add(Choice choice, double seconds, uint64_t raw_bytes, uint64_t wire_bytes) {
  double& best = fastest[static_cast<int>(choice)];
  if (seconds > 0 && (best <= 0 || seconds < best)) best = seconds;
  if (raw_bytes > 0) {
    ratio.sum += std::min(static_cast<double>(wire_bytes) / static_cast<double>(raw_bytes), 1.5);
    ++ratio.n;
  }
}

// ---- decisions ----

std::array<double, kChoiceCount> Switcher::expected(Op op, int world, bool shared, const Mix& mix) const {
  std::array<double, kChoiceCount> mean{};
  int calls = 0;
  for (const Part& part : mix) {
    std::array<double, kChoiceCount> t{};
    if (measured_) {
      const Shape s = shape_of(op, world, part.bytes / part.calls);
      t = {raw_seconds(link_, s), zip_seconds(link_, codec_, s, ratio(op)), zip_seconds(link_, codec_, s, ratio(op))};
    }
    if (const Timing* seen = find_timing(op, shared, part.size_class)) {
      const auto& agreed = seen->agreed;
      // What slows one choice against the model (slow peers, other traffic) slows the others too.
      double off = 0;
      for (int i = 0; i < kChoiceCount; ++i)
        if (agreed[i] > 0 && t[i] > 0) off = off > 0 ? std::min(off, agreed[i] / t[i]) : agreed[i] / t[i];
      for (int i = 0; i < kChoiceCount; ++i) t[i] = agreed[i] > 0 ? agreed[i] : off > 0 ? t[i] * off : t[i];
    }
    for (int i = 0; i < kChoiceCount; ++i) mean[i] += part.calls * t[i];
    calls += part.calls;
  }
  for (double& t : mean) t /= std::max(calls, 1);
  return mean;
}

Switcher::Choices Switcher::promising(const std::array<double, kChoiceCount>& t, const Choices& allowed,
                                      double hopeless) {
  double best = 0;
  for (int k = 0; k < kChoiceCount; ++k)
    if (allowed[k]) best = best > 0 ? std::min(best, t[k]) : t[k];
  Choices chosen{};
  for (int k = 0; k < kChoiceCount; ++k) chosen[k] = allowed[k] && t[k] <= best * hopeless;
  return chosen;
}

// Design 2 comes first: with equal expectations it is the better one, since most bytes move before anybody waits.
Decision Switcher::settle(Op op, int world, bool shared, const Mix& mix, const Choices& allowed, const Flow& flow,
                          bool say) const {
  const auto t = expected(op, world, shared, mix);
  auto cost = [&](Choice k) {
    double margin = zips(k) ? kMargin : 1.0;
    if (flow.decided && k == flow.current) margin /= kHysteresis;
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
  if (!say) return d;
  if (!measured_) {
    d.reason = "raw is not allowed";
    return d;
  }
  auto timed = [&](Choice k) {
    for (const Part& part : mix) {
      const Timing* seen = find_timing(op, shared, part.size_class);
      if (seen && seen->agreed[static_cast<int>(k)] > 0) return " (timed)";
    }
    return "";
  };
  double bytes = 0;
  int calls = 0;
  for (const Part& part : mix) bytes += part.bytes, calls += part.calls;
  char text[400];
  const Shape s = shape_of(op, world, bytes / std::max(calls, 1));
  const double pays_below = break_even(link_, codec_, s, ratio(op));
  const bool overruled = (link_.bytes_per_s < pays_below) != zips(d.choice) && (*timed(Choice::raw) || *timed(zip));
  std::snprintf(text, sizeof text,
                "raw %.3f ms%s, zip %.3f ms%s expected; link measured at %.3f GB/s, %.3f of the bytes travel, zip "
                "of this size pays below %.3f GB/s%s",
                d.raw_seconds * 1e3, timed(Choice::raw), d.zip_seconds * 1e3, timed(zip), link_.bytes_per_s / 1e9,
                ratio(op), pays_below / 1e9, overruled ? ", but the times of real calls say otherwise" : "");
  d.reason = text;
  return d;
}

Decision Switcher::explain(Op op, int world, CallSize size, const Choices& allowed) const {
  const Flow* flow = find_flow(op, size);
  const Mix mix = mix_of(nullptr, {size.bytes});
  return settle(op, world, size.shared, mix, allowed, flow ? *flow : Flow{}, /*say=*/true);
}

bool Switcher::wants_measurements(Op op, CallSize size, const Choices& allowed, uint64_t least) const {
  return !measured_ && allowed[0] && !all_below(mix_of(find_flow(op, size), size), size.shared ? 0 : least);
}

Decision Switcher::decide(Op op, int world, CallSize size, const Choices& allowed, uint64_t least, bool say) {
  change_.reset();
  const Choice first = allowed[0] ? Choice::raw : allowed[2] ? Choice::zip_two : Choice::zip_one;
  if (allowed[0] + allowed[1] + allowed[2] == 1)
    return {first, !say ? "" : allowed[0] ? "zip is not allowed" : "raw is not allowed"};
  Flow& flow = flows_[flow_key(op, size)];
  change_ = Change{flow_key(op, size), flow};
  const Mix mix = mix_of(&flow, size);
  flow.least = allowed[0] && !size.shared ? least : 0;
  flow.settled.reset();
  const uint64_t number = flow.calls++;
  ++flow.since;
  log_size(&flow, size);
  Decision d{first, ""};
  d.number = number;
  if (mix.empty()) {
    flow.due = true;
    if (say) d.reason = "no rank knows the others' sizes before the first call";
    return d;
  }
  if (all_below(mix, flow.least)) {
    flow.settled = settled(size, allowed, least);
    if (say) d.reason = "the calls before were below min_bytes (" + std::to_string(flow.least) + ")";
    return d;
  }
  const auto heaviest = std::max_element(mix.begin(), mix.end(), lighter);
  bool& tried = timings_[{op, size.shared, heaviest->size_class}].tried;
  if (!tried) {
    flow.trial_left = kTrial;
    change_->tried = &tried;
  }
  tried = true;

  d = settle(op, world, size.shared, mix, allowed, flow, say);
  if (say && !size.shared) d.reason = "as for the calls before: " + d.reason;
  d.number = number;
  if (flow.decided && d.choice != flow.current && flow.interval > kAgreeEvery) {
    flow.interval = kAgreeEvery;
    flow.since = 0;
    flow.explore_at = flow.calls + 2 * kAgreeEvery;
  }
  flow.current = d.choice;
  flow.decided = true;
  const bool trial = flow.trial_left > 0;
  d.timed = trial || flow.since > flow.interval - kTimed;
  const bool exploring = !trial && d.timed && flow.calls >= flow.explore_at;
  if (d.choice == Choice::raw) flow.settled = settled(size, allowed, least);
  if (!trial && !exploring) return d;
  d.trial = true;
  if (exploring) flow.explore_at = flow.calls + 2 * static_cast<uint64_t>(flow.interval);
  // In turn, from the choice that looks best: the first call is that one, and exploring begins with the next.
  const auto t = expected(op, world, size.shared, mix);
  Choices chosen = promising(t, allowed, trial ? kHopelessInTrial : kHopeless);
  uint64_t round = 0;
  if (exploring) {
    round = flow.explored++;
    const Timing* seen = find_timing(op, size.shared, heaviest->size_class);
    Choices given_up{};
    for (int i = 0; i < kChoiceCount; ++i) given_up[i] = allowed[i] && !chosen[i] && seen->agreed[i] > 0;
    if (round % kSecondChance == 1 && given_up != Choices{}) {
      chosen = given_up;
      round /= kSecondChance;
    }
  }
  int others = 0;
  for (int i = 0; i < kChoiceCount; ++i) others += chosen[i] && i != static_cast<int>(d.choice);
  const int turns = trial ? kTrial - flow.trial_left : others > 0 ? 1 + static_cast<int>(round % others) : 0;
  if (trial && --flow.trial_left == 0) flow.due = true;
  int k = static_cast<int>(d.choice);
  for (int turn = 0; turn < turns; ++turn) do
      k = (k + 1) % kChoiceCount;
    while (!chosen[k]);
  if (k == static_cast<int>(d.choice)) return d;
  d.choice = static_cast<Choice>(k);
  if (say) d.reason = std::string("trying ") + name(d.choice) + "; " + d.reason;
  return d;
}

void Switcher::take_back() {
  if (!change_) return;
  flows_[change_->key] = std::move(change_->before);
  if (change_->tried) *change_->tried = false;
  change_.reset();
}

// The last kAgreeEvery calls before an agreement. What was counted is flow->since, this call included.
void Switcher::log_size(Flow* flow, CallSize size) {
  if (!size.shared && flow->since > flow->interval - kAgreeEvery)
    flow->log.push_back({static_cast<double>(size.bytes)});
}

bool Switcher::raw_again(Op op, CallSize size, const Choices& allowed, uint64_t least) {
  auto it = flows_.find(flow_key(op, size));
  if (it == flows_.end()) return false;
  Flow& flow = it->second;
  if (flow.trial_left > 0 || flow.due || !(flow.settled == settled(size, allowed, least))) return false;
  if (flow.since + 1 >= flow.interval) return false;
  if (flow.since >= flow.interval - kTimed && !all_below(mix_of(&flow, size), flow.least)) return false;  // timed
  ++flow.calls;
  ++flow.since;
  log_size(&flow, size);
  return true;
}

// ---- what was seen, and agreed ----

void Switcher::record(Op op, CallSize size, uint64_t number, Choice choice, double seconds, uint64_t raw_bytes,
                      uint64_t wire_bytes) {
  if (size.shared) {
    timings_[{op, true, size_class(size.bytes)}].add(choice, seconds, raw_bytes, wire_bytes);
    return;
  }
  Flow& flow = flows_[flow_key(op, size)];
  const uint64_t first = flow.calls - flow.log.size();
  if (number < first || number >= flow.calls) return;  // its size was agreed before its time was known
  flow.log[number - first] = {flow.log[number - first].bytes, choice, seconds, raw_bytes, wire_bytes};
}

bool Switcher::wants_agreement(Op op, CallSize size) const {
  const Flow* flow = find_flow(op, size);
  if (!flow) return false;
  return flow->due || flow->since >= flow->interval;
}

std::vector<double> Switcher::own_sizes(Op op) const {
  std::vector<double> sizes;
  if (const Flow* flow = find_flow(op, {0, false}))
    for (const Logged& call : flow->log) sizes.push_back(call.bytes);
  return sizes;
}

void Switcher::agree_sizes(Op op, const std::vector<double>& largest) {
  Flow& flow = flows_[flow_key(op, {0, false})];
  std::map<int, Part> parts;
  for (size_t i = 0; i < flow.log.size(); ++i) {
    const Logged& call = flow.log[i];
    const int c = size_class(static_cast<uint64_t>(largest[i]));
    timings_[{op, false, c}].add(call.choice, call.seconds, call.raw_bytes, call.wire_bytes);
    Part& part = parts[c];
    part.size_class = c;
    part.bytes += largest[i];
    ++part.calls;
  }
  auto heaviest = [](const Mix& mix) {
    auto it = std::max_element(mix.begin(), mix.end(), lighter);
    return it == mix.end() ? kAnyClass : it->size_class;
  };
  const int before = heaviest(flow.mix);
  flow.log.clear();
  flow.mix.clear();
  for (const auto& [c, part] : parts) flow.mix.push_back(part);
  flow.changed = flow.changed || heaviest(flow.mix) != before;
}

std::vector<double> Switcher::seen(Op op, CallSize size) const {
  std::vector<double> values;
  const Flow* flow = find_flow(op, size);
  const Mix mix = mix_of(flow, size);
  if (flow && all_below(mix, flow->least)) return values;
  for (const Part& part : mix) {
    const Timing* t = find_timing(op, size.shared, part.size_class);
    const Timing none;
    if (!t) t = &none;
    values.insert(values.end(), t->fastest.begin(), t->fastest.end());
    values.push_back(t->ratio.value());
  }
  return values;
}

void Switcher::agree(Op op, CallSize size, const std::vector<double>& largest) {
  ++knowledge_;
  Flow& flow = flows_[flow_key(op, size)];
  const double* values = largest.data();
  double ratios = 0, bytes = 0;
  for (const Part& part : mix_of(&flow, size)) {
    if (largest.empty()) break;
    Timing& t = timings_[{op, size.shared, part.size_class}];
    for (int i = 0; i < kChoiceCount; ++i) {
      const double before = t.agreed[i], now = values[i];
      if (before > 0 && now > 0 && (now > kDrift * before || before > kDrift * now)) flow.changed = true;
      t.agreed[i] = blend_seconds(before, now);
    }
    t.fastest = {};
    t.ratio = {};
    if (values[kChoiceCount] > 0) {
      ratios += values[kChoiceCount] * part.bytes;
      bytes += part.bytes;
    }
    values += kSeen;
  }
  if (bytes > 0) ratio_[op] = blend(ratio_.count(op) ? ratio_[op] : 0, ratios / bytes);
  const bool confirmed = !flow.due && !flow.changed;
  const int most = size.shared ? kAgreeRarely : kAgreeRarelyUnshared;
  flow.interval = confirmed ? std::min(2 * flow.interval, most) : kAgreeEvery;
  flow.explore_at = std::min(flow.explore_at, flow.calls + 2 * static_cast<uint64_t>(flow.interval));
  flow.since = 0;
  flow.due = flow.changed = false;
}

}  // namespace zipccl
