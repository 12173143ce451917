#include "transport/pairs.h"

#include <ATen/core/grad_mode.h>

#include <limits>

namespace zipccl {

void Pairs::Exchange::wait() {
  const auto works = std::move(works_);
  works_.clear();
  std::exception_ptr error;
  for (const auto& work : works) {
    try {
      work->wait(timeout_);
    } catch (const std::exception&) {
      if (!error) error = std::current_exception();
    }
  }
  kept_.clear();
  if (error) std::rethrow_exception(error);
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
      exchange.works_.push_back(inner_->recv(one, p.rank, tag));
    }
    for (const Parcel& p : sends) {
      if (p.bytes.numel() == 0) continue;
      std::vector<at::Tensor> one{p.bytes};
      exchange.works_.push_back(inner_->send(one, p.rank, tag));
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
  if (auto work = inner_->endCoalescing()) exchange.works_.push_back(std::move(work));
  return exchange;
}

}  // namespace zipccl
