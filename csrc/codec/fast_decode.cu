// Code::fast, frame to tensor. The first warp of a block plans, then all of them decode: see fast_decode.cuh.
#include "codec/fast_decode.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr uint64_t kManyBlocks = 4;  // per processor: then there is a whole group for every resident block

// kParts blocks share a group, kTilesPerWarp tiles to a warp.
template <int kTilesPerWarp>
__global__ void __launch_bounds__(kThreads) fast_decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  constexpr uint32_t kBlockTiles = kWarps * kTilesPerWarp;
  constexpr uint32_t kParts = kGroupTiles / kBlockTiles;
  __shared__ GroupPlace place;
  __shared__ TilePlan plan[kGroupTiles];
  __shared__ WarpSpace spaces[kWarps];
  __shared__ Status shared_status;
  __shared__ bool shared_raw;

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint64_t block = blockIdx.x / kParts;
  const uint32_t first_in_group = blockIdx.x % kParts * kBlockTiles;
  const int i = find_job(launch, block);
  const DecodeJob& job = launch.job[i];
  const uint64_t g = block - launch.first_block[i];
  const uint64_t first_tile = g * kGroupTiles + first_in_group;
  if (first_tile >= tile_count(job.count)) return;

  const uint8_t* frame = static_cast<const uint8_t*>(job.frame);
  if (warp == 0) {
    // Not taken from launch.status, which may lie in host memory, far away.
    Status status = Status::truncated;
    bool raw = false;
    if (job.available >= kHeaderBytes) {
      LaneTables tables = {};
      if (job.available >= tables_end(job.count)) tables = load_tables(frame, job.count, g, lane);
      const FrameHeader h = load_header(frame);
      status = check_header(h, job.available, launch.dtype, job.count);
      if (status == Status::ok && (h.flags & kFlagChecksum)) {
        status = static_cast<Status>(*const_cast<volatile int32_t*>(launch.status + i));
      }
      raw = h.code == static_cast<uint8_t>(Code::raw);
      if (status == Status::ok && !raw) {
        status = plan_group(frame, h, g, tables, &place, plan, lane);
        if (status != Status::ok && lane == 0) report(launch.status + i, status);
      }
    }
    if (lane == 0) {
      shared_status = status;
      shared_raw = raw;
    }
  }
  __syncthreads();
  if (shared_status != Status::ok) return;

  uint16_t* dst = static_cast<uint16_t*>(job.dst) + first_tile * kTileValues;
  if (shared_raw) {
    const uint64_t left = job.count - first_tile * kTileValues;
    const uint64_t values = left < kBlockTiles * kTileValues ? left : kBlockTiles * kTileValues;
    block_copy(reinterpret_cast<uint8_t*>(dst), frame + kHeaderBytes + 2 * first_tile * kTileValues, 2 * values);
    return;
  }

  const bool wide = is_aligned(dst, 16);
  const uint64_t tiles_left = tile_count(job.count) - first_tile;
  const uint32_t tiles = tiles_left < kBlockTiles ? static_cast<uint32_t>(tiles_left) : kBlockTiles;
  const TilePlan* plans = plan + first_in_group;
  bool good = true;
  // The next tile is on its way while one is decoded.
  LaneInput next = {};
  if (warp < tiles) next = load_tile(find_tile(place, plans[warp]), values_in_tile(job.count, first_tile + warp), lane);
#pragma unroll 1
  for (uint32_t t = warp; t < tiles; t += kWarps) {
    const LaneInput in = next;
    const uint32_t after = t + kWarps;
    if (after < tiles)
      next = load_tile(find_tile(place, plans[after]), values_in_tile(job.count, first_tile + after), lane);
    const uint32_t m = values_in_tile(job.count, first_tile + t);
    uint16_t* to = dst + t * kTile;
    good &= decode_tile(find_tile(place, plans[t]), in, m, &spaces[warp], lane,
                        [&](int k, uint4 v) { store_values(to, 256 * k + 8 * lane, m, wide, v); });
  }
  if (!good && lane == 0) report(launch.status + i, Status::bad_escapes);
}

template <int kTilesPerWarp>
cudaError_t launch_with(const DecodeLaunch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.first_block[launch.n] * (kGroupTiles / (kWarps * kTilesPerWarp));
  fast_decode_kernel<kTilesPerWarp><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_fast_decode(const DecodeLaunch& launch, cudaStream_t stream) {
  int processors = 0;
  const cudaError_t error = processor_count(&processors);
  if (error != cudaSuccess) return error;
  // A few groups are spread over more blocks; many share the work on headers and tables.
  return launch.first_block[launch.n] <= kManyBlocks * processors ? launch_with<1>(launch, stream)
                                                                  : launch_with<4>(launch, stream);
}

}  // namespace cuda
}  // namespace zipccl
