// How the CPU does arithmetic on denormals. torch.set_flush_denormal() sets it for the thread that calls it and those
// it starts; what ranks compute together must not depend on which thread does it, nor on what one rank has set.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zipccl {

// Denormals count, as on the GPU, while one of these is alive on a thread.
class KeepDenormals {
 public:
#if defined(__x86_64__)
  KeepDenormals() : before_(_mm_getcsr()) {
    if (before_ & kFlush) _mm_setcsr(before_ & ~kFlush);
  }
  ~KeepDenormals() {
    if (before_ & kFlush) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlush = 0x8040;  // flush to zero, denormals are zero
  unsigned before_;
#else
  KeepDenormals() {}
#endif
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;
};

}  // namespace zipccl
