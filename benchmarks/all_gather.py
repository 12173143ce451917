"""all_gather_into_tensor: every rank ends with every rank's values, in rank order."""

from __future__ import annotations

import harness
import torch
import torch.distributed as dist


class AllGather(harness.Collective):
    name = "all_gather"
    size_is = "each rank contributes"

    def prepare(self) -> None:
        count = self.nbytes // 2
        self.input = self.values.take(count, self.rank).to(self.device)
        self.output = torch.empty(self.world * count, dtype=torch.bfloat16, device=self.device)

    def run(self, group: dist.ProcessGroup) -> None:
        dist.all_gather_into_tensor(self.output, self.input, group=group)

    def expected(self) -> torch.Tensor:
        return torch.cat([self.values.take(self.nbytes // 2, rank) for rank in range(self.world)])

    def bus_bytes(self) -> float:
        return self.nbytes * (self.world - 1)
