"""Parts of torch that no other test here uses give on zipccl, with all that moves compressed, what they give on gloo:
collectives under autograd, objects, ZeroRedundancyOptimizer, distributed checkpoints. Bit by bit."""

import os

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import zipccl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

MOVES = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
ZIP = {f"ZIPCCL_{name.upper()}": "zip" for name in MOVES} | {"ZIPCCL_MIN_BYTES": "0", "ZIPCCL_CODE": "dense"}
WORLD = 3


def leaf(rank: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def autograd(rank: int) -> dict:
    """Values and gradients."""
    import torch.distributed.nn.functional as under_autograd  # here: it warns of things that torch itself still does

    n, found = dist.get_world_size(), {}
    for dtype in (torch.float32, torch.bfloat16):
        one, rows = leaf(rank, 40, dtype=dtype), leaf(rank, 40 * n, dtype=dtype)
        parts = [leaf(rank, 40, seed=1 + r, dtype=dtype) for r in range(n)]
        like = torch.zeros(40, dtype=dtype)
        for name, leaves, out in (
            ("all_gather", [one], under_autograd.all_gather(one)),
            ("all_reduce", [one], under_autograd.all_reduce(one)),
            ("all_to_all", parts, under_autograd.all_to_all([like.clone() for _ in range(n)], parts)),
            ("all_to_all_single", [rows], under_autograd.all_to_all_single(torch.zeros_like(rows), rows)),
            ("broadcast", [one], under_autograd.broadcast(one, 0)),
            ("gather", [one], under_autograd.gather(one, 0)),
            ("reduce_scatter", parts, under_autograd.reduce_scatter(like.clone(), parts)),
            ("scatter", parts, under_autograd.scatter(parts, 0)),
        ):
            values = [out] if isinstance(out, torch.Tensor) else list(out)
            gradients = torch.autograd.grad(sum((v.double() ** 2).sum() for v in values), leaves, allow_unused=True)
            found[name, dtype] = [v.detach() for v in values] + [g for g in gradients if g is not None]
    return found


def objects(rank: int) -> dict:
    n, found = dist.get_world_size(), {}
    found["all_gather"] = [None] * n
    dist.all_gather_object(found["all_gather"], torch.arange(rank + 1.0))
    found["gather"] = [None] * n if rank == 0 else None
    dist.gather_object(torch.arange(rank + 2.0), found["gather"], 0)
    found["broadcast"] = [torch.ones(5), torch.zeros(1000)] if rank == 0 else [None, None]
    dist.broadcast_object_list(found["broadcast"], 0)
    found["scatter"] = [None]
    dist.scatter_object_list(found["scatter"], [torch.ones(i + 1) for i in range(n)] if rank == 0 else None, 0)
    found["gather"] = found["gather"] or []
    return found


def zero(rank: int) -> dict:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: the same

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 7))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for step in range(3):
        model(leaf(rank, 4, 9, seed=step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "state": [moments["exp_avg"] for moments in state.values()],
    }


def checkpoints(rank: int) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.randn(70, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    path = f"{os.environ['RANKS_DIRECTORY']}/checkpoint"
    saved = {"values": distribute_tensor(values, mesh, [Shard(0)]), "bias": values[0].clone()}
    checkpoint.save(saved, checkpoint_id=path)
    loaded = {
        "values": distribute_tensor(torch.zeros_like(values), mesh, [Shard(0)]),
        "bias": torch.zeros(3).bfloat16(),
    }
    checkpoint.load(loaded, checkpoint_id=path)
    assert ranks.same_bits(loaded["values"].full_tensor(), values)
    return {"loaded": [loaded["values"].to_local(), loaded["bias"]]}


def run(rank, work, backend):
    ranks.init(backend)
    found = work(rank)
    if backend == "zipccl" and work is not objects:  # which travel as bytes
        assert any(op["zipped_calls"] for op in zipccl.stats().values())
    return found


@pytest.mark.parametrize("work", [autograd, objects, zero, checkpoints])
def test_as_on_gloo(work):
    expected = ranks.run(run, WORLD, work, "gloo")
    for e, f in zip(expected, ranks.run(run, WORLD, work, "zipccl", env=ZIP), strict=True):
        assert e.keys() == f.keys()
        for name in e:
            assert len(e[name]) == len(f[name])
            assert all(map(ranks.same_bits, e[name], f[name])), name
