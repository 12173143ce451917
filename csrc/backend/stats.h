// Counters of one group, per collective. Shared by the caller's thread and the CPU worker.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "collectives/traffic.h"

namespace zipccl {

struct OpStats {
  uint64_t calls = 0;
  uint64_t zipped_calls = 0;
  Traffic traffic;  // of all calls; for raw calls wire_bytes == raw_bytes
};

class Stats {
 public:
  void add_raw(const std::string& op, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    OpStats& s = ops_[op];
    ++s.calls;
    s.traffic.raw_bytes += bytes;
    s.traffic.wire_bytes += bytes;
  }

  void add_zipped(const std::string& op, const Traffic& t) {
    std::lock_guard<std::mutex> lock(mutex_);
    OpStats& s = ops_[op];
    ++s.calls;
    ++s.zipped_calls;
    s.traffic += t;
  }

  std::map<std::string, OpStats> read() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return ops_;
  }

  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    ops_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, OpStats> ops_;
};

}  // namespace zipccl
