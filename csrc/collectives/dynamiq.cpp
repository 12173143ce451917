#include "collectives/dynamiq.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "collectives/error.h"
#include "collectives/place.h"
#include "collectives/quantizing.h"

namespace zipccl {

namespace {
constexpr uint64_t kOwnSeed = 0x9e3779b97f4a7c15;  // sets a member's random numbers apart

using Tensors = std::vector<at::Tensor>;
using Parcels = std::vector<Pairs::Parcel>;

struct Range {
  int64_t begin, count;
};

// Part i of n of `count` things, in whole multiples of `align`.
Range part_of(int64_t count, int n, int i, int64_t align) {
  const int64_t units = (count + align - 1) / align;
  auto at = [&](int64_t k) { return std::min(count, (units / n * k + units % n * k / n) * align); };
  return {at(i), at(i + 1) - at(i)};
}

enum class Reduction { all, scatter };

// How statistics are agreed on, and the bits left for the codes. The quantiser counts a super-group's statistics once
// for each direction that values take. Reduced by slices and then gathered, each member receives 2 (n - 1) / n times
// that, as it does of the values in an all-reduce, but twice what a reduce-scatter allows for; sent to everybody at
// once, n - 1 times. Few members do the latter: on a fast link an exchange saved is worth more than the bytes. What is
// too much comes off the codes.
struct StatisticsPlan {
  bool at_once;
  float bits;
};
StatisticsPlan statistics_plan(const DynamiqOptions& options, Reduction reduction) {
  const bool fine = options.widths == quantizer::Widths::fine, all = reduction == Reduction::all;
  const auto n = static_cast<float>(options.team.size());
  const float once = fine ? 0.03125f : 0.125f;  // bits per coordinate
  const float left = options.bits - once * (all ? n / 2 - 1 : n - 1);
  if (fine && left >= 1 && options.team.size() <= (all ? 4 : 2)) return {true, left};
  return {false, all ? options.bits : std::max(1.0f, options.bits - once)};  // one bit is the least there is
}

// Which end of the bucket packing begins at. Statistics end there, as what they have read last is still in the GPU's
// cache. The first of several blocks is at the beginning; a block alone is packed from where most of what the first
// step sends lies, which is away from the own part: that is needed last.
quantizer::Order packing_order(const DynamiqOptions& options, int64_t blocks) {
  if (blocks > 1) return quantizer::Order::ascending;
  const int n = options.team.size();
  const std::vector<HopStep> steps = reduce_steps(options.topology, n, options.team.me);
  int beyond = 0;  // chunks in the second half, less those in the first one
  for (const Hop& hop : steps.front().sends)
    for (int c : hop.chunks) beyond += (2 * c + 1 > n) - (2 * c + 1 < n);
  return beyond > 0 ? quantizer::Order::descending : quantizer::Order::ascending;
}

quantizer::Order opposite(quantizer::Order order) {
  return order == quantizer::Order::ascending ? quantizer::Order::descending : quantizer::Order::ascending;
}

// Agrees on a plan: statistics are reduced by members a slice each, then gathered; or by each member alone. Three
// stages, so that it can run beside other things.
class Agreement {
 public:
  Agreement(const DynamiqPlace& place, const Team& team, bool at_once, Plan* plan, Traffic* traffic)
      : place_(place), team_(team), at_once_(at_once), plan_(*plan), traffic_(*traffic) {}

  void measure(const at::Tensor& bucket, quantizer::Order order) {
    stats_ = plan_.statistics(place_.engine, bucket, order);
    const int64_t own = slice(team_.me).numel();
    all_ = place_.engine.empty(own * team_.size(), stats_.scalar_type()).view({team_.size(), own});
    all_[team_.me].copy_(slice(team_.me), /*non_blocking=*/true);
    Parcels sends, receives;
    for (int i = 0; i < team_.size(); ++i) {
      if (i == team_.me) continue;
      sends.push_back({team_.ranks[i], as_bytes(slice(i))});
      receives.push_back({team_.ranks[i], as_bytes(all_[i])});
    }
    begin(sends, receives);
  }

  void reduce() {
    exchange_.wait();
    at::Tensor own = slice(team_.me);
    if (own.numel() > 0) own.copy_(plan_.stats_maximum() ? all_.amax(0) : all_.sum(0), /*non_blocking=*/true);
    if (at_once_) return place_.pairs.skip();
    Parcels sends, receives;
    for (int i = 0; i < team_.size(); ++i) {
      if (i == team_.me) continue;
      sends.push_back({team_.ranks[i], as_bytes(own)});
      receives.push_back({team_.ranks[i], as_bytes(slice(i))});
    }
    begin(sends, receives);
  }

