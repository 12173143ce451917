"""The switcher on real ranks with clocks, loads and data of their own: every decision is the same everywhere.

Were one not, a rank would send frames to ranks that wait for values, and the run would end in a timeout. Decisions and
their reasons are compared all the same.
"""

import os
import random
import time

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, random_bits, weights

CALLS = 200
OPS = ["all_gather", "all_to_all", "broadcast", "reduce_scatter", "all_reduce"]


def data(rank: int, call: int, count: int) -> torch.Tensor:
    """Rank 0's compress well, rank 1's not at all, rank 2's fall to zero in places."""
    if rank == 1:
        return random_bits(call, count)
    t = weights(call, count)
    if rank == 2:
        t[: count // 2] = 0
    return t


def decide(rank):
    os.nice(7 * rank)
    ranks.init("zipccl", pg_options=zipccl.Options(min_bytes=0, reduce_scatter="auto", all_reduce="auto"))
    world = dist.get_world_size()
    plan, pace = random.Random(5), random.Random(rank)
    decisions = []
    for call in range(CALLS):
        op = plan.choice(OPS)
        count = plan.choice([100, 3000, 90_000, 100_000, 110_000])
        time.sleep(pace.random() * 0.002 * rank)  # late, each in its own way
        before = zipccl.stats().get(op, {"zipped_calls": 0, "wire_bytes": 0})
        if op == "all_gather":
            out = torch.empty(world * count, dtype=BF16)
            dist.all_gather_into_tensor(out, data(rank, call, count))
            assert same_bits(out, torch.cat([data(r, call, count) for r in range(world)]))
        elif op == "all_to_all":
            x = data(rank, call, world * count)
            dist.all_to_all_single(out := torch.empty_like(x), x)
            parts = [data(r, call, world * count)[rank * count :][:count] for r in range(world)]
            assert same_bits(out, torch.cat(parts))
        elif op == "broadcast":
            t = data(rank, call, count)
            dist.broadcast(t, call % world)
            assert same_bits(t, data(call % world, call, count))
        elif op == "all_reduce":
            dist.all_reduce(t := torch.full((count,), rank + 1.0))
            assert (t == 6).all()
        else:
            dist.reduce_scatter_tensor(out := torch.empty(count), torch.full((world * count,), rank + 1.0))
            assert (out == 6).all()
        zipped = zipccl.stats()[op]["zipped_calls"] - before["zipped_calls"]
        decisions.append((op, count, zipped))
        if call % 10 == 9:
            d = zipccl.explain(op, 2 * count)
            decisions.append((d.choice, d.reason))
    return decisions


def test_ranks_of_different_speed_decide_alike():
    first, *others = ranks.run(decide, 3, timeout=120)
    assert all(other == first for other in others)
    assert sum("(timed)" in d[1] for d in first if len(d) == 2) > 3  # by then times had been agreed


def decide_uneven(rank, mode, design):
    """Splits differ from call to call and rank to rank; now and then everything is small, or a rank has nothing."""
    os.nice(7 * rank)
    ranks.init("zipccl", pg_options=zipccl.Options(min_bytes=0, all_to_all=mode, all_to_all_design=design))
    world = dist.get_world_size()
    plan, pace = random.Random(6), random.Random(rank)
    zipped = []
    for call in range(CALLS):
        most = 200 if 100 <= call < 150 else plan.choice([2000, 60_000, 120_000])
        counts = [[plan.randrange(most) for _ in range(world)] for _ in range(world)]
        if call % 7 == 0:
            counts[call % world] = [0] * world
        time.sleep(pace.random() * 0.002 * rank)
        before = zipccl.stats().get("all_to_all", {"zipped_calls": 0})["zipped_calls"]
        of = [counts[r][rank] for r in range(world)]
        out = torch.empty(sum(of), dtype=BF16)
        dist.all_to_all_single(out, data(rank, call, sum(counts[rank])), of, counts[rank])
        assert same_bits(out, torch.cat([data(r, call, sum(counts[r])).split(counts[r])[rank] for r in range(world)]))
        zipped.append(zipccl.stats()["all_to_all"]["zipped_calls"] - before)
    return zipped


@pytest.mark.parametrize("mode, design", [("auto", "auto"), ("auto", 1), ("zip", "auto")])
def test_ranks_of_uneven_calls_decide_alike(mode, design):
    first, *others = ranks.run(decide_uneven, 3, mode, design, timeout=120)
    assert all(other == first for other in others)
    assert first[0] == (mode == "zip")  # raw, where allowed, while nobody knows anything


def explained(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(min_bytes=0))
    for _ in range(3):
        dist.all_gather_into_tensor(torch.empty(6000, dtype=BF16), weights(rank, 2000))
        dist.all_to_all_single(torch.empty(6000, dtype=BF16), weights(rank, 6000))
    with open(f"{os.environ['RANKS_DIRECTORY']}/rank{rank}.log") as log:
        return [line for line in log if line.startswith("zipccl:")]


@pytest.mark.parametrize("debug", ["INFO", ""])
def test_every_decision_is_explained_on_request(debug):
    first, *others = ranks.run(explained, 3, env={"ZIPCCL_DEBUG": debug})
    assert others == [[], []]  # once a group is enough
    if debug:
        assert [line.split(" bytes")[0] for line in first] == [
            "zipccl: all_gather of 4000",
            "zipccl: all_to_all of 12000",
        ] * 3
        unknown, known = "no rank knows the others' sizes before the first call", "expected; link measured at"
        assert [unknown in line for line in first] == [False, True] + [False] * 4  # the first all-to-all
        assert [known in line for line in first] == [True, False] + [True] * 4
    else:
        assert first == []
