"""Writes the tables of README.md and docs/ from benchmarks/results, so that no number there is typed by hand.

    python benchmarks/tables.py            after new results: rewrites the tables in place
    python benchmarks/tables.py --check    fails if a table is not what the results say (a test does this too)

A table stands between <!-- table NAME --> and <!-- end -->; NAME is a function below.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/results.md", "docs/dynamiq.md")
MiB = 1 << 20
MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
REDUCTIONS = ("reduce_scatter", "all_reduce")
TABLES: dict[str, Callable[[], str]] = {}


def table(function: Callable[[], list[list[str]]]) -> Callable:
    """Its rows, the head first, as Markdown."""

    def text() -> str:
        head, *rows = function()
        rule = ["---"] + ["--:"] * (len(head) - 1)
        return "".join(f"| {' | '.join(row)} |\n" for row in [head, rule, *rows])

    TABLES[function.__name__] = text
    return function


@functools.cache
def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())


def digits(x: float, n: int = 3) -> str:
    """n significant digits, and no fewer than stand before the point."""
    return f"{x:#.{n}g}".rstrip(".") if abs(x) < 10**n else f"{x:.0f}"


def error(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-") if x < 0.1 else digits(x, 2)


def percent(ratio: float) -> str:
    """How much more than 1."""
    return f"{100 * (ratio - 1):+.2f}".replace("-0.00", "+0.00")


def size(n: int) -> str:
    return f"{n // MiB} MiB" if n >= MiB else f"{n >> 10} KiB"


def times(x: float) -> str:
    return f"{x:.1f}x"


def collective(name: str, call: str, mebibytes: int) -> dict:
    return next(row for row in results(name)["collectives"][call] if row["bytes"] == mebibytes * MiB)


def label(call: str) -> str:
    return f"{call}, fp32 as bf16" if call in REDUCTIONS else call.replace("_skewed_", ", skewed, design ")


# ---- README ----------------------------------------------------------------------------------------------------


@table
def gains():
    slow, nvlink = "collectives-2xh200-10gbit", "collectives-2xh200-nvlink"

    def row(what: str, link: str, name: str, call: str, mebibytes: int) -> list[str]:
        r = collective(name, call, mebibytes)
        return [what, link, f"{digits(r['raw_ms'])} ms", f"{digits(r['zip_ms'])} ms", f"{r['speedup_zip']:.2f}x"]

    lossy = {r["method"]: r for r in results("dynamiq-speed-2xh200-10gbit")["rows"]}
    before, after = lossy["bf16"], lossy["dynamiq 5 bits direct"]
    return [
        ["What travels", "link", "without", "with zipccl", "faster"],
        row("parameters of FSDP2 (all_gather of bf16), 64 MiB", "10 Gbit/s", slow, "all_gather", 64),
        row("tokens of experts (all_to_all of bf16), 64 MiB", "10 Gbit/s", slow, "all_to_all", 64),
        row("fp32 gradients sent as bf16 (opt-in, rounds), 64 MiB", "10 Gbit/s", slow, "reduce_scatter", 64),
        ["gradients of DDP, 5 bits instead of bf16 (opt-in, lossy), 100 MiB", "10 Gbit/s", f"{digits(before['ms'])} ms",
         f"{digits(after['ms'])} ms", f"{after['bf16_over']:.2f}x"],
        row("parameters, forced (by default it stays raw), 256 MiB", "NVLink", nvlink, "all_gather", 256),
    ]  # fmt: skip


@table
def expected():
    """Arithmetic on the codec's measured rates: r + B/D + B/E/(n-1) of an all-gather's raw time, r + B/D + B/E of an
    all-to-all's, r: frame / tensor, B: the link, D and E: decoder and encoder, n: ranks."""
    ranks, gigabits = 8, (1, 10, 25, 100, 200, 400, 800)
    lines = [["times as fast, at most", *(f"{g} Gbit/s" for g in gigabits)]]
    for code in ("fast", "dense"):
        of = next(r for r in h200_rows() if (r["code"], r["bytes"]) == (code, 256 * MiB))
        left = of["frame_bytes"] / of["bytes"]
        for call, peers in ((f"all_gather, {ranks} ranks", ranks - 1), ("all_to_all", 1)):
            shares = (left + g / 8 / of["decode_gbps"] + g / 8 / of["encode_gbps"] / peers for g in gigabits)
            lines.append([f"{call}, code {code}", *(f"{1 / share:.2f}" for share in shares)])
    return lines


