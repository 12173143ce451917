// The way of own calls on CPU tensors: in their order, on the worker, or on the caller's thread where nothing is ahead.
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <utility>

#include "backend/perform.h"
#include "backend/raw_work.h"
#include "backend/work.h"
#include "backend/zip_backend.h"
#include "collectives/error.h"
#include "collectives/place.h"
#include "collectives/torch_threads.h"
#include "collectives/words.h"

namespace zipccl {

namespace {
// What all ranks pass alike of a call's sizes, and its root.
std::vector<int64_t> shared_sizes(const OwnCall& call) {
  std::vector<int64_t> sizes;
  if (call.root >= 0) sizes.push_back(call.root);
  if (call.size.shared) sizes.push_back(static_cast<int64_t>(call.size.bytes));
  if (call.type == c10d::OpType::COALESCED && call.inputs.size() > 1)
    for (const at::Tensor& t : call.inputs) sizes.push_back(t.numel());
  return sizes;
}

// gloo tells collectives apart by their number. Raw calls are made on one instance and those that are too small to
// choose on another, so a rank that makes one of the latter alone would then meet a call of the others with its next.
// Therefore the calls that the other instance has made since count here, too, those beyond three as two or three.
void skip_numbers(c10d::Backend& gloo, uint64_t calls) {
  std::vector<at::Tensor> nothing{at::empty({0}, at::kByte)};
  for (uint64_t left = calls < 2 ? calls : 2 + calls % 2; left > 0; --left) gloo.allreduce(nothing);  // sends nothing
}

int64_t kind_of(Op op, DType dtype, const std::vector<int64_t>& sizes) { return CallId(op, 0).of(dtype, sizes).word(); }
}  // namespace

// A call, and what it needs to know of its group, which may be gone when it runs.
struct ZipBackend::CpuCall {
  OwnCall call;
  std::string what;
  bool may_zip;
  BackendOptions options;
  std::shared_ptr<CpuState> state;
  BackendPtr carrier;
  uint64_t before;  // calls that the other instance of gloo has made
  std::vector<int64_t> sizes = shared_sizes(call);

  // Times decide, so ranks compare and agree now and then.
  bool chooses() const { return may_zip && is_timed(call.op, options); }
  int64_t kind() const { return kind_of(call.op, call.frame.dtype, sizes); }

