"""How fast tensors become frames and come back, beside a copy of the same bytes in the same run.

    python benchmarks/codec.py                              64 KiB to 1 GiB on the CPU, or on the GPU if there is one
    python benchmarks/codec.py --tensor weights_bf16.bin    real values instead of synthetic ones

code        fast and dense, or those that --code names
bits        size of the frame, header and tables included, in bits per value (raw: 16)
copy        bytes that copy_ reads plus bytes it writes, per second
encode      bytes of raw tensor encoded per second; likewise decode
share       of the rate that memory allows: encoding R raw bytes into W frame bytes must read R and write W, decoding
            the reverse, so at the copy's rate c the limit is c / (1 + W / R) raw bytes per second, and
            share = rate / limit
mismatches  values whose bits differ after encode and decode, counted at every size

sum         on CUDA: raw bytes of 8 frames decoded and added up per second; limit: every frame read, the sum written

All are timed in turns. On the CPU one thread runs, or as many as --threads says. On CUDA each timing is one CUDA graph
of several calls between two events, so that launch overhead does not count (--timing stream: calls on a stream, launch
overhead included); up to the size of its L2 cache all of them, the copy too, find their data there. --max-sms keeps the
codec to some of the GPU's multiprocessors. Other compressors that are installed here (rivals.py) are timed in turns
with ours on the same bytes, on CUDA all of them as calls on a stream; "fast is x" tells how many times as fast code
fast was. plot_codec.py draws the results.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import harness  # first: it makes the demo's helpers importable
import machine
import rivals
import torch
import zipccl
from zipccl import _C

ROUNDS = {"cpu": 25, "cuda": 7}
ADDENDS = 8


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

    def __init__(self, call: Callable[[], object], nbytes: int, graph: bool, most_calls: int = 64):
        self.calls = max(1, min(most_calls, (256 << 20) // nbytes))
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


def in_turns(timers: dict[str, CpuTimer | CudaTimer], device: str) -> dict[str, float]:
    """Seconds of a call: the median of rounds in which every timer has its turn; on the CPU, where other programs take
    their share, the best."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS[device]):
        for name, timer in timers.items():
            times[name].append(timer.seconds())
    return {name: min(t) if device == "cpu" else statistics.median(t) for name, t in times.items()}


class Ours:
    """One code at work on one tensor."""

    def __init__(self, values: torch.Tensor, code: str, args: argparse.Namespace):
        self.form = {"code": code, "layout": args.layout, "checksum": args.checksum}
        self.values, self.code, self.args = values, code, args
        self.room = torch.empty(_C.frame_bound(values, **self.form), dtype=torch.uint8, device=values.device)
        self.size = torch.zeros(1, dtype=torch.int64, device=values.device)
        self.out = torch.full_like(values, float("nan"))
        self.encode()
        self.frame = self.room[: self.size.item()]

    def encode(self) -> None:
        _C.encode_into(self.values, self.room, self.size, **self.form, max_sms=self.args.max_sms)

    def decode(self) -> None:
        _C.decode_into(self.frame, self.out, max_sms=self.args.max_sms, code=self.code)


def measure(values: torch.Tensor, code: str, args: argparse.Namespace) -> dict:
    ours = Ours(values, code, args)
    nbytes, packed = values.nbytes, len(ours.frame)
    copied = torch.empty_like(values)
    calls: dict[str, Callable[[], object]] = {
        "encode": ours.encode,
        "decode": ours.decode,
        "copy": lambda: copied.copy_(values),
    }
    if values.is_cuda and code == "fast":
        frames = [ours.frame.clone() for _ in range(ADDENDS)]
        calls["sum"] = lambda: _C.sum_into(frames, copied, max_sms=args.max_sms)
    timer = functools.partial(CudaTimer, graph=args.timing == "graph") if values.is_cuda else CpuTimer
    seconds = in_turns({name: timer(call, nbytes) for name, call in calls.items()}, values.device.type)
    copy_rate = 2 * nbytes / seconds["copy"]
    limit = copy_rate / (1 + packed / nbytes)
    rates = {name: nbytes / seconds[name] for name in ("encode", "decode")}
    row = {
        "bytes": nbytes,
        "code": code,
        "frame_bytes": packed,
        "bits": 16 * packed / nbytes,
        "copy_gbps": copy_rate / 1e9,
        "encode_gbps": rates["encode"] / 1e9,
        "encode_share": rates["encode"] / limit,
        "decode_gbps": rates["decode"] / 1e9,
        "decode_share": rates["decode"] / limit,
        "mismatches": harness.mismatches(values, ours.out),
    }
    if values.is_cuda:
        row |= {"sum_gbps": None, "sum_share": None}
    if "sum" in seconds:
        row["sum_gbps"] = ADDENDS * nbytes / seconds["sum"] / 1e9
        row["sum_share"] = (nbytes + ADDENDS * packed) / copy_rate / seconds["sum"]
    return row


