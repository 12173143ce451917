// Construction, life cycle, and the way every own call takes.
#include "backend/zip_backend.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <future>
#include <utility>

#include "backend/perform.h"
#include "backend/work.h"
#include "collectives/error.h"
#include "collectives/place.h"
#include "collectives/torch_threads.h"
#include "collectives/words.h"

namespace zipccl {

namespace {
constexpr double kShutdownPatience = 5.0;

at::Device device_of(const OwnCall& call) {
  for (const auto* list : {&call.inputs, &call.outputs})
    for (const at::Tensor& t : *list) return t.device();
  return at::kCPU;
}

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

#ifdef ZIPCCL_WITH_CUDA
// Whether NCCL looks at how the tensors of a call lie, and refuses those that are not dense.
bool nccl_looks(const OwnCall& call) {
  using c10d::OpType;
  return call.type != OpType::_REDUCE_SCATTER_BASE && call.type != OpType::COALESCED && call.type != OpType::SCATTER;
}

// Whether all tensors lie as NCCL wants them to, of lists aside that it reads or fills.
bool lie_well(const OwnCall& call) {
  using c10d::OpType;
  auto all = [dense = nccl_looks(call)](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& t : tensors)
      if (!(dense ? is_dense(t) : t.is_non_overlapping_and_dense())) return false;
    return true;
  };
  const bool any_outputs = call.type == OpType::ALLGATHER || call.type == OpType::GATHER;
  const bool any_inputs = call.type == OpType::REDUCE_SCATTER || call.type == OpType::SCATTER;
  return (any_inputs || all(call.inputs)) && (any_outputs || all(call.outputs));
}
#endif
}  // namespace

ZipBackend::CpuState::CpuState(BackendPtr backend)
    : zip(std::move(backend)), engine(make_cpu_engine()), switcher(kPriorRatio) {}

ZipBackend::ZipBackend(int rank, int size, BackendPtr cpu, BackendPtr cpu_zip, BackendPtr cuda, BackendOptions options)
    : Backend(rank, size),
      options_(options),
      cpu_(std::move(cpu)),
      cuda_(std::move(cuda)),
      state_(std::make_shared<CpuState>(std::move(cpu_zip))) {
  init();
}

ZipBackend::~ZipBackend() {
  if (!stopped_) end_worker();  // who has waited once in vain does not wait again
}

// Calls in flight complete, as those of gloo do, unless a peer is silent.
void ZipBackend::end_worker() {
  if (worker_) worker_->stop(worker_->drain(kShutdownPatience) ? kShutdownPatience : 0);
}

void ZipBackend::shutdown() {
  if (stopped_) return;
  stopped_ = true;
  end_worker();
  std::exception_ptr broken;
#ifdef ZIPCCL_WITH_CUDA
  try {
    frame_checks_->poll();
  } catch (...) {
    broken = std::current_exception();
  }
#endif
  for (const BackendPtr& b : all_inner()) b->shutdown();
  if (broken) std::rethrow_exception(broken);
}

void ZipBackend::finish_worker() {
  if (!worker_ || stopped_) return;
  auto done = std::make_shared<std::promise<void>>();
  worker_->submit([] {}, [done](std::exception_ptr) { done->set_value(); });
  done->get_future().wait();
}

void ZipBackend::abort() {
  stopped_ = true;
  for (const BackendPtr& b : all_inner()) b->abort();
  if (worker_) worker_->stop(kShutdownPatience);
}

std::vector<BackendPtr> ZipBackend::all_inner() const {
  std::vector<BackendPtr> list;
  for (const BackendPtr& b : {cpu_, state_->zip, cuda_})
    if (b) list.push_back(b);
  return list;
}

std::string ZipBackend::describe(const char* name, const std::string& more) const {
  return std::string("zipccl ") + name + " (rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
         ", group " + (pg_uid_.empty() ? "?" : pg_uid_) + more + ")";
}

std::string ZipBackend::describe(const OwnCall& call) const {
  return describe(op_name(call.op), ", " + std::to_string(call.size.bytes) + " bytes");
}

// Only things every rank knows alike may be looked at here and where call.zippable is set: options, dtypes, counts, the
// state of the call sequence.
bool ZipBackend::may_zip(const OwnCall& call) const {
  return call.zippable && size_ > 1 && !in_window() && options_.of(call.op) != Mode::raw;
}

