// Construction, life cycle, and the way every own call takes.
#include "backend/zip_backend.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <future>
#include <utility>

#include "backend/perform.h"
#include "backend/work.h"
#include "collectives/error.h"
#include "collectives/place.h"
#include "collectives/torch_threads.h"

namespace zipccl {

namespace {
constexpr double kShutdownPatience = 5.0;

at::Device device_of(const OwnCall& call) {
  for (const auto* list : {&call.inputs, &call.outputs})
    for (const at::Tensor& t : *list) return t.device();
  return at::kCPU;
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

std::string ZipBackend::describe(const char* name, int rank, int world, const std::string& group,
                                 const std::string& more) {
  return std::string("zipccl ") + name + " (rank " + std::to_string(rank) + " of " + std::to_string(world) +
         ", group " + (group.empty() ? "?" : group) + more + ")";
}

std::string ZipBackend::describe(Op op, CallSize size, int rank, int world, const std::string& group) {
  return describe(op_name(op), rank, world, group, ", " + std::to_string(size.bytes) + " bytes");
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
        throw Error(describe(call.op, call.size) +
                    ": a tensor has gaps between its values or several of them in one place; NCCL " +
                    "would move what lies there, so pass a contiguous one");
    }
#endif
  }
  return pass_on(call.op, call.received, device, call.raw);
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
  auto work = c10::make_intrusive<CpuWork>(rank_, c10d::OpType::UNKNOWN);
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
