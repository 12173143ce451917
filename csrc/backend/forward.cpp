// Calls that go to an inner backend untouched: its semantics, its errors, its Work.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/work.h"
#include "backend/zip_backend.h"
#include "collectives/error.h"

namespace zipccl {

namespace {
at::Device device_of(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors[0].device();
}

// Several works as one: what a coalescing window with CPU and CUDA calls ends in.
class JoinedWork : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<WorkPtr> parts) : Work(-1, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

  bool isCompleted() override {
    for (const WorkPtr& w : parts_)
      if (!w->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override {
    for (const WorkPtr& w : parts_)
      if (!w->isSuccess()) return false;
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool done = true;
    for (const WorkPtr& w : parts_) done = w->wait(timeout) && done;
    return done;
  }
  void synchronize() override {
    for (const WorkPtr& w : parts_) w->synchronize();
  }

 private:
  std::vector<WorkPtr> parts_;
};
}  // namespace

c10d::Backend& ZipBackend::backend_for(at::Device device) {
  const BackendPtr& b = device.is_cpu() ? cpu_ : cuda_;
  TORCH_CHECK(b && (device.is_cpu() || device.is_cuda()),
              "zipccl: this group has no inner backend for " + device.str() + " tensors");
  if (device.is_cuda()) {
#ifdef ZIPCCL_WITH_CUDA
    if (*given_up_)
      throw Error("zipccl (rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                  "): an earlier call of this group waited for other ranks in vain; make a new group");
#endif
    // setBoundDeviceId is not virtual, so c10d gives the device to us alone.
    if (bound_device_id_ && b->getBoundDeviceId() != bound_device_id_) b->setBoundDeviceId(bound_device_id_);
  }
  return *b;
}

WorkPtr ZipBackend::forward(at::Device device, const RawCall& call) {
  if (device.is_cuda()) last_cuda_ = device;
  return between_two(device, call);
}

// As forward(), for what only some ranks of the group do.
WorkPtr ZipBackend::between_two(at::Device device, const RawCall& call) {
  WorkPtr work = call(backend_for(device));
  if (in_window() && device.is_cpu() && work) coalesced_cpu_.push_back(work);
  return work;
}

WorkPtr ZipBackend::allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  return forward(device_of(tensors), [&](c10d::Backend& b) { return b.allreduce_sparse(tensors, opts); });
}

WorkPtr ZipBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return forward(device_of(tensors), [&](c10d::Backend& b) { return b.allreduce_coalesced(tensors, opts); });
}

WorkPtr ZipBackend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) {
  return forward(device_of(tensors), [&](c10d::Backend& b) { return b.reduce(tensors, opts); });
}

WorkPtr ZipBackend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                        const c10d::AllgatherOptions& opts) {
  return forward(device_of(inputs), [&](c10d::Backend& b) { return b.allgather_coalesced(outputs, inputs, opts); });
}

WorkPtr ZipBackend::send(std::vector<at::Tensor>& tensors, int dst, int tag) {
  return between_two(device_of(tensors), [&](c10d::Backend& b) { return b.send(tensors, dst, tag); });
}

WorkPtr ZipBackend::recv(std::vector<at::Tensor>& tensors, int src, int tag) {
  return between_two(device_of(tensors), [&](c10d::Backend& b) { return b.recv(tensors, src, tag); });
}

WorkPtr ZipBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return between_two(device_of(tensors), [&](c10d::Backend& b) { return b.recvAnysource(tensors, tag); });
}

// `forwarded`, done when the calls that the worker has are done, too. A caller who goes on may have more to give to
// other ranks before those can be.
WorkPtr ZipBackend::after_own_calls(const WorkPtr& forwarded) {
  if (!worker_ || stopped_) return forwarded;
  auto work = c10::make_intrusive<CpuWork>(rank_, forwarded->retrieveOpType());
  worker_->submit([forwarded] { forwarded->wait(); }, [work](std::exception_ptr error) { work->complete(error); });
  return work;
}

