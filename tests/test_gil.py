"""Worker threads take the GIL: torch's flight recorder writes down the Python stack of every gloo call. So whoever
waits for them must have let it go: every wait is made here while calls are on their way."""

import datetime
import json
import threading

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import weights

RECORDING = {"TORCH_FR_BUFFER_SIZE": "2000"}
COUNT = 100_000
WORLD = 3  # two ranks exchange frames by sends, which are not recorded


def begin(group, rank: int, calls: int = 8):
    """Calls on the worker, unfinished as a rule when this returns."""
    begun = []
    for call in range(calls):
        out = torch.empty(WORLD * COUNT, dtype=torch.bfloat16)
        work = dist.all_gather_into_tensor(out, weights(10 * call + rank, COUNT), group=group, async_op=True)
        begun.append((work, out, call))
    return begun


def check(begun) -> None:
    for work, out, call in begun:
        work.wait()
        assert same_bits(out, torch.cat([weights(10 * call + r, COUNT) for r in range(WORLD)]))


def wait_everywhere(rank):
    options = zipccl.Options(**dict.fromkeys(zipccl.options.COLLECTIVES, "zip"), min_bytes=0)
    ranks.init("zipccl", pg_options=options)
    for _ in range(3):
        group = dist.new_group(pg_options=options)
        world = dist.group.WORLD
        (backend,) = zipccl.backend.zip_backends(group)

        for work, _, _ in begin(group, rank):
            work.get_future().wait()
        begun = begin(group, rank)
        begun[-1][0].wait(datetime.timedelta(seconds=20))
        check(begun)
        begun = begin(group, rank)  # a call that is waited for, behind others
        dist.broadcast(torch.zeros(COUNT, dtype=torch.bfloat16), 0, group=group)
        check(begun)
        begun = begin(group, rank)
        dist.barrier(group=group)
        check(begun)
        begun = begin(group, rank)
        zipccl.explain("all_gather", 1 << 20, group)
        zipccl.stats(group).reset()
        check(begun)
        begun = begin(group, rank) + begin(world, rank)
        made = dist.new_group(pg_options=options)  # while others work
        check(begun)
        dist.destroy_process_group(made)
        begun = begin(group, rank)
        zipccl._C.drain_workers(20)
        check(begun)
        begin(group, rank)
        zipccl._C.drain_workers(20)
        backend.shutdown()
        del backend
        dist.destroy_process_group(group)
    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    here = str(threading.get_ident())
    dist.destroy_process_group()
    return sum(entry["thread_id"] != here for entry in trace["entries"])


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch has none for gloo"
)
def test_no_wait_holds_the_gil():
    for by_others in ranks.run(wait_everywhere, WORLD, timeout=100, env=RECORDING):
        assert by_others > 100  # or no worker has needed it
