"""Trains a small GPT with FSDP2 twice, over the inner backend and over zipccl, and compares: same losses, fewer bytes.

    python examples/train_gpt.py                               2 ranks on this machine: on its GPU, else on its CPU
    python examples/train_gpt.py --link 1gbit                  the same over a 1 Gbit/s link (Linux, root, iproute2)
    python examples/train_gpt.py --ranks 4 --ranks-per-gpu 4   four ranks on one GPU, over sockets
    torchrun --nproc-per-node 8 examples/train_gpt.py          one rank per GPU

The text is the source of Python's standard library. Parameters are gathered in bf16 and gradients reduced in fp32. The
zipccl run forces every all-gather through compression, so that there is something to see; by default ("auto") zipccl
compresses only where that is faster. The two runs are separate processes that take turns of a few steps.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import corpus
import launch
import machine
import report
import torch
import torch.distributed as dist
import zipccl
from dump import dump
from gpt import GPT
from netns import LinkError, ShapedLink
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROWS, CONTEXT = 2, 64  # per rank and step
SEED = 1234
LEARNING_RATE, RAMP = 1e-3, 10  # reached after RAMP steps
TURN = 5  # steps after which the other run has its turn
WARMUP = 3  # steps left out of the timing
AUTO_CALLS = 12  # after which "auto" has timed a message of one size both ways
TIMEOUT = timedelta(seconds=120)


# ---- A rank ---------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> dict:
    """One phase on one rank. Returns what the parent compares."""
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_GPU"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    init_process_group(args.phase, args.device)

    model = shard(GPT(context=CONTEXT).to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    text = corpus.load()

    def batch(step: int) -> torch.Tensor:
        return corpus.batch(text, ROWS, CONTEXT, seed=SEED, step=step, rank=rank).to(device)

    def train_step(step: int) -> float:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP)
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses, times = [], []
    for step in range(args.steps):
        if step % TURN == 0:
            launch.wait_for_turn()
        start = time.perf_counter()
        losses.append(train_step(step))
        times.append(1e3 * (time.perf_counter() - start))
        launch.tell({"step": step + 1, "loss": losses[-1], "ms": times[-1]})

    result = {
        "losses": losses,
        "loss_bits": torch.tensor(losses, dtype=torch.float32).view(torch.int32).tolist(),
        "weights_sha256": weights_digest(model),
        "ms_per_step": statistics.median(times[WARMUP:] or times),
        "ms_by_turn": [statistics.median(times[i : i + TURN]) for i in range(TURN, args.steps, TURN)],  # but the first
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if args.phase == "zipccl":
        largest = max(model.parameters(), key=lambda p: p.to_local().numel()).to_local().detach()
        result["all_gather"] = traffic(largest.to(torch.bfloat16).flatten())
    if args.dump:
        dump(args.dump, model, batch(args.steps), lambda: train_step(args.steps))
    dist.barrier()
    dist.destroy_process_group()
    return result


def init_process_group(phase: str, device: str) -> None:
    store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(phase, store)  # under torchrun both phases share the agent's store
    zipped = phase == "zipccl"
    dist.init_process_group(
        "zipccl" if zipped else launch.inner_name(device),
        pg_options=zipccl.Options(all_gather="zip", min_bytes=0) if zipped else None,
        store=store, rank=rank, world_size=world, timeout=TIMEOUT,
    )  # fmt: skip


def shard(model: GPT, device: torch.device) -> GPT:
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return model


def weights_digest(model: torch.nn.Module) -> str:
    """Of every bit of this rank's shards of the fp32 master weights."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.to_local().detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def traffic(values: torch.Tensor) -> dict:
    """What the all-gathers brought to this rank, and what "auto" makes of messages of their mean size.

    values: bf16 values as they are gathered.
    """
    moved = zipccl.stats()["all_gather"]
    mean_size = moved["raw_bytes"] // (moved["calls"] * (dist.get_world_size() - 1))
    shard = values.repeat(mean_size // (2 * len(values)) + 1)[: mean_size // 2]
    gathered = shard.new_empty(dist.get_world_size() * len(shard))
    with zipccl.override(all_gather="auto"):
        for _ in range(AUTO_CALLS):
            dist.all_gather_into_tensor(gathered, shard)
    with zipccl.override(all_gather="auto"):
        advice = zipccl.explain(op="all_gather", bytes=mean_size)
    counters = {name: moved[name] for name in ("calls", "zipped_calls", "raw_bytes", "wire_bytes", "seconds")}
    return counters | {"mean_bytes_per_rank": mean_size, "auto": advice.choice, "auto_reason": advice.reason}


# ---- The parent -----------------------------------------------------------------------------------------------


class Progress:
    """One bar for both runs: redrawn in place on a terminal, a line every ten steps elsewhere."""

    def __init__(self, names: list[str], steps: int, quiet: bool):
        self.latest = {name: {"step": 0, "loss": math.nan, "ms": math.nan} for name in names}
        self.steps, self.quiet, self.printed = steps, quiet, 0

    def __call__(self, name: str, rank: int, message: dict) -> None:
        if rank != 0 or self.quiet:
            return
        self.latest[name] = message
        step = min(m["step"] for m in self.latest.values())  # that all runs have done
        full = 20 * sum(m["step"] for m in self.latest.values()) // (self.steps * len(self.latest))
        runs = "".join(f"   {n}: loss {m['loss']:.4f}, {m['ms']:.0f} ms" for n, m in self.latest.items())
        line = f"{'#' * full}{'.' * (20 - full)}  step {step:>{len(str(self.steps))}}/{self.steps}{runs}"
        if sys.stdout.isatty():
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line}", end="\n" if step == self.steps else "", flush=True)
        elif step > self.printed and (step % 10 == 0 or step == self.steps):
            self.printed = step
            print(line, flush=True)


