"""The reductions: what comes out on every rank, by every topology, at every world size."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import simulate  # noqa: E402

TOPOLOGIES = ["direct", "ring", "butterfly"]
# Too few to be packed; parts that are filled and one that is not; blocks that queue up for the pipeline.
COUNTS = [1, 4096, 16_384, 70_001]


def rows_of(count, n, dtype=torch.float32):
    """Alike in scale per stretch, as gradients of layers are; different on every rank."""
    rows = []
    for r in range(n):
        noise = torch.randn(count, generator=torch.Generator().manual_seed(r))
        scale = torch.exp(torch.sin(torch.arange(count) / 3000.0) * 4)
        rows.append((noise * scale * 1e-3).to(dtype))
    return rows


def error(got, rows, scale=1.0):
    exact = scale * sum(r.double() for r in rows)
    return float((got.double() - exact).square().sum() / exact.square().sum())


def sums(rank, backend, device, options, counts, dtype=torch.float32, op=dist.ReduceOp.SUM):
    """Results and errors by count, and the traffic."""
    device = ranks.device(device)
    if not dist.is_initialized():
        ranks.init(backend)
    n = dist.get_world_size()
    state = zipccl.DynamiQState(**options)
    results = []
    for count in counts:
        rows = rows_of(count, n, dtype)
        mine = rows[rank].to(device, copy=True)
        assert zipccl.dynamiq.all_reduce(mine, state, op) is mine
        scale = 1 / n if op == dist.ReduceOp.AVG else 1
        results.append((mine.cpu(), error(mine.cpu(), rows, scale) if count else 0.0))
    return results, state.stats()


def all_alike(got):
    for results, _ in got:
        assert all(same_bits(a[0], b[0]) for a, b in zip(results, got[0][0], strict=True))
    return got[0][0]


def sums_by_all(rank, counts):
    """By every topology, by each again, and by each with another seed."""
    ranks.init("gloo")
    found = {}
    for topology in TOPOLOGIES:
        options = {"topology": topology, "bits": 6.0, "block_bytes": 1 << 16}
        for name, more in (("once", {}), ("again", {}), ("seed", {"seed": 1})):
            found[topology, name] = sums(rank, "gloo", "cpu", options | more, counts)
    return found


@pytest.mark.parametrize("world", [2, 3, 5, 7])
def test_all_ranks_end_alike_and_near_the_sum(world):
    got = ranks.run(sums_by_all, world, COUNTS)
    for topology in TOPOLOGIES:
        once, again, other = (all_alike([g[topology, name] for g in got]) for name in ("once", "again", "seed"))
        for (x, err), (y, _) in zip(once, again, strict=True):
            assert err < 1e-2
            assert same_bits(x, y)
        assert not same_bits(once[-1][0], other[-1][0])


@pytest.mark.parametrize("world,node", [(4, 2), (6, 2), (6, 3), (4, 4)])
def test_hierarchical(world, node):
    options = {"topology": "hierarchical", "node_size": node, "bits": 6.0, "block_bytes": 1 << 16}
    got = ranks.run(sums, world, "gloo", "cpu", options, [1, 300, 70_001])
    for _, err in all_alike(got):
        assert err < 1e-2 if world > node else err < 1e-12


def averages(rank):
    ranks.init("zipccl")
    found = []
    for topology in (*TOPOLOGIES, "hierarchical"):
        for dtype in (torch.bfloat16, torch.float16):
            options = {"topology": topology, "node_size": 2, "bits": 6.0}
            found.append(sums(rank, "zipccl", "cpu", options, [20_000], dtype, dist.ReduceOp.AVG))
    return found


def test_dtypes_and_averages():
    for got in zip(*ranks.run(averages, 4), strict=True):
        assert all_alike(got)[0][1] < 1e-2


def by_bits(rank):
    ranks.init("gloo")
    found = {}
    for widths in ("fine", "paper"):
        for bits in (3.0, 5.0, 8.0):
            # Blocks as small as that would be mostly padding, so they are not made.
            options = {"topology": "direct", "widths": widths, "bits": bits, "block_bytes": 1024}
            found[widths, bits] = sums(rank, "gloo", "cpu", options, [200_000])
    return found


def test_more_bits_less_error():
    found = ranks.run(by_bits, 4)[0]
    for widths in ("fine", "paper"):
        errors = [found[widths, bits][0][0][1] for bits in (3.0, 5.0, 8.0)]
        assert errors[0] > 3 * errors[1] > 9 * errors[2]
    received = [0] + [found["fine", bits][1]["all_reduce"]["wire_bytes"] for bits in (3.0, 5.0, 8.0)]  # so far
    for bits, before, after in zip((3.0, 5.0, 8.0), received, received[1:], strict=False):
        assert 0.95 < (after - before) / zipccl.dynamiq.wire_bytes(200_000, 4, bits) <= 1.001


def received(rank, count):
    """Bytes received by an all-reduce and a reduce-scatter of `count` values, and what their bits allow for."""
    ranks.init("gloo")
    n = dist.get_world_size()
    found = []
    for widths, least in (("fine", 1.5), ("paper", 2.85)):
        for bits in (least, 3.0, 5.0):
            state = zipccl.DynamiQState(topology="direct", widths=widths, bits=bits)
            zipccl.dynamiq.all_reduce(torch.ones(count), state)
            before = state.stats()
            zipccl.dynamiq.all_reduce(torch.ones(count), state)
            zipccl.dynamiq.reduce_scatter(torch.empty(count // n), torch.ones(count), state)
            after, one_way = state.stats(), (n - 1) / n * count * bits / 8
            for op, allowed in (("all_reduce", 2 * one_way), ("reduce_scatter", one_way)):
                found.append((after[op]["wire_bytes"] - before.get(op, {"wire_bytes": 0})["wire_bytes"], allowed))
    return found


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_everything_that_travels_is_within_the_bits(world):
    for found in ranks.run(received, world, 60 * 4096):
        assert all(0.96 * allowed < got <= allowed for got, allowed in found)


def received_of_small(rank):
    """Bytes received by all-reduces around the size from which they are packed, and what wire_bytes() says."""
    ranks.init("gloo")
    n = dist.get_world_size()
    found = []
    for bits in (3.0, 5.0):
        state = zipccl.DynamiQState(topology="direct", bits=bits)
        for count in (1, 2000, 2048 * n - 1, 2048 * n, 3000 * n, 5000 * n + 77):
            before = state.stats().get("all_reduce", {"wire_bytes": 0})["wire_bytes"]
            zipccl.dynamiq.all_reduce(torch.randn(count), state)
            received = state.stats()["all_reduce"]["wire_bytes"] - before
            found.append((received, zipccl.dynamiq.wire_bytes(count, n, bits)))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_wire_bytes_holds_for_small_tensors(world):
    for found in ranks.run(received_of_small, world):
        assert all(0.95 * most - 1 < got <= most for got, most in found), found
    assert zipccl.dynamiq.wire_bytes(2000, 2, 5.0) == 8000
    assert zipccl.dynamiq.wire_bytes(2000, 1, 5.0) == 0


def test_one_rank_and_nothing():
    options = {"topology": "auto"}
    rows = rows_of(5000, 1)
    got = ranks.run(sums, 1, "gloo", "cpu", options, [5000])[0][0]
    assert same_bits(got[0][0], rows[0])
    for results, stats in ranks.run(sums, 3, "gloo", "cpu", options, [0]):
        assert results[0][0].numel() == 0
        assert stats["all_reduce"]["wire_bytes"] == 0


def odd_shapes(rank):
    ranks.init("zipccl")
    state = zipccl.DynamiQState(topology="direct", bits=6.0)
    base = torch.arange(6000, dtype=torch.float32).view(60, 100) / 1000
    found = []
    for x in (base.clone(), base.clone().t(), base.repeat(1, 2)[:, ::2], base[3, 5].clone()):
        want = x.clone() * dist.get_world_size()
        zipccl.dynamiq.all_reduce(x, state)
        found.append(float((x - want).abs().max() / want.abs().max()))
    for wrong in (torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.int32)):
        with pytest.raises(TypeError, match="DynamiQ takes"):
            zipccl.dynamiq.all_reduce(wrong, state)
    with pytest.raises(ValueError, match="sums and averages"):
        zipccl.dynamiq.all_reduce(base.clone(), state, dist.ReduceOp.MAX)
    return found


def test_shapes_strides_and_refusals():
    for found in ranks.run(odd_shapes, 2):
        assert max(found) < 0.1


def non_finite(rank):
    ranks.init("gloo")
    found = []
    for topology in (*TOPOLOGIES, "hierarchical"):
        x = torch.full((40_000,), 0.25)
        x[10_240:15_360] = 0
        if rank == 1:
            x[3000], x[20_000] = torch.nan, torch.inf
        state = zipccl.DynamiQState(topology=topology, node_size=2, bits=5.0)
        found.append(zipccl.dynamiq.all_reduce(x, state))
    return found


def test_not_finite_values_show_and_zeros_stay():
    for found in ranks.run(non_finite, 4):
        for x in found:
            assert not x[3000].isfinite() and not x[20_000].isfinite()
            assert x[:2560].isfinite().all() and x[3328:19_712].isfinite().all() and x[20_480:].isfinite().all()
            assert (x[10_240:15_360] == 0).all()


def parts(rank, count, dtype):
    ranks.init("gloo")
    n = dist.get_world_size()
    rows = rows_of(n * count, n, dtype)
    found = []
    for topology in TOPOLOGIES:
        state = zipccl.DynamiQState(topology=topology, bits=6.0, block_bytes=1 << 16)
        out = torch.full((count,), 7.0, dtype=torch.float32)
        assert zipccl.dynamiq.reduce_scatter(out, rows[rank], state, dist.ReduceOp.AVG) is out
        mine = [r[rank * count : (rank + 1) * count] for r in rows]
        found.append(error(out, mine, 1 / n) if count else 0.0)
    return found, state.stats()["reduce_scatter"]


def test_reduce_scatter():
    cases = ((1, 100, torch.float32), (2, 0, torch.float32), (3, 40_000, torch.bfloat16), (4, 777, torch.float16))
    for world, count, dtype in cases:
        for errors, stats in ranks.run(parts, world, count, dtype):
            assert max(errors) < 1e-2
            assert stats["wire_bytes"] > 0 if world > 1 and count else stats["wire_bytes"] == 0
            assert stats["packed_calls"] == (3 if world == 1 or count > 2048 else 0)


def fed_back(rank, error_feedback, dtype=torch.float32):
    """Mean of many calls with one input."""
    ranks.init("gloo")
    n = dist.get_world_size()
    rows = [row.to(dtype) for row in rows_of(20_000, n)]
    state = zipccl.DynamiQState(topology="direct", bits=4.0, error_feedback=error_feedback)
    total = torch.zeros(20_000, dtype=torch.float64)
    first = None
    for _ in range(20):
        out = zipccl.dynamiq.all_reduce(rows[rank].clone(), state)
        first = error(out, rows) if first is None else first
        total += out
    return first, error(total / 20, rows), out


def overflows(rank):
    """An infinite gradient in the first of three calls."""
    ranks.init("gloo")
    rows = rows_of(20_000, dist.get_world_size())
    state = zipccl.DynamiQState(topology="direct", error_feedback=True)
    outs = []
    for call in range(3):
        x = rows[rank].clone()
        if call == 0:
            x[777] = torch.inf
        outs.append(zipccl.dynamiq.all_reduce(x, state))
    return [bool(out.isfinite().all()) for out in outs]


def test_error_feedback_forgets_an_overflow():
    assert ranks.run(overflows, 2) == [[False, True, True]] * 2


@pytest.mark.parametrize("topology", ["direct", "ring"])
def test_sums_are_unbiased(topology):
    """Means of many sums of the same gradients, in units of their own standard error: normal numbers if unbiased."""
    n, count, runs = 4, 4096, 600
    rows = rows_of(count, n)
    exact = torch.stack(list(rows)).double().sum(0)
    got = torch.stack(
        [simulate.dynamiq(rows.__getitem__, n, topology, 4.0, seed=7, step=step, chunks=1) for step in range(runs)]
    ).double()
    z = (got.mean(0) - exact) / (got.std(0) / runs**0.5).clamp_min(1e-12)
    z = z[got.std(0) > 0]
    assert len(z) > count / 2
    assert z.square().mean() < 1.15  # 1, give or take 0.03


def test_error_feedback_makes_up_for_what_was_lost():
    plain, fed = ranks.run(fed_back, 3, False), ranks.run(fed_back, 3, True)
    assert all(same_bits(r[2], fed[0][2]) for r in fed)
    assert fed[0][0] < plain[0][0]  # rounding to nearest loses less
    assert fed[0][1] < fed[0][0] / 4  # and it comes back


def test_error_feedback_makes_up_for_the_rounding_to_bf16():
    fed = ranks.run(fed_back, 3, True, torch.bfloat16)
    assert all(same_bits(r[2], fed[0][2]) for r in fed)
    assert fed[0][1] < 2e-4  # of 20 calls together; a sum rounded to bf16 errs by 1.6e-3


def measured(rank):
    ranks.init("gloo")
    state = zipccl.DynamiQState(topology="auto", node_size=2)
    return state.explain(torch.empty(1000)), state.explain(torch.empty(10_000_000))


def test_auto_decides_alike():
    got = ranks.run(measured, 4)
    assert all(g == got[0] for g in got)
    assert got[0][1][2] > got[0][0][2] > 0


def at_random(rank, seed):
    ranks.init("zipccl")
    n, draw = dist.get_world_size(), random.Random(seed)
    found = []
    for _ in range(30):
        count = draw.choice([0, 1, 257, 2048 * n, 2048 * n + 1, draw.randrange(60_000), draw.randrange(300_000)])
        state = zipccl.DynamiQState(
            topology=draw.choice([*TOPOLOGIES, "auto"]),
            bits=draw.choice([4.0, 5.0, 8.5, 16.0]),
            seed=draw.randrange(9),
            correlated=draw.random() < 0.8,
            error_feedback=draw.random() < 0.2,
            block_bytes=draw.choice([None, 1024, 4096, 1 << 16]),
        )
        rows = rows_of(count, n, draw.choice([torch.float32, torch.bfloat16, torch.float16]))
        if draw.random() < 0.3:  # everybody's part is the same
            out = zipccl.dynamiq.reduce_scatter(torch.empty(count), rows[rank].repeat(n), state)
        else:
            out = zipccl.dynamiq.all_reduce(rows[rank].clone(), state)
        found.append((out, error(out, rows) if count else 0.0))
    return found


@pytest.mark.parametrize("world", [3, 4])
def test_at_random(world):
    for found in ranks.run(at_random, world, world):
        assert max(err for _, err in found) < 0.1


def wrong_nodes(rank):
    ranks.init("gloo")
    with pytest.raises(ValueError, match="does not divide"):
        zipccl.dynamiq.all_reduce(torch.ones(5), zipccl.DynamiQState(topology="hierarchical", node_size=2))
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        zipccl.dynamiq.all_reduce(torch.ones(5), zipccl.DynamiQState(topology="hierarchical"))


def other_node_sizes(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank < 2 else "1"
    ranks.init("gloo")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is 2 on rank 0, and not on ranks 2, 3:"):
        zipccl.dynamiq.all_reduce(torch.ones(5), zipccl.DynamiQState(topology="hierarchical"))
    x = zipccl.dynamiq.all_reduce(torch.ones(40_000), zipccl.DynamiQState(topology="auto"))
    given = zipccl.dynamiq.all_reduce(torch.ones(40_000), zipccl.DynamiQState(topology="hierarchical", node_size=2))
    return float((x - 4).abs().max()), float((given - 4).abs().max())


def test_node_sizes_that_differ():
    assert all(max(errors) < 0.2 for errors in ranks.run(other_node_sizes, 4))


def test_node_sizes_that_do_not_fit():
    ranks.run(wrong_nodes, 3)


def subgroups(rank):
    ranks.init("zipccl")
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    state = zipccl.DynamiQState(mine, topology="direct", bits=8.0)
    x = torch.full((1000,), float(rank + 1))
    zipccl.dynamiq.all_reduce(x, state)
    return x


def test_subgroups():
    for rank, x in enumerate(ranks.run(subgroups, 4)):
        assert torch.allclose(x, torch.full((1000,), 4.0 if rank % 2 == 0 else 6.0), rtol=0.01)


def dies(rank):
    ranks.init("gloo", timeout=5)
    state = zipccl.DynamiQState(topology="direct")
    zipccl.dynamiq.all_reduce(torch.ones(5000), state)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"zipccl dynamiq all_reduce \(rank 0 of 2, 5000 values\): "):
        zipccl.dynamiq.all_reduce(torch.ones(5000), state)


def test_a_dead_peer_is_an_error():
    ranks.run(dies, 2, killed=(1,))


def states_differ(rank, differing):
    ranks.init("gloo", timeout=20)
    for options in ({}, differing):
        state = zipccl.DynamiQState(topology="direct", **(options if rank == 1 else {}))
        if not options:
            zipccl.dynamiq.all_reduce(torch.ones(5000), state)
            continue
        name = next(iter(options))
        with pytest.raises(RuntimeError, match=rf"rank 1 of DynamiQ's group .* has options '{name}=.*, rank 0 has"):
            zipccl.dynamiq.all_reduce(torch.ones(5000), state)


# The first would end processes inside gloo, the second hang.
@pytest.mark.parametrize("differing", [{"bits": 4.0}, {"warmup_steps": 3}, {"node_size": 3}], ids=str)
def test_states_that_differ(differing):
    """Nothing is sent; every rank is told."""
    ranks.run(states_differ, 3, differing)


def beside_other_calls(rank):
    """Hook-like calls in flight while the caller's thread uses the same group."""
    ranks.init("gloo")
    n = dist.get_world_size()
    state = zipccl.DynamiQState(topology="direct", bits=8.0)
    channel = zipccl.dynamiq._channel(state._group())
    calls = []
    for i in range(8):
        rows = [(i + 1) * row for row in rows_of(50_000, n)]
        calls.append((rows, channel.all_reduce(rows[rank].clone(), state._options(), 1.0, 0, i, [], None, True)))
        y = torch.ones(100)
        dist.all_reduce(y)
        assert (y == n).all()
    return [error(future.wait(), rows) for rows, future in calls]


