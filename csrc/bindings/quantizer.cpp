// The quantiser on tensors: zipccl._C.quantizer. Statistics, plans and packed parts are 1-D uint8 or bf16 tensors.
#include "quantizer/quantizer.h"

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "collectives/error.h"
#include "quantizer/layout.h"

#ifdef ZIPCCL_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace zipccl {

namespace {
namespace q = quantizer;

void require(bool condition, const char* what) {
  if (!condition) throw py::value_error(what);
}

q::Shape make_shape(uint64_t count, uint32_t domains, uint32_t parts, const std::string& widths, float bits) {
  require(widths == "fine" || widths == "paper", "widths must be \"fine\" or \"paper\"");
  const q::Shape shape = {count, domains, parts, widths == "fine" ? q::Widths::fine : q::Widths::paper, bits};
  require(q::check(shape) == Status::ok,
          "a shape needs domains and parts of at least 1, a count that domains divide, and 1 to 16 bits");
  return shape;
}

q::Place parse_place(const std::string& name) {
  require(name == "bucket" || name == "parts", "place must be \"bucket\" or \"parts\"");
  return name == "bucket" ? q::Place::bucket : q::Place::parts;
}

DType value_dtype(const at::Tensor& t) {
  if (t.scalar_type() == at::kFloat) return DType::f32;
  if (t.scalar_type() == at::kBFloat16) return DType::bf16;
  if (t.scalar_type() == at::kHalf) return DType::f16;
  throw py::type_error(std::string("the quantiser takes float32, bfloat16 and float16, not ") +
                       toString(t.scalar_type()));
}

void check_bytes(const at::Tensor& t, uint64_t bytes, const char* what) {
  require(t.is_contiguous() && t.nbytes() >= bytes, what);
}

at::Tensor bytes_on(const at::Tensor& like, uint64_t n) {
  return at::empty({static_cast<int64_t>(n)}, like.options().dtype(at::kByte));
}

// The device of a call: its guard, stream, and the two implementations.
class On {
 public:
  explicit On(const at::Tensor& t) : cuda_(t.is_cuda()) {
    require(t.is_cpu() || t.is_cuda(), "the quantiser works on CPU and CUDA tensors");
#ifdef ZIPCCL_WITH_CUDA
    if (cuda_) guard_.set_device(t.device());
#else
    require(!cuda_, "this zipccl is built for the CPU alone");
#endif
  }
  bool cuda() const { return cuda_; }
#ifdef ZIPCCL_WITH_CUDA
  void* stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }

 private:
  c10::cuda::OptionalCUDAGuard guard_;
#endif

 private:
  bool cuda_;
};

#ifdef ZIPCCL_WITH_CUDA
#define ZIPCCL_ON(on, function, ...) \
  ((on).cuda() ? q::cuda::function(__VA_ARGS__, (on).stream()) : q::function(__VA_ARGS__))
#else
#define ZIPCCL_ON(on, function, ...) q::function(__VA_ARGS__)
#endif

at::Tensor statistics(const q::Shape& shape, const at::Tensor& x) {
  check_bytes(x, shape.count * x.element_size(), "x must be contiguous and hold the bucket");
  const On on(x);
  const q::StatsFormat format = q::stats_format(shape);
  at::Tensor stats = at::empty({static_cast<int64_t>(format.count)},
                               x.options().dtype(format.dtype == DType::u8 ? at::kByte : at::kBFloat16));
  const q::Values values = {x.const_data_ptr(), value_dtype(x)};
  check(ZIPCCL_ON(on, statistics, shape, values, stats.mutable_data_ptr(), q::Order::descending),
        "zipccl quantizer statistics");
  return stats;
}

at::Tensor allocate(const q::Shape& shape, const at::Tensor& stats, uint32_t ranks) {
  check_bytes(stats, q::stats_format(shape).bytes, "stats must be contiguous and as long as statistics() makes them");
  const On on(stats);
  at::Tensor plan = bytes_on(stats, q::plan_bytes(shape));
  uint64_t scratch_bytes = q::plan_scratch_bytes(shape);
#ifdef ZIPCCL_WITH_CUDA
  if (on.cuda()) scratch_bytes = q::cuda::plan_scratch_bytes(shape);
#endif
  at::Tensor scratch = bytes_on(stats, scratch_bytes);
  check(ZIPCCL_ON(on, allocate, shape, stats.const_data_ptr(), ranks, plan.mutable_data_ptr(),
                  scratch.mutable_data_ptr()),
        "zipccl quantizer allocate");
  return plan;
}

q::Values values_of(const q::Shape& shape, const q::Combine& job, const at::Tensor& t, const std::string& place,
                    uint64_t first, float means) {
  const q::Values v = {t.const_data_ptr(), value_dtype(t), parse_place(place), first, means};
  const uint64_t last_domain = (job.part + job.parts - 1) / shape.parts;
  const uint64_t needed = v.place == q::Place::parts ? job.parts * q::slots(shape) * q::kSuperGroup
                                                     : (last_domain + 1) * (shape.count / shape.domains) - first;
  check_bytes(t, job.parts == 0 ? 0 : needed * t.element_size(), "values must be contiguous and cover the parts");
  return v;
}

