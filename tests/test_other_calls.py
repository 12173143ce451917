"""Ranks that make different calls: each gets an exception, at once where sizes are exchanged anyway, and no process
ends and nothing of one call is taken for another's."""

import datetime
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, weights

TIMEOUT = 3  # of groups, seconds
COUNT = 5000
ZIP = dict.fromkeys(zipccl.options.COLLECTIVES, "zip") | {"min_bytes": 0, "code": "dense"}


# Each makes one call and gives what arrived and what should have.


def all_gather(group, seed=0, count=COUNT, dtype=BF16):
    world = dist.get_world_size()
    out = torch.empty(world * count, dtype=dtype)
    dist.all_gather_into_tensor(out, weights(seed + dist.get_rank(), count, dtype), group=group)
    return out, torch.cat([weights(seed + r, count, dtype) for r in range(world)])


def all_gathers(group, counts):
    world = dist.get_world_size()
    outs = [torch.empty(world * count, dtype=BF16) for count in counts]
    group.allgather_into_tensor_coalesced(outs, [weights(dist.get_rank(), count) for count in counts]).wait()
    return torch.cat(outs), torch.cat([weights(r, count) for count in counts for r in range(world)])


def three_all_gathers(group):
    return all_gathers(group, [COUNT] * 3)


def integer_all_gather(group, count=COUNT, dtype=torch.int16):
    out, rank = torch.empty(dist.get_world_size() * count, dtype=dtype), dist.get_rank()
    dist.all_gather_into_tensor(out, torch.full((count,), rank, dtype=dtype), group=group)
    return out, torch.arange(dist.get_world_size(), dtype=dtype).repeat_interleave(count)


def three_integer_all_gathers(group):
    outs = [torch.empty(dist.get_world_size() * COUNT, dtype=torch.int16) for _ in range(3)]
    group.allgather_into_tensor_coalesced(outs, [torch.zeros(COUNT, dtype=torch.int16)] * 3).wait()
    return outs[0], torch.zeros_like(outs[0])


def uneven_all_gather(group):
    rank, counts = dist.get_rank(), [COUNT + r for r in range(dist.get_world_size())]
    outs = [torch.empty(n, dtype=BF16) for n in counts]
    dist.all_gather(outs, weights(rank, counts[rank]), group=group)
    return torch.cat(outs), torch.cat([weights(r, n) for r, n in enumerate(counts)])


def all_to_all(group, dtype=BF16, lists=False):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, x = torch.empty(world * COUNT, dtype=dtype), weights(rank, world * COUNT, dtype)
    if lists:
        dist.all_to_all(list(out.chunk(world)), list(x.chunk(world)), group=group)
    else:
        dist.all_to_all_single(out, x, group=group)
    return out, torch.cat([weights(r, world * COUNT, dtype).chunk(world)[rank] for r in range(world)])


def gather(group, count=COUNT):
    rank, world = dist.get_rank(), dist.get_world_size()
    outs = [torch.empty(count, dtype=BF16) for _ in range(world)] if rank == 0 else None
    dist.gather(weights(rank, count), outs, group=group)
    return torch.cat(outs or [torch.empty(0)]), torch.cat(
        [weights(r, count) for r in range(world if rank == 0 else 0)] or [torch.empty(0)]
    )


def broadcast(group, count=COUNT, dtype=BF16, root=0):
    t = weights(dist.get_rank(), count, dtype)
    dist.broadcast(t, root, group=group)
    return t, weights(root, count, dtype)


def integer_broadcast(group):
    t = torch.full((COUNT,), dist.get_rank(), dtype=torch.int16)
    dist.broadcast(t, 0, group=group)
    return t, torch.zeros_like(t)


def scatter(group, count=COUNT):
    out, world = torch.empty(count, dtype=BF16), dist.get_world_size()
    dist.scatter(out, [weights(r, count) for r in range(world)] if dist.get_rank() == 0 else None, group=group)
    return out, weights(dist.get_rank(), count)


