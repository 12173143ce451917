// Construction, life cycle, and the all-gathers.
#include "backend/zip_backend.h"

#include <ATen/ThreadLocalState.h>

#include <cstdio>

#include "backend/work.h"
#include "collectives/error.h"
#include "collectives/probe.h"

namespace zipccl {

namespace {
constexpr double kShutdownPatience = 5.0;

// The world shards of one gathered tensor, in rank order. Empty where the arguments do not fit, which the inner backend
// then reports in its own words.
std::vector<at::Tensor> shards_of(const at::Tensor& output, const at::Tensor& input, int world) {
  std::vector<at::Tensor> shards;
  if (output.scalar_type() != input.scalar_type() || output.numel() != input.numel() * world) return shards;
  at::Tensor whole = output.is_contiguous() ? output.view({-1}) : output;
  if (whole.dim() == 0 || whole.size(0) % world != 0) return shards;
  int64_t rows = whole.size(0) / world;
  for (int r = 0; r < world; ++r) shards.push_back(whole.narrow(0, r * rows, rows));
  return shards;
}
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
  if (worker_) worker_->stop(kShutdownPatience);
}

void ZipBackend::shutdown() {
  if (stopped_) return;
  stopped_ = true;
  if (worker_) worker_->stop(kShutdownPatience);
#ifdef ZIPCCL_WITH_CUDA
  frame_checks_->poll(/*block=*/false);
#endif
  for (const BackendPtr& b : all_inner()) b->shutdown();
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

uint64_t ZipBackend::GatherCall::shard_bytes() const {
  uint64_t bytes = 0;
  for (const GatherItem& item : items) bytes += item.input.nbytes();
  return bytes;
}

uint64_t ZipBackend::GatherCall::gathered_bytes() const {
  uint64_t bytes = 0;
  for (const GatherItem& item : items)
    for (const at::Tensor& out : item.outputs) bytes += out.nbytes();
  return bytes;
}

uint64_t ZipBackend::GatherCall::received_bytes(int rank) const {
  uint64_t bytes = gathered_bytes();
  for (const GatherItem& item : items)
    if (static_cast<size_t>(rank) < item.outputs.size()) bytes -= item.outputs[rank].nbytes();
  return bytes;
}

// With uneven shards, traffic as this rank sees it differs from what others see; these are the same everywhere.
uint64_t ZipBackend::GatherCall::agreed_shard_bytes(int world) const { return gathered_bytes() / world; }

void ZipBackend::GatherCall::teach(Switcher* switcher, const Traffic& t, int world) const {
  // wire_bytes: every rank receives world - 1 shards, all padded alike.
  switcher->observe(gathered_bytes() * (world - 1), t.wire_bytes * world);
}

std::string ZipBackend::describe(const GatherCall& call) const {
  return "zipccl " + c10d::opTypeToString(call.op) + " (rank " + std::to_string(rank_) + " of " +
         std::to_string(size_) + ", group " + (pg_uid_.empty() ? "?" : pg_uid_) + ", " +
         std::to_string(call.items.size()) + (call.items.size() == 1 ? " tensor, " : " tensors, ") +
         std::to_string(call.shard_bytes()) + " bytes per rank)";
}

// ---- all-gather ----

// Only things every rank knows alike may be looked at here: options, dtypes, counts, the state of the call sequence.
bool ZipBackend::zippable(const GatherCall& call, FrameOptions* frame) const {
  if (options_.all_gather == Mode::raw || size_ == 1 || coalescing_ || call.items.empty()) return false;
  const at::Tensor& first = call.items[0].input;
  for (const GatherItem& item : call.items) {
    if (item.input.scalar_type() != first.scalar_type() || item.input.device() != first.device()) return false;
    if (item.outputs.size() != static_cast<size_t>(size_)) return false;
    for (const at::Tensor& out : item.outputs)
      if (out.scalar_type() != first.scalar_type() || out.device() != first.device()) return false;
    if (item.outputs[rank_].numel() != item.input.numel()) return false;
  }
  if (first.is_sparse() || !frame_dtype(first.scalar_type(), &frame->dtype)) return false;
  frame->code = options_.code;
  frame->checksum = options_.checksum;
  if (effective_code(*frame) == Code::raw) return false;
  uint64_t bytes = call.gathered_bytes();
  return bytes > 0 && bytes >= options_.threshold(options_.all_gather);
}

Decision decide_all_gather(Engine& engine, const Messages& messages, const FrameOptions& frame, Switcher* switcher,
                           Mode mode, uint64_t shard_bytes, bool log) {
  Decision d{Choice::zip, "zip was asked for", 0, 0};
  if (mode == Mode::raw) d = {Choice::raw, "raw was asked for", 0, 0};
  if (mode == Mode::automatic) {
    if (!switcher->measured()) measure(engine, messages, frame, switcher);
    d = switcher->all_gather(messages.world(), shard_bytes);
  }
  if (log && messages.rank() == 0)
    std::fprintf(stderr, "zipccl: all_gather of %llu bytes per rank: %s (%s)\n",
                 static_cast<unsigned long long>(shard_bytes), d.choice == Choice::zip ? "zip" : "raw",
                 d.reason.c_str());
  return d;
}

WorkPtr ZipBackend::all_gather(GatherCall call) {
  FrameOptions frame;
  at::Device device = call.inputs.empty() ? at::Device(at::kCPU) : call.inputs[0].device();
  bool zip = zippable(call, &frame);
  if (zip && device.is_cpu() && state_->zip) return all_gather_cpu(std::move(call), frame);
#ifdef ZIPCCL_WITH_CUDA
  if (zip && device.is_cuda() && cuda_) return all_gather_cuda(std::move(call), frame);
#endif
  state_->stats.add_raw("all_gather", call.received_bytes(rank_));
  return forward(device, call.raw);
}

WorkPtr ZipBackend::all_gather_cpu(GatherCall call, const FrameOptions& frame) {
  TORCH_CHECK(!stopped_, "zipccl: the process group was shut down");
  if (!worker_) worker_ = std::make_unique<Worker>();
  // What a future's value is, gloo decides: the shards of one output, not the output.
  const auto& outputs = call.op == c10d::OpType::_ALLGATHER_BASE ? call.items[0].outputs : call.outputs;
  auto work = c10::make_intrusive<CpuWork>(rank_, call.op, "zipccl:all_gather", call.inputs, outputs);
  auto run = [state = state_, frame, mode = options_.all_gather, log = options_.log_decisions, what = describe(call),
              call = std::move(call), modes = at::ThreadLocalState()] {
    // The caller's word on no_grad and inference mode counts for whoever writes to the outputs.
    at::ThreadLocalStateGuard as_caller(modes);
    try {
      Messages messages(state->zip, call.timeout);
      Decision d = decide_all_gather(*state->engine, messages, frame, &state->switcher, mode,
                                     call.agreed_shard_bytes(messages.world()), log);
      if (d.choice == Choice::zip) {
        Traffic t = all_gather_zip(*state->engine, messages, call.items, frame, what);
        call.teach(&state->switcher, t, messages.world());
        state->stats.add_zipped("all_gather", t);
      } else {
        state->stats.add_raw("all_gather", call.received_bytes(messages.rank()));
        call.raw(*state->zip)->wait();
      }
    } catch (const FrameError&) {
      throw;
    } catch (const c10::Error& e) {
      // The inner backend's own text stays; which call it was is what it cannot know.
      throw Error(what + ": " + e.what_without_backtrace());
    } catch (const std::exception& e) {
      throw Error(what + ": " + e.what());
    }
  };
  worker_->submit(std::move(run), [work](std::exception_ptr error) { work->complete(error); });
  return work;
}

WorkPtr ZipBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  GatherCall call{c10d::OpType::_ALLGATHER_BASE,
                  {{input, shards_of(output, input, size_)}},
                  {input},
                  {output},
                  opts.timeout,
                  [output, input, opts](c10d::Backend& b) mutable { return b._allgather_base(output, input, opts); }};
  return all_gather(std::move(call));
}

WorkPtr ZipBackend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  GatherCall call{
      c10d::OpType::COALESCED, {}, inputs, outputs, opts.timeout, [outputs, inputs, opts](c10d::Backend& b) mutable {
        return b.allgather_into_tensor_coalesced(outputs, inputs, opts);
      }};
  if (inputs.size() == outputs.size())
    for (size_t i = 0; i < inputs.size(); ++i)
      call.items.push_back({inputs[i], shards_of(outputs[i], inputs[i], size_)});
  return all_gather(std::move(call));
}

