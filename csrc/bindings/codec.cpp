// Frames of tensors. python/zipccl/codec.py documents what users see.
#include "codec/codec.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "collectives/engine.h"
#include "collectives/error.h"
#include "collectives/torch_threads.h"

#ifdef ZIPCCL_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace zipccl {

namespace {
constexpr std::pair<const char*, Isa> kIsas[] = {
    {"best", Isa::best}, {"scalar", Isa::scalar}, {"avx2", Isa::avx2}, {"avx512", Isa::avx512}};

Isa parse_isa(const std::string& name) {
  for (const auto& isa : kIsas)
    if (name == isa.first) return isa.second;
  throw py::value_error("isa must be \"best\", \"scalar\", \"avx2\" or \"avx512\", not \"" + name + "\"");
}

FrameOptions parse_options(const at::Tensor& t, const std::string& code, const std::string& layout, bool checksum) {
  FrameOptions o;
  if (!frame_dtype(t.scalar_type(), &o.dtype))
    throw py::type_error(std::string("zipccl cannot put dtype ") + toString(t.scalar_type()) + " in a frame");
  if (code == "fast")
    o.code = Code::fast;
  else if (code == "dense")
    o.code = Code::dense;
  else if (code == "raw")
    o.code = Code::raw;
  else
    throw py::value_error("code must be \"fast\", \"dense\" or \"raw\", not \"" + code + "\"");
  if (layout == "compact")
    o.layout = FrameLayout::compact;
  else if (layout == "split")
    o.layout = FrameLayout::split;
  else if (layout == "packed")
    o.layout = FrameLayout::packed;
  else
    throw py::value_error("layout must be \"compact\", \"split\" or \"packed\", not \"" + layout + "\"");
  o.checksum = checksum;
  return o;
}

std::unique_ptr<Engine> engine_for(const at::Tensor& t, [[maybe_unused]] int max_sms = 0) {
  if (t.is_cpu()) return make_cpu_engine();
#ifdef ZIPCCL_WITH_CUDA
  if (t.is_cuda()) {
    auto engine = make_cuda_engine(t.device());
    engine->limit_sms(max_sms);
    return engine;
  }
#endif
  throw Error("zipccl: this build has no codec for " + t.device().str() + " tensors");
}

void check_frame(const at::Tensor& frame) {
  if (frame.scalar_type() != at::kByte || frame.dim() != 1)
    throw py::type_error("a frame is a 1-D tensor of torch.uint8");
}

// The statuses a CUDA decode left behind, after the current stream.
void settle(Engine& engine, const at::Tensor& on) {
  Engine::Pending pending = engine.take_statuses();
  if (!pending.statuses.defined()) return;
  engine.to_host(at::zeros({1}, on.options().dtype(at::kLong)));
  for (size_t i = 0; i < pending.what.size(); ++i)
    check(static_cast<Status>(pending.statuses.const_data_ptr<int32_t>()[i]), pending.what[i]);
}

at::Tensor compress(const at::Tensor& t, const std::string& code, const std::string& layout, bool checksum,
                    const std::string& isa_name) {
  FrameOptions options = parse_options(t, code, layout, checksum);
  Isa isa = parse_isa(isa_name);
  py::gil_scoped_release release;
  at::NoGradGuard no_grad;
#ifdef ZIPCCL_WITH_CUDA
  c10::cuda::OptionalCUDAGuard guard;
  if (t.is_cuda()) guard.set_device(t.device());
#endif
  auto engine = engine_for(t);
  at::Tensor src = t.resolve_conj().resolve_neg().contiguous().view({-1});  // lazy bits are not in the memory
  at::Tensor frame = engine->empty(static_cast<int64_t>(frame_bound(options, src.numel())), at::kByte);
  int64_t bytes;
  if (t.is_cpu()) {
    uint64_t written = 0;
    check(encode(src.const_data_ptr(), src.numel(), options, frame.mutable_data_ptr(), frame.numel(), &written, isa,
                 torch_threads(src.nbytes())),
          "zipccl compress");
    bytes = static_cast<int64_t>(written);
  } else {
    at::Tensor size = engine->empty(1, at::kLong);
    engine->encode({src}, options, {frame}, size);
    bytes = engine->to_host(size)[0];
  }
  return frame.narrow(0, 0, bytes).clone();
}

FrameInfo info_of(const at::Tensor& frame) {
  at::Tensor head = frame.narrow(0, 0, std::min<int64_t>(frame.numel(), kHeaderBytes)).cpu().contiguous();
  FrameInfo info;
  check(read_header(head.const_data_ptr(), frame.numel(), &info), "zipccl frame");
  if (info.frame_bytes > static_cast<uint64_t>(frame.numel())) check(Status::truncated, "zipccl frame");
  return info;
}

at::Tensor decompress(at::Tensor frame, const std::string& isa_name) {
  check_frame(frame);
  Isa isa = parse_isa(isa_name);
  py::gil_scoped_release release;
  at::NoGradGuard no_grad;
#ifdef ZIPCCL_WITH_CUDA
  c10::cuda::OptionalCUDAGuard guard;
  if (frame.is_cuda()) guard.set_device(frame.device());
#endif
  frame = frame.contiguous();
  auto engine = engine_for(frame);
  FrameInfo info = info_of(frame);  // before anything of the size it names is allocated
  at::Tensor out = engine->empty(static_cast<int64_t>(info.count), scalar_type(info.dtype));
  if (frame.is_cpu()) {
    check(decode(frame.const_data_ptr(), frame.numel(), info.dtype, info.count, out.mutable_data_ptr(), isa,
                 torch_threads(out.nbytes())),
          "zipccl decompress");
    return out;
  }
  if (reinterpret_cast<uintptr_t>(frame.const_data_ptr()) % kFrameAlign != 0) frame = frame.clone();
  FrameOptions options;
  options.dtype = info.dtype;
  options.code = info.code;
  engine->decode({{frame, out, "the caller"}}, options, "zipccl decompress");
  settle(*engine, frame);
  return out;
}

// Into the caller's memory and, on CUDA, without waiting for the device: for benchmarks and CUDA graphs.
void encode_into(const at::Tensor& t, at::Tensor frame, at::Tensor size, const std::string& code,
                 const std::string& layout, bool checksum, int max_sms) {
  FrameOptions options = parse_options(t, code, layout, checksum);
  check_frame(frame);
  if (!t.is_contiguous() || t.is_conj() || t.is_neg() || size.scalar_type() != at::kLong || size.numel() != 1 ||
      frame.device() != t.device() || size.device() != t.device() ||
      static_cast<uint64_t>(frame.numel()) < frame_bound(options, t.numel()))
    throw py::value_error("encode_into needs a contiguous tensor, a frame of frame_bound() bytes and an int64 size");
  py::gil_scoped_release release;
  engine_for(t, max_sms)->encode({t}, options, {frame}, size);
}

// CUDA: the frame's status is not looked at; decompress() does that. `code`: what the frame is in, unless raw.
void decode_into(const at::Tensor& frame, at::Tensor out, int max_sms, const std::string& code) {
  check_frame(frame);
  FrameOptions options = parse_options(out, code, "compact", false);
  if (!out.is_contiguous() || !frame.is_contiguous() || frame.device() != out.device())
    throw py::value_error("decode_into needs a contiguous frame and output on one device");
  py::gil_scoped_release release;
  engine_for(out, max_sms)->decode({{frame, out, "the caller"}}, options, "zipccl decode_into");
}

// decode_sum() of fast or raw frames of the output's dtype; likewise.
void sum_into(const std::vector<at::Tensor>& frames, at::Tensor out, int max_sms) {
  SumOptions options;
  if (!frame_dtype(out.scalar_type(), &options.in) || !can_sum(options.in, options.in) || !out.is_contiguous())
    throw py::value_error("sum_into needs a contiguous output of bf16, fp16 or fp32");
  options.out = options.in;
  std::vector<Engine::Addend> addends;
  for (const at::Tensor& frame : frames) {
    check_frame(frame);
    if (!frame.is_contiguous() || frame.device() != out.device())
      throw py::value_error("sum_into needs contiguous frames on the output's device");
    addends.push_back({frame, true, "the caller"});
  }
  if (addends.empty()) throw py::value_error("sum_into needs a frame");
  py::gil_scoped_release release;
  engine_for(out, max_sms)->decode_sum(addends, options, out, "zipccl sum_into");
}

py::dict frame_info(const at::Tensor& frame) {
  check_frame(frame);
  FrameInfo info = info_of(frame);
  py::dict d;
  d["dtype"] = py::cast(scalar_type(info.dtype));
  d["code"] = info.code == Code::raw ? "raw" : info.code == Code::fast ? "fast" : "dense";
  d["layout"] = info.layout == FrameLayout::split ? "split" : info.layout == FrameLayout::packed ? "packed" : "compact";
  d["checksum"] = info.checksum;
  d["count"] = info.count;
  d["raw_bytes"] = info.raw_bytes;
  d["frame_bytes"] = info.frame_bytes;
  return d;
}
}  // namespace