  void allocate() {
    exchange_.wait();
    plan_.allocate(place_.engine, stats_, team_.size());
  }

 private:
  // What member i reduces.
  at::Tensor slice(int i) const {
    if (at_once_) return stats_;
    const Range r = part_of(stats_.numel(), team_.size(), i, 16);
    return stats_.narrow(0, r.begin, r.count);
  }
  void begin(const Parcels& sends, const Parcels& receives) {
    for (const auto& p : receives) traffic_.wire_bytes += p.bytes.numel();
    exchange_ = place_.pairs.begin(sends, receives, stats_.device());
  }

  const DynamiqPlace& place_;
  const Team& team_;
  const bool at_once_;
  Plan& plan_;
  Traffic& traffic_;
  at::Tensor stats_, all_;
  Pairs::Exchange exchange_;
};

// Of a sum of values that were rounded before. Strata shared with those roundings would lean on their errors, which
// biases the sum; the paper accepts that.
quantizer::Key key_of_sums(const DynamiqOptions& options, quantizer::Key key) {
  if (options.widths == quantizer::Widths::paper || !options.correlated) return key;
  key.seed += kOwnSeed * (options.team.me + 1);
  key.index = 0;
  key.of = 1;
  return key;
}

// One block on its way through the steps of a topology: one packed part per member, its sink.
class Block {
 public:
  // part(c): number of the part whose sink is member c, which grows with c. order: of packing.
  Block(const DynamiqPlace& place, const DynamiqOptions& options, const Plan& plan, quantizer::Key key,
        quantizer::Order order, at::Tensor values, std::function<uint64_t(int)> part, Traffic* traffic)
      : place_(place),
        team_(options.team),
        plan_(plan),
        key_(key),
        sums_key_(key_of_sums(options, key)),
        order_(order),
        values_(std::move(values)),
        part_(std::move(part)),
        reduce_(reduce_steps(options.topology, team_.size(), team_.me)),
        gather_(gather_steps(reduce_)),
        arrived_(team_.size()),
        traffic_(*traffic) {}

  // Step s: packs what has come together so far, and sends it on.
  void reduce(int s) {
    exchange_.wait();
    std::vector<int> sent;
    for (const Hop& hop : reduce_[s].sends) sent.insert(sent.end(), hop.chunks.begin(), hop.chunks.end());
    std::sort(sent.begin(), sent.end());
    const at::Tensor out = parts(sent.size());
    std::vector<Range> runs;  // of `sent`: fresh parts that follow each other are packed by one call
    for (size_t i = 0; i < sent.size(); ++i) {
      const bool follows = i > 0 && arrived_[sent[i - 1]].empty() && arrived_[sent[i]].empty() &&
                           part_(sent[i]) == part_(sent[i - 1]) + 1;
      if (!follows) runs.push_back({static_cast<int64_t>(i), 0});
      ++runs.back().count;
    }
    if (order_ == quantizer::Order::descending) std::reverse(runs.begin(), runs.end());
    for (const Range& r : runs) pack(sent[r.begin], r.count, out.narrow(0, bytes(r.begin), bytes(r.count)));
    Parcels sends, receives;
    for (const Hop& hop : reduce_[s].sends) {
      const int64_t at = std::lower_bound(sent.begin(), sent.end(), hop.chunks[0]) - sent.begin();
      sends.push_back({team_.ranks[hop.peer], out.narrow(0, at * plan_.part_bytes(), bytes(hop.chunks.size()))});
    }
    size_t received = 0;
    for (const Hop& hop : reduce_[s].receives) received += hop.chunks.size();
    const at::Tensor in = parts(received);
    int64_t at = 0;
    for (const Hop& hop : reduce_[s].receives) {
      receives.push_back({team_.ranks[hop.peer], in.narrow(0, at, bytes(hop.chunks.size()))});
      for (int c : hop.chunks) {
        arrived_[c].push_back(in.narrow(0, at, plan_.part_bytes()));
        at += plan_.part_bytes();
      }
    }
    begin(sends, receives);
  }

