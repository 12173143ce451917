// The CUDA side of ZipBackend's own collectives: streams, ordering, lifetimes.
//
// Everything is enqueued on the calling thread, on one stream per device that belongs to the group. It waits for the
// caller's current stream first; Work::wait() makes the then current stream wait for it.
#ifdef ZIPCCL_WITH_CUDA

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <deque>
#include <future>

#include "backend/perform.h"
#include "backend/zip_backend.h"
#include "collectives/await_cuda.h"
#include "collectives/error.h"
#include "collectives/probe.h"

namespace zipccl {

// Words of CUDA calls over the second gloo instance. On the worker, so that they cannot mix with zipped CPU calls:
// those and the CUDA calls come in the same order on every rank.
class ZipBackend::HostOfCuda : public HostMessages {
 public:
  HostOfCuda(ZipBackend& backend, std::chrono::milliseconds timeout) : backend_(backend), timeout_(timeout) {}

  void run(const std::function<void(const Messages&)>& exchange) const override {
    auto& b = backend_;
    if (!b.worker_) b.worker_ = std::make_unique<Worker>();
    auto promise = std::make_shared<std::promise<void>>();
    auto run = [&exchange, state = b.state_, timeout = timeout_] {
      state->step.keep([&] { exchange(Messages(state->zip, state->timeout_of({timeout}))); });
    };
    auto done = [promise](std::exception_ptr error) { error ? promise->set_exception(error) : promise->set_value(); };
    if (!b.worker_->run_here(run, done)) b.worker_->submit(run, done);
    try {
      promise->get_future().get();
    } catch (...) {
      *b.given_up_ = true;
      throw;
    }
  }

 private:
  ZipBackend& backend_;
  std::chrono::milliseconds timeout_;
};

struct ZipBackend::CudaState {
  c10::cuda::CUDAStream stream;
  std::unique_ptr<Engine> engine;
  Switcher switcher;
  std::optional<Code> code;           // of bf16 frames, once it is chosen
  std::optional<bool> words_by_host;  // not measured yet
  std::array<Forecast, kOpCount> forecasts;
  Lockstep step;

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

  template <typename F>
  auto on_stream(F&& f) const {
    auto guard = enter();
    return f();
  }

  // Times calls on the stream that does them. Their seconds are known later, so each is told to the switcher when the
  // stream has passed it.
  void start(const c10::cuda::CUDAStream& on, const OwnCall& call, const Decision& d) {
    if (!timed.empty() && !timed.back().end.isCreated()) timed.pop_back();  // that call threw
    tell();
    timed.push_back({call.op, call.size, d.number, d.choice, at::cuda::CUDAEvent(cudaEventDefault),
                     at::cuda::CUDAEvent(cudaEventDefault)});
    timed.back().begin.record(on);
  }
  void stop(const c10::cuda::CUDAStream& on, const Traffic& traffic) {
    timed.back().traffic = traffic;
    timed.back().end.record(on);
    tell();
  }
  // Before an agreement, which waits for the streams anyway.
  void tell_all(const Engine::Watch& watch) {
    for (const Timed& t : timed) await(t.end, watch);
    tell();
  }

 private:
  struct Timed {
    Op op;
    CallSize size;
    uint64_t number;
    Choice choice;
    at::cuda::CUDAEvent begin, end;
    Traffic traffic{};
  };
  void tell() {
    while (!timed.empty() && timed.front().end.isCreated() && timed.front().end.query()) {
      const Timed& t = timed.front();
      switcher.record(t.op, t.size, t.number, t.choice, t.begin.elapsed_time(t.end) * 1e-3, t.traffic.raw_bytes,
                      t.traffic.wire_bytes);
      timed.pop_front();
    }
  }
  std::deque<Timed> timed;
};

ZipBackend::CudaState& ZipBackend::cuda_state(at::Device device) {
  auto& state = cuda_states_[device.index()];
  if (!state) state = std::make_shared<CudaState>(device);
  state->engine->limit_sms(options_.max_sms);
  return *state;
}

// Which way sizes go is measured at the first call of the group, and agreed.
void ZipBackend::prepare(CudaState& state, Place* place, const HostOfCuda& host) {
  if (!state.words_by_host)
    state.words_by_host =
        state.step.keep([&] { return state_->zip && state.on_stream([&] { return faster_by_host(*place, host); }); });
  if (*state.words_by_host) place->host = &host;
}

bool ZipBackend::raw_again(Op op, CallSize size, const at::Tensor& input, const at::Tensor& output) {
  const at::Device device = input.device();
  // Calls that run_cuda() would not count are not for us: NCCL refuses tensors with gaps.
  if (!device.is_cuda() || output.device() != device || output.scalar_type() != input.scalar_type()) return false;
  if (!input.is_contiguous() || !output.is_contiguous()) return false;
  auto it = cuda_states_.find(device.index());
  if (it == cuda_states_.end() || it->second->step.lost() || options_.log_decisions) return false;
  c10::cuda::CUDAGuard device_guard(device);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return false;
  frame_checks_->poll();
  return it->second->switcher.raw_again(op, size, choices(op, options_), options_.threshold(options_.of(op)));
}

WorkPtr ZipBackend::run_cuda(OwnCall call) {
  const at::Device device = (call.inputs.empty() ? call.outputs : call.inputs)[0].device();
  c10::cuda::CUDAGuard device_guard(device);
  // Sizes cannot be read back while a graph is captured; all ranks capture the same calls.
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    state_->stats.add_raw(op_name(call.op), call.received);
    return forward(device, call.raw);
  }
  frame_checks_->poll();
  last_cuda_ = device;
  CudaState& state = cuda_state(device);
  if (state.step.lost()) naming(describe(call.op, call.size), [&] { state.step.check(); });
  backend_for(device);
  const Messages messages(cuda_, call.patience.timeout);
  std::string what;  // for errors; made where there may be some
  Engine::Watch watch;
  auto may_wait = [&] {
    what = describe(call.op, call.size);
    watch = watch_over(what, call.patience.timeout);
    state.engine->set_watch(watch);
  };
  Place place{*state.engine, messages, what};
  place.forecast = &state.forecasts[static_cast<int>(call.op)];
  HostOfCuda host(*this, call.patience.timeout);
  if (!state.words_by_host) may_wait();
  naming(what, [&] { prepare(state, &place, host); });
  const bool measures = measures_first(call.op, call.size, options_, state.switcher);
  if (measures) may_wait();
  auto decide_here = [&] {
    return decide(place, call.op, call.size, call.frame, options_, &state.switcher, &state.code);
  };
  const Decision d = measures
                         ? naming(what, [&] { return state.step.keep([&] { return state.on_stream(decide_here); }); })
                         : decide_here();
  const bool timed = is_timed(call.op, options_) && d.timed;

