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

// As zipccl.Options.native() gives them.
BackendOptions parse_options(const py::dict& d) {
  BackendOptions o;
  for (int i = 0; i < kOpCount; ++i)
    o.mode[i] = parse_mode(d["modes"][op_name(static_cast<Op>(i))].cast<std::string>());
  const std::string code = d["code"].cast<std::string>();
  o.code = code == "dense" ? Code::dense : Code::fast;
  o.choose_code = code == "auto";
  const int design = d["all_to_all_design"].cast<int>();
  o.design = design == 1 ? DesignChoice::one : design == 2 ? DesignChoice::two : DesignChoice::automatic;
  if (!d["wire_dtype"].is_none()) o.wire_dtype = d["wire_dtype"].cast<at::ScalarType>();
  o.checksum = d["checksum"].cast<bool>();
  o.min_bytes = d["min_bytes"].cast<std::optional<uint64_t>>();
  o.max_sms = d["max_sms"].cast<std::optional<int>>().value_or(0);
  o.log_decisions = d["log_decisions"].cast<bool>();
  return o;
}

c10::intrusive_ptr<ZipBackend> make_backend(int rank, int size, const BackendPtr& cpu, const BackendPtr& cpu_zip,
                                            const BackendPtr& cuda, const py::dict& options) {
  return c10::make_intrusive<ZipBackend>(rank, size, cpu, cpu_zip, cuda, parse_options(options));
}

// The inverse of parse_options().
py::dict options_dict(const ZipBackend& backend) {
  const BackendOptions& o = backend.options();
  constexpr const char* modes[] = {"auto", "zip", "raw"};
  py::dict d, by_op;
  for (int i = 0; i < kOpCount; ++i) by_op[op_name(static_cast<Op>(i))] = modes[static_cast<int>(o.mode[i])];
  d["modes"] = by_op;
  d["code"] = o.choose_code ? "auto" : o.code == Code::dense ? "dense" : "fast";
  d["all_to_all_design"] = static_cast<int>(o.design);
  d["wire_dtype"] = py::cast(o.wire_dtype);
  d["checksum"] = o.checksum;
  d["min_bytes"] = py::cast(o.min_bytes);
  d["max_sms"] = o.max_sms > 0 ? py::cast(o.max_sms) : py::none();
  d["log_decisions"] = o.log_decisions;
  return d;
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

  // As torch.distributed.split_group() copies the options of the group it splits.
  py::class_<GroupOptions, c10::intrusive_ptr<GroupOptions>, c10d::Backend::Options>(m, "GroupOptions")
      .def("__deepcopy__", [](const GroupOptions& o, const py::dict&) { return c10::make_intrusive<GroupOptions>(o); });
  m.def("set_splitter", [](py::function make) {
    // Never freed: it may be needed for as long as there is a Python.
    auto* kept = new py::function(std::move(make));
    ZipBackend::set_splitter([kept](ZipBackend& parent, const ZipBackend::StorePtr& store,
                                    const std::vector<int>& ranks, const ZipBackend::OptionsPtr& options) {
      py::gil_scoped_acquire gil;
      auto self = c10::intrusive_ptr<ZipBackend>::unsafe_reclaim_from_nonowning(&parent);
      return (*kept)(self, store, ranks, options).cast<BackendPtr>();
    });
  });
  // What torch has in C++ alone.
  m.def(
      "split_inner",
      [](const BackendPtr& inner, const ZipBackend::StorePtr& store, const std::vector<int>& ranks,
         const ZipBackend::OptionsPtr& options) { return inner->split(store, ranks, options); },
      py::arg("inner"), py::arg("store"), py::arg("ranks"), py::arg("options"),
      py::call_guard<py::gil_scoped_release>());

  m.def("drain_workers", &Worker::drain_all, py::arg("patience_s"), py::call_guard<py::gil_scoped_release>());

  // Waiting for peers must not hold the GIL: every call that can wait releases it, and so does the destructor.
  py::class_<ZipBackend, c10::intrusive_ptr<ZipBackend>, c10d::Backend>(m, "ZipBackend",
                                                                        py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_backend), py::arg("rank"), py::arg("size"), py::arg("cpu"), py::arg("cpu_zip"),
           py::arg("cuda"), py::arg("options"))
      .def_property_readonly("options", &ZipBackend::getBackendOptions)
      // torch calls it on ranks that are not in a new group; those that are make a communicator of their own.
      .def("perform_nocolor_split", [](const ZipBackend&, at::Device) {})
      .def("settings", &options_dict)
      .def("change_settings", [](ZipBackend& b, const py::dict& options) { b.set_options(parse_options(options)); })
      .def("stats", &stats_dict)
      .def("reset_stats", &ZipBackend::reset_stats)
      .def("scratch_bytes", &ZipBackend::scratch_bytes)
      .def("can_zip_cpu", &ZipBackend::can_zip_cpu)
      // For errors. torch names backends that it makes itself.
      .def("name_group", [](ZipBackend& b, const std::string& name) { b.c10d::Backend::setGroupUid(name); })
      .def(
          "explain",
          [](ZipBackend& b, const std::string& op, at::Device device, uint64_t bytes) {
            return b.explain(parse_op(op), device, bytes);
          },
          py::arg("op"), py::arg("device"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("inner",
           [](const ZipBackend& b, const std::string& type) { return b.inner(type == "cpu" ? at::kCPU : at::kCUDA); });
}

}  // namespace zipccl