bool ZipBackend::frame_for(const at::Tensor& t, FrameOptions* frame) const {
  if (t.layout() != at::kStrided || !frame_dtype(t.scalar_type(), &frame->dtype)) return false;
  frame->code = options_.code;
  frame->checksum = options_.checksum;
  // Code dense takes every dtype, but makes smaller only what has an exponent.
  return effective_code(*frame) != Code::raw && dense::format_of(frame->dtype).exponent_bits != 0;
}

bool ZipBackend::stays_raw(Op op, const at::Tensor& t, uint64_t bytes) const {
  FrameOptions frame;
  const bool sums = op == Op::reduce_scatter || op == Op::all_reduce;
  return size_ == 1 || in_window() || options_.of(op) == Mode::raw || bytes < options_.threshold(options_.of(op)) ||
         (!sums && !frame_for(t, &frame));
}

WorkPtr ZipBackend::pass_on(Op op, uint64_t received, at::Device device, const RawCall& raw) {
  at::NoGradGuard no_grad;
  if (options_.log_decisions && rank_ == 0 && size_ > 1)
    std::fprintf(stderr, "zipccl: %s that brings %llu bytes here: raw (%s)\n", op_name(op),
                 static_cast<unsigned long long>(received),
                 options_.of(op) == Mode::raw ? "its option says raw"
                 : in_window()                ? "in a coalescing window"
                                              : "below min_bytes, or a dtype that code leaves raw");
  state_->stats.add_raw(op_name(op), received);
  WorkPtr work = forward(device, raw);
  if (device.is_cpu()) ++passed_on_;  // not where gloo refused it
  return work;
}

WorkPtr ZipBackend::run(OwnCall call) {
  const at::Device device = device_of(call);
  // No values of a collective have gradients. gloo would say so of some outputs, in some of its collectives.
  at::NoGradGuard no_grad;
  // Alone, a rank has no second backend, and needs none: its messages are copies.
  if (device.is_cpu() && (state_->zip ? may_zip(call) || call.raw_here : size_ == 1 && cpu_ && call.raw_here))
    return run_cpu(std::move(call));
  if (may_zip(call)) {
#ifdef ZIPCCL_WITH_CUDA
    // What NCCL refuses goes to it all the same, so that this rank fails in NCCL's words, as without us. Where it would
    // not notice, a raw call of this rank among zipped ones would leave all of them waiting.
    if (device.is_cuda() && cuda_) {
      if (lie_well(call)) return run_cuda(std::move(call));
      if (!nccl_looks(call))
        throw Error(describe(call) + ": a tensor has gaps between its values or several of them in one place; NCCL " +
                    "would move what lies there, so pass a contiguous one");
    }
#endif
  }
  return pass_on(call.op, call.received, device, call.raw);
}