def new_groups(count: int, **options) -> list:
    timeout = datetime.timedelta(seconds=TIMEOUT)
    return [dist.new_group(timeout=timeout, pg_options=zipccl.Options(**ZIP | options)) for _ in range(count)]


SIZES = "tensors of other sizes"
ROOTED = "tensors of another size, or another root"
# The call of rank 1, the others', and what rank 1 and the others are told.
AT_ONCE = [
    (lambda g: all_gather(g, count=COUNT - 1), all_gather, SIZES, SIZES),
    (lambda g: all_gather(g, dtype=torch.half), all_gather, "BFloat16 values, not Half", "Half values, not BFloat16"),
    (integer_all_gather, all_gather, "BFloat16 values, not Short", "Short values, not BFloat16"),  # carried as bytes
    (lambda g: integer_all_gather(g, COUNT + 1), integer_all_gather, SIZES, SIZES),
    (three_integer_all_gathers, three_all_gathers, "BFloat16 values, not Short", "Short values, not BFloat16"),
    (three_all_gathers, all_gather, SIZES, SIZES),
    (all_gather, three_all_gathers, SIZES, SIZES),
    (lambda g: all_gathers(g, [9] * 4), lambda g: all_gathers(g, [9] * 5), SIZES, SIZES),
    (lambda g: all_gathers(g, [7, 9]), lambda g: all_gathers(g, [9, 7]), SIZES, SIZES),
    (uneven_all_gather, all_gather, SIZES, SIZES),
    (all_gather, all_to_all, "all_to_all, not all_gather", "all_gather, not all_to_all"),
    (gather, all_gather, "all_gather, not gather", "gather, not all_gather"),
    (lambda g: gather(g, COUNT + 1), gather, ROOTED, ROOTED),
    (lambda g: all_to_all(g, torch.half), all_to_all, "BFloat16 values, not Half", "Half values, not BFloat16"),
    (lambda g: broadcast(g, COUNT - 1), broadcast, ROOTED, ROOTED),
    (lambda g: broadcast(g, root=1), broadcast, ROOTED, ROOTED),
    (lambda g: broadcast(g, dtype=torch.half), broadcast, "BFloat16 values, not Half", "Half values, not BFloat16"),
    (integer_broadcast, broadcast, "BFloat16 values, not Short", "Short values, not BFloat16"),
    (lambda g: scatter(g, COUNT + 1), scatter, ROOTED, ROOTED),
    (scatter, broadcast, "broadcast, not scatter", "scatter, not broadcast"),
    (broadcast, scatter, "scatter, not broadcast", "broadcast, not scatter"),
]


def told(rank, group, mine, others, told_me, told_others):
    began = time.monotonic()
    said = rf"zipccl \w+ \(rank {rank} of 3, .*: rank {0 if rank == 1 else 1} calls with "
    with pytest.raises(zipccl.Error, match=said + (told_me if rank == 1 else told_others)):
        (mine if rank == 1 else others)(group)
    assert time.monotonic() - began < TIMEOUT
    for _ in range(2):  # all have found it at the same point, so the group goes on
        found, truth = others(group)
        assert same_bits(found, truth)


def told_at_once(rank):
    ranks.init("zipccl")
    for group, case in zip(new_groups(len(AT_ONCE)), AT_ONCE, strict=True):
        told(rank, group, *case)


def test_ranks_are_told_at_once():
    ranks.run(told_at_once, 3)


def told_of_first_calls(rank):
    """By `auto`, raw or not: calls are compared where one like them was not made before."""
    ranks.init("zipccl")
    auto = dict.fromkeys(zipccl.options.COLLECTIVES, "auto")
    (group,), before = new_groups(1, **auto), set()
    for mine, others, told_me, told_others in AT_ONCE:
        if {mine, others} & before:
            (group,), before = new_groups(1, **auto), set()
        told(rank, group, mine, others, told_me, told_others)
        before |= {mine, others}


def test_ranks_are_told_of_first_calls():
    ranks.run(told_of_first_calls, 3)


