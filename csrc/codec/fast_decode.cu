// Code::fast, frame to tensor. The first warp of a team plans, then all of them decode: see fast_decode.cuh.
#include "codec/fast_decode.cuh"
#include "codec/team.cuh"

namespace zipccl {
namespace cuda {
namespace {

constexpr int kMostTeams = 4;
constexpr uint64_t kManyGroups = 4;  // per processor: then there is a whole one for every resident team

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
  if (t.has_more(m)) {
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

// What a team shares.
struct TeamSpace {
  WarpSpace warps[kWarps];
  TilePlan plan[kGroupTiles];
  GroupPlace place;
  Status status;
  bool raw;
};

struct Space {
  EscapePlaces places;
  TeamSpace teams[kMostTeams];
};

// By one warp: what a team has to know of group g of a job.
__device__ __forceinline__ void plan_team(const DecodeLaunch& launch, int i, uint64_t g, TeamSpace* space, int lane) {
  const DecodeJob& job = launch.job[i];
  const uint8_t* frame = static_cast<const uint8_t*>(job.frame);
  // Not taken from launch.status, which is being written, maybe to host memory.
  Status status = Status::bad_header;
  bool raw = false;
  if (job.available >= kHeaderBytes) {
    const LaneTables tables = load_tables(frame, job.available, job.count, g, lane);
    const FrameHeader h = load_header(frame);
    if (is_safe(h, job.available, launch.dtype, job.count)) {
      status = Status::ok;
      raw = h.code == static_cast<uint8_t>(Code::raw);
      if (h.flags & kFlagChecksum) status = verify_checksum(launch.sums, i, h, lane);
      if (status == Status::ok && !raw) status = plan_group(frame, h, g, tables, &space->place, space->plan, lane);
      if (status != Status::ok && lane == 0) report(launch.status + i, status);
    }
  }
  if (lane == 0) {
    space->status = status;
    space->raw = raw;
  }
}

// kParts teams share a group, kTilesPerWarp tiles to a warp.
template <int kTilesPerWarp>
constexpr uint32_t kParts = kGroupTiles / (kWarps * kTilesPerWarp);

// A team's share `work` of all the launch's groups.
template <int kTilesPerWarp, int kTeams>
__device__ __forceinline__ void decode_share(const DecodeLaunch& launch, uint64_t work, Space* shared,
                                             const Team<kTeams>& team) {
  constexpr uint32_t kTeamTiles = kWarps * kTilesPerWarp;
  TeamSpace* const space = &shared->teams[team.index];
  const uint64_t group = work / kParts<kTilesPerWarp>;
  const uint32_t first_in_group = work % kParts<kTilesPerWarp> * kTeamTiles;
  const int i = find_job(launch, group);
  const DecodeJob& job = launch.job[i];
  const uint64_t g = group - launch.first_block[i];
  const uint64_t first_tile = g * kGroupTiles + first_in_group;
  if (first_tile >= tile_count(job.count)) return;
  if (team.warp == 0) plan_team(launch, i, g, space, team.lane);
  team.sync();
  if (space->status != Status::ok) return;

  uint16_t* dst = static_cast<uint16_t*>(job.dst) + first_tile * kTileValues;
  if (space->raw) {
    const uint64_t left = job.count - first_tile * kTileValues;
    const uint64_t values = left < kTeamTiles * kTileValues ? left : kTeamTiles * kTileValues;
    const uint8_t* from = static_cast<const uint8_t*>(job.frame) + kHeaderBytes + 2 * first_tile * kTileValues;
    copy_by(kTeamThreads, team.thread(), reinterpret_cast<uint8_t*>(dst), from, 2 * values);
    return;
  }

  const bool wide = is_aligned(dst, 16);
  const uint64_t tiles_left = tile_count(job.count) - first_tile;
  const uint32_t tiles = tiles_left < kTeamTiles ? static_cast<uint32_t>(tiles_left) : kTeamTiles;
  const TilePlan* plans = space->plan + first_in_group;
  const int lane = team.lane;
  bool good = true;
  const auto load = [&](uint32_t t) {
    return load_tile(find_tile(space->place, plans[t]), values_in_tile(job.count, first_tile + t), lane);
  };
  // The next tile is on its way while one is decoded.
  LaneInput next = {};
  if (team.warp < tiles) next = load(team.warp);
#pragma unroll 1
  for (uint32_t t = team.warp; t < tiles; t += kWarps) {
    const LaneInput in = next;
    if (t + kWarps < tiles) next = load(t + kWarps);
    const uint32_t m = values_in_tile(job.count, first_tile + t);
    uint16_t* to = dst + t * kTile;
    WarpSpace* const own = &space->warps[team.warp];
    const uint8_t* dynamic = gather_dynamic(find_tile(space->place, plans[t]), in.dynamic, own, lane);
    good &= decode_tile(tile_code(plans[t]), in, dynamic, m, shared->places, &own->exponents, lane,
                        [&](int k, uint4 v) { store_values(to, 256 * k + 8 * lane, m, wide, v); });
  }
  if (!good && lane == 0) report(launch.status + i, Status::bad_escapes);
}

// Grid: for each share of the work a block of one team, or any number of blocks of several teams.
template <int kTilesPerWarp, int kTeams>
__global__ void __launch_bounds__(kTeams* kTeamThreads, kMostTeams / kTeams)
    fast_decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(16) uint8_t shared[];
  Space* const space = reinterpret_cast<Space*>(shared);
  const Team<kTeams> team;
  if (threadIdx.x < 32) space->places.set(threadIdx.x);
  if (kTeams > 1) __syncthreads();  // else one of decode_share() serves
  if (kTeams == 1) {                // and there are as many as there is work
    decode_share<kTilesPerWarp>(launch, blockIdx.x, space, team);
    return wait_for_previous();
  }
  const uint64_t end = launch.first_block[launch.n] * kParts<kTilesPerWarp>;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kTeams;
  for (uint64_t work = static_cast<uint64_t>(blockIdx.x) * kTeams + team.index; work < end; work += step) {
    decode_share<kTilesPerWarp>(launch, work, space, team);
    if (work + step < end) team.sync();  // before the plan is made anew
  }
  wait_for_previous();
}

template <int kTilesPerWarp, int kTeams>
cudaError_t launch_with(const DecodeLaunch& launch, cudaStream_t stream) {
  const auto kernel = fast_decode_kernel<kTilesPerWarp, kTeams>;
  constexpr int kShared = sizeof(Space) - (kMostTeams - kTeams) * sizeof(TeamSpace);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const uint64_t blocks = ceil_div(launch.first_block[launch.n] * kParts<kTilesPerWarp>, kTeams);
  return launch_behind(kernel, launch.processors, launch.processors.blocks_for(blocks), kTeams * kTeamThreads, kShared,
                       stream, launch);
}

}  // namespace

cudaError_t launch_fast_decode(const DecodeLaunch& launch, cudaStream_t stream) {
  // A few groups are spread over more blocks; many share the work on headers and tables.
  const uint64_t groups = launch.first_block[launch.n], processors = launch.processors.n;
  if (launch.processors.limited) {
    return groups <= processors ? launch_with<1, kMostTeams>(launch, stream)
                                : launch_with<4, kMostTeams>(launch, stream);
  }
  return groups <= kManyGroups * processors ? launch_with<1, 1>(launch, stream) : launch_with<4, 1>(launch, stream);
}

}  // namespace cuda
}  // namespace zipccl
