// DynamiQ's quantiser: gradient coordinates <-> packed parts of a size fixed beforehand.
//
// INTRODUCTION
//   A bucket of `count` coordinates is cut into super-groups of 256. Every rank measures its own (statistics()), the
//   caller all-reduces the measurements (8 to 32 bits per 256 coordinates), and allocate() turns the sums into a plan,
//   the same on every rank: how many bits each super-group gets, and in which part of the bucket, at which place, it
//   travels. combine() then does all the work: it adds up packed parts and plain values in fp32 and writes the sum as a
//   packed part again, or as plain values. Quantise, decompress, decompress-add, decompress-add-recompress and
//   decompress-sum-of-n are all combine() with some of its inputs left out.
//
//   docs/dynamiq.md specifies plan, packed bytes and arithmetic. The CPU functions and the CUDA functions write the
//   same bytes.
//
// PARTS
//   The bucket has `domains` equal domains of whole coordinates (an all-reduce has 1; a reduce-scatter one per rank, as
//   each rank's shard must stay together), and every domain is dealt into `parts` parts. Parts are numbered
//   domain * parts + i. All parts of a bucket have the same number of slots (a slot holds one super-group), the same
//   widths slot by slot, and the same packed size part_bytes(), which follows from the Shape alone: message sizes are
//   known on the host before anything has been measured. In a ring, rank r's shard is a run of parts, one per block
//   of the pipeline. Slots left over when the super-groups do not fill the parts hold nothing.
//
// CONTRACTS
//   - Memory is the caller's. Nothing here allocates, throws, or keeps state; every function may be called from many
//   threads.
//   - Plans, packed parts and scratch are 16-byte aligned; values to their dtype (to 16 bytes for full speed).
//   - Packed parts come from ranks that hold the same plan: any bytes decode to some values without touching memory
//     outside the arguments', but nothing detects damage.
//   - Same arguments, same bytes: on every device, and in every run.
//   - A super-group that holds a NaN or an infinity decodes to NaN as a whole; one that holds zeros alone, to zeros.
//
// No torch in this layer.
#pragma once

#include <cstdint>

#include "codec/status.h"
#include "format/frame.h"

