// Time of a collective on one link: T = alpha + bytes / beta, and of a codec: fixed + bytes / rate. Pure arithmetic;
// seconds and bytes throughout. For the switcher, and for Python.
//
// Break-even after ZipCCL section 5.3 (G: codec rate both ways, e: compressed over raw size, B: link rate):
//   all-gather of N shards: zip wins below B* = (1 - e) G / (1 + 1/N); all-to-all: below (1 - e) G / 2.
// The paper counts all N shards on the wire and in the decoder; here a rank's own shard is neither sent nor decoded.
#pragma once

#include <cstdint>
#include <limits>

namespace zipccl {

// Collectives that can be zipped. `bytes` of a call, below: raw bytes of
//   all_gather      one rank's shard
//   all_to_all      one rank's whole input or output, whichever is larger
//   reduce_scatter  one rank's whole input, before any wire dtype
//   all_reduce      the tensor, before any wire dtype
//   broadcast, scatter, gather   the tensor one rank gets or gives
enum class Op : uint8_t { all_gather, all_to_all, reduce_scatter, all_reduce, broadcast, scatter, gather };
constexpr int kOpCount = 7;
inline const char* op_name(Op op) {
  constexpr const char* names[kOpCount] = {"all_gather", "all_to_all", "reduce_scatter", "all_reduce",
                                           "broadcast",  "scatter",    "gather"};
  return names[static_cast<int>(op)];
}

struct LinkModel {
  double alpha = 0;        // seconds before the first byte moves
  double bytes_per_s = 0;  // received per rank
  double words = 0;        // seconds until every host knows every rank's sizes
};

struct CodecModel {
  double fixed = 0;               // seconds per encode or decode call, whatever the size
  double encode_bytes_per_s = 0;  // raw bytes
  double decode_bytes_per_s = 0;  // raw bytes
};

// What one rank does in a zipped call: bytes it encodes, would receive raw, and decodes; how often sizes are exchanged,
// and how many messages follow each other.
struct Shape {
  double encoded;
  double received;
  double decoded;
  double words;
  double messages;
};

inline Shape shape_of(Op op, int world, double bytes) {
  const double n = world, others = (n - 1) / n;
  switch (op) {
    case Op::all_gather:
      return {bytes, (n - 1) * bytes, (n - 1) * bytes, 1, 1};
    case Op::all_to_all:
    case Op::reduce_scatter:
      return {others * bytes, others * bytes, others * bytes, 1, 1};
    case Op::all_reduce:  // reduce-scatter, then all-gather of the sums
      return {others * bytes + bytes / n, 2 * others * bytes, 2 * others * bytes, 2, 2};
    case Op::broadcast:
      return {bytes, bytes, bytes, 1, 1};
    case Op::scatter:  // the root encodes for all and sends over one link
    case Op::gather:
      return {bytes, (n - 1) * bytes, bytes, 1, 1};
  }
  return {0, 0, 0, 0, 0};
}

inline double raw_seconds(const LinkModel& link, const Shape& s) { return link.alpha + s.received / link.bytes_per_s; }

// `ratio`: wire bytes over raw bytes, a wire dtype's saving included.
inline double zip_seconds(const LinkModel& link, const CodecModel& codec, const Shape& s, double ratio) {
  return 2 * codec.fixed + s.encoded / codec.encode_bytes_per_s + s.decoded / codec.decode_bytes_per_s +
         s.messages * link.alpha + s.words * link.words + s.received * ratio / link.bytes_per_s;
}

// Wire bytes over raw bytes of bf16 weights and gradients, in code fast and in code dense.
constexpr double kFastRatio = 0.705;
constexpr double kDenseRatio = 0.674;

// Whether the bytes that code dense saves of a large call outweigh its slower codec.
inline bool dense_pays(const LinkModel& link, const CodecModel& fast, const CodecModel& dense, int world) {
  const Shape s = shape_of(Op::all_gather, world, 64 << 20);
  return zip_seconds(link, dense, s, kDenseRatio) < zip_seconds(link, fast, s, kFastRatio);
}

// Link rate below which a zipped call of that shape wins; `latencies`: of the link, whose own rate does not count.
inline double break_even(const LinkModel& latencies, const CodecModel& codec, const Shape& s, double ratio) {
  LinkModel no_bytes = latencies;
  no_bytes.bytes_per_s = std::numeric_limits<double>::infinity();
  return (1 - ratio) * s.received / (zip_seconds(no_bytes, codec, s, ratio) - raw_seconds(no_bytes, s));
}

}  // namespace zipccl
