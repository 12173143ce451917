"""What zipccl costs where it has nothing to win: small calls, which it leaves to the inner backend.

    python benchmarks/overhead.py                        2 ranks on this machine
    python benchmarks/overhead.py --transport sockets    one rank per GPU, over sockets

Two plain groups of the inner backend and one of zipccl with its default options take turns; that the plain ones differ
shows what the machine can tell apart. A time is rank 0's, of a call that is waited for; the lower quartile over the
rounds. Calls are made as users make them, by torch.distributed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import harness  # first: it makes the demo's helpers importable
import launch
import torch
import torch.distributed as dist
import zipccl

CALLS = 30  # of a batch
COLLECTIVES = ("all_gather", "all_to_all", "all_to_all with splits", "broadcast", "reduce_scatter", "all_reduce")


def make_call(name: str, nbytes: int, device: torch.device):
    """call(group, later) of that collective; each rank gives nbytes of bf16, or of fp32 in reductions."""
    world = dist.get_world_size()
    reduces = name in ("reduce_scatter", "all_reduce")
    dtype = torch.float32 if reduces else torch.bfloat16
    count = max(nbytes // dtype.itemsize // world, 1) * world
    x, same = torch.ones(count, dtype=dtype, device=device), torch.empty(count, dtype=dtype, device=device)
    whole = torch.empty(count * world, dtype=dtype, device=device)
    part, splits = torch.empty(count // world, dtype=dtype, device=device), [count // world] * world
    return {
        "all_gather": lambda group, later: dist.all_gather_into_tensor(whole, x, group, later),
        "all_to_all": lambda group, later: dist.all_to_all_single(same, x, None, None, group, later),
        "all_to_all with splits": lambda group, later: dist.all_to_all_single(same, x, splits, splits, group, later),
        "broadcast": lambda group, later: dist.broadcast(x, 0, group, later),
        "reduce_scatter": lambda group, later: dist.reduce_scatter_tensor(part, x, dist.ReduceOp.SUM, group, later),
        "all_reduce": lambda group, later: dist.all_reduce(x, dist.ReduceOp.SUM, group, later),
    }[name]


def measure(call, groups: dict[str, dist.ProcessGroup], async_op: bool, rounds: int, device: torch.device) -> dict:
    times: dict[str, list[float]] = {name: [] for name in groups}
    order = list(groups)
    for turn in range(rounds + 2):  # the first two build connections
        order.append(order.pop(0))
        for name in order:
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                work = call(groups[name], async_op)
                if async_op:
                    work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) / CALLS)
    return {f"{name}_us": 1e6 * statistics.quantiles(t, n=4)[0] for name, t in times.items()}


def rank_work(args: argparse.Namespace, sizes: list[int]) -> None:
    device = harness.rank_device(args)
    dist.init_process_group("gloo")
    inner = launch.inner_name(args.device)
    groups = {name: dist.new_group(backend=inner) for name in ("inner", "again")}
    groups["zipccl"] = dist.new_group(backend="zipccl")
    for name in COLLECTIVES:
        for nbytes in sizes:
            for async_op in (False, True):
                row = measure(make_call(name, nbytes, device), groups, async_op, args.rounds, device)
                best = min(row["inner_us"], row["again_us"])
                row |= {"collective": name, "bytes": nbytes, "async": "async" if async_op else "sync"}
                launch.tell(row | {"more_us": row["zipccl_us"] - best, "more": row["zipccl_us"] / best - 1})
    dist.barrier()
    dist.destroy_process_group()


COLUMNS = [
    ("bytes", "size", "size"),
    ("async", "call", "s"),
    ("inner_us", "inner us", ".1f"),
    ("again_us", "again us", ".1f"),
    ("zipccl_us", "zipccl us", ".1f"),
    ("more_us", "more us", "+.1f"),
    ("more", "more", "+.1%"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_rank_arguments(parser)
    harness.add_size_arguments(parser, "64", "256K")
    parser.add_argument("--rounds", type=launch.positive, default=40)
    args = parser.parse_args()
    sizes = harness.sweep(args, parser)
    if args.rounds < 2:
        parser.error("--rounds: must be at least 2")
    if args.worker:
        launch.rank_main(lambda: rank_work(args, sizes))
    tables = harness.Tables(COLUMNS)
    facts = harness.run_on_ranks(
        args, parser, ["rounds", "min_bytes", "max_bytes", "factor"], tables.add,
        lambda cluster: f"zipccl {zipccl.__version__}, {cluster.world} ranks, {args.device}",
    )  # fmt: skip
    harness.write_json(args.json, facts | {"what": "overhead", "collectives": tables.rows()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
