"""All-to-all in every form, by both designs: every bit, any splits, any strides; and what travels.

Every rank knows what the others send, so results are compared with that, as integers.
"""

import random

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import zipccl
from ranks import same_bits
from samples import BF16, DTYPES, GLOO_DTYPES, frame_bytes, random_bits, strided, weights

DESIGNS = pytest.mark.parametrize("design", [1, 2, "auto"])


def start(design=2, **options) -> tuple[int, int]:
    ranks.init("zipccl", pg_options=zipccl.Options(all_to_all="zip", all_to_all_design=design, **options))
    return dist.get_rank(), dist.get_world_size()


def stats(group=None) -> dict:
    return zipccl.stats(group).get("all_to_all", {"calls": 0, "zipped_calls": 0, "raw_bytes": 0, "wire_bytes": 0})


class Exchange:
    """counts[s][d] rows from rank s to rank d."""

    def __init__(self, rank, counts, make=random_bits, width=1, dtype=BF16):
        world = range(len(counts))
        self.dtype, self.width = dtype, width
        self.to = [counts[rank][d] for d in world]
        self.of = [counts[s][rank] for s in world]
        self.sends = [make(100 * rank + d, (counts[rank][d], width), dtype) for d in world]
        self.truths = [make(100 * s + rank, (counts[s][rank], width), dtype) for s in world]

    def empty(self, rows) -> torch.Tensor:
        return torch.zeros((rows, self.width), dtype=torch.uint8).to(self.dtype)

    # The forms: each gives what arrived, one tensor per rank.
    def single(self, group=None, by_strides=False, splits=True):
        x, out = torch.cat(self.sends), self.empty(sum(self.of))
        if by_strides:
            x, out = strided(x), strided(out)
        dist.all_to_all_single(out, x, self.of if splits else None, self.to if splits else None, group=group)
        return list(out.split(self.of))

    def list(self, group=None, by_strides=False):
        change = strided if by_strides else torch.clone
        outs = [change(self.empty(n)) for n in self.of]
        dist.all_to_all(outs, [change(t) for t in self.sends], group=group)
        return outs

    def by_function(self, group=None):
        group = group or dist.group.WORLD
        out = functional.all_to_all_single(torch.cat(self.sends), self.of, self.to, group)
        return list(functional.wait_tensor(out).split(self.of))

    def check(self, form, *args, **kwargs):
        for s, (found, truth) in enumerate(zip(form(*args, **kwargs), self.truths, strict=True)):
            assert same_bits(found, truth), f"from rank {s} by {form.__name__}"


def tables(world: int) -> dict[str, list[list[int]]]:
    every = range(world)
    return {
        "one row each": [[1] * world for _ in every],
        "even": [[1500] * world for _ in every],
        "uneven": [[(7 * s + 500 * d) % 2111 for d in every] for s in every],
        "nothing at all": [[0] * world for _ in every],
        "only to itself": [[900 * (s == d) for d in every] for s in every],
        "one rank sends": [[1300 * (s == 0) for _ in every] for s in every],
        "one rank gets": [[1300 * (d == world - 1) for d in every] for _ in every],
        "a ring": [[2048 * (d == (s + 1) % world) for d in every] for s in every],
    }


# ---- every form, table and design ------------------------------------------------------------------------------


def check_tables(rank, design):
    rank, world = start(design)
    for name, counts in tables(world).items():
        for make, width in [(random_bits, 1), (weights, 3)]:
            exchange = Exchange(rank, counts, make, width)
            before = stats()
            exchange.check(exchange.single)
            if world > 1:  # gloo refuses strides here, and a group of one is gloo's
                exchange.check(exchange.single, by_strides=True)
            exchange.check(exchange.list)
            exchange.check(exchange.list, by_strides=True)
            exchange.check(exchange.by_function)
            after = stats()
            assert after["zipped_calls"] - before["zipped_calls"] == (5 if world > 1 else 0), name
            received = sum(t.nbytes for s, t in enumerate(exchange.truths) if s != rank)
            assert after["raw_bytes"] - before["raw_bytes"] == 5 * received, name
    exchange = Exchange(rank, tables(world)["even"])
    before = stats()
    exchange.check(exchange.single, splits=False)
    if world > 1:
        exchange.check(exchange.single, splits=False, by_strides=True)
        assert stats()["zipped_calls"] - before["zipped_calls"] == 2
    none = torch.empty(0, dtype=BF16)
    dist.all_to_all_single(none, none)


