// Frames on the CPU: arguments, header, checksum, and the way to the code that does the work.
#include <cstdlib>
#include <utility>

#include "codec/cpu.h"
#include "codec/workers.h"

namespace zipccl {
namespace {

bool valid_options(const FrameOptions& options, uint64_t count) {
  return dtype_bytes(static_cast<uint8_t>(options.dtype)) != 0 && static_cast<uint8_t>(options.code) < kCodeCount &&
         options.layout <= FrameLayout::packed && count <= kMaxCount;
}

uint64_t raw_bytes(DType dtype, uint64_t count) { return count * dtype_bytes(static_cast<uint8_t>(dtype)); }

// Complex values are aligned like their parts.
bool aligned(const void* values, DType dtype) {
  uint64_t align = dtype_bytes(static_cast<uint8_t>(dtype));
  if (dtype == DType::c32 || dtype == DType::c64 || dtype == DType::c128) align /= 2;
  return reinterpret_cast<uintptr_t>(values) % align == 0;
}

bool all_zero(const uint8_t* bytes, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (bytes[i] != 0) return false;
  }
  return true;
}

// Can a frame of this dtype, code and count have this size?
bool valid_size(const FrameInfo& info) {
  if (info.frame_bytes % kFrameAlign != 0) return false;
  if (info.code == Code::raw) return info.frame_bytes == cpu::raw_frame_bytes(info.dtype, info.count);
  if (info.code == Code::dense) {
    return info.frame_bytes >= tables_end(dense::element_count(info.dtype, info.count)) &&
           info.frame_bytes <= dense::frame_limit(info.dtype, info.count);
  }
  return info.frame_bytes >= fast_static_bytes(info.count, info.layout) &&
         info.frame_bytes <= fast_bound(info.count, info.layout);
}

uint64_t frame_checksum(const uint8_t* frame, uint64_t frame_bytes, Isa isa, const Threads& threads) {
  return cpu::checksum(isa, threads, frame + kHeaderBytes, (frame_bytes - kHeaderBytes) / 4);
}

}  // namespace

bool has_isa(Isa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("popcnt");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("gfni");
  }
#endif
  return isa == Isa::best || isa == Isa::scalar;
}

Isa best_isa() {
  static const Isa best = [] {
    const char* wanted = std::getenv("ZIPCCL_ISA");
    const std::pair<const char*, Isa> sets[] = {{"avx512", Isa::avx512}, {"avx2", Isa::avx2}, {"scalar", Isa::scalar}};
    for (const auto& set : sets) {
      if (wanted != nullptr && std::strcmp(wanted, set.first) == 0 && has_isa(set.second)) return set.second;
    }
    return has_isa(Isa::avx512) ? Isa::avx512 : has_isa(Isa::avx2) ? Isa::avx2 : Isa::scalar;
  }();
  return best;
}

const cpu::TileKernels& cpu::kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::best) isa = best_isa();
  if (isa == Isa::avx512) return cpu::kAvx512Kernels;
  if (isa == Isa::avx2) return cpu::kAvx2Kernels;
#endif
  (void)isa;
  return cpu::kScalarKernels;
}

const cpu::DenseKernels& cpu::dense_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::best) isa = best_isa();
  if (isa == Isa::avx512) return cpu::kDenseAvx512;
  if (isa == Isa::avx2) return cpu::kDenseAvx2;
#endif
  (void)isa;
  return cpu::kDenseScalar;
}

Code effective_code(const FrameOptions& options) {
  return options.code == Code::fast && options.dtype != DType::bf16 ? Code::raw : options.code;
}

FrameLayout effective_layout(const FrameOptions& options, uint64_t count) {
  return effective_code(options) == Code::fast ? fast_layout(options.layout, count) : options.layout;
}

uint64_t frame_bound(const FrameOptions& options, uint64_t count) {
  if (!valid_options(options, count)) return 0;
  switch (effective_code(options)) {
    case Code::raw:
      return cpu::raw_frame_bytes(options.dtype, count);
    case Code::fast:
      return fast_bound(count, effective_layout(options, count));
    case Code::dense:
      return dense::frame_limit(options.dtype, count);
  }
  return 0;
}

uint64_t static_bytes(const FrameOptions& options, uint64_t count) {
  if (!valid_options(options, count)) return 0;
  switch (effective_code(options)) {
    case Code::raw:
      return cpu::raw_frame_bytes(options.dtype, count);
    case Code::fast:
      return fast_static_bytes(count, effective_layout(options, count));
    case Code::dense:
      return tables_end(dense::element_count(options.dtype, count));
  }
  return 0;
}

FrameHeader make_header(const FrameOptions& options, uint64_t count, uint64_t frame_bytes, uint64_t checksum) {
  FrameHeader h = {};
  h.magic = kFrameMagic;
  h.version = kFrameVersion;
  h.dtype = static_cast<uint8_t>(options.dtype);
  h.code = static_cast<uint8_t>(effective_code(options));
  h.flags = (options.checksum ? kFlagChecksum : 0) | layout_flags(effective_layout(options, count));
  h.count = count;
  h.frame_bytes = frame_bytes;
  h.checksum = options.checksum ? checksum : 0;
  h.header_check = header_check(h);
  return h;
}

