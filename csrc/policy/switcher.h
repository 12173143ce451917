// Decides per call whether a collective travels zipped or raw, and an all-to-all's design.
//
// Rule: a decision is a function of values every rank holds alike (the options, the call's sizes, measurements that
// were all-reduced), applied in the same order on every rank. The switcher never looks at a clock or at data. No torch.
//
// A model of link and codec, measured once, tells which choices have a chance in a size class (sizes within a factor of
// two). Where more than one has, the first kTrial calls take them in turn; real calls say more than a model can. From
// then on calls are seen: seconds and sizes. Each rank sees its own, so they count only once they are agreed: after the
// trial and then every so many calls, wants_agreement() asks the caller to all-reduce the values of seen() with MAX and
// to hand the result to agree(). Choices change only by a clear margin (hysteresis). A choice not taken is tried again
// once in two agreements. Agreements come every kAgreeEvery calls, twice as rarely after each that confirms what was
// known, up to kAgreeRarely; as often as at first when a choice changed or times drifted. Only the last kTimed calls
// before an agreement need be timed.
//
// Sizes that no rank knows whole. In an all-to-all each rank knows its own bytes alone. Then ranks also
// agree, afterwards, on how large the calls since the last agreement were on the busiest rank (own_sizes(),
// agree_sizes()). That tells their classes, so what was timed is learned by class as ever; and the next calls are taken
// to be like those: the choice is the one that would have taken least time over all of them. The first call of all is
// raw where that is allowed.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "policy/model.h"

namespace zipccl {

enum class Mode : uint8_t { automatic, zip, raw };  // what the user asked for, per collective

// What is done. The two designs differ for all-to-all only (collectives/all_to_all.h); others are zipped by design one.
enum class Choice : uint8_t { raw, zip_one, zip_two };
constexpr int kChoiceCount = 3;

inline bool zips(Choice c) { return c != Choice::raw; }

// Raw bytes of a call in the sense of model.h.
struct CallSize {
  uint64_t bytes = 0;
  bool shared = true;  // false: the bytes of this rank alone; the others know theirs
};

struct Decision {
  Choice choice;
  std::string reason;      // for people: ZIPCCL_DEBUG=INFO and zipccl.explain()
  double raw_seconds = 0;  // expected; 0 where nothing was estimated
  double zip_seconds = 0;
  bool trial = false;   // taken to see how it does, rather than as the best
  bool timed = false;   // record() wants to know of it
  uint64_t number = 0;  // of the call among those decided like it, for record()
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

  // `allowed`: the choices to take from; raw among them needs measurements. `least`: where raw is allowed, calls of
  // fewer bytes take it. Looked at where sizes are not shared; elsewhere callers do not ask about smaller ones.
  using Choices = std::array<bool, kChoiceCount>;
  bool wants_measurements(Op op, CallSize size, const Choices& allowed, uint64_t least) const;
  // One call. `say`: with a reason.
  Decision decide(Op op, int world, CallSize size, const Choices& allowed, uint64_t least, bool say);
  // As if the last decide() had not been called: for a call that ranks found to differ. None has made it, and others
  // may have decided on another one, or on none.
  void take_back();
  // True where decide() would say of this call what it said of the last one like it, namely raw, untimed and without a
  // reason, and no agreement is due behind it. The call is counted then, as by decide(), for less than a microsecond.
  bool raw_again(Op op, CallSize size, const Choices& allowed, uint64_t least);
  // Without counting: what decide() would say now of a call of that many bytes, were all others like it.
  Decision explain(Op op, int world, CallSize size, const Choices& allowed) const;

  // What this rank saw of one call. size: as given to decide(), which gave the number. raw_bytes: 0 for a raw call.
  void record(Op op, CallSize size, uint64_t number, Choice choice, double seconds, uint64_t raw_bytes,
              uint64_t wire_bytes);

  bool wants_agreement(Op op, CallSize size) const;
  // Where sizes are not shared, first: one value per call since the last agreement.
  std::vector<double> own_sizes(Op op) const;
  void agree_sizes(Op op, const std::vector<double>& largest);
  // Then kSeen values for each size class these calls had; none where all are below `least`: they stay raw anyway.
  std::vector<double> seen(Op op, CallSize size) const;
  void agree(Op op, CallSize size, const std::vector<double>& largest);

