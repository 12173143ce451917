// The CUDA codec against the CPU codec: same bytes both ways, and corrupt frames refused. Needs a GPU, no torch.
// tests/cuda/run.sh builds and runs it; with --quick it keeps to sizes that suit compute-sanitizer.
#include "support.h"

namespace {

size_t frame_shift = 0;  // where frames begin, off the alignment of cudaMalloc

// Frames of several tensors by one CUDA call.
std::vector<Bytes> cuda_encode(const std::vector<Bytes>& tensors, const FrameOptions& options, size_t shift,
                               const std::string& what) {
  std::vector<Device> src, dst;
  std::vector<EncodeJob> jobs;
  for (const Bytes& t : tensors) {
    const uint64_t count = t.size() / value_bytes(options.dtype);
    src.emplace_back(t, shift);
    dst.emplace_back(zipccl::frame_bound(options, count), frame_shift, true);
    jobs.push_back({src.back().get(), count, dst.back().get()});
  }
  const int n = static_cast<int>(jobs.size());
  Device scratch(zipccl::cuda::encode_scratch_bytes(jobs.data(), n, options));
  Device sizes(sizeof(uint64_t) * n);
  uint64_t* device_sizes = reinterpret_cast<uint64_t*>(sizes.get());
  const Status s = zipccl::cuda::encode(jobs.data(), n, options, scratch.get(), device_sizes, nullptr, max_sms);
  check(s == Status::ok, what + ": CUDA encode: " + zipccl::status_text(s));
  CUDA(cudaDeviceSynchronize());

  const Bytes size_bytes = sizes.bytes();
  std::vector<Bytes> frames;
  for (int i = 0; i < n; ++i) {
    uint64_t size;
    std::memcpy(&size, size_bytes.data() + sizeof(size) * i, sizeof(size));
    const uint64_t bound = zipccl::frame_bound(options, jobs[i].count);
    check(size <= bound, what + ": frame size");
    check(dst[i].guards_intact(), what + ": encode wrote beside its frame");
    frames.push_back(dst[i].bytes(std::min(size, bound)));
  }
  return frames;
}

struct Decoded {
  Status status;
  Bytes values;
};

// Decodes several frames by one CUDA call.
std::vector<Decoded> cuda_decode(const std::vector<Bytes>& frames, const std::vector<uint64_t>& counts, DType dtype,
                                 size_t shift, const std::string& what) {
  std::vector<Device> src, dst;
  std::vector<DecodeJob> jobs;
  for (size_t i = 0; i < frames.size(); ++i) {
    src.emplace_back(frames[i], frame_shift);
    dst.emplace_back(counts[i] * value_bytes(dtype), shift, true);
    jobs.push_back({src.back().get(), frames[i].size(), dst.back().get(), counts[i]});
  }
  const int n = static_cast<int>(jobs.size());
  Device status(sizeof(int32_t) * n), scratch(zipccl::cuda::decode_scratch_bytes());
  const Status s = zipccl::cuda::decode(jobs.data(), n, dtype, reinterpret_cast<int32_t*>(status.get()), scratch.get(),
                                        nullptr, max_sms);
  check(s == Status::ok, what + ": CUDA decode: " + zipccl::status_text(s));
  CUDA(cudaDeviceSynchronize());

  const Bytes status_bytes = status.bytes();
  std::vector<Decoded> decoded;
  for (int i = 0; i < n; ++i) {
    int32_t code;
    std::memcpy(&code, status_bytes.data() + sizeof(code) * i, sizeof(code));
    check(dst[i].guards_intact(), what + ": decode wrote beside its output");
    decoded.push_back({static_cast<Status>(code), dst[i].bytes()});
  }
  return decoded;
}

void check_equal(const std::vector<Bytes>& tensors, const FrameOptions& options, size_t shift,
                 const std::string& what) {
  std::vector<Bytes> expected;
  std::vector<uint64_t> counts;
  for (const Bytes& t : tensors) {
    expected.push_back(cpu_encode(t, options));
    counts.push_back(t.size() / value_bytes(options.dtype));
  }
  const auto frames = cuda_encode(tensors, options, shift, what);
  const auto decoded = cuda_decode(expected, counts, options.dtype, shift, what);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string job = what + ", job " + std::to_string(i) + ", count " + std::to_string(counts[i]);
    if (frames[i] != expected[i]) {
      size_t at = 0;
      while (at < std::min(frames[i].size(), expected[i].size()) && frames[i][at] == expected[i][at]) ++at;
      check(false, job + ": CPU and CUDA frames differ from byte " + std::to_string(at) + " on; sizes " +
                       std::to_string(expected[i].size()) + " and " + std::to_string(frames[i].size()));
    } else {
      check(true, job);
    }
    check(decoded[i].status == Status::ok, job + ": status " + zipccl::status_text(decoded[i].status));
    check(decoded[i].values == tensors[i], job + ": decoded values differ");
  }
}

