#include "collectives/hops.h"

namespace zipccl {

namespace {
// v: position of a rank in the tree of a chunk, (rank - chunk) mod n. The sink is 0; on the ring v sends to v - 1, in
// the binomial tree v sends to v without its lowest bit, in step log2(that bit).
std::vector<int> chunks_where(int n, int me, int remainder, int modulus) {
  std::vector<int> chunks;
  for (int c = 0; c < n; ++c)
    if (compression_index(n, me, c) % modulus == remainder) chunks.push_back(c);
  return chunks;
}
}  // namespace

std::vector<HopStep> reduce_steps(Topology topology, int n, int me) {
  std::vector<HopStep> steps;
  if (n == 1) return steps;
  switch (topology) {
    case Topology::direct: {
      HopStep all;
      for (int i = 1; i < n; ++i) {  // each begins with another peer
        const int to = (me + i) % n, from = (me - i + n) % n;
        all.sends.push_back({to, {to}});
        all.receives.push_back({from, {me}});
      }
      steps.push_back(all);
      break;
    }
    case Topology::ring: {
      const int to = (me - 1 + n) % n, from = (me + 1) % n;
      for (int s = 0; s < n - 1; ++s) steps.push_back({{{to, {(me + 1 + s) % n}}}, {{from, {(from + 1 + s) % n}}}});
      break;
    }
    case Topology::butterfly: {
      for (int bit = 1; bit < n; bit *= 2) {
        const int to = (me - bit + n) % n, from = (me + bit) % n;
        steps.push_back({{{to, chunks_where(n, me, bit, 2 * bit)}}, {{from, chunks_where(n, from, bit, 2 * bit)}}});
      }
      break;
    }
  }
  return steps;
}

std::vector<HopStep> gather_steps(const std::vector<HopStep>& reduce) {
  std::vector<HopStep> steps;
  for (auto it = reduce.rbegin(); it != reduce.rend(); ++it) steps.push_back({it->receives, it->sends});
  return steps;
}

}  // namespace zipccl
