"""all_to_all_single: every rank sends each other rank a part of its values. Even splits; then a skewed mixture of
experts, where rank 0 holds the popular expert and gets half of everybody's tokens, by either design."""

from __future__ import annotations

import harness
import torch
import torch.distributed as dist

HIDDEN = 256  # values of a token


class AllToAll(harness.Collective):
    name = "all_to_all"
    size_is = "each rank sends, even splits"

    def splits(self) -> list[int]:
        """Tokens a rank sends to each rank."""
        tokens = max(self.nbytes // 2 // HIDDEN // self.world, 1)
        return [tokens] * self.world

    def prepare(self) -> None:
        self.sends = self.splits()
        self.receives = [self.sends[self.rank]] * self.world  # every rank sends alike
        self.input = self.tokens_of(self.rank).to(self.device)
        self.output = torch.empty(sum(self.receives), HIDDEN, dtype=torch.bfloat16, device=self.device)

    def tokens_of(self, rank: int) -> torch.Tensor:
        return self.values.take(sum(self.sends) * HIDDEN, rank).view(-1, HIDDEN)

    def run(self, group: dist.ProcessGroup) -> None:
        dist.all_to_all_single(self.output, self.input, self.receives, self.sends, group=group)

    def expected(self) -> torch.Tensor:
        parts = [self.tokens_of(rank).split(self.sends)[self.rank] for rank in range(self.world)]
        return torch.cat(parts)

    def bus_bytes(self) -> float:
        """Into the busiest rank."""
        return 2.0 * HIDDEN * max(self.sends) * (self.world - 1)


class AllToAllSkewed(AllToAll):
    size_is = "each rank sends, half of it to rank 0"

    def splits(self) -> list[int]:
        tokens = max(self.nbytes // 2 // HIDDEN, 2 * self.world)
        others = tokens // 2 // max(self.world - 1, 1)
        return [tokens - others * (self.world - 1)] + [others] * (self.world - 1)


class AllToAllSkewed1(AllToAllSkewed):
    size_is = "each rank sends, half of it to rank 0; design 1"
    zip_options = {"all_to_all_design": 1}


class AllToAllSkewed2(AllToAllSkewed):
    size_is = "each rank sends, half of it to rank 0; design 2"
    zip_options = {"all_to_all_design": 2}
