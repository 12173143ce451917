#include "transport/pairs.h"

#include <ATen/core/grad_mode.h>

#include <limits>
#include <stdexcept>
#include <string>

namespace zipccl {

namespace {
std::string text_of(const std::exception& e) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&e);
  return torchs ? torchs->what_without_backtrace() : e.what();
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}
}  // namespace

void Pairs::Exchange::wait() {
  const auto works = std::move(works_);
  works_.clear();
  std::vector<int> silent, deaf;
  std::string error;
  for (const Begun& one : works) {
    try {
      one.work->wait(timeout_);
    } catch (const std::exception& e) {
      if (one.rank < 0) throw;
      if (silent.empty() && deaf.empty()) error = text_of(e);
      (one.receives ? silent : deaf).push_back(one.rank);
    }
  }
  kept_.clear();
  if (!silent.empty()) throw std::runtime_error("nothing came from " + listed(silent) + ": " + error);
  if (!deaf.empty()) throw std::runtime_error("what was sent did not reach " + listed(deaf) + ": " + error);
}

int Pairs::next_tag() {
  const int tag = tag_;
  tag_ = tag_ == std::numeric_limits<int>::max() ? 0 : tag_ + 1;
  return tag;
}

Pairs::Exchange Pairs::begin(const std::vector<Parcel>& sends, const std::vector<Parcel>& receives, at::Device device) {
  at::NoGradGuard no_grad;
  Exchange exchange;
  for (const auto* list : {&sends, &receives})
    for (const Parcel& p : *list) exchange.kept_.push_back(p.bytes);
  if (device.is_cpu()) {
    // Else gloo's own, since the group was made.
    if (const auto timeout = timeout_.load(); timeout != c10d::kUnsetTimeout) exchange.timeout_ = timeout;
    const int tag = next_tag();
    for (const Parcel& p : receives) {
      if (p.bytes.numel() == 0) continue;
      std::vector<at::Tensor> one{p.bytes};
      exchange.works_.push_back({inner_->recv(one, p.rank, tag), p.rank, /*receives=*/true});
    }
    for (const Parcel& p : sends) {
      if (p.bytes.numel() == 0) continue;
      std::vector<at::Tensor> one{p.bytes};
      exchange.works_.push_back({inner_->send(one, p.rank, tag), p.rank, /*receives=*/false});
    }
    return exchange;
  }
  // Not as an all-to-all: there torch sends empty messages too, which ranks without a part would leave behind.
  inner_->startCoalescing();
  try {
    for (const Parcel& p : receives) {
      std::vector<at::Tensor> one{p.bytes};
      if (p.bytes.numel() > 0) inner_->recv(one, p.rank, 0);
    }
    for (const Parcel& p : sends) {
      std::vector<at::Tensor> one{p.bytes};
      if (p.bytes.numel() > 0) inner_->send(one, p.rank, 0);
    }
  } catch (...) {
    try {
      inner_->endCoalescing();
    } catch (const std::exception&) {  // the first error tells more
    }
    throw;
  }
  if (auto work = inner_->endCoalescing()) exchange.works_.push_back({std::move(work)});
  return exchange;
}

}  // namespace zipccl
