"""Ranks that die, never come, or disagree: every other rank gets an exception in time, and nothing wrong comes out.

Real processes. A group's timeout is short here; each test's ranks must be through long before the wall limit.
"""

import datetime
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, weights

TIMEOUT = 6  # of groups, seconds
WALL = 60  # of a whole test
COUNT = 64 * 1024
COLLECTIVES = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce")
ZIP = {name: "zip" for name in COLLECTIVES} | {"min_bytes": 0}


def start(**options) -> tuple[int, int]:
    ranks.init("zipccl", timeout=TIMEOUT, pg_options=zipccl.Options(**(ZIP | options)))
    return dist.get_rank(), dist.get_world_size()


# Each makes one call and gives pairs of what arrived and what should have.


def all_gather(count, group=None, async_op=False, device="cpu"):
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty(count * world, dtype=BF16, device=device)
    work = dist.all_gather_into_tensor(out, weights(rank, count).to(device), group=group, async_op=async_op)
    return work, lambda: [(out, torch.cat([weights(r, count) for r in range(world)]))]


def all_to_all(count, group=None, async_op=False, device="cpu"):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, x = torch.empty(count * world, dtype=BF16, device=device), weights(rank, count * world).to(device)
    work = dist.all_to_all_single(out, x, group=group, async_op=async_op)
    parts = [weights(r, count * world)[count * rank :][:count] for r in range(world)]
    return work, lambda: [(out, torch.cat(parts))]


def uneven_all_to_all(count, group=None, async_op=False, device="cpu"):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, x = torch.empty(count * world, dtype=BF16, device=device), weights(rank, count * world).to(device)
    work = dist.all_to_all_single(out, x, [count] * world, [count] * world, group=group, async_op=async_op)
    parts = [weights(r, count * world)[count * rank :][:count] for r in range(world)]
    return work, lambda: [(out, torch.cat(parts))]


def broadcast(count, group=None, async_op=False, device="cpu"):
    t = weights(dist.get_rank(), count).to(device)
    return dist.broadcast(t, 0, group=group, async_op=async_op), lambda: [(t, weights(0, count))]


def scatter(count, group=None, async_op=False, device="cpu"):
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty(count, dtype=BF16, device=device)
    parts = [weights(r, count).to(device) for r in range(world)] if rank == 0 else None
    work = dist.scatter(out, parts, group=group, async_op=async_op)
    return work, lambda: [(out, weights(rank, count))]


def gather(count, group=None, async_op=False, device="cpu"):
    rank, world = dist.get_rank(), dist.get_world_size()
    outs = [torch.empty(count, dtype=BF16, device=device) for _ in range(world)] if rank == 0 else None
    work = dist.gather(weights(rank, count).to(device), outs, group=group, async_op=async_op)
    return work, lambda: [(out, weights(r, count)) for r, out in enumerate(outs or [])]


def reduce_scatter(count, group=None, async_op=False, device="cpu"):
    world = dist.get_world_size()
    out = torch.empty(count, dtype=BF16, device=device)
    work = dist.reduce_scatter_tensor(
        out, torch.ones(count * world, dtype=BF16, device=device), group=group, async_op=async_op
    )
    return work, lambda: [(out, torch.full((count,), world, dtype=BF16))]


def all_reduce(count, group=None, async_op=False, device="cpu"):
    t = torch.ones(count, dtype=BF16, device=device)
    work = dist.all_reduce(t, group=group, async_op=async_op)
    return work, lambda: [(t, torch.full((count,), dist.get_world_size(), dtype=BF16))]


CALLS = [all_gather, all_to_all, uneven_all_to_all, broadcast, scatter, gather, reduce_scatter, all_reduce]
CASES = [(call, 2 if "all_to_all" in call.__name__ else "auto") for call in CALLS] + [(all_to_all, 1)]
EACH = pytest.mark.parametrize("call, design", CASES, ids=lambda p: p.__name__ if callable(p) else f"design {p}")


def op_name(call) -> str:
    return call.__name__.removeprefix("uneven_")


