"""reduce_scatter_tensor and all_reduce of fp32 gradients. Zipped they travel in bf16 and are summed in fp32 in rank
order; raw they are whatever the inner backend makes of fp32, so only the zipped result is compared with the sum."""

from __future__ import annotations

import harness
import torch
import torch.distributed as dist


class ReduceScatter(harness.Collective):
    name = "reduce_scatter"
    size_is = "of fp32 that each rank gives"
    zip_options = {"wire_dtype": torch.bfloat16}
    exact = ("zip",)

    def prepare(self) -> None:
        self.count = max(self.nbytes // 4 // self.world, 1)
        self.input = self.input_of(self.rank).to(self.device)
        self.output = torch.empty(self.count, dtype=torch.float32, device=self.device)

    def input_of(self, rank: int) -> torch.Tensor:
        """fp32 whose low bits are not those of bf16."""
        return self.values.take(self.count * self.world, rank).float() * 1.0009765625

    def run(self, group: dist.ProcessGroup) -> None:
        dist.reduce_scatter_tensor(self.output, self.input, group=group)

    def sum(self) -> torch.Tensor:
        total = self.input_of(0).bfloat16().float()
        for rank in range(1, self.world):
            total += self.input_of(rank).bfloat16().float()
        return total

    def expected(self) -> torch.Tensor:
        return self.sum().chunk(self.world)[self.rank]

    def bus_bytes(self) -> float:
        return 4.0 * self.count * (self.world - 1)


class AllReduce(ReduceScatter):
    name = "all_reduce"
    size_is = "of the fp32 tensor"

    def prepare(self) -> None:
        super().prepare()
        self.output = torch.empty_like(self.input)

    def run(self, group: dist.ProcessGroup) -> None:
        self.output.copy_(self.input)  # in place; the same for raw and zipped
        dist.all_reduce(self.output, group=group)

    def expected(self) -> torch.Tensor:
        return self.sum().bfloat16().float()  # the sums travel in bf16 too

    def bus_bytes(self) -> float:
        return 2 * super().bus_bytes()