def told_in_trials(rank):
    """Where calls try one design after the other, one that some ranks did not make is no turn of the others."""
    ranks.init("zipccl")
    (group,) = new_groups(1)
    for _ in range(2):  # design 2 until sizes are known, then trials
        all_to_all(group)
    told(rank, group, broadcast, all_to_all, "all_to_all, not broadcast", "broadcast, not all_to_all")


def test_ranks_go_on_in_step():
    ranks.run(told_in_trials, 3)


def told_before_measuring(rank):
    """By `auto` the second all-to-all measures the link, which nobody must begin alone."""
    ranks.init("zipccl")
    (group,) = new_groups(1, all_to_all="auto")
    all_to_all(group)
    told(rank, group, broadcast, all_to_all, "all_to_all, not broadcast", "broadcast, not all_to_all")


def test_ranks_are_told_before_they_measure():
    ranks.run(told_before_measuring, 3)


IN_TIME = [
    (lambda g: integer_all_gather(g, dtype=torch.uint8), all_gather),
    (all_gather, lambda g: integer_all_gather(g, dtype=torch.uint8)),
    (lambda g: (dist.barrier(g), torch.empty(0), torch.empty(0))[1:], broadcast),
    (lambda g: broadcast(g, 0), broadcast),
]


def outcome(call, group) -> str | None:
    """The error's text, or None for a right result."""
    try:
        found, truth = call(group)
    except RuntimeError as error:
        return str(error)
    assert same_bits(found, truth)
    return None


def told_in_time(rank):
    """All at once, each in a group and a thread of its own."""
    ranks.init("zipccl")
    began = time.monotonic()
    with ThreadPoolExecutor(len(IN_TIME)) as threads:
        calls = [case[0 if rank == 1 else 1] for case in IN_TIME]
        texts = list(threads.map(outcome, calls, new_groups(len(IN_TIME))))
    assert time.monotonic() - began < TIMEOUT + 5
    return texts


def test_calls_that_are_raw_on_some_ranks():
    """Nothing meets, and where a call is compressed it is known who did not come."""
    results = ranks.run(told_in_time, 2)
    for i, (mine, others) in enumerate(IN_TIME):
        for rank, call in enumerate((others, mine)):
            if call in (all_gather, broadcast):
                name = rf"zipccl {call.__name__} \(rank {rank} of 2, group [^)]*, {2 * COUNT} bytes\): "
                silent = rf"nothing came from rank {1 - rank}: .*\(call number 1 of the group\)"
                assert re.match(name + silent, results[rank][i]), results[rank][i]
            else:
                assert results[rank][i]


def lists_on_one_rank(rank, turns):
    ranks.init("zipccl")
    (group,) = new_groups(1, all_to_all="auto", code="auto")
    for _ in range(turns):  # trials: zipped, raw, ...
        all_to_all(group)
    return outcome(lambda g: all_to_all(g, lists=rank == 1), group)


@pytest.mark.parametrize("turns", [0, 1])
def test_lists_on_one_rank_alone(turns):
    """By `auto` the call of the others may be one raw message, which nothing announces."""
    results = ranks.run(lists_on_one_rank, 2, turns)
    assert (results[0] is None) == (results[1] is None)


def one_call_behind(rank):
    """Rank 1 passes nothing in the first of three calls, which it therefore makes alone."""
    ranks.init("zipccl")
    (group,) = new_groups(1)
    texts = []
    for turn in range(3):
        count = 0 if rank == 1 and turn == 0 else COUNT
        texts.append(outcome(lambda g: all_gather(g, 10 * turn, count), group))  # noqa: B023
    return texts


def test_no_rank_is_a_call_behind():
    """The next call of that rank must not be taken for the one it left out."""
    results = ranks.run(one_call_behind, 3)
    assert results[1][0] is None
    assert all(all(texts[rank == 1 :]) for rank, texts in enumerate(results))
    assert "number 1 of the group's calls, not 2" in results[1][1]


SMALL = 40  # values: by `auto` such calls are raw, since nothing is gained by less