  // After the last step: the own part's sum, to be kept here. out[0] is coordinate `first`.
  void finish(const at::Tensor& out, uint64_t first, float scale) {
    exchange_.wait();
    quantizer::Combine job = sum_of(team_.me, 1);
    job.scale = scale;
    job.out = values_of(out, first, scale * static_cast<float>(team_.size()));
    plan_.combine(job);
    arrived_.clear();
  }

  // Step s of the way back. Before the first one the own part's sum is packed.
  void gather(int s, const at::Tensor& residual) {
    wait_and_place();
    if (s == 0) {
      finished_ = parts(team_.size());
      quantizer::Combine job = sum_of(team_.me, 1);
      job.packed_out = slot(team_.me).mutable_data_ptr();
      if (residual.defined()) {
        job.residual = residual.mutable_data_ptr<float>();
        job.key.rounding = quantizer::Rounding::nearest;
      }
      plan_.combine(job);
      arrived_.clear();
      joined_.clear();
    }
    Parcels sends, receives;
    for (const Hop& hop : gather_[s].sends) sends.push_back({team_.ranks[hop.peer], joined(hop.chunks)});
    for (const Hop& hop : gather_[s].receives) {
      const bool in_place = hop.chunks.size() == 1;
      receives.push_back({team_.ranks[hop.peer], in_place ? slot(hop.chunks[0]) : parts(hop.chunks.size())});
      if (!in_place) to_place_.emplace_back(hop.chunks, receives.back().bytes);
    }
    begin(sends, receives);
  }

  // After the last step: all sums, in place of the values.
  void unpack(float scale) {
    wait_and_place();
    quantizer::Combine job;
    job.part = part_(0);
    job.parts = team_.size();
    job.packed = {finished_.const_data_ptr(), 0, 1};
    job.scale = scale;
    job.out = values_of(values_, 0, scale * static_cast<float>(team_.size()));
    plan_.combine(job);
    finished_.reset();
  }

 private:
  int64_t bytes(size_t parts) const { return static_cast<int64_t>(parts) * plan_.part_bytes(); }
  at::Tensor parts(size_t n) const { return place_.engine.empty(bytes(n), at::kByte); }
  at::Tensor slot(int c) const { return finished_.narrow(0, bytes(c), plan_.part_bytes()); }

  // Own values and what has arrived of a run of parts.
  quantizer::Combine sum_of(int c, uint64_t run) {
    quantizer::Combine job;
    job.part = part_(c);
    job.parts = run;
    job.x = values_of(values_, 0, 1);
    job.key = key_;
    const Tensors& in = arrived_[c];
    if (in.empty()) return job;
    job.key = sums_key_;
    // One beside the other where one exchange has brought them.
    bool beside = true;
    for (size_t i = 1; i < in.size(); ++i)
      beside &= in[i].const_data_ptr<uint8_t>() == in[i - 1].const_data_ptr<uint8_t>() + plan_.part_bytes();
    joined_.push_back(beside ? in[0] : at::cat(in));
    job.packed = {joined_.back().const_data_ptr(), static_cast<uint64_t>(plan_.part_bytes()),
                  static_cast<uint32_t>(in.size())};
    return job;
  }

  void pack(int c, uint64_t run, const at::Tensor& out) {
    quantizer::Combine job = sum_of(c, run);
    job.order = order_;
    job.packed_out = out.mutable_data_ptr();
    plan_.combine(job);
    arrived_[c].clear();
    joined_.clear();
  }

  at::Tensor joined(const std::vector<int>& chunks) const {
    if (chunks.size() == 1) return slot(chunks[0]);
    Tensors all;
    for (int c : chunks) all.push_back(slot(c));
    return at::cat(all);
  }

  void wait_and_place() {
    exchange_.wait();
    for (const auto& [chunks, received] : to_place_)
      for (size_t i = 0; i < chunks.size(); ++i)
        slot(chunks[i]).copy_(received.narrow(0, bytes(i), plan_.part_bytes()), /*non_blocking=*/true);
    to_place_.clear();
  }

  void begin(const Parcels& sends, const Parcels& receives) {
    for (const auto& p : receives) traffic_.wire_bytes += p.bytes.numel();
    exchange_ = place_.pairs.begin(sends, receives, values_.device());
  }