namespace zipccl {
namespace quantizer {

constexpr uint32_t kGroup = 16;        // coordinates that share a scale
constexpr uint32_t kSuperGroup = 256;  // coordinates that share a width

enum class Widths : uint8_t {
  fine = 0,   // 0 to 12 bits by rate-distortion, uniform levels
  paper = 1,  // 2, 4 or 8 bits by the paper's thresholds, mean subtracted, non-uniform levels
};

// What every rank must agree on before anything else.
struct Shape {
  uint64_t count = 0;    // coordinates of the bucket; a multiple of domains
  uint32_t domains = 1;  // at least 1
  uint32_t parts = 1;    // per domain, at least 1
  Widths widths = Widths::fine;
  float bits = 5;  // per coordinate, everything counted: statistics, scales, values, padding. 1 to 16
};

// ---- Sizes ----------------------------------------------------------------------------------------------------
// Of a Shape that check() accepts. All zero for an empty bucket.

// bad_argument, or ok.
Status check(const Shape& shape);

uint64_t super_groups(const Shape& shape);  // of the bucket; a domain's last one may be short
uint64_t slots(const Shape& shape);         // of a part

// Bytes of one packed part, a multiple of 16. parts * domains * part_bytes() + stats bytes is at most
// bits * count / 8, and less than 48 bytes per part below it; except that a bucket too small for its budget gets what
// it needs at least, and one with more budget than the widest code can use gets less.
uint64_t part_bytes(const Shape& shape);

// What statistics() writes and the ranks all-reduce, element by element.
struct StatsFormat {
  DType dtype;     // u8 or bf16
  bool maximum;    // reduce by maximum; else by sum
  uint64_t count;  // elements
  uint64_t bytes;
};
StatsFormat stats_format(const Shape& shape);

uint64_t plan_bytes(const Shape& shape);

// Where a CUDA call begins: with the first super-groups or slots, or with the last ones. (The CPU takes no notice.) The
// bytes do not depend on it, but what one call reads last is still in the cache for the next one, if that begins there:
// statistics() that descend go with a combine() that ascends, and the other way round.
enum class Order : uint8_t { ascending, descending };

// ---- Arguments ------------------------------------------------------------------------------------------------

enum class Place : uint8_t {
  bucket,  // coordinates where the bucket has them: value of coordinate c at data[c - first]
  parts,   // slots one after the other, part by part, whole super-groups: slot s of the call's k-th part begins at
           // data[(k * slots + s) * 256]. What a slot does not hold is read as anything and written as 0.
};

// Plain values. dtype: f32, bf16 or f16; written values are rounded to nearest even.
struct Values {
  const void* data = nullptr;  // null: none
  DType dtype = DType::f32;
  Place place = Place::bucket;
  uint64_t first = 0;  // Place::bucket: coordinate that data[0] holds; the call's parts need none before it
  // Widths::paper: how often the super-group's mean is contained in each value: 1 in what a rank has of its own (it is
  // subtracted), 0 in a sum of packed parts, n in the finished sum of n ranks (it is added), 1 in their average.
  float means = 0;
};

// Packed inputs: input i of the call's k-th part begins at data + i * stride + k * part_bytes.
struct Packed {
  const void* data = nullptr;  // null: none
  uint64_t stride = 0;         // bytes, a multiple of 16
  uint32_t n = 0;
  uint32_t skip = UINT32_MAX;  // an input to leave out, such as a rank's own place in a receive buffer
};

enum class Rounding : uint8_t { stochastic, nearest };

// Where the random numbers of a packed output come from. Coordinates and super-groups count from the bucket's
// beginning, so that they do not depend on how it is cut.
struct Key {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint32_t bucket = 0;
  // The `of` roundings that a coordinate goes through, on all ranks together, are stratified (correlated rounding):
  // each has its own index below `of`. of = 1: independent.
  uint32_t index = 0;
  uint32_t of = 1;
  Rounding rounding = Rounding::stochastic;
};

// y = scale * (x + packed[0] + packed[1] + ...), in fp32, in this order, each step rounded to nearest.
struct Combine {
  uint64_t part = 0;   // first of a run of parts, within [0, domains * parts)
  uint64_t parts = 1;  // of the run
  Order order = Order::ascending;

  Values x;  // added first
  Packed packed;
  float scale = 1;  // 1, or 1 / n for an average

  // One of the two outputs.
  void* packed_out = nullptr;  // y rounded to packed parts, one after the other. May be one of the packed inputs itself
  Key key;
  Values out;  // y. May be x itself (same data, dtype, place), not overlap it otherwise

  // Error feedback, with packed_out: fp32, in the bucket's places; `residual[c]` is added to y before it is packed and
  // then becomes what packing lost. Null: none. residual[0] belongs to coordinate residual_first.
  float* residual = nullptr;
  uint64_t residual_first = 0;
};

// ---- CPU ------------------------------------------------------------------------------------------------------
// Status: bad_argument, or ok.

// Measures the bucket: stats_format().count elements. values.place must be Place::bucket with first = 0.
Status statistics(const Shape& shape, const Values& values, void* stats, Order order = Order::ascending);

// ranks: how many ranks' statistics are in `stats`. scratch: plan_scratch_bytes().
uint64_t plan_scratch_bytes(const Shape& shape);
Status allocate(const Shape& shape, const void* stats, uint32_t ranks, void* plan, void* scratch);

Status combine(const Shape& shape, const void* plan, const Combine& job);

// ---- CUDA -----------------------------------------------------------------------------------------------------
// The same, asynchronous on `stream` (a cudaStream_t): all memory on the current device, nothing copied to or from the
// host, nothing waited for; may be captured in a graph. Status also: device_error, when a launch fails; unsupported,
// for more than 65535 domains, or parts of 4 GiB and more.

#ifdef ZIPCCL_WITH_CUDA
namespace cuda {

Status statistics(const Shape& shape, const Values& values, void* stats, Order order, void* stream);

uint64_t plan_scratch_bytes(const Shape& shape);
Status allocate(const Shape& shape, const void* stats, uint32_t ranks, void* plan, void* scratch, void* stream);

Status combine(const Shape& shape, const void* plan, const Combine& job, void* stream);

}  // namespace cuda
#endif

}  // namespace quantizer
}  // namespace zipccl
