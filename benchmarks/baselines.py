"""Other ways to send fewer bits of a gradient, behind one interface, to compare DynamiQ with.

Codecs (round to nearest, scales fitted anew at every hop):

    fp8     E4M3 in blocks of 256 with an fp32 scale: 8.125 bits, the recipe of fp8 all-to-all hooks
    int4    symmetric 4-bit integers in blocks of 128 with an fp32 scale: 4.25 bits, as ZeRO++'s qgZ
    mxfp8   E4M3, mxfp6 E3M2, mxfp4 E2M1: OCP microscaling, blocks of 32 with a power of two: 8.25, 6.25, 4.25 bits

`baseline_hook` takes any of them through DDP, by all-to-all and all-gather (direct) or hop by hop (ring). torch's own
fp16, bf16 and PowerSGD hooks need no help.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Codec(abc.ABC):
    """Values to packed bytes and back. Packs whole blocks; sizes do not depend on values."""

    name: str
    block: int  # values
    bits: float  # per value, scales counted

    @abc.abstractmethod
    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [blocks * block] -> uint8 [blocks, block * bits / 8]."""

    @abc.abstractmethod
    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [blocks, ...] -> fp32 [blocks * block]."""


def _scales_first(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([scales.contiguous().view(torch.uint8), codes.contiguous().view(torch.uint8)], 1)


class Fp8Block(Codec):
    name, block, bits = "fp8", 256, 8.125

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, self.block)
        scale = x.abs().amax(1, keepdim=True) / 448
        codes = (x / scale.clamp_min(1e-30)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return _scales_first(scale, codes)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        scale = packed[:, :4].contiguous().view(torch.float32)
        return (packed[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scale).view(-1)


class Int4Block(Codec):
    name, block, bits = "int4", 128, 4.25

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, self.block)
        scale = x.abs().amax(1, keepdim=True) / 7
        codes = ((x / scale.clamp_min(1e-30)).round().clamp(-7, 7) + 8).to(torch.uint8)
        return _scales_first(scale, codes[:, ::2] | codes[:, 1::2] << 4)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        scale, pairs = packed[:, :4].contiguous().view(torch.float32), packed[:, 4:]
        codes = torch.stack([pairs & 15, pairs >> 4], 2).view(-1, self.block)
        return ((codes.float() - 8) * scale).view(-1)


class Microscaling(Codec):
    """OCP MX: elements with `exponent` and `mantissa` bits, largest value `largest`, and one E8M0 scale per 32."""

    block = 32

    def __init__(self, name: str, exponent: int, mantissa: int, largest: float):
        self.name, self.exponent, self.mantissa, self.largest = name, exponent, mantissa, largest
        self.width = 1 + exponent + mantissa
        self.bits = self.width + 8 / self.block
        self.bias = 2 ** (exponent - 1) - 1
        codes = torch.arange(2 ** (exponent + mantissa))
        power, fraction = codes >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
        normal = (1 + fraction) * torch.exp2(power.float() - self.bias)
        self.magnitudes = torch.where(power == 0, fraction * 2.0 ** (1 - self.bias), normal)
        top = self.magnitudes[self.magnitudes <= largest]
        self.top_code = len(top) - 1
        self.top_power = int(torch.log2(torch.tensor(largest)).floor())

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, self.block)
        power = torch.frexp(x.abs().amax(1, keepdim=True))[1] - 1 - self.top_power
        power = power.clamp(-127, 127)
        y = torch.ldexp(x, -power)
        magnitude = y.abs().clamp_max(self.largest)
        step = (torch.frexp(magnitude)[1] - 1).clamp_min(1 - self.bias)  # floor of log2; subnormals share one
        step[magnitude == 0] = 1 - self.bias
        mantissa = torch.ldexp(magnitude, self.mantissa - step).round()  # from 2^mantissa on: a normal number
        code = ((step + self.bias - 1) * 2**self.mantissa + mantissa).clamp(0, self.top_code).to(torch.uint8)
        code |= (torch.signbit(y) * 2 ** (self.width - 1)).to(torch.uint8)
        return _scales_first((power + 127).to(torch.uint8), self._pack_bits(code))

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        power = packed[:, :1].int() - 127
        code = self._unpack_bits(packed[:, 1:])
        value = self.magnitudes.to(packed.device)[(code & (2 ** (self.width - 1) - 1)).long()]
        value = torch.where(code >= 2 ** (self.width - 1), -value, value)
        return torch.ldexp(value, power).view(-1)

    def _pack_bits(self, code: torch.Tensor) -> torch.Tensor:
        if self.width == 8:
            return code
        if self.width == 4:
            return code[:, ::2] | code[:, 1::2] << 4
        a, b, c, d = (code[:, i::4].int() for i in range(4))  # four values in three bytes
        word = a | b << 6 | c << 12 | d << 18
        return torch.stack([word & 255, word >> 8 & 255, word >> 16], 2).to(torch.uint8).view(len(code), -1)

    def _unpack_bits(self, packed: torch.Tensor) -> torch.Tensor:
        if self.width == 8:
            return packed
        if self.width == 4:
            return torch.stack([packed & 15, packed >> 4], 2).view(len(packed), -1)
        x, y, z = (packed[:, i::3].int() for i in range(3))
        word = x | y << 8 | z << 16
        return torch.stack([word >> s & 63 for s in (0, 6, 12, 18)], 2).to(torch.uint8).view(len(packed), -1)


CODECS = {
    codec.name: codec
    for codec in (
        Fp8Block(),
        Int4Block(),
        Microscaling("mxfp8", 4, 3, 448.0),
        Microscaling("mxfp6", 3, 2, 28.0),
        Microscaling("mxfp4", 2, 1, 6.0),
    )
}


@dataclass
class BaselineState:
    codec: Codec
    topology: str = "direct"  # or "ring"
    group: dist.ProcessGroup | None = None


def all_reduce(tensor: torch.Tensor, state: BaselineState, scale: float = 1.0) -> torch.Tensor:
    """scale x the sum over the group, in place; every rank ends with the same values."""
    group = state.group or dist.group.WORLD
    n, rank, block = group.size(), group.rank(), state.codec.block
    shard = -(-tensor.numel() // (n * block)) * block
    x = torch.zeros(n * shard, device=tensor.device)
    x[: tensor.numel()] = tensor.detach().reshape(-1)
    if state.topology == "direct":
        own = _sum_direct(x, state.codec, group, n)
    else:
        own = _sum_ring(x.view(n, shard), state.codec, group, n, rank)
    packed = state.codec.pack(own)
    finished = torch.empty((n, *packed.shape), dtype=torch.uint8, device=x.device)
    dist.all_gather_into_tensor(finished.view(n * packed.shape[0], -1), packed, group=group)
    total = state.codec.unpack(finished.view(-1, packed.shape[1]))[: tensor.numel()]
    return tensor.copy_((total * scale).view(tensor.shape))


def _sum_direct(x: torch.Tensor, codec: Codec, group: dist.ProcessGroup, n: int) -> torch.Tensor:
    sent = codec.pack(x)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return codec.unpack(received).view(n, -1).sum(0)


def _sum_ring(rows: torch.Tensor, codec: Codec, group: dist.ProcessGroup, n: int, rank: int) -> torch.Tensor:
    to, source = (dist.get_global_rank(group, (rank + d) % n) for d in (-1, 1))
    total = rows[(rank + 1) % n]
    for step in range(n - 1):
        sent = codec.pack(total)
        received = torch.empty_like(sent)
        ops = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        total = codec.unpack(received) + rows[(rank + 2 + step) % n]
    return total


# DDP checks that an annotation, if there is one, is dist.GradBucket itself, which a string is not.
def baseline_hook(state: BaselineState, bucket):
    """DDP communication hook. Does its work at once, on the calling thread and the current stream."""
    group = state.group or dist.group.WORLD
    future = torch.futures.Future()
    future.set_result(all_reduce(bucket.buffer(), state, 1 / group.size()))
    return future
