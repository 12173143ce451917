#include "backend/dynamiq_channel.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>

#include "backend/perform.h"
#include "collectives/error.h"
#include "collectives/place.h"
#include "collectives/quantizing.h"
#include "collectives/same_call.h"
#include "collectives/torch_threads.h"

namespace zipccl {

namespace {
constexpr double kStopPatience = 5.0;
// On CUDA packing takes a hundredth of the time that the wire takes, so that hiding it matters less than exchanges
// saved.
constexpr int64_t kCpuBlockBytes = 8 << 20, kCudaBlockBytes = 128 << 20;
// Of fewer values per rank, what is packed is mostly padding, and latency is all that counts anyway.
constexpr int64_t kFewestPacked = 8 * quantizer::kSuperGroup;

Team every(int size, int rank, int first, int stride, int count) {
  Team team;
  for (int i = 0; i < count; ++i) {
    team.ranks.push_back(first + i * stride);
    if (team.ranks.back() == rank) team.me = i;
  }
  if (first + (count - 1) * stride >= size) throw Error("zipccl: node_size does not divide the group's size");
  return team;
}

c10::intrusive_ptr<c10::ivalue::Future> new_future(const at::Tensor& t) {
  std::vector<c10::Device> devices;
  if (!t.is_cpu()) devices.push_back(t.device());
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
}

void sum_raw(c10d::Backend& backend, const at::Tensor& t) {
  std::vector<at::Tensor> tensors{t};
  if (t.numel() == 0) return;
  if (auto work = backend.allreduce(tensors, {})) work->wait();
}

uint64_t raw_bytes(const at::Tensor& t, double ranks) {
  return static_cast<uint64_t>(2 * (ranks - 1) / ranks * static_cast<double>(t.nbytes()));
}

void check_dtype(const at::Tensor& t) {
  TORCH_CHECK_TYPE(
      can_quantize(t.scalar_type()),
      std::string("zipccl: DynamiQ takes float32, bfloat16 and float16, not ") + toString(t.scalar_type()));
}

std::string word(const char* name, const char* value) { return std::string(" ") + name + "=" + value; }
std::string word(const char* name, int64_t value) { return word(name, std::to_string(value).c_str()); }
std::string word(const char* name, at::ScalarType value) { return word(name, toString(value)); }
std::string word(const char* name, float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);  // tells all floats apart
  return word(name, text);
}

// What ranks compare of a call (same_call.h): all that the sizes of its messages follow from.
std::string words_of(const char* op, int64_t values, at::ScalarType dtype) {
  return std::string("op=") + op + word("values", values) + word("dtype", dtype);
}
std::string words_of(const DynamiqChannel::Options& o) {
  return word("bits", o.bits) + word("widths", o.widths == quantizer::Widths::fine ? "fine" : "paper") +
         word("topology", o.topology ? topology_name(*o.topology) : "auto") + word("by_node", int64_t{o.by_node}) +
         word("node_size", int64_t{o.node_size}) + word("block_bytes", o.block_bytes);
}
}  // namespace

DynamiqChannel::Job DynamiqChannel::compared(at::Device device, std::string what, std::string words, Job job) {
  return [device, what = std::move(what), words = std::move(words), job = std::move(job)](Lane& lane) {
    naming(what, [&] {
      lane.step.keep([&] {
        if (device.is_cpu()) check_same_call({*lane.engine, lane.pairs, what}, words);
        job(lane);
      });
    });
  };
}

DynamiqChannel::DynamiqChannel(int rank, int size, BackendPtr cpu, BackendPtr cuda)
    : rank_(rank), size_(size), cuda_(std::move(cuda)), state_(std::make_shared<State>()) {
  if (cpu) state_->cpu = std::make_shared<Lane>(std::move(cpu), make_cpu_engine());
}

DynamiqChannel::~DynamiqChannel() {
  if (worker_) worker_->stop(kStopPatience);
}

void DynamiqChannel::set_timeout(std::chrono::milliseconds timeout) {
  if (!state_->cpu) return;
  state_->cpu->pairs.set_timeout(timeout);
  state_->cpu->backend->setTimeout(timeout);
}

std::string DynamiqChannel::describe(const char* op, int64_t values) const {
  return std::string("zipccl dynamiq ") + op + " (rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
         ", " + std::to_string(values) + " values)";
}

// ---- The way a tensor goes ------------------------------------------------------------------------------------

