"""TORCH_DISTRIBUTED_DEBUG=DETAIL: where ranks make different calls every rank is told at once what differs, in words
that no timeout has; and calls that agree give what they give without."""

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, random_bits

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
COUNT = 4096


def start(under: str, mode: str) -> None:
    options = zipccl.Options(**{name: mode for name in zipccl.options.COLLECTIVES}, min_bytes=0)
    if under == "zipccl":
        ranks.init("zipccl", pg_options=options)
    else:
        ranks.init(under)
        zipccl.attach(options=options)


def call(name: str, count: int, dtype: torch.dtype) -> None:
    small, large = torch.ones(count, dtype=dtype), torch.ones(ranks.world() * count, dtype=dtype)
    if name == "all_gather_into_tensor":
        dist.all_gather_into_tensor(large, small)
    elif name == "all_to_all_single":
        dist.all_to_all_single(torch.empty_like(large), large)
    elif name == "all_to_all":
        dist.all_to_all(list(torch.empty_like(large).chunk(ranks.world())), list(large.chunk(ranks.world())))
    elif name == "broadcast":
        dist.broadcast(small, 0)
    else:
        dist.reduce_scatter_tensor(small, large)


NAMES = ("all_gather_into_tensor", "broadcast", "reduce_scatter_tensor", "all_to_all_single")


def mistakes(rank, under, mode):
    start(under, mode)

    def both(said, mine, other):
        with pytest.raises(RuntimeError, match=said):
            call(*(mine if rank == 1 else other))

    differ = "Detected mismatch between collectives on ranks"
    for name in NAMES[:-1]:
        both(differ, (name, COUNT, BF16), (name, COUNT, torch.float32))
        both(differ, (name, COUNT, BF16), (name, 2 * COUNT, BF16))
    both(differ, ("all_to_all", COUNT, BF16), ("all_to_all_single", COUNT, BF16))
    for name in NAMES:  # the group goes on
        call(name, COUNT, BF16)
    # torch compares no tensors of all-to-alls; zipccl does. Where sizes differ that ends the group.
    values = rf"zipccl all_to_all \(rank {rank} of 2, .*: rank {1 - rank} calls with (Float|BFloat16) values, not "
    both(values, ("all_to_all_single", COUNT, BF16), ("all_to_all_single", COUNT, torch.float32))
    sent = rf"zipccl all_to_all \(rank {rank} of 2, .*: rank {1 - rank} sends .*, expected were .*same shapes, dtypes"
    of = BF16 if mode == "zip" else torch.float32  # raw, by code fast
    both(sent, ("all_to_all_single", COUNT, of), ("all_to_all_single", 2 * COUNT, of))


@pytest.mark.parametrize("under", ["zipccl", "gloo"])
@pytest.mark.parametrize("mode", ["zip", "auto"])
def test_every_rank_is_told_at_once(under, mode):
    ranks.run(mistakes, 2, under, mode, env=DETAIL)


def agreeing(rank, under):
    start(under, "zip")
    world, dtypes = ranks.world(), (BF16, torch.float32, torch.int16)
    for dtype in dtypes:
        own = [random_bits(8 * rank + r, COUNT, dtype) for r in range(world)]
        wanted = torch.cat([random_bits(8 * r + rank, COUNT, dtype) for r in range(world)])
        for strided in (False, True):
            given, got = torch.cat(own), torch.empty(world * COUNT, dtype=dtype)
            if strided:
                given = torch.stack([given, given], 1)[:, 0]
                got = torch.empty(world * COUNT, 2, dtype=dtype)[:, 0]
            dist.all_to_all_single(got, given)
            assert same_bits(got, wanted)
    assert zipccl.stats()["all_to_all"]["calls"] == 2 * len(dtypes)
    assert zipccl.stats()["all_to_all"]["zipped_calls"] == 2
    if under == "gloo":
        zipccl.detach()
        dist.all_reduce(ones := torch.ones(2))
        assert ones.tolist() == [world] * 2
        zipccl.attach()
        dist.all_reduce(ones)
        assert ones.tolist() == [world**2] * 2


@pytest.mark.parametrize("under", ["zipccl", "gloo"])
def test_calls_that_agree(under):
    ranks.run(agreeing, 3, under, env=DETAIL)
