"""Wrong arguments: zipccl refuses what gloo refuses, in gloo's words and at the same moment, and the group goes on."""

import functools
import re

import pytest
import ranks
import torch
import torch.distributed as dist

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