COLUMNS = [
    ("bytes", "raw size", "size"),
    ("code", "code", "s"),
    ("bits", "bits", ".3f"),
    ("copy_gbps", "copy GB/s", ".2f"),
    ("encode_gbps", "encode GB/s", ".2f"),
    ("encode_share", "share", ".0%"),
    ("decode_gbps", "decode GB/s", ".2f"),
    ("decode_share", "share", ".0%"),
    ("mismatches", "mismatches", "d"),
]
SUM_COLUMNS = [("sum_gbps", "sum GB/s", ".2f"), ("sum_share", "share", ".0%")]


# ---- Rivals ---------------------------------------------------------------------------------------------------


def measure_rival(rival: rivals.Rival, values: torch.Tensor, args: argparse.Namespace) -> dict:
    """In turns with ours, so that a slow moment hits both."""
    nbytes, device = values.nbytes, values.device.type
    timer = functools.partial(CudaTimer, graph=False, most_calls=8) if values.is_cuda else CpuTimer
    timers = {"encode": timer(rival.encode, nbytes), "decode": timer(rival.decode, nbytes)}
    for code in args.code:
        ours = Ours(values, code, args)
        timers |= {f"encode {code}": timer(ours.encode, nbytes), f"decode {code}": timer(ours.decode, nbytes)}
    seconds = in_turns(timers, device)
    row = {"rival": rival.name, "bytes": nbytes, "bits": 16 * rival.packed_bytes / nbytes}
    for way in ("encode", "decode"):
        row[f"{way}_gbps"] = nbytes / seconds[way] / 1e9
        for code in args.code:
            row[f"{way}_gbps_{code}"] = nbytes / seconds[f"{way} {code}"] / 1e9
            row[f"{way}_ratio_{code}"] = seconds[way] / seconds[f"{way} {code}"]
    return row | {"exact": bool(rival.exact())}


def rival_columns(codes: list[str]) -> list[tuple[str, str, str]]:
    columns = [("bytes", "raw size", "size"), ("rival", f"{'rival':>18}", "s"), ("bits", "bits", ".3f")]
    for way in ("encode", "decode"):
        columns.append((f"{way}_gbps", f"{way} GB/s", ".2f"))
        columns += [(f"{way}_ratio_{code}", f"{code} is x", ".1f") for code in codes]
    return columns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_size_arguments(parser, "64K", "1G")
    harness.add_data_argument(parser)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--code", choices=["fast", "dense", "raw"], nargs="+", default=["fast", "dense"])
    parser.add_argument("--layout", choices=["compact", "split", "packed"], default="compact")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU only (default 1)")
    parser.add_argument("--max-sms", type=int, default=0, metavar="N", help="CUDA only; 0: all")
    parser.add_argument("--timing", choices=["graph", "stream"], default="graph", help="CUDA only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    sizes = harness.sweep(args, parser)
    usable = torch.cuda.is_available() and _C.cuda_version is not None
    if args.device == "cuda" and not usable:
        parser.error("--device cuda: torch sees no GPU, or this zipccl was built without CUDA")
    device = "cuda" if args.device != "cpu" and usable else "cpu"

    torch.set_num_threads(args.threads)
    facts = machine.describe(device)
    source = harness.Values(args.tensor)
    isa = _C.isas()[-1]
    how = args.timing if device == "cuda" else f"threads: {args.threads}, {isa}"
    print(f"zipccl {zipccl.__version__}, {args.layout} frames, on {facts['device']}, {how}")
    print(f"values: {source.name}")
    table = harness.Table(COLUMNS + SUM_COLUMNS if device == "cuda" else COLUMNS)
    rival_table = harness.Table(rival_columns(args.code))
    for nbytes in sizes:
        values = source.take(nbytes // 2).to(device)
        for code in args.code:
            table.add(measure(values, code, args))
    run = {"what": "codec", "codes": args.code, "layout": args.layout, "checksum": args.checksum}
    run |= {"values": source.name, "timing": how, "max_sms": args.max_sms}
    run |= {"rows": table.rows, "rivals": rival_table.rows}
    harness.write_json(args.json, facts | run)  # whatever becomes of the others
    for nbytes in sizes:
        if device == "cpu" and nbytes > rivals.MAX_BYTES:
            break
        values = source.take(nbytes // 2).to(device)
        for rival in rivals.on_cuda(values) if device == "cuda" else rivals.on_cpu(values):
            if not rival_table.rows:
                print("\nOther compressors on the same bytes:")
            rival_table.add(measure_rival(rival, values, args))
    harness.write_json(args.json, facts | run)
    wrong = sum(row["mismatches"] for row in table.rows)
    for row in rival_table.rows:
        if not row["exact"]:
            print(f"{row['rival']} did not give {row['bytes']} bytes back", file=sys.stderr)
    if wrong:
        print(f"{wrong} values came back with other bits", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