def outcome(call, count) -> tuple[str | None, float]:
    """The error's text (None: a right result) and the seconds it took. A wrong result is an AssertionError."""
    began = time.monotonic()
    try:
        _, pairs = call(count)
        for found, truth in pairs():
            assert same_bits(found, truth), f"{call.__name__}: wrong result"
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return None, time.monotonic() - began


def leave() -> float:
    """Groups with broken peers can be destroyed; seconds it took."""
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began


def check_report(text: str, call, rank: int, world: int) -> None:
    assert re.search(rf"zipccl {op_name(call)} \(rank {rank} of {world}, group [^)]*, \d+ bytes\): .", text), text


# ---- a rank is killed ------------------------------------------------------------------------------------------


def survive(rank, call, design):
    """Rank 2 dies while calls are under way; the others go on calling until they are told."""
    rank, world = start(all_to_all_design=design)
    first, _ = outcome(call, COUNT)
    assert first is None
    if rank == 2:
        works = [call(COUNT, async_op=True) for _ in range(6)]
        works[2][0].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    texts = []
    deadline = time.monotonic() + 3 * TIMEOUT
    while not texts and time.monotonic() < deadline:
        text, seconds = outcome(call, COUNT)
        if text is not None:
            assert seconds < TIMEOUT + 4
            texts.append(text)
    again, seconds = outcome(call, COUNT)  # the group is done for: at once, or at least in time
    assert seconds < TIMEOUT + 4
    return texts, again, leave()


@EACH
def test_a_rank_is_killed(call, design):
    for rank, result in enumerate(ranks.run(survive, 3, call, design, timeout=WALL, killed=(2,))):
        if rank == 2:
            assert result is None
            continue
        texts, again, seconds = result
        # Who needs nothing from the dead rank may not notice; who notices says what, where and why.
        assert texts or call in (broadcast, scatter), f"rank {rank} did not notice"
        for text in texts:
            check_report(text, call, rank, 3)
        assert again is not None or not texts
        assert seconds < 12


# ---- a rank never comes ----------------------------------------------------------------------------------------


