// Decides per call whether a collective travels zipped or raw.
//
// Rule: a decision is a function of values every rank holds alike (the options, the call's sizes, measurements that
// were all-reduced, sizes exchanged in earlier calls), applied in the same order on every rank. The switcher never
// looks at a clock or at data. No torch.
//
// A model of link and codec, measured once, gives the first decision of a size class (sizes within a factor of two).
// From then on real calls are timed. Each rank times its own, so times count only once they are agreed: every
// kAgreeEvery calls of a class wants_agreement() asks the caller to all-reduce local_times() with MAX and to hand the
// result to agree(). Choices change only by a clear margin (hysteresis). The choice not taken is tried once in
// kExploreEvery calls where the model gives it a chance.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "policy/model.h"

namespace zipccl {

enum class Mode : uint8_t { automatic, zip, raw };  // what the user asked for, per collective
enum class Choice : uint8_t { raw, zip };           // what is done

struct Decision {
  Choice choice;
  std::string reason;      // for people: ZIPCCL_DEBUG=INFO and zipccl.explain()
  double raw_seconds = 0;  // expected; 0 where nothing was estimated
  double zip_seconds = 0;
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

  // Needs measurements. Counts as a call of the class; explain() does not.
  Decision decide(Op op, int world, uint64_t bytes);
  Decision explain(Op op, int world, uint64_t bytes) const;

  // Sizes every rank has seen in a zipped call.
  void observe(Op op, uint64_t raw_bytes, uint64_t wire_bytes);

  // Timing. record(): this rank's seconds of one call. The others, see above.
  void record(Op op, uint64_t bytes, Choice choice, double seconds);
  bool wants_agreement(Op op, uint64_t bytes) const;
  struct Times {
    double raw = 0, zip = 0;  // seconds; 0: not known
  };
  Times local_times(Op op, uint64_t bytes) const;
  void agree(Op op, uint64_t bytes, const Times& slowest);

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
    Choice current = Choice::raw;
    bool decided = false;
    Mean raw, zip;   // this rank's, since the last agreement
    Times agreed;
  };
  using Key = std::pair<Op, int>;
  static Key key(Op op, uint64_t bytes);
  // Seconds of both choices: agreed where known, else the model's.
  Times expected(Op op, int world, uint64_t bytes, const Class* c) const;
  std::string describe(Op op, int world, uint64_t bytes, const Times& t, const Class* c) const;

  bool measured_ = false;
  LinkModel link_;
  CodecModel codec_;
  double prior_ratio_;
  std::map<Op, double> ratio_;
  std::map<Key, Class> classes_;
};

}  // namespace zipccl
