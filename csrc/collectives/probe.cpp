#include "collectives/probe.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "collectives/traffic.h"
#include "collectives/words.h"

namespace zipccl {

namespace {
constexpr int64_t kFirstLinkBytes = 4 << 20;  // received per rank in the large all-gather
constexpr int64_t kMostLinkBytes = 64 << 20;
constexpr double kLongEnough = 8;          // times alpha: then the large all-gather tells the rate
constexpr int64_t kCodecValues = 2 << 20;  // 4 MiB of bf16
constexpr int kRuns = 3;

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Seconds of a call, until the device is done; the first run, which may build connections, does not count.
std::vector<double> seconds(Engine& engine, const std::function<void()>& call) {
  at::Tensor word = engine.empty(1, at::kLong).fill_(0);
  std::vector<double> runs;
  for (int i = 0; i <= kRuns; ++i) {
    engine.to_host(word);  // reading a word back makes the device finish
    Stopwatch watch;
    call();
    engine.to_host(word);
    if (i > 0) runs.push_back(watch.lap());
  }
  return runs;
}

double fastest(Engine& engine, const std::function<void()>& call) {
  const std::vector<double> runs = seconds(engine, call);
  return *std::min_element(runs.begin(), runs.end());
}

double all_gather_seconds(const Place& place, int64_t shard) {
  at::Tensor in = place.engine.empty(shard, at::kByte).fill_(1);
  at::Tensor out = place.engine.empty(shard * place.world(), at::kByte);
  return median(seconds(place.engine, [&] { place.messages.all_gather(out, in); }));
}

double words_seconds(const Place& place) {
  at::Tensor own = place.engine.empty(1, at::kLong).fill_(1);
  return median(seconds(place.engine, [&] { all_gather_words(place, own, place.call); }));
}

CodecModel codec_rates(Engine& engine, FrameOptions options) {
  // Of other dtypes codes do the same for less: their values are shorter, or parts of complex ones.
  const bool common = options.dtype == DType::f16 || options.dtype == DType::f32 || options.dtype == DType::f64;
  if (!common || effective_code(options) == Code::raw) options.dtype = DType::bf16;
  CodecModel model;
  const double nothing = fastest(engine, [] {});
  for (int64_t count : {int64_t{1024}, kCodecValues}) {
    auto values = at::linspace(-1, 1, count, at::TensorOptions(at::kFloat)).pow_(3).to(scalar_type(options.dtype));
    at::Tensor src = engine.empty(count, scalar_type(options.dtype)).copy_(values);
    at::Tensor frame = engine.empty(static_cast<int64_t>(frame_bound(options, count)), at::kByte);
    at::Tensor dst = at::empty_like(src), size = engine.empty(1, at::kLong);
    auto cost = [&](const std::function<void()>& call) {
      const double s = fastest(engine, call);
      return std::max(s - nothing, 0.01 * s);
    };
    const double encode = cost([&] { engine.encode({src}, options, {frame}, size); });
    const double decode = cost([&] { engine.decode({{frame, dst, "this rank"}}, options, "measurement"); });
    if (count == 1024) {
      model.fixed = (encode + decode) / 2;
    } else {
      const double bytes = static_cast<double>(src.nbytes());
      model.encode_bytes_per_s = bytes / std::max(encode - model.fixed, 0.01 * encode);
      model.decode_bytes_per_s = bytes / std::max(decode - model.fixed, 0.01 * decode);
    }
  }
  engine.take_statuses();  // own frames: nothing to check
  return model;
}
}  // namespace

std::vector<double> largest(const Place& place, const std::vector<double>& values) {
  at::NoGradGuard no_grad;
  at::Tensor host = at::tensor(values, at::kDouble);
  at::Tensor shared = place.engine.empty(host.numel(), at::kDouble).copy_(host);
  place.messages.all_reduce_max(shared);
  const std::vector<int64_t> words = place.engine.to_host(shared.view(at::kLong));  // a wait that can end
  std::vector<double> all(words.size());
  std::memcpy(all.data(), words.data(), words.size() * sizeof(double));
  return all;
}

void measure(const Place& place, const FrameOptions& options, Switcher* switcher, std::optional<Code>* chosen) {
  at::NoGradGuard no_grad;
  const int world = place.world();
  const double alpha = all_gather_seconds(place, 64);
  double large = 0;
  int64_t shard = std::max<int64_t>(kFirstLinkBytes / world, 64 << 10);
  for (;; shard *= 4) {
    // All ranks must take the same number of turns.
    const auto slowest = largest(place, {all_gather_seconds(place, shard), alpha});
    large = slowest[0];
    if (large >= kLongEnough * slowest[1] || shard * world >= kMostLinkBytes) break;
  }
  const double per_byte = std::max(large - alpha, 0.01 * large) / static_cast<double>(shard * (world - 1));
  std::vector<double> costs = {alpha, per_byte, words_seconds(place)};
  FrameOptions frames = options;
  for (Code code : {options.code, Code::dense}) {
    frames.code = code;
    const CodecModel codec = codec_rates(place.engine, frames);
    costs.insert(costs.end(), {codec.fixed, 1 / codec.encode_bytes_per_s, 1 / codec.decode_bytes_per_s});
    if (chosen == nullptr) break;
  }
  // Costs, so that the maximum over ranks is the slowest rank's; as bit-exact doubles every rank then decides alike.
  const auto v = largest(place, costs);
  place.engine.release_scratch();  // more than calls may ever need
  const LinkModel link = {v[0], 1 / v[1], v[2]};
  CodecModel codec = {v[3], 1 / v[4], 1 / v[5]};
  if (chosen != nullptr) {
    const CodecModel dense = {v[6], 1 / v[7], 1 / v[8]};
    const bool pays = dense_pays(link, codec, dense, world);
    *chosen = pays ? Code::dense : options.code;
    if (pays) codec = dense;
  }
  switcher->set_measurements(link, codec);
}

bool faster_by_host(const Place& place, const HostMessages& host) {
  at::NoGradGuard no_grad;
  const Place by_host{place.engine, place.messages, place.what, &host};
  const auto v = largest(place, {words_seconds(place), words_seconds(by_host)});
  return v[1] < v[0];
}

}  // namespace zipccl
