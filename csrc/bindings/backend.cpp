// ZipBackend for Python. python/zipccl/backend.py builds the inner backends and registers the class with torch.
#include <torch/csrc/utils/pybind.h>

#include "backend/zip_backend.h"
#include "bindings/bindings.h"

namespace zipccl {

namespace {
Mode parse_mode(const std::string& name) {
  if (name == "auto") return Mode::automatic;
  if (name == "zip") return Mode::zip;
  if (name == "raw") return Mode::raw;
  throw py::value_error("a collective's option is \"auto\", \"zip\" or \"raw\", not \"" + name + "\"");
}

c10::intrusive_ptr<ZipBackend> make_backend(int rank, int size, const BackendPtr& cpu, const BackendPtr& cpu_zip,
                                            const BackendPtr& cuda, const std::string& all_gather, bool checksum,
                                            std::optional<uint64_t> min_bytes, bool log_decisions) {
  BackendOptions options;
  options.all_gather = parse_mode(all_gather);
  options.checksum = checksum;
  options.min_bytes = min_bytes;
  options.log_decisions = log_decisions;
  return c10::make_intrusive<ZipBackend>(rank, size, cpu, cpu_zip, cuda, options);
}

py::dict stats_dict(const ZipBackend& backend) {
  py::dict all;
  for (const auto& [op, s] : backend.stats()) {
    py::dict d, seconds;
    seconds["encode"] = s.traffic.encode;
    seconds["sizes"] = s.traffic.sizes;
    seconds["transfer"] = s.traffic.transfer;
    seconds["decode"] = s.traffic.decode;
    d["calls"] = s.calls;
    d["zipped_calls"] = s.zipped_calls;
    d["raw_bytes"] = s.traffic.raw_bytes;
    d["wire_bytes"] = s.traffic.wire_bytes;
    d["seconds"] = seconds;
    all[py::str(op)] = d;
  }
  return all;
}
}  // namespace

void bind_backend(py::module_& m) {
  py::module_::import("torch.distributed");  // registers c10d::Backend, our base class

  m.def("drain_workers", &Worker::drain_all, py::arg("patience_s"), py::call_guard<py::gil_scoped_release>());

  // Waiting for peers must not hold the GIL: every call that can wait releases it, and so does the destructor.
  py::class_<ZipBackend, c10::intrusive_ptr<ZipBackend>, c10d::Backend>(m, "ZipBackend",
                                                                        py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_backend), py::arg("rank"), py::arg("size"), py::arg("cpu"), py::arg("cpu_zip"),
           py::arg("cuda"), py::arg("all_gather") = "auto", py::arg("checksum") = false,
           py::arg("min_bytes") = std::nullopt, py::arg("log_decisions") = false)
      .def("stats", &stats_dict)
      .def("reset_stats", &ZipBackend::reset_stats)
      .def("explain", &ZipBackend::explain, py::arg("device"), py::arg("shard_bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("inner",
           [](const ZipBackend& b, const std::string& type) { return b.inner(type == "cpu" ? at::kCPU : at::kCUDA); });
}

}  // namespace zipccl
