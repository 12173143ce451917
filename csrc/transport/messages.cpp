#include "transport/messages.h"

#include <ATen/core/grad_mode.h>

namespace zipccl {

namespace {
// asyncOp = false lets NCCL work on the current stream instead of its own, which saves two events a call.
template <typename Options>
Options blocking(std::chrono::milliseconds timeout) {
  Options o;
  o.timeout = timeout;
  o.asyncOp = false;
  return o;
}

// Backends may return no work for a call that is already ordered.
void finish(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

// Of n words; broadcasts apart, whose other end does not answer. Below: data (between_some).
int word_tag(int64_t n, bool rooted) { return static_cast<int>(2 * n + (rooted ? 1 : 0)); }

at::Tensor bytes(const at::Tensor& words) { return words.view(at::kByte); }
}  // namespace

void Messages::all_gather(at::Tensor out, at::Tensor in) const {
  at::NoGradGuard no_grad;
  if (in.is_cpu() && world() == 2) {  // gloo's ring would send both ways over one connection: see all_to_all()
    at::Tensor parts[] = {out.narrow(0, 0, in.numel()), out.narrow(0, in.numel(), in.numel())};
    const int other = 1 - rank();
    auto exchange = Pairs(inner_, timeout_).begin({{other, in}}, {{other, parts[other]}}, in.device());
    parts[rank()].copy_(in);
    return exchange.wait();
  }
  finish(inner_->_allgather_base(out, in, blocking<c10d::AllgatherOptions>(timeout_)));
}

void Messages::all_gather(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins) const {
  if (outs.size() == 1 || (ins[0].is_cpu() && world() == 2)) {
    for (size_t i = 0; i < outs.size(); ++i) all_gather(outs[i], ins[i]);
    return;
  }
  at::NoGradGuard no_grad;
  finish(inner_->allgather_into_tensor_coalesced(outs, ins, blocking<c10d::AllgatherOptions>(timeout_)));
}

// gloo's own sends before it asks for what comes back. A rank that is late then finds its peer waiting, and its request
// queues behind the megabytes that it sends at once: the connection carries one direction after the other.
void Messages::all_to_all(std::vector<at::Tensor> receives, std::vector<at::Tensor> sends) const {
  if (sends[0].is_cpu()) return between_some(std::move(receives), std::move(sends));
  at::NoGradGuard no_grad;
  finish(inner_->alltoall(receives, sends, blocking<c10d::AllToAllOptions>(timeout_)));
}

void Messages::between_some(std::vector<at::Tensor> receives, std::vector<at::Tensor> sends) const {
  std::vector<Pairs::Parcel> to, from;
  for (int i = 1; i < world(); ++i) {  // each begins with another peer
    const int next = (rank() + i) % world(), last = (rank() - i + world()) % world();
    to.push_back({next, sends[next]});
    from.push_back({last, receives[last]});
  }
  Pairs(inner_, timeout_).begin(to, from, sends[0].device()).wait();
}

void Messages::all_gather_words(at::Tensor out, at::Tensor in) const {
  if (!in.is_cpu()) return all_gather(out, in);
  begin_all_to_all_words(out, in.repeat({world()})).wait();
}

void Messages::all_to_all_words(at::Tensor out, at::Tensor in) const {
  if (in.is_cpu()) return begin_all_to_all_words(out, in).wait();
  at::NoGradGuard no_grad;
  std::vector<int64_t> equal;
  finish(inner_->alltoall_base(out, in, equal, equal, blocking<c10d::AllToAllOptions>(timeout_)));
}

Pairs::Exchange Messages::begin_all_to_all_words(at::Tensor out, at::Tensor in) const {
  at::NoGradGuard no_grad;
  const int64_t n = in.numel() / world();
  std::vector<Pairs::Parcel> to, from;
  for (int r = 0; r < world(); ++r) {
    if (r == rank()) continue;
    to.push_back({r, bytes(in.narrow(0, r * n, n))});
    from.push_back({r, bytes(out.narrow(0, r * n, n))});
  }
  out.narrow(0, rank() * n, n).copy_(in.narrow(0, rank() * n, n));
  return Pairs(inner_, timeout_, word_tag(n, false)).begin(to, from, at::kCPU);
}

void Messages::broadcast_words(at::Tensor words, int root) const {
  if (!words.is_cpu()) return broadcast(words, root);
  std::vector<Pairs::Parcel> to, from;
  if (rank() != root) from.push_back({root, bytes(words)});
  for (int r = 0; r < world() && rank() == root; ++r)
    if (r != root) to.push_back({r, bytes(words)});
  Pairs(inner_, timeout_, word_tag(words.numel(), true)).begin(to, from, at::kCPU).wait();
}

void Messages::broadcast(at::Tensor values, int root) const {
  at::NoGradGuard no_grad;
  auto options = blocking<c10d::BroadcastOptions>(timeout_);
  options.rootRank = root;
  std::vector<at::Tensor> tensors{values};
  finish(inner_->broadcast(tensors, options));
}

void Messages::scatter(at::Tensor out, std::vector<at::Tensor> parts, int root) const {
  at::NoGradGuard no_grad;
  auto options = blocking<c10d::ScatterOptions>(timeout_);
  options.rootRank = root;
  std::vector<at::Tensor> outs{out};
  std::vector<std::vector<at::Tensor>> ins;
  if (rank() == root) ins.push_back(std::move(parts));
  finish(inner_->scatter(outs, ins, options));
}

void Messages::gather(std::vector<at::Tensor> parts, at::Tensor in, int root) const {
  at::NoGradGuard no_grad;
  auto options = blocking<c10d::GatherOptions>(timeout_);
  options.rootRank = root;
  std::vector<at::Tensor> ins{in};
  std::vector<std::vector<at::Tensor>> outs;
  if (rank() == root) outs.push_back(std::move(parts));
  finish(inner_->gather(outs, ins, options));
}

void Messages::all_reduce_max(at::Tensor values) const {
  at::NoGradGuard no_grad;
  auto options = blocking<c10d::AllreduceOptions>(timeout_);
  options.reduceOp = c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors{values};
  finish(inner_->allreduce(tensors, options));
}

}  // namespace zipccl
