"""How long collectives take raw and zipped, side by side in the same processes.

    python benchmarks/collectives.py                                     2 ranks on this machine
    python benchmarks/collectives.py --link 1gbit                        over a link of that rate (root, iproute2)
    python benchmarks/collectives.py --ranks 4 --ranks-per-gpu 4         4 ranks on one GPU, over sockets
    python benchmarks/collectives.py --transport sockets                 one rank per GPU, over sockets
    torchrun --nproc-per-node 8 benchmarks/collectives.py                one rank per GPU, over what NCCL finds

Three groups of the same ranks take turns: raw (plain gloo or NCCL), zip (zipccl, every call compressed) and auto
(zipccl's defaults). A time is the slowest rank's, median over the rounds. Before every timed batch the output is
overwritten; after it every value is compared, as integers, with what the collective must give: `mismatches` counts
those that differ, over all ranks and all groups (of reductions: those that are zipped).

raw/zip, raw/auto  how many times faster than raw
busbw              bytes that must cross into a rank per second, as nccl-tests defines it, counted raw
wire/raw           bytes zipccl received over bytes it would have received raw
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta

import harness  # first: it makes the demo's helpers importable
import launch
import torch
import torch.distributed as dist
import zipccl
from all_gather import AllGather
from all_to_all import AllToAll, AllToAllSkewed1, AllToAllSkewed2
from broadcast import Broadcast
from reductions import AllReduce, ReduceScatter

COLLECTIVES = {
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "all_to_all_skewed_1": AllToAllSkewed1,
    "all_to_all_skewed_2": AllToAllSkewed2,
    "broadcast": Broadcast,
    "reduce_scatter": ReduceScatter,
    "all_reduce": AllReduce,
}

ROUND_SECONDS = 0.005  # small calls are repeated back to back until a batch lasts about this long
SIZE_SECONDS = 3.0  # about how long one size is measured
TIMEOUT = timedelta(seconds=120)


# ---- A rank ---------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = harness.rank_device(args)
        dist.init_process_group("gloo", timeout=TIMEOUT)  # for what the benchmark itself must agree on
        self.raw = dist.new_group(backend=launch.inner_name(args.device), timeout=TIMEOUT)

    def group(self, collective: type[harness.Collective], mode: str, min_bytes: int | None) -> dist.ProcessGroup:
        options = zipccl.Options(**{collective.name: mode}, min_bytes=min_bytes, **collective.zip_options)
        return dist.new_group(backend="zipccl", pg_options=options, timeout=TIMEOUT)

    def slowest(self, seconds: float) -> float:
        t = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.item()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def batch(self, collective: harness.Collective, group: dist.ProcessGroup, calls: int) -> float:
        """Seconds per call on the slowest rank, of `calls` calls that all ranks start together."""
        collective.output.view(torch.int16).fill_(0x5A5A)
        self.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            collective.run(group)
        self.synchronize()
        return self.slowest((time.perf_counter() - start) / calls)

    def measure(self, collective: harness.Collective, groups: dict[str, dist.ProcessGroup]) -> dict:
        expected = collective.expected().to(self.device)
        # "auto" first tries what it may choose from; its trial is over before anything counts.
        warm_up = {"raw": 2, "zip": 2, "auto": zipccl._C.trial_calls}
        first = max(min(self.batch(collective, g, 1) for _ in range(warm_up[name])) for name, g in groups.items())
        calls = max(1, min(50, int(ROUND_SECONDS / first)))
        rounds = max(5, min(40, int(SIZE_SECONDS / (first * calls * len(groups)))))
        for name in ("zip", "auto"):
            zipccl.stats(groups[name]).reset()
        times: dict[str, list[float]] = {name: [] for name in groups}
        wrong = 0
        order = list(groups)
        for _ in range(rounds):
            order.append(order.pop(0))  # each comes after each other one
            for name in order:
                times[name].append(self.batch(collective, groups[name], calls))
                if name in collective.exact:
                    wrong += harness.mismatches(collective.output, expected)
        wrong_everywhere = torch.tensor([wrong])
        dist.all_reduce(wrong_everywhere)

        seconds = {name: statistics.median(t) for name, t in times.items()}
        moved = {name: zipccl.stats(groups[name]).get(collective.name, {}) for name in ("zip", "auto")}
        # Of all ranks: the root of a broadcast receives nothing.
        received = torch.tensor([moved["zip"]["wire_bytes"], moved["zip"]["raw_bytes"]])
        dist.all_reduce(received)
        bus = collective.bus_bytes()
        return {
            "bytes": collective.nbytes,
            "calls": calls * rounds,
            **{f"{name}_ms": 1e3 * t for name, t in seconds.items()},
            "speedup_zip": seconds["raw"] / seconds["zip"],
            "speedup_auto": seconds["raw"] / seconds["auto"],
            "busbw_raw": bus / seconds["raw"] / 1e9,
            "busbw_zip": bus / seconds["zip"] / 1e9,
            "wire_over_raw": received[0].item() / received[1].item(),
            "auto": "zip" if 2 * moved["auto"]["zipped_calls"] > moved["auto"]["calls"] else "raw",
            "mismatches": int(wrong_everywhere.item()),
        }


def rank_work(args: argparse.Namespace, sizes: list[int]) -> None:
    bench = Bench(args)
    values = harness.Values(args.tensor)
    for name in args.collectives:
        zipped = bench.group(COLLECTIVES[name], "zip", 0)
        for nbytes in sizes:
            groups = {"raw": bench.raw, "zip": zipped}
            groups["auto"] = bench.group(COLLECTIVES[name], "auto", None)  # has seen no other size
            collective = COLLECTIVES[name](nbytes, values, bench.rank, bench.world, bench.device)
            launch.tell({"collective": name} | bench.measure(collective, groups))
            dist.destroy_process_group(groups["auto"])
        dist.destroy_process_group(zipped)
    dist.barrier()
    dist.destroy_process_group()


# ---- The parent -----------------------------------------------------------------------------------------------

COLUMNS = [
    ("bytes", "size", "size"),
    ("raw_ms", "raw ms", ".3f"),
    ("zip_ms", "zip ms", ".3f"),
    ("auto_ms", "auto ms", ".3f"),
    ("speedup_zip", "raw/zip", ".2f"),
    ("speedup_auto", "raw/auto", ".2f"),
    ("busbw_raw", "busbw raw GB/s", ".3f"),
    ("busbw_zip", "busbw zip GB/s", ".3f"),
    ("wire_over_raw", "wire/raw", ".3f"),
    ("auto", "auto is", "s"),
    ("mismatches", "mismatches", "d"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_rank_arguments(parser)
    harness.add_size_arguments(parser, "64K", "64M")
    harness.add_data_argument(parser)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    args = parser.parse_args()
    sizes = harness.sweep(args, parser)
    if args.worker:
        launch.rank_main(lambda: rank_work(args, sizes))
    values = args.tensor.name if args.tensor else "synthetic"

    def introduction(cluster: launch.Cluster) -> str:
        over = ", over sockets" if args.transport == "sockets" else ""
        over = f", joined by a {args.link} link" if args.link else over
        return f"zipccl {zipccl.__version__}, {cluster.world} ranks, {args.device}{over}; values: {values}"

    tables = harness.Tables(COLUMNS, lambda name: f"{name}, size: bytes {COLLECTIVES[name].size_is}")
    passed_on = ["collectives", "min_bytes", "max_bytes", "factor", "tensor"]
    facts = harness.run_on_ranks(args, parser, passed_on, tables.add, introduction)
    harness.write_json(args.json, facts | {"what": "collectives", "values": values, "collectives": tables.rows()})
    wrong = sum(row["mismatches"] for rows in tables.rows().values() for row in rows)
    if wrong:
        print(f"{wrong} values were not what the collective must give", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
