// The CUDA side of ZipBackend's own collectives: streams, ordering, lifetimes.
//
// Everything is enqueued on the calling thread, on one stream per device that belongs to the group. It waits for the
// caller's current stream first; Work::wait() makes the then current stream wait for it.
#ifdef ZIPCCL_WITH_CUDA

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include "backend/zip_backend.h"
#include "collectives/error.h"

namespace zipccl {

struct ZipBackend::CudaState {
  c10::cuda::CUDAStream stream;
  std::unique_ptr<Engine> engine;
  Switcher switcher;

  explicit CudaState(at::Device device)
      : stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        engine(make_cuda_engine(device)),
        switcher(kPriorRatio) {}

  // From here to the end of the returned guard, the current stream is ours and behind the caller's.
  c10::cuda::CUDAStreamGuard enter() const {
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream(stream.device_index()));
    ready.block(stream);
    return c10::cuda::CUDAStreamGuard(stream);
  }
};

ZipBackend::CudaState& ZipBackend::cuda_state(at::Device device) {
  auto& state = cuda_states_[device.index()];
  if (!state) state = std::make_unique<CudaState>(device);
  return *state;
}

WorkPtr ZipBackend::all_gather_cuda(GatherCall call, const FrameOptions& frame) {
  at::Device device = call.inputs[0].device();
  c10::cuda::CUDAGuard device_guard(device);
  // Sizes cannot be read back while a graph is captured; all ranks capture the same calls.
  bool capturing = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  if (!capturing) {
    frame_checks_->poll(/*block=*/false);
    CudaState& state = cuda_state(device);
    Messages messages(cuda_, call.timeout);
    backend_for(device);
    auto guard = state.enter();
    Decision d = decide_all_gather(*state.engine, messages, frame, &state.switcher, options_.all_gather,
                                   call.agreed_shard_bytes(size_), options_.log_decisions);
    if (d.choice == Choice::zip) {
      Traffic t = all_gather_zip(*state.engine, messages, call.items, frame, describe(call));
      call.teach(&state.switcher, t, size_);
      state_->stats.add_zipped("all_gather", t);
      std::vector<at::Tensor> kept = call.inputs;
      for (const GatherItem& item : call.items) kept.insert(kept.end(), item.outputs.begin(), item.outputs.end());
      return c10::make_intrusive<CudaWork>(rank_, call.op, "zipccl:all_gather", call.inputs, call.outputs,
                                           std::move(kept), state.stream, frame_checks_, state.engine->take_statuses(),
                                           options_.checksum);
    }
  }
  state_->stats.add_raw("all_gather", call.received_bytes(rank_));
  return forward(device, call.raw);
}

Decision ZipBackend::explain_cuda(at::Device device, const FrameOptions& frame, uint64_t shard) {
  c10::cuda::CUDAGuard device_guard(device);
  CudaState& state = cuda_state(device);
  backend_for(device);
  auto guard = state.enter();
  return decide_all_gather(*state.engine, Messages(cuda_, c10d::kUnsetTimeout), frame, &state.switcher, Mode::automatic,
                           shard, false);
}

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
