// The switcher and its decisions, for the planner and for tests.
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "policy/switcher.h"

namespace zipccl {

void bind_policy(py::module_& m) {
  py::class_<Decision>(m, "Decision")
      .def_property_readonly("choice", [](const Decision& d) { return d.choice == Choice::zip ? "zip" : "raw"; })
      .def_readonly("reason", &Decision::reason)
      .def_readonly("raw_seconds", &Decision::raw_seconds)
      .def_readonly("zip_seconds", &Decision::zip_seconds)
      .def("__repr__", [](const Decision& d) {
        return std::string("Decision(") + (d.choice == Choice::zip ? "zip" : "raw") + ": " + d.reason + ")";
      });

  py::class_<Switcher>(m, "Switcher")
      .def(py::init<double>(), py::arg("prior_ratio"))
      .def(
          "set_measurements",
          [](Switcher& s, double alpha, double bytes_per_s, double fixed, double encode, double decode) {
            s.set_measurements({alpha, bytes_per_s}, {fixed, encode, decode});
          },
          py::arg("alpha"), py::arg("bytes_per_s"), py::arg("fixed"), py::arg("encode"), py::arg("decode"))
      .def("all_gather", &Switcher::all_gather, py::arg("world"), py::arg("shard_bytes"))
      .def("observe", &Switcher::observe, py::arg("raw_bytes"), py::arg("wire_bytes"))
      .def_property_readonly("measured", &Switcher::measured)
      .def_property_readonly("ratio", &Switcher::ratio);
  m.def(
      "all_gather_break_even",
      [](double encode, double decode, int world, double ratio) {
        return all_gather_break_even({0, encode, decode}, world, ratio);
      },
      py::arg("encode"), py::arg("decode"), py::arg("world"), py::arg("ratio"));
}

}  // namespace zipccl
