// Outcome of a codec call. Codec functions never throw; callers turn a status into an exception with its text.
#pragma once

#include <cstdint>

namespace zipccl {

// Values are shared with device code and may be added to, not renumbered.
enum class Status : int32_t {
  ok = 0,
  bad_argument = 1,   // null pointer, misaligned pointer, unknown dtype or code, count over kMaxCount
  no_room = 2,        // the destination is smaller than what would be written
  truncated = 3,      // fewer bytes than the header says, or than a header needs
  bad_magic = 4,      // not a frame
  bad_version = 5,    // a frame of a newer zipccl
  bad_header = 6,     // header check, flags, or a size that does not follow from dtype, code and count
  bad_table = 7,      // group offsets that do not follow from the tile words, or slots that cannot be
  bad_tile = 8,       // unknown tile mode, base out of range, or dynamic bytes that do not fit the mode
  bad_escapes = 9,    // number of escape codes in the planes differs from the tile's dynamic bytes
  bad_checksum = 10,  // payload checksum differs
  unexpected = 11,    // a valid frame, but of another dtype or count than the caller needs
  device_error = 12,  // a CUDA call failed
  unsupported = 13,   // this build or processor cannot do it
};

inline const char* status_text(Status s) {
  switch (s) {
    case Status::ok:
      return "ok";
    case Status::bad_argument:
      return "invalid argument";
    case Status::no_room:
      return "destination too small";
    case Status::truncated:
      return "frame is truncated";
    case Status::bad_magic:
      return "not a zipccl frame (wrong magic)";
    case Status::bad_version:
      return "frame version is not supported by this zipccl";
    case Status::bad_header:
      return "frame header is corrupt";
    case Status::bad_table:
      return "frame is corrupt: group offsets do not match the tile table";
    case Status::bad_tile:
      return "frame is corrupt: invalid tile entry";
    case Status::bad_escapes:
      return "frame is corrupt: escape codes do not match the tile table";
    case Status::bad_checksum:
      return "frame is corrupt: payload checksum mismatch";
    case Status::unexpected:
      return "frame holds another dtype or count than expected";
    case Status::device_error:
      return "a CUDA call failed";
    case Status::unsupported:
      return "not supported by this build";
  }
  return "unknown status";
}

}  // namespace zipccl
