// ZipBackend: the c10d::Backend face of zipccl over inner backends (gloo for CPU tensors, NCCL for CUDA tensors).
//
// Every virtual of c10d::Backend is one of
//   own        all forms of all-gather: zipped where the options and the switcher say so
//   forwarded  to the inner backend of the tensors' device, untouched
//   refused    where the inner backends refuse it too (see zip_backend.cpp)
// tests/test_backend_surface.py lists which is which.
//
// Overrides come in the order of Backend.hpp.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/options.h"
#include "backend/stats.h"
#include "backend/worker.h"
#include "collectives/all_gather.h"
#include "collectives/engine.h"

#ifdef ZIPCCL_WITH_CUDA
#include "backend/work_cuda.h"
#endif

namespace zipccl {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

class ZipBackend : public c10d::Backend {
 public:
  // Any of the inner backends may be null: calls on tensors of that device are then refused. `cpu_zip` is a second
  // CPU backend of the same ranks, used by zipped CPU collectives alone; null: CPU tensors are never zipped.
  ZipBackend(int rank, int size, BackendPtr cpu, BackendPtr cpu_zip, BackendPtr cuda, BackendOptions options);
  ~ZipBackend() override;

  // ---- zipccl's own ----
  std::map<std::string, OpStats> stats() const { return state_->stats.read(); }
  void reset_stats() { state_->stats.reset(); }
  // What "auto" does with a call of this size, and why. Collective where the link was not measured yet.
  Decision explain(at::Device device, int64_t shard_bytes);
  const BackendOptions& options() const { return options_; }
  BackendPtr inner(at::DeviceType type) const { return type == at::kCPU ? cpu_ : cuda_; }

  // ---- own: all-gather ----
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override;

  // ---- capabilities, coalescing, identity ----
  bool supportsCoalescing() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  const std::string getBackendName() const override { return "zipccl"; }

  // ---- forwarded collectives ----
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int dst, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int src, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  // ---- hooks, groups, memory, life cycle ----
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  void abort() override;
  void shutdown() override;

 private:
  // bf16 weights and gradients take 11.2 to 11.4 of 16 bits in code fast.
  static constexpr double kPriorRatio = 0.71;

  // What a job on the worker thread needs; it may outlive the backend (Worker::stop).
  struct CpuState {
    BackendPtr zip;
    std::unique_ptr<Engine> engine;
    Switcher switcher;
    Stats stats;  // of both devices
    explicit CpuState(BackendPtr backend);
  };

  // The raw form of a call, to be made on whichever backend carries it.
  using RawCall = std::function<WorkPtr(c10d::Backend&)>;

  struct GatherCall {
    c10d::OpType op;
    std::vector<GatherItem> items;
    std::vector<at::Tensor> inputs, outputs;  // as the user passed them
    std::chrono::milliseconds timeout;
    RawCall raw;

    uint64_t shard_bytes() const;             // this rank's
    uint64_t gathered_bytes() const;          // all ranks'
    uint64_t received_bytes(int rank) const;  // from ranks other than this one
    uint64_t agreed_shard_bytes(int world) const;
    void teach(Switcher* switcher, const Traffic& traffic, int world) const;
  };

  WorkPtr all_gather(GatherCall call);
  WorkPtr all_gather_cpu(GatherCall call, const FrameOptions& options);
  bool zippable(const GatherCall& call, FrameOptions* options) const;
  std::string describe(const GatherCall& call) const;

  c10d::Backend& backend_for(at::Device device);
  WorkPtr forward(at::Device device, const RawCall& call);
  // Backends that are there, each once.
  std::vector<BackendPtr> all_inner() const;

  BackendOptions options_;
  BackendPtr cpu_, cuda_;
  std::shared_ptr<CpuState> state_;
  std::unique_ptr<Worker> worker_;  // started by the first zipped CPU call
  bool stopped_ = false;

  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_cpu_;   // works of CPU calls made inside a window
  std::optional<at::Device> last_cuda_;  // of the last collective

#ifdef ZIPCCL_WITH_CUDA
  struct CudaState;
  CudaState& cuda_state(at::Device device);
  WorkPtr all_gather_cuda(GatherCall call, const FrameOptions& options);
  Decision explain_cuda(at::Device device, const FrameOptions& frame, uint64_t shard);
  std::map<c10::DeviceIndex, std::unique_ptr<CudaState>> cuda_states_;
  std::shared_ptr<FrameChecks> frame_checks_ = std::make_shared<FrameChecks>();
#endif
};

// "auto" for one shard: measured once per group and device, decided by the switcher, logged when asked.
Decision decide_all_gather(Engine& engine, const Messages& messages, const FrameOptions& frame, Switcher* switcher,
                           Mode mode, uint64_t shard_bytes, bool log);

}  // namespace zipccl
