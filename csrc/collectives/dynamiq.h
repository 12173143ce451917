// DynamiQ's reductions (sections 2.2 and 3.3): values are packed to a few bits, summed on their way, and packed again.
//
// First a light all-reduce of statistics, from which every rank plans alike how many bits each super-group gets. Then
// the tensor goes in blocks, each of one packed part per member of the team. Blocks follow each other through the steps
// of the topology (hops.h): while one is on the wire the next is packed. Sizes do not depend on values, so nobody waits
// to learn one. Every member unpacks the same bytes of the finished sum, so all end with the same bits.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "collectives/engine.h"
#include "collectives/hops.h"
#include "collectives/traffic.h"
#include "quantizer/quantizer.h"
#include "transport/pairs.h"

namespace zipccl {

struct DynamiqPlace {
  Engine& engine;  // scratch, and sums of raw values
  Pairs& pairs;
  const std::string& what;  // the call, for errors
};

// Some of the group's ranks, in the same order on each of them.
struct Team {
  std::vector<int> ranks;
  int me = 0;  // this rank's place among them

  int size() const { return static_cast<int>(ranks.size()); }
};

struct DynamiqOptions {
  quantizer::Widths widths = quantizer::Widths::fine;
  float bits = 5;
  bool correlated = true;  // rounding
  Topology topology = Topology::direct;
  Team team;                // whose sums are packed
  Team node;                // more than one: sums inside the node are raw, and each member carries its share outside
  int64_t block_bytes = 0;  // of values as fp32; > 0. Blocks are larger where parts would be too small
};

// Of a call, the same on every rank and never twice the same.
struct DynamiqKey {
  uint64_t seed = 0;
  uint64_t step = 0;
};

// values: fp32, bf16 or fp16, 1-D, contiguous; becomes scale x the sum over all ranks, in place.
// residual: undefined, or fp32 of the same size: error feedback for the second half. It is added to the values, and
// becomes what this rank has lost in packing finished sums and its share of what all lose in rounding them to the
// values' dtype. No node then.
Traffic dynamiq_all_reduce(const DynamiqPlace& place, const DynamiqOptions& options, const DynamiqKey& key,
                           at::Tensor values, float scale, at::Tensor residual = {});

// values [team x count] -> out [count] of any of the three dtypes: scale x the sum of this member's part, which is
// never packed a second time. No node.
Traffic dynamiq_reduce_scatter(const DynamiqPlace& place, const DynamiqOptions& options, const DynamiqKey& key,
                               const at::Tensor& values, at::Tensor out, float scale);

}  // namespace zipccl
