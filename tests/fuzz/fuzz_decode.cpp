// Feeds broken frames to the CPU decoder. Every buffer is allocated to its exact size, so that AddressSanitizer sees
// the first byte read or written outside.
//
//   with a checksum      an error or the correct data, nothing else
//   without              an error wherever a decoder can know, and never a step outside the buffers
//   always               scalar, AVX2 and AVX-512 agree, and one thread and three: same status, same data
//
// As a program (runs a fixed number of rounds from fixed seeds; prints a summary; exit code 1 on the first failure):
//   g++ -std=c++17 -O1 -g -pthread -fsanitize=address,undefined -Icsrc tests/fuzz/fuzz_decode.cpp csrc/codec/*.cpp
// As a libFuzzer target:
//   clang++ -DZIPCCL_LIBFUZZER -fsanitize=fuzzer,address,undefined, else the same
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "harness.h"
#include "known_lies.h"

using namespace zipccl;
using namespace zipccl::fuzz;

#ifdef ZIPCCL_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t n) {
  decode_all(bytes, n);
  if (n >= kHeaderBytes) {  // and past the header
    Bytes frame(bytes, bytes + n);
    FrameHeader h = header_of(frame);
    h.magic = kFrameMagic;
    h.version = kFrameVersion;
    h.flags &= kKnownFlags;
    std::memset(h.reserved, 0, sizeof(h.reserved));
    seal(&frame, h);
    decode_all(frame.data(), n);
  }
  return 0;
}

#else