// c10d picks a device for a barrier without knowing us: a CPU tensor unless told otherwise. A group that works on CUDA
// expects NCCL's barrier, which also waits for the GPU; collectives run in the same order on every rank, so last_cuda_
// is set on all or on none. So does a group that has nothing else.
WorkPtr ZipBackend::barrier(const c10d::BarrierOptions& opts) {
  const bool asked = !opts.device_ids.empty() || (opts.device && opts.device->is_cuda());
  if (cpu_ && !(cuda_ && (asked || last_cuda_))) {
    // gloo's barrier waits for what was begun before it, and some of that is not with gloo yet.
    if (!opts.asyncOp) finish_worker();
    WorkPtr barrier = backend_for(at::kCPU).barrier(opts);
    return opts.asyncOp ? after_own_calls(barrier) : barrier;
  }
  c10d::Backend& cuda = backend_for(at::kCUDA);
  c10d::BarrierOptions on_cuda = opts;
#ifdef ZIPCCL_WITH_CUDA
  await_own_streams();
#endif
  if (!asked) on_cuda.device = last_cuda_ ? *last_cuda_ : c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
  return cuda.barrier(on_cuda);
}

void ZipBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  backend_for(at::kCPU).monitoredBarrier(opts, wait_all_ranks);
}

// ---- coalescing: NCCL's, where there is one ----

bool ZipBackend::supportsCoalescing() const { return cuda_ ? cuda_->supportsCoalescing() : cpu_->supportsCoalescing(); }

void ZipBackend::startCoalescing() {
  (cuda_ ? cuda_ : cpu_)->startCoalescing();
  window_ = std::this_thread::get_id();
}

WorkPtr ZipBackend::endCoalescing() {
  window_ = std::thread::id();
  WorkPtr work = (cuda_ ? cuda_ : cpu_)->endCoalescing();
  if (coalesced_cpu_.empty()) return work;
  std::vector<WorkPtr> parts;
  parts.swap(coalesced_cpu_);
  if (work) parts.push_back(work);
  return c10::make_intrusive<JoinedWork>(std::move(parts));
}

// ---- group properties: to every inner backend, or to the one that knows ----

void ZipBackend::setTimeout(std::chrono::milliseconds timeout) {
  state_->timeout = timeout;
  for (const BackendPtr& b : all_inner()) b->setTimeout(timeout);
}

void ZipBackend::setSequenceNumberForGroup() {
  for (const BackendPtr& b : all_inner()) b->setSequenceNumberForGroup();
}

uint64_t ZipBackend::getSequenceNumberForGroup() {
  if (last_cuda_ || !cpu_) return cuda_->getSequenceNumberForGroup();
  return cpu_->getSequenceNumberForGroup() + own_cpu_calls_;
}

#ifdef ZIPCCL_TORCH_HAS_SET_GROUP_UID
void ZipBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  for (const BackendPtr& b : all_inner()) b->setGroupUid(uid);
}
#endif

void ZipBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  if (!cuda_) return Backend::registerOnCompletionHook(std::move(hook));
  onCompletionHook_ = hook;  // hasHooks() reads it and is not virtual
  cuda_->registerOnCompletionHook(std::move(hook));
}

void ZipBackend::waitForPendingWorks() {
  if (!cuda_) return Backend::waitForPendingWorks();
  cuda_->waitForPendingWorks();
}

void ZipBackend::enableCollectivesTiming() {
  for (const BackendPtr& b : all_inner()) b->enableCollectivesTiming();
}

// torch asks for the device a group is bound to, which need not be one that this group serves.
void ZipBackend::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu() ? cpu_ : cuda_) backend_for(device).eagerConnectSingleDevice(device);
}

c10d::ErrorType ZipBackend::getError() { return (cuda_ ? cuda_ : cpu_)->getError(); }

std::shared_ptr<c10::Allocator> ZipBackend::getMemAllocator() { return (cuda_ ? cuda_ : cpu_)->getMemAllocator(); }

at::Tensor ZipBackend::allocateTensor(long size, at::TensorOptions options) {
  return backend_for(options.device()).allocateTensor(size, options);
}

bool ZipBackend::supportsTensorAlloc(c10::DeviceIndex device) { return cuda_ && cuda_->supportsTensorAlloc(device); }

}  // namespace zipccl