// ---- Tests ----------------------------------------------------------------------------------------------------

std::string describe(const char* pattern, const FrameOptions& o, size_t shift) {
  return std::string(pattern) + ", " + layout_name(o.layout) + (o.code == Code::raw ? ", raw" : "") +
         (o.checksum ? ", checksum" : "") + ", shifted by " + std::to_string(shift);
}

void test_fast(bool quick) {
  std::vector<size_t> sizes = {1, 2, 7, 8, 9, 15, 16, 17, 255, 257, 385, 400, 1023, 1024, 1025, 2047, 32768, 33000};
  if (!quick) sizes.insert(sizes.end(), {32767, 32769, 65536 + 5, 1000003, 6000001});
  for (const Pattern& p : kPatterns) {
    for (size_t n : sizes) {
      const Bytes tensor = bytes_of(p.make(n));
      for (FrameLayout layout : kLayouts) {
        for (size_t shift : {0, 2}) {
          const bool checksum = shift == 0;
          const FrameOptions options = {DType::bf16, Code::fast, layout, checksum};
          check_equal({tensor}, options, shift, describe(p.name, options, shift));
        }
      }
    }
  }
}

void test_batches(bool quick) {
  for (bool checksum : {false, true}) {
    for (FrameLayout layout : kLayouts) {
      std::vector<Bytes> tensors;
      for (int i = 0; i < (quick ? 70 : 150); ++i) {  // more than one launch
        const size_t most = i % 7 == 0 ? (quick ? 40000 : 200000) : 3000;
        const size_t n = i % 5 == 0 ? 0 : random_bits() % most;
        tensors.push_back(bytes_of(kPatterns[i % kPatternCount].make(n)));
      }
      const FrameOptions options = {DType::bf16, Code::fast, layout, checksum};
      check_equal(tensors, options, 0, describe("batch", options, 0));
    }
  }
  // More groups than blocks at a time, on any GPU of up to 200 multiprocessors.
  if (!quick) {
    check_equal({bytes_of(mixed_values(14'000'000 + 5))}, {}, 0, "many groups");
    std::vector<Bytes> tensors;
    for (int i = 0; i < 49; ++i)
      tensors.push_back(bytes_of(kPatterns[i % kPatternCount].make(280'000 + 3001 * (i % 11))));
    for (FrameLayout layout : kLayouts) {
      const FrameOptions options = {DType::bf16, Code::fast, layout, false};
      for (size_t shift : {0, 2}) check_equal(tensors, options, shift, describe("many groups", options, shift));
    }
  }
  check_equal({{}, {}, {}}, {DType::bf16, Code::fast, FrameLayout::compact, true}, 0, "nothing but empty tensors");
}

// Every tile has some 550 escapes.
Values many_escapes(size_t n) {
  Values v = normal_values(n, 1e-2f);
  for (auto& x : v) {
    // Exponents 20 above and below the others: escapes, while their mean stays where it is.
    const uint64_t far = random_bits() % 4;
    if (far < 2) x = static_cast<uint16_t>(x ^ ((x >> 7 & 0xFF) ^ ((x >> 7 & 0xFF) + (far ? 20 : -20))) << 7);
  }
  return v;
}

// More than five groups for each of 200 multiprocessors; frames that are not split are packed.
void test_large(bool quick) {
  const size_t n = 1000 * zipccl::kGroupValues;
  const auto test = [&](const char* name, const std::vector<Bytes>& tensors) {
    for (size_t shift : {0, 2}) {
      if (quick && shift != 0) continue;
      for (FrameLayout layout : {FrameLayout::compact, FrameLayout::split}) {
        const FrameOptions options = {DType::bf16, Code::fast, layout, shift == 0};
        check_equal(tensors, options, shift, std::string("large, ") + describe(name, options, shift));
      }
    }
  };
  test("mixed", {bytes_of(mixed_values(n + 1))});
  if (quick) return;
  for (const Pattern& p : kPatterns) test(p.name, {bytes_of(p.make(n + 17 * zipccl::kTileValues + 5))});
  test("many escapes", {bytes_of(many_escapes(n + zipccl::kGroupValues))});
  std::vector<Bytes> tensors;
  for (int i = 0; i < 63; ++i)
    tensors.push_back(bytes_of(kPatterns[i % kPatternCount].make(i % 9 == 0 ? 0 : 600'000 + 3001 * i)));
  test("batch", tensors);
  // One call for frames that become packed and others.
  tensors.clear();
  for (size_t count : {1000, 300'000, 0, int{zipccl::kPackedFrom} - 1, int{zipccl::kPackedFrom}, 70'001}) {
    tensors.push_back(bytes_of(group_values(count)));
  }
  test("around the limit", tensors);
}

// Values and frames at every alignment that the interface takes.
void test_alignments(bool quick) {
  for (size_t shift = 0; shift < 16; shift += 2) {
    frame_shift = zipccl::kFrameAlign * (1 + shift / 2);
    for (FrameLayout layout : kLayouts) {
      const FrameOptions options = {DType::bf16, Code::fast, layout, true};
      std::vector<Bytes> tensors;
      for (size_t n : {65536, 70001}) tensors.push_back(bytes_of(mixed_values(quick ? n / 2 : n)));
      check_equal(tensors, options, shift, describe("alignments", options, shift));
    }
  }
  frame_shift = 0;
}

void test_raw() {
  for (int d = 0; d < zipccl::kDTypeCount; ++d) {
    const DType dtype = static_cast<DType>(d);
    const uint64_t size = value_bytes(dtype);
    std::vector<Bytes> tensors;
    for (size_t n : {0, 1, 3, 17, 1000, 70001}) tensors.push_back(random_bytes(n * size));
    for (size_t shift : {uint64_t{0}, size}) {
      const FrameOptions options = {dtype, Code::raw, FrameLayout::compact, d % 2 == 0};
      check_equal(tensors, options, shift, describe(("dtype " + std::to_string(d)).c_str(), options, shift));
    }
  }
}

// The CUDA decoder must refuse what the CPU decoder refuses, take what it takes, and then give the same values.
void check_same_outcome(const std::vector<Bytes>& frames, uint64_t count, DType dtype, bool same_status,
                        const std::string& what) {
  const auto decoded = cuda_decode(frames, std::vector<uint64_t>(frames.size(), count), dtype, 0, what);
  for (size_t i = 0; i < frames.size(); ++i) {
    Bytes expected;
    const Status s = cpu_decode(frames[i], dtype, count, &expected);
    const std::string job = what + " " + std::to_string(i) + ": CPU: " + zipccl::status_text(s) +
                            ", CUDA: " + zipccl::status_text(decoded[i].status);
    check(same_status ? decoded[i].status == s : (decoded[i].status == Status::ok) == (s == Status::ok), job);
    if (s == Status::ok) check(decoded[i].values == expected, job + ": values differ");
    if (same_status && s == Status::unexpected) {
      check(std::all_of(decoded[i].values.begin(), decoded[i].values.end(), [](uint8_t b) { return b == kCanary; }),
            job + ": output touched");
    }
  }
}

void test_corrupt(bool quick) {
  const int tries = quick ? 40 : 400;
  for (bool checksum : {false, true}) {
    for (FrameLayout layout : kLayouts) {
      const FrameOptions options = {DType::bf16, Code::fast, layout, checksum};
      const std::string name = describe("corrupt", options, 0);
      const uint64_t count = 70000;  // three groups, the last of them and its last tile not full
      const Values values = layout == FrameLayout::packed ? group_values(count) : mixed_values(count);
      const Bytes frame = cpu_encode(bytes_of(values), options);
      const size_t tables = all_tables_end(count, layout);

      std::vector<Bytes> header, sealed, table, payload, garbage, shorter;
      for (int i = 0; i < tries; ++i) {
        header.push_back(frame);
        flip_bit(&header.back(), 0, zipccl::kHeaderBytes);
        sealed.push_back(frame);
        flip_bit(&sealed.back(), i % 2 ? 4 : 0, i % 2 ? 32 : 60);
        seal(&sealed.back());
        table.push_back(frame);
        flip_bit(&table.back(), zipccl::kHeaderBytes, tables);
        payload.push_back(frame);
        flip_bit(&payload.back(), tables, frame.size());
        garbage.push_back(frame);
        for (size_t b = zipccl::kHeaderBytes + random_bits() % (frame.size() - zipccl::kHeaderBytes); b < frame.size();
             ++b) {
          garbage.back()[b] = static_cast<uint8_t>(random_bits());
        }
        const size_t keep = i < 100 ? i + 1 : random_bits() % frame.size();
        shorter.emplace_back(frame.begin(), frame.begin() + keep);
      }
      check_same_outcome(header, count, DType::bf16, true, name + ": header");
      check_same_outcome(sealed, count, DType::bf16, false, name + ": sealed header");
      check_same_outcome(table, count, DType::bf16, checksum, name + ": tables");
      check_same_outcome(payload, count, DType::bf16, checksum, name + ": payload");
      check_same_outcome(garbage, count, DType::bf16, checksum, name + ": garbage");
      check_same_outcome(shorter, count, DType::bf16, true, name + ": truncated");
      if (layout == FrameLayout::packed) {
        std::vector<Bytes> slots;
        for (int i = 0; i < tries; ++i) {
          slots.push_back(frame);
          uint8_t* table = &slots.back()[zipccl::slot_table_begin(count)];
          const uint64_t wrong[] = {
              0, 1, 31, 32, 68, ~uint64_t{0}, ~uint64_t{0} / zipccl::kMaxUnitBytes + 1, random_bits()};
          std::memcpy(table + 8 * (random_bits() % 4), &wrong[i % 8], 8);
          // The second group is in order, but for the place of its units.
          uint64_t ends[2];
          std::memcpy(ends, table + 8, sizeof(ends));
          for (uint64_t& slot : ends) slot += i % 16 < 8 ? 0 : wrong[7] >> random_bits() % 64;
          std::memcpy(table + 8, ends, sizeof(ends));
        }
        check_same_outcome(slots, count, DType::bf16, checksum, name + ": slots");
      }
      // A group moved by one byte: it fits the next one, but not the one before, and would be read misaligned.
      std::vector<Bytes> moved = {frame};
      for (size_t g = 1; g < zipccl::group_count(count); ++g) ++moved[0][zipccl::group_table_begin() + 8 * g];
      check_same_outcome(moved, count, DType::bf16, checksum, name + ": moved group");
      check_same_outcome({frame}, count + 1, DType::bf16, true, name + ": other count");
      check_same_outcome({frame}, count, DType::f16, true, name + ": other dtype");
    }
  }
  const FrameOptions raw = {DType::f32, Code::raw, FrameLayout::compact, true};
  const Bytes frame = cpu_encode(random_bytes(40000), raw);
  std::vector<Bytes> frames;
  for (int i = 0; i < tries; ++i) {
    frames.push_back(frame);
    flip_bit(&frames.back(), 0, frame.size());
    if (i % 2) seal(&frames.back());
  }
  check_same_outcome(frames, 10000, DType::f32, true, "corrupt raw frame");
}

// Blocks that take group after group, whatever the tiles hold.
void test_few_multiprocessors(bool quick) {
  for (int sms : {1, 3}) {
    max_sms = sms;
    const std::string what = std::to_string(sms) + " multiprocessors, ";
    for (const Pattern& p : kPatterns) {
      for (FrameLayout layout : kLayouts) {
        for (size_t shift : {0, 2}) {
          if (quick && (sms == 1 || shift != 0)) continue;
          const FrameOptions options = {DType::bf16, Code::fast, layout, shift != 0};
          std::vector<Bytes> tensors;
          for (size_t n : {270001, 0, 33000, 5, 131072}) tensors.push_back(bytes_of(p.make(quick ? n / 3 : n)));
          check_equal(tensors, options, shift, what + describe(p.name, options, shift));
        }
      }
    }
  }
  if (!quick) {
    // Every team has many groups.
    check_equal({bytes_of(mixed_values(3'000'000 + 5)), bytes_of(mixed_values(1'000'000))}, {}, 0,
                "few for many groups");
    test_raw();
    test_corrupt(true);
  }
  max_sms = 0;
}

// A graph replays both calls with other input, and needs no host.
void test_graph() {
  const uint64_t count = 100000;
  const FrameOptions options = {DType::bf16, Code::fast, FrameLayout::compact, true};
  Device src(2 * count), frame(zipccl::frame_bound(options, count)), dst(2 * count), status(sizeof(int32_t));
  const EncodeJob encode = {src.get(), count, frame.get()};
  Device scratch(zipccl::cuda::encode_scratch_bytes(&encode, 1, options));
  Device decode_scratch(zipccl::cuda::decode_scratch_bytes());
  const DecodeJob decode = {frame.get(), zipccl::frame_bound(options, count), dst.get(), count};
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  check(zipccl::cuda::encode(&encode, 1, options, scratch.get(), nullptr, stream) == Status::ok, "captured encode");
  check(zipccl::cuda::decode(&decode, 1, DType::bf16, reinterpret_cast<int32_t*>(status.get()), decode_scratch.get(),
                             stream) == Status::ok,
        "captured decode");
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) {
    const Bytes tensor = bytes_of(mixed_values(count));
    src.set(tensor);
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    check(status.bytes() == Bytes(sizeof(int32_t), 0), "graph: status");
    check(dst.bytes() == tensor, "graph: values");
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
}

void test_arguments() {
  Device memory(4096);
  const FrameOptions options;
  int32_t* status = reinterpret_cast<int32_t*>(memory.get());
  const auto encode = [&](EncodeJob job, FrameOptions o, void* scratch) {
    return zipccl::cuda::encode(&job, 1, o, scratch, nullptr, nullptr);
  };
  const auto decode = [&](DecodeJob job) {
    return zipccl::cuda::decode(&job, 1, DType::bf16, status, memory.get(), nullptr);
  };
  uint8_t* p = memory.get();
  FrameOptions unknown = options;
  unknown.dtype = static_cast<DType>(99);
  check(encode({p, 1, p + 8}, options, p) == Status::bad_argument, "misaligned frame to encode");
  check(encode({p + 1, 1, p}, options, p) == Status::bad_argument, "misaligned values to encode");
  check(encode({nullptr, 1, p}, options, p) == Status::bad_argument, "no values to encode");
  check(encode({p, 1, p}, options, nullptr) == Status::bad_argument, "no scratch");
  check(encode({p, zipccl::kMaxCount + 1, p}, options, p) == Status::bad_argument, "count over the limit");
  check(encode({p, 1, p}, unknown, p) == Status::bad_argument, "unknown dtype");
  check(decode({p + 8, 64, p, 1}) == Status::bad_argument, "misaligned frame to decode");
  check(decode({p, 64, p + 1, 1}) == Status::bad_argument, "misaligned values to decode");
  check(decode({p, 64, nullptr, 1}) == Status::bad_argument, "no place for the values");
  check(zipccl::cuda::encode(nullptr, 0, options, nullptr, nullptr, nullptr) == Status::ok, "no jobs");
  check(zipccl::cuda::decode(nullptr, 0, DType::bf16, nullptr, nullptr, nullptr) == Status::ok, "no jobs");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  test_arguments();
  test_fast(quick);
  test_batches(quick);
  test_large(quick);
  test_alignments(quick);
  test_raw();
  test_corrupt(quick);
  test_few_multiprocessors(quick);
  test_graph();
  std::printf("codec_cuda_test: %d checks, %d failures\n", checks, failures);
  return failures != 0;
}
