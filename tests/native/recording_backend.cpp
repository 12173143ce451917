// For the tests of ZipBackend: Recorder, a c10d::Backend that moves nothing and writes down every virtual call, and
// invoke(), which makes any virtual call on any backend.
//
// What a Recorder does beside recording is scripted from Python: replies that stand in for other ranks' data, a call
// that fails, all-gathers that hang.
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
using std::chrono::milliseconds;

class DoneWork : public c10d::Work {
 public:
  explicit DoneWork(Tensors outputs) : outputs_(std::move(outputs)) { finish(); }
  bool wait(milliseconds) override { return true; }
  Tensors result() override { return outputs_; }

 private:
  Tensors outputs_;
};

// ---- options as text ----

std::string show(const c10d::ReduceOp& op) { return std::to_string(static_cast<int>(op.op_)); }

template <typename O>
std::string common(const O& o) {
  return "timeout=" + std::to_string(o.timeout.count()) + " async=" + std::to_string(o.asyncOp);
}
std::string show(const c10d::BroadcastOptions& o) {
  return common(o) + " root=" + std::to_string(o.rootRank) + "/" + std::to_string(o.rootTensor);
}
std::string show(const c10d::AllreduceOptions& o) {
  return common(o) + " op=" + show(o.reduceOp) + " sparse=" + std::to_string(o.sparseIndices.has_value());
}
std::string show(const c10d::ReduceOptions& o) {
  return common(o) + " op=" + show(o.reduceOp) + " root=" + std::to_string(o.rootRank) + "/" +
         std::to_string(o.rootTensor);
}
std::string show(const c10d::AllgatherOptions& o) { return common(o); }
std::string show(const c10d::GatherOptions& o) { return common(o) + " root=" + std::to_string(o.rootRank); }
std::string show(const c10d::ScatterOptions& o) { return common(o) + " root=" + std::to_string(o.rootRank); }
std::string show(const c10d::ReduceScatterOptions& o) { return common(o) + " op=" + show(o.reduceOp); }
std::string show(const c10d::AllToAllOptions& o) { return common(o); }
// No streams: some toolchains link a second standard library into extensions, whose streams then lack their locale.
std::string shown(int n) { return std::to_string(n); }
std::string shown(int64_t n) { return std::to_string(n); }
std::string shown(bool b) { return std::to_string(b); }
std::string shown(const std::string& s) { return s; }
std::string shown(at::Device d) { return d.str(); }
std::string shown(caffe2::TypeMeta t) { return std::string(t.name()); }
std::string shown(const std::vector<int64_t>& numbers) {
  std::string s;
  for (int64_t n : numbers) s += std::to_string(n) + ",";
  return s;
}

template <typename... T>
std::string text(const T&... parts) {
  std::string s;
  ((s += shown(parts) + ' '), ...);
  return s;
}

std::string show(const c10d::BarrierOptions& o) {
  return common(o) + " device=" + (o.device ? o.device->str() : "none") + " ids=" + shown(o.device_ids);
}

Tensors join(const Tensors& a, const Tensors& b) {
  Tensors all = a;
  all.insert(all.end(), b.begin(), b.end());
  return all;
}
Tensors flat(const TensorLists& lists) {
  Tensors all;
  for (const Tensors& list : lists) all = join(all, list);
  return all;
}

// ---- the backend ----

struct Call {
  std::string name;
  Tensors tensors;
  std::string arguments;
};

class Recorder : public c10d::Backend {
 public:
  Recorder(int rank, int size) : Backend(rank, size) { init(); }

