"""One page of plots from the results of the dynamiq_*.py benchmarks (needs matplotlib).

python benchmarks/dynamiq_plots.py benchmarks/results --out docs/dynamiq-results.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "zipccl", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}

import matplotlib.pyplot as plt  # noqa: E402

LINES = {"direct": "-", "butterfly": "--", "ring": ":"}
COLOURS = {"dynamiq-fine": "tab:blue", "dynamiq-paper": "tab:orange"}
MARKS = {"fp8": "s", "int4": "x", "mxfp8": "o", "mxfp6": "^", "mxfp4": "v"}


def error_against_bits(axes, result: dict, workers: int) -> None:
    rows = [r for r in result["rows"] if r["workers"] == workers]
    for method, colour in COLOURS.items():
        for topology, line in LINES.items():
            found = sorted((r["bits"], r["vnmse"]) for r in rows if (r["method"], r["topology"]) == (method, topology))
            if found:
                axes.semilogy(*zip(*found, strict=True), line, color=colour, marker=".", label=f"{method} {topology}")
    for method, mark in MARKS.items():
        for r in rows:
            if r["method"] == method and r["topology"] in ("direct", "ring"):
                colour = "black" if r["topology"] == "direct" else "gray"
                axes.semilogy(r["bits"], r["vnmse"], mark, color=colour, label=f"{method} {r['topology']}")
    axes.set(title=f"{workers} workers; {result['gradients']}", xlabel="bits per coordinate", ylabel="vNMSE")
    axes.legend(fontsize=5, ncol=2)


def error_against_workers(axes, result: dict, bits: float) -> None:
    for method, colour in COLOURS.items():
        for topology, line in LINES.items():
            found = sorted(
                (r["workers"], r["vnmse"])
                for r in result["rows"]
                if (r["method"], r["topology"], r["bits"]) == (method, topology, bits)
            )
            axes.loglog(*zip(*found, strict=True), line, color=colour, marker=".", label=f"{method} {topology}")
    for method in ("mxfp8", "fp8"):
        for topology in ("direct", "ring"):
            found = sorted(
                (r["workers"], r["vnmse"]) for r in result["rows"] if (r["method"], r["topology"]) == (method, topology)
            )
            colour = "black" if method == "fp8" else "gray"
            axes.loglog(*zip(*found, strict=True), LINES[topology], color=colour, label=f"{method} {topology}")
    axes.set(title=f"{bits:g} bits; {result['gradients']}", xlabel="workers", ylabel="vNMSE")
    workers = sorted({r["workers"] for r in result["rows"]})
    axes.set_xticks(workers, labels=workers)
    axes.minorticks_off()
    axes.legend(fontsize=5, ncol=2)


def ablation(axes, result: dict) -> None:
    names = [r["technique"] for r in result["rows"]]
    axes.barh(names[::-1], [r["vnmse"] for r in result["rows"]][::-1], log=True)
    axes.set(title=f"techniques one by one; {result['workers']} workers, {result['gradients']}", xlabel="vNMSE")


def exact_method(result: dict) -> str:
    return "fp32" if any(r["method"] == "fp32" for r in result["runs"]) else "bf16"


def losses(axes, result: dict) -> None:
    exact = exact_method(result)
    reference = {r["seed"]: r for r in result["runs"] if r["method"] == exact}
    for run in result["runs"]:
        base = reference.get(run["seed"])
        if base is None or run["method"] == exact or run["seed"] != min(reference):
            continue
        steps = [step for step, _ in run["evaluated"]]
        over = [100 * (a[1] / b[1] - 1) for a, b in zip(run["evaluated"], base["evaluated"], strict=True)]
        axes.plot(steps, over, label=f"{run['method']} ({run['bits']:.1f} b)")
    model = f"GPT of {result['runs'][0]['parameters'] / 1e6:.2g} M"
    title = f"held-out loss over {exact}'s, %: {model}, {result['workers']} workers, {result['steps']} steps"
    axes.set(title=title, xlabel="step", ylabel="%")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.legend(fontsize=5, ncol=2)


def time_to_loss(axes, result: dict, gbit: float = 10) -> None:
    """Until the exact method's final loss is reached within 1 %, with gradients sent after they are computed."""
    exact = exact_method(result)
    first = min(r["seed"] for r in result["runs"])
    runs = [r for r in result["runs"] if r["seed"] == first]
    target = 1.01 * next(r["final_loss"] for r in runs if r["method"] == exact)
    computing = min(r["seconds_computing"] for r in runs)
    names, seconds = [], []
    for run in runs:
        steps = next((step for step, loss in run["evaluated"] if loss <= target), None)
        names.append(f"{run['method']}{'' if steps else ' (never)'}")
        seconds.append((steps or 0) * (computing + run["wire_bits"] / (gbit * 1e9)))
    axes.barh(names[::-1], seconds[::-1])
    axes.set(title=f"seconds to 1 % above {exact}'s final loss at {gbit:g} Gbit/s (computed)", xlabel="s")


def speed(axes, result: dict) -> None:
    largest = max(r["bytes"] for r in result["rows"])
    rows = [r for r in result["rows"] if r["bytes"] == largest]
    axes.barh([r["method"] for r in rows][::-1], [r["bf16_over"] for r in rows][::-1])
    over = f" over {result['link']}" if result["link"] else ""
    axes.set(
        title=f"{largest >> 20} MiB fp32, {result['ranks']} ranks{over}", xlabel="times faster than bf16 all-reduce"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="directory of dynamiq-*.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {path.stem: json.loads(path.read_text()) for path in sorted(args.results.glob("dynamiq-*.json"))}
    panels = []
    for result in found.values():
        if result["what"] == "dynamiq_error":
            most = max(r["workers"] for r in result["rows"])
            panels.append(lambda axes, r=result, n=most: error_against_bits(axes, r, n))
            if len({r["workers"] for r in result["rows"]}) > 1:
                panels.append(lambda axes, r=result: error_against_workers(axes, r, 5))
        else:
            drawn = {
                "dynamiq_ablation": [ablation],
                "dynamiq_training": [losses, time_to_loss],
                "dynamiq_speed": [speed],
            }
            panels += [lambda axes, r=result, d=draw: d(axes, r) for draw in drawn[result["what"]]]
    columns = 2
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, figsize=(12, 4.2 * -(-len(panels) // columns)))
    for panel, place in zip(panels, axes.flat, strict=False):
        panel(place)
    for place in list(axes.flat)[len(panels) :]:
        place.axis("off")
    figure.tight_layout()
    figure.savefig(args.out, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
