"""The end of the demo: a table of both runs and, in sentences, what it shows."""

from __future__ import annotations

import argparse
import textwrap
from statistics import fmean

import launch

_NOISE = 3.0  # percent
Results = dict[str, dict[int, dict]]  # backend -> rank -> what train() returned


def compare(results: Results) -> dict[str, bool]:
    """Whether the two runs computed the same bits, on every rank this process started. Empty after a single run."""
    if len(results) < 2:
        return {}
    inner, zipped = results.values()
    return {
        what: all(inner[rank][what] == zipped[rank][what] for rank in inner) for what in ("loss_bits", "weights_sha256")
    }


def text(args: argparse.Namespace, cluster: launch.Cluster, results: Results, comparison: dict[str, bool]) -> str:
    runs = {name: ranks[cluster.ranks[0]] for name, ranks in results.items()}
    lines = table(runs, args.steps)
    if comparison:
        lines += ["", *identity_sentences(args.steps, cluster.ranks, comparison)]
    if "zipccl" in runs:
        moved = runs["zipccl"]["all_gather"]
        lines += [
            f"Bytes    {100 * (1 - moved['wire_bytes'] / moved['raw_bytes']):.1f} % fewer for all-gathers, of which "
            f"{moved['zipped_calls']} of {moved['calls']} were compressed.",
            "         Gradients (reduce-scatter) go through the inner backend: another order of adding changes bits.",
        ]
    if len(runs) == 2:
        lines.append("Time     " + time_sentence(*(run["ms_per_step"] for run in runs.values()), args, list(runs)[0]))
    if "zipccl" in runs:
        how = "compressed" if moved["auto"] == "zip" else "uncompressed"
        lines += textwrap.wrap(
            f"Auto     By default zipccl would send messages of this size {how}: {moved['auto_reason']}",
            width=110,
            subsequent_indent=" " * 9,
        )
    return "\n".join(lines)


def table(runs: dict[str, dict], steps: int) -> list[str]:
    last = min(steps, 10)
    mean = f"mean loss, steps {steps - last + 1} to {steps}"
    rows: list[tuple[str, dict[str, str]]] = [
        ("final loss (rank 0)", {name: f"{run['losses'][-1]:.6f}" for name, run in runs.items()}),
        (mean, {name: f"{fmean(run['losses'][-last:]):.6f}" for name, run in runs.items()}),
        ("time per step, median", {name: f"{run['ms_per_step']:.1f} ms" for name, run in runs.items()}),
    ]
    if "zipccl" in runs:
        moved = runs["zipccl"]["all_gather"]
        raw, wire = moved["raw_bytes"], moved["wire_bytes"]
        sent = {name: wire if name == "zipccl" else raw for name in runs}
        rows[2:2] = [
            ("all-gathered per rank and step, raw", {name: f"{raw / steps / 1e6:.2f} MB" for name in runs}),
            ("the same on the wire", {name: f"{b / steps / 1e6:.2f} MB" for name, b in sent.items()}),
            ("bits on the wire per bf16 value", {name: f"{16 * b / raw:.2f}" for name, b in sent.items()}),
        ]
    head = f"{'':<36}" + "".join(f"{name:>14}" for name in runs)
    return [head, *(f"{label:<36}" + "".join(f"{cells[name]:>14}" for name in runs) for label, cells in rows)]


def identity_sentences(steps: int, ranks: list[int], comparison: dict[str, bool]) -> list[str]:
    of = f"x {len(ranks)} ranks" if len(ranks) > 1 else f"of rank {ranks[0]}"  # torchrun: each rank checks its own
    losses = f"{steps * len(ranks)} losses ({steps} steps {of})"
    return [
        f"Losses   All {losses} are bit-identical in both runs."
        if comparison["loss_bits"]
        else f"Losses   DIFFERENT: not all {losses} are the same in both runs. This is a fault; please report it.",
        "Weights  Bit-identical after the last step (SHA-256 of every fp32 shard)."
        if comparison["weights_sha256"]
        else "Weights  DIFFERENT after the last step. This is a fault; please report it.",
    ]


def time_sentence(inner_ms: float, zip_ms: float, args: argparse.Namespace, inner: str) -> str:
    change = 100 * (zip_ms / inner_ms - 1)
    said = f"{change:+.1f} % per step against plain {inner}."
    if abs(change) < _NOISE:
        return f"{said} That is within what two runs differ by anyway."
    if change < 0:
        return said
    if args.link or args.device == "cuda":
        return f"{said} On this link, at these message sizes, compressing gains nothing."
    return (
        f"{said} Here compressing does not pay: without a network the bytes it saves cross no wire.\n"
        "         To see it over a link of 1 Gbit/s on this machine: make demo LINK=1gbit (as root)."
    )
