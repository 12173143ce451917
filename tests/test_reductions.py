"""Zipped reduce-scatter and all-reduce against an independent sum: fp32, in rank order, rounded once."""

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import zipccl
from ranks import bits, same_bits
from samples import BF16, random_bits, strided, weights

F32, F16 = torch.float32, torch.float16
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
FACTOR = 1 / 3  # of PREMUL_SUM


def premul_sum():
    return dist._make_nccl_premul_sum(FACTOR)


OPS = {"sum": lambda: SUM, "avg": lambda: AVG}
if hasattr(dist, "_make_nccl_premul_sum"):
    OPS["premul_sum"] = premul_sum


def reference(inputs: list[torch.Tensor], op: str, wire: torch.dtype | None = None) -> torch.Tensor:
    """What the ranks' inputs come to. `wire`: inputs are rounded to it first."""
    total = None
    for x in inputs:
        x = (x.to(wire) if wire else x).float()
        if op == "premul_sum":
            x = x * torch.tensor(FACTOR, dtype=F32)
        total = x.clone() if total is None else total + x
    if op == "avg":
        total = total / torch.tensor(float(len(inputs)), dtype=F32)
    return total.to(inputs[0].dtype)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; a NaN for a NaN, since IEEE 754 leaves its payload open."""
    nan = a.isnan() & b.isnan()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a)[~nan], bits(b)[~nan])


def gradients(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.exp(3 * torch.randn(count, generator=generator))
    return x.to(dtype)


def extremes(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Infinities of both signs, NaNs, denormals, values whose sums overflow, zeros of both signs."""
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(seed)
    kinds = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), info.max, -info.max, info.max / 2, info.tiny]
    kinds += [info.smallest_normal / 8, -info.smallest_normal / 8, 1.0, info.eps]
    return torch.tensor(kinds, dtype=torch.float64)[torch.randint(0, len(kinds), (count,), generator=generator)].to(
        dtype
    )


def start(**options) -> tuple[int, int]:
    ranks.init(
        "zipccl",
        pg_options=zipccl.Options(**({"reduce_scatter": "zip", "all_reduce": "zip", "min_bytes": 0} | options)),
    )
    return dist.get_rank(), dist.get_world_size()


def zipped(op: str) -> int:
    return zipccl.stats().get(op, {"zipped_calls": 0})["zipped_calls"]


# ---- the forms of reduce-scatter: parts[d] of this rank goes to rank d; each gives this rank's sum ---------------


def by_tensor(parts, op):
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out, torch.cat(parts), op)
    return out


def by_list(parts, op):
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, op)
    return out


def by_strided_tensors(parts, op):
    out = strided(torch.empty_like(parts[0]))
    dist.reduce_scatter(out, [strided(t) for t in parts], op)
    out2 = strided(torch.empty_like(parts[0]))
    dist.reduce_scatter_tensor(out2, strided(torch.cat(parts)), op)
    assert same_bits(out, out2)
    return out.contiguous()


def by_async_tensor(parts, op):
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out, torch.cat(parts), op, async_op=True).get_future().wait()
    return out