def run_both(args: argparse.Namespace, cluster: launch.Cluster) -> dict[str, dict[int, dict]]:
    """The inner backend's run and zipccl's, or the one that was asked for: name of the backend -> rank -> result."""
    phases = {"inner": launch.inner_name(args.device), "zipccl": "zipccl"}
    if args.backend != "both":
        phases = {args.backend: phases[args.backend]}
    commands = {}
    for phase, name in phases.items():
        commands[name] = [__file__, "--phase", phase, "--steps", str(args.steps), "--device", args.device]
    if args.dump:
        commands[name] += ["--dump", str(args.dump)]
    return launch.run(commands, cluster, Progress(list(commands), args.steps, quiet=not cluster.prints))


def main() -> int:
    args = arguments()
    if args.phase:
        launch.rank_main(lambda: train(args))
    launch.exit_cleanly_on_sigterm()
    try:
        with ShapedLink(args.link) if args.link else contextlib.nullcontext() as link:
            cluster = launch.Cluster(args.ranks, args.device, args.ranks_per_gpu, link, args.transport)
            if cluster.prints:
                print(introduction(args, cluster), flush=True)
            results = run_both(args, cluster)
    except (LinkError, launch.RankDied) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    comparison = report.compare(results)
    if cluster.prints:
        print("\n" + report.text(args, cluster, results, comparison))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            facts = machine.describe(args.device) | {
                "what": "train_gpt", "ranks": cluster.world, "ranks_per_gpu": args.ranks_per_gpu, "link": args.link,
                "transport": args.transport, "steps": args.steps, "rows_per_rank": ROWS, "context": CONTEXT,
                "seed": SEED,
            }  # fmt: skip
            args.json.write_text(json.dumps(facts | {"bit_identical": comparison, "runs": results}, indent=1) + "\n")
    elif not all(comparison.values()):
        print(f"rank {cluster.ranks[0]}: the two runs differ: {comparison}", file=sys.stderr)
    return 0 if all(comparison.values()) else 1


def introduction(args: argparse.Namespace, cluster: launch.Cluster) -> str:
    parameters = sum(p.numel() for p in GPT(context=CONTEXT).parameters())
    if args.device == "cuda":
        where = f"{args.ranks_per_gpu} per GPU" if args.ranks_per_gpu > 1 else "one per GPU"
    else:
        where = "on the CPU"
    if args.link:
        where += f", in two network namespaces joined by a {args.link} link"
    elif args.transport == "sockets":
        where += ", over sockets"
    text = (
        f"A byte-level GPT of {parameters / 1e6:.1f} M parameters learns to write Python: FSDP2, bf16, AdamW, "
        f"{args.steps} steps.\n{cluster.world} ranks {where}."
    )
    if args.backend == "both":
        text += (
            f"\nIt is trained twice from the same seed, over {launch.inner_name(args.device)} and over zipccl, "
            f"in turns of {TURN} steps so that both meet the same machine."
        )
    return text + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    launch.add_arguments(parser)
    parser.add_argument("--steps", type=launch.positive, default=50)
    parser.add_argument(
        "--backend", choices=["both", "inner", "zipccl"], default="both", help="one of the two, or both"
    )
    parser.add_argument("--dump", type=Path, metavar="DIR", help="save weights, gradients and activations: dump.py")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--phase", help=argparse.SUPPRESS)  # set in the processes this script starts
    args = parser.parse_args()
    if not args.phase:
        launch.resolve(args, parser)
    return args


if __name__ == "__main__":
    sys.exit(main())
