// ZipBackend: the c10d::Backend face of zipccl over inner backends (gloo for CPU tensors, NCCL for CUDA tensors).
//
// Every virtual of c10d::Backend is one of
//   own        all-gather, all-to-all, broadcast, scatter, gather in all their forms, and, on request, reduce-scatter
//              and all-reduce: zipped where the options and the switcher say so, otherwise forwarded
//   forwarded  to the inner backend of the tensors' device, untouched
//   refused    where the inner backends refuse it too
// tests/test_backend_surface.py lists which is which.
//
// Overrides come in the order of Backend.hpp.
#pragma once

#include <c10/util/FunctionRef.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "backend/lockstep.h"
#include "backend/options.h"
#include "backend/own_call.h"
#include "backend/stats.h"
#include "backend/worker.h"
#include "collectives/engine.h"
#include "collectives/forecast.h"
#include "collectives/reduce_scatter.h"

#ifdef ZIPCCL_WITH_CUDA
#include "backend/work_cuda.h"
#endif

namespace zipccl {

// What torch hands round when a group is split: name and timeout of the part. All else the part has from its parent.
struct GroupOptions : c10d::Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds timeout) : Options("zipccl", timeout) {}
};

class ZipBackend : public c10d::Backend {
 public:
  // Any of the inner backends may be null: calls on tensors of that device are then refused. `cpu_zip` is a second
  // CPU backend of the same ranks, used by zipped CPU collectives alone; null: CPU tensors are never zipped.
  ZipBackend(int rank, int size, BackendPtr cpu, BackendPtr cpu_zip, BackendPtr cuda, BackendOptions options);
  ~ZipBackend() override;

  // ---- zipccl's own ----
  std::map<std::string, OpStats> stats() const { return state_->stats.read(); }
  void reset_stats() { state_->stats.reset(); }
  bool can_zip_cpu() const { return state_->zip != nullptr; }
  // Held for zipped CPU calls between calls; scratch of CUDA calls is the caching allocator's.
  uint64_t scratch_bytes() const { return state_->engine->scratch_bytes(); }
  // What "auto" does with a call of this size, and why. Collective where the link was not measured yet.
  Decision explain(Op op, at::Device device, uint64_t bytes);
  // Options from the next call on; every rank must change them at the same place.
  const BackendOptions& options() const { return options_; }
  void set_options(const BackendOptions& options) { options_ = options; }
  BackendPtr inner(at::DeviceType type) const { return type == at::kCPU ? cpu_ : cuda_; }
  // Makes the part of a split group that this rank is in, null if none. Called on all ranks of the group that is split.
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using Splitter = std::function<BackendPtr(ZipBackend&, const StorePtr&, const std::vector<int>&, const OptionsPtr&)>;
  static void set_splitter(Splitter splitter);

  // ---- own (own_collectives.cpp) ----
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
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

  // ---- capabilities, coalescing, identity ----
  bool supportsSplitting() const override;
  bool supportsCoalescing() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  const std::string getBackendName() const override { return "zipccl"; }
  OptionsPtr getBackendOptions() override;

  // ---- forwarded collectives ----
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override;
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
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks, const OptionsPtr& opts) override;
#ifdef ZIPCCL_TORCH_HAS_SET_GROUP_UID
  void setGroupUid(const std::string& uid) override;
