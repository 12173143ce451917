"""What people see of compressed calls who look at a program from outside: profiler events and sequence numbers."""

import ranks
import torch
import torch.distributed as dist
import zipccl
from torch.profiler import ProfilerActivity

ALL = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce")


def every_collective(rank: int, async_op: bool) -> None:
    n = dist.get_world_size()
    one, all_of_them = torch.ones(8, 4, dtype=torch.bfloat16), torch.ones(8 * n, 4, dtype=torch.bfloat16)
    parts = list(all_of_them.chunk(n))
    works = [
        dist.all_gather_into_tensor(all_of_them, one, async_op=async_op),
        dist.all_to_all_single(torch.empty_like(all_of_them), all_of_them.clone(), async_op=async_op),
        dist.broadcast(one.clone(), 0, async_op=async_op),
        dist.scatter(one.clone(), parts if rank == 0 else None, async_op=async_op),
        dist.gather(one, [torch.empty_like(one) for _ in range(n)] if rank == 0 else None, async_op=async_op),
        dist.reduce_scatter_tensor(one.clone(), all_of_them.clone(), async_op=async_op),
        dist.all_reduce(one.clone(), async_op=async_op),
    ]
    for work in works:
        if work is not None:
            work.wait()


def profile(rank, mode, async_op):
    """Events as (name, asynchronous, count) and their input shapes."""
    options = zipccl.Options(**dict.fromkeys(ALL, mode), min_bytes=0)
    ranks.init("zipccl", pg_options=options)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        every_collective(rank, async_op)
    events = [e for e in profiler.events() if e.name.startswith(("zipccl", "gloo"))]
    return [(e.name, e.is_async, e.input_shapes) for e in events]


def test_a_compressed_call_is_one_event_with_its_name_and_shapes():
    for async_op in (False, True):
        for rank, events in enumerate(ranks.run(profile, 2, "zip", async_op)):
            ours = {name: (is_async, shapes) for name, is_async, shapes in events if name.startswith("zipccl")}
            assert sum(name.startswith("zipccl") for name, _, _ in events) == len(ours) == len(ALL)
            assert all(is_async for is_async, _ in ours.values())
            one, both = [[8, 4]], [[16, 4]]
            assert {name: shapes for name, (_, shapes) in ours.items()} == {
                "zipccl:all_gather": one,
                "zipccl:all_to_all": both,
                "zipccl:broadcast": one,
                "zipccl:scatter": one * 2 if rank == 0 else [],
                "zipccl:gather": one,
                "zipccl:reduce_scatter": both,
                "zipccl:all_reduce": one,
            }


def test_a_raw_call_is_the_inner_backends_event():
    for events in ranks.run(profile, 2, "raw", False):
        names = [name for name, _, _ in events]
        assert len(names) >= len(ALL) - 2 and not any(name.startswith("zipccl") for name in names)


def count_calls(rank, backend):
    ranks.init(backend)
    inner = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    begin = inner._get_sequence_number_for_group()
    counts = []
    for async_op in (False, True, False):
        every_collective(rank, async_op)
        counts.append(inner._get_sequence_number_for_group() - begin)
    return counts


def test_sequence_numbers_count_compressed_calls_too():
    gloo = ranks.run(count_calls, 2, "gloo")
    zipped = {f"ZIPCCL_{name.upper()}": "zip" for name in ALL} | {"ZIPCCL_MIN_BYTES": "0"}
    assert gloo[0][0] > 0
    assert ranks.run(count_calls, 2, "zipccl", env=zipped) == gloo
    assert ranks.run(count_calls, 2, "zipccl") == gloo
