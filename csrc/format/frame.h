// The bytes of a frame: header, tables, payload. docs/format.md is the specification; this file is its C++ form.
//
//   offset 0          header                    64 bytes
//   offset 64         group offsets             u64 [groups], padded to 16
//                     tile words                u16 [tiles],  padded to 16   (codes fast and dense)
//                     tile bases                u8  [tiles],  padded to 16   (codes fast and dense)
//                     slots                     u64 [groups + 1], padded to 16   (FrameLayout::packed)
//                     payload                   laid out by FrameLayout
//
// Header-only and usable in device code. Every count, size and offset is 64-bit. Little-endian.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ZIPCCL_HD __host__ __device__ __forceinline__
#else
#define ZIPCCL_HD inline
#endif

namespace zipccl {

constexpr uint32_t kFrameMagic = 0x4C43505Au;  // "ZPCL"
constexpr uint8_t kFrameVersion = 1;
constexpr uint64_t kHeaderBytes = 64;
constexpr uint64_t kFrameAlign = 16;  // frames, tables, tile units and group parts start and end on this
constexpr uint64_t kTileValues = 1024;
constexpr uint64_t kGroupTiles = 32;
constexpr uint64_t kGroupValues = kTileValues * kGroupTiles;

// Stored in the header: never renumber.
enum class DType : uint8_t {
  u8 = 0,
  i8 = 1,
  i16 = 2,
  i32 = 3,
  i64 = 4,
  f16 = 5,
  f32 = 6,
  f64 = 7,
  c64 = 8,
  c128 = 9,
  boolean = 10,
  bf16 = 11,
  f8_e4m3fn = 12,
  f8_e5m2 = 13,
  f8_e4m3fnuz = 14,
  f8_e5m2fnuz = 15,
  u16 = 16,
  u32 = 17,
  u64 = 18,
  f8_e8m0fnu = 19,
  c32 = 20,
};
constexpr uint8_t kDTypeCount = 21;

enum class Code : uint8_t {
  raw = 0,    // the tensor's own bytes
  fast = 1,   // ZipCCL's 3-bit exponent codes, section 4.1 of the paper, with a window per tile
  dense = 2,  // levels of 2-bit exponent codes, for slow links: format/dense.h
};
constexpr uint8_t kCodeCount = 3;

// compact: the parts of a group (tile units, then dynamic bytes) follow each other; smallest on the wire.
// split:   tile units at fixed places, all dynamic bytes behind them; the static part's size follows from
//          (dtype, count, code) alone, which is what ZipCCL's all-to-all Design 2 needs.
// packed:  hardly larger than compact, and units in front as in split: constant tiles have no place there, raw tiles
//          fill theirs, so that places follow from which tiles are constant alone. format/tile.h.
enum class FrameLayout : uint8_t { compact = 0, split = 1, packed = 2 };

constexpr uint8_t kFlagChecksum = 1;  // header.checksum covers every byte behind the header
constexpr uint8_t kFlagSplit = 2;     // FrameLayout::split
constexpr uint8_t kFlagPacked = 4;    // FrameLayout::packed
constexpr uint8_t kLayoutFlags = kFlagSplit | kFlagPacked;
constexpr uint8_t kKnownFlags = kFlagChecksum | kLayoutFlags;

struct FrameHeader {
  uint32_t magic;
  uint8_t version;
  uint8_t dtype;
  uint8_t code;
  uint8_t flags;
  uint64_t count;         // values
  uint64_t frame_bytes;   // the whole frame, header included; a multiple of kFrameAlign
  uint64_t checksum;      // 0 without kFlagChecksum
  uint8_t reserved[28];   // zero
  uint32_t header_check;  // header_check() of the 60 bytes before it
};
static_assert(sizeof(FrameHeader) == kHeaderBytes, "the header is 64 bytes on the wire");

ZIPCCL_HD uint64_t align_up(uint64_t n, uint64_t a = kFrameAlign) { return (n + a - 1) / a * a; }
ZIPCCL_HD uint64_t ceil_div(uint64_t n, uint64_t d) { return n / d + (n % d != 0); }

ZIPCCL_HD uint8_t layout_flags(FrameLayout layout) {
  return layout == FrameLayout::split ? kFlagSplit : layout == FrameLayout::packed ? kFlagPacked : 0;
}
ZIPCCL_HD FrameLayout layout_of(uint8_t flags) {
  return flags & kFlagSplit ? FrameLayout::split : flags & kFlagPacked ? FrameLayout::packed : FrameLayout::compact;
}
ZIPCCL_HD bool known_flags(uint8_t flags) {
  return (flags & ~kKnownFlags) == 0 && (flags & kLayoutFlags) != kLayoutFlags;
}

// Bytes of one value, 0 for an unknown dtype.
ZIPCCL_HD uint64_t dtype_bytes(uint8_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::u8:
    case DType::i8:
    case DType::boolean:
    case DType::f8_e4m3fn:
    case DType::f8_e5m2:
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz:
    case DType::f8_e8m0fnu:
      return 1;
    case DType::i16:
    case DType::u16:
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i32:
    case DType::u32:
    case DType::f32:
    case DType::c32:
      return 4;
    case DType::i64:
    case DType::u64:
    case DType::f64:
    case DType::c64:
      return 8;
    case DType::c128:
      return 16;
  }
  return 0;
}

// Counts above this are refused: every size computed from a count then fits 63 bits.
constexpr uint64_t kMaxCount = uint64_t(1) << 56;

ZIPCCL_HD uint64_t tile_count(uint64_t count) { return ceil_div(count, kTileValues); }
ZIPCCL_HD uint64_t group_count(uint64_t count) { return ceil_div(count, kGroupValues); }

// Where the tables of a frame in code fast or dense lie. count: of what its tiles hold.
ZIPCCL_HD uint64_t group_table_begin() { return kHeaderBytes; }
ZIPCCL_HD uint64_t tile_word_begin(uint64_t count) { return kHeaderBytes + align_up(8 * group_count(count)); }
ZIPCCL_HD uint64_t tile_base_begin(uint64_t count) { return tile_word_begin(count) + align_up(2 * tile_count(count)); }
ZIPCCL_HD uint64_t tables_end(uint64_t count) { return tile_base_begin(count) + align_up(tile_count(count)); }

// One bijective step per word, so any change confined to one word is always seen.
ZIPCCL_HD uint32_t header_check(const FrameHeader& h) {
  uint32_t words[kHeaderBytes / 4];
  memcpy(words, &h, kHeaderBytes);
  uint32_t x = 0x9E3779B9u;
  for (int i = 0; i < 15; ++i) {
    x ^= words[i];
    x = ((x << 13) | (x >> 19)) * 0x85EBCA6Bu;
  }
  return x;
}

// Payload checksum: sum over the 32-bit words behind the header of word * checksum_key(index), modulo 2^64,
// index counted from the first word behind the header. Keys are odd, so a change confined to one word is always
// seen; others are missed with probability about 2^-32. A sum, so any order of summation gives the same value.
ZIPCCL_HD uint32_t checksum_key(uint64_t index) {
  uint32_t k = static_cast<uint32_t>(index) * 0x9E3779B1u + static_cast<uint32_t>(index >> 32) * 0x85EBCA77u;
  k ^= k >> 15;
  return (k * 0x2C1B3C6Du) | 1u;
}

}  // namespace zipccl
