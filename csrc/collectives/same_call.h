// Whether all ranks are making the same call. gloo ends the process when a message is longer than its receiver expects,
// so before messages whose sizes follow from a call ranks tell each other, in messages of one size, what they call.
#pragma once

#include <string>

#include "collectives/dynamiq.h"

namespace zipccl {

// call: all that ranks must pass alike, as words of "name=value"; the first kCallBytes of it count. A collective call,
// on CPU tensors. Throws Error on every rank, where one differs.
constexpr int64_t kCallBytes = 256;
void check_same_call(const DynamiqPlace& place, const std::string& call);

}  // namespace zipccl
