#include "collectives/words.h"

namespace zipccl {

namespace {
at::Tensor host_words(const std::vector<int64_t>& words) { return at::tensor(words, at::kLong); }
at::Tensor host_words(int64_t n) { return at::empty({n}, at::kLong); }

std::vector<int64_t> to_vector(const at::Tensor& t) {
  const int64_t* p = t.const_data_ptr<int64_t>();
  return {p, p + t.numel()};
}
}  // namespace

Engine::Reading begin_all_gather_words(const Place& place, const at::Tensor& own) {
  const int64_t n = own.numel() * place.world();
  if (place.host == nullptr) {
    at::Tensor all = place.engine.empty(n, at::kLong);
    place.messages.all_gather(all, own);
    return place.engine.begin_to_host(all);
  }
  return [host = place.host, read = place.engine.begin_to_host(own), n] {
    at::Tensor mine = host_words(read()), all = host_words(n);
    host->run([&](const Messages& messages) { messages.all_gather(all, mine); });
    return to_vector(all);
  };
}

std::vector<int64_t> all_gather_words(const Place& place, const at::Tensor& own) {
  return begin_all_gather_words(place, own)();
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
  if (place.host == nullptr) {
    place.messages.broadcast(words, root);
    return place.engine.to_host(words);
  }
  at::Tensor shared = place.rank() == root ? host_words(place.engine.to_host(words)) : host_words(words.numel());
  place.host->run([&](const Messages& messages) { messages.broadcast(shared, root); });
  return to_vector(shared);
}

}  // namespace zipccl
