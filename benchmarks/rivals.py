"""Other compressors, timed beside zipccl's codec on the same bytes: each as the packages installed here offer it.

CPU    lz4 and zstandard through their Python packages, which allocate what they return.
CUDA   nvCOMP (packages nvidia-nvcomp-cu12, -cu13) into memory that exists already, without waiting for the host:
       ANS in its mode for 16-bit floats, LZ4 and Zstd, in chunks of 64 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MAX_BYTES = 64 << 20  # on the CPU they are slow; beyond this their rates do not change


@dataclass
class Rival:
    """One compressor at work on one tensor."""

    name: str
    encode: Callable[[], object]
    decode: Callable[[], object]
    packed_bytes: int
    exact: Callable[[], bool]  # whether decode() has given the tensor's bytes back


def on_cpu(values: torch.Tensor) -> list[Rival]:
    data = values.view(torch.uint8).numpy().tobytes()
    functions: dict[str, tuple[Callable, Callable]] = {}
    try:
        import lz4.block

        functions["lz4"] = (lz4.block.compress, lz4.block.decompress)
    except ImportError:
        pass
    try:
        import zstandard

        functions["zstd -1"] = (zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress)
    except ImportError:
        pass
    return [_cpu_rival(name, compress, decompress, data) for name, (compress, decompress) in functions.items()]


def _cpu_rival(name: str, compress: Callable, decompress: Callable, data: bytes) -> Rival:
    packed = compress(data)
    return Rival(
        name=name,
        encode=lambda: compress(data),
        decode=lambda: decompress(packed),
        packed_bytes=len(packed),
        exact=lambda: decompress(packed) == data,
    )


NVCOMP = [("nvCOMP ANS float16", "ANS", {"data_type": "<f2"}), ("nvCOMP LZ4", "LZ4", {}), ("nvCOMP Zstd", "Zstd", {})]


def on_cuda(values: torch.Tensor) -> list[Rival]:
    """On the current stream. `values`: contiguous."""
    try:
        from nvidia import nvcomp
    except ImportError:
        return []
    return [_nvcomp_rival(nvcomp, name, algorithm, extra, values) for name, algorithm, extra in NVCOMP]


def _nvcomp_rival(nvcomp, name: str, algorithm: str, extra: dict, values: torch.Tensor) -> Rival:
    stream = torch.cuda.current_stream().cuda_stream
    codec = nvcomp.Codec(algorithm=algorithm, cuda_stream=stream, **extra)
    values = values.view(torch.uint8)
    source = nvcomp.as_array(values)
    coding = codec.compression_config(values.numel())
    room = torch.empty(codec.get_max_comp_buffer_size(source), dtype=torch.uint8, device=values.device)
    back = torch.zeros_like(values)
    packed = codec.encode(source, compression_config=coding)
    decoding = codec.decompression_config(packed)
    torch.cuda.synchronize()
    packed_bytes = packed.buffer_size
    return Rival(
        name=name,
        encode=lambda: codec.encode(source, out=room, compression_config=coding),
        decode=lambda: codec.decode(packed, out=back, decompression_config=decoding),
        packed_bytes=packed_bytes,
        exact=lambda: torch.equal(back, values),
    )