void bind_codec(py::module_& m) {
  m.def("compress", &compress, py::arg("tensor"), py::arg("code") = "fast", py::arg("layout") = "compact",
        py::arg("checksum") = true, py::arg("isa") = "best");
  m.def("decompress", &decompress, py::arg("frame"), py::arg("isa") = "best");
  m.def("encode_into", &encode_into, py::arg("tensor"), py::arg("frame"), py::arg("size"), py::arg("code") = "fast",
        py::arg("layout") = "compact", py::arg("checksum") = false, py::arg("max_sms") = 0);
  m.def("decode_into", &decode_into, py::arg("frame"), py::arg("out"), py::arg("max_sms") = 0,
        py::arg("code") = "fast");
  m.def("sum_into", &sum_into, py::arg("frames"), py::arg("out"), py::arg("max_sms") = 0);
  m.def("frame_info", &frame_info, py::arg("frame"));
  m.def(
      "frame_bound",
      [](const at::Tensor& t, const std::string& code, const std::string& layout, bool checksum) {
        return frame_bound(parse_options(t, code, layout, checksum), t.numel());
      },
      py::arg("tensor"), py::arg("code") = "fast", py::arg("layout") = "compact", py::arg("checksum") = false);
  m.def("isas", [] {  // those of this processor, the one that "best" stands for last
    std::vector<std::string> names;
    for (const auto& isa : kIsas)
      if (isa.second != Isa::best && isa.second != best_isa() && has_isa(isa.second)) names.push_back(isa.first);
    for (const auto& isa : kIsas)
      if (isa.second == best_isa()) names.push_back(isa.first);
    return names;
  });
}

}  // namespace zipccl