# ---- Codec -----------------------------------------------------------------------------------------------------


def h200_rows() -> list[dict]:
    """Code fast of a later run than the others'."""
    dense = [r for r in results("codec-h200")["rows"] if r["code"] != "fast"]
    return [*results("codec-h200-fast")["rows"], *dense]


def speeds(name: str, sizes: tuple[int, ...], names: dict[str, str]) -> list[list[str]]:
    rows = h200_rows() if name == "codec-h200" else results(name)["rows"]
    found = {(r.get("code") or r["rival"], r["bytes"]): r for r in [*rows, *results(name)["rivals"]]}
    lines = [["encode / decode, GB/s", "bits", *(f"{n} MiB" for n in sizes)]]
    for code, said in names.items():
        rows = [found[code, n * MiB] for n in sizes]
        cells = (f"{digits(r['encode_gbps'])} / {digits(r['decode_gbps'])}" for r in rows)
        lines.append([said, f"{rows[-1]['bits']:.2f}", *cells])
    return lines


@table
def codec_h200():
    ours = {"fast": "code fast", "dense": "code dense"}
    rivals = {f"nvCOMP {n}": f"nvCOMP 6.0 {n}" for n in ("ANS float16", "LZ4", "Zstd")}
    sizes = (4, 64, 256, 1024)
    head, fast, *others = speeds("codec-h200", sizes, ours | rivals)
    split = speeds("codec-h200-split", sizes, {"fast": "code fast, split frames"})[1]
    sums = of_fast("codec-h200-fast")
    summed = ["code fast, sum of 8 frames", "", *(digits(sums[n * MiB]["sum_gbps"]) for n in sizes)]
    return [head, fast, split, summed, *others]


def of_fast(name: str) -> dict[int, dict]:
    return {r["bytes"]: r for r in results(name)["rows"] if r["code"] == "fast"}


@table
def codec_h200_share():
    plain, split = of_fast("codec-h200-fast"), of_fast("codec-h200-split")
    lines = [["code fast, share of what a copy allows", "encode", "encode, split frames", "decode", "sum of 8 frames"]]
    for n in (4, 64, 256):
        r = plain[n * MiB]
        shares = (r["encode_share"], split[n * MiB]["encode_share"], r["decode_share"], r["sum_share"])
        cells = (f"{100 * share:.0f} %" for share in shares)
        lines.append([f"{n} MiB (copy: {digits(r['copy_gbps'])} GB/s, read and written)", *cells])
    return lines


@table
def codec_h200_sms():
    lines = [["code fast, 256 MiB, GB/s", "encode", "decode", "sum of 8 frames"]]
    for n in (8, 16, 32):
        r = results(f"codec-h200-{n}sms")["rows"][0]
        lines.append([f"`max_sms={n}`", *(digits(r[f"{what}_gbps"]) for what in ("encode", "decode", "sum"))])
    return lines


@table
def codec_cpu():
    names = {"fast": "code fast", "dense": "code dense", "lz4": "lz4", "zstd -1": "zstd -1"}
    return speeds("codec-cpu", (1, 4, 16, 64), names)


@table
def dtypes():
    rows = results("dtypes")["rows"]
    kinds = ("weights", "gradients", "activations")
    lines = [["bits per value, code dense", "raw", *kinds]]

    def bits(dtype: str, code: str) -> list[str]:
        of = {r["kind"]: r for r in rows if r["dtype"] == dtype}
        return [str(of["weights"]["raw_bits"]), *(f"{of[kind][f'{code}_bits']:.2f}" for kind in kinds)]

    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        lines.append([dtype.replace(" of ", " that holds "), *bits(dtype, "dense")])
    return [*lines, ["bfloat16, code fast", *bits("bfloat16", "fast")]]


