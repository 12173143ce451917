"""The golden frames: small frames of version 1 that every later decoder must read.

Written by the numpy implementation of docs/format.md, from values that a formula makes, so they depend on neither the
codecs they test nor a random generator. `python make_golden.py` writes them next to this file. That is done once for a
version of the format: a golden frame that has to change means that the format has.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import format_reference as ref  # noqa: E402


@dataclass(frozen=True)
class Golden:
    name: str
    dtype: str
    data: bytes
    code: str = "fast"
    layout: str = "compact"
    checksum: bool = True

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.zpcl"

    def frame(self) -> bytes:
        code = {"raw": ref.RAW, "fast": ref.FAST, "dense": ref.DENSE}[self.code]
        dtype, _ = ref.DTYPES[self.dtype]
        return ref.encode(self.data, dtype, code, self.layout, self.checksum)


def noise(n: int, salt: int) -> np.ndarray:
    """n well-mixed 32-bit numbers."""
    x = np.arange(n, dtype=np.uint64) + np.uint64(salt << 32)
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = (x ^ (x >> np.uint64(29))) * np.uint64(multiplier)
    return (x >> np.uint64(32)).astype(np.uint32)


def weights(n: int, top: int, salt: int) -> np.ndarray:
    """bf16 bits as in real tensors: half as many values at each exponent further below `top`."""
    bits = noise(n, salt)
    steps = sum((bits % (2 << k) == 0).astype(np.uint32) for k in range(15))
    return (bits >> 16 & 0x807F | (top - steps) << 7).astype("<u2")


def random_bits(n: int, salt: int) -> np.ndarray:
    return noise(n, salt).astype("<u2")


def floats(size: int, mantissa: int, n: int, top: int, salt: int) -> np.ndarray:
    """Floats of any format, as in real tensors, from their bits."""
    bits, more = noise(n, salt).astype(np.uint64), noise(n, salt + 100).astype(np.uint64)
    steps = sum((bits % np.uint64(2 << k) == 0).astype(np.uint64) for k in range(7))
    low = (bits >> np.uint64(8) | more << np.uint64(24)) & np.uint64((1 << mantissa) - 1)
    sign = more >> np.uint64(31) << np.uint64(8 * size - 1)
    return (sign | (np.uint64(top) - steps) << np.uint64(mantissa) | low).astype(f"<u{size}")


def widened(values: np.ndarray) -> np.ndarray:
    """The bits of float32 as float64."""
    return values.view("<f4").astype("<f8").view("<u8")


def dense_bf16() -> bytes:
    mixed = weights(1024, 122, 41)
    mixed[noise(1024, 42) % 3 == 0] = 0
    few = weights(1024, 122, 43) & 0x807F | (118 + noise(1024, 44) % 5).astype("<u2") << 7
    far = weights(1024, 122, 45)
    constant = np.full(1024, 0x8000, "<u2")
    tiles = (weights(1024, 122, 46), mixed, few, far, constant, random_bits(1024, 47), weights(333, 3, 48))
    return b"".join(t.astype("<u2").tobytes() for t in tiles)


def dense_f32() -> bytes:
    full = floats(4, 23, 1024, 123, 51)
    bf16, f16 = floats(4, 23, 1024, 120, 52) & 0xFFFF0000, floats(4, 23, 1024, 120, 53) & 0xFFFFE000
    return b"".join(t.astype("<u4").tobytes() for t in (full, bf16, f16, floats(4, 23, 99, 255, 54)))


def dense_f64() -> bytes:
    single = widened(floats(4, 23, 300, 123, 55))
    bf16 = widened(floats(4, 23, 1024, 120, 56) & np.uint32(0xFFFF0000))
    return bf16.tobytes() + single.tobytes()


def all_modes() -> bytes:
    window_full = weights(1024, 122, 1) & 0x807F | (118 + noise(1024, 2) % 7).astype("<u2") << 7  # no escapes
    constant = np.full(1024, 0x3F80, "<u2")
    tail = weights(700, 9, 5)  # down to denormals, at the lowest bases
    return b"".join(
        t.astype("<u2").tobytes() for t in (window_full, weights(1024, 122, 3), constant, random_bits(1024, 4), tail)
    )


def two_groups() -> bytes:
    values = np.zeros(32768 + 1500, "<u2")
    values[2048:3072] = weights(1024, 130, 6)
    values[31744:32768] = random_bits(1024, 7)
    values[32768:33792] = weights(1024, 255, 8)  # infinities and NaNs
    return values.tobytes()


def goldens() -> list[Golden]:
    short_raw_tail = weights(1024, 122, 9).tobytes() + weights(100, 122, 10).tobytes()
    frames = [
        Golden("empty", "bfloat16", b""),
        Golden("empty_split", "bfloat16", b"", layout="split", checksum=False),
        Golden("empty_float32", "float32", b""),
        Golden("one_value", "bfloat16", b"\x80\x3f"),
        Golden("one_value_split", "bfloat16", b"\x01\x80", layout="split"),
        Golden("constant_zeros", "bfloat16", bytes(2 * 3000)),
        Golden("window", "bfloat16", weights(1024, 122, 11).tobytes()),
        Golden("raw_tail", "bfloat16", short_raw_tail, checksum=False),
        Golden("all_modes", "bfloat16", all_modes()),
        Golden("all_modes_split", "bfloat16", all_modes(), layout="split"),
        Golden("all_modes_unchecked", "bfloat16", all_modes(), checksum=False),
        Golden("two_groups", "bfloat16", two_groups()),
        Golden("raw_bfloat16", "bfloat16", random_bits(100, 12).tobytes(), code="raw"),
        Golden("empty_packed", "bfloat16", b"", layout="packed"),
        Golden("one_value_packed", "bfloat16", b"\x02\x41", layout="packed", checksum=False),
        Golden("all_modes_packed", "bfloat16", all_modes(), layout="packed"),
        Golden("two_groups_packed", "bfloat16", two_groups(), layout="packed", checksum=False),
        Golden("raw_tail_packed", "bfloat16", random_bits(1024 + 500, 13).tobytes(), layout="packed"),
        Golden("short_raw_packed", "bfloat16", random_bits(300, 14).tobytes(), layout="packed", checksum=False),
    ]
    frames += [
        Golden("dense_empty", "float32", b"", code="dense"),
        Golden("dense_bfloat16", "bfloat16", dense_bf16(), code="dense"),
        Golden("dense_bfloat16_unchecked", "bfloat16", weights(1100, 122, 49).tobytes(), code="dense", checksum=False),
        Golden("dense_float16", "float16", floats(2, 10, 1024 + 50, 14, 57).tobytes(), code="dense"),
        Golden("dense_float32", "float32", dense_f32(), code="dense"),
        Golden("dense_float64", "float64", dense_f64(), code="dense"),
        Golden("dense_float64_tail", "float64", floats(8, 52, 200, 1020, 58).tobytes(), code="dense"),
        Golden("dense_float8_e4m3fn", "float8_e4m3fn", floats(1, 3, 1500, 13, 59).tobytes(), code="dense"),
        Golden("dense_float8_e5m2", "float8_e5m2", floats(1, 2, 1500, 20, 60).tobytes(), code="dense"),
        Golden("dense_complex64", "complex64", floats(4, 23, 600, 123, 61).tobytes(), code="dense"),
        Golden("dense_int64", "int64", bytes(8 * 1024) + noise(14, 62).tobytes(), code="dense"),
    ]
    for salt, dtype in enumerate(
        ("uint8", "bool", "float8_e4m3fn", "float16", "int32", "float32", "int64", "complex128")
    ):
        size = ref.DTYPES[dtype][1]
        data = noise(7 * size, 20 + salt).astype(np.uint8)
        frames.append(
            Golden(f"raw_{dtype}", dtype, (data & 1 if dtype == "bool" else data).tobytes(), checksum=salt % 2 == 0)
        )
    return frames


if __name__ == "__main__":
    for golden in goldens():
        golden.path.write_bytes(golden.frame())
        print(f"{golden.path.name:28} {golden.path.stat().st_size:6} bytes")
