// The CUDA quantiser against the CPU one: same plans, same packed bytes, same values.
#include <cmath>

#include "format/float16.h"
#include "quantizer/layout.h"
#include "support.h"

namespace {

namespace q = zipccl::quantizer;

// ---- Data -----------------------------------------------------------------------------------------------------

// Normal values whose scale changes from super-group to super-group; some of every special kind if wanted.
std::vector<float> gradients(uint64_t n, bool special) {
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  float scale = 1;
  for (uint64_t i = 0; i < n; ++i) {
    if (i % q::kSuperGroup == 0) scale = std::exp2(6 * normal(random_bits) - 8);
    v[i] = scale * normal(random_bits);
  }
  if (!special) return v;
  const float kinds[] = {NAN, INFINITY, -INFINITY, 3e38f, -3.4e38f, 1e-40f, 0.0f, -0.0f, 1e30f, 0x1p-120f};
  for (uint64_t begin = 0; begin < n; begin += q::kSuperGroup) {
    const uint64_t end = std::min<uint64_t>(n, begin + q::kSuperGroup);
    const float kind = kinds[random_bits() % 10];
    const uint64_t what = random_bits() % 8;
    if (what == 0) v[begin + random_bits() % (end - begin)] = kind;
    if (what == 1) std::fill(v.begin() + begin, v.begin() + end, std::isfinite(kind) ? kind : 0.0f);
    for (uint64_t i = begin; i < end; ++i) {
      if (what == 2) v[i] *= 1e-38f;
      if (what == 3 && random_bits() % 3 == 0) v[i] = 0;
      if (what == 4) v[i] = std::fabs(v[i]);
      if (what == 5 && i / q::kGroup % 3 == 0) v[i] = -0.0f;
    }
  }
  return v;
}

Bytes as(DType dtype, const std::vector<float>& v) {
  Bytes b(v.size() * value_bytes(dtype));
  for (size_t i = 0; i < v.size(); ++i) {
    const uint16_t half = dtype == DType::bf16 ? zipccl::float_to_bf16(v[i]) : zipccl::float_to_f16(v[i]);
    std::memcpy(&b[i * value_bytes(dtype)], dtype == DType::f32 ? static_cast<const void*>(&v[i]) : &half,
                value_bytes(dtype));
  }
  return b;
}

// Bytes are the same in both.
q::Order any_order() { return random_bits() % 2 == 0 ? q::Order::ascending : q::Order::descending; }

// ---- One bucket on both ---------------------------------------------------------------------------------------

struct Case {
  q::Shape shape;
  DType dtype;
  bool special;
  size_t shift;  // of device addresses of values
};

std::string name_of(const Case& c, const char* what) {
  return std::string(what) + ": count " + std::to_string(c.shape.count) + " domains " +
         std::to_string(c.shape.domains) + " parts " + std::to_string(c.shape.parts) +
         (c.shape.widths == q::Widths::fine ? " fine " : " paper ") + std::to_string(c.shape.bits) + " bits, dtype " +
         std::to_string(static_cast<int>(c.dtype)) + (c.special ? " special" : "");
}

class Both {
 public:
  explicit Both(const Case& c)
      : c_(c),
        layout_(q::layout_of(c.shape)),
        values_(as(c.dtype, gradients(c.shape.count, c.special))),
        device_values_(values_, c.shift),
        plan_(layout_.plan_bytes),
        device_plan_(layout_.plan_bytes) {
    const q::StatsFormat format = q::stats_format(c.shape);
    Bytes stats(format.bytes), scratch(q::plan_scratch_bytes(c.shape));
    Device device_stats(format.bytes, 0, true), device_scratch(q::cuda::plan_scratch_bytes(c.shape), 0, true);
    check(q::statistics(c.shape, {values_.data(), c.dtype}, stats.data()) == Status::ok, "CPU statistics");
    check(q::cuda::statistics(c.shape, {device_values_.get(), c.dtype}, device_stats.get(), any_order(), nullptr) ==
              Status::ok,
          "CUDA statistics");
    check(device_stats.bytes() == stats, name_of(c, "statistics"));
    check(q::allocate(c.shape, stats.data(), 3, plan_.data(), scratch.data()) == Status::ok, "CPU allocate");
    check(q::cuda::allocate(c.shape, device_stats.get(), 3, device_plan_.get(), device_scratch.get(), nullptr) ==
              Status::ok,
          "CUDA allocate");
    CUDA(cudaDeviceSynchronize());
    check(device_stats.guards_intact() && device_scratch.guards_intact(), name_of(c, "guards of allocate"));
    Bytes theirs = device_plan_.bytes();
    const uint64_t orders = 4 * layout_.slots * c.shape.domains * c.shape.parts;  // padding behind it is left alone
    std::copy(plan_.begin() + layout_.orders_at + orders, plan_.begin() + layout_.means_at,
              theirs.begin() + layout_.orders_at + orders);
    const uint64_t means = layout_.means_at + 4 * layout_.domain_groups * c.shape.domains;
    if (c.shape.widths == q::Widths::paper) std::copy(plan_.begin() + means, plan_.end(), theirs.begin() + means);
    same_floats(&theirs, layout_.means_at, means);
    check(theirs == plan_, name_of(c, "plan"));
  }

