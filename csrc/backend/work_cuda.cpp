#ifdef ZIPCCL_WITH_CUDA

#include "backend/work_cuda.h"

#include <c10/cuda/CUDAGuard.h>

#include "collectives/await_cuda.h"
#include "collectives/error.h"

namespace zipccl {

void FrameChecks::add(std::shared_ptr<at::cuda::CUDAEvent> done, Engine::Pending pending) {
  if (!pending.statuses.defined()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.push_back({std::move(done), std::move(pending)});
}

void FrameChecks::poll() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!entries_.empty() && entries_.front().done->query()) check_oldest();
}

void FrameChecks::poll_all(const Engine::Watch& watch) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!entries_.empty()) {
    await(*entries_.front().done, watch);
    check_oldest();
  }
}

void FrameChecks::check_oldest() {
  const Engine::Pending pending = std::move(entries_.front().pending);
  entries_.pop_front();
  const int32_t* s = pending.statuses.const_data_ptr<int32_t>();
  for (size_t i = 0; i < pending.what.size(); ++i) check(static_cast<Status>(s[i]), pending.what[i]);
}

CudaWork::CudaWork(int rank, c10d::OpType op, const char* title, const std::vector<at::Tensor>& inputs,
                   std::vector<at::Tensor> outputs, std::vector<at::Tensor> kept, c10::cuda::CUDAStream stream,
                   std::shared_ptr<FrameChecks> checks, Engine::Pending pending, bool strict, Engine::Watch watch)
    : Work(rank, op, title, inputs),
      outputs_(std::move(outputs)),
      kept_(std::move(kept)),
      stream_(stream),
      done_(std::make_shared<at::cuda::CUDAEvent>()),
      checks_(std::move(checks)),
      strict_(strict),
      watch_(std::move(watch)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{stream.device()})) {
  done_->record(stream_);
  checks_->add(done_, std::move(pending));
  c10::cuda::CUDAStreamGuard guard(stream_);  // the future records its events here
  future_->markCompleted(c10::IValue(outputs_));
  finish();
}

CudaWork::~CudaWork() {
  // Nobody waited: whoever frees these tensors knows nothing of our stream, so tell the allocator.
  for (const at::Tensor& t : kept_)
    if (t.defined() && t.is_cuda()) t.record_stream(stream_);
}

bool CudaWork::wait(std::chrono::milliseconds) {
  done_->block(c10::cuda::getCurrentCUDAStream(stream_.device_index()));
  {
    std::lock_guard<std::mutex> lock(kept_mutex_);
    kept_.clear();
  }
  if (strict_)
    checks_->poll_all(watch_);
  else
    checks_->poll();
  return true;
}

}  // namespace zipccl

#endif  // ZIPCCL_WITH_CUDA
