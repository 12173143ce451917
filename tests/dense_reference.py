"""Tiles of code dense in numpy, written from docs/format.md alone: the part of format_reference.py on section 4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TILE = 1024
CONSTANT, RAW_TILE = 12, 13  # modes; below them 3 * rest + shape
OFFSETS = (
    ((0, 1, 2), (-1, -2, 3), (-3, -4, -5), (-6, -7, 4)),
    ((0, 1, 2), (-1, -2, -3), (3, -4, -5), (-6, -7, 4)),
    ((None, 1, 2), (0, -1, -2), (3, -3, -4), (-5, -6, -7)),  # None: symbol 0
)
REST_BITS = {1: 8, 2: 11, 3: 24}


class TileError(Exception):
    """A tile breaks a rule of section 6."""


@dataclass(frozen=True)
class Elements:
    """Section 4.1."""

    size: int
    exponent: int = 0
    mantissa: int = 0
    parts: int = 1  # of a value


FLOATS = {
    11: Elements(2, 8, 7),
    5: Elements(2, 5, 10),
    20: Elements(2, 5, 10, 2),
    6: Elements(4, 8, 23),
    8: Elements(4, 8, 23, 2),
    7: Elements(8, 11, 52),
    9: Elements(8, 11, 52, 2),
    12: Elements(1, 4, 3),
    14: Elements(1, 4, 3),
    13: Elements(1, 5, 2),
    15: Elements(1, 5, 2),
}


def elements_of(dtype: int, size: int) -> Elements:
    return FLOATS.get(dtype, Elements(size))


def align16(n: int) -> int:
    return -(-n // 16) * 16


def require(condition: bool, what: str) -> None:
    if not condition:
        raise TileError(what)


def rest_bits(kind: Elements, rest: int) -> int:
    """Bits of a rest, 0 if these elements have no such rest (section 4.3)."""
    if rest == 0:
        return 1 + kind.mantissa
    allowed = {4: (1, 2), 8: (1, 2, 3)}.get(kind.size, ())
    return REST_BITS[rest] if rest in allowed else 0


def fields(bits: int) -> list[int]:
    """Widths of the arrays of a rest."""
    return [8] * (bits // 8) + [w for w in (4, 2, 1) if bits & w]


def unit_size(kind: Elements, mode: int, m: int) -> int:
    if mode == CONSTANT:
        return 0
    if mode == RAW_TILE:
        return align16(m * kind.size)
    return sum(align16(-(-w * m // 8)) for w in (*fields(rest_bits(kind, mode // 3)), 2))


def check_entry(kind: Elements, mode: int, base: int, d: int, m: int) -> None:
    require(mode <= RAW_TILE, "tile mode")
    if mode < CONSTANT:
        require(kind.exponent > 0 and rest_bits(kind, mode // 3) > 0, "tile mode")
        require(d <= 3 * -(-m // 4) + m, "dynamic bytes")
    else:
        require(base == 0, "tile base")
        require(d == (kind.size if mode == CONSTANT else 0), "dynamic bytes")


def pack(values: np.ndarray, width: int) -> bytes:
    bits = values.astype(np.uint64)[:, None] >> np.arange(width, dtype=np.uint64) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack(data: bytes, width: int, n: int) -> np.ndarray:
    require(len(data) * 8 >= width * n, "array ends too early")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: width * n].reshape(n, width)
    return (bits.astype(np.uint64) << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)


def names(shape: int, base: int) -> list[list[int]]:
    """Symbols of the codes of each level (section 4.2)."""
    return [[0 if o is None else (base + o) % 256 for o in level] for level in OFFSETS[shape]]


# ---- Encoder --------------------------------------------------------------------------------------------------------


def symbols_of(kind: Elements, values: np.ndarray) -> np.ndarray | None:
    e = (values >> np.uint64(kind.mantissa) & np.uint64((1 << kind.exponent) - 1)).astype(np.int64)
    if kind.exponent <= 8:
        return e
    s = np.where(e == 0, 0, np.where(e == 2047, 255, e - 896))
    return s if bool(((e == 0) | (e == 2047) | (e >= 897) & (e <= 1150)).all()) else None


def choose(s: np.ndarray) -> tuple[int, int]:
    """(shape, base): section 5.2, steps 4 and 5."""
    m, zeros = len(s), int((s == 0).sum())
    mean = (int(s.sum()) + (m - zeros) // 2) // (m - zeros) if zeros < m else 0
    histogram = np.bincount(s, minlength=256)

    def h(x: int) -> int:
        return int(histogram[x % 256])

    candidates = [(mean - 2 + k) % 256 for k in range(4)]
    scores = [2 * (h(b) + h(b + 1) + h(b + 2)) + h(b - 1) + h(b - 2) + max(h(b - 3), h(b + 3)) for b in candidates]
    b = candidates[scores.index(max(scores))]
    return (2 if 32 * zeros > m else 1 if h(b - 3) > h(b + 3) else 0), b


def encode_levels(s: np.ndarray, shape: int, base: int) -> tuple[bytes, bytes]:
    """(codes of level 1, dynamic bytes)."""
    packed = []
    for level in names(shape, base):
        codes = np.full(len(s), 3)
        for c in (2, 1, 0):
            codes[s == level[c]] = c
        packed.append(pack(codes, 2))
        s = s[codes == 3]
    return packed[0], b"".join(packed[1:]) + s.astype(np.uint8).tobytes()


def encode_tile(kind: Elements, data: bytes) -> tuple[int, int, bytes, bytes]:
    """(mode, base, unit, dynamic bytes) of the elements whose bytes are `data`."""
    values = np.frombuffer(data, f"<u{kind.size}").astype(np.uint64)
    m = len(values)
    if (values == values[0]).all():
        return CONSTANT, 0, b"", data[: kind.size]
    raw = RAW_TILE, 0, data + bytes(align16(len(data)) - len(data)), b""
    s = symbols_of(kind, values) if kind.exponent else None
    if s is None:
        return raw
    mantissas = values & np.uint64((1 << kind.mantissa) - 1)
    rests = [(rest_bits(kind, r), r) for r in range(4) if rest_bits(kind, r)]
    bits, rest = min((b, r) for b, r in rests if not (mantissas & np.uint64((1 << (1 + kind.mantissa - b)) - 1)).any())
    shape, base = choose(s)
    codes, dynamic = encode_levels(s, shape, base)
    sign = values >> np.uint64(kind.mantissa + kind.exponent)
    remaining = sign << np.uint64(bits - 1) | mantissas >> np.uint64(1 + kind.mantissa - bits)
    arrays = []
    for width in fields(bits):
        arrays.append(pack(remaining, width))
        remaining = remaining >> np.uint64(width)
    unit = b"".join(a + bytes(align16(len(a)) - len(a)) for a in (*arrays, codes))
    if len(unit) + len(dynamic) >= m * kind.size:
        return raw
    return 3 * rest + shape, base, unit, dynamic


# ---- Decoder --------------------------------------------------------------------------------------------------------


def decode_levels(codes: bytes, dynamic: bytes, shape: int, base: int, m: int) -> np.ndarray:
    s = np.zeros(m, np.int64)
    where = np.arange(m)  # the elements of this level
    for number, level in enumerate(names(shape, base)):
        if number > 0:
            size = -(-len(where) // 4)
            require(size <= len(dynamic), "codes end behind the dynamic bytes")
            codes, dynamic = dynamic[:size], dynamic[size:]
        c = unpack(codes, 2, len(where))
        for code in range(3):
            s[where[c == code]] = level[code]
        where = where[c == 3]
    require(len(dynamic) == len(where), "codes and plain bytes do not add up")
    s[where] = np.frombuffer(dynamic, np.uint8)
    return s


def decode_tile(kind: Elements, mode: int, base: int, unit: bytes, dynamic: bytes, m: int) -> bytes:
    if mode == CONSTANT:
        return dynamic * m
    if mode == RAW_TILE:
        return unit[: m * kind.size]
    bits = rest_bits(kind, mode // 3)
    rest, low, at = np.zeros(m, np.uint64), 0, 0
    for width in fields(bits):
        rest |= unpack(unit[at:], width, m) << np.uint64(low)
        low += width
        at += align16(-(-width * m // 8))
    s = decode_levels(unit[at:], dynamic, mode % 3, base, m)
    if kind.exponent > 8:
        s = np.where(s == 0, 0, np.where(s == 255, 2047, s + 896))
    e = (s % (1 << kind.exponent)).astype(np.uint64)
    sign, mantissa = rest >> np.uint64(bits - 1), rest & np.uint64((1 << (bits - 1)) - 1)
    values = (
        sign << np.uint64(kind.mantissa + kind.exponent)
        | e << np.uint64(kind.mantissa)
        | mantissa << np.uint64(1 + kind.mantissa - bits)
    )
    return values.astype(f"<u{kind.size}").tobytes()
