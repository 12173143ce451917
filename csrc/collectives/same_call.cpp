#include "collectives/same_call.h"

#include <algorithm>
#include <cctype>

#include "collectives/error.h"

namespace zipccl {

namespace {
// Of a message: up to its padding, without what cannot be shown.
std::string text_of(const at::Tensor& message) {
  const char* begin = reinterpret_cast<const char*>(message.const_data_ptr<uint8_t>());
  std::string text(begin, std::find(begin, begin + kCallBytes, '\0'));
  for (char& c : text)
    if (!std::isprint(static_cast<unsigned char>(c))) c = '?';
  return text;
}

// The words of `text` that `other` lacks.
std::string words_apart(const std::string& text, const std::string& other) {
  std::string apart;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if ((" " + other + " ").find(" " + word + " ") == std::string::npos) apart += (apart.empty() ? "" : " ") + word;
    begin = end + 1;
  }
  return apart;
}
}  // namespace

void check_same_call(const DynamiqPlace& place, const std::string& call) {
  const int world = place.pairs.world(), rank = place.pairs.rank();
  if (world == 1) return;
  at::Tensor messages = place.engine.empty(world * kCallBytes, at::kByte).zero_().view({world, kCallBytes});
  std::copy_n(call.data(), std::min<int64_t>(kCallBytes, call.size()), messages[rank].mutable_data_ptr<uint8_t>());
  std::vector<Pairs::Parcel> sends, receives;
  for (int r = 0; r < world; ++r) {
    if (r == rank) continue;
    sends.push_back({r, messages[rank]});
    receives.push_back({r, messages[r]});
  }
  place.pairs.begin(sends, receives, at::kCPU).wait();
  for (int r = 0; r < world; ++r) {
    if (messages[r].equal(messages[rank])) continue;
    const std::string theirs = text_of(messages[r]), own = text_of(messages[rank]);
    throw SharedError(place.what + ": rank " + std::to_string(r) + " calls with " + words_apart(theirs, own) +
                      ", this rank with " + words_apart(own, theirs) + "; every rank must make the same call");
  }
}

}  // namespace zipccl