WorkPtr ZipBackend::run_cpu(OwnCall call) {
  TORCH_CHECK(!stopped_, "zipccl: the process group was shut down");
  if (getpid() != made_in_) throw Error(describe(call) + ": this process is a fork of the one that made the group");
  // Found out when the values are there, it would leave the other ranks waiting for this one.
  for (const at::Tensor& t : call.outputs)
    if (call.received > 0 && at::has_internal_overlap(t) == at::MemOverlap::Yes)
      throw Error(describe(call) + ": several values of the output share one place in memory");
  if (!worker_) worker_ = std::make_unique<Worker>();
  ++own_cpu_calls_;
  auto work = c10::make_intrusive<CpuWork>(rank_, call.type, profile_title(call.op), call.inputs, call.outputs);
  const bool async = call.patience.async;
  const std::chrono::milliseconds timeout = state_->timeout_of(call.patience);
  std::string named = timeout != c10d::kUnsetTimeout ? describe(call) : "";
  BackendOptions options = options_;
  if (call.only_zipped && options.of(call.op) == Mode::automatic) options.mode[static_cast<int>(call.op)] = Mode::zip;
  auto run = [state = state_, before = passed_on_.load(), carrier = state_->zip ? state_->zip : cpu_, options,
              may_zip = may_zip(call), what = describe(call), call = std::move(call), modes = at::ThreadLocalState(),
              threads = at::get_num_threads()] {
    // The caller's word on no_grad and inference mode counts for whoever writes to the outputs.
    at::ThreadLocalStateGuard as_caller(modes);
    const ThreadLimit as_many(threads);
    naming(what, [&] {
      state->step.enter();
      const Messages messages(carrier, state->timeout_of(call.patience));
      Place place{*state->engine, messages, what};
      place.forecast = &state->forecasts[static_cast<int>(call.op)];
      place.call = CallId(call.op, before + state->step.calls());
      const std::vector<int64_t> sizes = shared_sizes(call);
      const CallId id = place.call.of(call.frame.dtype, sizes);
      const bool chooses = may_zip && is_timed(call.op, options);
      const auto agree_now_and_then = [&] {
        if (!chooses || !state->switcher.wants_agreement(call.op, call.size)) return;
        check_in_step(place, id, state->step.history());
        agree(place, call.op, call.size, &state->switcher);
      };
      try {
        const int64_t kind = CallId(call.op, 0).of(call.frame.dtype, sizes).word();
        if (chooses && (state->step.is_new(kind) || measures_first(call.op, call.size, options, state->switcher))) {
          check_in_step(place, id);
          state->step.compared(kind);
        }
        const Decision d = may_zip
                               ? decide(place, call.op, call.size, call.frame, options, &state->switcher, &state->code)
                               : Decision{Choice::raw, "", 0, 0};
        Traffic traffic;
        Stopwatch watch;
        if (zips(d.choice)) {
          if (options.choose_code) place.code = state->code;
          try {
            traffic = call.zip(place, d.choice);
          } catch (const SharedError&) {  // no call was made, and others had decided on another or none
            state->switcher.take_back();
            throw;
          }
          state->stats.add_zipped(op_name(call.op), traffic);
        } else {
          if (call.size.shared) skip_numbers(*carrier, before - std::exchange(state->passed_on, before));
          if (call.raw_here) {
            call.raw_here(place);
          } else {
            state->step.withdraw();
            const WorkPtr raw = call.raw(*carrier);  // arguments that gloo refuses leave nothing on the way
            state->step.enter();
            raw->wait();
          }
          state->step.made_raw(id.word());
          state->stats.add_raw(op_name(call.op), call.received);
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
    });
  };
  auto done = [work](std::exception_ptr error) { work->complete(error); };
  // A caller who waits anyway does the call itself where nothing is ahead of it, which spares two changes of thread.
  if (!async && worker_->run_here(run, done)) return work;
  Worker::Queued queued = worker_->submit(std::move(run), std::move(done));
  if (timeout != c10d::kUnsetTimeout) work->behind(std::move(queued), timeout, std::move(named));
  return work;
}

Decision ZipBackend::explain(Op op, at::Device device, uint64_t bytes) {
  if (size_ == 1) return {Choice::raw, "a group of one rank moves nothing", 0, 0};
  FrameOptions frame;
  frame.code = options_.code;
  frame.checksum = options_.checksum;
#ifdef ZIPCCL_WITH_CUDA
  if (device.is_cuda() && cuda_)
    return naming(describe("explain"), [&] { return explain_cuda(op, device, frame, bytes); });
#endif
  TORCH_CHECK(device.is_cpu() && state_->zip,
              "zipccl: this group has nothing that could zip " + device.str() + " tensors");
  if (!worker_) worker_ = std::make_unique<Worker>();
  auto work = c10::make_intrusive<CpuWork>(rank_, c10d::OpType::UNKNOWN, nullptr, std::vector<at::Tensor>{},
                                           std::vector<at::Tensor>{});
  auto decision = std::make_shared<Decision>();
  worker_->submit(
      [state = state_, frame, options = options_, op, bytes, decision, what = describe("explain"),
       threads = at::get_num_threads()] {
        const ThreadLimit as_many(threads);
        const Messages messages(state->zip, state->timeout_of({}));
        const Place place{*state->engine, messages, what};
        *decision = naming(what, [&] {
          return state->step.keep(
              [&] { return explain_at(place, op, bytes, frame, options, &state->switcher, &state->code); });
        });
      },
      [work](std::exception_ptr error) { work->complete(error); });
  work->wait(kNoTimeout);
  return *decision;
}

}  // namespace zipccl
