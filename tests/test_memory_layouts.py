"""Tensors that share memory, and tensors that do not lie where their dtype wants them; gloo takes them all."""

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits

BF16 = torch.bfloat16
ALL_ZIP = {name: "zip" for name in zipccl.options.COLLECTIVES}
COUNT = 5000


def start(**options) -> tuple[int, int]:
    ranks.init("zipccl", pg_options=zipccl.Options(**(ALL_ZIP | {"min_bytes": 0} | options)))
    return dist.get_rank(), dist.get_world_size()


def values(rank: int, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(BF16)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values one byte off."""
    buffer = bytearray(2 * t.numel() + 1)
    out = torch.frombuffer(buffer, dtype=BF16, offset=1, count=t.numel())
    out.copy_(t)
    assert out.data_ptr() % 2 == 1
    return out


def check_gather_alias(rank):
    rank, world = start()
    mine = values(rank)
    outputs = None
    if rank == 0:
        outputs = [torch.empty(COUNT, dtype=BF16) for _ in range(world)]
        outputs[1] = mine  # where another rank's values will come to lie
    dist.gather(mine, outputs, dst=0)
    if rank == 0:
        assert all(same_bits(t, values(r)) for r, t in enumerate(outputs))
    dist.barrier()


def test_gather_over_its_own_input():
    ranks.run(check_gather_alias, 2)


def check_reduce_scatter_overlap(rank):
    rank, world = start()
    for shift in (0, 1, 100, 3000):
        whole = torch.zeros(world * COUNT + 4000, dtype=BF16)
        whole[: world * COUNT] = values(rank, world * COUNT)
        output = whole[rank * COUNT + shift :][:COUNT]
        expected = sum(values(r, world * COUNT).float() for r in range(world)).to(BF16)[rank * COUNT :][:COUNT]
        dist.reduce_scatter_tensor(output, whole[: world * COUNT])
        assert same_bits(output, expected), shift


def test_reduce_scatter_into_its_own_input():
    ranks.run(check_reduce_scatter_overlap, 2)


def check_misaligned(rank):
    rank, world = start()
    everybody = torch.cat([values(r) for r in range(world)])
    out = misaligned(torch.zeros(world * COUNT))
    dist.all_gather_into_tensor(out, misaligned(values(rank)))
    assert same_bits(out.clone(), everybody)
    tensor = misaligned(values(rank))
    dist.broadcast(tensor, 1)
    assert same_bits(tensor.clone(), values(1))
    out = misaligned(torch.zeros(world * COUNT))
    dist.all_to_all_single(out, misaligned(values(rank, world * COUNT)))
    assert same_bits(out.clone(), torch.cat([values(r, world * COUNT).chunk(world)[rank] for r in range(world)]))
    part = misaligned(torch.zeros(COUNT))
    dist.reduce_scatter_tensor(part, misaligned(values(rank, world * COUNT)))
    expected = sum(values(r, world * COUNT).float() for r in range(world)).to(BF16).chunk(world)[rank]
    assert same_bits(part.clone(), expected)
    parts = [misaligned(torch.zeros(COUNT)) for _ in range(world)] if rank == 0 else None
    dist.gather(misaligned(values(rank)), parts, dst=0)
    if rank == 0:
        assert all(same_bits(t.clone(), values(r)) for r, t in enumerate(parts))
    dist.barrier()


def test_misaligned_tensors():
    ranks.run(check_misaligned, 2)


def check_premul_auto(rank):
    rank, world = start(**{name: "auto" for name in ALL_ZIP})
    for _ in range(8):  # through the trial, where auto would try raw as well
        tensor = torch.full((70_000,), float(rank + 1))
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))
        assert tensor[0].item() == 0.5 * sum(r + 1 for r in range(world))


@pytest.mark.skipif(not hasattr(dist, "_make_nccl_premul_sum"), reason="this torch has no PREMUL_SUM")
def test_auto_never_chooses_what_the_inner_backend_refuses():
    ranks.run(check_premul_auto, 2)


def check_attach_retry(rank):
    ranks.init("gloo", timeout=20)
    try:
        zipccl.attach(options=zipccl.Options(all_gather="zip" if dist.get_rank() == 0 else "raw"))
        failed = False
    except RuntimeError as error:
        failed = "every rank must pass the same" in str(error)
    dist.barrier()
    zipccl.attach(options=zipccl.Options(all_gather="zip"))
    out = torch.empty(2 * COUNT, dtype=BF16)
    dist.all_gather_into_tensor(out, values(dist.get_rank()))
    assert same_bits(out, torch.cat([values(0), values(1)]))
    return failed, zipccl.stats()["all_gather"]["zipped_calls"]


def test_attach_can_be_tried_again():
    assert ranks.run(check_attach_retry, 2) == [(True, 1)] * 2
