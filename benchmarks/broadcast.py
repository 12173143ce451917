"""broadcast: every rank ends with rank 0's values."""

from __future__ import annotations

import harness
import torch
import torch.distributed as dist


class Broadcast(harness.Collective):
    name = "broadcast"
    size_is = "of the tensor"

    def prepare(self) -> None:
        self.source = self.values.take(self.nbytes // 2, 0).to(self.device)
        self.output = torch.empty_like(self.source)

    def run(self, group: dist.ProcessGroup) -> None:
        if self.rank == 0:
            self.output.copy_(self.source)  # the harness overwrites outputs; the same for raw and zipped
        dist.broadcast(self.output, src=0, group=group)

    def expected(self) -> torch.Tensor:
        return self.values.take(self.nbytes // 2, 0)

    def bus_bytes(self) -> float:
        return self.nbytes
