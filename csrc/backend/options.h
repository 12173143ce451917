// Options of one group, as the C++ side needs them. Python's zipccl.Options fills them in (with environment variables).
#pragma once

#include <cstdint>
#include <optional>

#include "codec/codec.h"
#include "policy/switcher.h"

namespace zipccl {

struct BackendOptions {
  Mode all_gather = Mode::automatic;
  Code code = Code::fast;
  bool checksum = false;
  bool log_decisions = false;         // ZIPCCL_DEBUG=INFO
  std::optional<uint64_t> min_bytes;  // total bytes of a call below which it stays raw

  // Without a word from the user: a forced collective is zipped whatever its size; an automatic one is considered
  // where the codec's fixed costs can be won back at all.
  static constexpr uint64_t kAutoMinBytes = 1 << 20;
  uint64_t threshold(Mode mode) const { return min_bytes.value_or(mode == Mode::zip ? 0 : kAutoMinBytes); }
};

}  // namespace zipccl