  WorkPtr work;
  Traffic traffic;
  if (zips(d.choice)) may_wait();
  if (zips(d.choice) || (timed && call.patience.async)) {
    auto guard = state.enter();
    try {
      if (timed) state.start(state.stream, call, d);
      if (zips(d.choice)) {
        if (options_.choose_code) place.code = state.code;
        traffic = naming(what, [&] { return state.step.keep([&] { return call.zip(place, d.choice); }); });
      } else if (WorkPtr raw = call.raw(*cuda_)) {  // where its time can be taken
        raw->wait();
      }
      if (timed) state.stop(state.stream, traffic);
      std::vector<at::Tensor> kept = call.inputs;
      kept.insert(kept.end(), call.outputs.begin(), call.outputs.end());
      work = c10::make_intrusive<CudaWork>(rank_, call.type, profile_title(call.op), call.inputs, call.outputs,
                                           std::move(kept), state.stream, frame_checks_, state.engine->take_statuses(),
                                           options_.checksum, watch);
    } catch (...) {  // no work holds the tensors, which the stream may still use
      for (const auto* list : {&call.inputs, &call.outputs})
        for (const at::Tensor& t : *list)
          if (t.is_cuda()) t.record_stream(state.stream);
      throw;
    }
  } else {
    // As if zipccl were not there: NCCL does a call that is waited for on the caller's stream.
    const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
    if (timed && !call.patience.async) state.start(stream, call, d);
    work = forward(device, call.raw);
    if (timed && !call.patience.async) state.stop(stream, traffic);
  }
  if (zips(d.choice))
    state_->stats.add_zipped(op_name(call.op), traffic);
  else
    state_->stats.add_raw(op_name(call.op), call.received);
  if (is_timed(call.op, options_) && state.switcher.wants_agreement(call.op, call.size)) {
    may_wait();
    naming(what, [&] {
      state.tell_all(watch);
      state.step.keep([&] { state.on_stream([&] { return agree(place, call.op, call.size, &state.switcher), 0; }); });
    });
  }
  return work;
}

Engine::Watch ZipBackend::watch_over(const std::string& what, std::chrono::milliseconds timeout) const {
  return [given_up = given_up_, watch = watch_nccl(cuda_, what, timeout)](std::chrono::milliseconds waited) {
    try {
      watch(waited);
    } catch (const Error&) {
      *given_up = true;
      throw;
    }
  };
}

// For a barrier: what came before it is over, decoding included.
void ZipBackend::await_own_streams() const {
  for (const auto& [index, state] : cuda_states_) {
    c10::cuda::CUDAGuard device_guard(index);
    at::cuda::CUDAEvent done;
    done.record(state->stream);
    done.block(c10::cuda::getCurrentCUDAStream(index));
  }
}

Decision ZipBackend::explain_cuda(Op op, at::Device device, const FrameOptions& frame, uint64_t bytes) {
  c10::cuda::CUDAGuard device_guard(device);
  CudaState& state = cuda_state(device);
  backend_for(device);
  auto guard = state.enter();
  const Messages messages(cuda_, c10d::kUnsetTimeout);
  const std::string what = describe("explain");
  Place place{*state.engine, messages, what};
  HostOfCuda host(*this, c10d::kUnsetTimeout);
  state.engine->set_watch(watch_over(what, c10d::kUnsetTimeout));
  prepare(state, &place, host);
  return state.step.keep([&] { return explain_at(place, op, bytes, frame, options_, &state.switcher, &state.code); });
}

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
