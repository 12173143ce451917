#include "collectives/call_id.h"

#include "collectives/engine.h"

namespace zipccl {

namespace {
uint64_t field(uint64_t word, int begin, int bits) { return word >> begin & ((uint64_t{1} << bits) - 1); }

std::string dtype_text(uint64_t word) {
  const uint64_t dtype = field(word, 32, 6);
  return dtype < kDTypeCount ? toString(scalar_type(static_cast<DType>(dtype))) : "?";
}

bool rooted(uint64_t word) {
  const auto op = static_cast<Op>(field(word, 38, 4));
  return op == Op::broadcast || op == Op::scatter || op == Op::gather;
}

std::string op_text(uint64_t word) {
  const uint64_t op = field(word, 38, 4);
  return op < kOpCount ? op_name(static_cast<Op>(op)) : "?";
}
}  // namespace

CallId CallId::of(DType dtype, const std::vector<int64_t>& counts) const {
  uint64_t mixed = 0;
  for (int64_t count : counts) {
    mixed = (mixed ^ static_cast<uint64_t>(count)) * 0x9e3779b97f4a7c15;
    mixed ^= mixed >> 32;
  }
  CallId id;
  id.word_ = word_ | static_cast<uint64_t>(dtype) << 32 | (mixed & 0xffffffff);
  return id;
}

std::string CallId::differs(int64_t other) const {
  const auto theirs = static_cast<uint64_t>(other);
  if (theirs == word_) return "";
  if (op_text(theirs) != op_text(word_)) return op_text(theirs) + ", not " + op_text(word_);
  if (field(theirs, 42, 22) != field(word_, 42, 22))
    return "number " + std::to_string(field(theirs, 42, 22)) + " of the group's calls, not " +
           std::to_string(field(word_, 42, 22)) +
           " (was one empty, small or of another dtype on some ranks? those that travelled raw since then may have "
           "returned wrong values)";
  if (dtype_text(theirs) != dtype_text(word_)) return dtype_text(theirs) + " values, not " + dtype_text(word_);
  return rooted(word_) ? "tensors of another size, or another root" : "tensors of other sizes";
}

}  // namespace zipccl
