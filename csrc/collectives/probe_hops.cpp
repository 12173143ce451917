#include "collectives/probe_hops.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "transport/messages.h"

namespace zipccl {

namespace {
constexpr int64_t kSmall = 64;       // bytes of a message that measures latency
constexpr int64_t kLarge = 4 << 20;  // bytes received per rank when the rate is measured
constexpr int kRuns = 6;

class Probe {
 public:
  Probe(const DynamiqPlace& place, at::Device device) : place_(place), device_(device) {}

  HopLink link(const Team& team) {
    HopLink l;
    const int n = team.size();
    if (n == 1) return l;
    const int next = (team.me + 1) % n, last = (team.me + n - 1) % n;
    std::vector<int> others, from;
    for (int i = 1; i < n; ++i) {
      others.push_back(team.ranks[(team.me + i) % n]);
      from.push_back(team.ranks[(team.me + n - i) % n]);
    }
    const std::vector<int> one{team.ranks[next]}, one_from{team.ranks[last]};
    const double alpha = seconds(one, one_from, kSmall), all_small = seconds(others, from, kSmall);
    const double pair = seconds(one, one_from, kLarge), all_large = seconds(others, from, kLarge / (n - 1));
    l.alpha = alpha;
    l.message = n > 2 ? std::max(0.0, all_small - alpha) / (n - 2) : 0;
    const auto large = static_cast<double>(kLarge);
    l.pair_bytes_per_s = large / std::max(pair - alpha, 0.01 * pair);
    l.bytes_per_s = large / std::max(all_large - all_small, 0.01 * all_large);
    return l;
  }

 private:
  // The fastest of some runs; the first, which may build connections, does not count.
  double seconds(const std::vector<int>& to, const std::vector<int>& from, int64_t bytes) {
    std::vector<Pairs::Parcel> sends, receives;
    for (int r : to) sends.push_back({r, place_.engine.empty(bytes, at::kByte).zero_()});
    for (int r : from) receives.push_back({r, place_.engine.empty(bytes, at::kByte)});
    at::Tensor word = place_.engine.empty(1, at::kLong).fill_(0);
    double best = 0;
    for (int i = 0; i <= kRuns; ++i) {
      place_.engine.to_host(word);  // reading a word back makes the device finish
      Stopwatch watch;
      place_.pairs.begin(sends, receives, device_).wait();
      place_.engine.to_host(word);
      const double s = watch.lap();
      if (i == 1 || (i > 1 && s < best)) best = s;
    }
    return best;
  }

  const DynamiqPlace& place_;
  at::Device device_;
};
}  // namespace

HopLinks measure_hops(const DynamiqPlace& place, int node_size, at::Device device) {
  at::NoGradGuard no_grad;
  const int world = place.pairs.world(), rank = place.pairs.rank();
  Probe probe(place, device);
  Team all, inside, between;
  for (int r = 0; r < world; ++r) {
    all.ranks.push_back(r);
    if (r / node_size == rank / node_size) inside.ranks.push_back(r);
    if (r % node_size == rank % node_size) between.ranks.push_back(r);
  }
  all.me = rank;
  inside.me = rank % node_size;
  between.me = rank / node_size;
  HopLinks links;
  links.all = probe.link(all);
  links.inside = node_size > 1 ? probe.link(inside) : links.all;
  links.between = node_size > 1 ? probe.link(between) : links.all;

  // Costs, so that the maximum over ranks is the slowest rank's; as bit-exact doubles every rank then decides alike.
  std::vector<double> costs;
  for (const HopLink* l : {&links.all, &links.inside, &links.between})
    costs.insert(costs.end(), {l->alpha, l->message, 1 / l->bytes_per_s, 1 / l->pair_bytes_per_s});
  at::Tensor shared = place.engine.empty(static_cast<int64_t>(costs.size()), at::kDouble);
  shared.copy_(at::tensor(costs, at::kDouble));
  Messages(place.pairs.inner(), c10d::kUnsetTimeout).all_reduce_max(shared);
  const std::vector<int64_t> bits = place.engine.to_host(shared.view(at::kLong));
  std::memcpy(costs.data(), bits.data(), costs.size() * sizeof(double));
  const double* v = costs.data();
  for (HopLink* l : {&links.all, &links.inside, &links.between}) {
    *l = {v[0], v[1], 1 / v[2], 1 / v[3]};
    v += 4;
  }
  place.engine.release_scratch();
  return links;
}

}  // namespace zipccl
