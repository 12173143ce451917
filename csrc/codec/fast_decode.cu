// Code::fast, frame to tensor. The first warp of a block plans, then all of them decode: see fast_decode.cuh.
#include "codec/fast_decode.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr uint64_t kManyBlocks = 4;  // per processor: then there is a whole group for every resident block

// What a lane reads of a window or raw tile: all of it but dynamic bytes beyond the first 128.
struct LaneInput {
  uint2 sm[4];
  uint32_t planes[3];
  uint32_t dynamic;

  __device__ __forceinline__ uint2 sign_mantissas(int k) const { return sm[k]; }
  __device__ __forceinline__ uint32_t plane(int p) const { return planes[p]; }
};

__device__ __forceinline__ LaneInput load_tile(const Tile& t, uint32_t m, int lane) {
  LaneInput in = {};
  if (lane < dynamic_words(t)) in.dynamic = dynamic_word(t, lane);
  if (t.mode == static_cast<uint32_t>(TileMode::constant)) return in;
  const uint32_t padded = align_up(m);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t i = 256 * k + 8 * lane;
    if (i < padded) in.sm[k] = *reinterpret_cast<const uint2*>(t.unit + i);
  }
  if (t.mode == static_cast<uint32_t>(TileMode::window)) {
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      in.planes[p] = *reinterpret_cast<const uint32_t*>(t.unit + padded + kPlaneBytes * p + 4 * lane);
    }
  }
  return in;
}

// A warp's place for a tile.
struct WarpSpace {
  Exponents exponents;
  uint32_t dynamic[kDynamicWords];
};

// Puts the tile's dynamic bytes into shared memory; the first 128 have been loaded.
__device__ __forceinline__ const uint8_t* gather_dynamic(const Tile& t, uint32_t first, WarpSpace* space, int lane) {
  const uint32_t words = dynamic_words(t);
  if (words != 0) {
    __syncwarp();  // the warp's tile before this one has been read
    if (lane < words) space->dynamic[lane] = first;
    for (uint32_t i = kWarpSize + lane; i < words; i += kWarpSize) space->dynamic[i] = dynamic_word(t, i);
    __syncwarp();
  }
  return reinterpret_cast<const uint8_t*>(space->dynamic) + misalignment(t.dynamic);
}

// Values i .. i + 8 of the tile, of which those below m exist.
__device__ __forceinline__ void store_values(uint16_t* dst, uint32_t i, uint32_t m, bool wide, uint4 v) {
  if (wide && i + 8 <= m) {
    *reinterpret_cast<uint4*>(dst + i) = v;
    return;
  }
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (i + j < m) dst[i + j] = static_cast<uint16_t>(w[j / 2] >> (16 * (j % 2)));
  }
}

// kParts blocks share a group, kTilesPerWarp tiles to a warp.
template <int kTilesPerWarp>
__global__ void __launch_bounds__(kThreads) fast_decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  constexpr uint32_t kBlockTiles = kWarps * kTilesPerWarp;
  constexpr uint32_t kParts = kGroupTiles / kBlockTiles;
  __shared__ EscapePlaces places;
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
  if (first_tile >= tile_count(job.count)) return wait_for_previous();

  const uint8_t* frame = static_cast<const uint8_t*>(job.frame);
  if (threadIdx.x < 32) places.set(threadIdx.x);
  if (warp == 0) {
    // Not taken from launch.status, which is being written, maybe to host memory.
    Status status = Status::truncated;
    bool raw = false;
    if (job.available >= kHeaderBytes) {
      LaneTables tables = {};
      if (job.available >= tables_end(job.count)) tables = load_tables(frame, job.count, g, lane);
      const FrameHeader h = load_header(frame);
      status = check_header(h, job.available, launch.dtype, job.count);
      if (status == Status::ok) {
        raw = h.code == static_cast<uint8_t>(Code::raw);
        if (h.flags & kFlagChecksum) status = verify_checksum(launch.sums, i, h, lane);
        if (status == Status::ok && !raw) status = plan_group(frame, h, g, tables, &place, plan, lane);
        if (status != Status::ok && lane == 0) report(launch.status + i, status);
      }
    }
    if (lane == 0) {
      shared_status = status;
      shared_raw = raw;
    }
  }
  __syncthreads();
  if (shared_status != Status::ok) return wait_for_previous();

  uint16_t* dst = static_cast<uint16_t*>(job.dst) + first_tile * kTileValues;
  if (shared_raw) {
    const uint64_t left = job.count - first_tile * kTileValues;
    const uint64_t values = left < kBlockTiles * kTileValues ? left : kBlockTiles * kTileValues;
    block_copy(reinterpret_cast<uint8_t*>(dst), frame + kHeaderBytes + 2 * first_tile * kTileValues, 2 * values);
    return wait_for_previous();
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
    const Tile tile = find_tile(place, plans[t]);
    const uint8_t* dynamic = gather_dynamic(tile, in.dynamic, &spaces[warp], lane);
    good &= decode_tile(tile, in, dynamic, m, places, &spaces[warp].exponents, lane,
                        [&](int k, uint4 v) { store_values(to, 256 * k + 8 * lane, m, wide, v); });
  }
  if (!good && lane == 0) report(launch.status + i, Status::bad_escapes);
  wait_for_previous();
}

template <int kTilesPerWarp>
cudaError_t launch_with(const DecodeLaunch& launch, cudaStream_t stream) {
  const uint64_t blocks = launch.first_block[launch.n] * (kGroupTiles / (kWarps * kTilesPerWarp));
  return launch_behind(fast_decode_kernel<kTilesPerWarp>, blocks, 1, kThreads, 0, stream, launch);
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
