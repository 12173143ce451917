// Code dense on CUDA against the CPU codec: same bytes both ways, and corrupt frames refused alike. Needs a GPU, no
// torch. tests/cuda/run.sh builds and runs it; with --quick it keeps to sizes that suit compute-sanitizer.
#include "../fuzz/random_values.h"
#include "support.h"

namespace {

namespace dense = zipccl::dense;

struct Tensor {
  Bytes values;
  uint64_t count;
};

Tensor random_tensor(DType dtype, uint64_t count, uint64_t seed) {
  zipccl::Random r(seed);
  return {zipccl::random_elements(&r, dense::format_of(dtype), dense::element_count(dtype, count)), count};
}

// Frames of several tensors by one call.
std::vector<Bytes> cuda_encode(const std::vector<Tensor>& tensors, const FrameOptions& options, size_t shift,
                               const std::string& what) {
  std::vector<Device> src, dst;
  std::vector<EncodeJob> jobs;
  for (const Tensor& t : tensors) {
    src.emplace_back(t.values, shift);
    dst.emplace_back(zipccl::frame_bound(options, t.count), 0, true);
    jobs.push_back({src.back().get(), t.count, dst.back().get()});
  }
  const int n = static_cast<int>(jobs.size());
  Device scratch(zipccl::cuda::encode_scratch_bytes(jobs.data(), n, options)), sizes(sizeof(uint64_t) * n);
  const Status s = zipccl::cuda::encode(jobs.data(), n, options, scratch.get(),
                                        reinterpret_cast<uint64_t*>(sizes.get()), nullptr, max_sms);
  check(s == Status::ok, what + ": CUDA encode: " + zipccl::status_text(s));
  CUDA(cudaDeviceSynchronize());
  std::vector<uint64_t> size(n);
  CUDA(cudaMemcpy(size.data(), sizes.get(), sizeof(uint64_t) * n, cudaMemcpyDeviceToHost));
  std::vector<Bytes> frames;
  for (int i = 0; i < n; ++i) {
    const uint64_t bound = zipccl::frame_bound(options, tensors[i].count);
    check(size[i] <= bound && dst[i].guards_intact(), what + ": frame within its bound");
    frames.push_back(dst[i].bytes(std::min(size[i], bound)));
  }
  return frames;
}

struct Decoded {
  Status status;
  Bytes values;
};

std::vector<Decoded> cuda_decode(const std::vector<Bytes>& frames, const std::vector<uint64_t>& counts, DType dtype,
                                 size_t shift, const std::string& what) {
  std::vector<Device> src, dst;
  std::vector<DecodeJob> jobs;
  for (size_t i = 0; i < frames.size(); ++i) {
    src.emplace_back(frames[i]);
    dst.emplace_back(counts[i] * value_bytes(dtype), shift, true);
    jobs.push_back({src.back().get(), frames[i].size(), dst.back().get(), counts[i]});
  }
  const int n = static_cast<int>(jobs.size());
  Device status(sizeof(int32_t) * n), scratch(zipccl::cuda::decode_scratch_bytes());
  const Status s = zipccl::cuda::decode(jobs.data(), n, dtype, reinterpret_cast<int32_t*>(status.get()), scratch.get(),
                                        nullptr, max_sms, Code::dense);
  check(s == Status::ok, what + ": CUDA decode: " + zipccl::status_text(s));
  CUDA(cudaDeviceSynchronize());
  std::vector<int32_t> codes(n);
  CUDA(cudaMemcpy(codes.data(), status.get(), sizeof(int32_t) * n, cudaMemcpyDeviceToHost));
  std::vector<Decoded> decoded;
  for (int i = 0; i < n; ++i) {
    check(dst[i].guards_intact(), what + ": decode wrote beside its output");
    decoded.push_back({static_cast<Status>(codes[i]), dst[i].bytes()});
  }
  return decoded;
}

void check_equal(const std::vector<Tensor>& tensors, const FrameOptions& options, size_t shift,
                 const std::string& what) {
  std::vector<Bytes> expected;
  std::vector<uint64_t> counts;
  for (const Tensor& t : tensors) {
    expected.push_back(cpu_encode(t.values, options));
    counts.push_back(t.count);
  }
  const auto frames = cuda_encode(tensors, options, shift, what);
  const auto decoded = cuda_decode(expected, counts, options.dtype, shift, what);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string job = what + ", job " + std::to_string(i) + ", count " + std::to_string(counts[i]);
    size_t at = 0;
    while (at < std::min(frames[i].size(), expected[i].size()) && frames[i][at] == expected[i][at]) ++at;
    check(frames[i] == expected[i], job + ": CPU and CUDA frames differ from byte " + std::to_string(at) +
                                        " on; sizes " + std::to_string(expected[i].size()) + " and " +
                                        std::to_string(frames[i].size()));
    check(decoded[i].status == Status::ok, job + ": status " + zipccl::status_text(decoded[i].status));
    check(decoded[i].values == tensors[i].values, job + ": decoded values differ");
  }
}

std::string describe(DType dtype, const FrameOptions& o, size_t shift) {
  return "dtype " + std::to_string(static_cast<int>(dtype)) + (o.checksum ? ", checksum" : "") + ", shifted by " +
         std::to_string(shift);
}

// Off 16 bytes, but aligned to the dtype.
size_t odd_shift(DType dtype) { return std::min<size_t>(value_bytes(dtype), 8); }

