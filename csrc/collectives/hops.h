// The way of partial sums through a team of ranks (DynamiQ sections 2.2 and 3.3). Pure arithmetic, no torch.
//
// A tensor is cut into as many chunks as there are ranks; rank c is the sink of chunk c. Contributions to a chunk
// travel along a tree towards its sink: every rank packs its own values plus what it received, once, and sends that on.
//
//   direct     depth 1: everybody sends to the sink, which adds n - 1 packed contributions at once
//   ring       a path: n - 1 hops
//   butterfly  a binomial tree: log2 n hops, any number of ranks
//
// The finished sums come back the same ways in reverse. Steps are the same on every rank, up to rotation.
#pragma once

#include <vector>

#include "policy/topology.h"

namespace zipccl {

// What one member exchanges with another in one step.
struct Hop {
  int peer;
  std::vector<int> chunks;
};

struct HopStep {
  std::vector<Hop> sends, receives;
};

// Steps of member `me` of n towards the sinks.
std::vector<HopStep> reduce_steps(Topology topology, int n, int me);

// And back: the same steps, last first, with sends and receives exchanged.
std::vector<HopStep> gather_steps(const std::vector<HopStep>& reduce);

// Which of the n compressions of a chunk is done by member `me`: 0 is the sink's.
inline int compression_index(int n, int me, int chunk) { return (me - chunk + n) % n; }

}  // namespace zipccl
