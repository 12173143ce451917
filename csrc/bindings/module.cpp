// zipccl._C: argument checks, and nothing else.
#include "bindings/bindings.h"
#include "collectives/error.h"
#include "format/frame.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = ZIPCCL_TORCH_VERSION;
  m.attr("frame_version") = static_cast<int>(zipccl::kFrameVersion);
#ifdef ZIPCCL_WITH_CUDA
  m.attr("cuda_version") = ZIPCCL_CUDA_VERSION;
  m.attr("cuda_archs") = ZIPCCL_CUDA_ARCHS;
#else
  m.attr("cuda_version") = py::none();
  m.attr("cuda_archs") = "";
#endif
  auto error = py::register_exception<zipccl::Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception<zipccl::FrameError>(m, "FrameError", error);
  zipccl::bind_codec(m);
  zipccl::bind_quantizer(m);
  zipccl::bind_policy(m);
  zipccl::bind_backend(m);
  zipccl::bind_dynamiq(m);
}