  // ---- script ----
  // The next call of `name` finds these values in its outputs.
  void reply(const std::string& name, Tensors values) {
    std::lock_guard<std::mutex> lock(mutex_);
    (name == "recv" ? messages_ : replies_[name]).push_back(std::move(values));
  }
  void fail_next(const std::string& name, const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    failures_[name] = error;
  }
  // While held, all-gathers and all-reduces do not return.
  void hold(bool held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
    released_.notify_all();
  }
  std::vector<Call> take_calls() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(calls_);
  }
  WorkPtr last_work() { return last_work_; }

  // ---- virtuals, in the order of Backend.hpp ----
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return note("supportsCoalescing"), true; }
  bool supportsTimeEstimation() const override { return true; }
  bool supportsShrinking() const override { return true; }
  BackendPtr shrink(const std::vector<int64_t>&, int, const OptionsPtr&) override { return note("shrink"), nullptr; }
  void setTimeout(milliseconds t) override { note("setTimeout", {}, text(t.count())); }
  void startCoalescing() override { note("startCoalescing"); }
  WorkPtr endCoalescing() override { return work("endCoalescing", {}, {}, ""); }
  const std::string getBackendName() const override { return "recorder"; }
  OptionsPtr getBackendOptions() override { return note("getBackendOptions"), nullptr; }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { return work("broadcast", t, {}, show(o)); }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return work("allreduce", t, {}, show(o), /*can_hang=*/true);
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return work("allreduce_sparse", t, {}, show(o));
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return work("allreduce_coalesced", t, {}, show(o));
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override { return work("reduce", t, {}, show(o)); }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return gathered("allgather", flat(out), in, out, show(o));
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return gathered("_allgather_base", {out}, {in}, {out.chunk(size_)}, show(o));
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return work("allgather_coalesced", flat(out), in, show(o));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    TensorLists shards;
    for (const at::Tensor& t : out) shards.push_back(t.chunk(size_));
    return gathered("allgather_into_tensor_coalesced", out, in, shards, show(o));
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return work("gather", flat(out), in, show(o));
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return work("scatter", out, flat(in), show(o));
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    return work("reduce_scatter", out, flat(in), show(o));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return work("_reduce_scatter_base", {out}, {in}, show(o));
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return work("reduce_scatter_tensor_coalesced", out, in, show(o));
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    return work("alltoall_base", {out}, {in}, text(out_splits, in_splits, show(o)));
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return work("alltoall", out, in, show(o));
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool all) override {
    note("monitoredBarrier", {}, text(show(o), all));
  }
  void setSequenceNumberForGroup() override { note("setSequenceNumberForGroup"); }
  uint64_t getSequenceNumberForGroup() override { return note("getSequenceNumberForGroup"), 77; }
  // As if the other rank had sent what this one did, unless a reply says otherwise. A reply that is shorter than what
  // is received stands at its end, behind what this rank sends there: words behind the word that all ranks have alike.
  WorkPtr recv(Tensors& t, int src, int tag) override {
    at::Tensor own = t[0];
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!messages_.empty()) {
        const at::Tensor reply = messages_.front()[0].view(at::kByte);
        own = t[0].narrow(0, 0, t[0].numel() - reply.numel());
        t[0].narrow(0, own.numel(), reply.numel()).copy_(reply);
        messages_.pop_front();
      }
      received_[{src, tag}] = {own, t[0].numel()};
    }
    return work("recv", t, {}, text(src, tag));
  }
  WorkPtr send(Tensors& t, int dst, int tag) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto it = received_.find({dst, tag});
      if (it != received_.end() && it->second.second == t[0].numel())
        it->second.first.copy_(t[0].narrow(0, 0, it->second.first.numel()));
      if (it != received_.end()) received_.erase(it);
    }
    return work("send", t, {}, text(dst, tag));
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override { return work("recvAnysource", t, {}, text(tag)); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return work("barrier", {}, {}, show(o)); }
  void registerOnCompletionHook(Hook&& hook) override {
    note("registerOnCompletionHook", {}, text(static_cast<bool>(hook)));
  }
  void waitForPendingWorks() override { note("waitForPendingWorks"); }
  void enableCollectivesTiming() override { note("enableCollectivesTiming"); }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>&, const OptionsPtr&) override {
    return note("split"), nullptr;
  }
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>&, const OptionsPtr&, const int&, const int&) override {
    return note("merge"), nullptr;
  }
  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    note("setGroupUid", {}, uid);
  }
  void eagerConnectSingleDevice(at::Device d) override { note("eagerConnectSingleDevice", {}, d.str()); }
  c10d::ErrorType getError() override { return note("getError"), c10d::ErrorType::SUCCESS; }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return note("getMemAllocator"), nullptr; }
  at::Tensor allocateTensor(long n, at::TensorOptions o) override {
    note("allocateTensor", {}, text(n, o.device(), o.dtype()));
    return at::full({n}, 7, o.device(at::kCPU));
  }
  bool supportsTensorAlloc(c10::DeviceIndex d) override {
    return note("supportsTensorAlloc", {}, text(static_cast<int>(d))), true;
  }
  void abort() override { note("abort"); }
  void shutdown() override { note("shutdown"); }

 private:
  void note(const std::string& name, Tensors tensors = {}, const std::string& arguments = "") const {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back({name, std::move(tensors), arguments});
  }

  WorkPtr work(const std::string& name, const Tensors& out, const Tensors& in, const std::string& arguments,
               bool can_hang = false) {
    note(name, join(out, in), arguments);
    std::unique_lock<std::mutex> lock(mutex_);
    if (can_hang) released_.wait(lock, [&] { return !held_; });
    if (auto it = failures_.find(name); it != failures_.end()) {
      std::string error = it->second;
      failures_.erase(it);
      throw std::runtime_error(error);
    }
    auto& queue = replies_[name];
    if (!queue.empty()) {
      TORCH_CHECK(queue.front().size() == out.size(), "a reply to " + name + " needs another number of tensors");
      for (size_t i = 0; i < out.size(); ++i) out[i].copy_(queue.front()[i]);
      queue.pop_front();
    }
    last_work_ = c10::make_intrusive<DoneWork>(out);
    return last_work_;
  }

  // As if every rank had sent what this one did, unless a reply says otherwise. Uneven shards: only the own one.
  WorkPtr gathered(const std::string& name, const Tensors& out, const Tensors& in, const TensorLists& shards,
                   const std::string& arguments) {
    for (size_t i = 0; i < in.size(); ++i)
      for (const at::Tensor& shard : shards[i])
        if (shard.numel() == in[i].numel()) at::Tensor(shard).copy_(in[i].view_as(shard));
    return work(name, out, in, arguments, /*can_hang=*/true);
  }

  mutable std::mutex mutex_;
  std::condition_variable released_;
  mutable std::vector<Call> calls_;
  std::map<std::string, std::deque<Tensors>> replies_;
  std::deque<Tensors> messages_;                                            // replies to recv
  std::map<std::pair<int, int>, std::pair<at::Tensor, int64_t>> received_;  // by rank and tag: what a send fills in
  std::map<std::string, std::string> failures_;
  WorkPtr last_work_;
  bool held_ = false;
};

