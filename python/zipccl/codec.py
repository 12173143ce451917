"""Tensors to frames and back ("section" here means the ZipCCL paper, arXiv 2604.27844)."""

from __future__ import annotations

import os

import torch

from zipccl import _C

_isa = os.environ.get("ZIPCCL_ISA")
if _isa is not None and _isa not in _C.isas():
    raise ValueError(f"ZIPCCL_ISA must be one of {tuple(sorted(_C.isas()))} on this processor, not {_isa!r}")


def compress(
    tensor: torch.Tensor, code: str = "fast", *, layout: str = "compact", checksum: bool = True
) -> torch.Tensor:
    """Puts a tensor into a frame (docs/format.md). Every bit comes back, whatever the values.

    Args:
        tensor: any shape, stride and dtype, on the CPU or on CUDA.
        code: ``"fast"``, ZipCCL's 3-bit exponent codes with a window per tile of 1024 values (section 4.1): bf16 is
            compressed, other dtypes travel raw. ``"dense"``, levels of 2-bit codes: slower, 4 % smaller on bf16, and
            for every floating-point dtype; fp32 and fp64 numbers that a shorter type holds cost what that one costs.
            Of other dtypes, tiles of equal values vanish. Or ``"raw"``.
        layout: ``"compact"``, or, for fast, ``"split"``: the static part, whose size follows from dtype and count, lies
            in front of the dynamic part (ZipCCL's Design 2, section 5.1). Or ``"packed"``: units in front as well, but
            with no room for most constant tiles, so hardly larger than compact, and faster to make on CUDA where
            tensors are large: compact frames of 24 * 2**20 values and more become packed. Dense frames have no such
            parts, and stay as they are.
        checksum: the frame carries a checksum of its payload, so that any damage is noticed.

    Returns:
        The frame: uint8, 1-D, on the tensor's device, never more than ``1/512`` and 192 bytes larger than the tensor
        (dense frames of one-byte values: ``1/256``; packed fast frames of bf16: 384 bytes more; split ones: 384 bytes
        more for every 1024 values begun, so about 1.19 times a large tensor).
        CPU and CUDA make the same bytes. On CUDA the call waits for the frame's size.

    Raises:
        TypeError: not a dense tensor, or of a dtype that frames do not know (quantised types).
        ValueError: an unknown code or layout.
        Error: this build has no codec for the tensor's device.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        what = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"compress takes a dense torch.Tensor, not {what}")
    return _C.compress(tensor, code, layout, checksum)


def decompress(frame: torch.Tensor) -> torch.Tensor:
    """The values of a frame: 1-D, of the dtype and count they were compressed with, on the frame's device.

    ``frame`` may be longer than the frame in it. On CUDA the call waits until the frame is known to be sound.

    Raises:
        FrameError: the frame is corrupt, truncated, or of a newer version; the text says which.
        TypeError: ``frame`` is not a 1-D uint8 tensor.
        Error: this build has no codec for the frame's device.
    """
    if not isinstance(frame, torch.Tensor):
        raise TypeError(f"a frame is a 1-D tensor of torch.uint8, not {type(frame).__name__}")
    return _C.decompress(frame)
