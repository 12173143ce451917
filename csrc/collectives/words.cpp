#include "collectives/words.h"

#include <algorithm>

namespace zipccl {

namespace {
at::Tensor host_words(const std::vector<int64_t>& words) { return at::tensor(words, at::kLong); }
at::Tensor host_words(int64_t n) { return at::empty({n}, at::kLong); }

std::vector<int64_t> to_vector(const at::Tensor& t) {
  const int64_t* p = t.const_data_ptr<int64_t>();
  return {p, p + t.numel()};
}

// The words behind their call.
at::Tensor with_call(const at::Tensor& words, const CallId& call) {
  return at::cat({host_words(std::vector<int64_t>{call.word()}), words});
}

std::string another_call(const Place& place, int rank, const std::string& differs) {
  return place.what + ": rank " + std::to_string(rank) + " calls with " + differs +
         "; every rank must make the same call";
}
}  // namespace

void check_same_calls(const Place& place, const CallId& own, const int64_t* calls, int64_t stride) {
  for (int r = 0; r < place.world(); ++r) {
    const std::string differs = own.differs(calls[r * stride]);
    if (!differs.empty()) throw SharedError(another_call(place, r, differs));
  }
}

Engine::Reading begin_all_gather_words(const Place& place, const at::Tensor& own, const CallId& call) {
  const int64_t n = own.numel(), world = place.world();
  if (own.is_cpu()) {
    at::Tensor all = host_words(world * (n + 1));
    place.messages.all_gather_words(all, with_call(own, call));
    check_same_calls(place, call, all.const_data_ptr<int64_t>(), n + 1);
    return place.engine.begin_to_host(all.view({world, n + 1}).narrow(1, 1, n).contiguous());
  }
  if (place.host == nullptr) {
    at::Tensor all = place.engine.empty(n * world, at::kLong);
    place.messages.all_gather_words(all, own);
    return place.engine.begin_to_host(all);
  }
  return [host = place.host, read = place.engine.begin_to_host(own), n, world] {
    at::Tensor mine = host_words(read()), all = host_words(n * world);
    host->run([&](const Messages& messages) { messages.all_gather_words(all, mine); });
    return to_vector(all);
  };
}

std::vector<int64_t> all_gather_words(const Place& place, const at::Tensor& own, const CallId& call) {
  return begin_all_gather_words(place, own, call)();
}

Engine::Reading begin_all_to_all_words(const Place& place, const at::Tensor& own) {
  if (place.host == nullptr) {
    at::Tensor theirs = place.engine.empty(own.numel(), at::kLong);
    place.messages.all_to_all_words(theirs, own);
    return place.engine.begin_to_host(at::cat({own, theirs}));
  }
  return [host = place.host, read = place.engine.begin_to_host(own)] {
    at::Tensor mine = host_words(read()), theirs = host_words(mine.numel());
    host->run([&](const Messages& messages) { messages.all_to_all_words(theirs, mine); });
    return to_vector(at::cat({mine, theirs}));
  };
}

std::vector<int64_t> all_to_all_words(const Place& place, const at::Tensor& own) {
  return begin_all_to_all_words(place, own)();
}

std::vector<int64_t> broadcast_words(const Place& place, at::Tensor words, int root) {
  if (words.is_cpu()) {
    at::Tensor shared = with_call(words, place.call);
    place.messages.broadcast_words(shared, root);
    // The root does not hear of it: unlike those of check_same_calls(), this error is this rank's own.
    const std::string differs = place.call.differs(shared.const_data_ptr<int64_t>()[0]);
    if (!differs.empty()) throw Error(another_call(place, root, differs));
    return to_vector(shared.narrow(0, 1, words.numel()));
  }
  if (place.host == nullptr) {
    place.messages.broadcast_words(words, root);
    return place.engine.to_host(words);
  }
  at::Tensor shared = place.rank() == root ? host_words(place.engine.to_host(words)) : host_words(words.numel());
  place.host->run([&](const Messages& messages) { messages.broadcast_words(shared, root); });
  return to_vector(shared);
}

}  // namespace zipccl
