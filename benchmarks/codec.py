"""How fast tensors become frames and come back, beside a copy of the same bytes in the same run.

    python benchmarks/codec.py                              64 KiB to 1 GiB on the CPU, or on the GPU if there is one
    python benchmarks/codec.py --tensor weights_bf16.bin    real values instead of synthetic ones

bits        size of the frame, header and tables included, in bits per value (raw: 16)
copy        bytes that copy_ reads plus bytes it writes, per second
encode      bytes of raw tensor encoded per second; likewise decode
share       of the rate that memory allows: encoding R raw bytes into W frame bytes must read R and write W, decoding
            the reverse, so at the copy's rate c the limit is c / (1 + W / R) raw bytes per second, and
            share = rate / limit
mismatches  values whose bits differ after encode and decode, counted at every size

The three are timed in turns. On the CPU one thread runs; where the packages lz4 or zstandard are installed they are
timed too, on the same bytes (through their Python packages, which allocate what they return). On CUDA each timing is
one CUDA graph of several calls between two events, so that launch overhead does not count (--timing stream: calls on a
stream, launch overhead included); up to the size of its L2 cache all three, the copy too, find their data there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import harness  # first: it makes the demo's helpers importable
import machine
import torch
import zipccl
from zipccl import _C

RIVAL_MAX_BYTES = 64 << 20  # rivals are slow; beyond this their rates do not change
ROUNDS = 7


class CpuTimer:
    def __init__(self, call: Callable[[], object], nbytes: int):
        call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        self.call, self.calls = call, max(1, min(200, int(0.005 / max(once, 1e-7))))

    def seconds(self) -> float:
        start = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        return (time.perf_counter() - start) / self.calls


class CudaTimer:
    """Of `calls` calls, captured in one graph or put on the current stream one by one."""

    def __init__(self, call: Callable[[], object], nbytes: int, graph: bool):
        self.calls = max(1, min(64, (256 << 20) // nbytes))
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run() -> None:
            for _ in range(self.calls):
                call()

        call()
        torch.cuda.synchronize()
        self.run = run
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
            self.run = captured.replay
        self.run()

    def seconds(self) -> float:
        self.start.record()
        self.run()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) * 1e-3 / self.calls


def medians(timers: dict[str, CpuTimer | CudaTimer]) -> dict[str, float]:
    """Of ROUNDS rounds in which every timer has its turn, so that a slow moment hits them all."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name].append(timer.seconds())
    return {name: statistics.median(t) for name, t in times.items()}


def measure(values: torch.Tensor, args: argparse.Namespace) -> dict:
    form = {"code": args.code, "layout": args.layout, "checksum": args.checksum}
    nbytes = values.nbytes
    room = torch.empty(_C.frame_bound(values, **form), dtype=torch.uint8, device=values.device)
    size = torch.zeros(1, dtype=torch.int64, device=values.device)
    out = torch.full_like(values, float("nan"))
    _C.encode_into(values, room, size, **form)
    frame = room[: size.item()]
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: _C.encode_into(values, room, size, **form),
        "decode": lambda: _C.decode_into(frame, out),
    }
    copied = torch.empty_like(values)
    calls["copy"] = lambda: copied.copy_(values)
    if values.is_cuda:
        seconds = medians({name: CudaTimer(call, nbytes, args.timing == "graph") for name, call in calls.items()})
    else:
        seconds = medians({name: CpuTimer(call, nbytes) for name, call in calls.items()})
    copy_rate = 2 * nbytes / seconds["copy"]
    limit = copy_rate / (1 + len(frame) / nbytes)
    rates = {name: nbytes / seconds[name] for name in ("encode", "decode")}
    return {
        "bytes": nbytes,
        "frame_bytes": len(frame),
        "bits": 16 * len(frame) / nbytes,
        "copy_gbps": copy_rate / 1e9,
        "encode_gbps": rates["encode"] / 1e9,
        "encode_share": rates["encode"] / limit,
        "decode_gbps": rates["decode"] / 1e9,
        "decode_share": rates["decode"] / limit,
        "mismatches": harness.mismatches(values, out),
    }