HopChoice DynamiqChannel::choose_on(Lane& lane, at::Device device, int64_t count, int64_t itemsize,
                                    const Options& options, const std::string& what) {
  const int node = std::max(options.node_size, 1), world = lane.pairs.world();
  if (options.topology) return {*options.topology, options.by_node && node > 1, 0};
  if (world == 1) return {};
  auto it = lane.links.find(node);
  if (it == lane.links.end())
    it = lane.links.emplace(node, measure_hops({*lane.engine, lane.pairs, what}, node, device)).first;
  const HopLinks& links = it->second;
  const auto values = static_cast<double>(count), packed = values * options.bits / 8;
  if (node == 1) return best_topology(world, packed, links.all);
  if (!options.by_node)
    return best_topology(world, node, values * static_cast<double>(itemsize), packed, links.all, links.inside,
                         links.between);
  HopChoice choice = best_topology(world / node, packed / node, links.between);
  choice.by_node = true;
  return choice;
}

DynamiqOptions DynamiqChannel::resolve(Lane& lane, at::Device device, int64_t count, int64_t itemsize,
                                       const Options& options, const std::string& what) {
  const HopChoice choice = choose_on(lane, device, count, itemsize, options, what);
  const int world = lane.pairs.world(), rank = lane.pairs.rank(), node = choice.by_node ? options.node_size : 1;
  DynamiqOptions o;
  o.widths = options.widths;
  o.bits = options.bits;
  o.correlated = options.correlated;
  o.topology = choice.topology;
  o.team = every(world, rank, rank % node, node, world / node);
  if (node > 1) o.node = every(world, rank, rank / node * node, 1, node);
  o.block_bytes = options.block_bytes > 0 ? options.block_bytes : device.is_cpu() ? kCpuBlockBytes : kCudaBlockBytes;
  return o;
}

HopChoice DynamiqChannel::choose(at::Device device, int64_t count, int64_t itemsize, const Options& options) {
  auto choice = std::make_shared<HopChoice>();
  at::Tensor nothing = at::empty({0}, at::TensorOptions(at::kFloat).device(device));
  const std::string what = describe("explain", count);
  Job job = [=](Lane& lane) { *choice = choose_on(lane, device, count, itemsize, options, what); };
  const std::string words =
      std::string("op=explain") + word("values", count) + word("itemsize", itemsize) + words_of(options);
  run(compared(device, what, words, std::move(job)), nothing, {}, /*async=*/false)->waitAndThrow();
  return *choice;
}

// ---- Calls ----------------------------------------------------------------------------------------------------

DynamiqChannel::FuturePtr DynamiqChannel::all_reduce(const AllReduce& call, const Options& options) {
  TORCH_CHECK_VALUE(call.tensor.dim() == 1 && is_plain(call.tensor), "zipccl: the tensor must be 1-D and contiguous");
  check_dtype(call.tensor);
  std::vector<at::Tensor> used = call.exempt;
  used.push_back(call.tensor);
  if (call.residual.defined()) used.push_back(call.residual);
  const std::string what = describe("all_reduce", call.tensor.numel());
  int64_t exempted = 0;
  for (const at::Tensor& t : call.exempt) exempted += t.numel();
  const std::string words = words_of("all_reduce", call.tensor.numel(), call.tensor.scalar_type()) +
                            word("exempt", exempted) + word("residual", int64_t{call.residual.defined()}) +
                            word("scale", call.scale) + words_of(options);
  auto job = [call, options, what, stats = state_.get()](Lane& lane) {
    const int ranks = lane.pairs.world();
    if (ranks > 1 && call.tensor.numel() < kFewestPacked * ranks) {
      at::Tensor sum = call.tensor.to(at::kFloat);
      if (call.residual.defined()) {  // from when its parameters were in a larger bucket
        sum.add_(call.residual.nan_to_num(0, 0, 0));
        at::Tensor(call.residual).zero_();
      }
      sum_raw(*lane.backend, sum);
      at::Tensor(call.tensor).copy_(sum.mul_(call.scale), /*non_blocking=*/true);
      return stats->stats.add_raw("all_reduce", raw_bytes(sum, ranks));
    }
    // Zeros take no bits, so exempt values need no places of their own.
    at::Tensor exempt;
    if (!call.exempt.empty()) {
      std::vector<at::Tensor> flat;
      for (const at::Tensor& t : call.exempt) flat.push_back(t.reshape({-1}).to(at::kFloat));
      exempt = at::cat(flat);
      for (const at::Tensor& t : call.exempt) t.zero_();
    }
    const int64_t itemsize = call.tensor.itemsize();
    const DynamiqOptions o = resolve(lane, call.tensor.device(), call.tensor.numel(), itemsize, options, what);
    const Traffic traffic =
        dynamiq_all_reduce({*lane.engine, lane.pairs, what}, o, call.key, call.tensor, call.scale, call.residual);
    stats->stats.add_zipped("all_reduce", traffic);
    if (!exempt.defined()) return;
    if (call.residual.defined())  // what packing the zeros may have left there belongs to nobody
      for (const at::Tensor& t : call.exempt)
        call.residual.narrow(0, t.storage_offset() - call.tensor.storage_offset(), t.numel()).zero_();
    sum_raw(*lane.backend, exempt);
    exempt.mul_(call.scale);
    int64_t at = 0;
    for (const at::Tensor& t : call.exempt) {
      t.copy_(exempt.narrow(0, at, t.numel()).view(t.sizes()), /*non_blocking=*/true);
      at += t.numel();
    }
  };
  return run(compared(call.tensor.device(), what, words, std::move(job)), call.tensor, used, call.async);
}

