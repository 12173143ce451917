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
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "codec/codec.h"
#include "random_values.h"

namespace {

using namespace zipccl;

std::string g_doing;  // for the failure report

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
Outcome decode_one(const uint8_t* bytes, size_t n, Isa isa, const Threads& threads = {}) {
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

std::vector<Isa> isas() {
  std::vector<Isa> all = {Isa::scalar};
  for (Isa isa : {Isa::avx2, Isa::avx512}) {
    if (has_isa(isa)) all.push_back(isa);
  }
  return all;
}

// One call on this thread, the others on new ones.
void run_on_threads(int n, void (*work)(void*), void* argument) {
  std::vector<std::thread> others;
  for (int i = 1; i < n; ++i) others.emplace_back(work, argument);
  work(argument);
  for (std::thread& other : others) other.join();
}
constexpr Threads kThree = {3, run_on_threads};

Outcome decode_all(const uint8_t* bytes, size_t n) {
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

FrameHeader header_of(const Bytes& frame) {
  FrameHeader h;
  std::memcpy(&h, frame.data(), sizeof(h));
  return h;
}

// Puts h in front of the frame with checks that hold.
void put_header(Bytes* frame, const FrameHeader& h) {
  alignas(FrameHeader) uint32_t words[kHeaderBytes / 4];
  std::memcpy(words, &h, kHeaderBytes);
  words[15] = header_check(*reinterpret_cast<const FrameHeader*>(words));
  std::memcpy(frame->data(), words, kHeaderBytes);
}

void seal(Bytes* frame, FrameHeader h) {
  const uint64_t payload = frame->size() - kHeaderBytes;
  h.checksum = h.flags & kFlagChecksum ? payload_checksum(frame->data() + kHeaderBytes, payload / 4 * 4) : 0;
  put_header(frame, h);
}

}  // namespace

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

struct Sample {
  FrameOptions options;
  uint64_t count;
  Bytes values;
  Bytes frame;
};

Sample random_sample(Random* r, uint64_t most) {
  Sample s;
  s.options.dtype = r->below(3) == 0 ? static_cast<DType>(r->below(kDTypeCount)) : DType::bf16;
  const uint64_t code = r->below(12);
  s.options.code = code == 0 ? Code::raw : code < 6 ? Code::fast : Code::dense;
  s.options.layout = r->below(2) ? FrameLayout::split : FrameLayout::compact;
  s.options.checksum = r->below(2) != 0;
  s.count = r->below(3) == 0 ? r->below(40) : r->below(most + 1);
  if (s.options.dtype == DType::bf16 && s.options.code == Code::fast) {
    s.values = random_bf16(r, s.count);
  } else {
    s.values = random_elements(r, dense::format_of(s.options.dtype), dense::element_count(s.options.dtype, s.count));
  }
  return s;
}

// Encodes with every ISA, into exactly the bound, exactly the size and one byte less.
void encode_all(Sample* s, size_t shift) {
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

// ---- What is done to frames -------------------------------------------------------------------------------------

std::map<std::string, std::map<Status, uint64_t> > g_summary;  // kind -> status -> number

// Decodes a frame that was damaged without new checks: with a checksum, correct or refused.
void expect_sound(const char* kind, const Sample& s, const Bytes& damaged) {
  const Outcome outcome = decode_all(damaged.data(), damaged.size());
  ++g_summary[kind][outcome.status];
  if (s.options.checksum && outcome.status == Status::ok) CHECK(outcome.values == s.values);
}

void expect(const char* kind, Status status, const Bytes& frame) {
  const Outcome outcome = decode_all(frame.data(), frame.size());
  ++g_summary[kind][outcome.status];
  CHECK(outcome.status == status);
}

void round_trip(const Sample& s) {
  const Outcome outcome = decode_all(s.frame.data(), s.frame.size());
  ++g_summary["intact"][outcome.status];
  CHECK(outcome.status == Status::ok);
  CHECK(outcome.values == s.values);
  Bytes longer = s.frame;  // in a padded collective
  longer.resize(longer.size() + 40, 0xEE);
  CHECK(decode_all(longer.data(), longer.size()).values == s.values);
  CHECK(decode(s.frame.data(), s.frame.size(), s.options.dtype, s.count + 1, nullptr) == Status::unexpected);
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

void seal(Bytes* frame) { seal(frame, header_of(*frame)); }

// Damage behind the header under checks that hold: no error need follow, but no step outside either.
void forge_payload(Random* r, const Sample& s) {
  Bytes forged = s.frame;
  const bool tables_only = r->below(2) != 0 && effective_code(s.options) != Code::raw;
  if (tables_only) {
    const bool elements = effective_code(s.options) == Code::dense;
    const uint64_t end = tables_end(elements ? dense::element_count(s.options.dtype, s.count) : s.count);
    Bytes tables(forged.begin(), forged.begin() + static_cast<std::ptrdiff_t>(end));
    damage(r, &tables, kHeaderBytes);
    std::memcpy(forged.data(), tables.data(), tables.size());
  } else {
    damage(r, &forged, kHeaderBytes);
  }
  seal(&forged);
  const Outcome outcome = decode_all(forged.data(), forged.size());
  ++g_summary[tables_only ? "forged tables" : "forged payload"][outcome.status];
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

// One lie at a time, and the error it must meet.
void known_lies(Random* r) {
  Sample s;
  for (FrameLayout layout : {FrameLayout::compact, FrameLayout::split}) {
    for (bool checksum : {false, true}) {
      // Tiles of a known kind each, over two groups: constant, raw, window with escapes, then constants, then a tail.
      s.options = {DType::bf16, Code::fast, layout, checksum};
      s.count = 33 * kTileValues + 700;
      s.values.assign(2 * s.count, 0);
      for (uint64_t i = kTileValues; i < s.count; ++i) {
        uint32_t v = 0;
        if (i < 2 * kTileValues) v = static_cast<uint32_t>(r->next());
        if (i >= 2 * kTileValues && i < 3 * kTileValues) v = static_cast<uint32_t>(i % 40 == 0 ? 10 : 100 + i % 5) << 7;
        if (i >= 33 * kTileValues) v = static_cast<uint32_t>(120 + i % 3) << 7;
        const uint16_t value = static_cast<uint16_t>(v);
        std::memcpy(&s.values[2 * i], &value, 2);
      }
      encode_all(&s, 0);
      round_trip(s);

      const auto lie = [&](Status status, const std::function<void(FrameHeader*)>& change) {
        Bytes forged = s.frame;
        FrameHeader h = header_of(forged);
        change(&h);
        seal(&forged, h);
        expect("known lie", status, forged);
      };
      lie(Status::ok, [](FrameHeader*) {});
      lie(Status::bad_magic, [](FrameHeader* h) { h->magic ^= 1; });
      lie(Status::bad_version, [](FrameHeader* h) { h->version = 2; });
      lie(Status::bad_header, [](FrameHeader* h) { h->dtype = kDTypeCount; });
      lie(Status::bad_header, [](FrameHeader* h) { h->dtype = static_cast<uint8_t>(DType::f16); });
      lie(Status::bad_header, [](FrameHeader* h) { h->code = kCodeCount; });
      lie(Status::bad_header, [](FrameHeader* h) { h->code = static_cast<uint8_t>(Code::raw); });
      lie(Status::bad_header, [](FrameHeader* h) { h->flags |= 4; });
      lie(Status::bad_header, [](FrameHeader* h) { h->reserved[0] = 1; });
      lie(Status::bad_header, [](FrameHeader* h) { h->reserved[27] = 1; });
      lie(Status::bad_header, [](FrameHeader* h) { h->count = kMaxCount + 1; });
      lie(Status::bad_header, [](FrameHeader* h) { h->count = kMaxCount; });
      lie(Status::bad_header, [](FrameHeader* h) { h->count = 0; });
      lie(Status::bad_header, [](FrameHeader* h) { h->frame_bytes += 8; });
      lie(Status::bad_header, [](FrameHeader* h) { h->frame_bytes = kHeaderBytes; });
      lie(Status::bad_header, [](FrameHeader* h) { h->frame_bytes = ~uint64_t(0) & ~uint64_t(15); });
      lie(Status::truncated, [](FrameHeader* h) { h->frame_bytes += 16; });

      const auto tamper = [&](Status status, uint64_t at, uint64_t value, size_t size) {
        Bytes forged = s.frame;
        CHECK(std::memcmp(&forged[at], &value, size) != 0);
        std::memcpy(&forged[at], &value, size);
        seal(&forged);
        expect("known lie", status, forged);
      };
      const auto word = [](TileMode mode, uint32_t dynamic) { return uint64_t{pack_tile_word(mode, dynamic)}; };
      const uint64_t words = tile_word_begin(s.count), bases = tile_base_begin(s.count);
      tamper(Status::bad_table, group_table_begin(), 16, 8);
      tamper(Status::bad_table, group_table_begin() + 8, 0, 8);
      tamper(Status::bad_table, group_table_begin() + 8, ~uint64_t(15), 8);
      tamper(Status::bad_tile, words, word(TileMode::constant, 1), 2);
      tamper(Status::bad_tile, words, 0x3002, 2);
      tamper(Status::bad_tile, words, 0xFFFF, 2);
      tamper(Status::bad_tile, words + 2, word(TileMode::raw, kTileValues - 1), 2);
      tamper(Status::bad_tile, words + 2, word(TileMode::raw, kTileValues + 1), 2);
      tamper(Status::bad_tile, words + 4, word(TileMode::window, kTileValues + 1), 2);
      tamper(Status::bad_tile, words + 2 * 33, word(TileMode::window, 701), 2);
      tamper(Status::bad_tile, bases, 1, 1);
      tamper(Status::bad_tile, bases + 1, 1, 1);
      tamper(Status::bad_tile, bases + 2, kMaxBase + 1, 1);
      const uint32_t escapes = kTileValues / 40 + 1;
      tamper(Status::bad_escapes, words + 4, word(TileMode::window, escapes - 2), 2);
      tamper(Status::bad_escapes, words + 4, word(TileMode::window, escapes + 1), 2);
      tamper(Status::bad_table, words + 2 * 33, word(TileMode::window, 700), 2);

      Bytes longer = s.frame;  // a part that no group owns
      longer.resize(longer.size() + kFrameAlign);
      FrameHeader h = header_of(longer);
      h.frame_bytes = longer.size();
      seal(&longer, h);
      expect("known lie", Status::bad_table, longer);
    }
  }
}

// The same for code dense: tiles constant, raw, window, then constants of another group, then a short window.
void known_lies_of_dense(Random* r) {
  for (bool checksum : {false, true}) {
    Sample s;
    s.options = {DType::f32, Code::dense, FrameLayout::compact, checksum};
    s.count = 33 * kTileValues + 700;
    s.values.assign(4 * s.count, 0);
    for (uint64_t i = kTileValues; i < s.count; ++i) {
      uint32_t v = 0;
      const uint32_t low = static_cast<uint32_t>(r->next());
      if (i < 2 * kTileValues) v = low;
      if (i >= 2 * kTileValues && i < 3 * kTileValues) v = (i % 40 == 0 ? 10 : 100 + i % 3) << 23 | (low & 0x807FFFFF);
      if (i >= 33 * kTileValues) v = static_cast<uint32_t>(120 + i % 3) << 23 | (low & 0x807F0000);
      std::memcpy(&s.values[4 * i], &v, 4);
    }
    encode_all(&s, 0);
    round_trip(s);
    const auto tamper = [&](Status status, uint64_t at, uint64_t value, size_t size) {
      Bytes forged = s.frame;
      CHECK(std::memcmp(&forged[at], &value, size) != 0);
      std::memcpy(&forged[at], &value, size);
      seal(&forged);
      expect("known lie", status, forged);
    };
    const auto word = [](uint32_t mode, uint32_t dynamic) { return uint64_t{mode << 12 | dynamic}; };
    const uint64_t words = tile_word_begin(s.count), bases = tile_base_begin(s.count);
    tamper(Status::bad_table, group_table_begin(), 16, 8);
    tamper(Status::bad_table, group_table_begin() + 8, ~uint64_t(15), 8);
    tamper(Status::bad_tile, words, word(dense::kConstant, 3), 2);
    tamper(Status::bad_tile, words, word(dense::kModeCount, 0), 2);
    tamper(Status::bad_tile, words + 2, word(dense::kRaw, 1), 2);
    tamper(Status::bad_tile, words + 4, word(9, 0), 2);  // a rest of doubles
    tamper(Status::bad_tile, words + 4, word(0, 3 * kTileValues / 4 + kTileValues + 1), 2);
    tamper(Status::bad_tile, bases, 1, 1);
    tamper(Status::bad_tile, bases + 1, 1, 1);
    const uint32_t unnamed = kTileValues / 40, size = 3 * ((unnamed + 3) / 4) + unnamed;
    tamper(Status::bad_escapes, words + 4, word(0, size - 1), 2);
    tamper(Status::bad_escapes, words + 4, word(0, size + 1), 2);
    tamper(Status::bad_table, words + 2 * 33, word(3, 1000), 2);
  }
}

// Headers whose sizes agree only in arithmetic that wraps, and a checksum nobody asked for.
void known_lies_of_bare_headers() {
  Bytes frame(kHeaderBytes);
  FrameHeader h = make_header({DType::c128, Code::raw, FrameLayout::compact, false}, 0, kHeaderBytes, 0);
  put_header(&frame, h);
  expect("known lie", Status::ok, frame);
  for (uint64_t count : {uint64_t(1) << 60, uint64_t(1) << 63, ~uint64_t(0) - 2}) {
    h.count = count;
    h.frame_bytes = align_up(kHeaderBytes + count * 16);
    put_header(&frame, h);
    expect("known lie", Status::bad_header, frame);
  }
  h.count = 0;
  h.frame_bytes = kHeaderBytes;
  h.checksum = 1;
  put_header(&frame, h);
  expect("known lie", Status::bad_header, frame);
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
    Sample s = random_sample(&r, seed % 16 == 0 ? 3 * kGroupValues : 5 * kTileValues);
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
