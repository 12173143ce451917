// Time of a collective on one link: T = alpha + bytes / beta, and of a codec: bytes / rate. Pure arithmetic; seconds
// and bytes throughout. Serves the switcher here and the planner in Python.
//
// Break-even after ZipCCL section 5.3 (G: codec rate both ways, e: compressed over raw size, B: link rate):
//   all-gather of N shards: zip wins below B* = (1 - e) G / (1 + 1/N).
#pragma once

namespace zipccl {

struct LinkModel {
  double alpha = 0;        // seconds before the first byte moves
  double bytes_per_s = 0;  // received per rank
};

struct CodecModel {
  double fixed = 0;               // seconds per encode or decode call, whatever the size
  double encode_bytes_per_s = 0;  // raw bytes
  double decode_bytes_per_s = 0;  // raw bytes
};

inline double transfer_seconds(const LinkModel& link, double bytes) { return link.alpha + bytes / link.bytes_per_s; }

inline double encode_seconds(const CodecModel& c, double raw_bytes) {
  return c.fixed + raw_bytes / c.encode_bytes_per_s;
}

inline double decode_seconds(const CodecModel& c, double raw_bytes) {
  return c.fixed + raw_bytes / c.decode_bytes_per_s;
}

// Every rank receives the world - 1 other shards.
inline double all_gather_raw_seconds(const LinkModel& link, int world, double shard_bytes) {
  return transfer_seconds(link, (world - 1) * shard_bytes);
}

// Encode the own shard, agree on sizes (one more alpha), move `ratio` of the bytes, decode the others.
inline double all_gather_zip_seconds(const LinkModel& link, const CodecModel& codec, int world, double shard_bytes,
                                     double ratio) {
  return encode_seconds(codec, shard_bytes) + link.alpha + transfer_seconds(link, (world - 1) * shard_bytes * ratio) +
         decode_seconds(codec, (world - 1) * shard_bytes);
}

// Link rate below which a zipped all-gather of large shards wins.
inline double all_gather_break_even(const CodecModel& codec, int world, double ratio) {
  double n = world;
  return (1 - ratio) / (1 / (codec.encode_bytes_per_s * (n - 1)) + 1 / codec.decode_bytes_per_s);
}

}  // namespace zipccl
