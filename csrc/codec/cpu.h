// Internals of the CPU codec, shared by its .cpp files and by nobody else. The interface is codec.h.
//
// frame.cpp     arguments, header, dispatch
// raw_cpu.cpp   Code::raw
// fast_cpu.cpp  Code::fast above the tile: tables, groups, layouts
// fast_scalar.cpp, fast_avx2.cpp, fast_avx512.cpp   Code::fast inside a tile, once per instruction set
// dense_cpu.cpp, dense_scalar.cpp, dense_simd.h, dense_avx2.cpp, dense_avx512.cpp, dense_elements_avx2.cpp
//               the same for Code::dense
// sum_cpu.cpp   decode_sum()
// workers.h     how groups are shared out to threads
// checksum_cpu.cpp                 payload checksum
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/codec.h"
#include "format/dense.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian, and the codec reads them in place: big-endian hosts are not supported"
#endif

// Functions compiled for AVX2, or AVX-512, whatever the compiler's flags are; called only where has_isa() holds.
#if defined(__x86_64__)
#define ZIPCCL_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define ZIPCCL_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,gfni,avx2,bmi,bmi2,popcnt")))
#endif

namespace zipccl {
namespace cpu {

// Frames may lie at any address on the CPU.
template <typename T>
inline T load(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <typename T>
inline void store(void* p, T v) {
  std::memcpy(p, &v, sizeof(v));
}

// ---- Code::raw ------------------------------------------------------------------------------------------------

inline uint64_t raw_frame_bytes(DType dtype, uint64_t count) {
  return align_up(kHeaderBytes + count * dtype_bytes(static_cast<uint8_t>(dtype)));
}

// Everything behind the header. frame: raw_frame_bytes(); values: count * dtype_bytes().
void encode_raw(const void* src, uint64_t bytes, uint8_t* frame, const Threads& threads);
void decode_raw(const uint8_t* frame, uint64_t bytes, void* dst, const Threads& threads);

// ---- Code::fast -----------------------------------------------------------------------------------------------

// What the tables say about a tile.
struct Tile {
  TileMode mode;
  uint8_t base;      // window only, else 0
  uint16_t dynamic;  // bytes in the dynamic part
};

// Kernels may write and read this many bytes beyond a tile's dynamic bytes, which spares them a branch per escape.
// Callers provide the room.
constexpr uint64_t kDynamicSlack = 64;

struct TileKernels {
  // Encodes src[m], 1 <= m <= kTileValues, as in a compact frame. unit: align_up(m) + kPlanesBytes writable bytes, of
  // which unit_bytes(mode, m) are the result and the others are left undefined; dynamic: kTileValues + kDynamicSlack.
  Tile (*encode)(const uint16_t* src, uint32_t m, uint8_t* unit, uint8_t* dynamic);

  // Decodes into dst[m]. The tile is valid_tile() of a frame that is not packed, or held; unit: unit_bytes(mode, m)
  // readable bytes; dynamic: tile.dynamic
  // and kDynamicSlack more. False: the number of escape codes is not tile.dynamic.
  bool (*decode)(Tile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m, uint16_t* dst);
};

extern const TileKernels kScalarKernels;
#if defined(__x86_64__)
extern const TileKernels kAvx2Kernels;
extern const TileKernels kAvx512Kernels;
#endif

// Everything behind the header. *written gets the size of the frame, header included.
Status encode_fast(const TileKernels& kernels, const uint16_t* src, uint64_t count, FrameLayout layout, uint8_t* frame,
                   uint64_t capacity, uint64_t* written, const Threads& threads);

// A frame to be decoded a group of kGroupValues (fewer in the last one) at a time, in any order. `frame_bytes` bytes
// are readable and at least fast_static_bytes(count, layout). Data are good when all groups are.
class FastFrame {
 public:
  FastFrame(const TileKernels& kernels, const uint8_t* frame, uint64_t frame_bytes, uint64_t count, FrameLayout layout)
      : kernels_(kernels), frame_(frame), frame_bytes_(frame_bytes), count_(count), layout_(layout) {}
  Status decode_group(uint64_t g, uint16_t* dst) const;
  // Of a frame without groups: whether it ends where it should.
  bool ends_well() const { return count_ != 0 || frame_bytes_ == fast_static_bytes(0, layout_); }

 private:
  const TileKernels& kernels_;
  const uint8_t* frame_;
  uint64_t frame_bytes_, count_;
  FrameLayout layout_;
};

// ---- Code::dense ----------------------------------------------------------------------------------------------

struct DenseTile {
  uint8_t mode;      // format/dense.h
  uint8_t base;      // window only, else 0
  uint16_t dynamic;  // bytes in the dynamic part
};

constexpr uint64_t kDenseSlack = 64;  // as kDynamicSlack

struct DenseKernels {
  // Encodes m elements at src, 1 <= m <= kTileValues. unit: align_up(format.bytes * m) writable bytes, of which
  // unit_bytes(mode, m) are the result; dynamic: dense::kMaxDynamic + kDenseSlack.
  DenseTile (*encode)(const dense::Format& format, const uint8_t* src, uint32_t m, uint8_t* unit, uint8_t* dynamic);

  // Decodes m elements into dst. The tile is dense::valid_tile(); unit: unit_bytes(mode, m) readable bytes; dynamic:
  // tile.dynamic and kDenseSlack more. False: the codes do not fit the dynamic bytes.
  bool (*decode)(const dense::Format& format, DenseTile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m,
                 uint8_t* dst);
};

extern const DenseKernels kDenseScalar;
#if defined(__x86_64__)
extern const DenseKernels kDenseAvx2;
extern const DenseKernels kDenseAvx512;
#endif
const DenseKernels& dense_kernels(Isa isa);

// Everything behind the header, for values of any dtype. *written gets the size of the frame, header included.
Status encode_dense(const DenseKernels& kernels, const void* src, DType dtype, uint64_t count, uint8_t* frame,
                    uint64_t capacity, uint64_t* written, const Threads& threads);

// As FastFrame. `frame_bytes` is at least tables_end() of the elements.
class DenseFrame {
 public:
  DenseFrame(const DenseKernels& kernels, const uint8_t* frame, uint64_t frame_bytes, DType dtype, uint64_t count);
  Status decode_group(uint64_t g, uint8_t* dst) const;
  uint64_t groups() const { return group_count(elements_); }
  uint64_t group_bytes() const { return kGroupValues * format_.bytes; }  // of the values of all but the last
  bool ends_well() const { return elements_ != 0 || frame_bytes_ == tables_end(0); }

 private:
  const DenseKernels& kernels_;
  const uint8_t* frame_;
  uint64_t frame_bytes_;
  dense::Format format_;
  uint64_t elements_;
};

// Checked beginning of decode(): header, size, checksum, and that the frame holds (dtype, count).
Status open_frame(const void* frame, uint64_t available, DType dtype, uint64_t count, Isa isa, const Threads& threads,
                  FrameInfo* info);
const TileKernels& kernels(Isa isa);

// ---- Checksum -------------------------------------------------------------------------------------------------

// Of words first .. first + words - 1 of a payload, of which `from` is the first one of these.
uint64_t checksum_scalar(const uint8_t* from, uint64_t words, uint64_t first);
#if defined(__x86_64__)
uint64_t checksum_avx2(const uint8_t* from, uint64_t words, uint64_t first);
#endif
uint64_t checksum(Isa isa, const Threads& threads, const uint8_t* payload, uint64_t words);

}  // namespace cpu
}  // namespace zipccl
