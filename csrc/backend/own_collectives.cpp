// The collectives that may be zipped, in all their forms: what each call moves, when it may be zipped, and how.
//
// Where arguments do not fit each other the call is not zipped: the inner backend reports it in its own words.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "backend/gloo.h"
#include "backend/zip_backend.h"
#include "collectives/all_gather.h"
#include "collectives/all_to_all.h"
#include "collectives/broadcast.h"
#include "collectives/error.h"
#include "collectives/reduce_scatter.h"

namespace zipccl {

namespace {
using Tensors = std::vector<at::Tensor>;

// Reductions are often of scalars (losses, norms), which stay raw unless the user says otherwise.
constexpr uint64_t kReduceMinBytes = 64 << 10;
// Smallest message of an all-to-all that is worth a frame, where the user did not say.
constexpr uint64_t kPairMinBytes = 16 << 10;

// `world` equal parts of a tensor along its values in order; empty if it has none such.
Tensors equal_parts(const at::Tensor& t, int world) {
  Tensors parts;
  at::Tensor whole = t.is_contiguous() ? t.view({-1}) : t;
  if (whole.dim() == 0 || whole.size(0) % world != 0) return parts;
  const int64_t rows = whole.size(0) / world;
  for (int r = 0; r < world; ++r) parts.push_back(whole.narrow(0, r * rows, rows));
  return parts;
}

// How many values of a tensor are this rank's own, by splits along dimension 0 (none: equal ones); -1 if they do not
// fit.
int64_t own_count(const at::Tensor& t, const std::vector<int64_t>& splits, int rank, int world) {
  if (splits.empty()) {
    const int64_t rows = t.is_contiguous() ? t.numel() : t.size(0);
    return t.dim() > 0 && rows % world == 0 ? t.numel() / world : -1;
  }
  if (t.dim() == 0 || splits.size() != static_cast<size_t>(world)) return -1;
  int64_t left = t.size(0);
  for (int64_t rows : splits) {
    if (rows < 0 || rows > left) return -1;
    left -= rows;
  }
  if (left != 0) return -1;
  return t.size(0) == 0 ? 0 : splits[rank] * (t.numel() / t.size(0));
}

// The parts themselves, of splits that fit.
Tensors split_parts(const at::Tensor& t, const std::vector<int64_t>& splits, int world) {
  if (splits.empty()) return equal_parts(t, world);
  Tensors parts;
  int64_t begin = 0;
  for (int64_t rows : splits) {
    parts.push_back(t.narrow(0, begin, rows));
    begin += rows;
  }
  return parts;
}

bool alike(const Tensors& tensors, const at::Tensor& as) {
  for (const at::Tensor& t : tensors)
    if (t.scalar_type() != as.scalar_type() || t.device() != as.device() || t.layout() != at::kStrided) return false;
  return true;
}

bool same_counts(const Tensors& tensors, int64_t count) {
  for (const at::Tensor& t : tensors)
    if (t.numel() != count) return false;
  return true;
}

bool same_shapes(const Tensors& tensors, const at::Tensor& as) {
  for (const at::Tensor& t : tensors)
    if (t.sizes() != as.sizes()) return false;
  return true;
}

uint64_t total_bytes(const Tensors& tensors) {
  uint64_t bytes = 0;
  for (const at::Tensor& t : tensors) bytes += t.nbytes();
  return bytes;
}

OwnCall make_call(Op op, c10d::OpType type, Tensors inputs, Tensors outputs, Patience patience, RawCall raw) {
  OwnCall call;
  call.op = op;
  call.type = type;
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  call.patience = patience;
  call.raw = std::move(raw);
  return call;
}

bool inner_moves(const at::Tensor& t) { return !t.is_cpu() || gloo_moves(t.scalar_type()); }

// All tensors are of one dtype that gloo does not move; either list may be empty.
bool odd(const Tensors& some, const Tensors& more) {
  const Tensors& one = some.empty() ? more : some;
  return !one.empty() && one[0].is_cpu() && !gloo_moves(one[0].scalar_type()) && alike(some, one[0]) &&
         alike(more, one[0]);
}

bool contiguous(const Tensors& tensors) {
  for (const at::Tensor& t : tensors)
    if (!t.is_contiguous()) return false;
  return true;
}

// gloo compares shapes where NCCL counts values: of what it would refuse for its shape alone it gets the same memory in
// the shape it wants. Ranks may pass different shapes of one count.

// The tensor in that shape; undefined where it has none.
at::Tensor shaped(const at::Tensor& t, at::IntArrayRef sizes) {
  if (t.sizes() == sizes) return t;
  const bool can = t.is_contiguous() && t.numel() == c10::multiply_integers(sizes);
  return can ? t.view(sizes) : at::Tensor();
}

// All in the shape of `as`; false, and nothing changed, where one cannot be.
bool shape_all(Tensors* tensors, const at::Tensor& as) {
  Tensors made;
  for (const at::Tensor& t : *tensors) {
    made.push_back(shaped(t, as.sizes()));
    if (!made.back().defined()) return false;
  }
  *tensors = std::move(made);
  return true;
}

Tensors as_they_lie(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& t : tensors) made.push_back(as_it_lies(t));
  return made;
}

// Lists of one shape NCCL gathers into or reduces through one contiguous buffer, so by their values; others tensor by
// tensor, as they lie.
bool by_value(const Tensors& list) { return list.empty() || same_shapes(list, list[0]); }
Tensors as_nccl_lists(const Tensors& list) { return by_value(list) ? list : as_they_lie(list); }

// gloo copies sums to their places only when the caller waits, who may have gradients switched on.
at::Tensor without_grad(const at::Tensor& t) { return t.requires_grad() ? t.detach() : t; }
Tensors without_grad(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& t : tensors) made.push_back(without_grad(t));
  return made;
}

