#include "collectives/words.h"

#include <algorithm>
#include <tuple>

namespace zipccl {

namespace {
at::Tensor host_words(const std::vector<int64_t>& words) { return at::tensor(words, at::kLong); }
at::Tensor host_words(int64_t n) { return at::empty({n}, at::kLong); }

std::vector<int64_t> to_vector(const at::Tensor& t) {
  const int64_t* p = t.const_data_ptr<int64_t>();
  return {p, p + t.numel()};
}

SharedError another_call(const Place& place, int rank, const std::string& differs) {
  return SharedError(place.what + ": rank " + std::to_string(rank) + " calls with " + differs +
                     "; every rank must make the same call");
}

constexpr int64_t kOpening = 1 + std::tuple_size_v<Opening::Words>;  // words from rank to rank
}  // namespace

Opening::Opening(const Place& place, const CallId& call, const std::vector<Words>& told)
    : place_(place), call_(call), told_(host_words(kOpening * place.world())), heard_(at::empty_like(told_)) {
  auto* word = told_.mutable_data_ptr<int64_t>();
  for (const Words& words : told) {
    *word++ = call.word();
    word = std::copy(words.begin(), words.end(), word);
  }
  exchange_ = place.messages.begin_all_to_all_words(heard_, told_);
}

std::vector<Opening::Words> Opening::hear() {
  try {
    exchange_.wait();
  } catch (const std::exception& e) {
    throw Error(place_.what + ": " + e.what() + " (call number " + std::to_string(call_.number()) + " of the group)");
  }
  const auto* word = heard_.const_data_ptr<int64_t>();
  std::vector<Words> heard(place_.world());
  for (int r = 0; r < place_.world(); ++r, word += kOpening) {
    const std::string differs = call_.differs(word[0]);
    if (!differs.empty()) throw another_call(place_, r, differs);
    std::copy(word + 1, word + kOpening, heard[r].begin());
  }
  return heard;
}

void check_in_step(const Place& place, const CallId& call, uint64_t history) {
  const Opening::Words own = {static_cast<int64_t>(history)};
  const auto heard = Opening(place, call, std::vector<Opening::Words>(place.world(), own)).hear();
  for (int r = 0; r < place.world(); ++r)
    if (heard[r] != own)
      throw SharedError(place.what + ": rank " + std::to_string(r) +
                        " has made other calls than this rank before, in dtype or size; what those that travelled raw "
                        "returned may be wrong");
}

Engine::Reading begin_all_gather_words(const Place& place, const at::Tensor& own, const CallId& call) {
  const int64_t n = own.numel(), world = place.world();
  if (own.is_cpu()) {
    // What does not fit the opening follows it.
    const bool fits = n <= kOpening - 1;
    Opening::Words words{};
    if (fits) std::copy_n(own.const_data_ptr<int64_t>(), n, words.begin());
    const auto heard = Opening(place, call, std::vector<Opening::Words>(world, words)).hear();
    at::Tensor all = host_words(world * n);
    if (fits)
      for (int64_t r = 0; r < world; ++r) std::copy_n(heard[r].begin(), n, all.mutable_data_ptr<int64_t>() + r * n);
    else
      place.messages.all_gather_words(all, own);
    return [all] { return to_vector(all); };
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

std::vector<int64_t> broadcast_words(const Place& place, at::Tensor words, int root, const CallId& call) {
  if (words.is_cpu()) {  // all hear of all, so that all are told of a call that differs
    if (place.rank() != root) words.zero_();
    const std::vector<int64_t> all = all_gather_words(place, words, call);
    return {all.begin() + root * words.numel(), all.begin() + (root + 1) * words.numel()};
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
