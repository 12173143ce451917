// Code::raw: the tensor's bytes behind the header, padded with zeros.
#include "codec/cpu.h"

namespace zipccl {
namespace cpu {

void encode_raw(const void* src, uint64_t bytes, uint8_t* frame) {
  if (bytes == 0) return;
  std::memcpy(frame + kHeaderBytes, src, bytes);
  std::memset(frame + kHeaderBytes + bytes, 0, align_up(bytes) - bytes);
}

void decode_raw(const uint8_t* frame, uint64_t bytes, void* dst) {
  if (bytes != 0) std::memcpy(dst, frame + kHeaderBytes, bytes);
}

}  // namespace cpu
}  // namespace zipccl
