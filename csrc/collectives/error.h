// Exceptions of zipccl. In Python: zipccl.Error and zipccl.FrameError, both RuntimeError.
#pragma once

#include <stdexcept>
#include <string>

#include "codec/status.h"

namespace zipccl {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A frame that cannot be decoded: corrupt, truncated, of a newer version, or not what the operation expects.
struct FrameError : Error {
  using Error::Error;
};

// The same, when the call still has messages to exchange.
struct EarlyFrameError : FrameError {
  using FrameError::FrameError;
};

// f(), behind which there are more messages to come.
template <typename F>
auto with_more_to_come(F&& f) {
  try {
    return f();
  } catch (const FrameError& e) {
    throw EarlyFrameError(e.what());
  }
}

// Found by every rank at the same point of a call, so that none of its messages is left on the way.
struct SharedError : Error {
  using Error::Error;
};

// Throws unless ok. `what` says who was doing what, and to which bytes.
inline void check(Status status, const std::string& what) {
  if (status == Status::ok) return;
  std::string text = what + ": " + status_text(status);
  bool frame = status >= Status::truncated && status <= Status::unexpected;
  if (frame) throw FrameError(text);
  throw Error(text);
}

}  // namespace zipccl