// Whether the inner backend would take `whole` as `world` parts like `part`.
bool fits_rows(const at::Tensor& whole, const at::Tensor& part, int world) {
  if (whole.numel() != part.numel() * world) return false;
  return !whole.is_cpu() || (part.dim() > 0 && whole.dim() == part.dim() && whole.size(0) == world * part.size(0) &&
                             whole.sizes().slice(1) == part.sizes().slice(1));
}

// The same after a change of shapes to rows of single values, where that helps.
bool shape_rows(at::Tensor* whole, at::Tensor* part, int world) {
  if (fits_rows(*whole, *part, world)) return true;
  if (!whole->is_cpu() || whole->numel() != part->numel() * world) return false;
  if (!whole->is_contiguous() || !part->is_contiguous()) return false;
  *whole = whole->view({-1});
  *part = part->view({-1});
  return true;
}

// gloo refuses or mistakes some strided tensors, and refuses some dtypes. Where a call runs on the worker it may wait,
// so dense copies go instead, as bytes where need be. `call` makes the inner call on those.
void densely(const Tensors& inputs, const Tensors& outputs,
             const std::function<WorkPtr(Tensors& inputs, Tensors& outputs)>& call) {
  at::NoGradGuard no_grad;
  auto for_gloo = [](const at::Tensor& t) { return gloo_moves(t.scalar_type()) ? t : as_bytes(t); };
  Tensors in, dense, out;
  for (const at::Tensor& t : inputs) in.push_back(for_gloo(t.contiguous()));
  for (const at::Tensor& t : outputs) {
    dense.push_back(t.contiguous());
    out.push_back(for_gloo(dense.back()));
  }
  call(in, out)->wait();
  for (size_t i = 0; i < dense.size(); ++i)
    if (!dense[i].is_same(outputs[i])) outputs[i].copy_(dense[i]);
}

