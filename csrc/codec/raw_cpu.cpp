// Code::raw: the tensor's bytes behind the header, padded with zeros.
#include <algorithm>

#include "codec/cpu.h"
#include "codec/workers.h"

namespace zipccl {
namespace cpu {
namespace {

void copy(const uint8_t* from, uint64_t bytes, uint8_t* to, const Threads& threads) {
  constexpr uint64_t kShareBytes = 1 << 20;
  const uint64_t n = ceil_div(bytes, kShareBytes);
  Shares shares(n);
  run_workers(threads, worker_count(threads, n), [&] {
    for (uint64_t i; shares.take(&i);) {
      std::memcpy(to + i * kShareBytes, from + i * kShareBytes, std::min(kShareBytes, bytes - i * kShareBytes));
    }
  });
}

}  // namespace

void encode_raw(const void* src, uint64_t bytes, uint8_t* frame, const Threads& threads) {
  copy(static_cast<const uint8_t*>(src), bytes, frame + kHeaderBytes, threads);
  std::memset(frame + kHeaderBytes + bytes, 0, align_up(bytes) - bytes);
}

void decode_raw(const uint8_t* frame, uint64_t bytes, void* dst, const Threads& threads) {
  copy(frame + kHeaderBytes, bytes, static_cast<uint8_t*>(dst), threads);
}

}  // namespace cpu
}  // namespace zipccl