namespace {

// ---- Random tensors and their frames ----------------------------------------------------------------------------

Sample random_sample(Random* r, uint64_t most) {
  Sample s;
  s.options.dtype = r->below(3) == 0 ? static_cast<DType>(r->below(kDTypeCount)) : DType::bf16;
  const uint64_t code = r->below(12);
  s.options.code = code == 0 ? Code::raw : code < 6 ? Code::fast : Code::dense;
  s.options.layout = kLayouts[r->below(3)];
  s.options.checksum = r->below(2) != 0;
  s.count = r->below(3) == 0 ? r->below(40) : r->below(most + 1);
  if (s.options.dtype == DType::bf16 && s.options.code == Code::fast) {
    s.values = random_bf16(r, s.count);
  } else {
    s.values = random_elements(r, dense::format_of(s.options.dtype), dense::element_count(s.options.dtype, s.count));
  }
  return s;
}

// A packed frame of more than a group.
Sample packed_sample(Random* r) {
  Sample s;
  s.options = {DType::bf16, Code::fast, FrameLayout::packed, r->below(2) != 0};
  s.count = kGroupValues + r->below(2 * kGroupValues);
  s.values = random_bf16(r, s.count);
  return s;
}

// ---- What is done to frames -------------------------------------------------------------------------------------

// Decodes a frame that was damaged without new checks: with a checksum, correct or refused.
void expect_sound(const char* kind, const Sample& s, const Bytes& damaged) {
  const Outcome outcome = decode_all(damaged.data(), damaged.size());
  ++g_summary[kind][outcome.status];
  if (s.options.checksum && outcome.status == Status::ok) CHECK(outcome.values == s.values);
}

// Every ISA adds up alike, on one thread and on three.
void sums(const Sample& s) {
  if (!can_sum(s.options.dtype, DType::f32)) return;
  const SumInput frame = {s.frame.data(), s.frame.size(), true};
  Exact values(s.values.data(), s.values.size(), 0);
  const SumInput inputs[] = {frame, {values.data(), s.values.size(), false}, frame};
  for (DType out : {DType::bf16, DType::f16, DType::f32}) {
    const SumOptions options = {s.options.dtype, out, 0.7f, 3.0f};
    const uint64_t bytes = s.count * dtype_bytes(static_cast<uint8_t>(out));
    Bytes expected;
    const auto add = [&](Isa isa, const Threads& threads) {
      Exact sum(bytes);
      int bad = 0;
      CHECK(decode_sum(inputs, 3, s.count, options, sum.data(), &bad, isa, threads) == Status::ok && bad == -1);
      const Bytes got(sum.data(), sum.data() + bytes);
      if (isa == Isa::scalar) expected = got;
      CHECK(got == expected);
    };
    for (Isa isa : isas()) add(isa, {});
    add(Isa::best, kThree);
  }
}

// A sum meets the error that decoding meets.
void sum_damaged(const Sample& s, const Bytes& frame, Status status) {
  if (!can_sum(s.options.dtype, DType::f32)) return;
  Exact bytes(frame.data(), frame.size(), frame.size() % 3), sum(4 * s.count);
  const SumInput input = {bytes.data(), frame.size(), true};
  int bad = -1;
  CHECK(decode_sum(&input, 1, s.count, {s.options.dtype, DType::f32, 1, 1}, sum.data(), &bad) == status);
  CHECK(bad == (status == Status::ok ? -1 : 0));
}

void garbage(Random* r) {
  Bytes bytes(r->below(2000));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(r->next());
  const Outcome outcome = decode_all(bytes.data(), bytes.size());
  ++g_summary["garbage"][outcome.status];
  CHECK(outcome.status == (bytes.size() < kHeaderBytes ? Status::truncated : Status::bad_magic));
}

void truncate(Random* r, const Sample& s) {
  const size_t step = s.frame.size() < 700 ? 1 : 1 + r->below(s.frame.size() / 16);
  for (size_t n = 0; n < s.frame.size(); n += step) {
    expect("truncated", Status::truncated, Bytes(s.frame.begin(), s.frame.begin() + static_cast<std::ptrdiff_t>(n)));
  }
}

void flip_every_bit(const Sample& s) {
  for (size_t bit = 0; bit < 8 * s.frame.size(); ++bit) {
    Bytes damaged = s.frame;
    damaged[bit / 8] = static_cast<uint8_t>(damaged[bit / 8] ^ (1u << bit % 8));
    const Outcome outcome = decode_all(damaged.data(), damaged.size());
    ++g_summary["one bit"][outcome.status];
    if (bit < 8 * kHeaderBytes || s.options.checksum) CHECK(outcome.status != Status::ok);
  }
}

void damage(Random* r, Bytes* bytes, size_t begin) {
  if (begin >= bytes->size()) return;
  for (uint64_t n = 1 + r->below(4); n > 0; --n) {
    const size_t at = begin + r->below(bytes->size() - begin);
    switch (r->below(4)) {
      case 0:
        (*bytes)[at] = static_cast<uint8_t>(r->next());
        break;
      case 1:
        (*bytes)[at] = static_cast<uint8_t>((*bytes)[at] ^ (1u << r->below(8)));
        break;
      case 2:
        for (size_t i = at; i < bytes->size() && i < at + 64; ++i) (*bytes)[i] = 0;
        break;
      default:
        for (size_t i = at; i < bytes->size() && i < at + 64; ++i) (*bytes)[i] = static_cast<uint8_t>(r->next());
    }
  }
}

void splice(Random* r, const Sample& a, const Sample& b) {
  Bytes spliced = a.frame;
  const size_t at = r->below(a.frame.size());
  for (size_t i = at; i < a.frame.size() && i < b.frame.size(); ++i) spliced[i] = b.frame[i];
  // Headers may begin alike, so a cut inside them can leave b's, and then b's payload behind it.
  const bool is_b = std::memcmp(spliced.data(), b.frame.data(), kHeaderBytes) == 0;
  expect_sound("spliced", is_b ? b : a, spliced);
}

// Damage behind the header under checks that hold: no error need follow, but no step outside either.
void forge_payload(Random* r, const Sample& s) {
  Bytes forged = s.frame;
  const bool tables_only = r->below(2) != 0 && effective_code(s.options) != Code::raw;
  if (tables_only) {
    uint64_t end =
        tables_end(effective_code(s.options) == Code::dense ? dense::element_count(s.options.dtype, s.count) : s.count);
    const bool packed = effective_code(s.options) == Code::fast && s.options.layout == FrameLayout::packed;
    if (packed) end = packed_units_begin(s.count);
    Bytes tables(forged.begin(), forged.begin() + static_cast<std::ptrdiff_t>(end));
    damage(r, &tables, kHeaderBytes);
    std::memcpy(forged.data(), tables.data(), tables.size());
  } else {
    damage(r, &forged, kHeaderBytes);
  }
  seal(&forged);
  const Outcome outcome = decode_all(forged.data(), forged.size());
  ++g_summary[tables_only ? "forged tables" : "forged payload"][outcome.status];
  sum_damaged(s, forged, outcome.status);
}

// Slots of a packed frame that lie, by little or by much.
void forge_slots(Random* r, const Sample& s) {
  if (effective_code(s.options) != Code::fast || s.options.layout != FrameLayout::packed || s.count == 0) return;
  Bytes forged = s.frame;
  const uint64_t groups = group_count(s.count), begin = slot_table_begin(s.count);
  for (uint64_t n = 1 + r->below(3); n > 0; --n) {
    const uint64_t lies[] = {r->below(tile_count(s.count) + 2), r->next(), r->next() >> r->below(64),
                             ~uint64_t{0} / kMaxUnitBytes + 1 + r->below(4)};
    std::memcpy(&forged[begin + 8 * r->below(groups + 1)], &lies[r->below(4)], 8);
  }
  seal(&forged);
  const Outcome outcome = decode_all(forged.data(), forged.size());
  ++g_summary["forged slots"][outcome.status];
  sum_damaged(s, forged, outcome.status);
  if (forged != s.frame) CHECK(outcome.status != Status::ok);  // all slots follow from the tiles
}

// Another header over the same bytes, under checks that hold.
void forge_header(Random* r, const Sample& s) {
  Bytes forged = s.frame;
  FrameHeader h = header_of(forged);
  const uint64_t sizes[] = {
      0,       1,         s.count - 1,   s.count + 1,       s.count + 16, s.count + 1024,           2 * s.count,
      1 << 20, kMaxCount, kMaxCount + 1, uint64_t(1) << 63, ~uint64_t(0), r->next() >> r->below(64)};
  for (uint64_t n = 1 + r->below(3); n > 0; --n) {
    switch (r->below(5)) {
      case 0:
        h.count = sizes[r->below(sizeof(sizes) / sizeof(*sizes))];
        break;
      case 1:
        h.frame_bytes =
            r->below(2) ? sizes[r->below(sizeof(sizes) / sizeof(*sizes))] : h.frame_bytes - 64 + 16 * r->below(8);
        break;
      case 2:
        h.flags = static_cast<uint8_t>(h.flags ^ (1u << r->below(3)));
        break;
      case 3:
        h.code = static_cast<uint8_t>(r->below(4));
        break;
      default:
        h.dtype = static_cast<uint8_t>(r->below(kDTypeCount + 2));
    }
  }
  if (r->below(2)) forged.resize(std::min<uint64_t>(std::max(h.frame_bytes, kHeaderBytes), 1 << 16));
  seal(&forged, h);
  const Outcome outcome = decode_all(forged.data(), forged.size());
  ++g_summary["forged header"][outcome.status];
}

void bad_arguments() {
  uint16_t value = 0;
  uint8_t dst[256];
  uint64_t size = 0;
  FrameOptions o;
  CHECK(encode(nullptr, 1, o, dst, sizeof(dst), &size) == Status::bad_argument);
  CHECK(encode(&value, 1, o, nullptr, 0, &size) == Status::bad_argument);
  CHECK(encode(&value, 1, o, dst, sizeof(dst), nullptr) == Status::bad_argument);
  CHECK(encode(reinterpret_cast<uint8_t*>(&value) + 1, 1, o, dst, sizeof(dst), &size) == Status::bad_argument);
  CHECK(encode(&value, kMaxCount + 1, o, dst, sizeof(dst), &size) == Status::bad_argument);
  CHECK(encode(&value, kMaxCount, o, dst, sizeof(dst), &size) == Status::no_room);
  CHECK(encode(nullptr, 0, o, dst, sizeof(dst), &size) == Status::ok && size == kHeaderBytes);
  CHECK(decode(dst, sizeof(dst), DType::bf16, 0, nullptr) == Status::ok);
  CHECK(decode(nullptr, 64, DType::bf16, 0, nullptr) == Status::bad_argument);
  CHECK(decode(nullptr, 0, DType::bf16, 0, nullptr) == Status::truncated);
  o.dtype = static_cast<DType>(kDTypeCount);
  CHECK(frame_bound(o, 1) == 0 && static_bytes(o, 1) == 0);
  CHECK(encode(&value, 1, o, dst, sizeof(dst), &size) == Status::bad_argument);
}

// The vector checksum, past the first vectors and at every remainder.
void checksums(Random* r) {
  for (uint64_t words = 0; words < 70; ++words) {
    Bytes bytes(4 * words);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(r->next());
    uint64_t sum = 0;
    for (uint64_t i = 0; i < words; ++i) {
      uint32_t w;
      std::memcpy(&w, &bytes[4 * i], 4);
      sum += uint64_t{w} * checksum_key(i);
    }
    CHECK(payload_checksum(bytes.data(), bytes.size()) == sum);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000;
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  uint64_t every_bit = 0;
  {
    Random r(first_seed);
    g_doing = "known lies";
    known_lies(&r);
    known_lies_of_packed(&r);
    known_lies_of_dense(&r);
    known_lies_of_bare_headers();
    g_doing = "bad arguments";
    bad_arguments();
    g_doing = "checksums";
    checksums(&r);
  }
  Sample before;
  for (uint64_t seed = first_seed; seed < first_seed + rounds; ++seed) {
    g_doing = "seed " + std::to_string(seed);
    Random r(seed);
    Sample s =
        seed % 32 == 8 ? packed_sample(&r) : random_sample(&r, seed % 16 == 0 ? 3 * kGroupValues : 5 * kTileValues);
    encode_all(&s, r.below(16));
    round_trip(s);
    sums(s);
    truncate(&r, s);
    if (s.frame.size() < 700) {
      flip_every_bit(s);
      ++every_bit;
    }
    for (int i = 0; i < 20; ++i) garbage(&r);
    for (int i = 0; i < 20; ++i) {
      Bytes damaged = s.frame;
      damage(&r, &damaged, 0);
      expect_sound("damaged", s, damaged);
      forge_payload(&r, s);
      forge_slots(&r, s);
      forge_header(&r, s);
      if (!before.frame.empty()) splice(&r, s, before);
    }
    before = s;
  }

  std::printf("%" PRIu64 " rounds, %s, every bit of %" PRIu64 " frames\n", rounds,
              has_isa(Isa::avx512) ? "scalar, AVX2 and AVX-512"
              : has_isa(Isa::avx2) ? "scalar and AVX2"
                                   : "scalar",
              every_bit);
  for (const auto& kind : g_summary) {
    for (const auto& status : kind.second) {
      std::printf("  %-15s %9" PRIu64 "  %s\n", kind.first.c_str(), status.second, status_text(status.first));
    }
  }
  return 0;
}

#endif
