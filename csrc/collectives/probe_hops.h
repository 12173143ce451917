// Measures what pairs of ranks can exchange, for the choice of a topology.
#pragma once

#include "collectives/dynamiq.h"
#include "policy/topology.h"

namespace zipccl {

struct HopLinks {
  HopLink all;              // of the whole group
  HopLink inside, between;  // of nodes, and of ranks with the same place in them; as `all` where there are no nodes
};

// A collective call: every rank of the group must make it at the same place. Afterwards all hold the same numbers, the
// slowest rank's.
HopLinks measure_hops(const DynamiqPlace& place, int node_size, at::Device device);

}  // namespace zipccl
