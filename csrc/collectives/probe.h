// Measures a group's link and the codec once, with the group's own calls, and agrees on the result.
#pragma once

#include "collectives/engine.h"
#include "policy/switcher.h"
#include "transport/messages.h"

namespace zipccl {

// A collective call: every rank of the group must make it at the same place. Moves about 4 MiB per rank a few times.
// After it all ranks hold the same numbers: the slowest rank's.
void measure(Engine& engine, const Messages& messages, const FrameOptions& options, Switcher* switcher);

}  // namespace zipccl