def a_call_ahead(rank, small_calls):
    """Where calls are raw, rank 1 alone passes nothing in the first of three, so that its next call is one ahead."""
    ranks.init("zipccl")
    (group,) = new_groups(1, all_gather="auto", min_bytes=64)
    for turn in range(12):
        assert outcome(lambda g: all_gather(g, turn, SMALL), group) is None  # noqa: B023
    for _ in range(small_calls):
        all_gather(group, count=4)
    texts = []
    for turn in range(3):
        count = 0 if rank == 1 and turn == 0 else SMALL
        texts.append(outcome(lambda g: all_gather(g, 100 + turn, count), group))  # noqa: B023
    return texts


@pytest.mark.parametrize("small_calls", [0, 1, 4, 5])
def test_no_rank_is_a_call_ahead(small_calls):
    """gloo tells calls apart by their number, and those below min_bytes go another way."""
    results = ranks.run(a_call_ahead, 2, small_calls)
    assert results[1][0] is None
    assert all(all(texts[rank == 1 :]) for rank, texts in enumerate(results))


def other_sizes(rank):
    """Rank 1 expects one value more than the root sends, which a raw broadcast does not notice."""
    ranks.init("zipccl")
    (group,) = new_groups(1, broadcast="auto")
    for _ in range(12):
        for count in (SMALL, SMALL + 1):
            broadcast(group, count)
    for _ in range(16):
        try:
            dist.broadcast(torch.empty(SMALL + (rank == 1), dtype=BF16), 0, group=group)
            break
        except RuntimeError as error:  # where times are uneven, this call is one that is zipped to be timed: compared
            assert f"calls with {ROOTED}" in str(error)
    for turn in range(64):
        if text := outcome(lambda g: broadcast(g, SMALL), group):
            return turn, text
    return None


def test_raw_calls_are_compared_when_ranks_agree():
    results = ranks.run(other_sizes, 2)
    assert results[0][0] == results[1][0]
    for rank, (_, text) in enumerate(results):
        assert f"rank {1 - rank} has made other calls than this rank before" in text


def refused_on_one_rank(rank):
    """Arguments that gloo refuses, on one rank alone, who then passes better ones."""
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="auto", min_bytes=0))
    group = dist.group.WORLD
    for turn in range(8):
        if rank == 1:
            with pytest.raises(RuntimeError):
                dist.all_gather([torch.empty(7, dtype=BF16)] * dist.get_world_size(), weights(0, COUNT))
            with pytest.raises(RuntimeError):
                dist.all_gather_into_tensor(torch.empty(COUNT, dtype=BF16), weights(0, COUNT))
        found, truth = all_gather(group, turn)
        assert same_bits(found, truth)


def test_refused_calls_do_not_count():
    ranks.run(refused_on_one_rank, 2)


def no_group(rank, attached):
    """Rank 1 does not make the group, or does not attach to it."""
    if attached:
        ranks.init("gloo", timeout=TIMEOUT)
    if rank == 1:
        dist.FileStore(f"{os.environ['RANKS_DIRECTORY']}/told", 2).wait(["0"])
        return None
    try:
        zipccl.attach() if attached else ranks.init("zipccl", timeout=TIMEOUT)
    except RuntimeError as error:
        dist.FileStore(f"{os.environ['RANKS_DIRECTORY']}/told", 2).set("0", "")
        return str(error)


@pytest.mark.parametrize("attached", [False, True])
def test_a_rank_that_does_not_make_the_group_is_named(attached):
    text, _ = ranks.run(no_group, 2, attached)
    assert re.search(
        "attach.. waited in vain" if attached else r"rank 0 of group '0' waited 3 s in vain for ranks \[1\]", text
    )


def attach_to_destroyed(rank):
    ranks.init("gloo")
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="was destroyed"):
        zipccl.attach(group)
    zipccl.detach(group)


def test_no_attaching_to_a_group_that_was_destroyed():
    ranks.run(attach_to_destroyed, 2)
