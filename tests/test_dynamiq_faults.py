"""DynamiQ calls that differ between ranks: every rank is told by which and in what, and the next calls are as ever.

Real processes over gloo, which would end them at a message longer than its receiver expects.
"""

import re
import time

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl

TIMEOUT = 6  # of groups, seconds
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Bucket:
    """What DDP hands its hook."""

    def __init__(self, count: int, dtype: torch.dtype):
        self.values = torch.ones(count, dtype=dtype)

    def buffer(self) -> torch.Tensor:
        return self.values

    def is_last(self) -> bool:
        return False


def call(op: str, state: zipccl.DynamiQState, count: int, dtype: torch.dtype) -> None:
    x = torch.ones(count, dtype=dtype)
    if op == "all_reduce":
        zipccl.dynamiq.all_reduce(x, state)
    elif op == "reduce_scatter":
        zipccl.dynamiq.reduce_scatter(torch.empty_like(x), x.repeat(dist.get_world_size()), state)
    elif op == "explain":
        state.explain(x)
    else:
        zipccl.dynamiq_hook(state, Bucket(count, dtype)).wait()


def words(op: str, world: int, count: int, dtype: torch.dtype) -> set[str]:
    """Of what ranks compare, those that the cases below are about."""
    name = {"hook": "all_reduce" if dtype != F64 else "all_reduce_raw"}.get(op, op)
    found = {f"op={name}", f"values={count * world if op == 'reduce_scatter' else count}"}
    if op != "explain":
        found.add({F32: "dtype=Float", F64: "dtype=Double", BF16: "dtype=BFloat16"}[dtype])
    return found


FEW, MANY = 100, 40_000  # raw, packed
# All ranks' call, and rank 1's.
CASES = [
    ((op, count, F32), other)
    for op in ("all_reduce", "reduce_scatter")
    for count in (FEW, MANY)
    for other in (
        (op, count + 1, F32),
        (op, 3 * MANY, F32),
        (op, 7, F32),
        (op, 0, F32),
        (op, count, BF16),
        ("reduce_scatter" if op == "all_reduce" else "all_reduce", count, F32),
        ("explain", count, F32),
    )
]
CASES += [
    (("hook", MANY, F32), ("hook", MANY + 256, F32)),
    (("hook", MANY, F32), ("hook", MANY, F64)),
    (("hook", MANY, F64), ("hook", MANY // 2, F64)),
    (("hook", FEW, F32), ("reduce_scatter", FEW, F32)),
]


def check_sum(rank: int, state: zipccl.DynamiQState) -> None:
    world = dist.get_world_size()
    x = torch.full((MANY,), 1.0 + rank)
    zipccl.dynamiq.all_reduce(x, state)
    assert torch.allclose(x, torch.tensor(world * (world + 1) / 2), rtol=0.05)


def disagree(rank, topology):
    """All cases, by one state."""
    ranks.init("gloo", timeout=TIMEOUT)
    state = zipccl.DynamiQState(topology=topology)
    texts = []
    for mine, other in CASES:
        op, count, dtype = other if rank == 1 else mine
        began = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            call(op, state, count, dtype)
        assert time.monotonic() - began < TIMEOUT
        texts.append(str(error.value))
        check_sum(rank, state)
    return texts


@pytest.mark.parametrize("world, topology", [(2, "auto"), (3, "direct"), (3, "ring")])
def test_every_rank_is_told(world, topology):
    for rank, texts in enumerate(ranks.run(disagree, world, topology)):
        for (mine, other), text in zip(CASES, texts, strict=True):
            said = re.search(
                rf"zipccl dynamiq \w+ \(rank {rank} of {world}, \d+ values\): rank (\d) calls with (.*), this rank "
                r"with (.*); every rank must make the same call",
                text,
            )
            assert said and int(said[1]) == (0 if rank == 1 else 1), text
            here, there = (other, mine) if rank == 1 else (mine, other)
            own, theirs = words(here[0], world, *here[1:]), words(there[0], world, *there[1:])
            assert theirs - own <= set(said[2].split()) and not own & set(said[2].split()), text
            assert own - theirs <= set(said[3].split()) and not theirs & set(said[3].split()), text


def disagree_meanwhile(rank):
    """Calls that wait in a row while one of them fails."""
    ranks.init("gloo", timeout=TIMEOUT)
    state = zipccl.DynamiQState(bits=8.0, topology="direct")
    options, channel = state._options(), state._channel()
    tensors = [torch.ones(MANY + (512 if (rank, i) == (1, 2) else 0)) for i in range(5)]
    futures = [channel.all_reduce(x, options, 1.0, 0, i, [], None, True) for i, x in enumerate(tensors)]
    failed = []
    for i, future in enumerate(futures):
        try:
            future.wait()
        except RuntimeError:
            failed.append(i)
    return failed, [float(x.sub(dist.get_world_size()).abs().max()) < 0.05 for x in tensors]


def test_one_of_several():
    for failed, right in ranks.run(disagree_meanwhile, 3):
        assert failed == [2]
        assert right == [True, True, False, True, True]


def with_other_options(rank):
    """States that were compared, used in another order."""
    ranks.init("gloo", timeout=TIMEOUT)
    states = [zipccl.DynamiQState(bits=bits, topology="direct") for bits in (4.0, 6.0)]
    for state in states:
        check_sum(rank, state)
    texts = []
    for state in states if rank == 0 else states[::-1]:
        with pytest.raises(RuntimeError) as error:
            zipccl.dynamiq.all_reduce(torch.ones(MANY), state)
        texts.append(str(error.value))
    with pytest.raises(RuntimeError, match=r"scale=(1|0\.5), this rank with scale=(1|0\.5);"):
        op = dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.AVG
        zipccl.dynamiq.all_reduce(torch.ones(MANY), states[0], op)
    return texts


def test_options_differ():
    rank_0, rank_1 = ranks.run(with_other_options, 2)
    assert "rank 1 calls with bits=6, this rank with bits=4;" in rank_0[0]
    assert "rank 0 calls with bits=4, this rank with bits=6;" in rank_1[0]
    assert "bits=4, this rank with bits=6;" in rank_0[1] and "bits=6, this rank with bits=4;" in rank_1[1]
