// Where the lossy reductions of a group run: a worker thread with a gloo of its own for CPU tensors, a stream of its
// own over the group's NCCL for CUDA tensors. Calls are done in the order they are made, on every rank.
//
// Not part of ZipBackend: no collective of torch leads here. Python's DynamiQState makes one channel per group.
#pragma once

#include <unistd.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "backend/lockstep.h"
#include "backend/own_call.h"
#include "backend/stats.h"
#include "backend/worker.h"
#include "collectives/dynamiq.h"
#include "collectives/probe_hops.h"
#include "policy/topology.h"

namespace zipccl {

class DynamiqChannel {
 public:
  // cpu: a gloo that nobody else uses; cuda: the group's NCCL. Either may be null: tensors of that device are refused.
  DynamiqChannel(int rank, int size, BackendPtr cpu, BackendPtr cuda);
  ~DynamiqChannel();

  struct Options {
    quantizer::Widths widths = quantizer::Widths::fine;
    float bits = 5;
    bool correlated = true;
    std::optional<Topology> topology;  // none: by the measured link
    bool by_node = false;              // raw inside nodes; with no topology: also if it is faster
    int node_size = 1;                 // consecutive ranks that share a node; divides the group's size
    int64_t block_bytes = 0;           // 0: by device
  };

  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // scale x the sum over all ranks, in place, and as the future's value. Small tensors travel in fp32, unpacked.
  // tensor: 1-D and contiguous. exempt: views of it that travel in fp32 too. residual: see dynamiq_all_reduce().
  // `async`: else the caller's thread (CPU) or stream (CUDA) may do it, and the future is done with respect to it.
  struct AllReduce {
    at::Tensor tensor;
    std::vector<at::Tensor> exempt;
    at::Tensor residual;
    float scale = 1;
    DynamiqKey key;
    bool async = true;
  };
  FuturePtr all_reduce(const AllReduce& call, const Options& options);
  // The same unpacked, by the inner backend: values are scaled, then summed in their own dtype.
  FuturePtr all_reduce_raw(const at::Tensor& tensor, float scale, bool async);
  // out[i] = scale x the sum over all ranks of input[rank * out.numel() + i]. Blocking, as above.
  FuturePtr reduce_scatter(const at::Tensor& input, const at::Tensor& out, float scale, const DynamiqKey& key,
                           const Options& options);

  // The way "auto" sends a tensor of so many values, and the seconds it expects. Collective, as the first call with
  // "auto" is: the link is measured then.
  HopChoice choose(at::Device device, int64_t count, int64_t itemsize, const Options& options);

  // Of CPU calls from now on; those on CUDA go by the group's NCCL.
  void set_timeout(std::chrono::milliseconds timeout);

  std::map<std::string, OpStats> stats() const { return state_->stats.read(); }
  void reset_stats() { state_->stats.reset(); }

 private:
  // Of one device. Jobs on the worker hold it; it may outlive the channel.
  struct Lane {
    BackendPtr backend;
    Pairs pairs;
    std::unique_ptr<Engine> engine;
    std::map<int, HopLinks> links;  // by node size
    Lockstep step;
    Lane(BackendPtr b, std::unique_ptr<Engine> e) : backend(b), pairs(std::move(b)), engine(std::move(e)) {}
  };
  struct State {
    std::shared_ptr<Lane> cpu;
    Stats stats;
  };
  using Job = std::function<void(Lane&)>;

  static DynamiqOptions resolve(Lane& lane, at::Device device, int64_t count, int64_t itemsize, const Options& options,
                                const std::string& what);
  static HopChoice choose_on(Lane& lane, at::Device device, int64_t count, int64_t itemsize, const Options& options,
                             const std::string& what);
  // The job, once ranks have compared the words of their calls (not on CUDA: NCCL takes care of itself). What it throws
  // says which call it was.
  static Job compared(at::Device device, std::string what, std::string words, Job job);
  // Does the job in its turn; the future's value is `result`. used: what a CUDA job touches.
  FuturePtr run(Job job, const at::Tensor& result, const std::vector<at::Tensor>& used, bool async);
  FuturePtr run_cuda(const Job& job, const at::Tensor& result, const std::vector<at::Tensor>& used, bool async);
  std::string describe(const char* op, int64_t values) const;

  int rank_, size_;
  pid_t made_in_ = getpid();  // neither threads nor connections come along into a forked child
  BackendPtr cuda_;
  std::shared_ptr<State> state_;
  std::unique_ptr<Worker> worker_;  // started by the first CPU call
#ifdef ZIPCCL_WITH_CUDA
  struct CudaLane;
  std::map<c10::DeviceIndex, std::shared_ptr<CudaLane>> cuda_lanes_;
#endif
};

}  // namespace zipccl