// Multiplier of PREMUL_SUM; false where it is a tensor or the op is no sum.
bool sum_options(const c10d::ReduceOp& op, ReduceOptions* out) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return true;
    case c10d::ReduceOp::AVG:
      out->average = true;
      return true;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (!factor || factor->tensor_factor.defined()) return false;
      out->premultiply = static_cast<float>(factor->double_factor);
      return true;
    }
    default:
      return false;
  }
}
}  // namespace

// ---- all-gather ----

OwnCall ZipBackend::gather_call(c10d::OpType type, Tensors inputs, std::vector<Tensors> outputs, Tensors user_outputs,
                                Patience patience, RawCall raw) const {
  OwnCall call = make_call(Op::all_gather, type, inputs, std::move(user_outputs), patience, std::move(raw));
  bool fits = !inputs.empty() && inputs.size() == outputs.size() && alike(inputs, inputs[0]);
  bool even = true;
  uint64_t gathered = 0;
  std::vector<GatherItem> items;
  for (size_t i = 0; fits && i < inputs.size(); ++i) {
    fits = outputs[i].size() == static_cast<size_t>(size_) && alike(outputs[i], inputs[0]) &&
           outputs[i][rank_].numel() == inputs[i].numel();
    even = even && same_counts(outputs[i], inputs[i].numel());
    gathered += total_bytes(outputs[i]);
    const bool values = type == c10d::OpType::ALLGATHER && by_value(outputs[i]);
    items.push_back({values ? inputs[i] : as_it_lies(inputs[i]), as_nccl_lists(outputs[i])});
  }
  // With uneven shards, the mean: what all ranks know alike.
  call.size.bytes = gathered / size_;
  call.received = fits ? gathered - total_bytes(inputs) : total_bytes(inputs) * (size_ - 1);
  // gloo's future of one gathered tensor holds its shards, NCCL's the tensor.
  if (fits && type == c10d::OpType::_ALLGATHER_BASE && inputs[0].is_cpu()) call.outputs = outputs[0];
  call.zippable = fits && frame_for(inputs[0], &call.frame) && gathered > 0 &&
                  gathered >= options_.threshold(options_.of(Op::all_gather));
  if (fits && inputs[0].is_cpu() && !(even && gloo_moves(inputs[0].scalar_type()))) {
    call.raw_here = [items](const Place& place) {
      for (const GatherItem& item : items) all_gather_padded(place, item);
    };
  }
  call.zip = [items = std::move(items), frame = call.frame](const Place& place, Choice) {
    return all_gather_zip(place, items, frame);
  };
  return call;
}

WorkPtr ZipBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  const bool fits = fits_rows(output, input, size_);
  if (fits && inner_moves(input) &&
      (stays_raw(Op::all_gather, input, output.nbytes()) || raw_again(Op::all_gather, {input.nbytes()}, input, output)))
    return pass_on(Op::all_gather, output.nbytes() - input.nbytes(), input.device(),
                   [&](c10d::Backend& b) { return b._allgather_base(output, input, opts); });
  if (input.is_cuda() && fits && alike({output}, input)) {
    // Parts are made where they are needed: they are views, and cost a microsecond each.
    OwnCall call =
        make_call(Op::all_gather, c10d::OpType::_ALLGATHER_BASE, {input}, {output}, patience(opts),
                  [output, input, opts](c10d::Backend& b) mutable { return b._allgather_base(output, input, opts); });
    call.size.bytes = input.nbytes();
    call.received = output.nbytes() - input.nbytes();
    call.zippable = frame_for(input, &call.frame) && output.nbytes() > 0;
    call.zip = [output, input, frame = call.frame](const Place& place, Choice) {
      return all_gather_zip(place, {{as_it_lies(input), equal_parts(as_it_lies(output), place.world())}}, frame);
    };
    return run(std::move(call));
  }
  at::Tensor out = output, in = input;
  Tensors parts = shape_rows(&out, &in, size_) ? equal_parts(out, size_) : Tensors{};
  return run(gather_call(c10d::OpType::_ALLGATHER_BASE, {input}, {std::move(parts)}, {output}, patience(opts),
                         [out, in, opts](c10d::Backend& b) mutable { return b._allgather_base(out, in, opts); }));
}