def by_manager(parts, op):
    outs = [torch.empty_like(parts[0]) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.reduce_scatter_tensor(out, torch.cat(parts), op)
    manager.wait()
    assert same_bits(outs[0], outs[1])
    return outs[0]


def by_function(parts, op):
    if op not in (SUM, AVG):
        return by_tensor(parts, op)
    name = "sum" if op == SUM else "avg"
    x = torch.cat(parts)
    first, second = functional.reduce_scatter_tensor_coalesced([x, x.clone()], name, [0, 0], dist.group.WORLD)
    once = functional.wait_tensor(functional.reduce_scatter_tensor(x, name, 0, dist.group.WORLD))
    assert same_bits(functional.wait_tensor(first), once) and same_bits(functional.wait_tensor(second), once)
    return once


FORMS = {by_tensor: 1, by_list: 1, by_strided_tensors: 2, by_async_tensor: 1, by_manager: 1}


# ---- against the reference -------------------------------------------------------------------------------------


def check_reduce_scatter(rank, wire):
    rank, world = start(wire_dtype=wire)
    for dtype in (F32, BF16, F16):
        rounded = wire if dtype == F32 else None  # a wire dtype is for wider inputs only
        for make in (gradients, extremes, random_bits):
            for count in (1, 1001, 40_000):
                mine = [make(100 * rank + d, count, dtype) for d in range(world)]
                of_all = [make(100 * r + rank, count, dtype) for r in range(world)]
                for name, op in OPS.items():
                    expected = reference(of_all, name, rounded)
                    for form, calls in FORMS.items() if count == 1001 else [(by_tensor, 1)]:
                        what = f"{form.__name__} {name} of {count} {dtype} {make.__name__}"
                        before = zipped("reduce_scatter")
                        assert same_values(form(mine, op()), expected), what
                        assert zipped("reduce_scatter") - before == (calls if world > 1 else 0), what
                    if count == 1001:
                        assert same_values(by_function(mine, op()), expected), name


@pytest.mark.parametrize("wire", [None, BF16, F16])
@pytest.mark.parametrize("world", [2, 3])
def test_reduce_scatter(world, wire):
    ranks.run(check_reduce_scatter, world, wire, timeout=120)


def check_all_reduce(rank, wire):
    rank, world = start(wire_dtype=wire)
    results = []
    for dtype in (F32, BF16, F16):
        rounded = wire if dtype == F32 else None
        for make in (gradients, extremes, random_bits):
            for count in (1, world - 1, 1003, 30_001):  # fewer values than ranks; not divisible by them
                of_all = [make(r, count, dtype) for r in range(world)]
                for name, op in OPS.items():
                    expected = reference(of_all, name, rounded)
                    if rounded:
                        expected = expected.to(rounded).to(dtype)
                    before = zipped("all_reduce")
                    dist.all_reduce(t := of_all[rank].clone(), op())
                    assert same_values(t, expected), f"{name} of {count} {dtype} {make.__name__}"
                    dist.all_reduce(s := strided(of_all[rank]), op())
                    assert same_values(s.contiguous(), t)
                    assert zipped("all_reduce") - before == (2 if count else 0)
                    results.append(bits(t))
    return [r.numpy() for r in results]


@pytest.mark.parametrize("wire", [None, BF16, F16])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_reduce(world, wire):
    """The reference's values, and on every rank the same bits, NaNs included."""
    first, *others = ranks.run(check_all_reduce, world, wire, timeout=120)
    for other in others:
        assert all((a == b).all() for a, b in zip(first, other, strict=True))


def check_overflow(rank):
    rank, world = start()
    for dtype in (F16, BF16, F32):
        largest = torch.finfo(dtype).max
        dist.all_reduce(t := torch.full((5,), largest, dtype=dtype))
        assert (t == float("inf")).all()
    dist.all_reduce(t := torch.full((5,), 65504.0, dtype=F16), AVG)
    assert (t == 65504.0).all()  # the fp32 sum holds it, and the mean is in range again
    dist.all_reduce(t := torch.full((5,), float("inf") if rank else -float("inf")))
    assert t.isnan().all()


def test_overflow():
    ranks.run(check_overflow, 2)


def check_order(rank):
    """Sums that come out differently in any other order, and in less than fp32."""
    rank, world = start()
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])
    dist.all_reduce(t := values[rank].repeat(3000))
    assert (t == 1.0).all()  # ((1e8 + 1) - 1e8) + 1: the first 1 is lost
    values = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=BF16)
    dist.all_reduce(t := values[rank].repeat(3000))
    assert (t == 260.0).all()  # 259 is halfway; bf16 after each step would have stayed at 256


def test_order_and_precision():
    ranks.run(check_order, 4)


# ---- what is left to the inner backend -------------------------------------------------------------------------


def outcome(call):
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def same(a, b) -> bool:
    return a == b if isinstance(a, str) or isinstance(b, str) else same_bits(a, b)


