"""What gloo refuses though nothing but bytes would have to move: carried. What it accepts: the same.

zipccl's default options; gloo's own answer is asked for in the same process.
"""

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, DTYPES, GLOO_DTYPES, random_bits, strided


def mine(r: int, shape, dtype) -> torch.Tensor:
    return random_bits(r, shape, dtype)


def world(group=None) -> int:
    return dist.get_world_size(group)


# Each form: (dtype, shape, change of layout, group) -> pairs of what arrived and what was sent.


def all_gather_into_tensor(dtype, shape, change, group):
    out = change(torch.empty(shape[0] * world(), *shape[1:], dtype=dtype))
    dist.all_gather_into_tensor(out, change(mine(dist.get_rank(), shape, dtype)), group=group)
    return [(part, mine(r, shape, dtype)) for r, part in enumerate(out.split(shape[0]) if shape[0] else [])]


def all_gather(dtype, shape, change, group):
    outs = [change(torch.empty(shape, dtype=dtype)) for _ in range(world())]
    dist.all_gather(outs, change(mine(dist.get_rank(), shape, dtype)), group=group)
    return [(out, mine(r, shape, dtype)) for r, out in enumerate(outs)]


def all_gather_coalesced(dtype, shape, change, group):
    ins = [change(mine(dist.get_rank() + 10 * i, shape, dtype)) for i in range(3)]
    outs = [torch.empty(shape[0] * world(), *shape[1:], dtype=dtype) for _ in ins]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x, group=group)
    manager.wait()
    parts = [(r + 10 * i, part) for i, out in enumerate(outs) for r, part in enumerate(out.chunk(world()))]
    return [(part, mine(seed, shape, dtype)) for seed, part in parts] if shape[0] else []


def all_to_all_single(dtype, shape, change, group):
    rank = dist.get_rank()
    x = torch.cat([mine(10 * rank + d, shape, dtype) for d in range(world())])
    dist.all_to_all_single(out := torch.empty_like(x), x, group=group)
    return [(part, mine(10 * r + rank, shape, dtype)) for r, part in enumerate(out.chunk(world()) if shape[0] else [])]


def uneven_all_to_all_single(dtype, shape, change, group):
    rank = dist.get_rank()
    x = torch.cat([mine(10 * rank + d, (rank + d, *shape), dtype) for d in range(world())])
    splits = [rank + d for d in range(world())]
    dist.all_to_all_single(out := torch.empty_like(x), x, splits, splits, group=group)
    return [(part, mine(10 * r + rank, (rank + r, *shape), dtype)) for r, part in enumerate(out.split(splits))]


def broadcast(dtype, shape, change, group):
    t = change(mine(dist.get_rank(), shape, dtype))
    work = dist.broadcast(t, world() - 1, group=group, async_op=True)
    work.wait()
    assert dtype.is_complex or work.get_future().value()[0].dtype == dtype  # torch sends complex ones as real ones
    return [(t, mine(world() - 1, shape, dtype))]


def scatter(dtype, shape, change, group):
    root, out = world() - 1, change(torch.empty(shape, dtype=dtype))
    parts = [change(mine(r, shape, dtype)) for r in range(world())] if dist.get_rank() == root else None
    dist.scatter(out, parts, root, group=group)
    return [(out, mine(dist.get_rank(), shape, dtype))]


def gather(dtype, shape, change, group):
    root = world() - 1
    outs = [change(torch.empty(shape, dtype=dtype)) for _ in range(world())] if dist.get_rank() == root else None
    dist.gather(change(mine(dist.get_rank(), shape, dtype)), outs, root, group=group)
    return [(out, mine(r, shape, dtype)) for r, out in enumerate(outs or [])]


def send_and_receive(dtype, shape, change, group):
    rank = dist.get_rank()
    left, right = (rank - 1) % world(), (rank + 1) % world()
    out = torch.empty(shape, dtype=dtype)
    ops = [
        dist.P2POp(dist.isend, mine(rank, shape, dtype), right, group),
        dist.P2POp(dist.irecv, out, left, group),
    ]
    for work in dist.batch_isend_irecv(ops) if rank != right else []:
        work.wait()
    return [(out, mine(left, shape, dtype))] if rank != right else []


# Forms that gloo has for its own dtypes.
GLOO_FORMS = [
    all_gather_into_tensor,
    all_gather,
    all_gather_coalesced,
    all_to_all_single,
    uneven_all_to_all_single,
    broadcast,
    scatter,
    gather,
    send_and_receive,
]


def as_is(t: torch.Tensor) -> torch.Tensor:
    return t


def check(pairs, what: str) -> None:
    for found, truth in pairs:
        assert same_bits(found, truth), what


def check_dtypes(rank, options):
    ranks.init("zipccl", pg_options=zipccl.Options(**options))
    inner = dist.new_group(backend="gloo")
    for dtype in DTYPES:
        for form in GLOO_FORMS:
            for shape in [(1,), (5, 3), (0,)]:
                what = f"{form.__name__} of {shape} {dtype}"
                check(form(dtype, shape, as_is, None), what)
                if dtype in GLOO_DTYPES:
                    check(form(dtype, shape, as_is, inner), what)
        for form in (all_gather_into_tensor, all_gather):
            check(form(dtype, (5, 3), strided, None), f"strided {form.__name__} of {dtype}")
        carried = dtype not in GLOO_DTYPES and not dtype.is_complex  # torch makes complex ones real, which are gloo's
        for form in (broadcast, scatter, gather) if carried else ():
            check(form(dtype, (5, 3), strided, None), f"strided {form.__name__} of {dtype}")