DynamiqChannel::FuturePtr DynamiqChannel::all_reduce_raw(const at::Tensor& tensor, float scale, bool async) {
  auto job = [=, stats = state_.get()](Lane& lane) {
    if (scale != 1) at::Tensor(tensor).mul_(scale);
    sum_raw(*lane.backend, tensor);
    stats->stats.add_raw("all_reduce", raw_bytes(tensor, lane.pairs.world()));
  };
  const std::string words = words_of("all_reduce_raw", tensor.numel(), tensor.scalar_type()) + word("scale", scale);
  return run(compared(tensor.device(), describe("all_reduce", tensor.numel()), words, std::move(job)), tensor, {tensor},
             async);
}

DynamiqChannel::FuturePtr DynamiqChannel::reduce_scatter(const at::Tensor& input, const at::Tensor& out, float scale,
                                                         const DynamiqKey& key, const Options& options) {
  for (const at::Tensor* t : {&input, &out}) {
    TORCH_CHECK_VALUE(t->dim() == 1 && is_plain(*t), "zipccl: tensors must be 1-D and contiguous");
    check_dtype(*t);
  }
  const std::string what = describe("reduce_scatter", input.numel());
  TORCH_CHECK_VALUE(input.numel() == out.numel() * size_, what + ": the input must be as long as all outputs together");
  const std::string words = words_of("reduce_scatter", input.numel(), input.scalar_type()) +
                            word("of_each", out.numel()) + word("to", out.scalar_type()) + word("scale", scale) +
                            words_of(options);
  auto job = [=, stats = state_.get()](Lane& lane) {
    const int ranks = lane.pairs.world();
    if (ranks > 1 && out.numel() < kFewestPacked && input.numel() == out.numel() * ranks) {
      at::Tensor sum = input.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      sum_raw(*lane.backend, sum);
      sum = sum.narrow(0, lane.pairs.rank() * out.numel(), out.numel());
      at::Tensor(out).copy_(sum.mul_(scale), /*non_blocking=*/true);
      return stats->stats.add_raw("reduce_scatter", raw_bytes(input, ranks));
    }
    Options flat = options;
    flat.by_node = false;
    flat.node_size = 1;
    const DynamiqOptions o = resolve(lane, input.device(), input.numel(), input.itemsize(), flat, what);
    stats->stats.add_zipped("reduce_scatter",
                            dynamiq_reduce_scatter({*lane.engine, lane.pairs, what}, o, key, input, out, scale));
  };
  return run(compared(input.device(), what, words, std::move(job)), out, {input, out}, /*async=*/false);
}

// ---- Doing them -----------------------------------------------------------------------------------------------

DynamiqChannel::FuturePtr DynamiqChannel::run(Job job, const at::Tensor& result,
                                              [[maybe_unused]] const std::vector<at::Tensor>& used, bool async) {
#ifdef ZIPCCL_WITH_CUDA
  if (result.is_cuda() && cuda_) return run_cuda(job, result, used, async);
#endif
  TORCH_CHECK(result.is_cpu() && state_->cpu, "zipccl: this group cannot reduce " + result.device().str() + " tensors");
  if (getpid() != made_in_) throw Error("zipccl dynamiq: this process is a fork of the one that made the group");
  if (!worker_) worker_ = std::make_unique<Worker>();
  FuturePtr future = new_future(result);
  auto work = [state = state_, job = std::move(job), modes = at::ThreadLocalState(), threads = at::get_num_threads()] {
    at::ThreadLocalStateGuard as_caller(modes);
    const ThreadLimit as_many(threads);
    at::NoGradGuard no_grad;
    job(*state->cpu);
  };
  auto done = [future, result](std::exception_ptr error) {
    if (error)
      future->setErrorIfNeeded(error);
    else
      future->markCompleted(result);
  };
  if (async || !worker_->run_here(work, done)) worker_->submit(std::move(work), std::move(done));
  if (!async) future->wait();
  return future;
}

}  // namespace zipccl
