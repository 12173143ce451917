// decode_sum(): a group of values at a time, so that decoded values and the fp32 sums stay in the cache.
#include <algorithm>
#include <memory>
#include <vector>

#include "codec/cpu.h"
#include "codec/workers.h"
#include "format/float16.h"
#include "format/float_mode.h"

namespace zipccl {
namespace {

// One input.
class Source {
 public:
  Source(Isa isa, const SumInput& input, const FrameInfo& info, DType dtype, uint64_t count)
      : fast_(cpu::kernels(isa), static_cast<const uint8_t*>(input.data), info.frame_bytes, count, info.layout),
        dense_(cpu::dense_kernels(isa), static_cast<const uint8_t*>(input.data), info.frame_bytes, dtype, count),
        code_(input.is_frame ? info.code : Code::raw),
        values_(static_cast<const uint8_t*>(input.data) + (input.is_frame ? kHeaderBytes : 0)),
        group_bytes_(kGroupValues * dtype_bytes(static_cast<uint8_t>(dtype))) {}

  // *values: those of group g, in `room` (aligned to any dtype) or in place.
  Status group(uint64_t g, uint8_t* room, const uint8_t** values) const {
    *values = room;
    if (code_ == Code::fast) return fast_.decode_group(g, reinterpret_cast<uint16_t*>(room));
    if (code_ == Code::dense) return dense_.decode_group(g, room);
    *values = values_ + g * group_bytes_;
    return Status::ok;
  }
  bool ends_well() const {
    return code_ == Code::raw || (code_ == Code::fast ? fast_.ends_well() : dense_.ends_well());
  }

 private:
  cpu::FastFrame fast_;
  cpu::DenseFrame dense_;
  Code code_;  // only its frame is used
  const uint8_t* values_;
  uint64_t group_bytes_;
};

// What a worker needs: one input's values and the sums of a group.
struct alignas(64) Room {
  uint8_t values[4 * kGroupValues];
  float sums[kGroupValues];
};

// The loops are written once. Compiled for AVX2 as well, they do the same to more values at a time: products, sums and
// quotients are each rounded, as nothing here allows fused multiply-adds.
#define ZIPCCL_INLINE __attribute__((always_inline)) inline

template <typename T, float (*to_float)(T)>
ZIPCCL_INLINE void add(const uint8_t* values, uint64_t n, float scale, bool first, float* sums) {
  if (first) {
    for (uint64_t i = 0; i < n; ++i) sums[i] = to_float(cpu::load<T>(values + i * sizeof(T))) * scale;
  } else {
    for (uint64_t i = 0; i < n; ++i) sums[i] += to_float(cpu::load<T>(values + i * sizeof(T))) * scale;
  }
}

float same(float f) { return f; }

ZIPCCL_INLINE void add(DType in, const uint8_t* values, uint64_t n, float scale, bool first, float* sums) {
  if (in == DType::bf16)
    add<uint16_t, bf16_to_float>(values, n, scale, first, sums);
  else if (in == DType::f16)
    add<uint16_t, f16_to_float>(values, n, scale, first, sums);
  else
    add<float, same>(values, n, scale, first, sums);
}

template <typename T, T (*from_float)(float)>
ZIPCCL_INLINE void write(const float* sums, uint64_t n, float divisor, void* dst) {
  for (uint64_t i = 0; i < n; ++i) static_cast<T*>(dst)[i] = from_float(sums[i] / divisor);
}

ZIPCCL_INLINE void write(DType out, const float* sums, uint64_t n, float divisor, uint64_t begin, void* dst) {
  if (out == DType::bf16)
    write<uint16_t, float_to_bf16>(sums, n, divisor, static_cast<uint16_t*>(dst) + begin);
  else if (out == DType::f16)
    write<uint16_t, float_to_f16>(sums, n, divisor, static_cast<uint16_t*>(dst) + begin);
  else
    write<float, canonical>(sums, n, divisor, static_cast<float*>(dst) + begin);
}

struct Loops {
  void (*add)(DType in, const uint8_t* values, uint64_t n, float scale, bool first, float* sums);
  void (*write)(DType out, const float* sums, uint64_t n, float divisor, uint64_t begin, void* dst);
};

void add_plain(DType in, const uint8_t* values, uint64_t n, float scale, bool first, float* sums) {
  add(in, values, n, scale, first, sums);
}
void write_plain(DType out, const float* sums, uint64_t n, float divisor, uint64_t begin, void* dst) {
  write(out, sums, n, divisor, begin, dst);
}
#if defined(__x86_64__)
ZIPCCL_AVX2 void add_avx2(DType in, const uint8_t* values, uint64_t n, float scale, bool first, float* sums) {
  add(in, values, n, scale, first, sums);
}
ZIPCCL_AVX2 void write_avx2(DType out, const float* sums, uint64_t n, float divisor, uint64_t begin, void* dst) {
  write(out, sums, n, divisor, begin, dst);
}
#endif

Loops loops(Isa isa) {
#if defined(__x86_64__)
  if ((isa == Isa::best ? best_isa() : isa) != Isa::scalar) return {add_avx2, write_avx2};
#endif
  (void)isa;
  return {add_plain, write_plain};
}

bool summable(DType d) { return d == DType::bf16 || d == DType::f16 || d == DType::f32; }

}  // namespace

bool can_sum(DType in, DType out) { return summable(in) && summable(out); }

Status decode_sum(const SumInput* inputs, int n, uint64_t count, const SumOptions& options, void* dst, int* bad,
                  Isa isa, const Threads& threads) {
  if (bad != nullptr) *bad = -1;
  if (inputs == nullptr || bad == nullptr || n < 1 || count > kMaxCount || (count != 0 && dst == nullptr) ||
      !can_sum(options.in, options.out))
    return Status::bad_argument;
  std::vector<Source> sources;
  sources.reserve(n);
  for (int k = 0; k < n; ++k) {
    *bad = k;
    FrameInfo info{};
    if (inputs[k].is_frame) {
      const Status status =
          cpu::open_frame(inputs[k].data, inputs[k].available, options.in, count, isa, threads, &info);
      if (status != Status::ok) return status;
    } else if (inputs[k].available < count * dtype_bytes(static_cast<uint8_t>(options.in))) {
      return Status::truncated;
    }
    sources.emplace_back(isa, inputs[k], info, options.in, count);
    if (!sources.back().ends_well()) return Status::bad_table;
  }

  const Loops loop = loops(isa);
  const uint64_t groups = group_count(count);
  const int workers = cpu::worker_count(threads, groups);
  const std::unique_ptr<Room[]> rooms(new Room[workers]);  // not cleared: 256 KiB each
  std::atomic<int> next_room{0};
  cpu::Shares shares(groups);
  cpu::FirstError error;
  cpu::run_workers(threads, workers, [&] {
    const KeepDenormals keep;
    Room& room = rooms[next_room++];
    for (uint64_t g; shares.take(&g) && error.before(g);) {
      const uint64_t begin = g * kGroupValues, m = std::min(kGroupValues, count - begin);
      Status status = Status::ok;
      for (int k = 0; k < n && status == Status::ok; ++k) {
        const uint8_t* values;
        status = sources[k].group(g, room.values, &values);
        if (status == Status::ok)
          loop.add(options.in, values, m, options.scale, k == 0, room.sums);
        else
          error.found(g, status, k);
      }
      if (status == Status::ok) loop.write(options.out, room.sums, m, options.divisor, begin, dst);
    }
  });
  *bad = error.input();
  return error.status();
}

}  // namespace zipccl
