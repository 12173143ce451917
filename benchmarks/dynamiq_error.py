"""Error of a sum against bits per coordinate: DynamiQ by every topology, and the baselines.

    python benchmarks/dynamiq_error.py --gradients grads_bf16.bin --file-workers 8    real ones, up to 8 workers
    python benchmarks/dynamiq_error.py                                                synthetic, up to 64 workers
    python benchmarks/dynamiq_error.py --large                                        synthetic, 8,192 workers

Error is vNMSE, squared error over the squared norm of the exact sum, mean over --seeds. Bits count everything that
travels. Workers are simulated in one process (simulate.py), with the quantiser that real ranks use.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import harness
import machine
import simulate
import torch
from baselines import CODECS
from gradients import FileGradients, SyntheticGradients

TOPOLOGIES = ["direct", "butterfly", "ring"]
MOST_REMEMBERED = 1 << 28  # values
COLUMNS = [
    ("method", "method", "s"),
    ("topology", "topology", "s"),
    ("workers", "workers", "d"),
    ("bits", "bits", ".2f"),
    ("vnmse", "vNMSE", ".3e"),
    ("seconds", "seconds", ".1f"),
]


def remembered(own: simulate.Own, n: int) -> simulate.Own:
    """The same without making gradients anew, where there is memory for it."""
    if n * own(0).numel() > MOST_REMEMBERED:
        return own
    return [own(worker) for worker in range(n)].__getitem__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", type=harness.existing_file, metavar="FILE", help="bf16, one row per worker")
    parser.add_argument("--file-workers", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--bits", type=float, nargs="+", default=[3, 4, 5, 6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--super-groups", type=int, default=2048, help="of synthetic gradients")
    parser.add_argument("--common", type=float, default=0.2, help="share of the variance that workers have in common")
    parser.add_argument("--large", action="store_true", help="the paper's Table 7: 8,192 workers, independent")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rewritten after every row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.gradients:
        gradients = FileGradients(args.gradients, args.file_workers)
        args.workers = [n for n in args.workers if n <= gradients.most]
    else:
        gradients = SyntheticGradients(args.super_groups, 0.0 if args.large else args.common, device=args.device)
    if args.large:
        args.workers, args.seeds = [8192], 1
    print(f"gradients: {gradients.name}")
    table = harness.Table(COLUMNS)

    facts = machine.describe(args.device) | {"what": "dynamiq_error", "gradients": gradients.name}

    def measure(method: str, topology: str, n: int, bits: float, run, seeds: int, own: simulate.Own) -> None:
        start = time.perf_counter()
        errors = [simulate.vnmse(run(seed), own, n) for seed in range(seeds)]
        table.add({"method": method, "topology": topology, "workers": n, "bits": bits,
                   "vnmse": sum(errors) / seeds, "seconds": time.perf_counter() - start})  # fmt: skip
        harness.write_json(args.json, facts | {"rows": table.rows})

    chunks = 1 if args.large else None
    # A direct sum of thousands at once would hold all they have packed.
    topologies = ["butterfly", "ring"] if args.large else TOPOLOGIES
    for n in args.workers:
        own = remembered(gradients, n)
        for widths in ("fine", "paper"):
            for topology in topologies:
                for bits in args.bits:

                    def run(seed, own=own, n=n, widths=widths, topology=topology, bits=bits):
                        return simulate.dynamiq(own, n, topology, bits, widths, seed=seed, chunks=chunks)

                    measure(f"dynamiq-{widths}", topology, n, bits, run, args.seeds, own)
        names = ["mxfp8"] if args.large else CODECS
        for name in names:
            for topology in topologies:

                def run(seed, own=own, n=n, topology=topology, codec=CODECS[name]):
                    return simulate.baseline(own, n, topology, codec)

                measure(name, topology, n, CODECS[name].bits, run, 1, own)
    return 0


if __name__ == "__main__":
    sys.exit(main())
