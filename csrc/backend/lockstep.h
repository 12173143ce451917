// Whether this rank is still in step with the others of its group. A call that fails between its messages leaves some
// of them on the way, and others may have learnt from it what this rank has not: a later call would take for its own
// what belongs to another. So there are no later calls.
#pragma once

#include <cstdint>
#include <type_traits>
#include <unordered_set>

#include "collectives/error.h"

namespace zipccl {

class Lockstep {
 public:
  // Around everything that moves messages. What throws in between leaves the step lost.
  void enter() {
    check();
    lost_ = true;
    ++calls_;
  }
  void leave() { lost_ = false; }
  // What was left in the belief that it would end well has not.
  void lose() { lost_ = true; }
  // As if enter() had not been called.
  void withdraw() {
    lost_ = false;
    --calls_;
  }

  // Entered so far.
  uint64_t calls() const { return calls_; }

  // Calls that may travel raw are compared between ranks where one of their kind is made for the first time: whether
  // that is so. Kinds are all that ranks pass alike. After so many of them no new ones are compared.
  bool is_new(int64_t kind) const { return compared_.size() < 1024 && compared_.count(kind) == 0; }
  void compared(int64_t kind) { compared_.insert(kind); }

  // Other raw calls make up a history, to be compared now and then.
  void made_raw(int64_t call) { history_ = (history_ ^ static_cast<uint64_t>(call)) * 0x9e3779b97f4a7c15 + 1; }
  uint64_t history() const { return history_; }

  bool lost() const { return lost_; }
  void check() const {
    if (lost_)
      throw Error(
          "an earlier call failed on this rank, which may since expect other messages than the others send; make a new "
          "group");
  }

  // f() between enter() and leave().
  template <typename F>
  auto keep(F&& f) {
    enter();
    try {
      if constexpr (std::is_void_v<decltype(f())>) {
        f();
        leave();
      } else {
        auto result = f();
        leave();
        return result;
      }
    } catch (const SharedError&) {
      leave();
      throw;
    }
  }

 private:
  bool lost_ = false;
  uint64_t calls_ = 0;
  std::unordered_set<int64_t> compared_;
  uint64_t history_ = 0;
};

}  // namespace zipccl