def test_calls_in_flight_do_not_mix_with_the_groups_own():
    for errors in ranks.run(beside_other_calls, 3):
        assert max(errors) < 1e-3


def five(rank, count):
    ranks.init("gloo")
    found = {}
    for topology in TOPOLOGIES:
        for widths in ("fine", "paper"):
            options = {"topology": topology, "widths": widths, "bits": 5.0, "seed": 3}
            found[topology, widths] = sums(rank, "gloo", "cpu", options, [count])
    return found


def test_ranks_compute_what_one_process_computes():
    """Against the quantiser called by hand, chunk by chunk along the trees."""
    n, count = 5, 30_000
    rows = rows_of(count, n)
    got = ranks.run(five, n, count)
    for topology, widths in got[0]:
        want = simulate.dynamiq(rows.__getitem__, n, topology, 5.0, widths, seed=3)
        assert same_bits(all_alike([g[topology, widths] for g in got])[0][0], want)


def sums_on(rank, backend, device, counts):
    ranks.init(backend, timeout=60)
    found = {}
    for topology in (*TOPOLOGIES, "hierarchical", "auto"):
        options = {"topology": topology, "node_size": 2, "bits": 5.0, "block_bytes": 1 << 16}
        found[topology] = sums(rank, backend, device, options, counts)
    return found


