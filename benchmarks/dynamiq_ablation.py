"""What each of DynamiQ's techniques is worth (the paper's Table 6): added one by one, ring of 4 workers, 4 bits.

    python benchmarks/dynamiq_ablation.py --gradients grads_bf16.bin --file-workers 8

An implementation of its own in torch, slow and plain, where every technique can be left out; the last rows are the
product's. Until widths vary, all values take 4 bits and their scales come on top; from then on 4 bits are all there is.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import harness
import machine
import simulate
import torch
from gradients import FileGradients, SyntheticGradients

SUPER_GROUP = 256
EPSILON = {2: 0.23, 4: 0.18, 8: 0.10}  # of the authors' kernels
STATISTICS_BITS = 2 * 16 / SUPER_GROUP


@dataclass(frozen=True)
class Techniques:
    non_uniform: bool = False
    variable_width: bool = False
    hierarchical: bool = False
    correlated: bool = False

    @property
    def group(self) -> int:
        return 16 if self.hierarchical else 32

    @property
    def scale_bits(self) -> float:
        return 8 / 16 + 16 / SUPER_GROUP if self.hierarchical else 16 / 32


STEPS = {
    "uniform levels": Techniques(),
    "+ non-uniform levels": Techniques(non_uniform=True),
    "+ variable widths": Techniques(non_uniform=True, variable_width=True),
    "+ hierarchical scales": Techniques(non_uniform=True, variable_width=True, hierarchical=True),
    "+ correlated rounding": Techniques(True, True, True, True),
}


def levels(width: int, non_uniform: bool) -> torch.Tensor:
    """Magnitudes from 0 to 1: 2^(width - 1) of them, beside a sign (section 3.2)."""
    r = torch.arange(2.0 ** (width - 1))
    if not non_uniform:
        return r / r[-1]
    base = 1 + 2 * EPSILON[width] ** 2
    return (base**r - 1) / (base ** r[-1] - 1)


class Rounder:
    """Uniform numbers for one compression of a coordinate: independent, or stratified over the n (section 3.3)."""

    def __init__(self, count: int, n: int, correlated: bool, seed: int):
        self.draw = torch.Generator().manual_seed(seed)
        self.n, self.count = n, count
        self.order = torch.rand(n, count, generator=self.draw).argsort(0) if correlated else None

    def __call__(self, index: int) -> torch.Tensor:
        u = torch.rand(self.count, generator=self.draw)
        return u if self.order is None else (self.order[index] + u) / self.n


def quantise(
    x: torch.Tensor, widths: torch.Tensor, t: Techniques, u: torch.Tensor, draw: torch.Generator
) -> torch.Tensor:
    """What x becomes when it is packed and unpacked. x [super-groups, 256], widths [super-groups]."""
    groups = x.view(len(x), -1, t.group)
    scale = groups.abs().amax(2, keepdim=True)
    if t.hierarchical:  # a random fraction of 255 of the super-group's, itself bf16, rounded up so that nothing clips
        top = (scale.amax(1, keepdim=True) * (1 + 2**-8)).bfloat16().float()
        fraction = 255 * scale / top.clamp_min(1e-30)
        scale = (fraction + torch.rand(fraction.shape, generator=draw)).floor().clamp_max(255) * top / 255
    else:
        scale = (scale * (1 + 2**-8)).bfloat16().float()
    magnitude = (groups.abs() / scale.clamp_min(1e-30)).clamp(0, 1)
    u = u.view(groups.shape)
    found = torch.zeros_like(groups)
    for width in widths.unique().tolist():
        rows = widths == width
        grid = levels(width, t.non_uniform)
        m = magnitude[rows]
        below = (torch.searchsorted(grid, m, right=True) - 1).clamp(0, len(grid) - 2)
        low, high = grid[below], grid[below + 1]
        found[rows] = torch.where(u[rows] < (m - low) / (high - low), high, low)
    return (found * scale * groups.sign()).view(x.shape)


def choose_widths(energy: torch.Tensor, budget: float) -> torch.Tensor:
    """2, 4 or 8 bits with T24 = 17/512 T48, and T48 such that `budget` bits per value are met (section 3.1)."""
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        top = 2.0**middle
        widths = torch.where(energy > top, 8, torch.where(energy > top * 17 / 512, 4, 2))
        low, high = (middle, high) if widths.double().mean() > budget else (low, middle)
    top = 2.0**high
    return torch.where(energy > top, 8, torch.where(energy > top * 17 / 512, 4, 2))


def ring(rows: torch.Tensor, t: Techniques, bits: float, seed: int) -> torch.Tensor:
    """rows [workers, super-groups, 256] -> their sum, as the sink of a ring broadcasts it."""
    n, groups, _ = rows.shape
    draw = torch.Generator().manual_seed(seed)
    mean = rows.mean(2, keepdim=True).mean(0)
    centred = rows - mean
    widths = torch.full((groups,), 4)
    if t.variable_width:
        widths = choose_widths(centred.square().sum((0, 2)), bits - t.scale_bits - STATISTICS_BITS)
    rounder = Rounder(rows[0].numel(), n, t.correlated, seed + 1)
    total = torch.zeros_like(rows[0])
    for worker in range(n):
        total = quantise(total + centred[worker], widths, t, rounder(worker), draw)
    return total + n * mean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", type=harness.existing_file, metavar="FILE", help="bf16; default: synthetic")
    parser.add_argument("--file-workers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    own = FileGradients(args.gradients, args.file_workers) if args.gradients else SyntheticGradients(1024)
    rows = torch.stack([own(w) for w in range(args.workers)])
    whole = rows[:, : rows.shape[1] // SUPER_GROUP * SUPER_GROUP]
    exact = whole.double().sum(0)

    def error(sums: list[torch.Tensor]) -> float:
        errors = [float((s.flatten().double() - exact).square().sum() / exact.square().sum()) for s in sums]
        return sum(errors) / len(errors)

    print(f"gradients: {own.name}; {args.workers} workers")
    table = harness.Table([("technique", "technique", ">44s"), ("bits", "bits", ".3f"), ("vnmse", "vNMSE", ".3e")])
    squares = whole.view(args.workers, -1, SUPER_GROUP)
    for name, techniques in STEPS.items():
        t = replace(techniques)
        bits = args.bits if t.variable_width else 4 + t.scale_bits + STATISTICS_BITS
        sums = [ring(squares, t, args.bits, 10 * seed) for seed in range(args.seeds)]
        table.add({"technique": name, "bits": bits, "vnmse": error(sums)})
    for name, topology, widths in (
        ("zipccl: paper widths, ring", "ring", "paper"),
        ("zipccl: paper widths, butterfly", "butterfly", "paper"),
        ("zipccl: paper widths, direct", "direct", "paper"),
        ("zipccl: fine widths, ring", "ring", "fine"),
        ("zipccl: fine widths, direct", "direct", "fine"),
    ):
        sums = [
            simulate.dynamiq(whole.__getitem__, args.workers, topology, args.bits, widths, seed=seed)
            for seed in range(args.seeds)
        ]
        table.add({"technique": name, "bits": args.bits, "vnmse": error(sums)})
    facts = machine.describe("cpu") | {"what": "dynamiq_ablation", "gradients": own.name, "workers": args.workers}
    harness.write_json(args.json, facts | {"rows": table.rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
