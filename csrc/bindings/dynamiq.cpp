// DynamiqChannel for Python. python/zipccl/dynamiq.py documents what users see.
#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/dynamiq_channel.h"
#include "bindings/bindings.h"

namespace zipccl {

namespace {
using FutureWrapper = torch::jit::PythonFutureWrapper;

std::shared_ptr<FutureWrapper> wrap(DynamiqChannel::FuturePtr future) {
  return std::make_shared<FutureWrapper>(std::move(future));
}

Topology parse_topology(const std::string& name) {
  for (int i = 0; i < kTopologyCount; ++i)
    if (name == topology_name(static_cast<Topology>(i))) return static_cast<Topology>(i);
  throw py::value_error("unknown topology \"" + name + "\"");
}

// As DynamiQState gives them, checked there.
DynamiqChannel::Options parse_options(const py::dict& d) {
  DynamiqChannel::Options o;
  const auto widths = d["widths"].cast<std::string>(), topology = d["topology"].cast<std::string>();
  o.widths = widths == "paper" ? quantizer::Widths::paper : quantizer::Widths::fine;
  o.bits = d["bits"].cast<float>();
  o.correlated = d["correlated"].cast<bool>();
  o.by_node = topology == "hierarchical";
  if (topology != "auto" && !o.by_node) o.topology = parse_topology(topology);
  o.node_size = d["node_size"].cast<int>();
  o.block_bytes = d["block_bytes"].cast<int64_t>();
  return o;
}

py::list steps_list(const std::vector<HopStep>& steps) {
  py::list all;
  for (const HopStep& step : steps) {
    auto hops = [](const std::vector<Hop>& list) {
      py::list l;
      for (const Hop& hop : list) l.append(py::make_tuple(hop.peer, hop.chunks));
      return l;
    };
    all.append(py::make_tuple(hops(step.sends), hops(step.receives)));
  }
  return all;
}

py::tuple choice_tuple(const HopChoice& c) { return py::make_tuple(topology_name(c.topology), c.by_node, c.seconds); }

HopLink parse_link(const std::array<double, 4>& v) { return {v[0], v[1], v[2], v[3]}; }
}  // namespace

void bind_dynamiq(py::module_& m) {
  py::class_<DynamiqChannel, std::shared_ptr<DynamiqChannel>>(m, "DynamiqChannel",
                                                              py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](int rank, int size, const BackendPtr& cpu, const BackendPtr& cuda) {
             return std::make_shared<DynamiqChannel>(rank, size, cpu, cuda);
           }),
           py::arg("rank"), py::arg("size"), py::arg("cpu"), py::arg("cuda"))
      .def("set_timeout", &DynamiqChannel::set_timeout, py::arg("timeout"))
      .def(
          "all_reduce",
          [](DynamiqChannel& channel, const at::Tensor& tensor, const py::dict& options, float scale, uint64_t seed,
             uint64_t step, const std::vector<at::Tensor>& exempt, const std::optional<at::Tensor>& residual,
             bool async) {
            const DynamiqChannel::Options o = parse_options(options);
            py::gil_scoped_release release;
            return wrap(
                channel.all_reduce({tensor, exempt, residual.value_or(at::Tensor()), scale, {seed, step}, async}, o));
          },
          py::arg("tensor"), py::arg("options"), py::arg("scale"), py::arg("seed"), py::arg("step"), py::arg("exempt"),
          py::arg("residual"), py::arg("async_op"))
      .def(
          "all_reduce_raw",
          [](DynamiqChannel& channel, const at::Tensor& tensor, float scale, bool async) {
            py::gil_scoped_release release;
            return wrap(channel.all_reduce_raw(tensor, scale, async));
          },
          py::arg("tensor"), py::arg("scale"), py::arg("async_op"))
      .def(
          "reduce_scatter",
          [](DynamiqChannel& channel, const at::Tensor& input, const at::Tensor& output, const py::dict& options,
             float scale, uint64_t seed, uint64_t step) {
            const DynamiqChannel::Options o = parse_options(options);
            py::gil_scoped_release release;
            return wrap(channel.reduce_scatter(input, output, scale, {seed, step}, o));
          },
          py::arg("input"), py::arg("output"), py::arg("options"), py::arg("scale"), py::arg("seed"), py::arg("step"))
      .def(
          "choose",
          [](DynamiqChannel& channel, at::Device device, int64_t count, int64_t itemsize, const py::dict& options) {
            const DynamiqChannel::Options o = parse_options(options);
            HopChoice choice;
            {
              py::gil_scoped_release release;
              choice = channel.choose(device, count, itemsize, o);
            }
            return choice_tuple(choice);
          },
          py::arg("device"), py::arg("count"), py::arg("itemsize"), py::arg("options"))
      .def("stats",
           [](const DynamiqChannel& channel) {
             py::dict all;
             for (const auto& [op, s] : channel.stats()) {
               py::dict d;
               d["calls"] = s.calls;
               d["packed_calls"] = s.zipped_calls;
               d["raw_bytes"] = s.traffic.raw_bytes;
               d["wire_bytes"] = s.traffic.wire_bytes;
               all[py::str(op)] = d;
             }
             return all;
           })
      .def("reset_stats", &DynamiqChannel::reset_stats);

  m.def(
      "hop_steps",
      [](const std::string& topology, int n, int me) {
        const auto reduce = reduce_steps(parse_topology(topology), n, me);
        return py::make_tuple(steps_list(reduce), steps_list(gather_steps(reduce)));
      },
      py::arg("topology"), py::arg("n"), py::arg("me"));
  m.def(
      "best_topology",
      [](int n, int node, double raw_bytes, double packed_bytes, const std::array<double, 4>& all,
         const std::array<double, 4>& inside, const std::array<double, 4>& between) {
        return choice_tuple(node > 1 ? best_topology(n, node, raw_bytes, packed_bytes, parse_link(all),
                                                     parse_link(inside), parse_link(between))
                                     : best_topology(n, packed_bytes, parse_link(all)));
      },
      py::arg("n"), py::arg("node"), py::arg("raw_bytes"), py::arg("packed_bytes"), py::arg("all"), py::arg("inside"),
      py::arg("between"));
}

}  // namespace zipccl