@pytest.mark.cuda
def test_cuda_gives_the_cpus_bits():
    cpu = ranks.run(sums_on, 4, "gloo", "cpu", COUNTS)
    cuda = ranks.run(sums_on, 4, "nccl", "cuda", COUNTS, timeout=120)
    for topology in cpu[0]:
        a, b = (all_alike([g[topology] for g in got]) for got in (cpu, cuda))
        for count, x, y in zip(COUNTS, a, b, strict=True):
            assert y[1] < 1e-2
            if topology != "auto" and count > 2048 * 4:  # fewer are summed by gloo and NCCL, each in its own order
                assert same_bits(x[0], y[0]), (topology, count)


def more_than_32_bits(rank):
    """2^31 + 777 values, whose sum is known: the ends, the middle, and around the 2^31st."""
    device = ranks.device("cuda")
    ranks.init("nccl", timeout=60)
    x = torch.full((2**31 + 777,), 0.5, dtype=torch.bfloat16, device=device)
    x[-256:] = 1.0 + rank
    zipccl.dynamiq.all_reduce(x, zipccl.DynamiQState(topology="direct", bits=4.0))
    places = [x[:1000], x[2**30 - 500 : 2**30 + 500], x[2**31 - 500 : 2**31 + 500]]
    return [float((p.float() - 1.0).abs().max()) for p in places], float((x[-256:].float() - 3.0).abs().max())


@pytest.mark.cuda
def test_buckets_of_more_than_32_bits():
    for places, last in ranks.run(more_than_32_bits, 2, timeout=120):
        assert max(places) < 0.5
        assert last < 1.0
