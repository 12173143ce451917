// Measures a group's link and the codec once, with the group's own calls, and agrees on the result.
#pragma once

#include <vector>

#include "collectives/place.h"
#include "policy/switcher.h"

namespace zipccl {

// Collective calls: every rank of the group must make them at the same place. After them all ranks hold the same
// numbers, the slowest rank's.

// Elementwise maximum over ranks, on the host: alike to the last bit.
std::vector<double> largest(const Place& place, const std::vector<double>& values);

// Link, sizes and codec. Moves 4 MiB per rank a few times, more on fast links. *chosen, unless null, gets the code,
// fast or dense, that is expected to take less time here, and the switcher its rates.
void measure(const Place& place, const FrameOptions& options, Switcher* switcher, std::optional<Code>* chosen);

// Whether sizes of CUDA calls travel faster by `host` than by the place's own messages.
bool faster_by_host(const Place& place, const HostMessages& host);

}  // namespace zipccl