@DESIGNS
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_form_and_table(world, design):
    ranks.run(check_tables, world, design, timeout=120)


def check_dtypes(rank):
    """Only bf16 becomes smaller; token counts and all else travel as they are, whatever the options say."""
    rank, world = start()
    inner = dist.new_group(backend="gloo")
    for dtype in DTYPES:
        for counts in ([[40] * world for _ in range(world)], tables(world)["uneven"]):
            exchange = Exchange(rank, counts, dtype=dtype)
            zipped = stats()["zipped_calls"]
            exchange.check(exchange.single)
            exchange.check(exchange.list)
            if dtype in GLOO_DTYPES:
                exchange.check(exchange.single, inner)  # the truth is gloo's
            assert stats()["zipped_calls"] - zipped == (2 if dtype == BF16 else 0), dtype
    now = stats()
    counts = torch.full((world,), 7 + rank)
    dist.all_to_all_single(seen := torch.empty(world, dtype=torch.int64), counts)
    assert seen.tolist() == [7 + r for r in range(world)]
    assert stats()["wire_bytes"] - now["wire_bytes"] == 8 * (world - 1)  # raw, to the byte


def test_every_dtype():
    ranks.run(check_dtypes, 3)


def check_values(rank, design):
    rank, world = start(design, checksum=True)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    patterns = {
        "every pattern": lambda s, d: every.roll(1000 * s + d),
        "constant": lambda s, d: torch.full((5000,), 1.5 + s - d, dtype=BF16),
        "minus zero": lambda s, d: torch.full((1025,), -0.0, dtype=BF16),
        "some compress": lambda s, d: random_bits(s, 9000) if (s + d) % 2 else weights(d, 9000),
    }
    for name, of in patterns.items():
        outs = [torch.empty_like(of(s, rank)) for s in range(world)]
        dist.all_to_all(outs, [of(rank, d) for d in range(world)])
        assert all(same_bits(out, of(s, rank)) for s, out in enumerate(outs)), name


@pytest.mark.parametrize("design", [1, 2])
def test_every_value(design):
    ranks.run(check_values, 3, design)


# ---- what travels ----------------------------------------------------------------------------------------------


