// allocate() on CUDA: docs/dynamiq.md, section 3, without a sort and without the host.
//
// Data layout     reduced statistics in, a plan out; scratch: see Scratch
// Thread mapping  chunks of 1024 super-groups of one domain, a block and a chunk, a thread and a super-group. Places
//                 follow from counts: a block adds up what the chunks before its own counted.
//                   count_keys      histogram of keys, in shared memory first
//                   choose_rows     one block per domain: cumulative counts, then the allocation, by one thread
//                   count_equal     per chunk: super-groups with the key of each boundary
//                   choose_widths   width of each super-group; per chunk: super-groups of each width
//                   place           slot of each super-group
// Bytes moved     statistics three times and a byte or two per super-group besides: well below 0.1 per coordinate
#include "quantizer/arguments.h"
#include "quantizer/device.cuh"
#include "quantizer/launch.cuh"
#include "quantizer/rows.h"

namespace zipccl {
namespace quantizer {
namespace cuda {
namespace {

constexpr uint32_t kChunk = 1024;
constexpr uint32_t kWarps = kChunk / kWarp;
constexpr uint32_t kClasses = kMaxWidth + 1;

struct Scratch {
  uint32_t* counts;        // per domain [kKeys]: super-groups of each key; cleared first
  Allocation* allocation;  // per domain
  uint32_t* equal;         // per chunk [kMaxWidth]
  uint32_t* of_width;      // per chunk [kClasses]
  uint8_t* widths;         // per super-group
  uint64_t bytes;
};

uint64_t chunks_of(const Layout& l) { return ceil_div(l.domain_groups, kChunk); }

Scratch scratch_of(const Shape& shape, const Layout& l, void* scratch) {
  uint64_t at = 0;
  const auto take = [&](uint64_t bytes) {
    const uint64_t begin = at;
    at += align_up(bytes);
    return static_cast<uint8_t*>(scratch) + begin;
  };
  const uint64_t chunks = shape.domains * chunks_of(l);
  Scratch s = {};
  s.counts = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t) * kKeys * shape.domains));
  s.allocation = reinterpret_cast<Allocation*>(take(sizeof(Allocation) * shape.domains));
  s.equal = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t) * kMaxWidth * chunks));
  s.of_width = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t) * kClasses * chunks));
  s.widths = take(shape.domains * l.domain_groups);
  s.bytes = at;
  return s;
}

struct Launch {
  Layout layout;
  Widths widths;
  uint32_t parts;
  uint32_t ranks;
  uint64_t super_groups;
  uint64_t chunks;  // of a domain
  const void* stats;
  Scratch scratch;
  Rows* rows;
  uint32_t* order;
  float* means;
};

// The super-group of a thread. Blocks: (chunk, domain).
struct Item {
  uint64_t domain, number;  // in the bucket
  bool exists;
};
__device__ __forceinline__ Item item_of(const Launch& p) {
  const uint64_t j = static_cast<uint64_t>(blockIdx.x) * kChunk + threadIdx.x;
  return {blockIdx.y, blockIdx.y * p.layout.domain_groups + j, j < p.layout.domain_groups};
}

__device__ __forceinline__ uint32_t key_at(const Launch& p, uint64_t super_group) {
  return p.widths == Widths::fine ? key_of(static_cast<const uint8_t*>(p.stats)[super_group])
                                  : key_of(static_cast<const uint16_t*>(p.stats)[super_group]);
}