  uint64_t run_bytes(uint64_t parts) const { return parts * layout_.part_bytes; }

  // Packs parts of the run from plain values and packed inputs, on both; their bytes.
  Bytes pack(q::Combine job, const std::vector<Bytes>& inputs, bool with_residual, const char* what) {
    Bytes packed(run_bytes(job.parts), 0xEE), input = joined(inputs);
    Device device_packed(packed.size(), 0, true), device_input(input);
    std::vector<float> residual = with_residual ? gradients(c_.shape.count, false) : std::vector<float>();
    Bytes residual_bytes = as(DType::f32, residual);
    Device device_residual(residual_bytes, c_.shift);
    set_inputs(&job, inputs, values_.data(), input.data());
    job.packed_out = packed.data();
    job.residual = with_residual ? reinterpret_cast<float*>(residual_bytes.data()) : nullptr;
    check(q::combine(c_.shape, plan_.data(), job) == Status::ok, "CPU pack");
    set_inputs(&job, inputs, device_values_.get(), device_input.get());
    job.packed_out = device_packed.get();
    job.order = any_order();
    job.residual = with_residual ? reinterpret_cast<float*>(device_residual.get()) : nullptr;
    check(q::cuda::combine(c_.shape, device_plan_.get(), job, nullptr) == Status::ok, "CUDA pack");
    CUDA(cudaDeviceSynchronize());
    check(device_packed.guards_intact(), name_of(c_, "guards of pack"));
    check(device_packed.bytes() == packed, name_of(c_, what));
    if (with_residual) check(device_residual.bytes() == residual_bytes, name_of(c_, "residual"));
    return packed;
  }

  // Plain values from packed inputs and, if wanted, plain ones.
  void unpack(q::Combine job, const std::vector<Bytes>& inputs, DType dtype, q::Place place, const char* what) {
    const uint64_t first = job.part / c_.shape.parts * layout_.domain_count;
    const uint64_t last = ((job.part + job.parts - 1) / c_.shape.parts + 1) * layout_.domain_count;
    const uint64_t n = place == q::Place::bucket ? last - first : job.parts * layout_.slots * q::kSuperGroup;
    Bytes out(n * value_bytes(dtype), kCanary), input = joined(inputs);
    Device device_out(out.size(), c_.shift, true), device_input(input);
    set_inputs(&job, inputs, values_.data(), input.data());
    job.out = {out.data(), dtype, place, first, 2};
    check(q::combine(c_.shape, plan_.data(), job) == Status::ok, "CPU unpack");
    set_inputs(&job, inputs, device_values_.get(), device_input.get());
    job.out.data = device_out.get();
    job.order = any_order();
    check(q::cuda::combine(c_.shape, device_plan_.get(), job, nullptr) == Status::ok, "CUDA unpack");
    CUDA(cudaDeviceSynchronize());
    check(device_out.guards_intact(), name_of(c_, "guards of unpack"));
    check(device_out.bytes() == out, name_of(c_, what));
  }

 private:
  static Bytes joined(const std::vector<Bytes>& inputs) {
    Bytes all;
    for (const Bytes& b : inputs) all.insert(all.end(), b.begin(), b.end());
    return all;
  }
  void set_inputs(q::Combine* job, const std::vector<Bytes>& inputs, const void* values, const void* packed) const {
    if (job->x.data != nullptr) job->x.data = values;
    if (job->x.data != nullptr) job->x.dtype = c_.dtype;
    if (inputs.empty()) return;
    job->packed = {packed, inputs[0].size(), static_cast<uint32_t>(inputs.size()), job->packed.skip};
  }
  // NaNs differ between processors where they are not written by combine().
  void same_floats(Bytes* theirs, uint64_t begin, uint64_t end) const {
    if (c_.shape.widths == q::Widths::fine) return;
    for (uint64_t i = begin; i < end; i += 4) {
      float a, b;
      std::memcpy(&a, &plan_[i], 4);
      std::memcpy(&b, &(*theirs)[i], 4);
      if (a != a && b != b) std::memcpy(&(*theirs)[i], &a, 4);
    }
  }