WorkPtr ZipBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  std::vector<Tensors> parts;
  Tensors outs = outputs, ins = inputs;
  for (size_t i = 0; i < outputs.size() && i < inputs.size(); ++i)
    parts.push_back(shape_rows(&outs[i], &ins[i], size_) ? equal_parts(as_it_lies(outs[i]), size_) : Tensors{});
  return run(gather_call(
      c10d::OpType::COALESCED, inputs, std::move(parts), outputs, patience(opts),
      [outs, ins, opts](c10d::Backend& b) mutable { return b.allgather_into_tensor_coalesced(outs, ins, opts); }));
}

WorkPtr ZipBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  std::vector<Tensors> outs = outputs;
  bool refused = false;
  for (size_t i = 0; i < outs.size() && i < inputs.size() && inputs[i].is_cpu(); ++i)
    if (same_counts(outs[i], inputs[i].numel())) refused = !shape_all(&outs[i], inputs[i]) || refused;
  OwnCall call =
      gather_call(c10d::OpType::ALLGATHER, inputs, outs, outputs.empty() ? Tensors{} : outputs[0], patience(opts),
                  [outs, inputs, opts](c10d::Backend& b) mutable { return b.allgather(outs, inputs, opts); });
  if (refused) {
    call.zippable = false;
    call.raw_here = nullptr;
  }
  return run(std::move(call));
}

// ---- all-to-all ----

// parts: inputs and outputs by rank, made where they are needed: they are views, and cost a microsecond each. like: one
// of the tensors. received: bytes from other ranks.
OwnCall ZipBackend::all_to_all_call(c10d::OpType type, PartsOf parts, bool fits, const at::Tensor& like, CallSize size,
                                    uint64_t received, Tensors inputs, Tensors outputs, Patience patience,
                                    RawCall raw) const {
  OwnCall call = make_call(Op::all_to_all, type, std::move(inputs), std::move(outputs), patience, std::move(raw));
  const Mode mode = options_.of(Op::all_to_all);
  call.size = size;
  call.received = received;
  call.zippable = fits && frame_for(like, &call.frame);
  if (fits && like.is_cpu() && (type == c10d::OpType::ALLTOALL || !gloo_moves(like.scalar_type()) || compares(like))) {
    call.raw_here = [parts](const Place& place) {
      const auto [in, out] = parts();
      all_to_all_raw(place, in, out);
    };
  }
  PairOptions pair;
  pair.frame = call.frame;
  // Both ends of a message know its size, so a small one can stay raw without a word.
  pair.min_bytes = options_.min_bytes ? *options_.min_bytes / size_ : mode == Mode::zip ? 0 : kPairMinBytes;
  call.zip = [parts = std::move(parts), pair](const Place& place, Choice c) {
    PairOptions chosen = pair;
    chosen.design = c == Choice::zip_two ? Design::two : Design::one;
    const auto [in, out] = parts();
    return all_to_all_zip(place, in, out, chosen);
  };
  return call;
}

