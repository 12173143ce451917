#include "collectives/forecast.h"

#include <algorithm>

namespace zipccl {

namespace {
constexpr int kScale = 20;

// Header and tables of a frame that is not split.
uint64_t tables(FrameOptions options, uint64_t count) {
  options.layout = FrameLayout::compact;
  return static_bytes(options, count);
}
}  // namespace

uint64_t Forecast::bytes(Way way, int rank, const FrameOptions& options, uint64_t count) const {
  auto it = rates_.find({way, rank, options.dtype, options.code});
  const uint64_t least = tables(options, count), most = frame_bound(options, count);
  if (it == rates_.end()) {
    FrameOptions split = options;
    split.layout = FrameLayout::split;
    return std::min(static_bytes(split, count), most);
  }
  const unsigned __int128 rate = it->second.last + it->second.spread;
  const auto values = static_cast<uint64_t>((rate * count + ((1 << kScale) - 1)) >> kScale);
  return std::min(align_up(least + values), most);
}

bool Forecast::knows(Way way, int rank, const FrameOptions& options) const {
  return rates_.count({way, rank, options.dtype, options.code}) != 0;
}

void Forecast::learn(Way way, int rank, const FrameOptions& options, uint64_t count, uint64_t frame_bytes) {
  if (count < static_cast<uint64_t>(kLeastCount)) return;
  const uint64_t least = tables(options, count);
  const unsigned __int128 values = frame_bytes > least ? frame_bytes - least : 0;
  const auto rate =
      static_cast<uint64_t>(((values << kScale) + count - 1) / count);  // upwards: such a frame fits again
  const auto [it, first] = rates_.try_emplace({way, rank, options.dtype, options.code});
  Rate& known = it->second;
  const uint64_t off = first ? 0 : std::max(rate, known.last) - std::min(rate, known.last);
  known.last = rate;
  // What is sent for nothing stays below a sixteenth; where frames differ more, the rest of some goes behind.
  known.spread = std::min(std::max(off, known.spread - known.spread / 4), rate / 16);
}

}  // namespace zipccl
