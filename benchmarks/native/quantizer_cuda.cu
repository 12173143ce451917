// Times the CUDA quantiser without torch:
//   quantizer_cuda FILE [Mi coordinates ...]        FILE: bf16 gradients, repeated to each size
// For fp32 and bf16 buckets and both kinds of widths, at 5 bits: each step of a synchronisation, in Gcoord/s.
// Device time of one call inside a CUDA graph, median of 20 replays after 3.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <vector>

#include "format/float16.h"
#include "quantizer/quantizer.h"
#include "timing.cuh"

namespace {

namespace q = zipccl::quantizer;
using zipccl::DType;
using zipccl::Status;

#define OK(call) check((call) == Status::ok, #call)

double median_seconds(const std::function<void(cudaStream_t)>& enqueue) { return ::median_seconds(3, 20, enqueue); }

template <typename T = uint8_t>
T* device(uint64_t bytes) {
  void* p;
  CUDA(cudaMalloc(&p, bytes));
  return static_cast<T*>(p);
}

void bench(const std::vector<uint16_t>& values, uint64_t count, q::Widths widths, DType dtype) {
  constexpr uint32_t kRanks = 8;
  const q::Shape shape = {count, 1, kRanks, widths, 5.0f};
  const uint64_t bytes = count * (dtype == DType::f32 ? 4 : 2), run = kRanks * q::part_bytes(shape);
  std::vector<uint32_t> host(bytes / 4);
  for (uint64_t i = 0; i < host.size(); ++i) {
    const auto at = [&](uint64_t c) { return values[c % values.size()]; };
    host[i] = dtype == DType::f32 ? static_cast<uint32_t>(at(i)) << 16 : at(2 * i) | uint32_t{at(2 * i + 1)} << 16;
  }
  uint8_t *x = device(bytes), *out = device(bytes), *packed = device(kRanks * run), *again = device(run);
  uint8_t *stats = device(q::stats_format(shape).bytes), *plan = device(q::plan_bytes(shape));
  uint8_t* scratch = device(q::cuda::plan_scratch_bytes(shape));
  CUDA(cudaMemcpy(x, host.data(), bytes, cudaMemcpyHostToDevice));
  CUDA(cudaMemset(packed, 0, kRanks * run));
  const auto rate = [&](const std::function<Status(cudaStream_t)>& call) {
    const double seconds = median_seconds([&](cudaStream_t stream) { OK(call(stream)); });
    return 1e-9 * static_cast<double>(count) / seconds;
  };
  const auto combine = [&](q::Combine job) {
    job.parts = kRanks;
    return rate([&](cudaStream_t stream) { return q::cuda::combine(shape, plan, job, stream); });
  };
  const q::Values own = {x, dtype, q::Place::bucket, 0, 1};
  const q::Packed one = {packed, run, 1};
  const double measure = rate([&](cudaStream_t s) {
    return q::cuda::statistics(shape, {x, dtype}, stats, q::Order::descending, s);
  });
  const double allocate = rate([&](cudaStream_t s) { return q::cuda::allocate(shape, stats, 1, plan, scratch, s); });
  q::Combine job;
  job.x = own;
  job.packed_out = packed;
  job.key.of = kRanks;
  const double quantise = combine(job);
  for (uint32_t i = 1; i < kRanks; ++i) CUDA(cudaMemcpy(packed + i * run, packed, run, cudaMemcpyDeviceToDevice));
  job.packed = one;
  job.packed_out = again;
  const double recompress = combine(job);
  job.packed.n = kRanks;
  const double recompress_sum = combine(job);
  job = {};
  job.packed = one;
  job.out = {out, dtype, q::Place::bucket, 0, 1};
  const double decompress = combine(job);
  job.x = job.out;
  const double add = combine(job);
  std::printf(
      "%4llu Mi %s %s: statistics %.0f, allocate %.0f, quantise %.0f, decompress %.0f, decompress-add %.0f, "
      "decompress-add-recompress %.0f, of %u: %.0f\n",
      static_cast<unsigned long long>(count >> 20), dtype == DType::f32 ? "fp32" : "bf16",
      widths == q::Widths::fine ? "fine" : "paper", measure, allocate, quantise, decompress, add, recompress, kRanks,
      recompress_sum);
  for (uint8_t* p : {x, out, packed, again, stats, plan, scratch}) CUDA(cudaFree(p));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::printf("usage: quantizer_cuda FILE [Mi coordinates ...]\n"), 1;
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> raw((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<uint16_t> values(raw.size() / 2);
  std::copy(raw.begin(), raw.begin() + 2 * values.size(), reinterpret_cast<char*>(values.data()));
  check(!values.empty(), "the file holds values");
  std::vector<uint64_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::strtoull(argv[i], nullptr, 10) << 20);
  if (sizes.empty()) sizes = {1 << 20, 8 << 20, 64 << 20};
  for (uint64_t count : sizes)
    for (q::Widths widths : {q::Widths::fine, q::Widths::paper})
      for (DType dtype : {DType::f32, DType::bf16}) bench(values, count, widths, dtype);
  return 0;
}
