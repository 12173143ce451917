// What one collective call moved and how long its phases took, on this rank.
#pragma once

#include <chrono>
#include <cstdint>

namespace zipccl {

// Bytes received from other ranks. Seconds are host time: on CUDA `sizes` is the wait for the exchanged sizes and the
// others are the cost of enqueueing.
struct Traffic {
  uint64_t raw_bytes = 0;
  uint64_t wire_bytes = 0;  // padding included
  double encode = 0;
  double sizes = 0;
  double transfer = 0;
  double decode = 0;

  Traffic& operator+=(const Traffic& o) {
    raw_bytes += o.raw_bytes;
    wire_bytes += o.wire_bytes;
    encode += o.encode;
    sizes += o.sizes;
    transfer += o.transfer;
    decode += o.decode;
    return *this;
  }
};

class Stopwatch {
 public:
  // Seconds since the last lap.
  double lap() {
    auto now = std::chrono::steady_clock::now();
    double s = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return s;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace zipccl
