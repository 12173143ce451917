// What the parts of fuzz_decode.cpp share: buffers of exact sizes, encoding and decoding in every way there is, and
// seals that hold over forged bytes.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "codec/codec.h"
#include "random_values.h"

namespace zipccl {
namespace fuzz {

inline std::string g_doing;  // for the failure report

#define CHECK(condition)                                                                          \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      std::fprintf(stderr, "FAILED: %s\n  line %d, %s\n", #condition, __LINE__, g_doing.c_str()); \
      std::abort();                                                                               \
    }                                                                                             \
  } while (0)

// n bytes of heap and not one more. `shift` moves the first byte off malloc's alignment.
class Exact {
 public:
  explicit Exact(size_t n, size_t shift = 0) : memory_(static_cast<uint8_t*>(std::malloc(n + shift))), shift_(shift) {}
  Exact(const uint8_t* from, size_t n, size_t shift) : Exact(n, shift) {
    if (n != 0) std::memcpy(data(), from, n);
  }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  ~Exact() { std::free(memory_); }
  uint8_t* data() { return memory_ + shift_; }

 private:
  uint8_t* memory_;
  size_t shift_;
};

struct Outcome {
  Status status;
  Bytes values;
};

// Decodes what the header announces, as zipccl.decompress() does.
inline Outcome decode_one(const uint8_t* bytes, size_t n, Isa isa, const Threads& threads = {}) {
  Exact frame(bytes, n, n % 3);
  FrameInfo info = {};
  const Status header = read_header(frame.data(), n, &info);
  const bool complete = header == Status::ok && info.frame_bytes <= n;
  const uint64_t size = complete ? info.raw_bytes : 0;
  Exact dst(size);
  const Status status = decode(frame.data(), n, info.dtype, info.count, dst.data(), isa, threads);
  if (header != Status::ok) CHECK(status == header);
  if (header == Status::ok && !complete) CHECK(status == Status::truncated);
  if (status != Status::ok) return {status, {}};
  CHECK(complete);
  return {status, Bytes(dst.data(), dst.data() + size)};
}

inline std::vector<Isa> isas() {
  std::vector<Isa> all = {Isa::scalar};
  for (Isa isa : {Isa::avx2, Isa::avx512}) {
    if (has_isa(isa)) all.push_back(isa);
  }
  return all;
}

// One call on this thread, the others on new ones.
inline void run_on_threads(int n, void (*work)(void*), void* argument) {
  std::vector<std::thread> others;
  for (int i = 1; i < n; ++i) others.emplace_back(work, argument);
  work(argument);
  for (std::thread& other : others) other.join();
}
constexpr Threads kThree = {3, run_on_threads};

inline Outcome decode_all(const uint8_t* bytes, size_t n) {
  const Outcome outcome = decode_one(bytes, n, Isa::scalar);
  const auto check = [&](const Outcome& other) {
    CHECK(other.status == outcome.status);
    CHECK(other.values == outcome.values);
  };
  for (Isa isa : isas()) {
    if (isa != Isa::scalar) check(decode_one(bytes, n, isa));
  }
  FrameInfo info;  // threads share out groups
  if (read_header(bytes, n, &info) == Status::ok && info.count > kGroupValues) {
    check(decode_one(bytes, n, Isa::best, kThree));
  }
  return outcome;
}

// ---- Forging --------------------------------------------------------------------------------------------------

inline FrameHeader header_of(const Bytes& frame) {
  FrameHeader h;
  std::memcpy(&h, frame.data(), sizeof(h));
  return h;
}

// Puts h in front of the frame with checks that hold.
inline void put_header(Bytes* frame, const FrameHeader& h) {
  alignas(FrameHeader) uint32_t words[kHeaderBytes / 4];
  std::memcpy(words, &h, kHeaderBytes);
  words[15] = header_check(*reinterpret_cast<const FrameHeader*>(words));
  std::memcpy(frame->data(), words, kHeaderBytes);
}

inline void seal(Bytes* frame, FrameHeader h) {
  const uint64_t payload = frame->size() - kHeaderBytes;
  h.checksum = h.flags & kFlagChecksum ? payload_checksum(frame->data() + kHeaderBytes, payload / 4 * 4) : 0;
  put_header(frame, h);
}

inline void seal(Bytes* frame) { seal(frame, header_of(*frame)); }

// ---- Encoding -------------------------------------------------------------------------------------------------

constexpr FrameLayout kLayouts[] = {FrameLayout::compact, FrameLayout::split, FrameLayout::packed};

struct Sample {
  FrameOptions options;
  uint64_t count;
  Bytes values;
  Bytes frame;
};

// Encodes with every ISA, into exactly the bound, exactly the size and one byte less.
inline void encode_all(Sample* s, size_t shift) {
  const uint64_t bound = frame_bound(s->options, s->count);
  CHECK(bound != 0);
  Exact values(s->values.data(), s->values.size(), 0);
  const auto encode_with = [&](Isa isa, const Threads& threads) {
    Exact dst(bound, shift);
    std::memset(dst.data(), 0xA5, bound);
    uint64_t size = 0;
    CHECK(encode(values.data(), s->count, s->options, dst.data(), bound, &size, isa, threads) == Status::ok);
    CHECK(size <= bound && size >= kHeaderBytes);
    const Bytes frame(dst.data(), dst.data() + size);
    if (s->frame.empty()) s->frame = frame;
    CHECK(frame == s->frame);
    for (uint64_t capacity : {size, size - 1, size - kFrameAlign, size / 2}) {
      Exact tight(capacity, shift);
      std::memset(tight.data(), 0x5A, capacity);  // other garbage than above: padding must be written
      uint64_t again = 0;
      const Status status = encode(values.data(), s->count, s->options, tight.data(), capacity, &again, isa, threads);
      CHECK(status == (capacity < size ? Status::no_room : Status::ok));
      if (status == Status::ok) CHECK(std::memcmp(tight.data(), frame.data(), size) == 0);
    }
  };
  s->frame.clear();
  for (Isa isa : isas()) encode_with(isa, {});
  if (s->count > kGroupValues) encode_with(Isa::best, kThree);
}

// ---- Expectations ---------------------------------------------------------------------------------------------

inline std::map<std::string, std::map<Status, uint64_t> > g_summary;  // kind -> status -> number

inline void expect(const char* kind, Status status, const Bytes& frame) {
  const Outcome outcome = decode_all(frame.data(), frame.size());
  ++g_summary[kind][outcome.status];
  CHECK(outcome.status == status);
}

inline void round_trip(const Sample& s) {
  const Outcome outcome = decode_all(s.frame.data(), s.frame.size());
  ++g_summary["intact"][outcome.status];
  CHECK(outcome.status == Status::ok);
  CHECK(outcome.values == s.values);
  Bytes longer = s.frame;  // in a padded collective
  longer.resize(longer.size() + 40, 0xEE);
  CHECK(decode_all(longer.data(), longer.size()).values == s.values);
  CHECK(decode(s.frame.data(), s.frame.size(), s.options.dtype, s.count + 1, nullptr) == Status::unexpected);
}

}  // namespace fuzz
}  // namespace zipccl