def wait_in_vain(rank):
    """Every collective at once, each in a group of its own; rank 1 takes part in none."""
    rank, world = start()
    store = dist.distributed_c10d._get_default_store()
    timeout = datetime.timedelta(seconds=TIMEOUT)
    groups = [
        dist.new_group(timeout=timeout, pg_options=zipccl.Options(**ZIP, all_to_all_design=design))
        for _, design in CASES
    ]
    texts = {}
    if rank != 1:
        began = time.monotonic()
        works = [call(COUNT, group, async_op=True) for (call, _), group in zip(CASES, groups, strict=True)]
        for (call, design), (work, pairs) in zip(CASES, works, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                check_report(texts.setdefault((call, design), str(error)), call, rank, world)
            else:
                assert all(same_bits(found, truth) for found, truth in pairs())
        assert time.monotonic() - began < TIMEOUT + 6
        assert leave() < 12
        store.set(f"gave up {rank}", "")
    store.wait([f"gave up {r}" for r in range(world) if r != 1])
    return texts


def test_a_rank_never_comes():
    results = ranks.run(wait_in_vain, 3, timeout=WALL)
    for rank in (0, 2):
        for case in CASES:
            # A root that sends does not wait for who receives, nor one receiver for another.
            assert case in results[rank] or case[0] in (broadcast, scatter), f"rank {rank} did not notice: {case}"


# ---- ranks disagree --------------------------------------------------------------------------------------------


def disagree(rank, call, design, other_count):
    rank, world = start(all_to_all_design=design)
    text, seconds = outcome(call, other_count if rank == 1 else COUNT)
    leave()
    return text, seconds


@pytest.mark.parametrize("other", [COUNT - 1000, 3 * COUNT, 1], ids=["fewer", "more", "one"])
@EACH
def test_shapes_differ(call, design, other):
    results = ranks.run(disagree, 3, call, design, other, timeout=WALL)
    assert any(text for text, _ in results), "nobody noticed"
    for rank, (text, seconds) in enumerate(results):
        assert seconds < TIMEOUT + 4
        if text:
            check_report(text, call, rank, 3)


def mistaken(rank, design):
    """Rank 0 splits wrongly in the first of two calls; nobody looks at it before the second is made."""
    rank, world = start(all_to_all_design=design)
    works = []
    for wrong in (True, False):
        sends = [COUNT] * world
        if wrong and rank == 0:
            sends[1] -= 8
        x = torch.cat([torch.full((sends[r],), 10 * rank + r, dtype=BF16) for r in range(world)])
        out = torch.empty(COUNT * world, dtype=BF16)
        works.append((dist.all_to_all_single(out, x, [COUNT] * world, sends, async_op=True), out))
    truth = torch.cat([torch.full((COUNT,), 10 * r + rank, dtype=BF16) for r in range(world)])
    texts = []
    for work, out in works:
        try:
            work.wait()
        except RuntimeError as error:
            texts.append(str(error))
        else:
            texts.append(None)
            assert rank != 1 and same_bits(out, truth)
    leave()
    return texts


@pytest.mark.parametrize("design", [1, 2])
def test_after_a_mistake_no_call_takes_messages_of_another(design):
    results = ranks.run(mistaken, 3, design, timeout=WALL)
    assert "rank 0 sends" in results[1][0] and "an earlier call failed on this rank" in results[1][1]
    for rank in (0, 2):
        for text in results[rank]:
            if text:
                check_report(text, all_to_all, rank, 3)


def check_options_at_creation(rank):
    """Every rank is told so at once."""
    began = time.monotonic()
    try:
        ranks.init("zipccl", timeout=TIMEOUT, pg_options=zipccl.Options(checksum=rank == 1))
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return None, time.monotonic() - began


def test_options_differ_at_creation():
    results = ranks.run(check_options_at_creation, 3, timeout=WALL)
    for text, seconds in results:
        assert "rank 1 of group" in text and "has options 'checksum=True'" in text and "must pass the same" in text
        assert seconds < 2 * TIMEOUT + 6


OVERRIDES = [
    (all_gather, {"all_gather": "raw"}),
    (all_to_all, {"all_to_all": "raw"}),
    (all_to_all, {"all_to_all_design": 1}),
    (uneven_all_to_all, {"min_bytes": 2 * COUNT * 3 + 3}),
    (broadcast, {"broadcast": "raw"}),
    (scatter, {"scatter": "raw"}),
    (gather, {"gather": "raw"}),
    (reduce_scatter, {"reduce_scatter": "raw"}),
    (all_reduce, {"all_reduce": "raw"}),
]


def check_override(rank):
    """Rank 1 alone goes another way, in every collective at once."""
    rank, world = start()
    timeout = datetime.timedelta(seconds=TIMEOUT)
    options = zipccl.Options(**ZIP, all_to_all_design=2)
    groups = [dist.new_group(timeout=timeout, pg_options=options) for _ in OVERRIDES]
    began = time.monotonic()
    works = []
    for group, (call, change) in zip(groups, OVERRIDES, strict=True):
        with zipccl.override(group, **(change if rank == 1 else {})):
            works.append(call(COUNT, group, async_op=True))
    noticed = []
    for work, pairs in works:
        try:
            work.wait()
        except RuntimeError as error:
            noticed.append(str(error))
        else:
            noticed.append(None)
            assert all(same_bits(found, truth) for found, truth in pairs())
    assert time.monotonic() - began < TIMEOUT + 6
    dist.barrier()  # the default group is none the worse
    assert leave() < 12
    return noticed


def test_options_differ_in_a_call():
    results = ranks.run(check_override, 3, timeout=WALL)
    for i, case in enumerate(OVERRIDES):
        assert any(noticed[i] for noticed in results), f"nobody noticed: {case}"
    for noticed in (results[0], results[2]):
        for (call, _), text in zip(OVERRIDES, noticed, strict=True):
            if text:
                assert f"zipccl {op_name(call)} (rank" in text
    said = [noticed[2] for noticed in (results[0], results[2])]
    assert all(
        "rank 1 sends 131072 bytes zipped by design 1, expected were 131072 bytes zipped by design 2" in t for t in said
    )


def check_reduce_ops(rank, device):
    """Rank 1 sums otherwise than the others."""
    where = ranks.device(device)
    rank, world = start()
    x = torch.ones(world * COUNT, dtype=BF16, device=where)
    for theirs in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.5), dist._make_nccl_premul_sum(1.5)):
        op = theirs if rank == 1 else dist.ReduceOp.SUM
        told = f"rank {0 if rank == 1 else 1} passes another reduce op or factor than this rank"
        with pytest.raises(zipccl.Error, match=rf"reduce_scatter \(rank {rank} of {world}.*{told}"):
            dist.reduce_scatter_tensor(torch.empty_like(x[:COUNT]), x, op=op)
        with pytest.raises(zipccl.Error, match=rf"all_reduce \(rank {rank} of {world}.*{told}"):
            dist.all_reduce(x.clone(), op=op)
        dist.all_reduce(y := x.clone())  # the group is none the worse
        assert same_bits(y, torch.full_like(x, world))