  void run() const;
  Traffic zip(const Place& place, Choice choice) const;
  void raw(const Place& place, const CallId& id) const;
};

void ZipBackend::CpuCall::run() const {
  state->step.enter();
  const Messages messages(carrier, state->timeout_of(call.patience));
  Place place{*state->engine, messages, what};
  place.forecast = &state->forecasts[static_cast<int>(call.op)];
  place.call = CallId(call.op, before + state->step.calls());
  const CallId id = place.call.of(call.frame.dtype, sizes);
  const auto agree_now_and_then = [&] {
    if (!chooses() || !state->switcher.wants_agreement(call.op, call.size)) return;
    check_in_step(place, id, state->step.history());
    agree(place, call.op, call.size, &state->switcher);
  };
  try {
    if (chooses() && (state->step.is_new(kind()) || measures_first(call.op, call.size, options, state->switcher))) {
      check_in_step(place, id);
      state->step.compared(kind());
    }
    const Decision d = may_zip ? decide(place, call.op, call.size, call.frame, options, &state->switcher, &state->code)
                               : Decision{Choice::raw, "", 0, 0};
    Traffic traffic;
    Stopwatch watch;
    if (zips(d.choice)) {
      if (options.choose_code) place.code = state->code;
      traffic = zip(place, d.choice);
    } else {
      raw(place, id);
    }
    if (d.timed)
      state->switcher.record(call.op, call.size, d.number, d.choice, watch.lap(), traffic.raw_bytes,
                             traffic.wire_bytes);
    agree_now_and_then();
    state->step.leave();
  } catch (const SharedError&) {
    state->step.leave();
    throw;
  } catch (const EarlyFrameError&) {
    throw;
  } catch (const FrameError&) {
    // Found by this rank alone, when all messages of the call had been exchanged: the peers go on, so it must too.
    try {
      agree_now_and_then();
      state->step.leave();
    } catch (const std::exception&) {  // the frame is what this call failed of
    }
    throw;
  }
}

Traffic ZipBackend::CpuCall::zip(const Place& place, Choice choice) const {
  try {
    const Traffic traffic = call.zip(place, choice);
    state->stats.add_zipped(op_name(call.op), traffic);
    return traffic;
  } catch (const SharedError&) {  // no call was made, and others had decided on another or none
    state->switcher.take_back();
    throw;
  }
}

void ZipBackend::CpuCall::raw(const Place& place, const CallId& id) const {
  if (call.size.shared) skip_numbers(*carrier, before - std::exchange(state->passed_on, before));
  if (call.raw_here) {
    call.raw_here(place);
  } else {
    state->step.withdraw();
    const WorkPtr work = call.raw(*carrier);  // arguments that gloo refuses leave nothing on the way
    state->step.enter();
    work->wait();
  }
  state->step.made_raw(id.word());
  state->stats.add_raw(op_name(call.op), call.received);
}

WorkPtr ZipBackend::begin_again(const Again& call) {
  if (!worker_ || !state_->zip || stopped_ || getpid() != made_in_ || in_window() || options_.log_decisions)
    return nullptr;
  if (options_.of(call.op) != Mode::automatic) return nullptr;
  if (call.op == Op::reduce_scatter) return nullptr;  // gloo copies the sums to their places when it is waited for
  if (at::hasCallbacks()) return nullptr;             // profilers see calls by their CpuWork
  at::NoGradGuard no_grad;
  WorkPtr work;
  worker_->begin_here([&](bool beside) { return begin_again(call, beside, &work); });
  return work;
}

std::shared_ptr<Worker::UnderWay> ZipBackend::begin_again(const Again& call, bool beside, WorkPtr* work) {
  CpuState& state = *state_;
  if (state.step.lost() || state.step.is_new(kind_of(call.op, call.dtype, call.shared))) return nullptr;
  // gloo has few threads. Behind calls with more time this one would wait longer than it may: the worker knows of that.
  const std::chrono::milliseconds timeout = state.timeout_of(call.patience);
  if (beside && timeout != state.begun_with) return nullptr;
  const Switcher::Choices allowed = choices(call.op, options_);
  if (!state.switcher.raw_again(call.op, call.size, allowed, options_.threshold(Mode::automatic))) return nullptr;
  state.begun_with = timeout;
  ++own_cpu_calls_;
  const uint64_t before = passed_on_;
  const std::shared_ptr<Lockstep> step(state_, &state.step);
  WorkPtr inner;
  try {
    if (call.size.shared) skip_numbers(*state.zip, before - std::exchange(state.passed_on, before));
    inner = call.raw(*state.zip);
  } catch (...) {  // arguments that gloo refuses leave nothing on the way
    auto refused = c10::make_intrusive<CpuWork>(rank_, call.type);
    refused->complete(named(describe(call.op, call.size), std::current_exception()));
    *work = std::move(refused);
    return std::make_shared<RawUnderWay>(nullptr, step);
  }
  state.step.enter();
  state.step.leave();
  state.step.made_raw(CallId(call.op, before + state.step.calls()).of(call.dtype, call.shared).word());
  state.stats.add_raw(op_name(call.op), call.received);
  auto under_way = std::make_shared<RawUnderWay>(inner, step);
  auto name = [op = call.op, size = call.size, rank = rank_, world = size_, group = pg_uid_] {
    return describe(op, size, rank, world, group);
  };
  *work =
      c10::make_intrusive<RawWork>(rank_, call.type, std::move(inner), under_way, worker_->reporter(), std::move(name));
  return under_way;
}

WorkPtr ZipBackend::run_cpu(OwnCall call) {
  TORCH_CHECK(!stopped_, "zipccl: the process group was shut down");
  if (getpid() != made_in_)
    throw Error(describe(call.op, call.size) + ": this process is a fork of the one that made the group");
  // Found out when the values are there, it would leave the other ranks waiting for this one.
  for (const at::Tensor& t : call.outputs)
    if (call.received > 0 && at::has_internal_overlap(t) == at::MemOverlap::Yes)
      throw Error(describe(call.op, call.size) + ": several values of the output share one place in memory");
  const bool may = may_zip(call);
  if (may && !call.raw_here && !call.only_zipped) {
    const std::vector<int64_t> shared = shared_sizes(call);
    if (WorkPtr work = begin_again(
            {call.op, call.type, call.frame.dtype, call.size, shared, call.received, call.patience, call.raw}))
      return work;
  }
  if (!worker_) worker_ = std::make_unique<Worker>();
  ++own_cpu_calls_;
  auto work = c10::make_intrusive<CpuWork>(rank_, call.type, profile_title(call.op), call.inputs, call.outputs);
  const bool async = call.patience.async;
  const std::chrono::milliseconds timeout = state_->timeout_of(call.patience);
  std::string what = describe(call.op, call.size);
  BackendOptions options = options_;
  if (call.only_zipped && options.of(call.op) == Mode::automatic) options.mode[static_cast<int>(call.op)] = Mode::zip;
  auto made = std::make_shared<const CpuCall>(
      CpuCall{std::move(call), what, may, options, state_, state_->zip ? state_->zip : cpu_, passed_on_.load()});
  auto run = [made] { naming(made->what, [&] { made->run(); }); };
  auto done = [work](std::exception_ptr error) { work->complete(error); };
  // A caller who waits anyway does the call itself where nothing is ahead of it, which spares two changes of thread.
  if (!async && worker_->run_here(run, done)) return work;
  auto run_later = [run = std::move(run), modes = at::ThreadLocalState(), threads = at::get_num_threads()] {
    // The caller's word on no_grad and inference mode counts for whoever writes to the outputs.
    at::ThreadLocalStateGuard as_caller(modes);
    const ThreadLimit as_many(threads);
    run();
  };
  made.reset();
  Worker::Queued queued = worker_->submit(std::move(run_later), std::move(done));
  if (timeout != c10d::kUnsetTimeout) work->behind(std::move(queued), timeout, std::move(what));
  return work;
}

}  // namespace zipccl
