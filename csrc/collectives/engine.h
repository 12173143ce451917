// What a collective needs from a device: scratch, the codec on tensors, and sizes back on the host. One implementation
// per device, so that a collective is written once.
//
// CPU: every call is done when it returns. CUDA: every call is enqueued on the current stream; only to_host() waits.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace zipccl {

// DType of a torch scalar type; false for types a frame cannot carry (quantised types).
bool frame_dtype(at::ScalarType type, DType* out);
at::ScalarType scalar_type(DType dtype);

struct Decode {
  at::Tensor frame;  // uint8, 1-D, contiguous, starting on kFrameAlign
  at::Tensor dst;    // contiguous; dtype and count the frame must have
  std::string from;  // who made the frame, for errors
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Multiprocessors that calls after this one use at a time; 0: all. CUDA.
  virtual void limit_sms(int) {}

  virtual at::Tensor empty(int64_t n, at::ScalarType type) = 0;

  // Bytes held for scratch between calls, outside of torch's caching allocators.
  virtual uint64_t scratch_bytes() const { return 0; }
  virtual void release_scratch() {}

  // Encodes src[i] (contiguous, one dtype) into frames[i] (uint8, at least frame_bound()); sizes[i] gets its bytes.
  virtual void encode(const std::vector<at::Tensor>& src, const FrameOptions& options,
                      const std::vector<at::Tensor>& frames, at::Tensor sizes) = 0;

  // Decodes frames that were made with `options`, or raw ones of that dtype. `what` names the operation in errors. CPU:
  // throws on a bad frame. CUDA: the status is kept on the device for take_statuses().
  virtual void decode(const std::vector<Decode>& jobs, const FrameOptions& options, const std::string& what) = 0;

  // dst = decode_sum() of the inputs, in their order. Sources that are frames name who made them; the others are
  // contiguous tensors of dtype options.in. `code`: of the frames that are not raw. Errors as for decode().
  struct Addend {
    at::Tensor data;
    bool is_frame;
    std::string from;
  };
  virtual void decode_sum(const std::vector<Addend>& addends, const SumOptions& options, at::Tensor dst,
                          const std::string& what, Code code = Code::fast) = 0;

  virtual std::vector<int64_t> to_host(const at::Tensor& values) = 0;
  // The same in two steps: what is enqueued before the result is called is not waited for (CUDA).
  using Reading = std::function<std::vector<int64_t>()>;
  virtual Reading begin_to_host(const at::Tensor& values) {
    return [this, values] { return to_host(values); };
  }

  // Called now and then while to_host() waits for other ranks (CUDA), with how long that has been; what it throws ends
  // the wait.
  using Watch = std::function<void(std::chrono::milliseconds)>;
  virtual void set_watch(Watch) {}

  // Statuses of decode() calls that are not known yet (CUDA), as a tensor the caller reads when its stream has passed;
  // undefined if there is nothing to check.
  struct Pending {
    at::Tensor statuses;            // int32, host memory
    std::vector<std::string> what;  // one text per status
  };
  virtual Pending take_statuses() { return {}; }
};

std::unique_ptr<Engine> make_cpu_engine();
#ifdef ZIPCCL_WITH_CUDA
std::unique_ptr<Engine> make_cuda_engine(at::Device device);
#endif

}  // namespace zipccl