  static constexpr int kTrial = 6;
  static constexpr int kAgreeEvery = 32;
  static constexpr int kAgreeRarely = 4096;
  static constexpr int kAgreeRarelyUnshared = 256;  // sizes may have changed without a word
  static constexpr int kTimed = 8;
  static constexpr int kSeen = kChoiceCount + 1;  // seconds of the fastest call by choice, mean ratio; 0: none

 private:
  struct Mean {
    double sum = 0;
    int n = 0;
    double value() const { return n ? sum / n : 0; }
  };
  // What is known of one size class.
  struct Timing {
    std::array<double, kChoiceCount> fastest{};  // this rank's, since the last agreement; 0: none
    Mean ratio;
    std::array<double, kChoiceCount> agreed{};
    bool tried = false;
    void add(Choice choice, double seconds, uint64_t raw_bytes, uint64_t wire_bytes);
  };
  // Calls of one size class.
  struct Part {
    int size_class;
    double bytes = 0;  // of all of them
    int calls = 0;
  };
  using Mix = std::vector<Part>;  // by size class
  static bool lighter(const Part& a, const Part& b) { return a.bytes < b.bytes; }
  // This rank's view of a call whose class is not known yet.
  struct Logged {
    double bytes = 0;
    Choice choice = Choice::raw;
    double seconds = 0;
    uint64_t raw_bytes = 0, wire_bytes = 0;
  };
  // What a decision came from, but for the state of its flow.
  struct Settled {
    uint64_t bytes;  // 0 where sizes are not shared
    Choices allowed;
    uint64_t least, knowledge;
    bool operator==(const Settled& o) const {
      return bytes == o.bytes && allowed == o.allowed && least == o.least && knowledge == o.knowledge;
    }
  };
  // Calls that are decided one after the other: those of one size class, or all of one op where sizes are not shared.
  struct Flow {
    uint64_t calls = 0;
    int trial_left = 0;
    int since = 0;  // calls since the last agreement
    int interval = kAgreeEvery;
    bool due = false;                       // an agreement, before the interval is over
    bool changed = false;                   // the interval starts anew at the next agreement
    uint64_t explore_at = 2 * kAgreeEvery;  // not before that many calls
    uint64_t explored = 0;
    bool decided = false;
    Choice current = Choice::raw;
    std::optional<Settled> settled;  // the last decision, if raw and no trial
    // Where sizes are not shared:
    uint64_t least = 0;       // of the last decision
    Mix mix;                  // calls between the last two agreements
    std::vector<Logged> log;  // the last calls, kAgreeEvery at most
  };
  using Key = std::tuple<Op, bool, int>;  // op, sizes are shared, size class
  // What the last decide() has changed.
  struct Change {
    Key key;
    Flow before;
    bool* tried = nullptr;  // set by it, in timings_
  };
  static constexpr int kAnyClass = -1;
  static int size_class(uint64_t bytes);
  static Key flow_key(Op op, CallSize size);
  static void log_size(Flow* flow, CallSize size);
  static bool all_below(const Mix& mix, uint64_t least);
  const Flow* find_flow(Op op, CallSize size) const;
  const Timing* find_timing(Op op, bool shared, int size_class) const;
  // The calls to decide for: one of this size, or those last agreed on.
  static Mix mix_of(const Flow* flow, CallSize size);

  // Mean seconds of each choice over the mix: agreed where known, else the model's, scaled by how far it was off for
  // the others.
  std::array<double, kChoiceCount> expected(Op op, int world, bool shared, const Mix& mix) const;
  // Choices that are not expected to be far worse than the best one.
  static Choices promising(const std::array<double, kChoiceCount>& t, const Choices& allowed, double hopeless);
  Decision settle(Op op, int world, bool shared, const Mix& mix, const Choices& allowed, const Flow& flow,
                  bool say) const;

  Settled settled(CallSize size, const Choices& allowed, uint64_t least) const {
    return {size.shared ? size.bytes : 0, allowed, least, knowledge_};
  }

  bool measured_ = false;
  uint64_t knowledge_ = 0;  // grows with each measurement and agreement
  LinkModel link_;
  CodecModel codec_;
  double prior_ratio_;
  std::map<Op, double> ratio_;
  std::map<Key, Flow> flows_;
  std::map<Key, Timing> timings_;
  std::optional<Change> change_;
};

}  // namespace zipccl
