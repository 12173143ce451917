#include "transport/scratch.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace zipccl {

namespace {
// Smaller tensors are the allocator's business.
constexpr uint64_t kSmallest = 64 << 10;
}  // namespace

struct ScratchPool::State {
  mutable std::mutex mutex;
  std::multimap<uint64_t, c10::DataPtr> idle;  // by size
  uint64_t idle_bytes = 0, used_bytes = 0, peak_bytes = 0;

  c10::DataPtr take(uint64_t bytes, uint64_t* size) {
    std::lock_guard<std::mutex> lock(mutex);
    c10::DataPtr block;
    auto it = idle.lower_bound(bytes);
    *size = bytes;
    if (it != idle.end() && it->first <= 2 * bytes) {
      *size = it->first;
      block = std::move(it->second);
      idle.erase(it);
      idle_bytes -= *size;
    }
    used_bytes += *size;
    peak_bytes = std::max(peak_bytes, used_bytes);
    return block;
  }

  void give(uint64_t size, c10::DataPtr block) {
    std::lock_guard<std::mutex> lock(mutex);
    used_bytes -= size;
    idle.emplace(size, std::move(block));
    idle_bytes += size;
    while (idle_bytes > peak_bytes) {
      auto smallest = idle.begin();
      idle_bytes -= smallest->first;
      idle.erase(smallest);
    }
  }
};

ScratchPool::ScratchPool() : state_(std::make_shared<State>()) {}

at::Tensor ScratchPool::empty(int64_t n, at::ScalarType type) {
  const uint64_t bytes = static_cast<uint64_t>(n) * c10::elementSize(type);
  if (bytes < kSmallest) return at::empty({n}, at::TensorOptions(type));
  uint64_t size = 0;
  auto block = std::make_shared<c10::DataPtr>(state_->take(bytes, &size));
  if (!*block) *block = c10::GetAllocator(c10::DeviceType::CPU)->allocate(size);
  auto give = [state = state_, block, size](void*) { state->give(size, std::move(*block)); };
  return at::from_blob(block->get(), {n}, give, at::TensorOptions(type));
}

void ScratchPool::release() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->idle.clear();
  state_->idle_bytes = 0;
  state_->peak_bytes = state_->used_bytes;
}

ScratchPool::Usage ScratchPool::usage() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return {state_->idle_bytes + state_->used_bytes, state_->peak_bytes};
}

}  // namespace zipccl