def test_reduce_ops_differ():
    ranks.run(check_reduce_ops, 3, "cpu", timeout=WALL)


# ---- a frame is damaged on its way -----------------------------------------------------------------------------


SUM = 1 | (0x3F80 << 2)  # of a reduction's words: no average, the bits of factor 1


class Peer:
    """Rank 1 of 2, who speaks the protocol over an inner backend by hand and flips a bit in what it sends.

    number: of the call in its group, from 1. After the first, both know how large such frames are.
    """

    def __init__(self, inner, damage: bool, device: str = "cpu", number: int = 1):
        self.inner, self.damage, self.device, self.number = inner, damage, device, number

    def frame(self, values: torch.Tensor) -> torch.Tensor:
        frame = zipccl.compress(values, checksum=True)
        if self.damage:
            frame[-200] ^= 4
        return frame.to(self.device)

    def empty(self, count: int, dtype=torch.uint8) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def tensor(self, *words: int) -> torch.Tensor:
        return torch.tensor(words, device=self.device)

    def words(self, *to_rank_0: int) -> list[int]:
        """Both ranks' words, rank 0's first."""
        if self.device != "cpu":
            told = self.tensor(*to_rank_0, *[0] * len(to_rank_0))
            self.inner.alltoall_base(heard := torch.empty_like(told), told, [], [], dist.AllToAllOptions()).wait()
            return [*heard[: len(to_rank_0)].tolist(), *to_rank_0]
        count = len(to_rank_0)
        self.inner.recv([heard := self.empty(count, torch.int64)], 0, 2 * count).wait()
        self.inner.send([self.tensor(*to_rank_0)], 0, 2 * count).wait()
        return [*heard.tolist(), *to_rank_0]

    def opening(self, *to_rank_0: int) -> list[int]:
        """The same of the words that open a call: which one it is, as rank 0 says, and three more."""
        self.inner.recv([heard := self.empty(4, torch.int64)], 0, 8).wait()
        told = [heard[0].item(), *to_rank_0, 0, 0][:4]
        self.inner.send([self.tensor(*told)], 0, 8).wait()
        return [*heard[1 : 1 + len(to_rank_0)].tolist(), *to_rank_0]

    def gathered_words(self, own: int) -> list[int]:
        if self.device == "cpu":
            return self.opening(own)
        self.inner._allgather_base(all_ := self.empty(2, torch.int64), self.tensor(own)).wait()
        return all_.tolist()

    def root_words(self, *words: int) -> None:
        if self.device == "cpu":
            self.opening(*words)
        else:
            self.inner.broadcast(self.tensor(*words), 1).wait()

    def announce(self, mine: torch.Tensor, design: int, ahead: int, use: int) -> None:
        if self.device == "cpu":
            self.opening(mine.nbytes << 2 | design, ahead, use)

    def bytes(self, data: torch.Tensor, expected: int) -> None:
        received, options = self.empty(expected), dist.AllToAllOptions()
        if self.device == "cpu":
            heard = self.inner.recv([received], 0, 0)
            self.inner.send([data], 0, 0).wait()
            heard.wait()
        else:
            self.inner.alltoall([received, self.empty(0)], [data, self.empty(0)], options).wait()

    def gathered(self, frame: torch.Tensor) -> None:
        largest = max(self.gathered_words(frame.numel()))
        padded = torch.nn.functional.pad(frame, (0, largest - frame.numel()))
        if self.device == "cpu":
            self.bytes(padded, largest)
        else:
            self.inner._allgather_base(self.empty(2 * largest), padded).wait()

    def all_gather(self):
        self.gathered(self.frame(weights(1, COUNT)))

    def exchanged(self, mine: torch.Tensor, rank_0s: torch.Tensor, use: int = 0) -> None:
        frame, other = self.frame(mine), zipccl.compress(rank_0s, checksum=True)
        self.announce(mine, 1, 0, use)
        in_word = 0 if self.device == "cpu" else use << 48
        self.words(frame.numel() | (in_word if in_word < 1 << 63 else in_word - (1 << 64)))
        self.bytes(frame, other.numel())

    def all_to_all_1(self):
        self.exchanged(weights(1, 2 * COUNT)[:COUNT], weights(0, 2 * COUNT)[COUNT:])

    def all_to_all_2(self):
        mine, rank_0s = weights(1, 2 * COUNT)[:COUNT], weights(0, 2 * COUNT)[COUNT:]
        frame, other = self.frame(mine), zipccl.compress(rank_0s, checksum=True)
        static = 64 + 8 * 2 + 3 * 64 + 1408 * 64  # header, 2 groups, 64 tiles and their units: docs/format.md
        ahead, theirs = (frame.numel(), other.numel()) if self.number > 1 else (static, static)
        self.announce(mine, 2, ahead, 0)
        if self.device != "cpu":
            self.words(frame.numel())
        self.bytes(frame[:ahead], theirs)
        if self.number > 1:
            return
        if self.device == "cpu":
            self.inner.recv([self.empty(other.numel() - theirs)], 0, 0).wait()
            self.inner.send([frame[ahead:]], 0, 0).wait()
        else:
            self.bytes(frame[ahead:], other.numel() - theirs)

    def broadcast(self):
        frame = self.frame(weights(1, COUNT))
        self.root_words(frame.numel())
        self.inner.broadcast(frame, 1).wait()

    def scatter(self):
        frame = self.frame(weights(0, COUNT))
        self.root_words(frame.numel(), frame.numel())
        self.inner.scatter(torch.empty_like(frame), [frame, frame], 1).wait()

    def gather(self):
        frame = self.frame(weights(1, COUNT))
        largest = max(self.gathered_words(frame.numel()))
        self.inner.gather([], torch.nn.functional.pad(frame, (0, largest - frame.numel())), 0).wait()

    def reduce_scatter(self):
        self.exchanged(weights(1, 2 * COUNT)[:COUNT], weights(0, 2 * COUNT)[COUNT:], SUM)

    def all_reduce(self):
        """Sound halves of the input; damaged is the sum that is gathered."""
        damage, self.damage = self.damage, False
        mine, rank_0s = weights(1, COUNT), weights(0, COUNT)
        half = COUNT // 2
        self.exchanged(mine[:half], rank_0s[half:], SUM)
        self.damage = damage
        self.gathered(self.frame((rank_0s.float() + mine.float())[half:].to(BF16)))


