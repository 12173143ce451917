"""Wrong arguments: zipccl refuses what gloo refuses, in gloo's words and at the same moment, and the group goes on.

What gloo does not notice, or only zipccl has, is refused in its own words.
"""

import functools
import os
import re

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl

WORLD = 3
EVERYTHING = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce")
MODES = {
    "default": {},
    "zip": {f"ZIPCCL_{name.upper()}": "zip" for name in EVERYTHING} | {"ZIPCCL_MIN_BYTES": "0", "ZIPCCL_CODE": "dense"},
}
OTHER = torch.float64
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.float8_e4m3fn)
NOT_GLOOS = (torch.int16, torch.float8_e4m3fn)  # moved as bytes: what is right of them gloo alone refuses


def calls(rank: int, dtype: torch.dtype) -> dict:
    """Each: what one rank does, given async_op. Some are wrong on one rank alone, and that one alone makes them."""

    def t(*shape, of=dtype):
        return torch.ones(shape).to(of)

    def some(count, *shape, of=dtype):
        return [t(*shape, of=of) for _ in range(count)]

    def only(on, call):
        return call if rank == on else lambda async_op: None

    n, call = WORLD, functools.partial
    on_all = {
        "gather short list": call(dist.all_gather, some(n - 1, 4), t(4)),
        "gather long list": call(dist.all_gather, some(n + 1, 4), t(4)),
        "gather no list": call(dist.all_gather, [], t(4)),
        "gather to other dtype": call(dist.all_gather, some(n, 4, of=OTHER), t(4)),
        "gather one to other dtype": call(dist.all_gather, [*some(n - 1, 4), t(4, of=OTHER)], t(4)),
        "into too small": call(dist.all_gather_into_tensor, t(4 * n - 1), t(4)),
        "into too large": call(dist.all_gather_into_tensor, t(5 * n), t(4)),
        "into other dtype": call(dist.all_gather_into_tensor, t(4 * n, of=OTHER), t(4)),
        "broadcast sparse": call(dist.broadcast, t(4, 4, of=torch.float32).to_sparse(), 0),
        "broadcast from nobody": call(dist.broadcast, t(4), n + 3),
        "reduce-scatter short list": call(dist.reduce_scatter, t(4), some(n - 1, 4)),
        "reduce-scatter other shape": call(dist.reduce_scatter, t(4), some(n, 5)),
        "reduce-scatter other dtype": call(dist.reduce_scatter, t(4, of=OTHER), some(n, 4)),
        "reduce-scatter too small": call(dist.reduce_scatter_tensor, t(4), t(4 * n - 1)),
        "reduce-scatter tensor of other dtype": call(dist.reduce_scatter_tensor, t(4, of=OTHER), t(4 * n)),
        "all-to-all does not divide": call(dist.all_to_all_single, t(4 * n + 1), t(4 * n + 1)),
        "all-to-all splits of more": call(dist.all_to_all_single, t(4 * n), t(4 * n), [4] * n, [5] * n),
        "all-to-all too many splits": call(dist.all_to_all_single, t(4 * n), t(4 * n), [4] * (n + 1), [4] * n),
        "all-to-all to other dtype": call(dist.all_to_all_single, t(4 * n, of=OTHER), t(4 * n)),
        "all-to-all short list": call(dist.all_to_all, some(n - 1, 4), some(n, 4)),
        "all-to-all list of other dtype": call(dist.all_to_all, some(n, 4, of=OTHER), some(n, 4)),
        "scatter short list": only(0, call(dist.scatter, t(4), some(n - 1, 4))),
        "scatter other shape": only(0, call(dist.scatter, t(4), some(n, 5))),
        "scatter other dtype": only(0, call(dist.scatter, t(4), some(n, 4, of=OTHER))),
        "scatter nothing": only(0, call(dist.scatter, t(4), None)),
        "scatter from elsewhere": only(1, call(dist.scatter, t(4), some(n, 4))),
        "gather into short list": only(0, call(dist.gather, t(4), some(n - 1, 4))),
        "gather into other shape": only(0, call(dist.gather, t(4), some(n, 5))),
        "gather at elsewhere": only(1, call(dist.gather, t(4), some(n, 4))),
        "not a tensor": call(dist.all_reduce, "x"),
    }
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BXOR):
        on_all[f"all-reduce {op}"] = call(dist.all_reduce, t(4), op)
        on_all[f"reduce-scatter {op}"] = call(dist.reduce_scatter_tensor, t(4), t(4 * n), op)
    return on_all


