"""Tensors that every rank can make alike: what a rank passes to a collective is a function of a seed."""

from __future__ import annotations

import torch

BF16 = torch.bfloat16
DTYPES = [
    dtype
    for name in (
        "uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 complex32 complex64 "
        "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if (dtype := getattr(torch, name, None))
]
# gloo moves no other.
GLOO_DTYPES = [getattr(torch, name) for name in "uint8 int8 int32 int64 bool float16 bfloat16 float32 float64".split()]


def random_bits(seed: int, shape: int | tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    """Any bits, so NaNs of every payload, infinities and denormals; bool has two values only."""
    generator = torch.Generator().manual_seed(seed)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def weights(seed: int, shape: int | tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    """Values that compress."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values in every second place of a larger tensor."""
    room = torch.zeros(*t.shape, 2, dtype=t.dtype, device=t.device)[..., 0]
    return room.copy_(t)


def frame_bytes(t: torch.Tensor, code: str = "fast") -> int:
    import zipccl

    return zipccl.compress(t, code=code).numel()
