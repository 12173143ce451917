#include "collectives/place.h"

#include "collectives/error.h"

namespace zipccl {

void check_frame_size(int64_t bytes, const FrameOptions& options, uint64_t count, int rank, const std::string& what) {
  bool sound = bytes >= static_cast<int64_t>(kHeaderBytes) && bytes % static_cast<int64_t>(kFrameAlign) == 0 &&
               static_cast<uint64_t>(bytes) <= frame_bound(options, count);
  if (!sound)
    throw Error(what + ": rank " + std::to_string(rank) + " announced a frame of " + std::to_string(bytes) +
                " bytes for " + std::to_string(count) +
                " values; do all ranks pass the same shapes, dtypes and options?");
}

bool is_plain(const at::Tensor& t) {
  return t.is_contiguous() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % t.itemsize() == 0;
}

at::Tensor plain(const at::Tensor& t) { return is_plain(t) ? t : t.clone(at::MemoryFormat::Contiguous); }

at::Tensor plain_target(const at::Tensor& t) { return is_plain(t) ? t : at::empty(t.sizes(), t.options()); }

bool is_dense(const at::Tensor& t) { return t.is_contiguous(t.suggest_memory_format()); }

at::Tensor as_it_lies(const at::Tensor& t) {
  if (t.is_cpu() || t.layout() != at::kStrided || t.is_contiguous() || !t.is_non_overlapping_and_dense()) return t;
  if (!is_dense(t)) return t.as_strided({t.numel()}, {1});
  const int64_t rows = t.size(0), row = t.numel() / rows;  // dimension 0 is the outermost of every memory format
  return t.as_strided({rows, row}, {row, 1});
}

// Not view({-1}): a contiguous tensor of one value may have any stride, and keeps it there.
at::Tensor as_bytes(const at::Tensor& t) { return t.as_strided({t.numel()}, {1}).view(at::kByte); }

}  // namespace zipccl
