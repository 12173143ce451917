// The switcher and its decisions, for explain() and for tests.
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "policy/switcher.h"

namespace zipccl {

namespace {
const char* choice_name(Choice c) {
  constexpr const char* names[kChoiceCount] = {"raw", "zip", "zip2"};
  return names[static_cast<int>(c)];
}

Choice parse_choice(const std::string& name) {
  for (int i = 0; i < kChoiceCount; ++i)
    if (name == choice_name(static_cast<Choice>(i))) return static_cast<Choice>(i);
  throw py::value_error("a choice is \"raw\", \"zip\" or \"zip2\", not \"" + name + "\"");
}

Switcher::Choices parse_choices(const std::vector<std::string>& names) {
  Switcher::Choices allowed{};
  for (const std::string& name : names) allowed[static_cast<int>(parse_choice(name))] = true;
  return allowed;
}
}  // namespace

Op parse_op(const std::string& name) {
  for (int i = 0; i < kOpCount; ++i)
    if (name == op_name(static_cast<Op>(i))) return static_cast<Op>(i);
  throw py::value_error("unknown collective \"" + name + "\"");
}

void bind_policy(py::module_& m) {
  py::class_<Decision>(m, "Decision")
      .def_property_readonly("choice", [](const Decision& d) { return zips(d.choice) ? "zip" : "raw"; })
      .def_property_readonly("design", [](const Decision& d) { return d.choice == Choice::zip_two ? 2 : 1; })
      .def_readonly("reason", &Decision::reason)
      .def_readonly("raw_seconds", &Decision::raw_seconds)
      .def_readonly("zip_seconds", &Decision::zip_seconds)
      .def_readonly("trial", &Decision::trial)
      .def_readonly("timed", &Decision::timed)
      .def("__repr__", [](const Decision& d) {
        return std::string("Decision(") + (zips(d.choice) ? "zip" : "raw") + ": " + d.reason + ")";
      });

  py::class_<Switcher>(m, "Switcher")
      .def(py::init<double>(), py::arg("prior_ratio"))
      .def(
          "set_measurements",
          [](Switcher& s, double alpha, double bytes_per_s, double fixed, double encode, double decode) {
            s.set_measurements({alpha, bytes_per_s, alpha}, {fixed, encode, decode});  // sizes travel as messages do
          },
          py::arg("alpha"), py::arg("bytes_per_s"), py::arg("fixed"), py::arg("encode"), py::arg("decode"))
      .def(
          "decide",
          [](Switcher& s, const std::string& op, int world, uint64_t bytes, const std::vector<std::string>& allowed,
             bool shared, uint64_t least) {
            return s.decide(parse_op(op), world, {bytes, shared}, parse_choices(allowed), least, /*say=*/true);
          },
          py::arg("op"), py::arg("world"), py::arg("bytes"), py::arg("allowed"), py::arg("shared") = true,
          py::arg("least") = 0)
      .def("take_back", &Switcher::take_back)
      .def(
          "raw_again",
          [](Switcher& s, const std::string& op, uint64_t bytes, const std::vector<std::string>& allowed, bool shared,
             uint64_t least) {
            return s.raw_again(parse_op(op), {bytes, shared}, parse_choices(allowed), least);
          },
          py::arg("op"), py::arg("bytes"), py::arg("allowed"), py::arg("shared") = true, py::arg("least") = 0)
      .def(
          "explain",
          [](const Switcher& s, const std::string& op, int world, uint64_t bytes,
             const std::vector<std::string>& allowed) {
            return s.explain(parse_op(op), world, {bytes}, parse_choices(allowed));
          },
          py::arg("op"), py::arg("world"), py::arg("bytes"), py::arg("allowed"))
      .def(
          "record",
          [](Switcher& s, const std::string& op, uint64_t bytes, const Decision& d, double seconds, uint64_t raw_bytes,
             uint64_t wire_bytes, bool shared) {
            s.record(parse_op(op), {bytes, shared}, d.number, d.choice, seconds, raw_bytes, wire_bytes);
          },
          py::arg("op"), py::arg("bytes"), py::arg("decision"), py::arg("seconds"), py::arg("raw_bytes"),
          py::arg("wire_bytes"), py::arg("shared") = true)
      .def(
          "wants_measurements",
          [](const Switcher& s, const std::string& op, uint64_t bytes, const std::vector<std::string>& allowed,
             bool shared, uint64_t least) {
            return s.wants_measurements(parse_op(op), {bytes, shared}, parse_choices(allowed), least);
          },
          py::arg("op"), py::arg("bytes"), py::arg("allowed"), py::arg("shared") = true, py::arg("least") = 0)
      .def(
          "wants_agreement",
          [](const Switcher& s, const std::string& op, uint64_t bytes, bool shared) {
            return s.wants_agreement(parse_op(op), {bytes, shared});
          },
          py::arg("op"), py::arg("bytes"), py::arg("shared") = true)
      .def("own_sizes", [](const Switcher& s, const std::string& op) { return s.own_sizes(parse_op(op)); })
      .def("agree_sizes", [](Switcher& s, const std::string& op,
                             const std::vector<double>& largest) { s.agree_sizes(parse_op(op), largest); })
      .def(
          "seen",
          [](const Switcher& s, const std::string& op, uint64_t bytes, bool shared) {
            return s.seen(parse_op(op), {bytes, shared});
          },
          py::arg("op"), py::arg("bytes"), py::arg("shared") = true)
      .def(
          "agree",
          [](Switcher& s, const std::string& op, uint64_t bytes, const std::vector<double>& largest, bool shared) {
            s.agree(parse_op(op), {bytes, shared}, largest);
          },
          py::arg("op"), py::arg("bytes"), py::arg("largest"), py::arg("shared") = true)
      .def_property_readonly("measured", &Switcher::measured)
      .def("ratio", [](const Switcher& s, const std::string& op) { return s.ratio(parse_op(op)); });

  m.attr("trial_calls") = Switcher::kTrial;
  m.attr("agree_every") = Switcher::kAgreeEvery;
  m.attr("agree_rarely") = Switcher::kAgreeRarely;
  m.attr("agree_rarely_unshared") = Switcher::kAgreeRarelyUnshared;
  m.def(
      "break_even",
      [](const std::string& op, double encode, double decode, int world, double ratio) {
        return break_even({0, 0, 0}, {0, encode, decode}, shape_of(parse_op(op), world, 1.0), ratio);
      },
      py::arg("op"), py::arg("encode"), py::arg("decode"), py::arg("world"), py::arg("ratio"));
  m.def(
      "dense_pays",
      [](double bytes_per_s, double fast, double dense, int world) {
        return dense_pays({0, bytes_per_s, 0}, {0, fast, fast}, {0, dense, dense}, world);
      },
      py::arg("bytes_per_s"), py::arg("fast"), py::arg("dense"), py::arg("world"));
}

}  // namespace zipccl
