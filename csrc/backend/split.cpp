// Splitting a group. The parts' inner backends are made where the group's own are: python/zipccl/backend.py.
#include "backend/zip_backend.h"

namespace zipccl {

namespace {
ZipBackend::Splitter& splitter() {
  static auto* made = new ZipBackend::Splitter;  // never destroyed: groups may outlive static objects
  return *made;
}
}  // namespace

void ZipBackend::set_splitter(Splitter s) { splitter() = std::move(s); }

bool ZipBackend::supportsSplitting() const { return splitter() != nullptr; }

ZipBackend::OptionsPtr ZipBackend::getBackendOptions() {
  return c10::make_intrusive<GroupOptions>((cuda_ ? cuda_ : cpu_)->getBackendOptions()->timeout);
}

BackendPtr ZipBackend::split(const StorePtr& store, const std::vector<int>& ranks, const OptionsPtr& opts) {
  if (store != split_store_) {
    TORCH_CHECK(splitter(), "zipccl: import zipccl before a group is split");
    BackendPtr part = splitter()(*this, store, ranks, opts);
    split_store_ = store;
    split_part_ = c10::weak_intrusive_ptr<c10d::Backend>(part);
    return part;
  }
  return split_part_.lock();
}

}  // namespace zipccl
