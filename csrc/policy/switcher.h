// Decides per call whether a collective travels zipped or raw.
//
// Rule: a decision is a function of values every rank holds alike (the options, the call's sizes, measurements that
// were all-reduced, sizes exchanged in earlier calls), applied in the same order on every rank. The switcher never
// looks at a clock or at data. No torch.
#pragma once

#include <cstdint>
#include <string>

#include "policy/model.h"

namespace zipccl {

enum class Mode : uint8_t { automatic, zip, raw };  // what the user asked for, per collective
enum class Choice : uint8_t { raw, zip };           // what is done

struct Decision {
  Choice choice;
  std::string reason;      // for people: ZIPCCL_DEBUG=INFO and zipccl.explain()
  double raw_seconds = 0;  // modelled; 0 where no model was asked
  double zip_seconds = 0;
};

class Switcher {
 public:
  // `prior_ratio`: expected wire bytes over raw bytes until real traffic has been seen.
  explicit Switcher(double prior_ratio) : ratio_(prior_ratio) {}

  bool measured() const { return measured_; }
  void set_measurements(const LinkModel& link, const CodecModel& codec);
  const LinkModel& link() const { return link_; }
  const CodecModel& codec() const { return codec_; }
  double ratio() const { return ratio_; }

  // Needs measurements. `shard_bytes`: raw bytes each rank contributes.
  Decision all_gather(int world, uint64_t shard_bytes) const;

  // Sizes every rank has seen in a zipped call.
  void observe(uint64_t raw_bytes, uint64_t wire_bytes);

 private:
  bool measured_ = false;
  LinkModel link_;
  CodecModel codec_;
  double ratio_;
};

}  // namespace zipccl
