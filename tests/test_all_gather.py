"""All forms of all-gather over real inner backends: every bit, any dtype, any stride, any order of waiting.

Every rank knows what the others send, so results are compared with that, as integers, and with the inner backend.
"""

import datetime
import random

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import zipccl
from ranks import bits, same_bits
from samples import BF16, DTYPES, random_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def start(device: str, **options) -> torch.device:
    """A zipccl group that zips whatever it can."""
    where = ranks.device(device)
    ranks.init("zipccl", pg_options=zipccl.Options(**({"all_gather": "zip"} | options)))
    return where


def inner_group(device: str) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo" if device == "cpu" else "nccl")


def can_zip(device: str) -> bool:
    return device == "cpu" or zipccl._C.cuda_version is not None


def zipped_calls(group: dist.ProcessGroup | None = None) -> int:
    return zipccl.stats(group).get("all_gather", {"zipped_calls": 0})["zipped_calls"]


# ---- the forms: (this rank's tensors, group) -> for each the gathered tensor, 1-D -------------------------------


def into_tensor(xs, group=None):
    outs = [torch.empty(x.numel() * group_size(group), dtype=x.dtype, device=x.device) for x in xs]
    for out, x in zip(outs, xs, strict=True):
        dist.all_gather_into_tensor(out, x, group=group)
    return outs


def into_list(xs, group=None):
    outs = [[torch.empty_like(x) for _ in range(group_size(group))] for x in xs]
    for out, x in zip(outs, xs, strict=True):
        dist.all_gather(out, x, group=group)
    return [torch.cat(out) for out in outs]


def by_function(xs, group=None):
    group = group or dist.group.WORLD
    return [functional.wait_tensor(functional.all_gather_tensor(x, 0, group)) for x in xs]


def by_function_coalesced(xs, group=None):
    group = group or dist.group.WORLD
    return [functional.wait_tensor(t) for t in functional.all_gather_into_tensor_coalesced(xs, group)]


def by_manager(xs, group=None):
    outs = [torch.empty(x.numel() * group_size(group), dtype=x.dtype, device=x.device) for x in xs]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x, group=group)
    manager.wait()
    return outs


def group_size(group) -> int:
    return dist.get_world_size(group)


FORMS = [into_tensor, into_list, by_function, by_function_coalesced, by_manager]


def outcome(form, xs, group=None):
    """The bits, or the error."""
    try:
        return [bits(t) for t in form(xs, group)]
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def same(a, b) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- every dtype, form and size --------------------------------------------------------------------------------


def check_forms(rank, device):
    where, world = start(device), dist.get_world_size()
    inner = inner_group(device)
    for dtype in DTYPES:
        for counts in [(1,), (1023, 1, 2500), (0,)]:
            mine = [random_bits(10 * rank + i, n, dtype).to(where) for i, n in enumerate(counts)]
            truth = [
                bits(torch.cat([random_bits(10 * r + i, n, dtype) for r in range(world)])) for i, n in enumerate(counts)
            ]
            for form in FORMS:
                what = f"{form.__name__} of {counts} {dtype}"
                before = zipped_calls()
                found, expected = outcome(form, mine), outcome(form, mine, inner)
                zips = dtype == BF16 and counts != (0,) and world > 1 and can_zip(device)
                if zips or (device == "cpu" and isinstance(expected, str)):
                    assert same(found, truth), what  # gloo lacks some dtypes, zipccl does not
                else:
                    assert same(found, expected), f"{what}: {found} instead of {expected}"
                if not isinstance(expected, str):
                    assert same(expected, truth), what  # the truth is true
                calls = 1 if form in (by_function_coalesced, by_manager) else len(counts)
                assert zipped_calls() - before == (calls if zips else 0), what


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_form_dtype_and_size(world, device):
    ranks.run(check_forms, world, device, timeout=120)


# ---- every value -----------------------------------------------------------------------------------------------


