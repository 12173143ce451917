"""1,000 random collectives in random order: groups, options, sizes, dtypes, strides and overlap, against gloo.

Every rank draws the same plan from one seed. Each call is made on a zipccl group and on a gloo group of the same ranks,
in the same process; results are compared as integers. Where gloo has no such call, or other bits by right (zipped
reductions), the truth is computed from everybody's inputs.
"""

import os
import random

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import bits, same_bits
from samples import BF16, DTYPES, GLOO_DTYPES, random_bits, strided, weights

CALLS = 1000
COLLECTIVES = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce")
FLOATS = [torch.float32, BF16, torch.float16]
IN_FLIGHT = 12
KINDS = [
    "all_gather_into_tensor",
    "all_gather",
    "uneven_all_gather",
    "coalesced_all_gather",
    "all_to_all_single",
    "uneven_all_to_all_single",
    "all_to_all",
    "broadcast",
    "scatter",
    "gather",
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "integer_all_reduce",
    "barrier",
]
REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter")
NOT_GLOOS = ("uneven_all_gather", "all_to_all")


def sample(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype in FLOATS and seed % 3:
        return weights(seed, count, dtype)
    return random_bits(seed, count, dtype)


class Call:
    """One call of the plan: the same on every rank but for `rank`."""

    def __init__(self, number: int, rng: random.Random, members: list[int]):
        self.kind = rng.choice(KINDS)
        self.dtype = rng.choice(DTYPES) if rng.random() < 0.5 else BF16
        if self.kind in ("integer_all_reduce", "barrier"):
            self.dtype = torch.int64
        elif self.kind in REDUCTIONS:
            self.dtype = rng.choice(FLOATS)
        self.seed = 1000 * number
        self.members, self.n = members, len(members)
        self.count = rng.choice([0, 1, 7, 1000, rng.randrange(5000), rng.randrange(60_000)])
        self.root = rng.randrange(self.n)
        self.counts = [[rng.choice([0, 1, rng.randrange(4000)]) for _ in range(self.n)] for _ in range(self.n)]
        self.average = rng.random() < 0.5
        self.by_strides = rng.random() < 0.2
        self.async_op = rng.random() < 0.6
        self.changes = {}
        if rng.random() < 0.3:
            self.changes = {name: rng.choice(["zip", "raw", "auto"]) for name in rng.sample(COLLECTIVES, 3)}
            self.changes["all_to_all_design"] = rng.choice(["auto", 1, 2])
            self.changes["min_bytes"] = rng.choice([0, 3000, 10**6])
            self.changes["checksum"] = rng.random() < 0.5

    def __str__(self):
        size = self.counts if "uneven" in self.kind or self.kind == "all_to_all" else self.count
        how = f"strided={self.by_strides} async={self.async_op} {self.changes}"
        return f"{self.kind} of {size} {self.dtype} in {self.members}, root {self.root}, {how}"

    def part(self, s: int, d: int, count: int | None = None) -> torch.Tensor:
        """What member s has for member d."""
        return sample(self.seed + 10 * s + d, self.count if count is None else count, self.dtype)

    def lay(self, t: torch.Tensor) -> torch.Tensor:
        return strided(t) if self.by_strides else t

    def empty(self, count: int, lay) -> torch.Tensor:
        return lay(torch.zeros(count, dtype=torch.uint8).to(self.dtype))

    def make(self, me: int, group, lay):
        """(work, what will have arrived) of this call in a group."""
        every, kw = range(self.n), {"group": group, "async_op": True}
        op = dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM
        root = self.members[self.root]
        if self.kind == "all_gather_into_tensor":
            out = self.empty(self.n * self.count, lay)
            return dist.all_gather_into_tensor(out, lay(self.part(me, 0)), **kw), [out]
        if self.kind in ("all_gather", "uneven_all_gather"):
            sizes = [self.counts[0][s] if self.kind == "uneven_all_gather" else self.count for s in every]
            outs = [self.empty(n, lay) for n in sizes]
            return dist.all_gather(outs, lay(self.part(me, 0, sizes[me])), **kw), outs
        if self.kind == "coalesced_all_gather":
            sizes = [self.count, self.counts[0][0], 1]
            outs = [self.empty(self.n * n, lambda t: t) for n in sizes]
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for out, n in zip(outs, sizes, strict=True):
                    dist.all_gather_into_tensor(out, self.part(me, 0, n), group=group)
            return manager, outs
        if self.kind in ("all_to_all_single", "uneven_all_to_all_single"):
            even = self.kind == "all_to_all_single"
            to = [self.count if even else self.counts[me][d] for d in every]
            of = [self.count if even else self.counts[s][me] for s in every]
            x, out = torch.cat([self.part(me, d, to[d]) for d in every]), self.empty(sum(of), lay)
            # Equal splits may be left out, by some ranks too.
            splits = ([], []) if even and (me + self.root) % 3 else (of, to)
            return dist.all_to_all_single(out, lay(x), *splits, **kw), [out]
        if self.kind == "all_to_all":
            outs = [self.empty(self.counts[s][me], lay) for s in every]
            ins = [lay(self.part(me, d, self.counts[me][d])) for d in every]
            return dist.all_to_all(outs, ins, **kw), outs
        if self.kind == "broadcast":
            t = lay(self.part(me, 0))
            return dist.broadcast(t, root, **kw), [t]
        if self.kind == "scatter":
            out = self.empty(self.count, lay)
            ins = [lay(self.part(me, d)) for d in every] if me == self.root else None
            return dist.scatter(out, ins, root, **kw), [out]
        if self.kind == "gather":
            outs = [self.empty(self.count, lay) for _ in every] if me == self.root else None
            return dist.gather(lay(self.part(me, 0)), outs, root, **kw), outs or []
        if self.kind == "all_reduce":
            t = lay(self.part(me, 0))
            return dist.all_reduce(t, op, **kw), [t]
        if self.kind == "reduce_scatter_tensor":
            out = self.empty(self.count, lay)
            x = torch.cat([self.part(me, d) for d in every])
            return dist.reduce_scatter_tensor(out, x, op, **kw), [out]
        if self.kind == "reduce_scatter":
            out = self.empty(self.count, lay)
            return dist.reduce_scatter(out, [self.part(me, d) for d in every], op, **kw), [out]
        if self.kind == "integer_all_reduce":
            t = torch.arange(self.count) * (me + 1)
            return dist.all_reduce(t, **kw), [t]
        return dist.barrier(**kw), []

    def truths(self, me: int) -> list[torch.Tensor] | None:
        every = range(self.n)
        if self.kind == "uneven_all_gather":
            return [self.part(s, 0, self.counts[0][s]) for s in every]
        if self.kind == "coalesced_all_gather":
            return [torch.cat([self.part(s, 0, n) for s in every]) for n in (self.count, self.counts[0][0], 1)]
        if self.kind == "all_to_all":
            return [self.part(s, me, self.counts[s][me]) for s in every]
        if self.kind == "broadcast":
            return [self.part(self.root, 0)]
        if self.kind == "scatter":
            return [self.part(self.root, me)]
        if self.kind in ("all_to_all_single", "uneven_all_to_all_single"):
            even = self.kind == "all_to_all_single"
            return [torch.cat([self.part(s, me, self.count if even else self.counts[s][me]) for s in every])]
        if self.kind in ("all_gather", "gather"):
            return [self.part(s, 0) for s in every] if self.kind == "all_gather" or me == self.root else []
        if self.kind == "all_gather_into_tensor":
            return [torch.cat([self.part(s, 0) for s in every])]
        return None

    def sum(self, me: int) -> torch.Tensor:
        """The zipped reductions' own: fp32, in rank order, rounded once."""
        to = 0 if self.kind == "all_reduce" else me
        total = self.part(0, to).float()
        for s in range(1, self.n):
            total = total + self.part(s, to).float()
        return (total / self.n if self.average else total).to(self.dtype)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan = a.isnan() & b.isnan()
    return a.shape == b.shape and torch.equal(bits(a)[~nan], bits(b)[~nan])


def check(call: Call, me: int, found: list[torch.Tensor], gloos: list[torch.Tensor] | None, zips: bool) -> None:
    if zips:
        (result,) = found
        assert same_values(result.contiguous(), call.sum(me)), call
        return
    expected = gloos if gloos is not None else call.truths(me)
    assert len(found) == len(expected)
    assert all(same_bits(f.contiguous(), e.contiguous()) for f, e in zip(found, expected, strict=True)), call
    truths = call.truths(me)
    if truths is not None:
        assert all(same_bits(e.contiguous(), t) for e, t in zip(expected, truths, strict=True)), f"gloo: {call}"


def run_plan(rank, seed):
    rng = random.Random(seed)
    world = dist.get_world_size() if dist.is_initialized() else ranks.world()
    ranks.init("zipccl", timeout=30, pg_options=zipccl.Options(min_bytes=0))
    settings = [
        {},
        {"min_bytes": 0},
        {name: "zip" for name in COLLECTIVES} | {"min_bytes": 0},
        {name: "zip" for name in COLLECTIVES[:5]} | {"checksum": True, "all_to_all_design": 1},
        {name: "zip" for name in COLLECTIVES} | {"min_bytes": 0, "code": "dense"},
    ]
    groups = []
    for members in (
        list(range(world)),
        [0, 1],
        [1, world - 1],
        list(range(1, world)),
        [0, world - 1],
        [rng.randrange(world)],
    ):
        options = rng.choice(settings) if groups else settings[2]
        pair = dist.new_group(members, pg_options=zipccl.Options(**options)), dist.new_group(members, backend="gloo")
        groups.append((sorted(set(members)), options, *pair))
    log, pending = [], []
    made = zipped = 0

    def finish(i: int) -> None:
        call, me, work, found, gloo_work, gloos, zips = pending.pop(i)
        for w in (work, gloo_work):
            if w is not None:
                w.wait()
        try:
            check(call, me, found, gloos, zips)
        except AssertionError as error:
            raise AssertionError(f"SEED={seed}, call {call.seed // 1000}: {error}") from error

    order = random.Random(f"{seed} {rank}")  # of waiting: each rank's own
    for number in range(CALLS):
        members, options, group, inner = rng.choice(groups)
        call = Call(number, rng, members)
        if rank not in members:
            continue
        me, made = members.index(rank), made + 1
        log.append(str(call))
        effective = options | call.changes
        op = "all_reduce" if call.kind == "all_reduce" else "reduce_scatter"
        with zipccl.override(group, **call.changes):
            strides = call.lay if may_be_strided(call, effective) else lambda t: t
            before = zipccl.stats(group).get(op, {"zipped_calls": 0})["zipped_calls"]
            work, found = call.make(me, group, strides)
        gloos, gloo_work = None, None
        if call.kind not in NOT_GLOOS and call.dtype in GLOO_DTYPES:
            gloo_work, gloos = call.make(me, inner, lambda t: t)
        zips = False
        if call.kind in REDUCTIONS:
            work.wait()  # "auto" is free to do either; the counter tells
            zips = zipccl.stats(group).get(op, {"zipped_calls": 0})["zipped_calls"] > before
            zipped += zips
        pending.append((call, me, work, found, gloo_work, gloos, zips))
        if not call.async_op:
            finish(-1)
        while len(pending) > IN_FLIGHT:
            finish(order.randrange(len(pending)))
    while pending:
        finish(order.randrange(len(pending)))
    totals = {}
    for members, _, group, _ in groups:
        if rank in members:
            for op, s in zipccl.stats(group).items():
                totals[op] = totals.get(op, 0) + s["zipped_calls"]
    return made, totals


def may_be_strided(call: Call, options: dict) -> bool:
    """Some strides gloo refuses or takes for dense; they are for calls that may be zipped."""
    if call.kind in ("all_gather_into_tensor", "all_gather", "uneven_all_gather", "all_to_all"):
        return True
    if call.kind == "gather":
        return call.dtype in GLOO_DTYPES
    op = "all_to_all" if "all_to_all" in call.kind else call.kind.removesuffix("_tensor")
    mode, least = options.get(op, "raw" if call.kind in REDUCTIONS else "auto"), options.get("min_bytes")
    dtypes = FLOATS if call.kind in REDUCTIONS else [BF16]
    return (
        call.dtype in dtypes
        and call.n > 1
        and mode != "raw"
        and (least == 0 or mode == "zip" and least is None and call.kind not in REDUCTIONS)
    )


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", [3, 4])
def test_a_thousand_random_collectives(world, seed):
    seed = int(os.environ.get("SEED", seed))
    results = ranks.run(run_plan, world, seed, timeout=200)
    assert sum(made for made, _ in results) > CALLS
    for op in COLLECTIVES:
        assert sum(totals.get(op, 0) for _, totals in results) > 5, op  # the run really zipped
