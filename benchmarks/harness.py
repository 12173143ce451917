"""What the benchmarks share: sizes, data, tables, and the examples' helpers for starting ranks."""

from __future__ import annotations

import abc
import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# launch.py, machine.py and netns.py live beside the demo.
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

import launch  # noqa: E402
import machine  # noqa: E402
from netns import LinkError, ShapedLink  # noqa: E402

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


# ---- Sizes ----------------------------------------------------------------------------------------------------


def size(text: str) -> int:
    """Bytes of "65536", "64K", "1M", "1G" (powers of 1024)."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 65536, 64K, 1M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def show_size(n: int) -> str:
    for unit in ("G", "M", "K"):
        if n >= _UNITS[unit] and n % _UNITS[unit] == 0:
            return f"{n // _UNITS[unit]} {unit}iB"
    return f"{n} B"


def add_size_arguments(parser: argparse.ArgumentParser, smallest: str, largest: str) -> None:
    parser.add_argument("--min-bytes", type=size, default=size(smallest), help=f"default {smallest}")
    parser.add_argument("--max-bytes", type=size, default=size(largest), help=f"default {largest}")
    parser.add_argument("--factor", type=int, default=4, help="between one size and the next (default %(default)s)")


def sweep(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[int]:
    if args.factor < 2:
        parser.error("--factor: must be at least 2")
    if not 2 <= args.min_bytes <= args.max_bytes:
        parser.error("--min-bytes: must be at least 2 and not above --max-bytes")
    sizes, n = [], args.min_bytes
    while n <= args.max_bytes:
        sizes.append(n)
        n *= args.factor
    return sizes


# ---- Data -----------------------------------------------------------------------------------------------------


class Values:
    """bf16 values that look like training's: of a file, or Gaussian rows whose scales differ as weights' do."""

    def __init__(self, file: Path | None = None):
        if file:
            self.name = file.name
            self.base = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.bfloat16)
        else:
            self.name = "synthetic: Gaussian rows of 1024, log-normal scales"
            generator = torch.Generator().manual_seed(1)
            scales = 0.02 * torch.randn(8192, 1, generator=generator).exp()
            self.base = (scales * torch.randn(8192, 1024, generator=generator)).bfloat16().flatten()

    def take(self, count: int, rank: int = 0) -> torch.Tensor:
        """`count` values, repeating the base as often as needed; each rank starts elsewhere in it."""
        start = rank * 1_000_003 % len(self.base)
        repeats = -(-(start + count) // len(self.base))
        return self.base.repeat(repeats)[start : start + count].clone()


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor", type=existing_file, metavar="FILE", help="raw little-endian bf16 values; default: synthetic ones"
    )


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file() or path.stat().st_size < 2 or path.stat().st_size % 2:
        raise argparse.ArgumentTypeError(f"{text}: not a file of 16-bit values")
    return path


def mismatches(a: torch.Tensor, b: torch.Tensor) -> int:
    """Values whose bits differ. Of sums (fp32) a NaN equals a NaN: IEEE 754 leaves its payload open."""
    if a.dtype == torch.float32:
        return int(((a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())).sum())
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


# ---- Collectives ----------------------------------------------------------------------------------------------


class Collective(abc.ABC):
    """One collective at one size on one rank. A subclass fills in the five methods and the two texts."""

    name: str  # as zipccl.stats() and zipccl.Options call it
    size_is: str  # what `nbytes` counts
    zip_options: dict[str, Any] = {}  # more fields of zipccl.Options than the collective's own
    exact: tuple[str, ...] = ("raw", "zip", "auto")  # groups whose result must be expected(), bit for bit
    output: torch.Tensor  # bf16 or fp32; what run() writes and expected() describes

    def __init__(self, nbytes: int, values: Values, rank: int, world: int, device: torch.device):
        self.nbytes, self.values, self.rank, self.world, self.device = nbytes, values, rank, world, device
        self.prepare()

    @abc.abstractmethod
    def prepare(self) -> None:
        """Makes the inputs and self.output."""

    @abc.abstractmethod
    def run(self, group: dist.ProcessGroup) -> None:
        """One call on that group."""

    @abc.abstractmethod
    def expected(self) -> torch.Tensor:
        """What self.output must hold, computed on this rank alone."""

    @abc.abstractmethod
    def bus_bytes(self) -> float:
        """Bytes that must cross the busiest link into a rank, as nccl-tests counts bus bandwidth."""


# ---- Scripts that start ranks of themselves -------------------------------------------------------------------


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    launch.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # set in the processes it starts


def rank_device(args: argparse.Namespace) -> torch.device:
    """Of this rank, and now the current one. On the CPU ranks take one thread each."""
    torch.set_num_threads(1)
    if args.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_GPU"]))
    torch.cuda.set_device(device)
    return device


def run_on_ranks(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    passed_on: list[str],
    show: Callable[[dict], None],
    introduction: Callable[[launch.Cluster], str] | None = None,
) -> dict:
    """Starts this script as ranks, with --worker and the arguments named in `passed_on`, and shows what rank 0 tells.

    Returns the facts of the run for --json. Ends the program where there is nothing more to say: after a failure, and
    on hosts that do not print.
    """
    launch.resolve(args, parser)
    launch.exit_cleanly_on_sigterm()
    command = [str(Path(sys.argv[0]).resolve()), "--worker"]
    for name in ("device", *passed_on):
        value = getattr(args, name)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            command += ["--" + name.replace("_", "-"), *map(str, values)]
    try:
        with ShapedLink(args.link) if args.link else contextlib.nullcontext() as link:
            cluster = launch.Cluster(args.ranks, args.device, args.ranks_per_gpu, link, args.transport)
            if cluster.prints and introduction:
                print(introduction(cluster), flush=True)
            launch.run({"benchmark": command}, cluster, lambda program, rank, row: show(row) if rank == 0 else None)
    except (LinkError, launch.RankDied) as error:
        print(f"\n{error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    if not cluster.prints:
        sys.exit(0)
    facts = machine.describe(args.device) | {"ranks": cluster.world, "ranks_per_gpu": args.ranks_per_gpu}
    return facts | {"link": args.link, "transport": args.transport, "inner": launch.inner_name(args.device)}


# ---- Output ---------------------------------------------------------------------------------------------------


class Table:
    """Prints rows of a JSON-able dict as they come, below a head. Columns: (key, heading, format)."""

    def __init__(self, columns: list[tuple[str, str, str]]):
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def _head(self) -> None:
        print("".join(f"{heading:>{self._width(heading)}}" for _, heading, _ in self.columns), flush=True)

    def add(self, row: dict[str, Any]) -> None:
        if not self.rows:
            self._head()
        self.rows.append(row)
        cells = []
        for key, heading, form in self.columns:
            value = row[key]
            text = "-" if value is None else show_size(value) if form == "size" else format(value, form)
            cells.append(f"{text:>{self._width(heading)}}")
        print("".join(cells), flush=True)

    @staticmethod
    def _width(heading: str) -> int:
        return max(10, len(heading) + 2)


class Tables:
    """A table for each collective that rows name."""

    def __init__(self, columns: list[tuple[str, str, str]], title: Callable[[str], str] = str):
        self.columns, self.title = columns, title
        self.tables: dict[str, Table] = {}

    def add(self, row: dict[str, Any]) -> None:
        name = row.pop("collective")
        if name not in self.tables:
            self.tables[name] = Table(self.columns)
            print(f"\n{self.title(name)}", flush=True)
        self.tables[name].add(row)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        return {name: table.rows for name, table in self.tables.items()}


def write_json(path: Path | None, facts: dict) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")
