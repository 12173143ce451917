"""What the benchmarks share: sizes, data, tables, and the examples' helpers for starting ranks."""

from __future__ import annotations

import abc
import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# launch.py, machine.py and netns.py live beside the demo.
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

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
    parser.add_argument("--factor", type=int, default=4, help="between one size and the next (default 4)")


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


# ---- Output ---------------------------------------------------------------------------------------------------


class Table:
    """Prints rows of a JSON-able dict as they come. Columns: (key, heading, format)."""

    def __init__(self, columns: list[tuple[str, str, str]]):
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def head(self) -> None:
        print("".join(f"{heading:>{self._width(heading)}}" for _, heading, _ in self.columns), flush=True)

    def add(self, row: dict[str, Any]) -> None:
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


def write_json(path: Path | None, facts: dict) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")
