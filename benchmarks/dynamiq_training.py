"""Loss curves: a small GPT learns Python's standard library from 8 workers whose gradients are summed in many ways.

    python benchmarks/dynamiq_training.py --json out.json               on the CPU, small
    python benchmarks/dynamiq_training.py --device cuda --jobs 8        on a GPU

The workers are simulated in one process (simulate.py): each computes the gradient of its own rows, and their average
is what the ranks of a group would have got. So only the arithmetic of the methods differs, not the machine; what they
cost in time, benchmarks/dynamiq_speed.py measures.

Evaluation: mean loss over fixed rows of text that is never trained on. `seconds_computing` is one worker's share of the
time for gradients, `wire_bits` what a rank receives per step: together they tell the time of a step on any link.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import harness
import machine
import simulate
import torch
from baselines import CODECS
from torch.func import functional_call, grad_and_value, vmap

import corpus  # isort: skip  (of the examples; harness has made them importable)
from gpt import GPT  # isort: skip

EVALUATE_EVERY = 100
HELD_OUT_ROWS = 1024  # fewer, and their choice would matter more than the method
RAMP = 50  # steps to the full learning rate; then a cosine to a tenth of it


class PowerSGD:
    """Vogels et al. 2019 with warm start and error feedback, as torch's powerSGD_hook: matrices travel as two factors,
    the rest in fp32."""

    def __init__(self, rank: int, shapes: list[torch.Size], workers: int, device: torch.device):
        self.rank, self.shapes = rank, shapes
        draw = torch.Generator(device).manual_seed(0)
        self.q = [
            torch.randn(s[1:].numel(), min(rank, *s), generator=draw, device=device) if len(s) > 1 else None
            for s in shapes
        ]
        self.lost = [torch.zeros(workers, *s, device=device) for s in shapes]
        kept = sum((s[0] + s[1:].numel()) * self.rank if len(s) > 1 else s.numel() for s in shapes)
        self.bits = 32 * kept / sum(s.numel() for s in shapes)

    def __call__(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for i, g in enumerate(gradients):
            if self.q[i] is None:
                found.append(g.mean(0))
                continue
            m = (g + self.lost[i]).flatten(2)
            p = torch.linalg.qr((m @ self.q[i]).mean(0)).Q
            self.q[i] = (m.transpose(1, 2) @ p).mean(0)
            average = p @ self.q[i].T
            self.lost[i] = (m - average).view(g.shape)
            found.append(average.view(g.shape[1:]))
        return found


def reducers(workers: int, shapes: list[torch.Size], device: torch.device) -> dict[str, tuple[float, Callable]]:
    """Name -> (bits per coordinate, reduce(gradients [workers, ...] of each parameter, step) -> averages)."""

    def on_flat(reduce: Callable) -> Callable:
        def run(gradients: list[torch.Tensor], step: int) -> list[torch.Tensor]:
            flat = torch.cat([g.flatten(1) for g in gradients], 1)
            parts = reduce(flat, step).split([s.numel() for s in shapes])
            return [part.view(s) for part, s in zip(parts, shapes, strict=True)]

        return run

    def bf16(flat: torch.Tensor, step: int) -> torch.Tensor:
        total = torch.zeros_like(flat[0], dtype=torch.bfloat16)
        for row in flat:  # a ring rounds every partial sum
            total = total + (row / workers).bfloat16()
        return total.float()

    def dynamiq(bits: float, topology: str, widths: str) -> tuple[float, Callable]:
        def run(flat: torch.Tensor, step: int) -> torch.Tensor:
            # One sink for all coordinates errs as much as one per worker, and takes fewer calls.
            return simulate.dynamiq(
                flat.__getitem__, workers, topology, bits, widths, step=step, chunks=1, scale=1 / workers
            )

        return bits, on_flat(run)

    def baseline(name: str, topology: str) -> tuple[float, Callable]:
        codec = CODECS[name]
        return codec.bits, on_flat(
            lambda flat, _: simulate.baseline(flat.__getitem__, workers, topology, codec) / workers
        )

    power = PowerSGD(4, shapes, workers, device)
    return {
        "fp32": (32, on_flat(lambda flat, _: flat.mean(0))),
        "bf16": (16, on_flat(bf16)),
        "dynamiq 5 bits": dynamiq(5, "direct", "fine"),
        "dynamiq 4 bits": dynamiq(4, "direct", "fine"),
        "dynamiq 3 bits": dynamiq(3, "direct", "fine"),
        "dynamiq 5 bits, paper, ring": dynamiq(5, "ring", "paper"),
        "fp8 direct": baseline("fp8", "direct"),
        "mxfp8 ring": baseline("mxfp8", "ring"),
        "int4 direct": baseline("int4", "direct"),
        "mxfp4 ring": baseline("mxfp4", "ring"),
        "powersgd rank 4": (power.bits, lambda gradients, _: power(gradients)),
    }


def finish(device: torch.device) -> float:
    """The time when the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(args: argparse.Namespace, name: str, seed: int) -> dict:
    torch.set_num_threads(1)
    whole = corpus.load()
    text, held_out = whole.tensor_split((len(whole) * 9 // 10,))
    device = torch.device(args.device)
    torch.manual_seed(seed)
    model = GPT(args.width, args.layers, args.heads, args.context).to(device)
    names = [n for n, _ in model.named_parameters()]
    parameters = [p.detach().clone() for p in model.parameters()]
    shapes = [p.shape for p in parameters]
    bits, reduce = reducers(args.workers, shapes, device)[name]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(values: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return functional_call(model, dict(zip(names, values, strict=True)), (tokens,))

    gradients_of = vmap(grad_and_value(loss_of), in_dims=(None, 0))
    evaluation = corpus.batch(held_out, HELD_OUT_ROWS, args.context, seed=1, step=0, rank=0).to(device)
    losses, evaluated, spent, computing = [], [], 0.0, []
    start = time.perf_counter()
    for step in range(args.steps):
        ramp = min(1.0, (step + 1) / RAMP)
        cosine = 0.55 + 0.45 * torch.cos(torch.tensor(torch.pi * step / args.steps)).item()
        optimizer.param_groups[0]["lr"] = args.learning_rate * ramp * cosine
        rows = [
            corpus.batch(text, args.rows, args.context, seed=seed, step=step, rank=worker)
            for worker in range(args.workers)
        ]
        begin = finish(device)
        gradients, loss = gradients_of(parameters, torch.stack(rows).to(device))
        before = finish(device)
        computing.append(before - begin)
        for p, g in zip(parameters, reduce(list(gradients), step), strict=True):
            p.grad = g
        spent += finish(device) - before
        optimizer.step()
        losses.append(loss.mean())
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == args.steps:
            with torch.no_grad():
                evaluated.append([step + 1, loss_of(parameters, evaluation).item()])
    curve = torch.stack(losses).cpu().view(-1)
    tail = min(50, args.steps)
    return {
        "method": name,
        "seed": seed,
        "bits": bits,
        "parameters": sum(s.numel() for s in shapes),
        "final_loss": evaluated[-1][1],
        "train_loss_tail": float(curve[-tail:].mean()),
        "evaluated": evaluated,
        "losses": [round(v, 5) for v in curve[:: max(1, args.steps // 100)].tolist()],
        "seconds": time.perf_counter() - start,
        "seconds_reducing": spent,
        "seconds_computing": statistics.median(computing) / args.workers,
        "wire_bits": 2 * (args.workers - 1) / args.workers * bits * sum(s.numel() for s in shapes),
    }


COLUMNS = [
    ("method", "method", ">30s"),
    ("seed", "seed", "d"),
    ("bits", "bits", ".2f"),
    ("final_loss", "final loss", ".4f"),
    ("train_loss_tail", "train loss", ".4f"),
    ("seconds", "seconds", ".1f"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=2, help="per worker and step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rewritten after every run")
    args = parser.parse_args()
    known = reducers(1, [torch.Size([2, 2])], torch.device("cpu"))
    for name in args.methods or []:
        if name not in known:
            parser.error(f"--methods: {name!r} is none of {list(known)}")
    table = harness.Table(COLUMNS)
    shape = {k: getattr(args, k) for k in ("workers", "steps", "rows", "context", "width", "layers", "heads")}
    facts = machine.describe(args.device) | {"what": "dynamiq_training", "learning_rate": args.learning_rate} | shape
    names, seeds = zip(*itertools.product(args.methods or known, args.seeds), strict=True)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for run in pool.map(train, itertools.repeat(args), names, seeds):
            table.add(run)
            harness.write_json(args.json, facts | {"runs": table.rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