def receive(backend, kind: str, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rank 0's call to go with the peer's: what came, what should have come."""
    both, half = [weights(r, 2 * COUNT) for r in range(2)], COUNT // 2
    mine, shard = both[0].to(device), weights(0, COUNT).to(device)
    out = torch.empty(COUNT, dtype=BF16, device=device)
    if kind == "all_gather":
        out = torch.empty(2 * COUNT, dtype=BF16, device=device)
        backend._allgather_base(out, shard).wait()
        return [(out, torch.cat([weights(0, COUNT), weights(1, COUNT)]))]
    if kind.startswith("all_to_all"):
        out = torch.empty_like(mine)
        backend.alltoall_base(out, mine, [], [], dist.AllToAllOptions()).wait()
        return [(out, torch.cat([half_[:COUNT] for half_ in both]))]
    if kind == "broadcast":
        backend.broadcast(out, 1).wait()
        return [(out, weights(1, COUNT))]
    if kind == "scatter":
        backend.scatter(out, [], 1).wait()
        return [(out, weights(0, COUNT))]
    if kind == "gather":
        outs = [torch.empty_like(out) for _ in range(2)]
        backend.gather(outs, shard, 0).wait()
        return [(outs[0], weights(0, COUNT)), (outs[1], weights(1, COUNT))]
    if kind == "reduce_scatter":
        backend._reduce_scatter_base(out, mine).wait()
        return [(out, (both[0][:COUNT].float() + both[1][:COUNT].float()).to(BF16))]
    backend.allreduce([shard]).wait()
    return [(shard[half:], (weights(0, COUNT).float() + weights(1, COUNT).float()).to(BF16)[half:])]


KINDS = ["all_gather", "all_to_all_1", "all_to_all_2", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce"]


def exchange_damaged(rank, inner, make_backend, device="cpu"):
    """Every kind of call: sound, damaged, sound. make_backend(options): over `inner`."""
    for kind in KINDS:
        options = zipccl.Options(**ZIP, checksum=True, all_to_all_design=1 if kind == "all_to_all_1" else 2)
        backend = make_backend(options.native())
        for call, damage in enumerate((False, True, False)):  # and the call after it is none the worse
            if rank == 1:
                getattr(Peer(inner, damage, device, call + 1), kind)()
            elif damage:
                name = kind.removesuffix("_1").removesuffix("_2")
                said = rf"zipccl {name} \(rank 0 of 2, group [^)]*, \d+ bytes\): frame from rank 1: .*checksum mismatch"
                with pytest.raises(zipccl.FrameError, match=said):
                    receive(backend, kind, device)
            else:
                assert all(same_bits(found, truth) for found, truth in receive(backend, kind, device)), kind


def check_damage(rank):
    store = dist.FileStore(f"{os.environ['RANKS_DIRECTORY']}/damage", 2)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, datetime.timedelta(seconds=TIMEOUT))
    exchange_damaged(rank, gloo, lambda options: zipccl._C.ZipBackend(rank, 2, gloo, gloo, None, options))


def test_a_frame_is_damaged_on_its_way():
    ranks.run(check_damage, 2, timeout=WALL)


# ---- the end of a process whose group is broken ----------------------------------------------------------------

SCRIPT = """
import datetime, os, sys, torch, torch.distributed as dist, zipccl
rank, path, destroy = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "destroy"
store = dist.FileStore(path, 2)
dist.init_process_group("zipccl", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=4))
out, x = torch.empty(80_000, dtype=torch.bfloat16), torch.ones(40_000, dtype=torch.bfloat16)
dist.all_gather_into_tensor(out, x)
if rank == 1:
    os.kill(os.getpid(), 9)
works = [dist.all_to_all_single(torch.empty_like(out), out, async_op=True) for _ in range(5)]
try:
    works[0].wait()
except zipccl.Error as error:
    print("told:", error, flush=True)
if destroy:
    dist.destroy_process_group()
print("end of script", flush=True)
"""


@pytest.mark.parametrize("how", ["destroy", "leave"])
def test_the_process_ends(how, tmp_path):
    env = os.environ | {f"ZIPCCL_{name.upper()}": str(value) for name, value in ZIP.items()}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = processes[0].communicate(timeout=WALL)
        assert processes[0].returncode == 0, output
        assert "told: zipccl all_to_all (rank 0 of 2" in output and output.strip().endswith("end of script")
        assert processes[1].wait(timeout=WALL) == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.wait()
