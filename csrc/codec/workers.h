// How the groups of a frame are shared out to the threads of a call.
//
// Workers take groups in order, each the next one that nobody has. A decoder needs no more: the group table says where
// every group's part begins. An encoder learns that only when all groups before it have been encoded, so a worker
// encodes into memory of its own, waits for its turn to take the place behind its predecessor, and copies. When that
// takes long, as the predecessor's thread does not get to run, the worker encodes the group that all are waiting for
// itself; whoever has it first places it.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>

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

// Places of groups behind each other.
class Places {
 public:
  explicit Places(uint64_t begin) : end_(begin) {}

  // The group whose turn it is.
  uint64_t turn() const { return turn_.load(std::memory_order_acquire); }
  // *begin: of group g, which has `bytes`. False: it is not its turn, or no longer.
  bool give(uint64_t g, uint64_t bytes, uint64_t* begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (turn() != g) return false;
    *begin = end_;
    end_ += bytes;
    turn_.store(g + 1, std::memory_order_release);
    return true;
  }
  // For the only worker, or when all are done.
  uint64_t end() const { return end_; }

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> turn_{0};
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

// What a group adds to a frame besides units and dynamic bytes: their sizes, and entries of its tiles.
struct Part {
  uint64_t units = 0, dynamic = 0;
  bool apart = false;  // the units have a place of their own, and only the dynamic bytes are part of the part
  uint16_t words[kGroupTiles];
  uint8_t bases[kGroupTiles];
};

// Has all groups of a frame encoded, and puts their parts behind each other from parts_begin on. Of the encoder:
//   void encode_group(g, units, dynamic, part)  to `units` (up to kUnits bytes), `dynamic` (kDynamic) and *part
//   uint64_t room(g)                            bytes that must be free where its part begins, for `units` to be where
//                                               they belong from the beginning
//   uint8_t* unit_place(g, begin)               where its units belong if its part begins at `begin` of the frame
template <uint64_t kUnits, uint64_t kDynamic, typename Encoder>
class GroupEncoder {
 public:
  GroupEncoder(const Encoder& encoder, uint64_t elements, uint64_t parts_begin, uint8_t* frame, uint64_t capacity)
      : encoder_(encoder),
        elements_(elements),
        groups_(group_count(elements)),
        parts_begin_(parts_begin),
        frame_(frame),
        capacity_(capacity),
        shares_(groups_),
        places_(parts_begin) {}

  Status run(const Threads& threads, uint64_t* written) {
    int workers = worker_count(threads, groups_);
    if (workers < kFewestWorkers) workers = 1;
    run_workers(threads, workers, [&] { workers == 1 ? work_alone() : work(); });
    *written = places_.end();
    return no_room_ ? Status::no_room : Status::ok;
  }

 private:
  // Who is alone knows where a group begins. Unless the frame's end is too near, its units can go straight there.
  void work_alone() {
    uint8_t dynamic[kDynamic], room[kUnits];
    for (uint64_t g; !no_room_ && shares_.take(&g);) {
      const bool in_place = capacity_ - places_.end() >= encoder_.room(g);
      uint8_t* const units = in_place ? encoder_.unit_place(g, places_.end()) : room;
      Part part;
      encoder_.encode_group(g, units, dynamic, &part);
      place(g, part, units, dynamic);
    }
  }

  void work() {
    uint8_t dynamic[kDynamic], units[kUnits];
    for (uint64_t g; !no_room_ && shares_.take(&g);) {
      Part part;
      encoder_.encode_group(g, units, dynamic, &part);
      for (int spins = 0; places_.turn() < g; ++spins) {
        if (spins < kSpins) continue;
        help(places_.turn());
        spins = 0;
      }
      place(g, part, units, dynamic);
    }
  }

  // A frame of its own on the stack, which few calls need.
  __attribute__((noinline)) void help(uint64_t g) {
    uint8_t dynamic[kDynamic], units[kUnits];
    Part part;
    encoder_.encode_group(g, units, dynamic, &part);
    place(g, part, units, dynamic);
  }

  void place(uint64_t g, const Part& part, const uint8_t* units, const uint8_t* dynamic) {
    const uint64_t units_in_part = part.apart ? 0 : part.units, bytes = units_in_part + align_up(part.dynamic);
    uint64_t begin;
    if (!places_.give(g, bytes, &begin)) return;  // another worker was faster
    if (begin > capacity_ || capacity_ - begin < bytes) {
      no_room_ = true;
      return;
    }
    const uint64_t first = g * kGroupTiles, tiles = std::min(kGroupTiles, tile_count(elements_) - first);
    store(frame_ + group_table_begin() + 8 * g, begin - parts_begin_);
    std::memcpy(frame_ + tile_word_begin(elements_) + 2 * first, part.words, 2 * tiles);
    std::memcpy(frame_ + tile_base_begin(elements_) + first, part.bases, tiles);
    uint8_t* const unit_place = encoder_.unit_place(g, begin);
    // Piece by piece: what libraries do for long copies is slower here, where the source is in the cache.
    for (uint64_t i = 0; unit_place != units && i < part.units; i += kPieceBytes) {
      std::memcpy(unit_place + i, units + i, std::min(kPieceBytes, part.units - i));
    }
    uint8_t* const to = frame_ + begin + units_in_part;
    std::memcpy(to, dynamic, part.dynamic);
    std::memset(to + part.dynamic, 0, align_up(part.dynamic) - part.dynamic);
  }

  static constexpr int kFewestWorkers = 3;  // two that copy are no faster than one that need not
  static constexpr uint64_t kPieceBytes = 2048;
  static constexpr int kSpins = 20000;  // some ten microseconds; a group takes five

  const Encoder& encoder_;
  const uint64_t elements_, groups_, parts_begin_;
  uint8_t* const frame_;
  const uint64_t capacity_;
  Shares shares_;
  Places places_;
  std::atomic<bool> no_room_{false};
};

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
