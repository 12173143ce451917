// All-to-all of frames (ZipCCL sections 4.2 and 5.1). One message to each rank; both ends know its raw size, so both
// know whether it is zipped: messages under `pair_min_bytes` travel as they are, in the same exchange.
//
//   Design 1   sizes | frames: exactly the bytes needed
//   Design 2   as much of each frame as it is expected to have (forecast.h) | the rest of those that have more. Sizes
//              travel meanwhile (CUDA) or are read from the headers (CPU), so nobody waits for a size before data
//              moves; as a rule there is no rest. ZipCCL sends the static part first, whose size needs no history.
//
// On the CPU ranks first compare what they are about to send, while frames are encoded: gloo would end a process that
// gets more than it expects.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <vector>

#include "collectives/place.h"
#include "collectives/traffic.h"

namespace zipccl {

enum class Design : uint8_t { one = 1, two = 2 };

struct PairOptions {
  FrameOptions frame;
  Design design = Design::two;
  uint64_t min_bytes = 0;  // messages with fewer raw bytes are not zipped
  uint16_t use = 0;        // what receivers do with the values: sums differ by it; compared where messages are zipped
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();  // on all ranks alike
};

// Sends inputs[r] (contiguous) to rank r; nothing moves for the own rank. What rank r sends arrives as a frame of
// outputs[r].numel() values in the result (undefined where the message is raw or empty), or, raw, in outputs[r]
// (contiguous) itself. Adds to *traffic.
std::vector<at::Tensor> exchange(const Place& place, const std::vector<at::Tensor>& inputs,
                                 const std::vector<at::Tensor>& outputs, const PairOptions& options, Traffic* traffic);

// inputs[r] to rank r, outputs[r] from rank r: any strides, any counts, 0 too; the own input is copied.
Traffic all_to_all_zip(const Place& place, const std::vector<at::Tensor>& inputs,
                       const std::vector<at::Tensor>& outputs, const PairOptions& options);

// The same as bytes, for inner backends that lack the dtype or lists.
void all_to_all_raw(const Place& place, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

}  // namespace zipccl