void test_counts(bool quick) {
  std::vector<uint64_t> counts = {1, 2, 7, 8, 9, 16, 17, 63, 255, 400, 1023, 1024, 1025, 3000, 33000};
  if (!quick) counts.insert(counts.end(), {32767, 32768, 32769, 200001, 3000001});
  for (int d = 0; d < zipccl::kDTypeCount; ++d) {
    const DType dtype = static_cast<DType>(d);
    if (quick && d > 7 && d < 11) continue;  // complex numbers are pairs of others
    for (uint64_t count : counts) {
      const size_t shift = count % 2 ? odd_shift(dtype) : 0;
      const FrameOptions options = {dtype, Code::dense, FrameLayout::compact, count % 3 == 0};
      check_equal({random_tensor(dtype, count, 100 * count + d)}, options, shift, describe(dtype, options, shift));
    }
  }
}

void test_every_pattern() {
  for (DType dtype : {DType::bf16, DType::f16}) {
    Values v(65536 + 300);
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint16_t>(i);
    const FrameOptions options = {dtype, Code::dense, FrameLayout::compact, true};
    check_equal({{bytes_of(v), v.size()}}, options, 0, "every pattern");
    std::shuffle(v.begin(), v.end(), random_bits);
    check_equal({{bytes_of(v), v.size()}}, options, 2, "every pattern, shuffled");
  }
  for (const Pattern& p : kPatterns) {
    const Values v = p.make(40000);
    check_equal({{bytes_of(v), v.size()}}, {DType::bf16, Code::dense, FrameLayout::compact, false}, 0, p.name);
  }
}

void test_batches(bool quick) {
  for (DType dtype : {DType::bf16, DType::f32, DType::f8_e4m3fn}) {
    std::vector<Tensor> tensors;
    for (int i = 0; i < (quick ? 70 : 150); ++i) {  // more than one launch
      const uint64_t most = i % 7 == 0 ? (quick ? 40000 : 200000) : 3000;
      tensors.push_back(random_tensor(dtype, i % 5 == 0 ? 0 : random_bits() % most, i));
    }
    const FrameOptions options = {dtype, Code::dense, FrameLayout::compact, dtype == DType::f32};
    check_equal(tensors, options, 0, describe(dtype, options, 0) + ", batch");
  }
}

// Raw frames are taken as well, frames in code fast are not.
void test_other_codes() {
  const Tensor t = random_tensor(DType::bf16, 70000, 1);
  for (Code code : {Code::raw, Code::fast}) {
    const Bytes frame = cpu_encode(t.values, {DType::bf16, code, FrameLayout::compact, true});
    const auto decoded = cuda_decode({frame}, {t.count}, DType::bf16, 0, "other code");
    check(decoded[0].status == (code == Code::raw ? Status::ok : Status::unexpected), "other code: status");
    if (code == Code::raw) check(decoded[0].values == t.values, "raw frame: values");
  }
}

void reseal_checksum(Bytes* frame) {
  FrameHeader h;
  std::memcpy(&h, frame->data(), sizeof(h));
  h.checksum = zipccl::payload_checksum(frame->data() + sizeof(h), frame->size() - sizeof(h));
  std::memcpy(frame->data(), &h, sizeof(h));
  seal(frame);
}

// CUDA and CPU agree on every damaged frame: whether it is one, and on its values if it is.
void test_damage(bool quick) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64, DType::f8_e4m3fn, DType::f8_e5m2, DType::i64}) {
    for (bool checksum : {false, true}) {
      const Tensor t = random_tensor(dtype, 36 * 1024 + 700, 7 + static_cast<int>(dtype));
      const Bytes frame = cpu_encode(t.values, {dtype, Code::dense, FrameLayout::compact, checksum});
      const size_t tables_end = zipccl::tables_end(dense::element_count(dtype, t.count));
      for (int round = 0; round < (quick ? 24 : 200); ++round) {
        Bytes damaged = frame;
        const int kind = round % 4;
        if (kind == 0) flip_bit(&damaged, 0, zipccl::kHeaderBytes);
        if (kind == 1) flip_bit(&damaged, zipccl::kHeaderBytes, tables_end);
        if (kind >= 2) flip_bit(&damaged, tables_end, damaged.size());
        if (kind == 3) {
          for (size_t i = tables_end + random_bits() % 2000; i < damaged.size() && i < tables_end + 4000; ++i) {
            damaged[i] = static_cast<uint8_t>(random_bits());
          }
        }
        if (checksum && kind != 0 && round % 8 >= 4) reseal_checksum(&damaged);
        Bytes values;
        const Status expected = cpu_decode(damaged, dtype, t.count, &values);
        const auto decoded = cuda_decode({damaged}, {t.count}, dtype, 0, "damage");
        const std::string what = "dtype " + std::to_string(static_cast<int>(dtype)) + ", damage of kind " +
                                 std::to_string(kind) + ": CPU says " + zipccl::status_text(expected) + ", CUDA " +
                                 zipccl::status_text(decoded[0].status);
        // Which of several faults is reported depends on which block finds one first.
        check((decoded[0].status == Status::ok) == (expected == Status::ok), what);
        if (expected == Status::ok) check(decoded[0].values == values, what + ": values");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  test_counts(quick);
  test_every_pattern();
  test_batches(quick);
  test_other_codes();
  test_damage(quick);
  max_sms = 3;
  test_batches(true);
  check_equal({random_tensor(DType::bf16, 1000003, 5)}, {DType::bf16, Code::dense, FrameLayout::compact, true}, 0,
              "few processors");
  std::printf("dense_cuda_test: %d checks, %d failures\n", checks, failures);
  return failures != 0;
}