WorkPtr ZipBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  for (const auto* splits : {&input_splits, &output_splits})  // gloo would write before the tensor
    for (int64_t rows : *splits)
      TORCH_CHECK_VALUE(rows >= 0, "zipccl: split sizes of an all-to-all cannot be negative: " + std::to_string(rows));
  const at::Tensor in = as_it_lies(input), out = as_it_lies(output);
  const int64_t sent = own_count(in, input_splits, rank_, size_);
  const int64_t got = own_count(out, output_splits, rank_, size_);
  const bool fits = sent >= 0 && sent == got && alike({output}, input);
  const uint64_t received = got < 0 ? 0 : output.nbytes() - got * output.itemsize();
  // No rank knows how much the others send, not even where it passes no splits itself: the switcher has them agree.
  const CallSize size{std::max<uint64_t>(input.nbytes(), output.nbytes()), /*shared=*/false};
  const auto raw = [&](c10d::Backend& b) { return b.alltoall_base(output, input, output_splits, input_splits, opts); };
  if (inner_moves(input) && !compares(input) &&
      (stays_raw(Op::all_to_all, input, std::numeric_limits<uint64_t>::max()) ||
       (fits && raw_again(Op::all_to_all, size, input, output))))
    return pass_on(Op::all_to_all, received, input.device(), raw);
  const auto type = c10d::OpType::ALLTOALL_BASE;
  FrameOptions frame;
  if (fits && input.is_cpu() && !compares(input) && contiguous({input, output}) && frame_for(input, &frame)) {
    const std::vector<int64_t> none;
    const Again again{Op::all_to_all, type, frame.dtype, size, none, received, patience(opts), raw};
    if (WorkPtr work = begin_again(again)) return work;
  }
  OwnCall call = all_to_all_call(
      type,
      [in, out, input_splits, output_splits, world = size_] {
        return std::pair(split_parts(in, input_splits, world), split_parts(out, output_splits, world));
      },
      fits, input, size, received, {input}, {output}, patience(opts),
      [output, input, output_splits, input_splits, opts](c10d::Backend& b) mutable {
        return b.alltoall_base(output, input, output_splits, input_splits, opts);
      });
  if (!call.raw_here && may_zip(call) && input.is_cpu() && !(input.is_contiguous() && output.is_contiguous())) {
    call.raw_here = [output, input, output_splits, input_splits, opts](const Place& place) mutable {
      densely({input}, {output}, [&](Tensors& in, Tensors& out) {
        return place.messages.inner().alltoall_base(out[0], in[0], output_splits, input_splits, opts);
      });
    };
  }
  return run(std::move(call));
}

WorkPtr ZipBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const size_t world = static_cast<size_t>(size_);
  const bool fits = inputs.size() == world && outputs.size() == world && alike(inputs, inputs[0]) &&
                    alike(outputs, inputs[0]) && inputs[rank_].numel() == outputs[rank_].numel();
  const uint64_t all = total_bytes(outputs), received = all - (fits ? outputs[rank_].nbytes() : 0);
  const CallSize size{std::max(total_bytes(inputs), all), /*shared=*/false};
  return run(all_to_all_call(
      c10d::OpType::ALLTOALL, [ins = as_they_lie(inputs), outs = as_they_lie(outputs)] { return std::pair(ins, outs); },
      fits, inputs.empty() ? at::Tensor() : inputs[0], size, received, inputs, outputs, patience(opts),
      [outputs, inputs, opts](c10d::Backend& b) mutable { return b.alltoall(outputs, inputs, opts); }));
}

// ---- reductions ----

// The parts common to reduce-scatter and all-reduce; zip is for the caller to set.
OwnCall ZipBackend::reduce_call(Op op, c10d::OpType type, Tensors inputs, Tensors outputs,
                                const c10d::ReduceOp& reduce_op, Patience patience, RawCall raw, PairOptions* pair,
                                ReduceOptions* reduce) const {
  OwnCall call = make_call(op, type, inputs, std::move(outputs), patience, std::move(raw));
  call.size.bytes = total_bytes(inputs);
  call.received = call.size.bytes / size_ * (size_ - 1) * (op == Op::all_reduce ? 2 : 1);
  if (inputs.empty() || !alike(inputs, inputs[0]) || !sum_options(reduce_op, reduce)) return call;
  if (inputs[0].scalar_type() == at::kFloat) reduce->wire_dtype = options_.wire_dtype;  // never to a wider or other one
  call.only_zipped = inputs[0].is_cpu() && reduce_op == c10d::ReduceOp::PREMUL_SUM;     // gloo has none
  if (!can_reduce(inputs[0].scalar_type(), *reduce)) return call;
  frame_dtype(reduce->wire_dtype.value_or(inputs[0].scalar_type()), &call.frame.dtype);
  call.frame.code = options_.code;
  call.frame.checksum = options_.checksum;
  pair->frame = call.frame;
  pair->design = Design::one;  // sizes are equal, so are the ranks' times: nothing to gain from sending parts early
  call.zippable =
      call.size.bytes > 0 &&
      call.size.bytes >=
          options_.min_bytes.value_or(options_.of(op) == Mode::zip ? kReduceMinBytes : BackendOptions::kAutoMinBytes);
  return call;
}