// sums[c], c < n: what the chunks of this domain before this one counted of class c. All threads.
__device__ __forceinline__ void sum_earlier(const Launch& p, const uint32_t* counts, uint32_t n, uint32_t* sums) {
  if (threadIdx.x < n) sums[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t* of_domain = counts + blockIdx.y * p.chunks * n;
  const uint64_t total = static_cast<uint64_t>(blockIdx.x) * n;
  // A thread stays with one class: the stride is a multiple of n.
  const uint32_t stride = kChunk / n * n;
  uint32_t sum = 0;
  if (threadIdx.x < stride)
    for (uint64_t i = threadIdx.x; i < total; i += stride) sum += of_domain[i];
  if (sum != 0) atomicAdd(&sums[threadIdx.x % n], sum);
  __syncthreads();
}

__global__ void __launch_bounds__(kChunk) count_keys(Launch p) {
  __shared__ uint32_t counts[kKeys];
  for (uint32_t k = threadIdx.x; k < kKeys; k += kChunk) counts[k] = 0;
  __syncthreads();
  // Few blocks per domain, so that few counts are added to global memory.
  for (uint64_t j = static_cast<uint64_t>(blockIdx.x) * kChunk + threadIdx.x; j < p.layout.domain_groups;
       j += static_cast<uint64_t>(gridDim.x) * kChunk)
    atomicAdd(&counts[key_at(p, blockIdx.y * p.layout.domain_groups + j)], 1u);
  __syncthreads();
  for (uint32_t k = threadIdx.x; k < kKeys; k += kChunk)
    if (counts[k] != 0) atomicAdd(&p.scratch.counts[blockIdx.y * kKeys + k], counts[k]);
}

__global__ void __launch_bounds__(kChunk) choose_rows(Launch p) {
  constexpr uint32_t kEach = kKeys / kChunk;
  __shared__ uint32_t at_least[kKeys + 1];
  __shared__ uint32_t sums[kChunk];
  const uint32_t* counts = p.scratch.counts + blockIdx.x * kKeys;
  // A thread has kEach keys, the first thread the highest ones.
  const uint32_t top = kKeys - threadIdx.x * kEach;
  uint32_t own = 0;
  for (uint32_t i = 1; i <= kEach; ++i) own += counts[top - i];
  sums[threadIdx.x] = own;
  for (uint32_t d = 1; d < kChunk; d *= 2) {
    __syncthreads();
    const uint32_t before = threadIdx.x >= d ? sums[threadIdx.x - d] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
  }
  uint32_t sum = sums[threadIdx.x] - own;
  if (threadIdx.x == 0) at_least[kKeys] = 0;
  for (uint32_t i = 1; i <= kEach; ++i) {
    sum += counts[top - i];
    at_least[top - i] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const Allocation a = allocate_domain(p.layout, p.widths, p.parts, at_least);
  p.scratch.allocation[blockIdx.x] = a;
  p.rows[blockIdx.x] = a.rows;
}

__global__ void __launch_bounds__(kChunk) count_equal(Launch p) {
  __shared__ uint32_t counts[kMaxWidth];
  const Item item = item_of(p);
  if (threadIdx.x < kMaxWidth) counts[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t key = item.exists ? key_at(p, item.number) : kKeys;
  const Allocation& a = p.scratch.allocation[item.domain];
  for (uint32_t b = 0; b < kMaxWidth; ++b) {
    const uint32_t n = __popc(__ballot_sync(kFullWarp, key == a.at[b].key));
    if (threadIdx.x % kWarp == 0 && n != 0) atomicAdd(&counts[b], n);
  }
  __syncthreads();
  if (threadIdx.x < kMaxWidth)
    p.scratch.equal[(item.domain * p.chunks + blockIdx.x) * kMaxWidth + threadIdx.x] = counts[threadIdx.x];
  if (p.widths == Widths::paper && item.exists) {
    const uint16_t sum = static_cast<const uint16_t*>(p.stats)[p.super_groups + item.number];
    p.means[item.number] = div(bf16_to_float(sum), static_cast<float>(p.ranks));
  }
}

__global__ void __launch_bounds__(kChunk) choose_widths(Launch p) {
  __shared__ uint32_t earlier[kMaxWidth], of_width[kClasses];
  __shared__ uint32_t warps[kWarps][kMaxWidth];
  sum_earlier(p, p.scratch.equal, kMaxWidth, earlier);
  const Item item = item_of(p);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, before = (1u << lane) - 1;
  if (threadIdx.x < kClasses) of_width[threadIdx.x] = 0;
  const uint32_t key = item.exists ? key_at(p, item.number) : kKeys;
  const Allocation& a = p.scratch.allocation[item.domain];
  uint32_t equal[kMaxWidth];
#pragma unroll
  for (uint32_t b = 0; b < kMaxWidth; ++b) {
    const uint32_t same = __ballot_sync(kFullWarp, key == a.at[b].key);
    equal[b] = __popc(same & before);
    if (lane == 0) warps[warp][b] = __popc(same);
  }
  __syncthreads();
  if (threadIdx.x < kMaxWidth) {
    uint32_t sum = earlier[threadIdx.x];
    for (uint32_t w = 0; w < kWarps; ++w) {
      const uint32_t n = warps[w][threadIdx.x];
      warps[w][threadIdx.x] = sum;
      sum += n;
    }
  }
  __syncthreads();
#pragma unroll
  for (uint32_t b = 0; b < kMaxWidth; ++b) equal[b] += warps[warp][b];
  if (item.exists) {
    const uint32_t width = allocated_width(a, key, equal);
    p.scratch.widths[item.number] = static_cast<uint8_t>(width);
    atomicAdd(&of_width[width], 1u);
  }
  __syncthreads();
  if (threadIdx.x < kClasses)
    p.scratch.of_width[(item.domain * p.chunks + blockIdx.x) * kClasses + threadIdx.x] = of_width[threadIdx.x];
}

__global__ void __launch_bounds__(kChunk) place(Launch p) {
  __shared__ uint32_t earlier[kClasses];
  __shared__ uint32_t warps[kWarps][kClasses];
  sum_earlier(p, p.scratch.of_width, kClasses, earlier);
  const Item item = item_of(p);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane < kClasses) warps[warp][lane] = 0;
  __syncwarp();
  const uint32_t width = item.exists ? p.scratch.widths[item.number] : kClasses;
  const uint32_t same = __match_any_sync(kFullWarp, width);
  const uint32_t rank = __popc(same & ((1u << lane) - 1));
  if (item.exists && rank == 0) warps[warp][width] = __popc(same);
  __syncthreads();
  if (threadIdx.x < kClasses) {
    uint32_t sum = earlier[threadIdx.x];
    for (uint32_t w = 0; w < kWarps; ++w) {
      const uint32_t n = warps[w][threadIdx.x];
      warps[w][threadIdx.x] = sum;
      sum += n;
    }
  }
  __syncthreads();
  if (!item.exists) return;
  const Rows& rows = p.scratch.allocation[item.domain].rows;
  const uint64_t at = place_of(rows, p.layout.slots, width, uint64_t{warps[warp][width]} + rank);
  p.order[item.domain * p.parts * p.layout.slots + at] = static_cast<uint32_t>(item.number);
}

}  // namespace

uint64_t plan_scratch_bytes(const Shape& shape) {
  return shape.count == 0 ? 0 : scratch_of(shape, layout_of(shape), nullptr).bytes;
}

Status allocate(const Shape& shape, const void* stats, uint32_t ranks, void* plan, void* scratch, void* stream_) {
  const Status status = check_allocate(shape, stats, ranks, plan, scratch);
  if (status != Status::ok || shape.count == 0) return status;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  const Layout l = layout_of(shape);
  uint8_t* bytes = static_cast<uint8_t*>(plan);
  const Launch p = {l,
                    shape.widths,
                    shape.parts,
                    ranks,
                    shape.domains * l.domain_groups,
                    chunks_of(l),
                    stats,
                    scratch_of(shape, l, scratch),
                    reinterpret_cast<Rows*>(bytes),
                    reinterpret_cast<uint32_t*>(bytes + l.orders_at),
                    reinterpret_cast<float*>(bytes + l.means_at)};
  const uint64_t orders = sizeof(uint32_t) * shape.domains * shape.parts * l.slots;
  if (cudaMemsetAsync(p.scratch.counts, 0, sizeof(uint32_t) * kKeys * shape.domains, stream) != cudaSuccess ||
      cudaMemsetAsync(p.order, 0xFF, orders, stream) != cudaSuccess)  // kNoSuperGroup
    return Status::device_error;
  constexpr unsigned kMostDomains = 65535;  // of a grid's second dimension
  if (shape.domains > kMostDomains) return Status::unsupported;
  const dim3 chunks(static_cast<unsigned>(p.chunks), shape.domains);
  const dim3 few(static_cast<unsigned>(p.chunks < 64 ? p.chunks : 64), shape.domains);
  count_keys<<<few, kChunk, 0, stream>>>(p);
  choose_rows<<<shape.domains, kChunk, 0, stream>>>(p);
  count_equal<<<chunks, kChunk, 0, stream>>>(p);
  choose_widths<<<chunks, kChunk, 0, stream>>>(p);
  place<<<chunks, kChunk, 0, stream>>>(p);
  return launched();
}

}  // namespace cuda
}  // namespace quantizer
}  // namespace zipccl