@pytest.mark.parametrize("options", [{}, {"all_gather": "zip", "all_to_all": "zip", "broadcast": "zip"}])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_is_carried(world, options):
    ranks.run(check_dtypes, world, options, timeout=120)


def check_other_forms(rank, options):
    """Uneven and list forms: gloo has none of these for any dtype."""
    ranks.init("zipccl", pg_options=zipccl.Options(**options))
    inner = dist.new_group(backend="gloo")
    counts = [3 * r for r in range(world())]
    table = [[(s + 2 * d) % 4 for d in range(world())] for s in range(world())]
    for dtype in DTYPES:
        for change in (as_is, strided):

            def uneven_gather(group, dtype=dtype, change=change):
                outs = [change(torch.empty(n, dtype=dtype)) for n in counts]
                dist.all_gather(outs, change(mine(rank, counts[rank], dtype)), group=group)
                return [(out, mine(r, n, dtype)) for r, (out, n) in enumerate(zip(outs, counts, strict=True))]

            def list_all_to_all(group, dtype=dtype, change=change):
                outs = [change(torch.empty(table[s][rank], dtype=dtype)) for s in range(world())]
                dist.all_to_all(
                    outs,
                    [change(mine(10 * rank + d, table[rank][d], dtype)) for d in range(world())],
                    group=group,
                )
                return [(out, mine(10 * s + rank, table[s][rank], dtype)) for s, out in enumerate(outs)]

            for form in (uneven_gather, list_all_to_all):
                check(form(None), f"{form.__name__} of {dtype}")
        if world() > 1:
            for form in (uneven_gather, list_all_to_all):
                with pytest.raises((RuntimeError, ValueError)):
                    form(inner)
    # Among other calls in flight, each on its own way.
    works = []
    for i in range(20):
        outs = [torch.empty(n, dtype=torch.int16) for n in counts]
        works.append((dist.all_gather(outs, mine(i + rank, counts[rank], torch.int16), async_op=True), outs, i))
        dist.all_reduce(t := torch.ones(3), async_op=True).wait()
        assert t[0] == world()
    for work, outs, i in works:
        work.wait()
        assert all(same_bits(out, mine(i + r, counts[r], torch.int16)) for r, out in enumerate(outs))


@pytest.mark.parametrize("options", [{}, {"all_gather": "zip", "all_to_all": "zip"}], ids=["auto", "zip"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_uneven_and_list_forms(world, options):
    ranks.run(check_other_forms, world, options)


def check_refusals(rank):
    """Arguments that do not fit are refused for carried dtypes too: bytes that fit by chance are no excuse."""
    ranks.init("zipccl")
    i16, u8, i32 = torch.int16, torch.uint8, torch.int32
    wrong = [
        lambda: dist.all_gather_into_tensor(torch.empty(4, dtype=i16), torch.empty(4, dtype=u8)),
        lambda: dist.all_gather_into_tensor(torch.empty(5, dtype=i16), torch.empty(2, dtype=i16)),
        lambda: dist.all_gather([torch.empty(2, dtype=i16)], torch.empty(2, dtype=i16)),
        lambda: dist.all_to_all_single(torch.empty(4, dtype=i16), torch.empty(2, dtype=i32)),
        lambda: dist.all_to_all_single(torch.empty(4, dtype=i16), torch.empty(4, dtype=i16), [1, 2], [2, 2]),
        lambda: dist.all_to_all_single(torch.empty(3, dtype=i16), torch.empty(3, dtype=i16)),
        lambda: dist.all_to_all([torch.empty(2, dtype=i16)], [torch.empty(2, dtype=i16)]),
        lambda: dist.all_gather([torch.empty(2), torch.empty(3)], torch.empty(5)),
    ]
    for i, call in enumerate(wrong):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            call()
            pytest.fail(f"call {i} was accepted", pytrace=False)
    dist.all_reduce(t := torch.ones(1))
    assert t.item() == 2  # the group is none the worse


def test_what_does_not_fit_is_refused():
    ranks.run(check_refusals, 2)


def check_accepted(rank):
    """Results, their strides and the futures' values: gloo's, where gloo has the call."""
    ranks.init("zipccl")
    inner = dist.new_group(backend="gloo")
    for dtype in GLOO_DTYPES:
        seen = []
        for group in (None, inner):
            out = torch.zeros(12, 2, dtype=dtype).t().contiguous().t()
            work = dist.all_gather_into_tensor(out, mine(rank, (6, 2), dtype), group=group, async_op=True)
            work.wait()
            values = work.get_future().value()
            t = mine(rank, (4, 4), dtype).t()
            dist.broadcast(t, 0, group=group)
            seen.append([out.stride(), t.stride(), out.clone(), t.clone(), *[v.clone() for v in values]])
        for a, b in zip(*seen, strict=True):
            assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b, dtype


def test_what_gloo_accepts_is_gloos():
    ranks.run(check_accepted, 2)
    assert BF16 in GLOO_DTYPES
