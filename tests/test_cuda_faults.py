"""Faults of CUDA collectives over NCCL: ranks that die, never come or disagree, frames that are damaged on their way.

The calls are those of test_faults.py. NCCL's watchdog would end a process whose collective is stuck, as it does
without zipccl; here it is told to leave that be, so that what zipccl itself says is seen. Every call has a group of
its own and all of them are made at once, each on a thread and a stream of its own.
"""

import concurrent.futures
import datetime
import functools
import os
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from test_faults import (
    CASES,
    COUNT,
    OVERRIDES,
    ZIP,
    broadcast,
    check_reduce_ops,
    check_report,
    exchange_damaged,
    op_name,
    scatter,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(zipccl._C.cuda_version is None, reason="needs a build with CUDA"),
]

TIMEOUT = 5  # of groups, seconds
WALL = 100  # of a whole test
ENV = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # more streams than that share queues, and one that is stuck blocks others
}
# Sizes travel over gloo where that is measured to be faster, and over NCCL where there is nothing else.
SIZES_BY = pytest.mark.parametrize("inner", [None, "cuda:nccl"], ids=["sizes by the faster", "sizes by NCCL"])


@functools.cache
def stream_of(group, where, again: bool) -> torch.cuda.Stream:
    """The group's own stream, as what waits for its calls may wait for ever. `again`: for calls after such a one.

    With memory for later calls: more of it may have to wait for a GPU that waits for others.
    """
    stream = torch.cuda.Stream(where, priority=-1)
    with torch.cuda.stream(stream):
        _blocks = [torch.empty(1 << 20, dtype=torch.uint8, device=where) for _ in range(16)]
    return stream


def start(inner=None, cases=CASES) -> tuple[torch.device, list[tuple]]:
    """This rank's device, and a group that has made its first call for each case."""
    where = ranks.device("cuda")
    sizes = (64, COUNT * 2, COUNT * 8) * 32
    _pinned = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]  # as for streams
    ranks.init("zipccl", timeout=60, pg_options=zipccl.Options(**ZIP, inner=inner))
    groups = []
    for call, design in cases:
        options = zipccl.Options(**ZIP, inner=inner, all_to_all_design=design, checksum=True)
        group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT), pg_options=options)
        assert not any(outcome(call, group, where, again=again)[0] for again in (False, True))
        groups.append((call, group))
    assert not any(text for text, _ in at_once(lambda call, group: outcome(call, group, where), groups))
    torch.cuda.synchronize()
    return where, groups


def outcome(call, group, where, count=COUNT, again=False) -> tuple[str | None, float]:
    """The error's text (None: a right result, or one that never comes) and the seconds until the call was over.

    A wrong result is an AssertionError.
    """
    with torch.cuda.device(where), torch.cuda.stream(stream_of(group, where, again)):
        began = time.monotonic()
        try:
            _, pairs = call(count, group, device=where)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
        seconds = time.monotonic() - began
        # To pinned memory, and nothing else that waits: the driver would make all threads wait with it.
        copies = [(torch.empty_like(truth).pin_memory().copy_(t, non_blocking=True), truth) for t, truth in pairs()]
        arrived = torch.cuda.Event()
        arrived.record()
        while not arrived.query() and time.monotonic() - began < 2 * TIMEOUT:
            time.sleep(0.001)
        if arrived.query():
            assert all(same_bits(found, truth) for found, truth in copies), f"{call.__name__}: wrong result"
        return None, seconds


def at_once(work, groups) -> list:
    """work(call, group) for all groups, on threads."""
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        return [future.result() for future in [pool.submit(work, *pair) for pair in groups]]


def check_outcomes(results, all_notice: bool, cases=CASES) -> None:
    """results: of each rank (None: it is gone) for each case a text, or None, and seconds."""
    survivors = [rank for rank, outcomes in enumerate(results) if outcomes]
    for case, (call, design) in enumerate(cases):
        told = [rank for rank in survivors if results[rank][case][0]]
        for rank in told:
            check_report(results[rank][case][0], call, rank, len(results))
        assert all(results[rank][case][1] < 3 * TIMEOUT for rank in survivors), (call, design, results)
        # A root that sends need not notice who does not receive, nor one receiver another.
        everybody = all_notice and call not in (broadcast, scatter)
        assert told == survivors if everybody else told or all_notice, f"{call.__name__}, {design}: told were {told}"


