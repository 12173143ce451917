"""Memory of zipped CPU calls: held between calls, bounded, reported, and no more in the steady state."""

import pickle

import ranks
import torch
import torch.distributed as dist
import zipccl

ALL_ZIP = {name: "zip" for name in zipccl.options.COLLECTIVES}
COUNT = 1 << 19


def step(rank: int, count: int) -> None:
    world = dist.get_world_size()
    shard = torch.randn(count).bfloat16()
    out = torch.empty(world * count, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(out, shard)
    dist.all_to_all_single(torch.empty_like(out), out)
    dist.reduce_scatter_tensor(shard, out)
    dist.all_reduce(shard)
    dist.broadcast(shard, 0)


def check_steady(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(**ALL_ZIP, min_bytes=0, all_to_all_design=2))
    assert zipccl.stats().scratch_bytes == 0
    held = []
    for _ in range(12):
        step(rank, COUNT)
        held.append(zipccl.stats().scratch_bytes)
    return held


def test_the_steady_state_takes_no_new_memory():
    for held in ranks.run(check_steady, 2, timeout=120):
        # A few times the gathered bytes at once. Which blocks serve which call may differ a little with the moment at
        # which earlier ones return.
        assert 0 < min(held) and max(held) < 12 * 2 * COUNT * 2, held
        assert max(held[6:]) <= 1.5 * max(held[:6]), held


def check_sizes(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(**ALL_ZIP, min_bytes=0))
    generator = torch.Generator().manual_seed(3)
    for count in torch.randint(1000, COUNT, (40,), generator=generator).tolist():
        step(rank, count)
    return zipccl.stats().scratch_bytes


def test_calls_of_many_sizes_do_not_pile_up():
    for held in ranks.run(check_sizes, 2, timeout=120):
        assert held < 24 * 2 * COUNT * 2


def check_pickle(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip"))
    step(rank, 1000)
    return pickle.loads(pickle.dumps(zipccl.stats())), dict(zipccl.stats())


def test_stats_travel_as_a_plain_dict():
    for copied, original in ranks.run(check_pickle, 2):
        assert type(copied) is dict and copied == original