# ---- Collectives -----------------------------------------------------------------------------------------------


def all_calls(name: str, sizes: tuple[int, ...]) -> list[list[str]]:
    lines = [["ms", "size", "raw", "zip", "raw/zip", "auto", "raw/auto", "wire bytes"]]
    for call, rows in results(name)["collectives"].items():
        for r in rows:
            if r["bytes"] in [n * MiB for n in sizes]:
                lines.append([label(call), size(r["bytes"]), digits(r["raw_ms"]), digits(r["zip_ms"]),
                              f"{r['speedup_zip']:.2f}", digits(r["auto_ms"]), f"{r['speedup_auto']:.2f}",
                              f"{r['wire_over_raw']:.3f}"])  # fmt: skip
    return lines


@table
def collectives_10gbit():
    return all_calls("collectives-2xh200-10gbit", (1, 64))


@table
def collectives_1gbit():
    return all_calls("collectives-2xh200-1gbit", (1, 64))


@table
def collectives_nvlink():
    return all_calls("collectives-2xh200-nvlink", (1, 16, 256))


@table
def collectives_cpu():
    return all_calls("collectives-cpu-1gbit", (2, 64))


@table
def all_gather_ahead():
    lines = [["all_gather, raw/zip (raw/auto)", "1 MiB", "4 MiB", "16 MiB"]]
    for said, name in (("10 Gbit/s", "all-gather-2xh200-10gbit-small"),
                       ("loopback sockets", "all-gather-2xh200-sockets-small")):  # fmt: skip
        rows = [collective(name, "all_gather", n) for n in (1, 4, 16)]
        lines.append([said, *(f"{r['speedup_zip']:.2f} ({r['speedup_auto']:.2f})" for r in rows)])
    return lines


@table
def collectives_sockets():
    runs = ("all-gather-2xh200-sockets", "collectives-2xh200-sockets", "collectives-2xh200-sockets-skewed",
            "collectives-2xh200-sockets-64m", "collectives-2xh200-sockets-64m-later")  # fmt: skip
    found: dict[str, list[dict]] = {}
    for name in runs:
        for call, rows in results(name)["collectives"].items():
            found.setdefault(call, []).extend(r for r in rows if r["bytes"] == 64 * MiB)
    lines = [["64 MiB, each run", "raw GB/s", "raw/zip", "raw/auto"]]
    for call, rows in found.items():
        columns = (("busbw_raw", 1), ("speedup_zip", 2), ("speedup_auto", 2))
        lines.append([label(call), *(", ".join(f"{r[key]:.{places}f}" for r in rows) for key, places in columns)])
    return lines


@table
def skewed():
    runs = {
        "whole frames forecast": "collectives-2xh200-sockets-skewed",
        "static parts first": "collectives-2xh200-sockets",
    }
    designs = ("all_to_all_skewed_1", "all_to_all_skewed_2")
    lines = [["skewed all-to-all, ms", "size", "raw, twice", "design 1", "design 2"]]
    for said, name in runs.items():
        for n in (1, 8, 64):
            rows = [collective(name, call, n) for call in designs]
            raw = ", ".join(digits(r["raw_ms"]) for r in rows)
            lines.append([f"design 2: {said}", f"{n} MiB", raw, *(digits(r["zip_ms"]) for r in rows)])
    return lines


@table
def shared_gpu():
    lines = [["raw/zip, size per rank", "raw GB/s", *(f"{n} MiB" for n in (1, 4, 16, 64, 256))]]
    for ranks in (2, 4):
        rows = results(f"all-gather-h200-{ranks}ranks")["collectives"]["all_gather"]
        lines.append([f"{ranks} ranks, all_gather", f"{rows[-2]['busbw_raw']:.1f}",
                      *(f"{r['speedup_zip']:.2f}" for r in rows)])  # fmt: skip
    return lines