  const DynamiqPlace& place_;
  const Team& team_;
  const Plan& plan_;
  quantizer::Key key_, sums_key_;
  quantizer::Order order_;
  at::Tensor values_;
  std::function<uint64_t(int)> part_;
  std::vector<HopStep> reduce_, gather_;
  std::vector<Tensors> arrived_;                                   // packed contributions, by chunk
  Tensors joined_;                                                 // the same where they had to be copied together
  at::Tensor finished_;                                            // packed sums, by chunk
  std::vector<std::pair<std::vector<int>, at::Tensor>> to_place_;  // received for several slots at once
  Pairs::Exchange exchange_;
  Traffic& traffic_;
};

// Calls stage(b, s) for every block and stage, each block's in order; the newest block first, since it has nothing to
// wait for: what it packs is packed while the older blocks' exchanges are on the way.
void in_a_row(int64_t blocks, int stages, const std::function<void(int64_t, int)>& stage) {
  for (int64_t turn = 0; turn < blocks + stages - 1; ++turn) {
    const int64_t newest = std::min(turn, blocks - 1), oldest = std::max<int64_t>(0, turn - stages + 1);
    for (int64_t b = newest; b >= oldest; --b) stage(b, static_cast<int>(turn - b));
  }
}

// Parts of so many super-groups at least: all parts are as long as the longest, and what is not filled is lost.
constexpr int64_t kFewestSlots = 16;

// ranks: how many parts a block is cut into, in nodes and between them.
int64_t blocks_of(const DynamiqOptions& options, int64_t count, int ranks) {
  const int64_t wanted = (count * 4 + options.block_bytes - 1) / options.block_bytes;
  const int64_t most = count / (ranks * kFewestSlots * quantizer::kSuperGroup);
  return std::max<int64_t>(1, std::min(wanted, most));
}

quantizer::Shape shape_of(const DynamiqOptions& options, float bits, int64_t count, int domains, int64_t parts) {
  quantizer::Shape shape;
  shape.count = static_cast<uint64_t>(count);
  shape.domains = static_cast<uint32_t>(domains);
  shape.parts = static_cast<uint32_t>(parts);
  shape.widths = options.widths;
  shape.bits = bits;
  return shape;
}

// Every member packs every part of a block exactly once, so its place in the team is its stratum.
quantizer::Key key_of(const DynamiqOptions& options, const DynamiqKey& key, uint32_t bucket) {
  quantizer::Key k;
  k.seed = key.seed;
  k.step = key.step;
  k.bucket = bucket;
  k.index = options.correlated ? options.team.me : 0;
  k.of = options.correlated ? options.team.size() : 1;
  if (!options.correlated) k.seed += kOwnSeed * (options.team.me + 1);
  return k;
}

int steps_of(const DynamiqOptions& options) {
  return static_cast<int>(reduce_steps(options.topology, options.team.size(), options.team.me).size());
}

void scale_alone(at::Tensor values, float scale) {
  if (scale != 1) values.mul_(scale);
}

// One plan for all of it, blocks one behind the other.
void all_reduce_flat(const DynamiqPlace& place, const DynamiqOptions& options, const DynamiqKey& key, at::Tensor values,
                     float scale, at::Tensor residual, Traffic* traffic) {
  const int n = options.team.size(), steps = steps_of(options);
  const int64_t blocks = blocks_of(options, values.numel(), n);
  const StatisticsPlan statistics = statistics_plan(options, Reduction::all);
  Plan plan(shape_of(options, statistics.bits, values.numel(), 1, blocks * n), values.device(), place.what);
  Agreement agreement(place, options.team, statistics.at_once, &plan, traffic);
  const quantizer::Order order = packing_order(options, blocks);
  agreement.measure(values, opposite(order));
  agreement.reduce();
  agreement.allocate();
  std::vector<std::unique_ptr<Block>> running(blocks);
  in_a_row(blocks, 2 * steps + 1, [&](int64_t b, int s) {
    auto part = [b, n](int c) { return static_cast<uint64_t>(b * n + c); };
    if (s == 0)
      running[b] = std::make_unique<Block>(place, options, plan, key_of(options, key, 0), order, values, part, traffic);
    if (s < steps) return running[b]->reduce(s);
    if (s < 2 * steps) return running[b]->gather(s - steps, residual);
    running[b]->unpack(scale);
    running[b].reset();
  });
}

// With error feedback: the sums are made in fp32, whatever the dtype, and what rounding them to it loses is carried,
// too.
void all_reduce_fed_back(const DynamiqPlace& place, const DynamiqOptions& options, const DynamiqKey& key,
                         at::Tensor values, float scale, at::Tensor residual, Traffic* traffic) {
  at::Tensor sums = values.to(at::kFloat);
  sums.add_(residual.nan_to_num(0, 0, 0));  // what overflowed once is lost, not carried for ever
  residual.zero_();  // what others keep now stays theirs; this rank's part of it is written while packing
  all_reduce_flat(place, options, key, sums, scale, residual, traffic);
  if (values.is_same(sums)) return;
  values.copy_(sums, /*non_blocking=*/true);
  if (scale == 0) return;
  const Range own = part_of(values.numel(), options.team.size(), options.team.me, 1);  // all ranks lose the same
  auto part = [&](const at::Tensor& t) { return t.narrow(0, own.begin, own.count); };
  part(residual).add_(part(sums) - part(values), /*alpha=*/1 / scale);
}

// A block whose sums inside the node are raw: an exchange of raw shares before the packed ones, and one after them. It
// has a plan of its own, for the share this rank carries outside.
class NodeBlock {
 public:
  NodeBlock(const DynamiqPlace& place, const DynamiqOptions& options, quantizer::Key key, at::Tensor values,
            Traffic* traffic)
      : place_(place), options_(options), key_(key), values_(std::move(values)), traffic_(*traffic) {}

