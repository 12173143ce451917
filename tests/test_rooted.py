"""Broadcast, scatter and gather: every root, dtype, stride and size; zipped where they can be."""

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, DTYPES, GLOO_DTYPES, frame_bytes, random_bits, strided, weights

ZIP = {"broadcast": "zip", "scatter": "zip", "gather": "zip"}


def start(**options) -> tuple[int, int]:
    ranks.init("zipccl", pg_options=zipccl.Options(**(ZIP | options)))
    return dist.get_rank(), dist.get_world_size()


def zipped(op: str) -> int:
    return zipccl.stats().get(op, {"zipped_calls": 0})["zipped_calls"]


def as_is(t: torch.Tensor) -> torch.Tensor:
    return t


# Each call gives what this rank got and should have got; nothing where it gets nothing.


def broadcast(root, make, group, change):
    rank = dist.get_rank()
    t = change(make(rank))
    dist.broadcast(t, root, group=group)
    return [(t, make(root))]


def scatter(root, make, group, change):
    rank, world = dist.get_rank(), dist.get_world_size()
    out = change(torch.zeros_like(make(0)))
    dist.scatter(out, [change(make(r)) for r in range(world)] if rank == root else None, root, group=group)
    return [(out, make(rank))]


def gather(root, make, group, change):
    rank, world = dist.get_rank(), dist.get_world_size()
    outs = [change(torch.zeros_like(make(0))) for _ in range(world)]
    dist.gather(change(make(rank)), outs if rank == root else None, root, group=group)
    return [(out, make(r)) for r, out in enumerate(outs)] if rank == root else []


CALLS = [broadcast, scatter, gather]


def check(call, *args):
    for found, truth in call(*args):
        assert same_bits(found, truth), f"{call.__name__} {args}"


def check_roots_and_dtypes(rank, options):
    rank, world = start(**options)
    inner = dist.new_group(backend="gloo")
    for call in CALLS:
        for root in range(world):
            for dtype in DTYPES:
                for shape in [(1,), (3, 700), (0,)]:

                    def make(r, shape=shape, dtype=dtype):
                        return random_bits(r, shape, dtype)

                    before = zipped(call.__name__)
                    check(call, root, make, None, as_is)
                    if dtype in GLOO_DTYPES:
                        check(call, root, make, inner, as_is)  # the truth is gloo's
                    zips = dtype == BF16 and shape != (0,) and world > 1
                    assert zipped(call.__name__) - before == zips, f"{call.__name__} of {shape} {dtype}"


@pytest.mark.parametrize("options", [{}, {"checksum": True}], ids=["plain", "checksum"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_root_and_dtype(world, options):
    ranks.run(check_roots_and_dtypes, world, options, timeout=120)


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


def check_strides_and_values(rank):
    rank, world = start()
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    makes = [
        lambda r: weights(r, (30, 50)),
        lambda r: every.roll(777 * r),
        lambda r: torch.full((40, 40), -0.0, dtype=BF16),
        lambda r: random_bits(r, (200, 200)) if r % 2 else weights(r, (200, 200)),
    ]
    for call in CALLS:
        for root in range(world):
            for make in makes:
                for change in (strided, transposed):
                    check(call, root, make, None, change)
        # Strides are a rank's own matter.
        check(call, 0, makes[0], None, strided if rank else transposed)
    dist.gather(
        x := weights(rank, 100),
        outs := [x if r == rank else torch.empty_like(x) for r in range(world)] if rank == 0 else None,
    )
    if rank == 0:  # in place
        assert all(same_bits(out, weights(r, 100)) for r, out in enumerate(outs))
    parts = [weights(r, 100) for r in range(world)] if rank == 0 else None
    dist.scatter(out := parts[0] if parts else torch.empty(100, dtype=BF16), parts)
    assert same_bits(out, weights(rank, 100))
    leaf = torch.nn.Parameter(weights(rank, 100))
    with torch.no_grad():
        dist.broadcast(leaf, 1)
    assert same_bits(leaf, weights(1, 100))
    return [zipped(call.__name__) for call in CALLS]


def test_every_stride_and_value():
    n = 3 * 4 * 2 + 1
    assert ranks.run(check_strides_and_values, 3) == [[n + 1, n + 1, n + 1]] * 3


def check_groups(rank):
    """Roots are named by their global ranks."""
    rank, world = start()
    members = [1, 3]
    group = dist.new_group(members, pg_options=zipccl.Options(**ZIP))
    if rank not in members:
        return
    for root in members:
        dist.broadcast(t := weights(rank, 999), root, group=group)
        assert same_bits(t, weights(root, 999))
        dist.scatter(t, [weights(10 + r, 999) for r in members] if rank == root else None, root, group=group)
        assert same_bits(t, weights(10 + rank, 999))
        outs = [torch.empty_like(t) for _ in members]
        dist.gather(t, outs if rank == root else None, root, group=group)
        if rank == root:
            assert all(same_bits(out, weights(10 + r, 999)) for r, out in zip(members, outs, strict=True))
    stats = zipccl.stats(group)
    assert [stats[c.__name__]["zipped_calls"] for c in CALLS] == [2, 2, 2]


def test_groups_of_some_ranks():
    ranks.run(check_groups, 4)


def check_what_travels(rank):
    rank, world = start()
    t = weights(0, 50_000)
    dist.broadcast(t.clone() if rank == 0 else torch.empty_like(t), 0)
    s = zipccl.stats()["broadcast"]
    assert (s["raw_bytes"], s["wire_bytes"]) == ((0, 0) if rank == 0 else (t.nbytes, frame_bytes(t)))
    largest = max(frame_bytes(weights(r, 50_000)) for r in range(world))
    outs = [torch.empty_like(t) for _ in range(world)]
    dist.gather(weights(rank, 50_000), outs if rank == 2 else None, 2)
    s = zipccl.stats()["gather"]
    assert (s["raw_bytes"], s["wire_bytes"]) == ((2 * t.nbytes, 2 * largest) if rank == 2 else (0, 0))
    dist.scatter(outs[0], [weights(r, 50_000) for r in range(world)] if rank == 1 else None, 1)
    s = zipccl.stats()["scatter"]
    assert (s["raw_bytes"], s["wire_bytes"]) == ((0, 0) if rank == 1 else (t.nbytes, largest))


def test_what_travels():
    ranks.run(check_what_travels, 3)


def check_thresholds(rank):
    start(min_bytes=2000)
    for call in CALLS:
        check(call, 0, lambda r: weights(r, 999), None, as_is)
        assert zipped(call.__name__) == 0
        check(call, 0, lambda r: weights(r, 1000), None, as_is)
        assert zipped(call.__name__) == 1


def test_small_calls_stay_raw():
    ranks.run(check_thresholds, 2)


def check_auto_takes_strides(rank):
    """Whatever "auto" decides for a call, the call's tensors may have the strides that zipped ones may have."""
    ranks.init("zipccl", pg_options=zipccl.Options(min_bytes=0))
    for call in CALLS:
        for change in (strided, transposed, strided if rank else transposed):
            check(call, 1, lambda r: weights(r, (5, 7)), None, change)


def test_auto_takes_strides():
    ranks.run(check_auto_takes_strides, 3)