@table
def shared_gpu_calls():
    lines = [["64 MiB", "raw GB/s", "raw/zip", "raw/auto"]]
    for file, ranks in (("4ranks-mps", "4 ranks at the same time"), ("4ranks", "4 ranks"), ("8ranks", "8 ranks")):
        for call, (r,) in results(f"collectives-h200-{file}")["collectives"].items():
            speeds_up = (f"{r[key]:.2f}" for key in ("speedup_zip", "speedup_auto"))
            lines.append([f"{ranks}, {label(call)}", f"{r['busbw_raw']:.1f}", *speeds_up])
    return lines


@table
def overhead():
    small, large = (results(f"overhead-2xh200-nvlink{part}")["collectives"] for part in ("", "-large"))
    lines = [["us more than NCCL: median (range)", "64 B to 256 KiB", "1 to 16 MiB"]]
    for call in small:
        cells = []
        for rows in (small[call], large[call]):
            more = [r["more_us"] for r in rows]
            cells.append(f"{statistics.median(more):.1f} ({min(more):.1f} to {max(more):.1f})")
        lines.append([call, *cells])
    every = [min(r["inner_us"], r["again_us"]) for rows in small.values() for r in rows]
    more = [min(r["inner_us"], r["again_us"]) for rows in large.values() for r in rows]
    return [*lines, ["NCCL's own times", *(f"{min(t):.0f} to {max(t):.0f}" for t in (every, more))]]


@table
def overhead_cpu():
    lines = [["us more than gloo: median (range)", "zipccl", "another gloo group", "gloo's own times"]]
    for call, rows in results("overhead-cpu")["collectives"].items():
        cells = []
        for more in ([r["more_us"] for r in rows], [abs(r["inner_us"] - r["again_us"]) for r in rows]):
            cells.append(f"{statistics.median(more):.0f} ({min(more):.0f} to {max(more):.0f})")
        own = [min(r["inner_us"], r["again_us"]) for r in rows]
        lines.append([call, *cells, f"{min(own):.0f} to {max(own):.0f}"])
    return lines


# ---- DynamiQ ---------------------------------------------------------------------------------------------------


@table
def dynamiq_error():
    workers = 8
    rows = {(r["method"], r["topology"], r["bits"]): r["vnmse"] for r in results("dynamiq-error-real")["rows"]
            if r["workers"] == workers}  # fmt: skip
    names = {"dynamiq-fine": "DynamiQ", "dynamiq-paper": 'DynamiQ, `widths="paper"`', "fp8": "FP8 in blocks of 256",
             "mxfp8": "MXFP8", "mxfp6": "MXFP6", "mxfp4": "MXFP4", "int4": "INT4 in blocks of 128"}  # fmt: skip
    topologies = ("direct", "butterfly", "ring")
    lines = [["vNMSE of the sum of 8 workers", "bits", *topologies]]
    for method, said in names.items():
        for bits in sorted({b for m, _, b in rows if m == method}, reverse=True):
            lines.append([said, f"{bits:g}", *(error(rows[method, t, bits]) for t in topologies)])
    return lines


@table
def dynamiq_error_workers():
    counts = (2, 4, 8, 16, 64)
    rows = {(r["workers"], r["bits"]): r["vnmse"] for r in results("dynamiq-error-synthetic")["rows"]
            if (r["method"], r["topology"]) == ("dynamiq-fine", "direct")}  # fmt: skip
    lines = [["vNMSE, synthetic, direct", *(f"{n} workers" for n in counts)]]
    for bits in (6, 5, 4, 3):
        lines.append([f"DynamiQ, {bits} bits", *(error(rows[n, bits]) for n in counts)])
    return lines