  // scatter | sum, measure | reduce statistics | allocate, first step | ... | unpack, gather | wait
  static int stages(const DynamiqOptions& options) { return 2 * steps_of(options) + 5; }

  void advance(int s, float scale) {
    const int steps = steps_of(options_), last = stages(options_) - 1;
    const bool outside = steps > 0 && share(node().me).numel() > 0;  // blocks may have fewer values than ranks
    if (s == 0) return scatter();
    if (s == last) return exchange_.wait();
    if (s == 1) {
      sum();
      if (!outside) return steps > 0 ? place_.pairs.skip() : void();
      const StatisticsPlan statistics = statistics_plan(options_, Reduction::all);
      plan_ = std::make_unique<Plan>(shape_of(options_, statistics.bits, sum_.numel(), 1, options_.team.size()),
                                     values_.device(), place_.what);
      agreement_ = std::make_unique<Agreement>(place_, options_.team, statistics.at_once, plan_.get(), &traffic_);
      return agreement_->measure(sum_, opposite(packing_order(options_, 1)));
    }
    if (s == last - 1) {
      outside ? block_->unpack(scale) : scale_alone(sum_, scale);
      return gather();
    }
    if (!outside) return place_.pairs.skip();  // where the shares of others need an exchange
    if (s == 2) return agreement_->reduce();
    if (s == 3) {
      agreement_->allocate();
      auto part = [](int c) { return static_cast<uint64_t>(c); };
      block_ =
          std::make_unique<Block>(place_, options_, *plan_, key_, packing_order(options_, 1), sum_, part, &traffic_);
    }
    if (s - 3 < steps) return block_->reduce(s - 3);
    block_->gather(s - 3 - steps, {});
  }

 private:
  // Raw values of everybody's share to whom it belongs.
  void scatter() {
    Parcels sends, receives;
    for (int i = 0; i < node().size(); ++i) {
      arrived_.push_back(i == node().me ? share(i) : place_.engine.empty(share(node().me).numel(), dtype()));
      if (i == node().me) continue;
      sends.push_back({node().ranks[i], as_bytes(share(i))});
      receives.push_back({node().ranks[i], as_bytes(arrived_[i])});
    }
    begin(sends, receives);
  }

  // The node's sum of the own share, in fp32.
  void sum() {
    exchange_.wait();
    sum_ = place_.engine.empty(share(node().me).numel(), at::kFloat);
    std::vector<Engine::Addend> addends;
    for (int i = 0; i < node().size(); ++i)
      addends.push_back({arrived_[i], false, "rank " + std::to_string(node().ranks[i])});
    SumOptions options;
    frame_dtype(dtype(), &options.in);
    options.out = DType::f32;
    if (sum_.numel() > 0) place_.engine.decode_sum(addends, options, sum_, place_.what);
    arrived_.clear();
  }

  // The finished share to the others of the node, and theirs.
  void gather() {
    share(node().me).copy_(sum_, /*non_blocking=*/true);
    block_.reset();
    plan_.reset();
    sum_.reset();
    Parcels sends, receives;
    for (int i = 0; i < node().size(); ++i) {
      if (i == node().me) continue;
      sends.push_back({node().ranks[i], as_bytes(share(node().me))});
      receives.push_back({node().ranks[i], as_bytes(share(i))});
    }
    begin(sends, receives);
  }

