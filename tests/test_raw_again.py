"""Calls on CPU tensors that are raw as the last one like them was: gloo's threads carry them out beside each other, and
none goes by the worker where nothing is ahead of it. What is sent, and what callers see, is the same on both ways."""

import datetime
import os
import random
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
from recorder import Inner
from samples import BF16, weights

COUNT = 60  # values for each rank: by `auto` such messages are raw
ZIP = {"all_to_all": "zip", "min_bytes": 0}


def threads() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def all_to_all(seed: int, count: int = COUNT, group=None, async_op=True):
    """(work, what arrives, what should)"""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    x, out = weights(100 * seed + rank, world * count), torch.empty(world * count, dtype=BF16)
    truth = torch.cat([weights(100 * seed + r, world * count)[rank * count :][:count] for r in range(world)])
    return dist.all_to_all_single(out, x, group=group, async_op=async_op), out, truth


def broadcast(seed: int, count: int, group=None):
    t = weights(100 * seed + dist.get_rank(), count)
    return dist.broadcast(t, 1, group=group, async_op=True), t, weights(100 * seed + 1, count)


def all_gather(seed: int, count: int, group=None):
    world = dist.get_world_size()
    out = torch.empty(world * count, dtype=BF16)
    work = dist.all_gather_into_tensor(out, weights(100 * seed + dist.get_rank(), count), group=group, async_op=True)
    return work, out, torch.cat([weights(100 * seed + r, count) for r in range(world)])


def check(work, out, truth) -> None:
    work.wait()
    assert work.is_completed() and work.is_success() and same_bits(out, truth)


def warm_up(calls: int = 3, group=None) -> None:
    """The first call of a kind is compared between ranks, and agreed on."""
    for seed in range(calls):
        check(*all_to_all(seed, group=group))


# ---- the same messages on both ways ----------------------------------------------------------------------------


def made(inner: Inner, calls: int) -> list[str]:
    """Names of what so many small all-to-alls were for the backend of zipped calls, all begun before any is awaited."""
    x = torch.arange(2 * COUNT).to(BF16)
    works = []
    for _ in range(calls):
        options = dist.AllToAllOptions()
        options.asyncOp = True
        works.append(inner.backend.alltoall_base(torch.empty_like(x), x, [], [], options))
    inner.zip.hold(False)
    for work in works:
        work.wait()
    return [c.name for c in inner.take_calls()["zip"] if c.name != "_allgather_base"]


def test_what_is_sent_does_not_depend_on_the_worker():
    """A rank whose worker is busy sends the same as one whose worker is idle, agreements between ranks included."""
    free, busy = Inner(size=3, all_to_all="auto"), Inner(size=3, all_to_all="auto")
    for inner in (free, busy):
        made(inner, 3)
    x, out = torch.zeros(COUNT, dtype=BF16), torch.zeros(3 * COUNT, dtype=BF16)
    for round_ in range(4):
        free.backend._allgather_base(out, x).wait()
        free.take_calls()
        busy.zip.hold(True)
        blocks = busy.backend._allgather_base(out.clone(), x)
        calls = made(free, 20 + round_)
        assert made(busy, 20 + round_)[-len(calls) :] == calls
        blocks.wait()
    assert {"alltoall_base", "allreduce"} <= set(made(free, 260))


def without_a_thread(rank):
    ranks.init("zipccl")
    for seed in range(3):
        all_to_all(seed, async_op=False)
    before = threads()
    for _ in range(10):
        works = [all_to_all(seed) for seed in range(2)]
        assert threads() == before
        for call in works:
            check(*call)
    return zipccl.stats()["all_to_all"]["calls"]


def test_no_thread_is_made():
    assert ranks.run(without_a_thread, 2) == [23, 23]


# ---- calls beside each other -----------------------------------------------------------------------------------


