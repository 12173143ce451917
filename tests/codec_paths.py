"""Every way of the codec through Python, as one interface over bytes: CPU scalar, AVX2 and AVX-512, CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import zipccl
from zipccl import _C


@dataclass(frozen=True)
class Path:
    device: str
    isa: str

    def compress(self, t: torch.Tensor, code: str = "fast", layout: str = "compact", checksum: bool = True) -> bytes:
        frame = _C.compress(t.to(self.device), code, layout, checksum, self.isa)
        assert frame.dtype == torch.uint8 and frame.dim() == 1 and frame.device.type == self.device
        return frame.cpu().numpy().tobytes()

    def decompress(self, frame: bytes) -> torch.Tensor:
        out = _C.decompress(as_tensor(frame).to(self.device), self.isa)
        assert out.dim() == 1 and out.device.type == self.device
        return out.cpu()


def cpu_path(isa: str):
    lacking = pytest.mark.skipif(isa not in _C.isas(), reason=f"this processor has no {isa}")
    return pytest.param(Path("cpu", isa), id=isa, marks=lacking)


PATHS = [
    *map(cpu_path, ("scalar", "avx2", "avx512")),
    pytest.param(Path("cuda", "best"), id="cuda", marks=pytest.mark.cuda),
]


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def raw_bytes(t: torch.Tensor) -> bytes:
    """The values' bytes in logical order: what must come back."""
    t = t.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return t.view(torch.uint8).numpy().tobytes() if t.numel() else b""


def bf16(bits) -> torch.Tensor:
    """bf16 values from their bits."""
    return torch.as_tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def error_of(path: Path, frame: bytes) -> str:
    """The text of the FrameError that a broken frame must raise."""
    with pytest.raises(zipccl.FrameError) as raised:
        path.decompress(frame)
    return str(raised.value)