  const Team& node() const { return options_.node; }
  at::ScalarType dtype() const { return values_.scalar_type(); }
  at::Tensor share(int i) const {
    const Range r = part_of(values_.numel(), node().size(), i, quantizer::kSuperGroup);
    return values_.narrow(0, r.begin, r.count);
  }
  void begin(const Parcels& sends, const Parcels& receives) {
    exchange_ = place_.pairs.begin(sends, receives, values_.device());
  }

  const DynamiqPlace& place_;
  const DynamiqOptions& options_;
  quantizer::Key key_;
  at::Tensor values_;
  Tensors arrived_;
  at::Tensor sum_;
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Agreement> agreement_;
  std::unique_ptr<Block> block_;
  Pairs::Exchange exchange_;
  Traffic& traffic_;
};

void all_reduce_by_node(const DynamiqPlace& place, const DynamiqOptions& options, const DynamiqKey& key,
                        at::Tensor values, float scale, Traffic* traffic) {
  const int64_t count = values.numel();
  const int64_t blocks = blocks_of(options, count, options.team.size() * options.node.size());
  std::vector<std::unique_ptr<NodeBlock>> running(blocks);
  in_a_row(blocks, NodeBlock::stages(options), [&](int64_t b, int s) {
    if (s == 0) {
      const Range r = part_of(count, static_cast<int>(blocks), static_cast<int>(b), quantizer::kSuperGroup);
      const auto bucket = static_cast<uint32_t>(b * options.node.size() + options.node.me);
      running[b] = std::make_unique<NodeBlock>(place, options, key_of(options, key, bucket),
                                               values.narrow(0, r.begin, r.count), traffic);
    }
    running[b]->advance(s, scale);
    if (s == NodeBlock::stages(options) - 1) running[b].reset();
  });
}
}  // namespace

Traffic dynamiq_all_reduce(const DynamiqPlace& place, const DynamiqOptions& options, const DynamiqKey& key,
                           at::Tensor values, float scale, at::Tensor residual) {
  at::NoGradGuard no_grad;
  Traffic traffic;
  const int ranks = options.team.size() * std::max(options.node.size(), 1);
  traffic.raw_bytes = static_cast<uint64_t>(2.0 * (ranks - 1) / ranks * static_cast<double>(values.nbytes()));
  if (ranks == 1) return scale_alone(values, scale), traffic;
  if (values.numel() == 0) return traffic;
  if (options.node.size() > 1)
    all_reduce_by_node(place, options, key, values, scale, &traffic);
  else if (residual.defined())
    all_reduce_fed_back(place, options, key, values, scale, residual, &traffic);
  else
    all_reduce_flat(place, options, key, values, scale, {}, &traffic);
  return traffic;
}

Traffic dynamiq_reduce_scatter(const DynamiqPlace& place, const DynamiqOptions& options, const DynamiqKey& key,
                               const at::Tensor& values, at::Tensor out, float scale) {
  at::NoGradGuard no_grad;
  Traffic traffic;
  const int n = options.team.size();
  const int64_t count = out.numel();
  traffic.raw_bytes = static_cast<uint64_t>(values.nbytes()) / n * (n - 1);
  if (n == 1) {
    out.copy_(values);
    return scale_alone(out, scale), traffic;
  }
  if (count == 0) return traffic;
  const int64_t blocks = blocks_of(options, values.numel(), n);
  const int steps = steps_of(options);
  const StatisticsPlan statistics = statistics_plan(options, Reduction::scatter);
  Plan plan(shape_of(options, statistics.bits, values.numel(), n, blocks), values.device(), place.what);
  Agreement agreement(place, options.team, statistics.at_once, &plan, &traffic);
  const quantizer::Order order = packing_order(options, blocks);
  agreement.measure(values, opposite(order));
  agreement.reduce();
  agreement.allocate();
  std::vector<std::unique_ptr<Block>> running(blocks);
  in_a_row(blocks, steps + 1, [&](int64_t b, int s) {
    auto part = [b, blocks](int c) { return static_cast<uint64_t>(c * blocks + b); };
    if (s == 0)
      running[b] =
          std::make_unique<Block>(place, options, plan, key_of(options, key, 0), order, values, part, &traffic);
    if (s < steps) return running[b]->reduce(s);
    running[b]->finish(out, static_cast<uint64_t>(options.team.me * count), scale);
    running[b].reset();
  });
  return traffic;
}

}  // namespace zipccl