def values(rank: int) -> dict[str, torch.Tensor]:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    nan = torch.arange(0x7F81, 0x8000, dtype=torch.int32).to(torch.int16).view(BF16)
    return {
        "every pattern": every.roll(rank * 1000),
        "every pattern, shuffled": every[torch.randperm(65536, generator=torch.Generator().manual_seed(rank))],
        "random bits": random_bits(rank, 70001, BF16),
        "NaN payloads": nan.roll(rank),
        "zeros": torch.zeros(5000, dtype=BF16),
        "all equal": torch.full((5000,), 1.5 + rank, dtype=BF16),
        "minus zero": torch.full((1025,), -0.0, dtype=BF16),
        "weights": (torch.randn(100_003, generator=torch.Generator().manual_seed(rank)) * 0.02).to(BF16),
        "one rank's compress, the others' do not": random_bits(rank, 40000, BF16)
        if rank
        else torch.zeros(40000).to(BF16),
    }


def check_values(rank, device, options):
    where, world = start(device, **options), dist.get_world_size()
    everyone = [values(r) for r in range(world)]
    for what, mine in everyone[rank].items():
        for form in FORMS:
            (found,) = form([mine.to(where)])
            assert same_bits(found.cpu(), torch.cat([e[what] for e in everyone])), f"{form.__name__} of {what}"
    assert zipped_calls() == len(FORMS) * len(everyone[rank]) or not can_zip(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"checksum": True}], ids=["plain", "checksum"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_value(world, options, device):
    ranks.run(check_values, world, device, options)


def check_window(rank):
    """Inside NCCL's coalescing window calls are collected, so nothing could be learnt about sizes: all goes raw."""
    where, world = start("cuda"), dist.get_world_size()
    xs = [random_bits(10 * rank + i, 3000, BF16).to(where) for i in range(3)]
    outs = [torch.empty(3000 * world, dtype=BF16, device=where) for _ in xs]
    with dist._coalescing_manager(device=where, async_ops=True) as manager:
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    for i, out in enumerate(outs):
        assert same_bits(out.cpu(), torch.cat([random_bits(10 * r + i, 3000, BF16) for r in range(world)]))
    assert zipped_calls() == 0


@pytest.mark.cuda
def test_inside_a_coalescing_window():
    ranks.run(check_window, 2)


# ---- uneven shards (lists) -------------------------------------------------------------------------------------


def check_uneven(rank, device):
    where, world = start(device), dist.get_world_size()
    for counts in [(1, 3000, 70), (0, 5, 2), (2048, 0, 0)]:
        outs = [torch.empty(n, dtype=BF16, device=where) for n in counts]
        dist.all_gather(outs, random_bits(rank, counts[rank], BF16).to(where))
        for r in range(world):
            assert same_bits(outs[r].cpu(), random_bits(r, counts[r], BF16))
        received = sum(2 * n for r, n in enumerate(counts) if r != rank)
        stats = zipccl.stats()
        assert stats["all_gather"]["raw_bytes"] == received
        stats.reset()


@pytest.mark.parametrize("device", DEVICES)
def test_uneven_shards(device):
    ranks.run(check_uneven, 3, device)


# ---- memory: strides, aliases, autograd ------------------------------------------------------------------------


def check_memory(rank, device):
    where, world = start(device), dist.get_world_size()
    shape = (6, 50)

    def mine(r):
        return random_bits(r, 300, BF16).view(shape)

    truth = torch.cat([mine(r) for r in range(world)])

    # inputs
    transposed = mine(rank).t().contiguous().to(where).t()
    spread = torch.zeros(6, 100, dtype=BF16, device=where)[:, ::2]
    spread.copy_(mine(rank))
    offset = torch.zeros(301, dtype=BF16, device=where)[1:].view(shape)  # not aligned to 4 bytes
    offset.copy_(mine(rank))
    for x in (transposed, spread, offset, mine(rank).to(where).requires_grad_()):
        out = torch.empty_like(truth, device=where)
        if x.is_contiguous() or device == "cpu":  # NCCL's front end refuses strided inputs
            dist.all_gather_into_tensor(out, x)
            assert same_bits(out.cpu(), truth)
        outs = [torch.empty(shape, dtype=BF16, device=where) for _ in range(world)]
        dist.all_gather(outs, x.detach().contiguous())
        assert same_bits(torch.cat(outs).cpu(), truth)

    # outputs
    if device == "cpu":
        holes = torch.full((6 * world, 100), 7.0, dtype=BF16)
        dist.all_gather_into_tensor(holes[:, ::2], mine(rank))
        assert same_bits(holes[:, ::2], truth) and (holes[:, 1::2] == 7).all()
        outs = [torch.empty(50, 6, dtype=BF16).t() for _ in range(world)]
        dist.all_gather(outs, mine(rank))
        assert same_bits(torch.cat(outs), truth)
    stacked = torch.empty(world, *shape, dtype=BF16, device=where)  # the stacked form of all_gather_into_tensor
    dist.all_gather_into_tensor(stacked, mine(rank).to(where))
    assert same_bits(stacked.view_as(truth).cpu(), truth)
    leaf = torch.empty(truth.shape, dtype=BF16, device=where, requires_grad=True)
    with torch.no_grad():
        dist.all_gather_into_tensor(leaf, mine(rank).to(where))
    assert same_bits(leaf.cpu(), truth) and leaf.grad_fn is None

    # in place: the input is this rank's part of the output, for both forms
    whole = torch.zeros_like(truth, device=where)
    own = whole[6 * rank : 6 * rank + 6]
    own.copy_(mine(rank))
    dist.all_gather_into_tensor(whole, own)
    assert same_bits(whole.cpu(), truth)
    outs = list(torch.zeros_like(truth, device=where).chunk(world))
    outs[rank].copy_(mine(rank))
    dist.all_gather(outs, outs[rank])
    assert same_bits(torch.cat(outs).cpu(), truth)

    # aliased: the input lies where another rank's part goes
    whole = torch.zeros_like(truth, device=where)
    other = whole[6 * (world - 1 - rank) :][:6]
    other.copy_(mine(rank))
    dist.all_gather_into_tensor(whole, other)
    assert same_bits(whole.cpu(), truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [2, 3])
def test_strides_aliases_and_leaves(world, device):
    ranks.run(check_memory, world, device)


# ---- arguments that do not fit ---------------------------------------------------------------------------------


def check_wrong_arguments(rank):
    start("cpu")
    inner = inner_group("cpu")

    def too_small(group):
        dist.all_gather_into_tensor(torch.empty(3, dtype=BF16), torch.zeros(2, dtype=BF16), group=group)

    def other_dtype(group):
        dist.all_gather_into_tensor(torch.empty(4), torch.zeros(2, dtype=BF16), group=group)

    def list_too_short(group):
        dist.all_gather([torch.empty(2, dtype=BF16)], torch.zeros(2, dtype=BF16), group=group)

    def sparse(group):
        x = torch.zeros(2, 2, dtype=BF16).to_sparse()
        dist.all_gather([x.clone(), x.clone()], x, group=group)

    for wrong in (too_small, other_dtype, list_too_short, sparse):
        said = []
        for group in (inner, None):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                wrong(group)
            said.append((type(caught.value), str(caught.value)))
        assert said[0] == said[1], wrong.__name__


def test_wrong_arguments_fail_as_they_do_on_the_inner_backend():
    ranks.run(check_wrong_arguments, 2)


# ---- asynchronous calls ----------------------------------------------------------------------------------------


def check_many_in_flight(rank, device):
    """Zipped all-gathers between forwarded calls, all asynchronous, waited for in an order of each rank's own."""
    where, world = start(device), dist.get_world_size()
    works = []
    for i in range(40):
        x = random_bits(100 * rank + i, 1000 + 37 * i, BF16).to(where)
        truth = torch.cat([random_bits(100 * r + i, 1000 + 37 * i, BF16) for r in range(world)])
        if i % 3 == 0:
            out = torch.empty(truth.numel(), dtype=BF16, device=where)
            work = dist.all_gather_into_tensor(out, x, async_op=True)
        else:
            out = [torch.empty_like(x) for _ in range(world)]
            work = dist.all_gather(out, x, async_op=True)
        works.append((work, lambda out=out: torch.cat(out) if isinstance(out, list) else out, truth))

        summed = torch.full((i + 1,), rank + 1, dtype=torch.int64, device=where)
        works.append(
            (dist.all_reduce(summed, async_op=True), lambda t=summed: t, torch.full((i + 1,), sum(range(world + 1))))
        )
        sent = torch.full((9,), rank * 1000 + i, dtype=torch.int32, device=where)
        works.append(
            (
                dist.broadcast(sent, i % world, async_op=True),
                lambda t=sent: t,
                torch.full((9,), i % world * 1000 + i, dtype=torch.int32),
            )
        )
    random.Random(rank).shuffle(works)
    for work, result, truth in works:
        work.wait()
        assert same_bits(result().cpu(), truth)
        assert work.is_completed() or device == "cuda"
        work.wait()  # again: torch's registry of works may
    assert zipped_calls() == 40 or not can_zip(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [2, 4])
def test_many_calls_in_flight_between_forwarded_ones(world, device):
    ranks.run(check_many_in_flight, world, device)


def check_futures(rank, device):
    where, world = start(device), dist.get_world_size()
    inner = inner_group(device)
    x = random_bits(rank, 3000, BF16).to(where)
    truth = torch.cat([random_bits(r, 3000, BF16) for r in range(world)])
    for group in (None, inner):  # a future's value is what the inner backend's is
        out = torch.empty(3000 * world, dtype=BF16, device=where)
        work = dist.all_gather_into_tensor(out, x, async_op=True, group=group)
        future = work.get_future().then(lambda f: [t.clone() for t in f.value()])
        assert same_bits(torch.cat(future.wait()).cpu(), truth)
        assert len(future.value()) == (world if device == "cpu" else 1)
        outs = [torch.empty_like(x) for _ in range(world)]
        future = dist.all_gather(outs, x, async_op=True, group=group).get_future()
        future.wait()
        assert same_bits(torch.cat(outs).cpu(), truth)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    assert work.wait(datetime.timedelta(seconds=20))
    assert same_bits(out.cpu(), truth)


@pytest.mark.parametrize("device", DEVICES)
def test_futures_and_timed_waits(device):
    ranks.run(check_futures, 2, device)


def check_absent_peer(rank):
    """A rank that never comes: an error within the group's timeout, and a group that can still be destroyed."""
    ranks.init("zipccl", timeout=2, pg_options=zipccl.Options(all_gather="zip"))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        out = torch.empty(6000, dtype=BF16)
        work = dist.all_gather_into_tensor(out, random_bits(0, 3000, BF16), async_op=True)
        said = r"zipccl all_gather \(rank 0 of 2, group 0, 6000 bytes\): .*[Tt]imed out"
        with pytest.raises(zipccl.Error, match=said):
            work.wait()
        store.set("given up", "")
    store.wait(["given up"], datetime.timedelta(seconds=30))
    dist.destroy_process_group()


def test_an_absent_peer_ends_in_a_timeout():
    ranks.run(check_absent_peer, 2)


# ---- sizes beyond 32 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [31, 32, 33, 40])
@pytest.mark.parametrize("layout", ["compact", "split", "packed"])
def test_bounds_are_64_bit(power, layout):
    """Tensors that exist by their strides only: sizes and tables of their frames, by arithmetic."""
    count = 2**power
    huge = torch.zeros(1, dtype=BF16).expand(count)
    bound = zipccl._C.frame_bound(huge, layout=layout)
    tiles, groups = count // 1024, count // 32768
    tables = 8 * groups * (1 if layout == "split" else 2) + 2 * tiles + tiles  # so many values are packed, not compact
    units = tiles * (1024 + 384) if layout == "split" else count
    assert bound == pytest.approx(64 + tables + units + count + 16 * groups, abs=96)
    raw = zipccl._C.frame_bound(torch.zeros(1).expand(count))
    assert raw == 64 + 4 * count


def check_exchanged_sizes(rank):
    """Cut to 32 bits this limit would be 0."""
    start("cpu", min_bytes=2**33)
    small = torch.zeros(4, dtype=BF16)
    outs = [torch.empty(4, dtype=BF16) for _ in range(2)]
    dist.all_gather(outs, small)
    assert zipped_calls() == 0


def test_min_bytes_is_64_bit():
    ranks.run(check_exchanged_sizes, 2)
