#include "collectives/probe.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "collectives/error.h"
#include "collectives/traffic.h"

namespace zipccl {

namespace {
constexpr int64_t kLinkBytes = 4 << 20;    // received per rank in the large all-gather
constexpr int64_t kCodecValues = 2 << 20;  // 4 MiB of bf16
constexpr int kRuns = 3;

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Reading a word back makes CUDA work finish, so host time is the time of the call.
void settle(Engine& engine, const at::Tensor& word) { engine.to_host(word); }

double all_gather_seconds(Engine& engine, const Messages& messages, int64_t shard) {
  auto in = engine.empty(shard, at::kByte).fill_(1);
  auto out = engine.empty(shard * messages.world(), at::kByte);
  auto word = engine.empty(1, at::kLong).fill_(0);
  std::vector<double> seconds;
  for (int i = 0; i <= kRuns; ++i) {
    settle(engine, word);
    Stopwatch watch;
    messages.all_gather(out, in);
    settle(engine, word);
    if (i > 0) seconds.push_back(watch.lap());  // the first call may build connections
  }
  return median(seconds);
}

CodecModel codec_rates(Engine& engine, const FrameOptions& options) {
  CodecModel model;
  auto word = engine.empty(1, at::kLong).fill_(0);
  for (int64_t count : {int64_t{1024}, kCodecValues}) {
    auto values = at::linspace(-1, 1, count, at::TensorOptions(at::kFloat)).pow_(3).to(scalar_type(options.dtype));
    auto src = engine.empty(count, scalar_type(options.dtype)).copy_(values);
    auto frame = engine.empty(static_cast<int64_t>(frame_bound(options, count)), at::kByte);
    auto dst = at::empty_like(src);
    std::vector<double> encode, decode;
    for (int i = 0; i <= kRuns; ++i) {
      settle(engine, word);
      Stopwatch watch;
      engine.encode({src}, options, {frame}, word);
      settle(engine, word);
      encode.push_back(watch.lap());
      engine.decode({{frame, dst, "this rank"}}, options.dtype, "zipccl measurement");
      settle(engine, word);
      decode.push_back(watch.lap());
    }
    double e = *std::min_element(encode.begin(), encode.end()), d = *std::min_element(decode.begin(), decode.end());
    double bytes = static_cast<double>(src.nbytes());
    if (count == 1024) {
      model.fixed = (e + d) / 2;
    } else {
      model.encode_bytes_per_s = bytes / std::max(e - model.fixed, e * 0.01);
      model.decode_bytes_per_s = bytes / std::max(d - model.fixed, d * 0.01);
    }
  }
  engine.take_statuses();  // own frames: nothing to check
  return model;
}
}  // namespace

void measure(Engine& engine, const Messages& messages, const FrameOptions& options, Switcher* switcher) {
  at::NoGradGuard no_grad;
  const int world = messages.world();
  double alpha = all_gather_seconds(engine, messages, 64);
  int64_t shard = std::max<int64_t>(kLinkBytes / world, 64 << 10);
  double large = all_gather_seconds(engine, messages, shard);
  double per_byte = std::max(large - alpha, large * 0.01) / static_cast<double>(shard * (world - 1));
  CodecModel codec = codec_rates(engine, options);

  // Costs, so that the maximum over ranks is the slowest rank's; as bit-exact doubles every rank then decides alike.
  auto agreed = at::tensor({alpha, per_byte, codec.fixed, 1 / codec.encode_bytes_per_s, 1 / codec.decode_bytes_per_s},
                           at::kDouble);
  auto shared = engine.empty(agreed.numel(), at::kDouble).copy_(agreed);
  messages.all_reduce_max(shared);
  agreed.copy_(shared);
  const double* v = agreed.const_data_ptr<double>();
  switcher->set_measurements({v[0], 1 / v[1]}, {v[2], 1 / v[3], 1 / v[4]});
}

}  // namespace zipccl
