"""The CPU codec on several threads: the same frames and values as on one, from whatever thread it is called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from codec_paths import raw_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_bits, weights
from test_codec import LAYOUTS
from zipccl import _C

MANY = 3  # threads; a tensor of 3 MiB and more is given to so many


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def mixed(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Tiles of every kind: values that compress, any bits, zeros."""
    t = weights(seed, count, dtype)
    bits = random_bits(seed + 1, count // 5, dtype)
    t[count // 3 : count // 3 + len(bits)] = bits
    t[count // 7 : count // 7 + count // 11] = 0
    return t


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 1_800_000),
    form=st.sampled_from([("fast", layout) for layout in LAYOUTS] + [("dense", "compact"), ("raw", "compact")]),
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16, torch.float8_e5m2]),
    checksum=st.booleans(),
)
def test_property_threads_change_nothing(seed, count, form, dtype, checksum):
    t = mixed(seed, count, torch.float32).to(dtype)
    frames = []
    for n in (1, 2, MANY):
        torch.set_num_threads(n)
        frame = _C.compress(t, *form, checksum, "best")
        frames.append(raw_bytes(frame))
        assert raw_bytes(_C.decompress(frame, "best")) == raw_bytes(t)
    assert frames[0] == frames[1] == frames[2]


@pytest.mark.parametrize("code", ["fast", "dense"])
def test_sums(code):
    frames = []
    for k, layout in enumerate(["compact", "packed", "split", "packed"]):
        t = weights(k, 1_700_001)
        t[400_000 * k :][:100_000] = 0
        frames.append(zipccl.compress(t, code, layout=layout, checksum=False))
    sums = []
    for n in (1, 2, MANY):
        torch.set_num_threads(n)
        sums.append(torch.empty(1_700_001, dtype=torch.bfloat16))
        _C.sum_into(frames, sums[-1])
    expected = sum(zipccl.decompress(frame).float() for frame in frames).bfloat16()
    assert all(raw_bytes(s) == raw_bytes(expected) for s in sums)


def test_sums_of_denormals_where_the_caller_flushes_them():
    """torch's flag is a thread's: with it, the sum would depend on who adds up which group."""
    values = [(weights(k, 1_700_001).float() * 2.0**-125).bfloat16() for k in range(3)]
    frames = [zipccl.compress(v, checksum=False) for v in values]
    expected = (values[0].float() + values[1].float() + values[2].float()).bfloat16()
    assert (expected.float().abs() < torch.finfo(torch.bfloat16).tiny).any()
    torch.set_num_threads(MANY)
    out = torch.empty_like(expected)
    assert torch.set_flush_denormal(True)
    try:
        _C.sum_into(frames, out)
    finally:
        torch.set_flush_denormal(False)
    assert raw_bytes(out) == raw_bytes(expected)


@pytest.mark.parametrize("code, layout", [("fast", "compact"), ("fast", "packed"), ("dense", "compact")])
def test_the_first_error_is_reported(code, layout):
    """Of several broken groups, on any number of threads."""
    t = weights(5, 1_700_000)
    frame = zipccl.compress(t, code, layout=layout, checksum=False)
    groups, tiles = -(-len(t) // 32768), -(-len(t) // 1024)
    words = 64 + -(-8 * groups // 16) * 16
    frame[words + 2 * (tiles - 1) + 1] = 0xF0  # the last tile: of a mode that there is not
    frame[words + 2 * 700] ^= 1  # another tile: of one dynamic byte more, or less
    said = set()
    for n in (1, 2, MANY):
        torch.set_num_threads(n)
        for _ in range(5):
            with pytest.raises(zipccl.FrameError) as raised:
                zipccl.decompress(frame)
            said.add(str(raised.value))
    assert len(said) == 1 and "invalid tile entry" not in said.pop()


def test_called_from_many_threads_at_once():
    torch.set_num_threads(MANY)
    tensors = [mixed(k, 1_600_000, torch.bfloat16) for k in range(6)]
    with ThreadPoolExecutor(6) as pool:
        frames = list(pool.map(zipccl.compress, tensors))
        back = list(pool.map(zipccl.decompress, frames))
    torch.set_num_threads(1)
    for t, frame, same in zip(tensors, frames, back, strict=True):
        assert raw_bytes(same) == raw_bytes(t) and torch.equal(frame, zipccl.compress(t))


def gather_large(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip", all_reduce="zip", min_bytes=0))
    torch.set_num_threads(MANY)
    shards = [mixed(k, 1_600_000, torch.bfloat16) for k in range(2)]
    expected = torch.cat(shards)
    for _ in range(3):
        out = torch.empty_like(expected)
        work = dist.all_gather_into_tensor(out, shards[rank], async_op=True)  # on the group's own thread
        frame = zipccl.compress(shards[rank])  # and on this one meanwhile
        work.wait()
        assert raw_bytes(out) == raw_bytes(expected)
        assert raw_bytes(zipccl.decompress(frame)) == raw_bytes(shards[rank])
    total = torch.full((1_000_000,), rank + 1.0)
    dist.all_reduce(total)
    assert (total == 3).all()
    stats = zipccl.stats()
    return stats["all_gather"]["zipped_calls"], stats["all_reduce"]["zipped_calls"]


def test_collectives_on_several_threads():
    assert ranks.run(gather_large, 2, timeout=60) == [(3, 1)] * 2