def overlap(rank, seed):
    """Small calls, zipped ones, other collectives and barriers, begun in one order and awaited in any."""
    rng, order = random.Random(seed), random.Random(f"{seed} {rank}")
    ranks.init("zipccl")
    group = dist.new_group(pg_options=zipccl.Options(min_bytes=1000))
    pending = []
    for number in range(500):
        kind, count = rng.random(), rng.randrange(1, COUNT)
        if kind < 0.8:
            pending.append(all_to_all(number, count, group, async_op=kind < 0.7))
            if pending[-1][0] is None:
                assert same_bits(*pending.pop()[1:])
        elif kind < 0.85:
            with zipccl.override(group, **ZIP):
                pending.append(all_to_all(number, 1000 + count, group))
        elif kind < 0.9:
            pending.append(broadcast(number, 700, group))
        elif kind < 0.95:
            pending.append(all_gather(number, rng.choice([10, 700]), group))
        elif kind < 0.97:
            dist.barrier(group)
        else:
            pending.append(all_to_all(number, count))  # in another group
        while len(pending) > rng.choice([0, 3, 20]):
            check(*pending.pop(order.randrange(len(pending))))
    for call in pending:
        check(*call)
    stats = zipccl.stats(group)
    return stats["all_to_all"]["calls"], stats["all_to_all"]["zipped_calls"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_calls_overlap(world, seed):
    results = ranks.run(overlap, world, seed)
    assert all(result == results[0] for result in results) and results[0][0] > 350 and results[0][1] > 10


def callbacks(rank):
    """They may make calls, and wait for later ones, many at once."""
    ranks.init("zipccl")
    warm_up()
    for _ in range(20):
        results = []
        for i in range(8):
            (work, out, truth), later = all_to_all(i), all_to_all(100 + i)

            def wait_for_later(future, later=later):
                check(*later)
                return future.value()[0]

            results.append((work.get_future().then(wait_for_later), out, truth))
        for future, out, truth in results:
            assert same_bits(future.wait(), truth) and same_bits(out, truth)
        work, out, truth = all_to_all(5)
        work.wait()
        future = work.get_future()
        assert future.done() and same_bits(future.value()[0], truth) and same_bits(work.result()[0], truth)


def test_callbacks_may_wait_for_later_calls():
    ranks.run(callbacks, 2)


def let_go(rank):
    """Tensors belong to nobody once the caller has waited."""
    import weakref

    import numpy as np

    ranks.init("zipccl")
    warm_up()
    x, out = np.zeros(2 * COUNT, np.float16), np.zeros(2 * COUNT, np.float16)
    held = [weakref.ref(x), weakref.ref(out)]
    x, out = (torch.from_numpy(t).view(BF16) for t in (x, out))
    work = dist.all_to_all_single(out, x, async_op=True)
    work.wait()
    del x, out, work
    deadline = time.monotonic() + 10
    while any(ref() is not None for ref in held) and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's thread lets go after it has told the caller
    return [ref() is None for ref in held]


def test_tensors_are_let_go():
    assert ranks.run(let_go, 2) == [[True, True]] * 2


def wait_everywhere(rank):
    """Each wait with calls under way that need the GIL: torch writes down the Python stack of every gloo call."""
    ranks.init("zipccl")
    for _ in range(5):
        group = dist.new_group()
        warm_up(group=group)
        begun = [all_to_all(i, group=group) for i in range(8)]
        begun[-1][0].wait(datetime.timedelta(seconds=20))
        begun += [all_to_all(i, group=group) for i in range(4)]
        begun[-1][0].get_future().wait()
        begun += [all_to_all(i, group=group) for i in range(4)]
        dist.barrier(group)
        begun += [all_to_all(i, group=group) for i in range(4)]
        zipccl._C.drain_workers(20)
        begun += [all_to_all(i, group=group) for i in range(4)]
        zipccl.explain("all_to_all", 1 << 20, group)
        begun += [all_to_all(i, group=group) for i in range(4)]
        dist.destroy_process_group(group)
        for call in begun:
            check(*call)


def test_no_wait_holds_the_gil():
    ranks.run(wait_everywhere, 2, env={"TORCH_FR_BUFFER_SIZE": "2000"})


# ---- faults ----------------------------------------------------------------------------------------------------

SAID = r"zipccl all_to_all \(rank {} of {}, group [^)]*, \d+ bytes\): ."


def killed(rank):
    ranks.init("zipccl", timeout=6)
    warm_up()
    if rank == 2:
        all_to_all(0)
        os.kill(os.getpid(), signal.SIGKILL)
    deadline, began = time.monotonic() + 20, 0.0
    with pytest.raises(zipccl.Error, match=SAID.format(rank, 3)):
        while time.monotonic() < deadline:
            began = time.monotonic()
            for call in [all_to_all(seed) for seed in range(3)]:
                check(*call)
    assert time.monotonic() - began < 10
    for async_op in (True, False):
        with pytest.raises(zipccl.Error, match="all_to_all.*an earlier call failed on this rank"):
            work = all_to_all(1, async_op=async_op)[0]
            work.wait()
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began


def test_a_rank_is_killed():
    results = ranks.run(killed, 3, killed=(2,))
    assert all(seconds < 12 for seconds in results[:2])


def late(rank):
    """A new timeout counts behind a call that has a longer one; both calls are made in the end."""
    ranks.init("zipccl", timeout=600)
    warm_up()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["gave up"], datetime.timedelta(seconds=50))
    calls = [all_to_all(1)]
    if rank == 0:
        (backend,) = zipccl.backend.zip_backends()
        backend.set_timeout(datetime.timedelta(milliseconds=300))
        calls.append(all_to_all(2))
        with pytest.raises(zipccl.Error, match=r"all_to_all \(rank 0 .*timed out behind earlier calls .* 300 ms"):
            calls[1][0].wait()
        backend.set_timeout(datetime.timedelta(seconds=600))
        store.set("gave up", "")
    else:
        calls.append(all_to_all(2))
    for call in calls:
        check(*call)
    warm_up()