def static_part(count: int) -> int:
    """What Design 2 sends ahead when it knows no frame yet: header, tables and all tiles' units (docs/format.md)."""

    def align(n):
        return -(-n // 16) * 16

    tiles, groups = -(-count // 1024), -(-count // 32768)
    units = count // 1024 * 1408 + (align(count % 1024) + 384) * (count % 1024 > 0)
    return 64 + align(8 * groups) + align(2 * tiles) + align(tiles) + units


def check_small_messages_stay_raw(rank, design, checksum):
    """With min_bytes, both ends tell from a message's size whether it is a frame: zipped and raw ones mix."""
    rank, world = start(design, min_bytes=3 * 4000, checksum=checksum)  # 4000 bytes = 2000 values a message
    counts = [[2600, 1999, 2000], [0, 2500, 1], [1999, 30000, 4000]]
    exchange = Exchange(rank, counts, weights)

    def arriving(t, before):
        if t.nbytes < 4000:
            return t.nbytes
        knows = design == 1 or (before and t.numel() > 4096)
        return frame_bytes(t) if knows else max(static_part(t.numel()), frame_bytes(t))

    for call, form in enumerate((exchange.single, exchange.list)):
        before = stats()["wire_bytes"]
        exchange.check(form)
        wire = sum(arriving(t, call > 0) for s, t in enumerate(exchange.truths) if s != rank)
        more = 16 * (design == 2)  # a forecast is rounded upwards
        assert wire <= stats()["wire_bytes"] - before <= wire + more


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("design", [1, 2])
def test_zipped_and_raw_messages_mix(design, checksum):
    ranks.run(check_small_messages_stay_raw, 3, design, checksum)


def check_skew(rank, design):
    """A mixture of experts: half of all tokens go to one rank, whose buffers are filled up with zero rows."""
    rank, world = start(design)
    width, counts = 256, [[96, 32, 32, 32] for _ in range(world)]

    def tokens(seed, shape, dtype):
        t = weights(seed, shape, dtype)
        t[shape[0] // 2 :] = 0
        return t

    moved = []
    for make in (tokens, lambda seed, shape, dtype: weights(seed, shape, dtype)):
        exchange = Exchange(rank, counts, make, width)
        exchange.check(exchange.single)  # by Design 2, the frames of the next call are known from this one
        zipccl.stats().reset()
        exchange.check(exchange.single)
        moved.append(stats()["wire_bytes"])
    return *moved, stats()["raw_bytes"]


@pytest.mark.parametrize("design", [1, 2])
def test_skewed_tokens_and_zero_rows(design):
    for mixed, full, raw in ranks.run(check_skew, 4, design):
        assert 0.68 * raw < full < 0.75 * raw
        assert mixed < 0.55 * full  # constant tiles cost nothing


def check_forecasts(rank, code):
    """Frames that become smaller and larger from call to call, in messages of other lengths: what Design 2 sends ahead
    is never wrong, seldom short, and not much more than the frames."""
    rank, world = start(2, code=code)
    of = {"steady": 0, "wild": 0}
    for kind in of:
        rng = random.Random(7)  # the same plan on every rank
        for call in range(25):
            counts = [[rng.randrange(5000, 40_000) for _ in range(world)] for _ in range(world)]
            zeros = rng.random() if kind == "wild" else 0.3 + 0.01 * rng.random()

            def make(seed, shape, dtype, zeros=zeros):
                t = weights(seed, shape, dtype)
                t[: int(zeros * shape[0])] = 0
                return t

            exchange = Exchange(rank, counts, make)
            before = stats()["wire_bytes"]
            exchange.check(exchange.single if call % 2 else exchange.list)
            if call >= 5:
                frames = sum(frame_bytes(t, code) for s, t in enumerate(exchange.truths) if s != rank)
                assert stats()["wire_bytes"] - before >= frames
                of[kind] += (stats()["wire_bytes"] - before) / frames / 20
    assert of["steady"] < 1.1, of

    # One rank's frames are of another kind than the others': every pair has a forecast of its own.
    def of_some(seed, shape, dtype):
        return random_bits(seed, shape, dtype) if seed // 100 == 1 else weights(seed, shape, dtype)

    for _ in range(2):
        exchange = Exchange(rank, [[20_000] * world] * world, of_some)
        before = stats()["wire_bytes"]
        exchange.check(exchange.single)
    frames = sum(frame_bytes(t, code) for s, t in enumerate(exchange.truths) if s != rank)
    assert stats()["wire_bytes"] - before == pytest.approx(frames, rel=0.07)


@pytest.mark.parametrize("code", ["fast", "dense"])
def test_forecasts_of_design_2(code):
    ranks.run(check_forecasts, 3, code)


def check_splits_on_some_ranks(rank, mode, least):
    """Equal splits, given by some ranks and left out by others, change nothing; nor do ranks that send less than 1 MiB
    to others that send more."""
    ranks.init("zipccl", pg_options=zipccl.Options(all_to_all=mode, min_bytes=least))
    world = dist.get_world_size()
    rng = random.Random(9)
    for call in range(60):
        count, odd = rng.choice([1, 3000, 60_000]), rng.randrange(world)
        exchange = Exchange(rank, [[count] * world] * world)
        exchange.check(exchange.single, splits=(rank == odd) == (call % 2))
    few, many = 100, 300_000
    for _ in range(40):  # rank 0 and 1 exchange much, the others pass nothing that says so
        counts = [[many if {s, d} == {0, 1} else few for d in range(world)] for s in range(world)]
        exchange = Exchange(rank, counts)
        exchange.check(exchange.single, splits=len({*exchange.to, *exchange.of}) > 1)
    return stats()["calls"], stats()["zipped_calls"]


@pytest.mark.parametrize("mode, least", [("auto", None), ("auto", 0), ("zip", None)])
def test_splits_on_some_ranks_alone(mode, least):
    first, *others = ranks.run(check_splits_on_some_ranks, 3, mode, least, timeout=100)
    assert first[0] == 100 and all(other == first for other in others)


def check_auto_takes_strides(rank):
    """Whatever "auto" decides for a call, the call's tensors may have the strides that zipped ones may have."""
    ranks.init("zipccl", pg_options=zipccl.Options(min_bytes=0))
    world = dist.get_world_size()
    for i in range(70):  # past the first trial of another choice
        counts = [[(3 * s + 7 * d + i) % 20 for d in range(world)] for s in range(world)]
        exchange = Exchange(rank, counts, width=3)
        exchange.check(exchange.single, by_strides=True)
        exchange = Exchange(rank, [[5] * world] * world)
        exchange.check(exchange.single, by_strides=rank == 1, splits=False)
    return stats()["calls"]


def test_auto_takes_strides():
    assert ranks.run(check_auto_takes_strides, 3) == [140] * 3


# ---- asynchronous calls, other groups --------------------------------------------------------------------------


def check_async(rank, design):
    rank, world = start(design)
    group = dist.new_group([1, 2], pg_options=zipccl.Options(all_to_all="zip"))
    works = []
    for i in range(30):
        counts = [[(31 * i + 17 * s + 5 * d) % 700 for d in range(world)] for s in range(world)]
        exchange = Exchange(rank, counts)
        out = exchange.empty(sum(exchange.of))
        args = (out, torch.cat(exchange.sends), exchange.of, exchange.to)
        works.append((dist.all_to_all_single(*args, async_op=True), out, exchange.truths))
        summed = torch.full((i + 1,), rank + 1)
        works.append((dist.all_reduce(summed, async_op=True), summed, [torch.full((i + 1,), world * (world + 1) // 2)]))
        if i % 3 == 0 and rank > 0:
            exchange = Exchange(rank - 1, [[i, 2 * i], [0, 3]])
            outs = [exchange.empty(n) for n in exchange.of]
            work = dist.all_to_all(outs, exchange.sends, group=group, async_op=True)
            works.append((work, outs, exchange.truths))
    for work, out, truths in reversed(works):
        work.wait()
        found = torch.cat(out) if isinstance(out, list) else out
        assert same_bits(found, torch.cat(truths))
    return stats()["zipped_calls"]


@pytest.mark.parametrize("design", [1, 2])
def test_many_calls_in_flight(design):
    assert ranks.run(check_async, 3, design) == [30, 30, 30]


# ---- arguments that do not fit ---------------------------------------------------------------------------------


def check_wrong_arguments(rank):
    start()
    inner = dist.new_group(backend="gloo")

    def splits_that_do_not_add_up(group):
        x = torch.zeros(4, dtype=BF16)
        dist.all_to_all_single(torch.empty_like(x), x, [2, 2], [1, 2], group=group)

    def too_few_splits(group):
        x = torch.zeros(4, dtype=BF16)
        dist.all_to_all_single(torch.empty_like(x), x, [4], [4], group=group)

    def another_dtype(group):
        dist.all_to_all_single(torch.empty(4), torch.zeros(4, dtype=BF16), group=group)

    for wrong in (splits_that_do_not_add_up, too_few_splits, another_dtype):
        said = []
        for group in (inner, None):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                wrong(group)
            said.append((type(caught.value), str(caught.value).replace("zipccl", "gloo")))
        assert said[0] == said[1], wrong.__name__


def test_wrong_arguments_fail_as_they_do_on_the_inner_backend():
    ranks.run(check_wrong_arguments, 2)
