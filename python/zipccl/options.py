"""Options of a zipccl process group ("section" here means the ZipCCL paper, arXiv 2604.27844)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

MODES = ("auto", "zip", "raw")
CODES = ("auto", "fast", "dense")
_NUMBERS = {"min_bytes": ("bytes", 0, 63), "max_sms": ("multiprocessors", 1, 31)}  # unit, least, bits
COLLECTIVES = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce")
WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(init=False)
class Options:
    """How the collectives of a group travel. Pass it as ``pg_options``; it must be the same on every rank.

    Fields are given by name. What is not given is taken from the environment variable ``ZIPCCL_<FIELD>`` where that is
    set (``ZIPCCL_ALL_GATHER=zip``, ``ZIPCCL_MIN_BYTES=65536``, ``ZIPCCL_WIRE_DTYPE=bfloat16``, ``ZIPCCL_CHECKSUM=1``).

    Args:
        all_gather, all_to_all, broadcast, scatter, gather: ``"auto"`` zips where it is expected to be faster on this
            link, ``"zip"`` always, ``"raw"`` never. Lossless in every case.
        reduce_scatter, all_reduce: the same, but ``"raw"`` by default: zipped they are the fp32 sum in rank order,
            rounded once (section 4.2), which has other bits than the inner backend's sum. SUM, AVG and PREMUL_SUM of
            fp32, bf16 and fp16; everything else is raw.
        code: ``"fast"``, ZipCCL's 3-bit exponent code (section 4.1), for bf16; ``"dense"``, 4 % smaller and slower, for
            slow links, and for every floating-point dtype; ``"auto"`` is the one of them that takes less time for bf16
            on this link, once that is measured (an ``"auto"`` collective of 1 MiB or more measures it), and ``"fast"``
            until then.
        all_to_all_design: ``1`` (sizes, then frames), ``2`` (at once what frames are expected to have, then what
            they have more; after section 5.1), or ``"auto"``, which times both.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16`` (or their names): zipped reductions of fp32 inputs travel in
            this dtype. Rounds every input once; the sum stays fp32.
        min_bytes: calls of fewer bytes (all-gather: gathered bytes) stay raw. Default: 1 MiB for ``"auto"``; for
            ``"zip"`` 64 KiB in reductions and 0 elsewhere.
        max_sms: multiprocessors of the GPU that the codec uses at a time, for calls that overlap with computation.
            Default: all of them. The one field that may differ between ranks.
        checksum: frames carry a checksum and every call waits until it is verified.
        inner: inner backends, ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``. Default: gloo for CPU tensors and,
            where a GPU is visible, NCCL for CUDA tensors.
        nccl_options: ``ProcessGroupNCCL.Options`` for the inner NCCL backend.

    Raises:
        TypeError: for a field that is none of the above.
        ValueError: for a value that is none of the above.
    """

    all_gather: str = "auto"
    all_to_all: str = "auto"
    broadcast: str = "auto"
    scatter: str = "auto"
    gather: str = "auto"
    reduce_scatter: str = "raw"
    all_reduce: str = "raw"
    code: str = "auto"
    all_to_all_design: str | int = "auto"
    wire_dtype: torch.dtype | None = None
    min_bytes: int | None = None
    max_sms: int | None = None
    checksum: bool = False
    inner: str | None = None
    nccl_options: Any = None

    def __init__(self, **given: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        unknown = sorted(given.keys() - fields.keys())
        if unknown:
            raise TypeError(f"zipccl.Options has no field {unknown[0]!r}; it has {', '.join(fields)}")
        for name, field in fields.items():
            variable = VARIABLES.get(name, "")
            if name in given:
                self._set(name, name, given[name])
            elif variable in os.environ:
                self._set(name, variable, _parse(name, variable, os.environ[variable]))
            else:
                setattr(self, name, field.default)

    def _set(self, name: str, said: str, value: Any) -> None:
        """Checks and sets one field. said: what to call it in errors, the field or the variable."""
        if name in COLLECTIVES and value not in MODES:
            raise ValueError(f"{said} must be one of {MODES}, not {value!r}")
        if name == "code" and value not in CODES:
            raise ValueError(f"{said} must be one of {CODES}, not {value!r}")
        if name == "all_to_all_design" and (isinstance(value, bool) or value not in ("auto", 1, 2)):
            raise ValueError(f'{said} must be "auto", 1 or 2, not {value!r}')
        if name == "wire_dtype":
            value = WIRE_DTYPES.get(value, value) if isinstance(value, str) else value
            if value not in (None, *WIRE_DTYPES.values()):
                raise ValueError(f"{said} must be torch.bfloat16, torch.float16 or None, not {value!r}")
        if name in _NUMBERS and value is not None:
            unit, least, bits = _NUMBERS[name]
            if type(value) is not int or value < least:
                raise ValueError(f"{said} must be a number of {unit}, {least} or more, not {value!r}")
            if value >= 1 << bits:
                raise ValueError(f"{said} must be below 2^{bits}, not {value!r}")
        if name == "nccl_options" and value is not None and not type(value).__module__.startswith("torch"):
            raise ValueError(f"{said} must be ProcessGroupNCCL.Options, not {value!r}")
        if name == "checksum" and type(value) is not bool:
            raise ValueError(f"{said} must be True or False, not {value!r}")
        setattr(self, name, value)
        if name == "inner":
            self._check_inner(said)

    def _check_inner(self, said: str) -> None:
        try:
            self.inner_backends()
        except ValueError:
            known = '"gloo", "nccl" or "cpu:gloo,cuda:nccl"'
            raise ValueError(f"{said} must be {known}, not {self.inner!r}") from None

    def inner_backends(self) -> dict[str, str]:
        """Device type to inner backend name, as ``inner`` says."""
        known = {"cpu": "gloo", "cuda": "nccl"}
        if self.inner is None:
            return known
        chosen = {}
        for part in str(self.inner).split(","):
            device, _, name = part.strip().rpartition(":")
            device = device or {"gloo": "cpu", "nccl": "cuda"}.get(name, "")
            if known.get(device) != name:
                raise ValueError(f"{self.inner!r} names no inner backends")
            chosen[device] = name
        return chosen

    def native(self) -> dict[str, Any]:
        """As zipccl._C takes them."""
        return {
            "modes": {name: getattr(self, name) for name in COLLECTIVES},
            "code": self.code,
            "all_to_all_design": 0 if self.all_to_all_design == "auto" else self.all_to_all_design,
            "wire_dtype": self.wire_dtype,
            "min_bytes": self.min_bytes,
            "max_sms": self.max_sms,
            "checksum": self.checksum,
            "log_decisions": _debug(),
        }

    def fingerprint(self) -> str:
        """What must be equal on all ranks of a group."""
        inner = ",".join(f"{device}:{name}" for device, name in sorted(self.inner_backends().items()))
        names = [field.name for field in dataclasses.fields(self)]
        said = [f"{name}={getattr(self, name)}" for name in names if name not in ("inner", "max_sms", "nccl_options")]
        return " ".join([*said, f"inner={inner}"])


# Fields that the environment can set, and the names of their variables there.
VARIABLES = {
    field.name: f"ZIPCCL_{field.name.upper()}" for field in dataclasses.fields(Options) if field.name != "nccl_options"
}


def _debug() -> bool:
    """Whether ZIPCCL_DEBUG asks for decisions to be explained."""
    asked = os.environ.get("ZIPCCL_DEBUG", "")
    if asked.upper() not in ("", "OFF", "INFO"):
        raise ValueError(f"ZIPCCL_DEBUG must be INFO or OFF, not {asked!r}")
    return asked.upper() == "INFO"


def _parse(name: str, variable: str, text: str) -> Any:
    if name in _NUMBERS:
        if not text.isdigit():
            raise ValueError(f"{variable} must be a number of {_NUMBERS[name][0]}, not {text!r}")
        return int(text)
    if name == "checksum":
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(f"{variable} must be 0 or 1, not {text!r}")
        return text.lower() in ("1", "true")
    if name == "wire_dtype":
        if text not in WIRE_DTYPES:
            raise ValueError(f"{variable} must be one of {tuple(WIRE_DTYPES)}, not {text!r}")
        return WIRE_DTYPES[text]
    if name == "all_to_all_design" and text in ("1", "2"):
        return int(text)
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
