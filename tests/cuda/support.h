// What the CUDA tests share: checks, guarded device memory, data, and the CPU codec to compare with. Each test is one
// file and one program.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace {

using zipccl::Code;
using zipccl::DecodeJob;
using zipccl::DType;
using zipccl::EncodeJob;
using zipccl::FrameHeader;
using zipccl::FrameLayout;
using zipccl::FrameOptions;
using zipccl::Status;
using Bytes = std::vector<uint8_t>;

int checks = 0, failures = 0;
int max_sms = 0;  // of all calls

void check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

void cuda_check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CUDA(call) cuda_check(call, #call)

// ---- Memory ---------------------------------------------------------------------------------------------------

constexpr uint8_t kCanary = 0xA5;
constexpr size_t kGuard = 256;

// Device memory of exactly the size asked for, so that compute-sanitizer sees every byte beyond it, or, guarded, with
// canaries on both sides. `shift` bytes off the alignment of cudaMalloc.
class Device {
 public:
  explicit Device(size_t bytes, size_t shift = 0, bool guarded = false)
      : bytes_(bytes), before_(shift + (guarded ? kGuard : 0)), total_(before_ + bytes + (guarded ? kGuard : 0)) {
    CUDA(cudaMalloc(&base_, std::max<size_t>(total_, 1)));
    CUDA(cudaMemset(base_, kCanary, std::max<size_t>(total_, 1)));
  }
  explicit Device(const Bytes& from, size_t shift = 0) : Device(from.size(), shift) { set(from); }
  Device(const Device&) = delete;
  Device(Device&& other) noexcept
      : base_(other.base_), bytes_(other.bytes_), before_(other.before_), total_(other.total_) {
    other.base_ = nullptr;
  }
  ~Device() { cudaFree(base_); }

  uint8_t* get() const { return base_ + before_; }
  void set(const Bytes& from) { CUDA(cudaMemcpy(get(), from.data(), from.size(), cudaMemcpyHostToDevice)); }
  Bytes bytes(size_t n) const {
    Bytes to(n);
    CUDA(cudaMemcpy(to.data(), get(), n, cudaMemcpyDeviceToHost));
    return to;
  }
  Bytes bytes() const { return bytes(bytes_); }
  bool guards_intact() const {
    Bytes all(total_);
    CUDA(cudaMemcpy(all.data(), base_, total_, cudaMemcpyDeviceToHost));
    const auto intact = [](uint8_t b) { return b == kCanary; };
    return std::all_of(all.begin(), all.begin() + before_, intact) &&
           std::all_of(all.begin() + before_ + bytes_, all.end(), intact);
  }

 private:
  uint8_t* base_ = nullptr;
  size_t bytes_, before_, total_;
};

// ---- Data -----------------------------------------------------------------------------------------------------

std::mt19937_64 random_bits(20240607);

uint16_t bf16_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof(u));
  return static_cast<uint16_t>(u >> 16);
}

using Values = std::vector<uint16_t>;

Values normal_values(size_t n, float scale) {
  std::normal_distribution<float> normal(0, scale);
  Values v(n);
  for (auto& x : v) x = bf16_of(normal(random_bits));
  return v;
}

// One tile after another of every kind, so that units and dynamic bytes of all sizes meet in a group.
Values mixed_values(size_t n) {
  Values v = normal_values(n, 1e-2f);
  for (size_t begin = 0; begin < n; begin += zipccl::kTileValues) {
    const size_t end = std::min<size_t>(n, begin + zipccl::kTileValues);
    const uint64_t kind = random_bits() % 6;
    const uint64_t one_in = 1 + random_bits() % 8;  // around one in 1.6 a window stops paying
    const uint16_t constant = static_cast<uint16_t>(random_bits());
    for (size_t i = begin; i < end; ++i) {
      if (kind == 0) v[i] = constant;
      if (kind == 1) v[i] = static_cast<uint16_t>(random_bits());
      if (kind == 2 && random_bits() % one_in == 0) v[i] = static_cast<uint16_t>(random_bits());
      if (kind == 3 && random_bits() % 8 < 5) v[i] = static_cast<uint16_t>(random_bits());
    }
    if (kind == 4) v[begin + random_bits() % (end - begin)] ^= 1;  // all but constant, when the rest is
  }
  return v;
}

// Exponents at both ends of the range, where the candidate windows coincide.
Values extreme_values(size_t n) {
  Values v(n);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t tile = static_cast<uint32_t>(i / zipccl::kTileValues);
    const uint32_t near = tile % 2 ? 255 - tile / 2 % 12 : tile / 2 % 12;
    const uint32_t e = (near + random_bits() % 6) % 256;
    v[i] = static_cast<uint16_t>((random_bits() & 0x807F) | e << 7);
  }
  return v;
}

Values almost_constant_values(size_t n) {
  Values v(n, 0x7FC1);  // a NaN with a payload
  for (size_t begin = 0; begin < n; begin += 2 * zipccl::kTileValues) {
    const size_t end = std::min<size_t>(n, begin + zipccl::kTileValues);
    v[begin + random_bits() % (end - begin)] = 0x8000;
  }
  return v;
}