  Case c_;
  q::Layout layout_;
  Bytes values_;
  Device device_values_;
  Bytes plan_;
  Device device_plan_;
};

void test_case(const Case& c) {
  Both both(c);
  const uint64_t all = uint64_t{c.shape.domains} * c.shape.parts;
  const q::Values own = {&c, DType::f32, q::Place::bucket, 0, 1};  // data: not null
  q::Combine job;
  job.parts = all;
  job.x = own;
  std::vector<Bytes> inputs;
  for (uint32_t i = 0; i < 3; ++i) {
    job.key = {random_bits(), random_bits(), static_cast<uint32_t>(random_bits()), i, 3};
    inputs.push_back(both.pack(job, {}, false, "quantise"));
  }
  job.scale = 1.0f / 3;
  both.pack(job, {inputs[0]}, false, "recompress");
  job.packed.skip = 1;
  both.pack(job, inputs, true, "recompress a sum, with a residual");
  job.packed.skip = UINT32_MAX;
  job.key.rounding = q::Rounding::nearest;
  both.pack(job, {}, true, "round to nearest");

  job = {};
  job.parts = all;
  both.unpack(job, {inputs[0]}, DType::f32, q::Place::bucket, "decompress");
  both.unpack(job, {inputs[1]}, c.dtype, q::Place::bucket, "decompress to the dtype");
  both.unpack(job, inputs, DType::bf16, q::Place::bucket, "sum to bf16");
  both.unpack(job, inputs, DType::f16, q::Place::parts, "sum to f16 in parts");
  both.unpack(job, {random_bytes(inputs[0].size())}, DType::f32, q::Place::bucket, "any bytes");
  job.part = random_bits() % all;
  job.parts = 1 + random_bits() % (all - job.part);
  job.x = own;
  const uint64_t bytes = both.run_bytes(job.parts);
  const auto begin = inputs[0].begin() + both.run_bytes(job.part);
  both.unpack(job, {Bytes(begin, begin + bytes)}, DType::f32, q::Place::bucket, "decompress and add a run");
}

void test_cases(bool quick) {
  const DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
  for (int i = 0; i < (quick ? 12 : 150); ++i) {
    Case c = {};
    c.shape.domains = static_cast<uint32_t>(random_bits() % 3 == 0 ? 1 + random_bits() % 5 : 1);
    c.shape.parts = static_cast<uint32_t>(1 + random_bits() % 12);
    const uint64_t most[] = {5, 300, 4000, 40000, quick ? 40000u : 2000000u};
    c.shape.count = c.shape.domains * (1 + random_bits() % most[random_bits() % 5]);
    if (random_bits() % 2 == 0) c.shape.count = (c.shape.count + 4095) / 4096 * 4096 * c.shape.domains;
    c.shape.widths = i % 3 == 2 ? q::Widths::paper : q::Widths::fine;
    c.shape.bits = 2.5f + static_cast<float>(random_bits() % 60) / 8;
    c.dtype = dtypes[random_bits() % 3];
    c.special = random_bits() % 2 == 0;
    c.shift = random_bits() % 3 == 0 ? value_bytes(c.dtype) == 2 && random_bits() % 2 ? 4 : 8 : 0;
    test_case(c);
  }
}

void test_arguments() {
  Device memory(1 << 16);
  q::Shape shape;
  shape.count = 1000;
  uint8_t* p = memory.get();
  q::Combine job;
  const auto status = [&] { return q::cuda::combine(shape, p, job, nullptr); };
  check(status() == Status::bad_argument, "no output");
  job.packed_out = p;
  job.out.data = p;
  check(status() == Status::bad_argument, "two outputs");
  job.out.data = nullptr;
  job.packed_out = p + 8;
  check(status() == Status::bad_argument, "misaligned output");
  job.packed_out = p;
  job.key.index = 1;
  check(status() == Status::bad_argument, "index");
  job.key.index = 0;
  job.parts = 2;
  check(status() == Status::bad_argument, "parts");
  job.parts = 1;
  job.x = {p + 1, DType::bf16};
  check(status() == Status::bad_argument, "misaligned values");
  check(q::cuda::statistics(shape, {nullptr, DType::f32}, p, q::Order::ascending, nullptr) == Status::bad_argument,
        "no values");
  check(q::cuda::allocate(shape, p, 0, p, p, nullptr) == Status::bad_argument, "no ranks");
  shape.count = 0;
  check(q::cuda::statistics(shape, {nullptr, DType::f32}, nullptr, q::Order::ascending, nullptr) == Status::ok,
        "empty bucket");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  test_arguments();
  test_cases(quick);
  std::printf("quantizer_cuda_test: %d checks, %d failures\n", checks, failures);
  return failures != 0;
}
