#include "policy/switcher.h"

#include <algorithm>
#include <cstdio>

namespace zipccl {

namespace {
// Zip only when it is expected to win by this factor: a tie is not worth the codec's memory traffic.
constexpr double kMargin = 1.03;
constexpr double kRatioWeight = 0.25;  // of the newest observation

std::string format(const char* pattern, double a, double b, double c, double d, double e) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, a, b, c, d, e);
  return text;
}
}  // namespace

void Switcher::set_measurements(const LinkModel& link, const CodecModel& codec) {
  link_ = link;
  codec_ = codec;
  measured_ = true;
}

Decision Switcher::all_gather(int world, uint64_t shard_bytes) const {
  double shard = static_cast<double>(shard_bytes);
  Decision d;
  d.raw_seconds = all_gather_raw_seconds(link_, world, shard);
  d.zip_seconds = all_gather_zip_seconds(link_, codec_, world, shard, ratio_);
  d.choice = d.zip_seconds * kMargin < d.raw_seconds ? Choice::zip : Choice::raw;
  d.reason = format(
      "raw %.3f ms, zip %.3f ms expected at %.3f GB/s measured on this link and %.3f of the bytes; "
      "zip pays below %.3f GB/s",
      d.raw_seconds * 1e3, d.zip_seconds * 1e3, link_.bytes_per_s / 1e9, ratio_,
      all_gather_break_even(codec_, world, ratio_) / 1e9);
  return d;
}

void Switcher::observe(uint64_t raw_bytes, uint64_t wire_bytes) {
  if (raw_bytes == 0) return;
  double seen = static_cast<double>(wire_bytes) / static_cast<double>(raw_bytes);
  ratio_ += kRatioWeight * (std::min(seen, 1.5) - ratio_);
}

}  // namespace zipccl
