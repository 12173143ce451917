"""Gradients of many workers for the error benchmarks: of a file, or drawn as the paper's Appendix E has them."""

from __future__ import annotations

from pathlib import Path

import torch

SUPER_GROUP = 256


class FileGradients:
    """Rows of a file of little-endian bf16: the same coordinates on each of its workers."""

    def __init__(self, path: Path, workers: int):
        values = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.bfloat16)
        self.rows = values.view(workers, -1).float()
        self.name, self.most = path.name, workers

    def __call__(self, worker: int) -> torch.Tensor:
        return self.rows[worker]


class SyntheticGradients:
    """Norms of super-groups from a mixture of two log-normals (Appendix E, K = 2), coordinates Gaussian, independent
    between workers but for a share of the variance that all have in common (the paper has none)."""

    most = None

    def __init__(self, super_groups: int, common: float = 0.0, seed: int = 0, device: str = "cpu"):
        draw = torch.Generator().manual_seed(seed)
        small = torch.rand(super_groups, generator=draw) < 0.21
        mean = torch.where(small, -16.41, -3.99)
        sigma = torch.where(small, 4.63, 1.22)
        norms = torch.exp(mean + sigma * torch.randn(super_groups, generator=draw))
        self.scale = (norms / SUPER_GROUP**0.5).repeat_interleave(SUPER_GROUP).to(device)
        self.seed, self.device = seed, device
        self.private = (1 - common) ** 0.5
        self.shared = common**0.5 * self._noise(2**31) if common else None
        self.name = f"synthetic, {super_groups} super-groups, {common:g} of the variance common"

    def _noise(self, worker: int) -> torch.Tensor:
        draw = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + worker)
        return torch.randn(len(self.scale), generator=draw, device=self.device)

    def __call__(self, worker: int) -> torch.Tensor:
        noise = self.private * self._noise(worker)
        return self.scale * (noise if self.shared is None else noise + self.shared)