# ---- a rank is killed ------------------------------------------------------------------------------------------


def survive(rank, inner, cases):
    where, groups = start(inner, cases)

    def call_on(call, group):
        ends = time.monotonic() + 2 * TIMEOUT
        text, longest = None, 0.0
        while text is None and time.monotonic() < ends:  # calls work until the rank dies
            text, seconds = outcome(call, group, where)
            longest = max(longest, seconds)
        if text is not None:  # the group is done for: at once, or at least in time
            later, seconds = outcome(call, group, where, again=True)
            assert later is not None, f"{call.__name__} works again"
            longest = max(longest, seconds)
        return text, longest

    if rank == 2:
        with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
            calls = [pool.submit(call_on, *pair) for pair in groups]
            time.sleep(1)
            assert not any(call.done() for call in calls)
            os.kill(os.getpid(), signal.SIGKILL)
    return at_once(call_on, groups)


@SIZES_BY
@pytest.mark.parametrize("cases", [CASES[:5], CASES[5:]], ids=["some", "others"])  # few streams: see ENV
def test_a_rank_is_killed(inner, cases):
    results = ranks.run(survive, 3, inner, cases, timeout=WALL, env=ENV, killed=(2,))
    check_outcomes(results, all_notice=True, cases=cases)


# ---- a rank never comes ----------------------------------------------------------------------------------------


def wait_in_vain(rank, inner):
    where, groups = start(inner)
    store = dist.distributed_c10d._get_default_store()
    outcomes = None
    if rank != 1:
        outcomes = at_once(lambda call, group: outcome(call, group, where), groups)
        store.set(f"gave up {rank}", "")
    store.wait([f"gave up {r}" for r in (0, 2)])
    return outcomes


@SIZES_BY
def test_a_rank_never_comes(inner):
    check_outcomes(ranks.run(wait_in_vain, 3, inner, timeout=WALL, env=ENV), all_notice=True)


# ---- ranks disagree --------------------------------------------------------------------------------------------


def disagree(rank, other_count):
    where, groups = start()
    count = other_count if rank == 1 else COUNT
    return at_once(lambda call, group: outcome(call, group, where, count), groups)


@pytest.mark.parametrize("other", [COUNT - 1000, 3 * COUNT], ids=["fewer", "more"])
def test_shapes_differ(other):
    check_outcomes(ranks.run(disagree, 3, other, timeout=WALL, env=ENV), all_notice=False)


def check_override(rank):
    """Rank 1 alone goes another way."""
    where, groups = start()
    group_of = {call: group for call, group in groups}

    def go(call, change):
        with zipccl.override(group_of[call], **(change if rank == 1 else {})):
            return outcome(call, group_of[call], where)[0]

    raw = [(call, change) for call, change in OVERRIDES if "raw" in change.values()]
    if rank == 1:  # what is raw on one rank alone waits for ever on the GPU, so it is not looked at
        for call, change in raw:
            with zipccl.override(group_of[call], **change):
                call(COUNT, group_of[call], async_op=True, device=where)
        time.sleep(2 * TIMEOUT)
        return [None] * len(raw)
    return at_once(go, raw)


def test_reduce_ops_differ():
    ranks.run(check_reduce_ops, 3, "cuda", timeout=WALL, env=ENV)


def test_options_differ_in_a_call():
    results = ranks.run(check_override, 3, timeout=WALL, env=ENV)
    for case, (call, _) in enumerate([o for o in OVERRIDES if "raw" in o[1].values()]):
        texts = [outcomes[case] for outcomes in (results[0], results[2]) if outcomes[case]]
        assert texts, f"nobody noticed: {call.__name__}"
        assert all(f"zipccl {op_name(call)} (rank" in text for text in texts)


# ---- a frame is damaged on its way -----------------------------------------------------------------------------


_kept = []


def check_damage(rank):
    ranks.device("cuda")
    store = dist.FileStore(f"{os.environ['RANKS_DIRECTORY']}/damage", 2)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=60)
    nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, 2, options)
    _kept.append(nccl)  # its end would cut off what the peer has yet to receive
    exchange_damaged(rank, nccl, lambda o: zipccl._C.ZipBackend(rank, 2, None, None, nccl, o), "cuda")


def test_a_frame_is_damaged_on_its_way():
    ranks.run(check_damage, 2, timeout=WALL, env=ENV)
