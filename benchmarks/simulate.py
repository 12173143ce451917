"""Reductions of many workers in one process: what the ranks of a group would compute, bit for bit, without the group.

A worker is a number; `own(worker)` gives its gradient, fp32 [count], and may make it anew each time, so that thousands
of workers need no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from baselines import Codec
from zipccl import _C

Own = Callable[[int], torch.Tensor]


def children(topology: str, n: int, position: int) -> list[int]:
    """Whom a member of a chunk's tree hears from, in the order it adds them. The sink has position 0."""
    if topology == "direct":
        return list(range(n - 1, 0, -1)) if position == 0 else []
    if topology == "ring":
        return [position + 1] if position + 1 < n else []
    found, bit = [], 1
    while bit < n and position % (2 * bit) == 0:
        if position + bit < n:
            found.append(position + bit)
        bit *= 2
    return found


def up_the_tree(topology: str, n: int, pack: Callable[[int, list], torch.Tensor]) -> torch.Tensor:
    """pack(position, what the children have packed) for every member, children first. Returns the sink's."""
    if topology == "ring":  # too deep for recursion
        packed = pack(n - 1, [])
        for position in range(n - 2, -1, -1):
            packed = pack(position, [packed])
        return packed

    def visit(position: int) -> torch.Tensor:
        return pack(position, [visit(child) for child in children(topology, n, position)])

    return visit(0)


def dynamiq(
    own: Own,
    n: int,
    topology: str,
    bits: float,
    widths: str = "fine",
    *,
    seed: int = 0,
    step: int = 0,
    correlated: bool = True,
    chunks: int | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """scale x the sum of the workers' gradients as DynamiQ's ranks get it.

    chunks: n, as in a real group; 1 gives all coordinates one sink, which errs as much and is faster to simulate.
    """
    q = _C.quantizer
    first = own(0)
    chunks = chunks or n
    at_once = 0.03125 * (n / 2 - 1)  # of few members' statistics, for which codes leave room (dynamiq.cpp)
    if widths == "fine" and n <= 4 and bits - at_once >= 1:
        bits -= at_once
    shape = q.Shape(first.numel(), 1, chunks, widths, bits)
    stats = None
    for worker in range(n):
        s = q.statistics(shape, own(worker))
        if stats is None:
            stats = s
        else:
            stats = torch.maximum(stats, s) if shape.stats_maximum else stats.float() + s.float()
    plan = q.allocate(shape, stats if shape.stats_maximum else stats.bfloat16(), n)
    finished = torch.empty(chunks * shape.part_bytes, dtype=torch.uint8, device=first.device)
    for chunk in range(chunks):

        def pack(position: int, packed: list, chunk: int = chunk) -> torch.Tensor:
            member = (chunk + position) % n
            out = torch.empty(shape.part_bytes, dtype=torch.uint8, device=first.device)
            given = {"x": own(member), "x_means": 1, "packed_out": out, "key": (seed, step, 0), "index": (member, n)}
            if packed:
                given["packed"] = torch.stack(packed)
            if not correlated or (packed and widths == "fine"):  # sums of rounded values: numbers of their own
                given |= {"key": ((seed + 0x9E3779B97F4A7C15 * (member + 1)) % 2**64, step, 0), "index": (0, 1)}
            q.combine(shape, plan, part=chunk, parts=1, **given)
            return out

        finished[chunk * shape.part_bytes : (chunk + 1) * shape.part_bytes] = up_the_tree(topology, n, pack)
    result = torch.empty_like(first)
    q.combine(shape, plan, packed=finished, scale=scale, out=result, out_means=scale * n)
    return result


def baseline(own: Own, n: int, topology: str, codec: Codec) -> torch.Tensor:
    """The sum as `codec` gives it: packed, added in fp32 and packed again along the tree."""

    def pack(position: int, packed: list) -> torch.Tensor:
        total = own(position)
        count = total.numel()
        padded = torch.nn.functional.pad(total, (0, -count % codec.block))
        for arrived in packed:
            padded = padded + codec.unpack(arrived)
        return codec.pack(padded)

    return codec.unpack(up_the_tree(topology, n, pack))[: own(0).numel()]


def vnmse(got: torch.Tensor, own: Own, n: int) -> float:
    """Squared error of a sum over the squared norm of the exact one."""
    exact = sum(own(worker).double() for worker in range(n))
    return float((got.double() - exact).square().sum() / exact.square().sum())
