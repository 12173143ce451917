// Which way packed gradients go: time of an all-reduce by each topology on a measured link. Pure arithmetic, no torch.
//
// With n ranks and P packed bytes, every topology moves 2 (n - 1) / n P bytes per rank; they differ in how many
// exchanges follow each other and how many messages an exchange has. Errors differ too: they grow with the number of
// hops, so direct is taken unless another is clearly faster.
#pragma once

#include <cstdint>

namespace zipccl {

enum class Topology : uint8_t { direct, ring, butterfly };
constexpr int kTopologyCount = 3;
inline const char* topology_name(Topology t) {
  constexpr const char* names[kTopologyCount] = {"direct", "ring", "butterfly"};
  return names[static_cast<int>(t)];
}

// Of a set of ranks that exchange messages, the slowest rank's. Seconds and bytes.
struct HopLink {
  double alpha = 0;             // an exchange of one small message each way
  double message = 0;           // each further message of an exchange
  double bytes_per_s = 1;       // received per rank when everybody sends to everybody
  double pair_bytes_per_s = 1;  // when everybody sends to one other
};

inline double hop_seconds(Topology t, int n, double packed_bytes, const HopLink& link) {
  if (n == 1) return 0;
  const double moved = 2.0 * (n - 1) / n * packed_bytes;
  int levels = 0;
  for (int reach = 1; reach < n; reach *= 2) ++levels;
  switch (t) {
    case Topology::direct:
      return 2 * (link.alpha + (n - 2) * link.message) + moved / link.bytes_per_s;
    case Topology::ring:
      return 2 * (n - 1) * link.alpha + moved / link.pair_bytes_per_s;
    case Topology::butterfly:
      return 2 * levels * link.alpha + moved / link.pair_bytes_per_s;
  }
  return 0;
}

struct HopChoice {
  Topology topology = Topology::direct;
  bool by_node = false;  // raw inside the nodes, `topology` between them
  double seconds = 0;
};

// What another way must win by before its larger error is worth it.
constexpr double kHopMargin = 1.5;

// Ranks beyond which the errors of a ring's hops are no longer worth any gain.
constexpr int kLongestRing = 16;

inline HopChoice best_topology(int n, double packed_bytes, const HopLink& link) {
  HopChoice best{Topology::direct, false, hop_seconds(Topology::direct, n, packed_bytes, link)};
  for (Topology t : {Topology::butterfly, Topology::ring}) {
    const double s = hop_seconds(t, n, packed_bytes, link);
    if (t == Topology::ring && n > kLongestRing) continue;
    if (s * kHopMargin < best.seconds) best = {t, false, s};
  }
  return best;
}

// With nodes of `node` ranks: raw_bytes of the tensor move inside them, packed ones between ranks of the same place.
inline HopChoice best_topology(int n, int node, double raw_bytes, double packed_bytes, const HopLink& all,
                               const HopLink& inside, const HopLink& between) {
  const HopChoice flat = best_topology(n, packed_bytes, all);
  HopChoice best = best_topology(n / node, packed_bytes / node, between);
  best.by_node = true;
  best.seconds += hop_seconds(Topology::direct, node, raw_bytes, inside);
  // Fewer ranks add their errors outside, so no margin.
  return best.seconds < flat.seconds ? best : flat;
}

}  // namespace zipccl
