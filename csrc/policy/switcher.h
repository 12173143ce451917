// Decides per call whether a collective travels zipped or raw, and an all-to-all's design.
//
// Rule: a decision is a function of values every rank holds alike (the options, the call's sizes, measurements that
// were all-reduced), applied in the same order on every rank. The switcher never looks at a clock or at data. No torch.
//
// A model of link and codec, measured once, tells which choices have a chance in a size class (sizes within a factor of
// two). Where more than one has, the first kTrial calls take them in turn; real calls say more than a model can. From
// then on calls are seen: seconds and sizes. Each rank sees its own, so they count only once they are agreed: after the
// trial and then every kAgreeEvery calls of a class, wants_agreement() asks the caller to all-reduce the values of
// seen() with MAX and to hand the result to agree(). Choices change only by a clear margin (hysteresis). A choice not
// taken is tried again once in kExploreEvery calls.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "policy/model.h"

namespace zipccl {

enum class Mode : uint8_t { automatic, zip, raw };  // what the user asked for, per collective

// What is done. The two designs differ for all-to-all only (collectives/all_to_all.h); others are zipped by design one.
enum class Choice : uint8_t { raw, zip_one, zip_two };
constexpr int kChoiceCount = 3;

inline bool zips(Choice c) { return c != Choice::raw; }

struct Decision {
  Choice choice;
  std::string reason;      // for people: ZIPCCL_DEBUG=INFO and zipccl.explain()
  double raw_seconds = 0;  // expected; 0 where nothing was estimated
  double zip_seconds = 0;
  bool trial = false;  // taken to see how it does, rather than as the best
};

class Switcher {
 public:
  // `prior_ratio`: expected wire bytes over raw bytes until real traffic has been seen.
  explicit Switcher(double prior_ratio) : prior_ratio_(prior_ratio) {}

  bool measured() const { return measured_; }
  void set_measurements(const LinkModel& link, const CodecModel& codec);
  const LinkModel& link() const { return link_; }
  const CodecModel& codec() const { return codec_; }
  double ratio(Op op) const;

  // One call of its class. `allowed`: the choices to take from; raw among them needs measurements.
  using Choices = std::array<bool, kChoiceCount>;
  Decision decide(Op op, int world, uint64_t bytes, const Choices& allowed);
  // The same without counting: what decide() would say now.
  Decision explain(Op op, int world, uint64_t bytes, const Choices& allowed) const;

  // What this rank saw of one call. bytes: as given to decide(). raw_bytes: 0 for a raw call.
  void record(Op op, uint64_t bytes, Choice choice, double seconds, uint64_t raw_bytes, uint64_t wire_bytes);

  struct Seen {
    std::array<double, kChoiceCount> seconds{};  // of the fastest call since the last agreement; 0: none
    double ratio = 0;                            // mean since then; 0: no zipped call
  };
  bool wants_agreement(Op op, uint64_t bytes) const;
  Seen seen(Op op, uint64_t bytes) const;
  void agree(Op op, uint64_t bytes, const Seen& largest);

  static constexpr int kTrial = 6;
  static constexpr int kAgreeEvery = 32;
  static constexpr int kExploreEvery = 64;

 private:
  struct Mean {
    double sum = 0;
    int n = 0;
    double value() const { return n ? sum / n : 0; }
  };
  struct Class {
    uint64_t calls = 0;
    bool decided = false;
    Choice current = Choice::raw;
    std::array<double, kChoiceCount> fastest{};  // this rank's, since the last agreement; 0: none
    Mean ratio;
    std::array<double, kChoiceCount> agreed{};
  };
  using Key = std::pair<Op, int>;
  static Key key(Op op, uint64_t bytes);
  const Class* find(Op op, uint64_t bytes) const;
  // Seconds of each choice: agreed where known, else the model's, scaled by how far it was off for the others.
  std::array<double, kChoiceCount> expected(Op op, int world, uint64_t bytes, const Class* c) const;
  // Choices that are not expected to be far worse than the best one.
  Choices promising(Op op, int world, uint64_t bytes, const Choices& allowed, const Class& c) const;
  Decision settle(Op op, int world, uint64_t bytes, const Choices& allowed, const Class& c) const;

  bool measured_ = false;
  LinkModel link_;
  CodecModel codec_;
  double prior_ratio_;
  std::map<Op, double> ratio_;
  std::map<Key, Class> classes_;
};

}  // namespace zipccl