// ---- any virtual on any backend, with arguments unlike the defaults ----

template <typename O>
O options() {
  O o;
  o.timeout = milliseconds(1234);
  o.asyncOp = false;
  return o;
}
template <typename O>
O rooted() {
  O o = options<O>();
  o.rootRank = 1;
  return o;
}
template <typename O>
O reducing() {
  O o = options<O>();
  o.reduceOp = c10d::ReduceOp::MAX;
  return o;
}
c10d::BarrierOptions barrier_options(at::Device device) {
  auto o = options<c10d::BarrierOptions>();
  o.device = device;
  return o;
}

// t: tensors of n, 2n, n and n values. `device` is for calls that name a device and have no tensors.
py::object invoke(c10d::Backend& b, const std::string& name, Tensors t, at::Device device) {
  Tensors small{t[0]}, large{t[1]};
  TensorLists lists{{t[2], t[3]}};
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto result = [](auto&& value) { return py::cast(std::forward<decltype(value)>(value)); };

  if (name == "supportsSplitting") return result(b.supportsSplitting());
  if (name == "supportsCoalescing") return result(b.supportsCoalescing());
  if (name == "supportsTimeEstimation") return result(b.supportsTimeEstimation());
  if (name == "supportsShrinking") return result(b.supportsShrinking());
  if (name == "shrink") return result(b.shrink({1}, 0, nullptr));
  if (name == "setTimeout") return b.setTimeout(milliseconds(4321)), py::none();
  if (name == "startCoalescing") return b.startCoalescing(), py::none();
  if (name == "endCoalescing") return result(b.endCoalescing());
  if (name == "getBackendName") return result(b.getBackendName());
  if (name == "getBackendOptions") return result(b.getBackendOptions());
  if (name == "broadcast") return result(b.broadcast(small, rooted<c10d::BroadcastOptions>()));
  if (name == "allreduce") return result(b.allreduce(small, reducing<c10d::AllreduceOptions>()));
  if (name == "allreduce_sparse") return result(b.allreduce_sparse(small, reducing<c10d::AllreduceOptions>()));
  if (name == "allreduce_coalesced")
    return result(b.allreduce_coalesced(small, reducing<c10d::AllreduceCoalescedOptions>()));
  if (name == "reduce") {
    auto o = reducing<c10d::ReduceOptions>();
    o.rootRank = 1;
    return result(b.reduce(small, o));
  }
  if (name == "allgather") return result(b.allgather(lists, small, options<c10d::AllgatherOptions>()));
  if (name == "_allgather_base")
    return result(b._allgather_base(large[0], small[0], options<c10d::AllgatherOptions>()));
  if (name == "allgather_coalesced")
    return result(b.allgather_coalesced(lists, small, options<c10d::AllgatherOptions>()));
  if (name == "allgather_into_tensor_coalesced")
    return result(b.allgather_into_tensor_coalesced(large, small, options<c10d::AllgatherOptions>()));
  if (name == "gather") return result(b.gather(lists, small, rooted<c10d::GatherOptions>()));
  if (name == "scatter") return result(b.scatter(small, lists, rooted<c10d::ScatterOptions>()));
  if (name == "reduce_scatter") return result(b.reduce_scatter(small, lists, reducing<c10d::ReduceScatterOptions>()));
  if (name == "_reduce_scatter_base")
    return result(b._reduce_scatter_base(small[0], large[0], reducing<c10d::ReduceScatterOptions>()));
  if (name == "reduce_scatter_tensor_coalesced")
    return result(b.reduce_scatter_tensor_coalesced(small, large, reducing<c10d::ReduceScatterOptions>()));
  if (name == "alltoall_base") {
    std::vector<int64_t> out_splits{1, 2}, in_splits{2, 1};
    return result(b.alltoall_base(large[0], small[0], out_splits, in_splits, options<c10d::AllToAllOptions>()));
  }
  if (name == "alltoall") return result(b.alltoall(lists[0], small, options<c10d::AllToAllOptions>()));
  if (name == "monitoredBarrier") return b.monitoredBarrier(barrier_options(device), true), py::none();
  if (name == "setSequenceNumberForGroup") return b.setSequenceNumberForGroup(), py::none();
  if (name == "getSequenceNumberForGroup") return result(b.getSequenceNumberForGroup());
  if (name == "send") return result(b.send(small, 1, 5));
  if (name == "recv") return result(b.recv(small, 1, 5));
  if (name == "recvAnysource") return result(b.recvAnysource(small, 5));
  if (name == "barrier") return result(b.barrier(barrier_options(device)));
  if (name == "registerOnCompletionHook") {
    b.registerOnCompletionHook([](const std::shared_ptr<c10d::WorkInfo>&) {});
    return result(b.hasHooks());
  }
  if (name == "waitForPendingWorks") return b.waitForPendingWorks(), py::none();
  if (name == "enableCollectivesTiming") return b.enableCollectivesTiming(), py::none();
  if (name == "split") return result(b.split(store, {0}, nullptr));
  if (name == "merge") return result(b.merge(store, nullptr, 0, 2));
  if (name == "setGroupUid") {
    b.setGroupUid("uid");
    return result(b.getGroupUid());
  }
  if (name == "eagerConnectSingleDevice") return b.eagerConnectSingleDevice(device), py::none();
  if (name == "getError") return result(static_cast<int>(b.getError()));
  if (name == "getMemAllocator") return result(b.getMemAllocator() == nullptr);
  if (name == "allocateTensor") return result(b.allocateTensor(9, at::TensorOptions(at::kDouble).device(device)));
  if (name == "supportsTensorAlloc") return result(b.supportsTensorAlloc(3));
  if (name == "abort") return b.abort(), py::none();
  if (name == "shutdown") return b.shutdown(), py::none();
  throw py::key_error("invoke() does not know " + name);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch.distributed");
  py::class_<Call>(m, "Call")
      .def_readonly("name", &Call::name)
      .def_readonly("tensors", &Call::tensors)
      .def_readonly("arguments", &Call::arguments)
      .def("__repr__", [](const Call& c) { return c.name + "(" + c.arguments + ")"; });
  py::class_<Recorder, c10::intrusive_ptr<Recorder>, c10d::Backend>(m, "Recorder")
      .def(py::init([](int rank, int size) { return c10::make_intrusive<Recorder>(rank, size); }))
      // Without the GIL: worker threads may need it for tensors that they let go of with our mutex held.
      .def("reply", &Recorder::reply, py::call_guard<py::gil_scoped_release>())
      .def("fail_next", &Recorder::fail_next, py::call_guard<py::gil_scoped_release>())
      .def("hold", &Recorder::hold, py::call_guard<py::gil_scoped_release>())
      .def("take_calls", &Recorder::take_calls, py::call_guard<py::gil_scoped_release>())
      .def("last_work", &Recorder::last_work);
  m.def("invoke", &invoke);
  // Python has no method for it: torch reaches it through functional collectives and coalescing managers.
  m.def("all_gather_coalesced", [](c10d::Backend& b, Tensors out, Tensors in) {
    return b.allgather_into_tensor_coalesced(out, in, c10d::AllgatherOptions());
  });
}
