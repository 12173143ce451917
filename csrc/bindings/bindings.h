#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zipccl {

void bind_codec(py::module_& m);
void bind_policy(py::module_& m);
void bind_backend(py::module_& m);

}  // namespace zipccl