// One group after another with constant tiles and raw ones at other places, and with tiles that begin with equal
// values: what packed frames look at.
Values group_values(size_t n) {
  Values v = normal_values(n, 1e-2f);
  for (size_t begin = 0, tile = 0; begin < n; begin += zipccl::kTileValues, ++tile) {
    const size_t end = std::min<size_t>(n, begin + zipccl::kTileValues), in_group = tile % zipccl::kGroupTiles;
    const auto make_equal = [&](size_t values) {
      std::fill(&v[begin], &v[begin] + std::min(values, end - begin), static_cast<uint16_t>(0x3F80 + in_group));
    };
    const auto make_raw = [&] {
      for (size_t i = begin; i < end; ++i) v[i] = static_cast<uint16_t>(random_bits());
    };
    const bool ends = in_group == 0 || in_group == 31;
    switch (tile / zipccl::kGroupTiles % 8) {
      case 0:  // constant tiles, which the first of them gives away
        if (in_group % 5 == 2) make_raw();
        if (ends || in_group % 7 == 3) make_equal(zipccl::kTileValues);
        break;
      case 1:  // constant tiles, which nothing gives away
        if (in_group == 0) make_raw();
        if (in_group % 10 == 2 || in_group == 31) make_equal(zipccl::kTileValues);
        break;
      case 2:  // nothing else
        make_equal(zipccl::kTileValues);
        break;
      case 3:
        make_raw();
        break;
      case 4:  // constant but for a value
        make_equal(zipccl::kTileValues);
        v[ends ? begin : end - 1] ^= 0x8000;
        break;
      case 5:  // nothing but window tiles
        break;
      case 6:  // a constant tile, given away by another one
        if (in_group == 5) make_equal(zipccl::kTileValues);
        if (in_group == 21) make_equal(4);
        break;
      default:  // not given away: one value too few
        if (in_group == 5) make_equal(zipccl::kTileValues);
        if (in_group == 11 || in_group == 30) make_equal(3);
    }
  }
  return v;
}

struct Pattern {
  const char* name;
  Values (*make)(size_t);
};
const Pattern kPatterns[] = {
    {"normal", [](size_t n) { return normal_values(n, 2e-3f); }},
    {"random bits",
     [](size_t n) {
       Values v(n);
       for (auto& x : v) x = static_cast<uint16_t>(random_bits());
       return v;
     }},
    {"every pattern",
     [](size_t n) {
       Values v(n);
       for (size_t i = 0; i < n; ++i) v[i] = static_cast<uint16_t>(i);
       return v;
     }},
    {"zeros", [](size_t n) { return Values(n, 0); }},
    {"almost constant", almost_constant_values},
    {"mixed", mixed_values},
    {"extreme", extreme_values},
    {"groups", group_values},
};
constexpr int kPatternCount = sizeof(kPatterns) / sizeof(*kPatterns);

Bytes bytes_of(const Values& v) {
  Bytes b(2 * v.size());
  std::memcpy(b.data(), v.data(), b.size());
  return b;
}

Bytes random_bytes(size_t n) {
  Bytes b(n);
  for (auto& x : b) x = static_cast<uint8_t>(random_bits());
  return b;
}

// ---- The two codecs -------------------------------------------------------------------------------------------

uint64_t value_bytes(DType dtype) { return zipccl::dtype_bytes(static_cast<uint8_t>(dtype)); }

Bytes cpu_encode(const Bytes& src, const FrameOptions& options) {
  const uint64_t count = src.size() / value_bytes(options.dtype);
  Bytes frame(zipccl::frame_bound(options, count));
  uint64_t written = 0;
  const Status s = zipccl::encode(src.data(), count, options, frame.data(), frame.size(), &written);
  check(s == Status::ok, "CPU encode");
  frame.resize(written);
  return frame;
}

Status cpu_decode(const Bytes& frame, DType dtype, uint64_t count, Bytes* dst) {
  dst->assign(count * value_bytes(dtype), 0);
  return zipccl::decode(frame.data(), frame.size(), dtype, count, dst->data());
}

constexpr FrameLayout kLayouts[] = {FrameLayout::compact, FrameLayout::split, FrameLayout::packed};

const char* layout_name(FrameLayout layout) {
  return layout == FrameLayout::split ? "split" : layout == FrameLayout::packed ? "packed" : "compact";
}

// End of the tables of a fast frame.
uint64_t all_tables_end(uint64_t count, FrameLayout layout) {
  return layout == FrameLayout::packed ? zipccl::packed_units_begin(count) : zipccl::tables_end(count);
}

// ---- Damage ---------------------------------------------------------------------------------------------------

void seal(Bytes* frame) {
  alignas(FrameHeader) uint32_t words[zipccl::kHeaderBytes / 4];
  std::memcpy(words, frame->data(), sizeof(words));
  words[15] = zipccl::header_check(*reinterpret_cast<const FrameHeader*>(words));
  std::memcpy(frame->data(), words, sizeof(words));
}

void flip_bit(Bytes* frame, size_t begin, size_t end) {
  const size_t bit = 8 * begin + random_bits() % (8 * (end - begin));
  (*frame)[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
}

}  // namespace
