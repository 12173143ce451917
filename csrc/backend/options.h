// Options of one group, as the C++ side needs them. Python's zipccl.Options fills them in (with environment variables).
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <optional>

#include "codec/codec.h"
#include "policy/switcher.h"

namespace zipccl {

// Which all-to-all design, see collectives/all_to_all.h.
enum class DesignChoice : uint8_t { automatic, one, two };

struct BackendOptions {
  std::array<Mode, kOpCount> mode{};  // by Op
  Code code = Code::fast;
  bool choose_code = false;  // fast or dense, by what was measured; `code` until then
  DesignChoice design = DesignChoice::automatic;
  std::optional<at::ScalarType> wire_dtype;  // of zipped reduce-scatter and all-reduce
  bool checksum = false;
  int max_sms = 0;                    // multiprocessors the CUDA codec may use at a time, 0: all
  bool log_decisions = false;         // ZIPCCL_DEBUG=INFO
  std::optional<uint64_t> min_bytes;  // bytes of a call below which it stays raw

  Mode of(Op op) const { return mode[static_cast<int>(op)]; }

  // Without a word from the user: a forced collective is zipped whatever its size; an automatic one is considered
  // where the codec's fixed costs can be won back at all.
  static constexpr uint64_t kAutoMinBytes = 1 << 20;
  uint64_t threshold(Mode m) const { return min_bytes.value_or(m == Mode::zip ? 0 : kAutoMinBytes); }
};

}  // namespace zipccl
