// The CUDA side of DynamiqChannel: everything is enqueued on the calling thread, on one stream per device, which waits
// for the caller's current stream first. The future carries an event of that stream.
#ifdef ZIPCCL_WITH_CUDA

#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>

#include "backend/dynamiq_channel.h"
#include "collectives/await_cuda.h"

namespace zipccl {

namespace {
// Whoever frees these knows nothing of our stream.
void keep_for(const c10::cuda::CUDAStream& stream, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors)
    if (t.is_cuda()) t.record_stream(stream);
}
}  // namespace

struct DynamiqChannel::CudaLane : Lane {
  c10::cuda::CUDAStream stream;
  CudaLane(BackendPtr backend, at::Device device)
      : Lane(std::move(backend), make_cuda_engine(device)),
        stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())) {
    engine->set_watch(watch_nccl(this->backend, "measuring the link", c10d::kUnsetTimeout));
    meet(device);
  }

  // NCCL makes its communicator at the first call, for which it needs every rank, also those that have no part in the
  // first exchange.
  void meet(at::Device device) {
    std::vector<at::Tensor> nothing(pairs.world(), at::empty({0}, at::TensorOptions(at::kByte).device(device)));
    if (auto work = backend->alltoall(nothing, nothing)) work->wait();
  }
};

DynamiqChannel::FuturePtr DynamiqChannel::run_cuda(const Job& job, const at::Tensor& result,
                                                   const std::vector<at::Tensor>& used, bool async) {
  const at::Device device = result.device();
  c10::cuda::CUDAGuard device_guard(device);
  at::NoGradGuard no_grad;
  auto& lane = cuda_lanes_[device.index()];
  if (!lane) lane = std::make_shared<CudaLane>(cuda_, device);
  const c10::cuda::CUDAStream caller = c10::cuda::getCurrentCUDAStream(device.index());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::vector<c10::Device>{device});
  {
    at::cuda::CUDAEvent ready, done;
    ready.record(caller);
    ready.block(lane->stream);
    c10::cuda::CUDAStreamGuard guard(lane->stream);
    try {
      job(*lane);
    } catch (...) {
      keep_for(lane->stream, used);
      throw;
    }
    lane->engine->take_statuses();  // of sums of raw values, which cannot be bad
    future->markCompleted(result);  // records its event here
    done.record(lane->stream);
    if (!async) done.block(caller);
  }
  if (async) keep_for(lane->stream, used);  // behind a caller who waits there is nothing to know
  return future;
}

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
