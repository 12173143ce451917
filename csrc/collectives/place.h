// Where a zipped collective runs: a device's engine, and messages to the other ranks.
#pragma once

#include <string>

#include "collectives/engine.h"
#include "transport/messages.h"

namespace zipccl {

struct Place {
  Engine& engine;
  const Messages& messages;
  const std::string& what;  // the call, for errors

  int rank() const { return messages.rank(); }
  int world() const { return messages.world(); }
};

// Ranks whose sizes cannot be right do not get to drive anybody's memory. Throws Error naming the rank.
void check_frame_size(int64_t bytes, const FrameOptions& options, uint64_t count, int rank, const std::string& what);

// The bytes of a contiguous tensor, as uint8.
at::Tensor as_bytes(const at::Tensor& t);

}  // namespace zipccl