OwnCall ZipBackend::reduce_scatter_call(c10d::OpType type, std::vector<Tensors> parts, Tensors inputs, Tensors outputs,
                                        const c10d::ReduceScatterOptions& opts, RawCall raw) const {
  PairOptions pair;
  ReduceOptions reduce;
  OwnCall call = reduce_call(Op::reduce_scatter, type, inputs, outputs, opts.reduceOp, patience(opts), std::move(raw),
                             &pair, &reduce);
  bool fits = parts.size() == outputs.size() && !outputs.empty() && !inputs.empty() && alike(outputs, inputs[0]);
  for (size_t i = 0; fits && i < parts.size(); ++i)
    fits = parts[i].size() == static_cast<size_t>(size_) && same_counts(parts[i], outputs[i].numel());
  call.zippable = call.zippable && fits;
  const bool values = type == c10d::OpType::REDUCE_SCATTER && !parts.empty() && by_value(parts[0]);
  call.zip = [parts = std::move(parts), outputs = values ? outputs : as_they_lie(outputs), pair, reduce](
                 const Place& place, Choice) {
    Traffic traffic;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (outputs[i].numel() == 0) continue;
      auto one = [&, i] { return reduce_scatter_zip(place, parts[i], outputs[i], pair, reduce); };
      traffic += i + 1 < parts.size() ? with_more_to_come(one) : one();
    }
    return traffic;
  };
  return call;
}

WorkPtr ZipBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& opts) {
  if (stays_raw(Op::reduce_scatter, input, input.nbytes()) && fits_rows(input, output, size_) &&
      !output.requires_grad())
    return pass_on(Op::reduce_scatter, input.nbytes() / size_ * (size_ - 1), input.device(),
                   [&](c10d::Backend& b) { return b._reduce_scatter_base(output, input, opts); });
  at::Tensor out = without_grad(output), in = input;
  Tensors parts = shape_rows(&in, &out, size_) ? equal_parts(as_it_lies(in), size_) : Tensors{};
  return run(
      reduce_scatter_call(c10d::OpType::_REDUCE_SCATTER_BASE, {std::move(parts)}, {input}, {output}, opts,
                          [out, in, opts](c10d::Backend& b) mutable { return b._reduce_scatter_base(out, in, opts); }));
}

WorkPtr ZipBackend::reduce_scatter(Tensors& user_outputs, std::vector<Tensors>& user_inputs,
                                   const c10d::ReduceScatterOptions& opts) {
  Tensors outputs = without_grad(user_outputs);
  std::vector<Tensors> inputs = user_inputs;
  bool refused = false;
  for (size_t i = 0; i < inputs.size() && i < outputs.size() && outputs[i].is_cpu(); ++i)
    refused = !shape_all(&inputs[i], outputs[i]) || refused;
  std::vector<Tensors> parts;
  for (const Tensors& list : inputs) parts.push_back(as_nccl_lists(list));
  OwnCall call = reduce_scatter_call(
      c10d::OpType::REDUCE_SCATTER, std::move(parts), inputs.empty() ? Tensors{} : inputs[0], outputs, opts,
      [outputs, inputs, opts](c10d::Backend& b) mutable { return b.reduce_scatter(outputs, inputs, opts); });
  call.zippable = call.zippable && !refused;
  if (may_zip(call) && outputs[0].is_cpu() && !contiguous(outputs)) {
    call.raw_here = [outputs, inputs, opts](const Place& place) {
      densely({}, outputs, [&](Tensors&, Tensors& out) {
        std::vector<Tensors> in = inputs;
        return place.messages.inner().reduce_scatter(out, in, opts);
      });
    };
  }
  return run(std::move(call));
}