#endif
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
    std::optional<Code> code;  // of bf16 frames, once it is chosen
    std::array<Forecast, kOpCount> forecasts;
    Lockstep step;
    uint64_t passed_on = 0;  // calls of cpu_ when numbers were last skipped for them
    Stats stats;             // of both devices
    // Timeout of the last call that was begun to go on by itself.
    std::chrono::milliseconds begun_with{0};
    // Set for the group since it was made; unset: gloo's own.
    std::atomic<std::chrono::milliseconds> timeout{c10d::kUnsetTimeout};
    explicit CpuState(BackendPtr backend);
    std::chrono::milliseconds timeout_of(const Patience& p) const {
      return p.timeout == c10d::kUnsetTimeout ? timeout.load() : p.timeout;
    }
  };

  // Zipped, raw on our own way, or forwarded.
  WorkPtr run(OwnCall call);
  struct CpuCall;
  WorkPtr run_cpu(OwnCall call);
  // A call that may be raw as the last one like it was. shared: what all ranks pass alike of its sizes.
  struct Again {
    Op op;
    c10d::OpType type;
    DType dtype;
    CallSize size;
    const std::vector<int64_t>& shared;
    uint64_t received;
    Patience patience;
    c10::function_ref<WorkPtr(c10d::Backend&)> raw;
  };
  // Does it on gloo's threads, without waiting, where nothing else is under way but other such calls, and nothing of it
  // is to be compared between ranks, timed or agreed on. Null where that is not so; then nothing has happened. Of CPU
  // tensors that fit each other and that gloo moves.
  WorkPtr begin_again(const Again& call);
  std::shared_ptr<Worker::UnderWay> begin_again(const Again& call, bool beside, WorkPtr* work);
  // Options and threshold; what only the collective knows comes in the call.
  bool may_zip(const OwnCall& call) const;
  // The frame options of a tensor's dtype; false where a frame would not be smaller.
  bool frame_for(const at::Tensor& t, FrameOptions* frame) const;
  std::string describe(Op op, CallSize size) const { return describe(op, size, rank_, size_, pg_uid_); }
  static std::string describe(Op op, CallSize size, int rank, int world, const std::string& group);
  std::string describe(const char* name) const { return describe(name, rank_, size_, pg_uid_); }
  static std::string describe(const char* name, int rank, int world, const std::string& group,
                              const std::string& more = "");
  // True where a call of that many bytes on tensors like `t` goes to the inner backend whatever the switcher would say.
  bool stays_raw(Op op, const at::Tensor& t, uint64_t bytes) const;
  // Such a call, with nothing else to be done.
  WorkPtr pass_on(Op op, uint64_t received, at::Device device, const RawCall& raw);
  OwnCall gather_call(c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<std::vector<at::Tensor>> outputs,
                      std::vector<at::Tensor> user_outputs, Patience patience, RawCall raw) const;
  using PartsOf = std::function<std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>()>;
  OwnCall all_to_all_call(c10d::OpType type, PartsOf parts, bool fits, const at::Tensor& like, CallSize size,
                          uint64_t received, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                          Patience patience, RawCall raw) const;
  OwnCall reduce_call(Op op, c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                      const c10d::ReduceOp& reduce_op, Patience patience, RawCall raw, PairOptions* pair,
                      ReduceOptions* reduce) const;
  OwnCall reduce_scatter_call(c10d::OpType type, std::vector<std::vector<at::Tensor>> parts,
                              std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                              const c10d::ReduceScatterOptions& opts, RawCall raw) const;

  c10d::Backend& backend_for(at::Device device);
  WorkPtr forward(at::Device device, const RawCall& call);
  WorkPtr between_two(at::Device device, const RawCall& call);
  void end_worker();
  void finish_worker();  // waits for the calls it was given
  WorkPtr after_own_calls(const WorkPtr& forwarded);
  // Backends that are there, each once.
  std::vector<BackendPtr> all_inner() const;

  BackendOptions options_;
  BackendPtr cpu_, cuda_;
  std::shared_ptr<CpuState> state_;
  std::unique_ptr<Worker> worker_;          // started by the first zipped CPU call
  std::atomic<uint64_t> own_cpu_calls_{0};  // that cpu_ has not counted
  std::atomic<uint64_t> passed_on_{0};      // CPU calls that cpu_ has made
  bool stopped_ = false;
  pid_t made_in_ = getpid();  // neither threads nor connections come along into a forked child

  // The last split: c10d asks for it once per device type, with one store.
  StorePtr split_store_;
  c10::weak_intrusive_ptr<c10d::Backend> split_part_{BackendPtr()};

  // The thread that opened a coalescing window. Calls of others are none of the window's.
  std::atomic<std::thread::id> window_{};
  bool in_window() const { return window_ == std::this_thread::get_id(); }
  std::vector<WorkPtr> coalesced_cpu_;   // works of CPU calls made inside a window
  std::optional<at::Device> last_cuda_;  // of the last collective

#ifdef ZIPCCL_WITH_CUDA
  struct CudaState;
  CudaState& cuda_state(at::Device device);
  class HostOfCuda;
  void prepare(CudaState& state, Place* place, const HostOfCuda& host);
  WorkPtr run_cuda(OwnCall call);
  // Whether this is a CUDA call that the switcher sends to the inner backend as it did the last one. Spares making an
  // OwnCall to ask it; counts the call if so. The arguments must fit each other.
  bool raw_again(Op op, CallSize size, const at::Tensor& input, const at::Tensor& output);
  Engine::Watch watch_over(const std::string& what, std::chrono::milliseconds timeout) const;
  void await_own_streams() const;
  Decision explain_cuda(Op op, at::Device device, const FrameOptions& frame, uint64_t bytes);
  std::map<c10::DeviceIndex, std::shared_ptr<CudaState>> cuda_states_;
  std::shared_ptr<FrameChecks> frame_checks_ = std::make_shared<FrameChecks>();
  // A call waited in vain: what comes behind it on the GPU would do so too.
  std::shared_ptr<std::atomic<bool>> given_up_ = std::make_shared<std::atomic<bool>>(false);
#else
  bool raw_again(Op, CallSize, const at::Tensor&, const at::Tensor&) { return false; }
#endif
};

}  // namespace zipccl
