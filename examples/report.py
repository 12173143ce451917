"""The end of the demo: a table of both runs and, in sentences, what it shows."""

from __future__ import annotations

import argparse
import textwrap
from statistics import fmean, quantiles

import launch

_NOISE = 3.0  # percent that two runs of the same differ by at the best of times
_TURNS = 4  # fewer do not tell how much they vary
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
    seen = None
    if len(runs) == 2:
        inner, zipped = runs.values()
        seen = Times(inner["ms_per_step"], zipped["ms_per_step"], inner["ms_by_turn"], zipped["ms_by_turn"])
        lines += wrap("Time", time_sentence(seen, args, list(runs)[0]))
    if "zipccl" in runs:
        lines += wrap("Auto", auto_sentence(runs["zipccl"]["all_gather"], seen))
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


def wrap(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, width=110, initial_indent=f"{label:<9}", subsequent_indent=" " * 9)


class Times:
    """What the times of two runs say, turn by turn: each turn of one run had its neighbour in the other."""

    def __init__(self, inner_ms: float, zip_ms: float, inner_turns: list[float], zip_turns: list[float]):
        self.change = 100 * (zip_ms / inner_ms - 1)  # percent
        changes = [100 * (z / i - 1) for i, z in zip(inner_turns, zip_turns, strict=True)]
        self.verdict = "unknown"
        if len(changes) >= _TURNS:
            self.low, _, self.high = quantiles(changes, n=4, method="inclusive")  # the middle half of the turns
            self.verdict = "level"
            if abs(self.change) >= _NOISE and self.low * self.high > 0:
                self.verdict = "slower" if self.low > 0 else "faster"


def time_sentence(seen: Times, args: argparse.Namespace, inner: str) -> str:
    said = f"{seen.change:+.1f} % per step against plain {inner}"
    if seen.verdict == "unknown":
        return f"{said}; too few steps to tell whether that is more than chance."
    said += f"; the middle half of all turns lies between {seen.low:+.1f} and {seen.high:+.1f} %."
    if seen.verdict == "level":
        return f"{said} That is no difference: below {_NOISE:.0f} %, or turns disagree about its sign."
    if seen.verdict == "slower" and not args.link and args.device == "cpu":
        said += (
            " Without a network the bytes saved cross no wire; over a link of 1 Gbit/s: make demo LINK=1gbit (root)."
        )
    return said


def auto_sentence(moved: dict, seen: Times | None) -> str:
    """moved: what traffic() of train_gpt.py returned; seen: of the steps, where there were two runs."""
    how = "compressed" if moved["auto"] == "zip" else "uncompressed"
    said = f"By default zipccl would send messages of this size {how}: {moved['auto_reason']}."
    if seen and (moved["auto"], seen.verdict) in (("zip", "slower"), ("raw", "faster")):
        said += (
            f" Whole steps were {seen.verdict} when compressed all the same: they hold more than these messages, and "
            "other work on the machine may have touched one of the two measurements."
        )
    return said