WorkPtr ZipBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) {
  GatherCall call{c10d::OpType::ALLGATHER,
                  {},
                  inputs,
                  outputs.empty() ? std::vector<at::Tensor>{} : outputs[0],
                  opts.timeout,
                  [outputs, inputs, opts](c10d::Backend& b) mutable { return b.allgather(outputs, inputs, opts); }};
  if (inputs.size() == 1 && outputs.size() == 1) call.items.push_back({inputs[0], outputs[0]});
  return all_gather(std::move(call));
}

Decision ZipBackend::explain(at::Device device, int64_t bytes) {
  uint64_t shard = static_cast<uint64_t>(bytes);
  if (size_ == 1) return {Choice::raw, "a group of one rank moves nothing", 0, 0};
  if (shard * size_ < options_.threshold(Mode::automatic))
    return {Choice::raw, "below min_bytes (" + std::to_string(options_.threshold(Mode::automatic)) + " gathered)", 0,
            0};
  FrameOptions frame;
  frame.code = options_.code;
  frame.checksum = options_.checksum;
  Decision result{Choice::raw, "no inner backend for " + device.str() + " tensors that zipccl can zip", 0, 0};
  if (device.is_cpu() && state_->zip) {
    if (!worker_) worker_ = std::make_unique<Worker>();
    auto work = c10::make_intrusive<CpuWork>(rank_, c10d::OpType::UNKNOWN, "zipccl:explain", std::vector<at::Tensor>{},
                                             std::vector<at::Tensor>{});
    auto decision = std::make_shared<Decision>();
    worker_->submit(
        [state = state_, frame, shard, decision] {
          Messages messages(state->zip, c10d::kUnsetTimeout);
          *decision =
              decide_all_gather(*state->engine, messages, frame, &state->switcher, Mode::automatic, shard, false);
        },
        [work](std::exception_ptr error) { work->complete(error); });
    work->wait(kNoTimeout);
    return *decision;
  }
#ifdef ZIPCCL_WITH_CUDA
  if (device.is_cuda() && cuda_) return explain_cuda(device, frame, shard);
#endif
  return result;
}

}  // namespace zipccl