void combine(const q::Shape& shape, const at::Tensor& plan, uint64_t part, std::optional<uint64_t> parts,
             const std::optional<at::Tensor>& x, const std::string& x_place, uint64_t x_first, float x_means,
             const std::optional<at::Tensor>& packed, int64_t skip, float scale,
             const std::optional<at::Tensor>& packed_out, std::tuple<uint64_t, uint64_t, uint32_t> key,
             std::tuple<uint32_t, uint32_t> index, bool nearest, const std::optional<at::Tensor>& out,
             const std::string& out_place, uint64_t out_first, float out_means,
             const std::optional<at::Tensor>& residual, uint64_t residual_first) {
  const uint64_t all = uint64_t{shape.domains} * shape.parts;
  q::Combine job;
  job.part = part;
  require(part <= all, "part must be one of the shape's");
  job.parts = parts.value_or(all - part);
  require(job.parts <= all - part, "parts must be some of the shape's");
  check_bytes(plan, q::plan_bytes(shape), "plan must be one that allocate() made for this shape");
  const uint64_t run_bytes = job.parts * q::part_bytes(shape);
  for (const auto& t : {x, packed, packed_out, out, residual})
    require(!t.has_value() || t->device() == plan.device(), "all tensors must be on one device");
  if (x) job.x = values_of(shape, job, *x, x_place, x_first, x_means);
  if (out) job.out = values_of(shape, job, *out, out_place, out_first, out_means);
  if (packed) {
    require(packed->scalar_type() == at::kByte && (packed->dim() == 1 || packed->dim() == 2),
            "packed must be a 1-D or 2-D tensor of torch.uint8");
    const uint64_t n = packed->dim() == 1 ? 1 : packed->size(0);
    check_bytes(*packed, n * run_bytes, "packed must be contiguous and hold the parts of every input");
    job.packed = {packed->const_data_ptr(), n == 0 ? 0 : packed->nbytes() / n, static_cast<uint32_t>(n),
                  skip < 0 ? UINT32_MAX : static_cast<uint32_t>(skip)};
    require(job.packed.stride >= run_bytes, "packed must hold the parts of every input");
  }
  job.scale = scale;
  if (packed_out) {
    check_bytes(*packed_out, run_bytes, "packed_out must be contiguous and have room for the parts");
    job.packed_out = packed_out->mutable_data_ptr();
  }
  job.key.seed = std::get<0>(key);
  job.key.step = std::get<1>(key);
  job.key.bucket = std::get<2>(key);
  job.key.index = std::get<0>(index);
  job.key.of = std::get<1>(index);
  job.key.rounding = nearest ? q::Rounding::nearest : q::Rounding::stochastic;
  if (residual) {
    require(residual->scalar_type() == at::kFloat, "residual must be float32");
    values_of(shape, job, *residual, "bucket", residual_first, 0);
    job.residual = residual->mutable_data_ptr<float>();
    job.residual_first = residual_first;
  }
  const On on(plan);
  py::gil_scoped_release release;
  check(ZIPCCL_ON(on, combine, shape, plan.const_data_ptr(), job), "zipccl quantizer combine");
}
}  // namespace

void bind_quantizer(py::module_& m) {
  auto module = m.def_submodule("quantizer");
  py::class_<q::Shape>(module, "Shape")
      .def(py::init(&make_shape), py::arg("count"), py::arg("domains") = 1, py::arg("parts") = 1,
           py::arg("widths") = "fine", py::arg("bits") = 5.0f)
      .def_readonly("count", &q::Shape::count)
      .def_readonly("domains", &q::Shape::domains)
      .def_readonly("parts", &q::Shape::parts)
      .def_readonly("bits", &q::Shape::bits)
      .def_property_readonly("widths", [](const q::Shape& s) { return s.widths == q::Widths::fine ? "fine" : "paper"; })
      .def_property_readonly("super_groups", &q::super_groups)
      .def_property_readonly("slots", &q::slots)
      .def_property_readonly("part_bytes", &q::part_bytes)
      .def_property_readonly("plan_bytes", &q::plan_bytes)
      .def_property_readonly("orders_at", [](const q::Shape& s) { return q::layout_of(s).orders_at; })
      .def_property_readonly("means_at", [](const q::Shape& s) { return q::layout_of(s).means_at; })
      .def_property_readonly("stats_bytes", [](const q::Shape& s) { return q::stats_format(s).bytes; })
      .def_property_readonly("stats_maximum", [](const q::Shape& s) { return q::stats_format(s).maximum; });
  module.def("statistics", &statistics, py::arg("shape"), py::arg("x"));
  module.def("allocate", &allocate, py::arg("shape"), py::arg("stats"), py::arg("ranks"));
  module.def("combine", &combine, py::arg("shape"), py::arg("plan"), py::kw_only(), py::arg("part") = 0,
             py::arg("parts") = py::none(), py::arg("x") = py::none(), py::arg("x_place") = "bucket",
             py::arg("x_first") = 0, py::arg("x_means") = 0.0f, py::arg("packed") = py::none(), py::arg("skip") = -1,
             py::arg("scale") = 1.0f, py::arg("packed_out") = py::none(),
             py::arg("key") = std::tuple<uint64_t, uint64_t, uint32_t>(0, 0, 0),
             py::arg("index") = std::tuple<uint32_t, uint32_t>(0, 1), py::arg("nearest") = false,
             py::arg("out") = py::none(), py::arg("out_place") = "bucket", py::arg("out_first") = 0,
             py::arg("out_means") = 0.0f, py::arg("residual") = py::none(), py::arg("residual_first") = 0);
}

}  // namespace zipccl
