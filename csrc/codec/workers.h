// How the groups of a frame are shared out to the threads of a call.
//
// Workers take groups in order, each the next one that nobody has. A decoder needs no more: the group table says where
// every group's part begins. An encoder learns that only when all groups before it have been encoded, so a worker
// encodes into memory of its own, waits until its predecessor has got its place, takes the one behind it, and copies.
// As groups are taken in order, whoever is waited for is at work, however few workers there really are.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "codec/cpu.h"

namespace zipccl {
namespace cpu {

// Workers for n shares of work.
inline int worker_count(const Threads& threads, uint64_t n) {
  if (threads.run == nullptr || threads.n <= 1 || n <= 1) return 1;
  return n < static_cast<uint64_t>(threads.n) ? static_cast<int>(n) : threads.n;
}

// Calls work() `workers` times.
template <typename Work>
void run_workers(const Threads& threads, int workers, const Work& work) {
  if (workers == 1) return work();
  threads.run(
      workers, [](void* w) { (*static_cast<const Work*>(w))(); }, const_cast<Work*>(&work));
}

// The numbers 0 to n - 1, each for one worker.
class Shares {
 public:
  explicit Shares(uint64_t n) : n_(n) {}
  bool take(uint64_t* i) {
    *i = next_.fetch_add(1, std::memory_order_relaxed);
    return *i < n_;
  }

 private:
  std::atomic<uint64_t> next_{0};
  const uint64_t n_;
};

// Places of groups behind each other, given in order.
class Places {
 public:
  explicit Places(uint64_t begin) : end_(begin) {}

  // Where group g begins, which has `bytes`. Waits for the groups before it.
  uint64_t give(uint64_t g, uint64_t bytes) {
    for (int spins = 0; placed_.load(std::memory_order_acquire) != g; ++spins) {
      if (spins > kSpins) std::this_thread::yield();
    }
    const uint64_t begin = end_;
    end_ += bytes;
    placed_.store(g + 1, std::memory_order_release);
    return begin;
  }
  // For the only worker, or when all are done.
  uint64_t end() const { return end_; }

 private:
  static constexpr int kSpins = 2000;  // a few microseconds; groups take ten
  std::atomic<uint64_t> placed_{0};
  uint64_t end_;
};

// The error of the first bad group, whatever the order in which they are found.
class FirstError {
 public:
  // Whether group g may still matter.
  bool before(uint64_t g) const { return g < group_.load(std::memory_order_relaxed); }
  void found(uint64_t g, Status status, int input = -1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!before(g)) return;
    group_.store(g, std::memory_order_relaxed);
    status_ = status;
    input_ = input;
  }
  // When all workers are done.
  Status status() const { return status_; }
  int input() const { return input_; }

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> group_{~uint64_t{0}};
  Status status_ = Status::ok;
  int input_ = -1;
};

// What a group adds to a frame, its tile entries aside.
struct Part {
  uint64_t units, dynamic;
  uint64_t bytes() const { return units + align_up(dynamic); }
};

// Has all groups of a frame encoded, and puts their parts behind each other from parts_begin on. Of the encoder:
//   Part encode_group(g, units, dynamic)   writes tile entries, and the group's part to two places
//   room(g)                                bytes that `units` needs for that, at most kUnits; `dynamic` needs kDynamic
template <uint64_t kUnits, uint64_t kDynamic, typename Encoder>
Status encode_groups(const Encoder& encoder, uint64_t groups, uint64_t parts_begin, uint8_t* frame, uint64_t capacity,
                     uint64_t* written, const Threads& threads) {
  const int workers = worker_count(threads, groups);
  Shares shares(groups);
  Places places(parts_begin);
  std::atomic<bool> no_room{false};
  run_workers(threads, workers, [&] {
    uint8_t dynamic[kDynamic];
    uint8_t units[kUnits];
    for (uint64_t g; !no_room && shares.take(&g);) {
      // One worker knows where the group begins. Unless the frame's end is too near, its units can go straight there.
      const bool in_place = workers == 1 && capacity - places.end() >= encoder.room(g);
      const Part part = encoder.encode_group(g, in_place ? frame + places.end() : units, dynamic);
      const uint64_t pos = places.give(g, part.bytes());
      if (pos > capacity || capacity - pos < part.bytes()) {
        no_room = true;
        return;
      }
      store(frame + group_table_begin() + 8 * g, pos - parts_begin);
      uint8_t* to = frame + pos;
      if (!in_place) std::memcpy(to, units, part.units);
      to += part.units;
      std::memcpy(to, dynamic, part.dynamic);
      std::memset(to + part.dynamic, 0, align_up(part.dynamic) - part.dynamic);
    }
  });
  *written = places.end();
  return no_room ? Status::no_room : Status::ok;
}

// Calls decode(group, destination) of every group until one fails. bytes: of a group's values.
template <typename Decode>
Status decode_groups(const Threads& threads, uint64_t groups, void* dst, uint64_t bytes, const Decode& decode) {
  Shares shares(groups);
  FirstError error;
  run_workers(threads, worker_count(threads, groups), [&] {
    for (uint64_t g; shares.take(&g) && error.before(g);) {
      const Status status = decode(g, static_cast<uint8_t*>(dst) + g * bytes);
      if (status != Status::ok) error.found(g, status);
    }
  });
  return error.status();
}

}  // namespace cpu
}  // namespace zipccl
