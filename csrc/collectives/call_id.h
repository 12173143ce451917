// Which call of its group a rank is at, in one word that goes with the sizes that CPU ranks exchange anyway. Ranks that
// make different calls are told at once, and none takes messages of one call for those of another: say of the next one,
// where a call on one rank alone was not compressed, being empty or of another dtype.
//
// bits 0-31: counts of values (and the root, where there is one), mixed; 32-37: dtype; 38-41: collective; 42-63: number
// among the group's calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "policy/model.h"

namespace zipccl {

class CallId {
 public:
  CallId() = default;
  CallId(Op op, uint64_t number) : word_(number << 42 | static_cast<uint64_t>(op) << 38) {}

  // The same call, with what all ranks must pass alike.
  CallId of(DType dtype, const std::vector<int64_t>& counts) const;

  int64_t word() const { return static_cast<int64_t>(word_); }
  uint64_t number() const { return word_ >> 42; }

  // What another rank's call is instead, in words; empty if it is this one.
  std::string differs(int64_t theirs) const;

 private:
  uint64_t word_ = 0;
};

}  // namespace zipccl
