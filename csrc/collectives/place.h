// Where a zipped collective runs: a device's engine, and messages to the other ranks.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "collectives/call_id.h"
#include "collectives/engine.h"
#include "collectives/forecast.h"
#include "transport/messages.h"

namespace zipccl {

// Messages of CPU tensors among the same ranks, in the order of the group's calls.
class HostMessages {
 public:
  virtual ~HostMessages() = default;
  virtual void run(const std::function<void(const Messages&)>& exchange) const = 0;
};

struct Place {
  Engine& engine;
  const Messages& messages;
  const std::string& what;             // the call, for errors
  const HostMessages* host = nullptr;  // for words of a CUDA call, where that is the faster way (words.h)
  std::optional<Code> code = {};       // of bf16 frames, instead of their options'
  Forecast* forecast = nullptr;        // of this collective's frames between two ranks; null: nothing is known
  CallId call = {};

  int rank() const { return messages.rank(); }
  int world() const { return messages.world(); }
  FrameOptions frames(FrameOptions options) const {
    if (code && options.dtype == DType::bf16) options.code = *code;
    return options;
  }
};

// Ranks whose sizes cannot be right do not get to drive anybody's memory. Throws Error naming the rank.
void check_frame_size(int64_t bytes, const FrameOptions& options, uint64_t count, int rank, const std::string& what);

// Whether a tensor's memory is its values in order, where the codec can read and write them: some tensors made from
// buffers are not even aligned to their dtype.
bool is_plain(const at::Tensor& t);
// The tensor if it is plain, else a copy that is.
at::Tensor plain(const at::Tensor& t);
// The tensor if it is plain, else one of its kind to write to instead; copy_ it back.
at::Tensor plain_target(const at::Tensor& t);

// NCCL moves memory as it lies. Where it looks, it takes tensors that are dense in their memory format (channels last).
bool is_dense(const at::Tensor& t);
// CUDA tensors without gaps as NCCL would move them: dense ones as rows of what lies together, others (transposed ones)
// in one dimension. Those with gaps, and CPU tensors, unchanged.
at::Tensor as_it_lies(const at::Tensor& t);

// The bytes of a contiguous tensor, as uint8.
at::Tensor as_bytes(const at::Tensor& t);

}  // namespace zipccl