def test_a_new_timeout_counts_behind_a_call_that_has_a_longer_one():
    ranks.run(late, 2)


def in_vain(rank):
    ranks.init("zipccl", timeout=2)
    warm_up()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        works = [all_to_all(seed)[0] for seed in range(3)]
        for work in works:
            with pytest.raises(zipccl.Error, match=SAID.format(0, 2)):
                work.wait()
            assert work.is_completed() and not work.is_success()
        with pytest.raises(zipccl.Error, match=SAID.format(0, 2)):
            works[0].get_future().wait()
        with pytest.raises(zipccl.Error, match="an earlier call failed on this rank"):
            all_to_all(3)[0].wait()
        store.set("gave up", "")
    store.wait(["gave up"], datetime.timedelta(seconds=50))


def test_a_rank_never_comes():
    ranks.run(in_vain, 2)


def end_among_calls(rank):
    ranks.init("zipccl")
    warm_up()
    if rank == 1:
        time.sleep(0.5)
    calls = [all_to_all(seed) for seed in range(5)]
    dist.destroy_process_group()
    for call in calls:
        check(*call)


def test_a_group_ends_when_its_calls_have():
    ranks.run(end_among_calls, 2)


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, zipccl
rank, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(path, 2)
dist.init_process_group("zipccl", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
x = torch.ones(100, dtype=torch.bfloat16)
for _ in range(3):
    dist.all_to_all_single(torch.empty_like(x), x)
if rank == 0:
    works = [dist.all_to_all_single(torch.empty_like(x), x, async_op=True) for _ in range(3)]
    began = time.monotonic()
    if how == "destroy":
        dist.destroy_process_group()
    elif how == "abort":
        zipccl.backend.zip_backends()[0].abort()
    print("end of script", time.monotonic() - began < 20, flush=True)
else:
    time.sleep(600)  # without its calls
"""


def test_a_silent_peer_does_not_hold_up_the_end(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    processes = {
        (how, rank): subprocess.Popen(
            [*command, str(rank), str(tmp_path / how), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for how in ("destroy", "abort", "leave")
        for rank in range(2)
    }
    try:
        for (how, rank), process in processes.items():
            if rank == 0:
                output, _ = process.communicate(timeout=90)
                assert process.returncode == 0 and output.strip().endswith("end of script True"), (how, output)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