WorkPtr ZipBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  std::vector<Tensors> parts;
  Tensors outs = without_grad(outputs), ins = inputs;
  for (size_t i = 0; i < outputs.size() && i < inputs.size(); ++i)
    parts.push_back(shape_rows(&ins[i], &outs[i], size_) ? equal_parts(as_it_lies(ins[i]), size_) : Tensors{});
  return run(reduce_scatter_call(
      c10d::OpType::COALESCED, std::move(parts), inputs, outputs, opts,
      [outs, ins, opts](c10d::Backend& b) mutable { return b.reduce_scatter_tensor_coalesced(outs, ins, opts); }));
}

WorkPtr ZipBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (!tensors.empty() && tensors[0].layout() != at::kStrided)  // gloo adds sparse ones here
    return forward(tensors[0].device(), [&](c10d::Backend& b) { return b.allreduce(tensors, opts); });
  if (tensors.size() == 1 && stays_raw(Op::all_reduce, tensors[0], tensors[0].nbytes()))
    return pass_on(Op::all_reduce, tensors[0].nbytes() / size_ * (size_ - 1) * 2, tensors[0].device(),
                   [&](c10d::Backend& b) { return b.allreduce(tensors, opts); });
  PairOptions pair;
  ReduceOptions reduce;
  OwnCall call = reduce_call(
      Op::all_reduce, c10d::OpType::ALLREDUCE, tensors, tensors, opts.reduceOp, patience(opts),
      [tensors, opts](c10d::Backend& b) mutable { return b.allreduce(tensors, opts); }, &pair, &reduce);
  call.zippable = call.zippable && tensors.size() == 1;
  if (may_zip(call) && tensors[0].is_cpu() && !contiguous(tensors)) {
    call.raw_here = [tensors, opts](const Place& place) {
      densely({}, tensors, [&](Tensors&, Tensors& out) { return place.messages.inner().allreduce(out, opts); });
    };
  }
  call.zip = [tensors, pair, reduce](const Place& place, Choice) {
    return all_reduce_zip(place, as_it_lies(tensors[0]), pair, reduce);
  };
  return run(std::move(call));
}

// ---- from and to one rank ----

WorkPtr ZipBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  const bool fits = tensors.size() == 1 && opts.rootTensor == 0 && root >= 0 && root < size_;
  if (fits && tensors[0].is_cuda()) {
    const at::Tensor& t = tensors[0];
    if (stays_raw(Op::broadcast, t, t.nbytes()) || raw_again(Op::broadcast, {t.nbytes()}, t, t))
      return pass_on(Op::broadcast, rank_ == root ? 0 : t.nbytes(), t.device(),
                     [&](c10d::Backend& b) { return b.broadcast(tensors, opts); });
  }
  OwnCall call = make_call(Op::broadcast, c10d::OpType::BROADCAST, tensors, tensors, patience(opts),
                           [tensors, opts](c10d::Backend& b) mutable { return b.broadcast(tensors, opts); });
  call.size.bytes = total_bytes(tensors);
  call.received = rank_ == root ? 0 : call.size.bytes;
  call.root = root;
  call.zippable = fits && frame_for(tensors[0], &call.frame) && call.size.bytes > 0 &&
                  call.size.bytes >= options_.threshold(options_.of(Op::broadcast));
  const bool bytes = fits && odd(tensors, {});
  if (bytes || (may_zip(call) && tensors[0].is_cpu() && !contiguous(tensors))) {
    call.raw_here = [tensors, opts, root, bytes, reads = rank_ == root](const Place& place) {
      if (bytes) check_rooted(place, tensors[0], root);
      auto send = [&](Tensors& in, Tensors& out) { return place.messages.inner().broadcast(reads ? in : out, opts); };
      reads ? densely(tensors, {}, send) : densely({}, tensors, send);
    };
  }
  call.zip = [tensors, root, frame = call.frame](const Place& place, Choice) {
    return broadcast_zip(place, tensors[0], root, frame);
  };
  return run(std::move(call));
}

