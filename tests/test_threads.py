"""Callbacks that take their time must not cost a thread each."""

import time

import ranks
import torch
import torch.distributed as dist
import zipccl


def threads() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def check_slow_callbacks(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip"))
    shard = torch.full((500,), float(rank)).bfloat16()
    outputs = [torch.empty(1000, dtype=torch.bfloat16) for _ in range(200)]
    dist.all_gather_into_tensor(outputs[0], shard)
    before, seen = threads(), []

    def report(future):
        time.sleep(0.02)
        seen.append(threads())

    futures = [dist.all_gather_into_tensor(out, shard, async_op=True).get_future().then(report) for out in outputs]
    for future in futures:
        future.wait()
    assert all(out[0] == 0 and out[-1] == 1 for out in outputs)
    return len(seen), max(seen) - before


def test_slow_callbacks_share_a_few_threads():
    for reported, more in ranks.run(check_slow_callbacks, 2, timeout=60):
        assert reported == 200 and more <= 16