def both_reductions(x, op, group):
    def all_reduce():
        dist.all_reduce(t := x.clone(), op, group=group)
        return t

    def reduce_scatter():
        dist.reduce_scatter_tensor(out := torch.empty_like(x[: x.numel() // 3]), x.clone(), op, group=group)
        return out

    return [outcome(all_reduce), outcome(reduce_scatter)]


def check_forwarded(rank, options):
    start(**options)
    inner = dist.new_group(backend="gloo")
    every = options == {"reduce_scatter": "raw", "all_reduce": "raw"}
    cases = [(torch.int64, SUM), (torch.float64, SUM), (torch.float64, AVG), (torch.int32, dist.ReduceOp.BOR)]
    cases += [(torch.uint8, dist.ReduceOp.MAX), (torch.int16, SUM), (torch.complex128, SUM), (torch.bool, SUM)]
    for dtype in (F32, BF16, F16):
        cases += [(dtype, op) for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)]
        if every:
            cases += [(dtype, op()) for op in OPS.values()]
    for dtype, op in cases:
        x = gradients(rank, 3000, torch.float32)
        x = x.to(dtype) if dtype.is_floating_point or dtype.is_complex else (x * 10).long().to(dtype)
        for found, expected in zip(both_reductions(x, op, None), both_reductions(x, op, inner), strict=True):
            if isinstance(expected, str):
                expected = expected.replace("gloo", "zipccl") if "gloo" in str(found) else expected
            assert same(found, expected), f"{op} of {dtype}: {found} instead of {expected}"
    assert zipped("all_reduce") == zipped("reduce_scatter") == 0


@pytest.mark.parametrize("options", [{}, {"reduce_scatter": "raw", "all_reduce": "raw"}], ids=["zip", "raw"])
def test_other_operations_and_dtypes_are_the_inner_backends(options):
    ranks.run(check_forwarded, 3, options)


def check_defaults(rank):
    ranks.init("zipccl")
    inner = dist.new_group(backend="gloo")
    for count in (5, 600_000):  # above every threshold
        for dtype in (F32, BF16):
            x = gradients(rank, 3 * count, dtype)
            for found, expected in zip(both_reductions(x, SUM, None), both_reductions(x, SUM, inner), strict=True):
                assert same_bits(found, expected)
    assert zipped("all_reduce") == zipped("reduce_scatter") == 0


def test_by_default_reductions_are_the_inner_backends():
    ranks.run(check_defaults, 3)


def check_thresholds(rank):
    start(min_bytes=None)
    dist.all_reduce(torch.ones(16383))
    assert zipped("all_reduce") == 0  # scalars and the like: 64 KiB
    dist.all_reduce(torch.ones(16384))
    assert zipped("all_reduce") == 1
    dist.all_reduce(torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    with zipccl.override(min_bytes=0):
        dist.all_reduce(t := torch.ones(1))
        assert t.item() == 2 and zipped("all_reduce") == 2
        dist.all_reduce(torch.empty(0))
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    assert zipped("all_reduce") == 2


def test_small_reductions_stay_raw():
    ranks.run(check_thresholds, 2)


def check_wire(rank):
    rank, world = start(wire_dtype=BF16)
    x = weights(rank, 2 * 65536, F32)
    dist.reduce_scatter_tensor(torch.empty(65536), x)
    s = zipccl.stats()["reduce_scatter"]
    assert s["raw_bytes"] == 4 * 65536 and s["wire_bytes"] < 0.4 * s["raw_bytes"]
    dist.all_reduce(x)
    s = zipccl.stats()["all_reduce"]
    assert s["raw_bytes"] == 4 * 2 * 65536 and s["wire_bytes"] < 0.4 * s["raw_bytes"]


def test_fp32_on_a_bf16_wire_is_smaller_by_more_than_2_5():
    ranks.run(check_wire, 2)


def check_auto_takes_strides(rank):
    """Whatever "auto" decides for a call, the call's tensors may have the strides that zipped ones may have."""
    start(reduce_scatter="auto", all_reduce="auto")
    for dtype in (F32, BF16):
        dist.all_reduce(t := strided(torch.ones(6, dtype=dtype)))
        outs = [strided(torch.zeros(6, dtype=dtype)) for _ in range(2)]
        dist.reduce_scatter(outs[0], [strided(torch.ones(6, dtype=dtype)) for _ in range(2)])
        dist.reduce_scatter_tensor(outs[1], strided(torch.ones(12, dtype=dtype)))
        assert all((x == 2).all() for x in (t, *outs)), dtype


def test_auto_takes_strides():
    ranks.run(check_auto_takes_strides, 2)
