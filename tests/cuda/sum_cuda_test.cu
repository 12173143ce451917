// decode_sum() on CUDA against the CPU's: the same bits, and corrupt frames refused. Needs a GPU, no torch.
// tests/cuda/run.sh builds and runs it; with --quick it keeps to sizes that suit compute-sanitizer.
#include <cmath>

#include "support.h"

namespace {

using zipccl::SumInput;
using zipccl::SumOptions;

// A frame, or values as they are.
struct Input {
  Bytes bytes;
  bool is_frame;
};

struct Sum {
  std::vector<Status> status;  // of each input
  Bytes values;
};

Sum cuda_sum(const std::vector<Input>& inputs, uint64_t count, const SumOptions& options, size_t shift,
             const std::string& what) {
  std::vector<Device> memory;
  std::vector<SumInput> list;
  for (const Input& in : inputs) {
    memory.emplace_back(in.bytes, in.is_frame ? 0 : shift * value_bytes(options.in));
    list.push_back({memory.back().get(), in.bytes.size(), in.is_frame});
  }
  const int n = static_cast<int>(list.size());
  Device dst(count * value_bytes(options.out), shift * value_bytes(options.out), true);
  Device status(sizeof(int32_t) * n), scratch(zipccl::cuda::decode_scratch_bytes());
  const Status s = zipccl::cuda::decode_sum(list.data(), n, count, options, dst.get(),
                                            reinterpret_cast<int32_t*>(status.get()), scratch.get(), nullptr, max_sms);
  check(s == Status::ok, what + ": CUDA decode_sum: " + zipccl::status_text(s));
  CUDA(cudaDeviceSynchronize());
  check(dst.guards_intact(), what + ": decode_sum wrote beside its output");
  Sum sum;
  const Bytes status_bytes = status.bytes();
  for (int i = 0; i < n; ++i) {
    int32_t code;
    std::memcpy(&code, status_bytes.data() + sizeof(code) * i, sizeof(code));
    sum.status.push_back(static_cast<Status>(code));
  }
  sum.values = dst.bytes();
  return sum;
}

Status cpu_sum(const std::vector<Input>& inputs, uint64_t count, const SumOptions& options, Bytes* dst, int* bad) {
  std::vector<SumInput> list;
  for (const Input& in : inputs) list.push_back({in.bytes.data(), in.bytes.size(), in.is_frame});
  dst->assign(count * value_bytes(options.out), 0);
  return zipccl::decode_sum(list.data(), static_cast<int>(list.size()), count, options, dst->data(), bad);
}

void check_sum(const std::vector<Input>& inputs, uint64_t count, const SumOptions& options, size_t shift,
               const std::string& what) {
  Bytes expected;
  int bad;
  check(cpu_sum(inputs, count, options, &expected, &bad) == Status::ok, what + ": CPU decode_sum");
  const Sum sum = cuda_sum(inputs, count, options, shift, what);
  for (Status s : sum.status) check(s == Status::ok, what + ": status " + zipccl::status_text(s));
  size_t at = 0;
  while (at < expected.size() && sum.values[at] == expected[at]) ++at;
  check(at == expected.size(), what + ": CPU and CUDA sums differ from byte " + std::to_string(at) + " on");
}

// Values of every kind, for a dtype of 2 or 4 bytes.
Bytes values_of(DType dtype, size_t n, int pattern) {
  if (pattern < kPatternCount && dtype == DType::bf16) return bytes_of(kPatterns[pattern].make(n));
  if (pattern % 2 == 0) return random_bytes(n * value_bytes(dtype));
  std::normal_distribution<float> normal(0, 1e-3f);
  Bytes b(n * value_bytes(dtype));
  for (size_t i = 0; i < n; ++i) {
    const float f = normal(random_bits);
    const uint16_t half = dtype == DType::f16 ? static_cast<uint16_t>(random_bits() & 0xBFFF) : bf16_of(f);
    if (dtype == DType::f32) {
      std::memcpy(&b[4 * i], &f, 4);
    } else {
      std::memcpy(&b[2 * i], &half, 2);
    }
  }
  return b;
}

std::string describe(const SumOptions& o, size_t n, uint64_t count, size_t shift) {
  return std::to_string(n) + " inputs of " + std::to_string(count) + ", dtype " +
         std::to_string(static_cast<int>(o.in)) + " to " + std::to_string(static_cast<int>(o.out)) + ", scale " +
         std::to_string(o.scale) + ", divisor " + std::to_string(o.divisor) + ", shifted by " + std::to_string(shift);
}

// Inputs in turn: fast frames of all layouts, with a checksum or without, raw frames, plain values.
std::vector<Input> mixed_inputs(DType dtype, size_t n, uint64_t count, int kind) {
  std::vector<Input> inputs;
  for (size_t i = 0; i < n; ++i, ++kind) {
    const Bytes values = values_of(dtype, count, kind % (kPatternCount + 2));
    const FrameLayout layout = kind % 4 == 1 ? kLayouts[1 + kind / 4 % 2] : FrameLayout::compact;
    const FrameOptions options = {dtype, kind % 4 == 2 ? Code::raw : Code::fast, layout, kind % 3 == 0};
    if (kind % 4 == 3) {
      inputs.push_back({values, false});
    } else {
      inputs.push_back({cpu_encode(values, options), true});
    }
  }
  return inputs;
}

const DType kTypes[] = {DType::bf16, DType::f16, DType::f32};

void test_sums(bool quick) {
  std::vector<uint64_t> counts = {0, 1, 7, 8, 9, 1000, 1024, 1025, 33000};
  if (!quick) counts.insert(counts.end(), {32768, 65536 + 5, 300001});
  const float scales[] = {1, 0.125f, 3.7f, 1e-30f}, divisors[] = {1, 8, 3, 1e-20f};
  int kind = 0;
  for (DType in : kTypes) {
    for (DType out : kTypes) {
      for (uint64_t count : counts) {
        for (size_t n = 1; n <= (quick ? 3 : 9); ++n, ++kind) {
          const SumOptions options = {in, out, scales[kind % 4], divisors[kind / 4 % 4]};
          const size_t shift = kind / 16 % 2;
          check_sum(mixed_inputs(in, n, count, kind), count, options, shift, describe(options, n, count, shift));
        }
      }
    }
  }
}

// Enough groups for blocks that take whole ones, and more inputs than shared memory holds plans of.
void test_large(bool quick) {
  const SumOptions options;
  if (!quick) {
    const uint64_t count = 60'000'000 + 77;
    check_sum(mixed_inputs(DType::bf16, 3, count, 0), count, options, 0, "large sum");
  }
  for (size_t n : {63, 64, 65, 130, 240}) {
    const uint64_t count = quick ? 1500 : 40000;
    check_sum(mixed_inputs(DType::bf16, n, count, 1), count, options, 0, describe(options, n, count, 0));
  }
}

// Every pair of special values, so that NaN, infinities and denormals meet each other.
void test_special_values() {
  for (DType dtype : kTypes) {
    std::vector<uint32_t> special = {0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF,
                                     0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x3F7FFFFF, 0x477FE000};
    if (dtype == DType::f16) special = {0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF};
    if (dtype == DType::bf16) {
      for (uint32_t& x : special) x = x >> 16 | (x & 1);
    }
    const uint32_t sign = dtype == DType::f32 ? 0x80000000 : 0x8000;
    for (size_t i = 0, n = special.size(); i < n; ++i) special.push_back(special[i] | sign);
    const size_t n = special.size(), size = value_bytes(dtype);
    Bytes a(n * n * size), b(n * n * size);
    for (size_t i = 0; i < n * n; ++i) {
      std::memcpy(&a[size * i], &special[i / n], size);
      std::memcpy(&b[size * i], &special[i % n], size);
    }
    const Bytes frame = cpu_encode(b, {dtype, Code::fast, FrameLayout::compact, false});
    for (DType out : kTypes) {
      for (float factor : {1.0f, 3.0f, INFINITY, NAN}) {
        const SumOptions options = {dtype, out, factor, 1 / factor};
        check_sum({{a, false}, {frame, true}}, n * n, options, 0, "special values, " + describe(options, 2, n * n, 0));
      }
    }
  }
}

void test_corrupt(bool quick) {
  const uint64_t count = 70000;
  for (bool checksum : {false, true}) {
    for (FrameLayout layout : kLayouts) {
      const Values values = layout == FrameLayout::packed ? group_values(count) : mixed_values(count);
      const Bytes good = cpu_encode(bytes_of(values), {DType::bf16, Code::fast, layout, checksum});
      const size_t ends[] = {0, zipccl::kHeaderBytes, all_tables_end(count, layout), good.size()};
      for (int i = 0; i < (quick ? 30 : 300); ++i) {
        std::vector<Input> inputs(3, Input{good, true});
        const int at = i % 3;
        Bytes& bad = inputs[at].bytes;
        if (i % 5 == 4) {
          bad.resize(random_bits() % bad.size());
        } else {
          flip_bit(&bad, ends[i / 3 % 3], ends[i / 3 % 3 + 1]);
          if (i % 2) seal(&bad);
        }
        if (i % 5 == 3) std::generate(bad.begin() + bad.size() / 2, bad.end(), std::ref(random_bits));
        const std::string what = "corrupt input, try " + std::to_string(i) + (checksum ? ", checksum" : "");
        Bytes expected;
        int index;
        const Status s = cpu_sum(inputs, count, {}, &expected, &index);
        const Sum sum = cuda_sum(inputs, count, {}, 0, what);
        for (int k = 0; k < 3; ++k) {
          check((sum.status[k] == Status::ok) == (s == Status::ok || k != at),
                what + ": CPU: " + zipccl::status_text(s) + ", CUDA: " + zipccl::status_text(sum.status[k]));
        }
        if (s == Status::ok) check(sum.values == expected, what + ": values differ");
      }
    }
  }
  const Bytes values = random_bytes(2 * count - 2);
  const Sum sum = cuda_sum({{values, false}, {values, false}}, count, {}, 0, "values missing");
  for (Status s : sum.status) check(s == Status::truncated, "values missing");
}

void test_arguments() {
  Device memory(4096);
  uint8_t* p = memory.get();
  int32_t* status = reinterpret_cast<int32_t*>(p);
  const auto sum = [&](SumInput input, int n, uint64_t count, SumOptions options, void* dst, void* scratch) {
    const std::vector<SumInput> inputs(n, input);
    return zipccl::cuda::decode_sum(inputs.data(), n, count, options, dst, status, scratch, nullptr);
  };
  SumOptions other;
  other.in = DType::i32;
  check(sum({p, 2, false}, 1, 1, {}, p + 1, p) == Status::bad_argument, "misaligned output");
  check(sum({p + 1, 2, false}, 1, 1, {}, p, p) == Status::bad_argument, "misaligned values");
  check(sum({p + 8, 64, true}, 1, 1, {}, p, p) == Status::bad_argument, "misaligned frame");
  check(sum({nullptr, 64, true}, 1, 1, {}, p, p) == Status::bad_argument, "no frame");
  check(sum({p, 2, false}, 1, 1, {}, nullptr, p) == Status::bad_argument, "no output");
  check(sum({p, 2, false}, 1, 1, {}, p, nullptr) == Status::bad_argument, "no scratch");
  check(sum({p, 2, false}, 1, 1, other, p, p) == Status::bad_argument, "a dtype without sums");
  check(sum({p, 2, false}, 241, 1, {}, p, p) == Status::unsupported, "too many inputs");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  test_arguments();
  test_sums(quick);
  test_large(quick);
  test_special_values();
  test_corrupt(quick);
  max_sms = 2;  // blocks that take group after group
  test_sums(true);
  if (!quick) test_corrupt(true);
  std::printf("sum_cuda_test: %d checks, %d failures\n", checks, failures);
  return failures != 0;
}
