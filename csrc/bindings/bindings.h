#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

#include "policy/model.h"

namespace zipccl {

// Collective by name; ValueError for another.
Op parse_op(const std::string& name);

void bind_codec(py::module_& m);
void bind_quantizer(py::module_& m);
void bind_policy(py::module_& m);
void bind_backend(py::module_& m);
void bind_dynamiq(py::module_& m);

}  // namespace zipccl
