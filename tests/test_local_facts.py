"""What only one rank can know of a call changes nothing that travels: how its tensors lie, which form of the call it
chose, autograd, whether it waits. Were a decision made by that, ranks would wait for different messages."""

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, strided, weights

N = 6000
TIMES = zipccl._C.trial_calls + 3  # through all choices that "auto" has tried


def transposed(t):
    return t.view(60, 100).t().contiguous().t()


def expanded(t):
    return t[:1].expand(N)


def misaligned(t):
    out = torch.frombuffer(bytearray(2 * t.numel() + 1), dtype=t.dtype, offset=1, count=t.numel())
    return out.copy_(t)


def inner_part(t):
    room = torch.zeros(3 + t.numel(), dtype=t.dtype)[3:]
    return room.copy_(t)


def parts(seed, world):
    return [weights(10 * seed + r, N) for r in range(world)]


# Each: (rank, world, odd) -> pairs (found, expected). `odd` is true on the rank that is different.


def gather(rank, world, odd, change):
    out = torch.empty(world * N, dtype=BF16)
    shard = weights(rank, N)
    if change is expanded:
        shard.fill_(rank)
    every = [torch.full_like(shard, r) if change is expanded else weights(r, N) for r in range(world)]
    dist.all_gather_into_tensor(out, change(shard) if odd else shard)
    return [(out, torch.cat(every))]


def gather_into_strides(rank, world, odd):
    out = strided(torch.zeros(world * N, dtype=BF16)) if odd else torch.empty(world * N, dtype=BF16)
    dist.all_gather_into_tensor(out, weights(rank, N))
    return [(out.contiguous(), torch.cat([weights(r, N) for r in range(world)]))]


def gather_list(rank, world, odd):
    """The list form on one rank, the stacked one on the others."""
    every = [weights(r, N) for r in range(world)]
    if odd:
        outs = [torch.empty(N, dtype=BF16) for _ in range(world)]
        dist.all_gather(outs, every[rank])
        return list(zip(outs, every, strict=True))
    dist.all_gather_into_tensor(out := torch.empty(world, N, dtype=BF16), every[rank])
    return [(out, torch.stack(every))]


def gather_async(rank, world, odd):
    out = torch.empty(world * N, dtype=BF16)
    work = dist.all_gather_into_tensor(out, weights(rank, N), async_op=odd)
    if odd:
        work.wait()
    return [(out, torch.cat([weights(r, N) for r in range(world)]))]


def gather_in_a_window(rank, world, odd):
    out, shard = torch.empty(world * N, dtype=BF16), weights(rank, N)
    if odd:
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_gather_into_tensor(out, shard)
        manager.wait()
    else:
        dist.all_gather_into_tensor(out, shard)
    return [(out, torch.cat([weights(r, N) for r in range(world)]))]


def gather_in_inference_mode(rank, world, odd):
    with torch.inference_mode(odd):
        out = torch.empty(world * N, dtype=BF16)
        dist.all_gather_into_tensor(out, weights(rank, N))
    return [(out, torch.cat([weights(r, N) for r in range(world)]))]


def exchange(rank, world, odd, change=lambda t: t, shape=(-1,), splits=None):
    x = torch.cat(parts(rank, world))
    x, splits = (change(x).view(shape) if odd else x), (splits if odd else None)
    dist.all_to_all_single(out := torch.empty_like(x), x, splits, splits)
    return [(out.reshape(-1), torch.cat([parts(r, world)[rank] for r in range(world)]))]


def send_all(rank, world, odd, change):
    root = 1
    t = weights(rank, N)
    t = change(t) if odd else t.view(60, 100) if change is transposed else t
    dist.broadcast(t, root)
    return [(t.contiguous().view(-1), weights(root, N))]


def hand_out(rank, world, odd):
    out = strided(torch.zeros(N, dtype=BF16)) if odd else torch.empty(N, dtype=BF16)
    dist.scatter(out, parts(0, world) if rank == 0 else None, 0)
    return [(out.contiguous(), parts(0, world)[rank])]


def collect(rank, world, odd):
    outs = [torch.empty(N, dtype=BF16) for _ in range(world)] if rank == 0 else None
    dist.gather(misaligned(weights(rank, N)) if odd else weights(rank, N), outs, 0)
    return [(out, weights(r, N)) for r, out in enumerate(outs or [])]


def total_part(rank, world, odd):
    out = torch.zeros(N, requires_grad=odd)
    dist.reduce_scatter_tensor(out, torch.arange(world * N, dtype=torch.float32) % 7 + rank)
    expected = (torch.arange(world * N) % 7).view(world, N)[rank] * world + sum(range(world))
    return [(out.detach(), expected.float())]


def sparse_total(rank, world, odd):
    t = torch.sparse_coo_tensor([[rank, N - 1]] if odd else [[rank]], [1.0, 2.0] if odd else [1.0], (N,))
    dist.all_reduce(t)
    expected = torch.zeros(N)
    expected[:world], expected[N - 1] = 1, 2
    return [(t.to_dense(), expected)]


CASES = {
    "strided input": lambda *of: gather(*of, strided),
    "expanded input": lambda *of: gather(*of, expanded),
    "misaligned input": lambda *of: gather(*of, misaligned),
    "input inside a storage": lambda *of: gather(*of, inner_part),
    "strided output": gather_into_strides,
    "list form": gather_list,
    "async": gather_async,
    "coalesced": gather_in_a_window,
    "inference mode": gather_in_inference_mode,
    "strided exchange": lambda *of: exchange(*of, strided),
    "exchange of another shape": lambda *of: exchange(*of, shape=(1, -1)),
    "exchange of rows": lambda *of: exchange(*of, shape=(3, 100, -1)),
    "exchange with splits": lambda *of: exchange(*of, splits=[N] * 3),
    "transposed broadcast": lambda *of: send_all(*of, transposed),
    "misaligned broadcast": lambda *of: send_all(*of, misaligned),
    "strided scatter": hand_out,
    "misaligned gather": collect,
    "output with gradient": total_part,
    "sparse": sparse_total,
}


def check_cases(rank, mode):
    options = zipccl.Options(**dict.fromkeys(zipccl.options.COLLECTIVES, mode), min_bytes=0)
    ranks.init("zipccl", timeout=20, pg_options=options)
    world = dist.get_world_size()
    for name, case in CASES.items():
        for odd_one in (0, world - 1):
            for _ in range(TIMES if mode == "auto" else 1):
                for found, expected in case(rank, world, rank == odd_one):
                    assert same_bits(found, expected), (name, odd_one)
    dist.barrier()
    return {op: s["zipped_calls"] for op, s in zipccl.stats().items()}


@pytest.mark.parametrize("mode", ["zip", "auto"])
def test_ranks_that_differ_in_what_only_they_know(mode):
    first, *others = ranks.run(check_cases, 3, mode, timeout=120)
    assert all(other == first for other in others)
    if mode == "zip":  # what "auto" tries depends on the machine
        assert all(first.values())
