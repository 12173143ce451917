// Frames with one lie each, and the error it must meet.
#pragma once

#include <functional>

#include "harness.h"

namespace zipccl {
namespace fuzz {

// One lie at a time, and the error it must meet.
inline void known_lies(Random* r) {
  Sample s;
  for (FrameLayout layout : kLayouts) {
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
      lie(Status::bad_header, [](FrameHeader* h) { h->flags |= 8; });
      lie(Status::bad_header, [](FrameHeader* h) { h->flags |= kLayoutFlags; });
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
      tamper(layout == FrameLayout::packed ? Status::bad_table : Status::bad_tile, words, 0x3002, 2);
      tamper(Status::bad_tile, words, 0x4002, 2);
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

// The slots of a packed frame and its raw tiles. Four groups of 32 tiles: the first two are constant, one of the third
// group is raw, and so is the last, which is not full.
inline void known_lies_of_packed(Random* r) {
  for (bool checksum : {false, true}) {
    Sample s;
    s.options = {DType::bf16, Code::fast, FrameLayout::packed, checksum};
    const uint64_t last = 4 * kGroupTiles - 1, raw = 2 * kGroupTiles + 5;
    s.count = last * kTileValues + 400;
    s.values.resize(2 * s.count);
    for (uint64_t i = 0; i < s.count; ++i) {
      const uint64_t tile = i / kTileValues;
      uint32_t v = static_cast<uint32_t>(100 + i % 6) << 7 | (r->next() & 0x807F);
      if (tile < 2) v = 0x3F80;
      if (tile == raw || tile == last) v = static_cast<uint32_t>(r->next());
      const uint16_t value = static_cast<uint16_t>(v);
      std::memcpy(&s.values[2 * i], &value, 2);
    }
    encode_all(&s, 0);
    round_trip(s);
    const uint64_t slots = slot_table_begin(s.count), words = tile_word_begin(s.count);
    const uint64_t good[] = {0, 30, 62, 94, 125};
    CHECK(std::memcmp(&s.frame[slots], good, sizeof(good)) == 0);

    const auto tamper = [&](Status status, uint64_t at, const void* value, size_t size) {
      Bytes forged = s.frame;
      CHECK(std::memcmp(&forged[at], value, size) != 0);
      std::memcpy(&forged[at], value, size);
      seal(&forged);
      expect("known lie", status, forged);
    };
    constexpr uint64_t kMost = ~uint64_t{0};
    const uint64_t wraps = kMost / kMaxUnitBytes + 1;  // times kMaxUnitBytes it is small again, modulo 2^64
    const uint64_t lies[][5] = {{1, 30, 62, 94, 125},
                                {1, 31, 63, 95, 126},
                                {0, 29, 61, 93, 124},
                                {0, 31, 62, 94, 125},
                                {0, 0, 0, 0, 0},
                                {0, 30, 62, 94, 129},
                                {0, 30, 62, 94, 1 << 20},
                                {0, 30, 62, 94, kMost},
                                {0, 30, 20, 94, 125},
                                {0, 30, 62, 94, wraps + 94},
                                {kMost - 29, 0, 32, 64, 95},
                                {0, kMost, 62, 94, 125},
                                {0, 1 << 20, (1 << 20) + 32, (1 << 20) + 64, 125},
                                {0, 30, 62, 94, 93},
                                {0, 30, 62, 126, 125},
                                {0, 30, kMost - 33, 94, 125},
                                {wraps, 30, 62, 94, 125}};
    for (const auto& lie : lies) tamper(Status::bad_table, slots, lie, sizeof(lie));

    const auto tamper_tile = [&](Status status, uint64_t tile, TileMode mode, uint32_t dynamic) {
      const uint16_t word = pack_tile_word(mode, dynamic);
      tamper(status, words + 2 * tile, &word, sizeof(word));
    };
    for (uint32_t wrong : {0u, 639u, 641u, 1024u}) tamper_tile(Status::bad_tile, raw, TileMode::raw, wrong);
    for (uint32_t wrong : {0u, 15u, 17u, 400u}) tamper_tile(Status::bad_tile, last, TileMode::raw, wrong);
    for (TileMode mode : {TileMode::constant, TileMode::held}) {
      tamper_tile(Status::bad_table, raw, mode, 2);
      tamper_tile(Status::bad_tile, raw, mode, 3);
    }
    tamper_tile(Status::bad_tile, last, TileMode::constant, 2);
    tamper_tile(Status::bad_table, 0, TileMode::held, 2);
    tamper_tile(Status::bad_table, 0, TileMode::raw, kTileValues - kPlanesBytes);
    tamper_tile(Status::bad_escapes, kGroupTiles, TileMode::window, 1);

    // All that precedes the units but nothing behind it, and less than that.
    const uint64_t least = static_bytes(s.options, s.count);
    CHECK(least == packed_units_begin(s.count) + 400 + kPlanesBytes && packed_units_begin(s.count) % 32 == 0);
    for (uint64_t bytes : {least, least - kFrameAlign}) {
      Bytes shorter(s.frame.begin(), s.frame.begin() + static_cast<std::ptrdiff_t>(bytes));
      FrameHeader h = header_of(shorter);
      h.frame_bytes = bytes;
      seal(&shorter, h);
      expect("known lie", bytes < least ? Status::bad_header : Status::bad_table, shorter);
    }
  }
}

// The same for code dense: tiles constant, raw, window, then constants of another group, then a short window.
inline void known_lies_of_dense(Random* r) {
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
inline void known_lies_of_bare_headers() {
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

}  // namespace fuzz
}  // namespace zipccl
