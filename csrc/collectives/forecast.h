// How large the next frame to or from a rank will be, judged by the frames before it. Both ends of a message have seen
// the same frames, so they come to the same number without a word: what Design 2 of the all-to-all sends at once, and
// all-gathers where all ranks have seen the same frames.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "codec/codec.h"

namespace zipccl {

class Forecast {
 public:
  // Values of the smallest frame that is learnt from and forecast well: rounding to 16 bytes says more about the size
  // of smaller ones than their values do.
  static constexpr int64_t kLeastCount = 4096;

  enum class Way : uint8_t { to, from, all };  // all: from everybody to everybody, whatever the rank

  // Bytes, from the header to frame_bound(). Before the first frame: as if no value had escaped its tile's window,
  // which is the static part of ZipCCL's Design 2; code dense: header and tables.
  uint64_t bytes(Way way, int rank, const FrameOptions& options, uint64_t count) const;

  // Whether a frame like it was seen.
  bool knows(Way way, int rank, const FrameOptions& options) const;

  // Both ends must do so for the same frames.
  void learn(Way way, int rank, const FrameOptions& options, uint64_t count, uint64_t frame_bytes);

 private:
  // In bytes behind header and tables per 2^20 values: whole numbers, alike whatever the machine.
  struct Rate {
    uint64_t last = 0;
    uint64_t spread = 0;  // how far the frames before were off
  };
  using Key = std::tuple<Way, int, DType, Code>;
  std::map<Key, Rate> rates_;
};

}  // namespace zipccl
