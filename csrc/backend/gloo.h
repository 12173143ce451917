// What gloo takes, and what it makes of mistakes.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/debug.h>

namespace zipccl {

// gloo moves these dtypes. Others are the same to it as bytes: a move changes none.
inline bool gloo_moves(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

// gloo ends a process that is sent more than it expects. Where the user looks for mistakes, ranks compare first what
// they will send in an all-to-all, which torch does not do for them.
inline bool compares(const at::Tensor& t) { return t.is_cpu() && c10d::debug_level() == c10d::DebugLevel::Detail; }

}  // namespace zipccl