Status read_header(const void* frame, uint64_t available, FrameInfo* info) {
  if (info == nullptr) return Status::bad_argument;
  if (available < kHeaderBytes) return Status::truncated;  // null too: that is where an empty buffer may lie
  if (frame == nullptr) return Status::bad_argument;
  const FrameHeader h = cpu::load<FrameHeader>(frame);
  if (h.magic != kFrameMagic) return Status::bad_magic;
  if (h.version != kFrameVersion) return Status::bad_version;  // before the check: other versions may check otherwise
  if (h.header_check != header_check(h)) return Status::bad_header;
  if (dtype_bytes(h.dtype) == 0 || h.code >= kCodeCount || h.count > kMaxCount) return Status::bad_header;
  if (!known_flags(h.flags) || !all_zero(h.reserved, sizeof(h.reserved))) return Status::bad_header;
  if (!(h.flags & kFlagChecksum) && h.checksum != 0) return Status::bad_header;

  FrameInfo i;
  i.dtype = static_cast<DType>(h.dtype);
  i.code = static_cast<Code>(h.code);
  i.layout = layout_of(h.flags);
  i.checksum = (h.flags & kFlagChecksum) != 0;
  i.count = h.count;
  i.raw_bytes = raw_bytes(i.dtype, i.count);
  i.frame_bytes = h.frame_bytes;
  if (i.code == Code::fast && i.dtype != DType::bf16) return Status::bad_header;
  if (!valid_size(i)) return Status::bad_header;
  *info = i;
  return Status::ok;
}

Status encode(const void* src, uint64_t count, const FrameOptions& options, void* dst, uint64_t capacity,
              uint64_t* written, Isa isa, const Threads& threads) {
  if (!valid_options(options, count) || dst == nullptr || written == nullptr) return Status::bad_argument;
  if (count != 0 && (src == nullptr || !aligned(src, options.dtype))) return Status::bad_argument;
  if (!has_isa(isa)) return Status::unsupported;

  uint8_t* frame = static_cast<uint8_t*>(dst);
  uint64_t frame_bytes = 0;
  Status status = Status::ok;
  switch (effective_code(options)) {
    case Code::raw:
      frame_bytes = cpu::raw_frame_bytes(options.dtype, count);
      if (capacity < frame_bytes) return Status::no_room;
      cpu::encode_raw(src, raw_bytes(options.dtype, count), frame, threads);
      break;
    case Code::fast:
      status = cpu::encode_fast(cpu::kernels(isa), static_cast<const uint16_t*>(src), count,
                                effective_layout(options, count), frame, capacity, &frame_bytes, threads);
      break;
    case Code::dense:
      status =
          cpu::encode_dense(cpu::dense_kernels(isa), src, options.dtype, count, frame, capacity, &frame_bytes, threads);
  }
  if (status != Status::ok) return status;
  const uint64_t checksum = options.checksum ? frame_checksum(frame, frame_bytes, isa, threads) : 0;
  cpu::store(frame, make_header(options, count, frame_bytes, checksum));
  *written = frame_bytes;
  return Status::ok;
}

Status cpu::open_frame(const void* frame, uint64_t available, DType dtype, uint64_t count, Isa isa,
                       const Threads& threads, FrameInfo* info) {
  const Status status = read_header(frame, available, info);
  if (status != Status::ok) return status;
  if (available < info->frame_bytes) return Status::truncated;
  if (info->dtype != dtype || info->count != count) return Status::unexpected;
  if (!has_isa(isa)) return Status::unsupported;
  // The whole payload before the first value, so that a frame with a checksum never yields wrong data.
  if (info->checksum && frame_checksum(static_cast<const uint8_t*>(frame), info->frame_bytes, isa, threads) !=
                            cpu::load<FrameHeader>(frame).checksum) {
    return Status::bad_checksum;
  }
  return Status::ok;
}

Status decode(const void* frame, uint64_t available, DType dtype, uint64_t count, void* dst, Isa isa,
              const Threads& threads) {
  FrameInfo info;
  const Status status = cpu::open_frame(frame, available, dtype, count, isa, threads, &info);
  if (status != Status::ok) return status;
  if (count != 0 && (dst == nullptr || !aligned(dst, dtype))) return Status::bad_argument;
  const uint8_t* bytes = static_cast<const uint8_t*>(frame);
  if (info.code == Code::dense) {
    const cpu::DenseFrame dense(cpu::dense_kernels(isa), bytes, info.frame_bytes, dtype, count);
    if (!dense.ends_well()) return Status::bad_table;
    return cpu::decode_groups(threads, dense.groups(), dst, dense.group_bytes(),
                              [&](uint64_t g, uint8_t* to) { return dense.decode_group(g, to); });
  }
  if (info.code == Code::fast) {
    const cpu::FastFrame fast(cpu::kernels(isa), bytes, info.frame_bytes, count, info.layout);
    if (!fast.ends_well()) return Status::bad_table;
    return cpu::decode_groups(threads, group_count(count), dst, 2 * kGroupValues, [&](uint64_t g, uint8_t* to) {
      return fast.decode_group(g, reinterpret_cast<uint16_t*>(to));
    });
  }
  cpu::decode_raw(bytes, info.raw_bytes, dst, threads);
  return Status::ok;
}

}  // namespace zipccl