@table
def dynamiq_error_8192():
    rows = results("dynamiq-error-8192")["rows"]
    names = {"dynamiq-fine": "DynamiQ", "dynamiq-paper": 'DynamiQ, `widths="paper"`', "mxfp8": "MXFP8"}
    lines = [["vNMSE, synthetic, 8,192 workers", "bits", "butterfly", "ring"]]
    for method, bits in dict.fromkeys((r["method"], r["bits"]) for r in rows):
        of = {r["topology"]: r["vnmse"] for r in rows if (r["method"], r["bits"]) == (method, bits)}
        lines.append([names[method], f"{bits:g}", *(error(of[t]) for t in ("butterfly", "ring"))])
    return lines


def final_losses(name: str) -> list[list[str]]:
    losses: dict[str, dict[int, float]] = {}
    for r in results(name)["runs"]:
        losses.setdefault(r["method"], {})[r["seed"]] = r["final_loss"]
    base = losses.pop("bf16")
    lines = [["held-out loss against bf16 all-reduce, %", "mean", "each seed"]]
    for method, of in losses.items():
        mean = statistics.mean(of.values()) / statistics.mean(base[s] for s in of)
        lines.append([method, percent(mean), ", ".join(percent(of[s] / base[s]) for s in of)])
    return lines


@table
def dynamiq_training():
    return final_losses("dynamiq-training-h200")


@table
def dynamiq_training_small():
    return final_losses("dynamiq-training-cpu")


@table
def dynamiq_speed():
    columns = ("bf16", "dynamiq 5 bits direct", "dynamiq 4 bits direct", "dynamiq 5 bits ring",
               "dynamiq 5 bits, nodes of 2", "fp8 direct")  # fmt: skip
    names = {
        "cpu-200mbit": "4 gloo ranks, two pairs joined by 200 Mbit/s, 2 cores",
        "2xh200-10gbit": "2 ranks on two H200, joined by 10 Gbit/s",
        "2xh200-10gbit-4ranks": "4 ranks on two H200, joined by 10 Gbit/s",
        "2xh200-4ranks": "4 ranks on two H200, over loopback sockets",
        "2xh200-4ranks-chunk": "the same with `NCCL_P2P_NET_CHUNKSIZE=524288`",
    }
    lines = [["ms", *(c.replace("dynamiq ", "") for c in columns)]]
    for name, said in names.items():
        of = {r["method"]: r for r in results(f"dynamiq-speed-{name}")["rows"]}
        cells = [f"{digits(of[c]['ms'])} ({times(of[c]['bf16_over'])})" if c in of else "" for c in columns]
        lines.append([said, digits(of["bf16"]["ms"]), *cells[1:]])
    return lines


@table
def dynamiq_ablation():
    rows = results("dynamiq-ablation")["rows"]
    lines = [["4 workers, real gradients", "bits", "vNMSE"]]
    return lines + [[r["technique"], f"{r['bits']:g}", error(r["vnmse"])] for r in rows]


@table
def quantizer_h200():
    rows = results("quantizer-h200")["rows"]
    names = {"statistics": "statistics", "allocate": "allocate", "quantise": "quantise", "decompress": "decompress",
             "decompress_add": "decompress and add", "decompress_add_recompress": "decompress, add, recompress",
             "decompress_add_recompress_of_8": "the same of 8 inputs"}  # fmt: skip
    short = {"float32": "fp32", "bfloat16": "bf16"}
    lines = [["10^9 coordinates per second", *(f"{short[r['dtype']]}, {r['widths']}" for r in rows)]]
    return lines + [[said, *(str(r[key]) for r in rows)] for key, said in names.items()]


# ---- Pages -----------------------------------------------------------------------------------------------------


def rewritten(text: str) -> str:
    """A page with its tables as the results say. KeyError: a table of no such name."""
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    differ = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        if rewritten(text) != text:
            differ.append(page)
            if not args.check:
                (ROOT / page).write_text(rewritten(text))
    if differ:
        print(("not as benchmarks/results say: " if args.check else "rewritten: ") + ", ".join(differ))
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