def outcome(call, async_op: bool) -> tuple[str, str]:
    """When it was refused and in which words; without the time, place and rank that some words begin with."""
    moment = "call"
    try:
        work = call(async_op=async_op)
        moment = "wait"
        if work is not None:
            work.wait()
    except (RuntimeError, ValueError, TypeError) as error:
        words = re.sub(r"^zipccl \w+ \([^)]*\): |\[rank\d\]:\[F\S+ \S+ ", "", str(error))
        return moment, re.sub(r"\s*Exception raised from.*", "", words, flags=re.S)
    return "done", ""


def refused(rank, backend):
    ranks.init(backend, timeout=15)
    found = {}
    for dtype in DTYPES:
        for async_op in (False, True):
            for name, call in calls(rank, dtype).items():
                found[name, dtype, async_op] = outcome(call, async_op)
    values, gathered = torch.ones(4, dtype=torch.bfloat16), torch.empty(4 * WORLD, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(gathered, values)
    dist.all_reduce(values)
    assert gathered.sum() == values.sum() == 4 * WORLD
    return found


@functools.cache
def on_gloo():
    return ranks.run(refused, WORLD, "gloo")


@pytest.mark.parametrize("mode", MODES)
def test_what_gloo_refuses_is_refused_alike(mode):
    refusals = 0
    for expected, found in zip(on_gloo(), ranks.run(refused, WORLD, "zipccl", env=MODES[mode]), strict=True):
        for key, said in expected.items():
            _, dtype, _ = key
            if dtype in NOT_GLOOS and said[1].startswith("Invalid scalar type") and found[key][0] == "done":
                continue
            refusals += said[0] != "done"
            assert found[key] == said, key
    assert refusals > 600


def wrong_splits(rank):
    """gloo writes before the tensor; here nothing has happened, and the group goes on."""
    ranks.init("zipccl", timeout=15)
    x = torch.arange(8, dtype=torch.bfloat16)
    for sends, receives in (([-1, 9], [4, 4]), ([4, 4], [9, -1])):
        with pytest.raises(ValueError, match="split sizes of an all-to-all cannot be negative: -1"):
            dist.all_to_all_single(torch.empty_like(x), x, receives, sends)
    dist.all_to_all_single(out := torch.empty_like(x), x)
    assert torch.equal(out, x.view(2, 4)[rank].repeat(2))


@pytest.mark.parametrize("mode", MODES)
def test_negative_splits(mode):
    ranks.run(wrong_splits, 2, env=MODES[mode])


def from_children(rank):
    """The connections of a group belong to the process that made it."""
    ranks.init("zipccl", timeout=15)
    x, gathered = torch.ones(1000, dtype=torch.bfloat16), torch.empty(2000, dtype=torch.bfloat16)
    state = zipccl.DynamiQState()
    zipccl.dynamiq.all_reduce(torch.ones(1000), state)
    if (child := os.fork()) == 0:
        told = 0
        for call in (
            lambda: dist.all_gather_into_tensor(gathered, x),
            lambda: zipccl.dynamiq.all_reduce(torch.ones(1000), state),
        ):
            try:
                call()
            except RuntimeError as error:
                told += "is a fork of the one that made the group" in str(error)
        os._exit(0 if told == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_gather_into_tensor(gathered, x)
    zipccl.dynamiq.all_reduce(y := torch.ones(1000), state)
    assert gathered.sum() == 2000 and y.sum() == 2000


def test_a_forked_child_is_refused():
    ranks.run(from_children, 2, env=MODES["zip"])


def told_of_groups(rank):
    """What is no group of this rank's is said to be none."""
    ranks.init("zipccl", timeout=15)
    other = dist.new_group([1], backend="gloo")
    for call in (zipccl.stats, lambda group: zipccl.explain(group=group)):
        with pytest.raises(TypeError, match="a group is wanted, not its name 'x'"):
            call("x")
        with pytest.raises(ValueError, match="is not in the group" if rank == 0 else "is not a zipccl group"):
            call(other)
    with pytest.raises(ValueError, match="bytes must be a number, 0 or more, not -1"):
        zipccl.explain(bytes=-1)
    if rank == 0:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            zipccl.attach(other)
    with pytest.raises(TypeError, match="options must be zipccl.Options, not str"):
        zipccl.attach(options="zip")


def test_what_is_no_group():
    ranks.run(told_of_groups, 2)


def wrong_dynamiq_sizes(rank):
    """Found before anything moves, so the group goes on."""
    ranks.init("zipccl", timeout=15)
    state = zipccl.DynamiQState()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"reduce_scatter \(rank \d of 2.*as long as all outputs together"):
            zipccl.dynamiq.reduce_scatter(torch.empty(50_000), torch.ones(50_000), state)
    zipccl.dynamiq.all_reduce(x := torch.ones(1000), state)
    assert x.sum() == 2000


def test_wrong_sizes_of_dynamiq():
    ranks.run(wrong_dynamiq_sizes, 2)
