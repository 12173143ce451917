"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch


def load(max_bytes: int = 4 << 20) -> torch.Tensor:
    """The first `max_bytes` of the standard library's top-level modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= max_bytes:
            break
        text += path.read_bytes()
    if len(text) < 1 << 16:
        raise SystemExit("this Python carries no source of its standard library, so there is no text to train on")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def batch(text: torch.Tensor, rows: int, length: int, *, seed: int, step: int, rank: int) -> torch.Tensor:
    """`rows` random stretches of length + 1 bytes, which depend on the arguments alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