COLUMNS = [
    ("bytes", "raw size", "size"),
    ("bits", "bits", ".3f"),
    ("copy_gbps", "copy GB/s", ".2f"),
    ("encode_gbps", "encode GB/s", ".2f"),
    ("encode_share", "share", ".0%"),
    ("decode_gbps", "decode GB/s", ".2f"),
    ("decode_share", "share", ".0%"),
    ("mismatches", "mismatches", "d"),
]


# ---- Rivals on the CPU ----------------------------------------------------------------------------------------


def rivals() -> dict[str, tuple[Callable, Callable]]:
    """Name to (compress, decompress) of the general compressors installed here."""
    found: dict[str, tuple[Callable, Callable]] = {}
    try:
        import lz4.block

        found["lz4"] = (lz4.block.compress, lz4.block.decompress)
    except ImportError:
        pass
    try:
        import zstandard

        found["zstd -1"] = (zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress)
    except ImportError:
        pass
    return found


def measure_rival(name: str, functions: tuple[Callable, Callable], values: torch.Tensor, ours: dict) -> dict:
    compress, decompress = functions
    data = values.view(torch.uint8).numpy().tobytes()
    packed = compress(data)
    seconds = medians(
        {
            "encode": CpuTimer(lambda: compress(data), len(data)),
            "decode": CpuTimer(lambda: decompress(packed), len(data)),
        }
    )
    rates = {way: len(data) / t / 1e9 for way, t in seconds.items()}
    return {
        "rival": name,
        "bytes": len(data),
        "bits": 16 * len(packed) / len(data),
        "encode_gbps": rates["encode"],
        "encode_ratio": ours["encode_gbps"] / rates["encode"],
        "decode_gbps": rates["decode"],
        "decode_ratio": ours["decode_gbps"] / rates["decode"],
    }


RIVAL_COLUMNS = [
    ("bytes", "raw size", "size"),
    ("rival", "rival", "s"),
    ("bits", "bits", ".3f"),
    ("encode_gbps", "encode GB/s", ".2f"),
    ("encode_ratio", "zipccl is x", ".1f"),
    ("decode_gbps", "decode GB/s", ".2f"),
    ("decode_ratio", "zipccl is x", ".1f"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_size_arguments(parser, "64K", "1G")
    harness.add_data_argument(parser)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--code", choices=["fast", "raw"], default="fast")
    parser.add_argument("--layout", choices=["compact", "split"], default="compact")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--timing", choices=["graph", "stream"], default="graph", help="CUDA only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    sizes = harness.sweep(args, parser)
    usable = torch.cuda.is_available() and _C.cuda_version is not None
    if args.device == "cuda" and not usable:
        parser.error("--device cuda: torch sees no GPU, or this zipccl was built without CUDA")
    device = "cuda" if args.device != "cpu" and usable else "cpu"

    torch.set_num_threads(1)
    facts = machine.describe(device)
    source = harness.Values(args.tensor)
    isa = f", one thread, {_C.best_isa()}" if device == "cpu" else ""
    print(f"zipccl {zipccl.__version__}, code {args.code}, {args.layout} frames, on {facts['device']}{isa}")
    print(f"values: {source.name}")
    table, rival_table = harness.Table(COLUMNS), harness.Table(RIVAL_COLUMNS)
    table.head()
    for nbytes in sizes:
        table.add(measure(source.take(nbytes // 2).to(device), args))
    others = rivals() if device == "cpu" else {}
    if others:
        print("\nGeneral compressors on the same bytes:")
        rival_table.head()
        for ours in table.rows:
            if ours["bytes"] <= RIVAL_MAX_BYTES:
                for name, functions in others.items():
                    rival_table.add(measure_rival(name, functions, source.take(ours["bytes"] // 2), ours))
    run = {"what": "codec", "code": args.code, "layout": args.layout, "checksum": args.checksum, "values": source.name}
    run |= {"timing": args.timing if device == "cuda" else "one thread", "rows": table.rows, "rivals": rival_table.rows}
    harness.write_json(args.json, facts | run)
    wrong = sum(row["mismatches"] for row in table.rows)
    if wrong:
        print(f"{wrong} values came back with other bits", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
