"""How long a gradient bucket takes to be summed: DynamiQ, the baselines, and the inner backend in fp32 and bf16.

    python benchmarks/dynamiq_speed.py --link 1gbit                    2 ranks over a link of that rate (root, iproute2)
    python benchmarks/dynamiq_speed.py --ranks 4 --ranks-per-gpu 4     4 ranks on one GPU, over sockets
    python benchmarks/dynamiq_speed.py --ranks 4 --transport sockets   one rank per GPU, over sockets

The ways take turns in the same processes. A time is the slowest rank's, median over the rounds. vNMSE is the error of
the sum against the exact one; that every rank ends with the same bits is checked.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import harness  # first: it makes the demo's helpers importable
import launch
import torch
import torch.distributed as dist
import zipccl
from baselines import CODECS, BaselineState, all_reduce

TIMEOUT = timedelta(seconds=120)


def ways(world: int) -> dict[str, tuple[float, Callable[[torch.Tensor], torch.Tensor]]]:
    """Name -> (bits per coordinate, sum in place)."""

    def inner(dtype: torch.dtype) -> Callable:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = x.to(dtype)
            dist.all_reduce(y)
            return x.copy_(y)

        return run

    def dynamiq(**options) -> tuple[float, Callable]:
        state = zipccl.DynamiQState(**options)
        return state.bits, lambda x: zipccl.dynamiq.all_reduce(x, state)

    def baseline(name: str, topology: str) -> tuple[float, Callable]:
        state = BaselineState(CODECS[name], topology)
        return state.codec.bits, lambda x: all_reduce(x, state)

    found = {"bf16": (16, inner(torch.bfloat16)), "fp32": (32, inner(torch.float32))}
    for bits in (5.0, 4.0, 3.0):
        found[f"dynamiq {bits:g} bits direct"] = dynamiq(bits=bits, topology="direct")
    found["dynamiq 5 bits auto"] = dynamiq(bits=5.0)
    found["dynamiq 5 bits butterfly"] = dynamiq(bits=5.0, topology="butterfly")
    found["dynamiq 5 bits ring"] = dynamiq(bits=5.0, topology="ring")
    found["dynamiq 5 bits paper ring"] = dynamiq(bits=5.0, topology="ring", widths="paper")
    if world % 2 == 0 and world > 2:
        found["dynamiq 5 bits, nodes of 2"] = dynamiq(bits=5.0, topology="hierarchical", node_size=2)
    found["fp8 direct"] = baseline("fp8", "direct")
    found["int4 direct"] = baseline("int4", "direct")
    found["mxfp8 ring"] = baseline("mxfp8", "ring")
    return found


def rank_work(args: argparse.Namespace, sizes: list[int]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = harness.rank_device(args)
    dist.init_process_group(launch.inner_name(args.device), timeout=TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    values = harness.Values(args.tensor)
    methods = {name: way for name, way in ways(world).items() if not args.methods or name in args.methods}

    def slowest(run: Callable, x: torch.Tensor) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=control)
        start = time.perf_counter()
        run(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        t = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(t, dist.ReduceOp.MAX, group=control)
        return t.item()

    for nbytes in sizes:
        count = nbytes // 4
        rows = [values.take(count, r).float().to(device) for r in range(world)]
        exact = torch.stack([r.double() for r in rows]).sum(0)
        errors, alike, times = {}, {}, {name: [] for name in methods}
        for name, (_, run) in methods.items():
            x = rows[rank].clone()
            times[name].append(slowest(run, x))  # also the warm-up: dropped below
            errors[name] = float((x.double() - exact).square().sum() / exact.square().sum())
            digests: list = [None] * world
            dist.all_gather_object(digests, hashlib.sha1(x.cpu().numpy().tobytes()).hexdigest(), group=control)
            alike[name] = len(set(digests)) == 1
        rounds = max(3, min(20, int(args.seconds / sum(t[0] for t in times.values()))))
        work = torch.empty_like(rows[rank])
        for name in methods:
            times[name].clear()
        for _ in range(rounds):
            for name, (_, run) in methods.items():
                work.copy_(rows[rank])
                times[name].append(slowest(run, work))
        base = statistics.median(times["bf16"]) if "bf16" in times else None
        for name, (bits, _) in methods.items():
            ms = statistics.median(times[name])
            launch.tell({"bytes": nbytes, "method": name, "bits": bits, "ms": 1e3 * ms, "runs": rounds,
                         "bf16_over": base / ms if base else None, "vnmse": errors[name],
                         "ranks_alike": alike[name]})  # fmt: skip
    dist.barrier(group=control)
    dist.destroy_process_group()


COLUMNS = [
    ("bytes", "fp32 size", "size"),
    ("method", "method", ">26s"),
    ("bits", "bits", ".2f"),
    ("ms", "ms", ".2f"),
    ("bf16_over", "bf16/this", ".2f"),
    ("vnmse", "vNMSE", ".2e"),
    ("ranks_alike", "ranks alike", "d"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_rank_arguments(parser)
    harness.add_size_arguments(parser, "1M", "100M")
    parser.set_defaults(factor=10)
    harness.add_data_argument(parser)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--seconds", type=float, default=12, help="about how long one size is measured (default 12)")
    args = parser.parse_args()
    sizes = harness.sweep(args, parser)
    if args.worker:
        launch.rank_main(lambda: rank_work(args, sizes))
    known = ways(int(os.environ.get("WORLD_SIZE", args.ranks)))  # torchrun has its own number of ranks
    for name in args.methods or []:
        if name not in known:
            parser.error(f"--methods: {name!r} is none of {list(known)}")
    table = harness.Table(COLUMNS)
    passed_on = ["seconds", "min_bytes", "max_bytes", "factor", "tensor", "methods"]
    facts = harness.run_on_ranks(args, parser, passed_on, table.add)
    values = args.tensor.name if args.tensor else "synthetic"
    harness.write_json(args.json, facts | {"what": "dynamiq_speed", "values": values, "rows": table.rows})
    differ = [row["method"] for row in table.rows if not row["ranks_alike"]]
    if differ:
        print(f"ranks ended with different values: {differ}", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
