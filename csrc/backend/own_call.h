// One call of a collective that zipccl may zip, whatever the collective: what it moves, how it is done zipped and how
// raw. ZipBackend::run() takes it from there, on the CPU worker or on the group's CUDA stream.
#pragma once

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "collectives/place.h"
#include "collectives/traffic.h"
#include "policy/switcher.h"

namespace zipccl {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// The raw form of a call, to be made on whichever backend carries it.
using RawCall = std::function<WorkPtr(c10d::Backend&)>;

// How long a call may take, and whether the caller goes on at once.
struct Patience {
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool async = true;
};
template <typename Options>
Patience patience(const Options& opts) {
  return {opts.timeout, opts.asyncOp};
}

// What profilers show of a call, in the manner of "gloo:all_gather". They keep the pointer.
inline const char* profile_title(Op op) {
  constexpr const char* titles[kOpCount] = {"zipccl:all_gather", "zipccl:all_to_all", "zipccl:reduce_scatter",
                                            "zipccl:all_reduce", "zipccl:broadcast",  "zipccl:scatter",
                                            "zipccl:gather"};
  return titles[static_cast<int>(op)];
}

struct OwnCall {
  Op op;
  c10d::OpType type;
  std::vector<at::Tensor> inputs, outputs;  // as the user passed them; outputs are the future's value
  Patience patience;
  RawCall raw;
  // Instead of `raw` where gloo lacks this form or dtype of the collective: the same by what it has.
  std::function<void(const Place&)> raw_here;

  // Filled in where the call can be zipped; all ranks know these alike.
  bool zippable = false;
  bool only_zipped = false;  // the inner backend refuses it raw
  CallSize size;             // in the sense of policy/model.h
  int root = -1;             // -1: none
  FrameOptions frame;
  std::function<Traffic(const Place&, Choice)> zip;

  uint64_t received = 0;  // raw bytes from other ranks, for the statistics
};

}  // namespace zipccl
