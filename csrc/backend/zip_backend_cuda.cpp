// The CUDA side of ZipBackend's own collectives: streams, ordering, lifetimes.
//
// Everything is enqueued on the calling thread, on one stream per device that belongs to the group. It waits for the
// caller's current stream first; Work::wait() makes the then current stream wait for it.
#ifdef ZIPCCL_WITH_CUDA

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <deque>

#include "backend/perform.h"
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

  // Times calls on the stream. Their seconds are known later, so each is told to the switcher when the stream has
  // passed it.
  void start(Op op, uint64_t bytes, Choice choice) {
    tell();
    timed.push_back({op, bytes, choice, at::cuda::CUDAEvent(cudaEventDefault), at::cuda::CUDAEvent(cudaEventDefault)});
    timed.back().begin.record(stream);
  }
  void stop(const Traffic& traffic) {
    timed.back().traffic = traffic;
    timed.back().end.record(stream);
    tell();
  }

 private:
  struct Timed {
    Op op;
    uint64_t bytes;
    Choice choice;
    at::cuda::CUDAEvent begin, end;
    Traffic traffic{};
  };
  void tell() {
    while (!timed.empty() && timed.front().end.isCreated() && timed.front().end.query()) {
      const Timed& t = timed.front();
      switcher.record(t.op, t.bytes, t.choice, t.begin.elapsed_time(t.end) * 1e-3, t.traffic.raw_bytes,
                      t.traffic.wire_bytes);
      timed.pop_front();
    }
  }
  std::deque<Timed> timed;
};

ZipBackend::CudaState& ZipBackend::cuda_state(at::Device device) {
  auto& state = cuda_states_[device.index()];
  if (!state) state = std::make_shared<CudaState>(device);
  return *state;
}

WorkPtr ZipBackend::run_cuda(OwnCall call) {
  const at::Device device = (call.inputs.empty() ? call.outputs : call.inputs)[0].device();
  c10::cuda::CUDAGuard device_guard(device);
  // Sizes cannot be read back while a graph is captured; all ranks capture the same calls.
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    state_->stats.add_raw(op_name(call.op), call.received);
    return forward(device, call.raw);
  }
  frame_checks_->poll(/*block=*/false);
  CudaState& state = cuda_state(device);
  backend_for(device);
  const Messages messages(cuda_, call.patience.timeout);
  const std::string what = describe(call);
  const Place place{*state.engine, messages, what};
  const bool timed = is_timed(call.op, options_);
  auto guard = state.enter();
  const Decision d = decide(place, call.op, call.bytes, call.frame, options_, &state.switcher);
  Traffic traffic;
  if (timed) state.start(call.op, call.bytes, d.choice);
  if (zips(d.choice)) {
    traffic = call.zip(place, d.choice);
    state_->stats.add_zipped(op_name(call.op), traffic);
  } else {
    WorkPtr work = call.raw(*cuda_);
    if (work) work->wait();
    state_->stats.add_raw(op_name(call.op), call.received);
  }
  if (timed) {
    state.stop(traffic);
    agree(place, call.op, call.bytes, &state.switcher);
  }
  std::vector<at::Tensor> kept = call.inputs;
  kept.insert(kept.end(), call.outputs.begin(), call.outputs.end());
  return c10::make_intrusive<CudaWork>(rank_, call.type, "zipccl", call.inputs, call.outputs, std::move(kept),
                                       state.stream, frame_checks_, state.engine->take_statuses(), options_.checksum);
}

Decision ZipBackend::explain_cuda(Op op, at::Device device, const FrameOptions& frame, uint64_t bytes) {
  c10::cuda::CUDAGuard device_guard(device);
  CudaState& state = cuda_state(device);
  backend_for(device);
  auto guard = state.enter();
  BackendOptions automatic = options_;
  automatic.mode[static_cast<int>(op)] = Mode::automatic;
  const Messages messages(cuda_, c10d::kUnsetTimeout);
  const std::string what = "zipccl explain";
  return explain_at({*state.engine, messages, what}, op, bytes, frame, automatic, &state.switcher);
}

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