WorkPtr ZipBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  const Tensors parts = inputs.empty() ? Tensors{} : inputs[0];
  OwnCall call =
      make_call(Op::scatter, c10d::OpType::SCATTER, parts, outputs, patience(opts),
                [outputs, inputs, opts](c10d::Backend& b) mutable { return b.scatter(outputs, inputs, opts); });
  call.size.bytes = total_bytes(outputs);
  call.received = rank_ == root ? 0 : call.size.bytes;
  call.root = root;
  bool fits = outputs.size() == 1 && root >= 0 && root < size_;
  if (rank_ == root)  // wrong arguments of the root are its own to report; the others then wait as for the inner one
    fits = fits && inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_) &&
           alike(inputs[0], outputs[0]) && same_shapes(inputs[0], outputs[0]);
  call.zippable = fits && frame_for(outputs[0], &call.frame) && call.size.bytes > 0 &&
                  call.size.bytes >= options_.threshold(options_.of(Op::scatter));
  const bool bytes = fits && odd(outputs, parts);
  if (bytes || (may_zip(call) && outputs[0].is_cpu() && !(contiguous(outputs) && contiguous(parts)))) {
    call.raw_here = [outputs, inputs, parts, opts, root, bytes](const Place& place) {
      if (bytes) check_rooted(place, outputs[0], root);
      densely(parts, outputs, [&](Tensors& in, Tensors& out) {
        std::vector<Tensors> lists(inputs.size(), in);
        return place.messages.inner().scatter(out, lists, opts);
      });
    };
  }
  call.zip = [output = outputs.empty() ? at::Tensor() : outputs[0], parts, root, frame = call.frame](const Place& place,
                                                                                                     Choice) {
    return scatter_zip(place, output, place.rank() == root ? parts : Tensors{}, root, frame);
  };
  return run(std::move(call));
}

WorkPtr ZipBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  const Tensors parts = outputs.empty() ? Tensors{} : outputs[0];
  OwnCall call =
      make_call(Op::gather, c10d::OpType::GATHER, inputs, parts, patience(opts),
                [outputs, inputs, opts](c10d::Backend& b) mutable { return b.gather(outputs, inputs, opts); });
  call.size.bytes = total_bytes(inputs);
  call.received = rank_ == root ? call.size.bytes * (size_ - 1) : 0;
  call.root = root;
  bool fits = inputs.size() == 1 && root >= 0 && root < size_;
  if (rank_ == root)
    fits = fits && outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(size_) &&
           alike(outputs[0], inputs[0]) && same_shapes(outputs[0], inputs[0]);
  call.zippable = fits && frame_for(inputs[0], &call.frame) && call.size.bytes > 0 &&
                  call.size.bytes >= options_.threshold(options_.of(Op::gather));
  if (fits && odd(inputs, parts)) {
    call.raw_here = [outputs, inputs, parts, opts, root](const Place& place) {
      check_rooted(place, inputs[0], root);
      densely(inputs, parts, [&](Tensors& in, Tensors& out) {
        std::vector<Tensors> lists(outputs.size(), out);
        return place.messages.inner().gather(lists, in, opts);
      });
    };
  }
  call.zip = [input = inputs.empty() ? at::Tensor() : inputs[0], parts, root, frame = call.frame](const Place& place,
                                                                                                  Choice) {
    return gather_zip(place, place.rank() == root ? parts : Tensors{}, input, root, frame);
  };
  return run(std::move(call));
}

}  // namespace zipccl
