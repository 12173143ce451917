"""Options of a zipccl process group."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

MODES = ("auto", "zip", "raw")
CODES = ("auto", "fast")


@dataclasses.dataclass
class Options:
    """How the collectives of a group travel. Pass it as ``pg_options``; it must be the same on every rank.

    Every field left at its default is taken from the environment variable ``ZIPCCL_<FIELD>`` where that is set
    (``ZIPCCL_ALL_GATHER=zip``, ``ZIPCCL_MIN_BYTES=65536``, ``ZIPCCL_CHECKSUM=1``).

    Args:
        all_gather: ``"auto"`` zips where it is expected to be faster on this link, ``"zip"`` always, ``"raw"`` never.
            Lossless either way.
        code: ``"fast"``, ZipCCL's 3-bit exponent code (section 4.1); ``"auto"`` is ``"fast"``.
        min_bytes: calls that gather fewer bytes stay raw. Default: 1 MiB for ``"auto"``, 0 for ``"zip"``.
        checksum: frames carry a checksum and every call waits until it is verified.
        inner: inner backends, ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``. Default: gloo for CPU tensors and,
            where a GPU is visible, NCCL for CUDA tensors.
        nccl_options: ``ProcessGroupNCCL.Options`` for the inner NCCL backend.

    Raises:
        ValueError: for a value that is none of the above.
    """

    all_gather: str = "auto"
    code: str = "auto"
    min_bytes: int | None = None
    checksum: bool = False
    inner: str | None = None
    nccl_options: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            variable = f"ZIPCCL_{field.name.upper()}"
            if field.name != "nccl_options" and getattr(self, field.name) == field.default and variable in os.environ:
                setattr(self, field.name, _parse(field.name, variable, os.environ[variable]))
        if self.all_gather not in MODES:
            raise ValueError(f"all_gather must be one of {MODES}, not {self.all_gather!r}")
        if self.code not in CODES:
            raise ValueError(f"code must be one of {CODES}, not {self.code!r}")
        if self.min_bytes is not None and self.min_bytes < 0:
            raise ValueError(f"min_bytes must not be negative, not {self.min_bytes}")
        self.inner_backends()

    def inner_backends(self) -> dict[str, str]:
        """Device type to inner backend name, as ``inner`` says."""
        known = {"cpu": "gloo", "cuda": "nccl"}
        if self.inner is None:
            return known
        chosen = {}
        for part in self.inner.split(","):
            device, _, name = part.strip().rpartition(":")
            device = device or {"gloo": "cpu", "nccl": "cuda"}.get(name, "")
            if known.get(device) != name:
                raise ValueError(f'inner must be "gloo", "nccl" or "cpu:gloo,cuda:nccl", not {self.inner!r}')
            chosen[device] = name
        return chosen

    def fingerprint(self) -> str:
        """What must be equal on all ranks of a group."""
        inner = ",".join(f"{device}:{name}" for device, name in sorted(self.inner_backends().items()))
        return (
            f"all_gather={self.all_gather} code={self.code} min_bytes={self.min_bytes} checksum={self.checksum} "
            f"inner={inner}"
        )


def _parse(name: str, variable: str, text: str) -> Any:
    if name == "min_bytes":
        if not text.isdigit():
            raise ValueError(f"{variable} must be a number of bytes, not {text!r}")
        return int(text)
    if name == "checksum":
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(f"{variable} must be 0 or 1, not {text!r}")
        return text.lower() in ("1", "true")
    return text


def from_pg_options(pg_options: Any) -> Options:
    """``pg_options`` as callers pass them: ours, NCCL's (Megatron does), or none."""
    if pg_options is None:
        return Options()
    if isinstance(pg_options, Options):
        return pg_options
    if type(pg_options).__module__.startswith("torch"):
        return Options(nccl_options=pg_options)
    raise TypeError(f"pg_options must be zipccl.Options or ProcessGroupNCCL.Options, not {type(pg_options).__name__}")
