// Whether this rank is still in step with the others of its group. A call that fails between its messages leaves some
// of them on the way, and others may have learnt from it what this rank has not: a later call would take for its own
// what belongs to another. So there are no later calls.
#pragma once

#include <cstdint>
#include <type_traits>

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
  // As if enter() had not been called.
  void withdraw() {
    lost_ = false;
    --calls_;
  }

  // Entered so far.
  uint64_t calls() const { return calls_; }

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
};

}  // namespace zipccl
