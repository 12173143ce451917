"""A second implementation of docs/format.md in numpy, written from that page alone.

It shares nothing with the C++ and CUDA codecs, so that a mistake in one shows as a difference. Section numbers are
those of the page. Values go in and come out as bytes: numpy has no bfloat16.
"""

from __future__ import annotations

import functools
import struct

import dense_reference as dense
import numpy as np

MAGIC = 0x4C43505A
VERSION = 1
HEADER_BYTES = 64
RAW, FAST, DENSE = 0, 1, 2
CHECKSUM, SPLIT, PACKED = 1, 2, 4  # flags
LAYOUTS = {"compact": 0, "split": SPLIT, "packed": PACKED}
WINDOW, CONSTANT, RAW_TILE, HELD = 0, 1, 2, 3  # tile modes
TILE, GROUP = 1024, 32768
PLANES_BYTES = 384
UNIT = TILE + PLANES_BYTES  # bytes of the largest one
PACKED_FROM = 24 << 20  # values
BFLOAT16 = 11
MAX_COUNT = 1 << 56

# Section 1.1: name -> (number, size)
DTYPES = {
    "uint8": (0, 1),
    "int8": (1, 1),
    "int16": (2, 2),
    "int32": (3, 4),
    "int64": (4, 8),
    "float16": (5, 2),
    "float32": (6, 4),
    "float64": (7, 8),
    "complex64": (8, 8),
    "complex128": (9, 16),
    "bool": (10, 1),
    "bfloat16": (11, 2),
    "float8_e4m3fn": (12, 1),
    "float8_e5m2": (13, 1),
    "float8_e4m3fnuz": (14, 1),
    "float8_e5m2fnuz": (15, 1),
    "uint16": (16, 2),
    "uint32": (17, 4),
    "uint64": (18, 8),
    "float8_e8m0fnu": (19, 1),
    "complex32": (20, 4),
}
SIZES = dict(DTYPES.values())


class FormatError(Exception):
    """The frame breaks a rule of section 6."""


def align16(n: int) -> int:
    return -(-n // 16) * 16


def pad16(data: bytes) -> bytes:
    return data + bytes(align16(len(data)) - len(data))


def require(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(what)


# ---- Section 1: checks ----------------------------------------------------------------------------------------------


def header_check(header60: bytes) -> int:
    x = 0x9E3779B9
    for (word,) in struct.iter_unpack("<I", header60):
        x ^= word
        x = ((x << 13) | (x >> 19)) & 0xFFFFFFFF
        x = x * 0x85EBCA6B & 0xFFFFFFFF
    return x


def checksum(payload: bytes) -> int:
    words = np.frombuffer(payload, "<u4").astype(np.uint64)
    index = np.arange(len(words), dtype=np.uint64)
    low32 = np.uint64(0xFFFFFFFF)
    key = ((index & low32) * np.uint64(0x9E3779B1) + (index >> np.uint64(32)) * np.uint64(0x85EBCA77)) & low32
    key ^= key >> np.uint64(15)
    key = key * np.uint64(0x2C1B3C6D) & low32 | np.uint64(1)
    return int((words * key).sum(dtype=np.uint64))


def make_header(dtype: int, code: int, flags: int, count: int, frame_bytes: int, check: int) -> bytes:
    first60 = struct.pack("<IBBBBQQQ28x", MAGIC, VERSION, dtype, code, flags, count, frame_bytes, check)
    return first60 + struct.pack("<I", header_check(first60))


# ---- Section 3: where things are ------------------------------------------------------------------------------------


class Geometry:
    """Sections 3.1, 3.2 and 3.4: what follows from the count alone."""

    def __init__(self, count: int):
        self.count = count
        self.tiles = -(-count // TILE)
        self.groups = -(-count // GROUP)
        self.word_begin = HEADER_BYTES + align16(8 * self.groups)
        self.base_begin = self.word_begin + align16(2 * self.tiles)
        self.tables_end = self.base_begin + align16(self.tiles)
        self.units_capacity = sum(align16(self.m(t)) + PLANES_BYTES for t in range(self.tiles))
        slots_end = self.tables_end + 8 * (self.groups + 1)
        self.units_begin = -(-slots_end // 32) * 32 if count else HEADER_BYTES  # packed, as the next two
        self.full_tiles = count // TILE
        self.last_bytes = align16(count % TILE) + PLANES_BYTES if count % TILE else 0

    def m(self, t: int) -> int:
        return TILE if t < self.tiles - 1 else self.count - TILE * (self.tiles - 1)

    def group(self, g: int) -> range:
        return range(32 * g, min(32 * g + 32, self.tiles))

    def front(self, layout: str) -> int:
        return {
            "compact": self.tables_end,
            "split": self.tables_end + self.units_capacity,
            "packed": self.units_begin + self.last_bytes,
        }[layout]

    def limit(self, layout: str) -> int:
        units = {
            "compact": self.count + (16 if self.count % TILE else 0),
            "split": 0,
            "packed": TILE * self.full_tiles,
        }[layout]
        return align16(self.front(layout) + units + self.count + 2 + 16 * self.groups)

    def dense_limit(self, data_bytes: int) -> int:
        """Section 4.4."""
        return align16(self.tables_end + data_bytes + 16 * (self.groups + 1))


@functools.cache
def plane_order(m: int) -> list[tuple[int, int, int]]:
    """(word, bit, value) of a tile's m values, in plane order."""
    places = [(i // 8 % 32, 8 * (i // 256) + i % 8, i) for i in range(m)]
    return sorted(places)


# ---- Encoder --------------------------------------------------------------------------------------------------------


def sign_mantissa(values: np.ndarray) -> np.ndarray:
    return (values >> 15 << 7 | values & 0x7F).astype(np.uint8)


def exponents(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) >> 7 & 0xFF


def choose_base(e: np.ndarray) -> int:
    """Section 5.1, step 2."""
    sample = e[np.arange(len(e)) % 8 < 2]
    z, s = int((sample != 0).sum()), int(sample.sum())
    mean = (s + z // 2) // z if z else 0
    candidates = [min(max(mean - 4 + k, 0), 249) for k in range(3)]
    inside = [int(((sample >= base) & (sample < base + 7)).sum()) for base in candidates]
    return candidates[inside.index(max(inside))]


def encode_tile(values: np.ndarray) -> tuple[int, int, bytes, bytes]:
    """(mode, base, unit, dynamic bytes) of one tile: section 3.3 with the choices of section 5.1."""
    m = len(values)
    if (values == values[0]).all():
        return CONSTANT, 0, b"", values[:1].tobytes()
    e = exponents(values)
    base = choose_base(e)
    codes = np.where((e >= base) & (e < base + 7), e - base + 1, 0)
    unit = pad16(sign_mantissa(values).tobytes())
    if 384 + int((codes == 0).sum()) >= m:
        return RAW_TILE, 0, unit, e.astype(np.uint8).tobytes()
    planes = [[0] * 32 for _ in range(3)]
    escapes = bytearray()
    for word, bit, i in plane_order(m):
        for k in range(3):
            planes[k][word] |= (int(codes[i]) >> k & 1) << bit
        if codes[i] == 0:
            escapes.append(int(e[i]))
    return WINDOW, base, unit + b"".join(struct.pack("<32I", *plane) for plane in planes), bytes(escapes)


def in_packed_frame(t: int, tile: tuple[int, int, bytes, bytes], values: np.ndarray) -> tuple[int, int, bytes, bytes]:
    """Tile t of encode_tile() as section 5.3 has it in a packed frame of these values."""
    mode, base, unit, dynamic = tile
    if mode == RAW_TILE:
        return mode, base, unit + dynamic[:PLANES_BYTES], dynamic[PLANES_BYTES:]
    if mode == CONSTANT:
        group = values[t // 32 * GROUP :][:GROUP]
        sampled = (group[TILE * k :][:TILE] for k in (0, 11, 21, 30))
        closely = any(len(tile) == TILE and (tile[:4] == tile[0]).all() for tile in sampled)
        full = TILE * (t + 1) <= len(values)
        mode = CONSTANT if full and closely else HELD
    return mode, base, unit, dynamic


def table(form: str, entries: list[int]) -> bytes:
    return pad16(struct.pack(f"<{len(entries)}{form}", *entries))


def assemble(count: int, tiles: list[tuple[int, int, bytes, bytes]], layout: str = "compact") -> bytes:
    """Everything behind the header, for `count` values or elements in tiles as encode_tile() makes them.

    Of packed frames: as in_packed_frame() does.
    """
    geometry = Geometry(count)
    units, dynamics = [], []
    for t, (mode, _, unit, dynamic) in enumerate(tiles):
        if layout == "split" or (layout == "packed" and mode != CONSTANT):
            unit = unit.ljust(align16(geometry.m(t)) + PLANES_BYTES, b"\0")
        units.append(unit)
        dynamics.append(dynamic)
    front, parts, offsets, slots, position = [], [], [], [0], 0
    for g in range(geometry.groups):
        group = geometry.group(g)
        units_of_group = b"".join(units[t] for t in group)
        dynamic_part = pad16(b"".join(dynamics[t] for t in group))
        front.append(b"" if layout == "compact" else units_of_group)
        parts.append(units_of_group + dynamic_part if layout == "compact" else dynamic_part)
        slots.append(slots[-1] + sum(geometry.m(t) == TILE and tiles[t][0] != CONSTANT for t in group))
        offsets.append(position)
        position += len(parts[-1])
    words = [len(dynamic) | tile[0] << 12 for tile, dynamic in zip(tiles, dynamics, strict=True)]
    tables = table("Q", offsets) + table("H", words) + table("B", [base for _, base, _, _ in tiles])
    if layout == "packed" and count:
        tables += struct.pack(f"<{len(slots)}Q", *slots)
        tables = tables.ljust(geometry.units_begin - HEADER_BYTES, b"\0")
    return tables + b"".join(front + parts)


def seal(dtype: int, code: int, flags: int, count: int, payload: bytes) -> bytes:
    """Puts a header in front of a payload."""
    check = checksum(payload) if flags & CHECKSUM else 0
    return make_header(dtype, code, flags, count, HEADER_BYTES + len(payload), check) + payload


def encode(data: bytes, dtype: int = BFLOAT16, code: int = FAST, layout: str = "compact", check: bool = True) -> bytes:
    """The frame zipccl makes of the values whose bytes are `data`."""
    count = len(data) // SIZES[dtype]
    if code == FAST and dtype != BFLOAT16:
        code = RAW
    if code == FAST and layout == "compact" and count >= PACKED_FROM:
        layout = "packed"
    flags = CHECKSUM * check | LAYOUTS[layout]
    if code == DENSE:
        kind = dense.elements_of(dtype, SIZES[dtype])
        step = TILE * kind.size
        tiles = [dense.encode_tile(kind, data[at : at + step]) for at in range(0, len(data), step)]
        return seal(dtype, DENSE, flags, count, assemble(count * kind.parts, tiles))
    if code == RAW:
        return seal(dtype, RAW, flags, count, pad16(data))
    values = np.frombuffer(data, "<u2")
    tiles = [encode_tile(values[t : t + TILE]) for t in range(0, count, TILE)]
    if layout == "packed":
        tiles = [in_packed_frame(t, tile, values) for t, tile in enumerate(tiles)]
    return seal(dtype, FAST, flags, count, assemble(count, tiles, layout))


# ---- Decoder --------------------------------------------------------------------------------------------------------


def decode_window(unit: bytes, dynamic: bytes, base: int, m: int) -> np.ndarray:
    """Exponents of a window tile."""
    planes = [struct.unpack_from("<32I", unit, align16(m) + 128 * k) for k in range(3)]
    e = np.zeros(m, np.uint16)
    escapes = iter(dynamic)
    used = 0
    for word, bit, i in plane_order(m):
        code = sum((planes[k][word] >> bit & 1) << k for k in range(3))
        if code:
            e[i] = base + code - 1
        else:
            used += 1
            require(used <= len(dynamic), "more escape codes than dynamic bytes")
            e[i] = next(escapes)
    require(used == len(dynamic), "fewer escape codes than dynamic bytes")
    return e


def decode_tile(mode: int, base: int, unit: bytes, dynamic: bytes, m: int) -> np.ndarray:
    if mode in (CONSTANT, HELD):
        return np.repeat(np.frombuffer(dynamic, "<u2"), m)
    e = np.frombuffer(dynamic, np.uint8) if mode == RAW_TILE else decode_window(unit, dynamic, base, m)
    sm = np.frombuffer(unit[:m], np.uint8).astype(np.uint16)
    return sm >> 7 << 15 | e.astype(np.uint16) << 7 | sm & 0x7F


def decode_fast(frame: bytes, count: int, layout: str) -> bytes:
    geometry = Geometry(count)
    require(len(frame) >= geometry.front(layout), "smaller than its static part")
    require(len(frame) <= geometry.limit(layout), "larger than its count allows")
    packed = layout == "packed" and count > 0
    slots = [0] * (geometry.groups + 1)
    if packed:
        slots = struct.unpack_from(f"<{geometry.groups + 1}Q", frame, geometry.tables_end)
        require(slots[-1] <= geometry.tiles, "more units than tiles")
    parts_begin = geometry.front(layout) + UNIT * slots[-1]
    require(parts_begin <= len(frame), "no room for all units")
    position = parts_begin
    slot = 0
    unit_at = {"compact": position, "split": geometry.tables_end, "packed": geometry.units_begin}[layout]
    values = []
    for g in range(geometry.groups):
        require(not packed or slots[g] == slot, "slot")
        (offset,) = struct.unpack_from("<Q", frame, HEADER_BYTES + 8 * g)
        require(offset == position - parts_begin, "group offset")
        entries = []
        for t in geometry.group(g):
            (word,) = struct.unpack_from("<H", frame, geometry.word_begin + 2 * t)
            mode, d, base, m = word >> 12, word & 0xFFF, frame[geometry.base_begin + t], geometry.m(t)
            require(mode in (WINDOW, CONSTANT, RAW_TILE) or (mode == HELD and packed), "tile mode")
            require(mode != CONSTANT or m == TILE or not packed, "tile mode")
            in_unit = min(m, PLANES_BYTES) if packed else 0  # exponents of a raw tile
            require({WINDOW: d <= m, CONSTANT: d == 2, RAW_TILE: d == m - in_unit, HELD: d == 2}[mode], "dynamic bytes")
            require(base <= (249 if mode == WINDOW else 0), "tile base")
            place = align16(m) + PLANES_BYTES
            if layout == "compact":
                place = {WINDOW: place, CONSTANT: 0, RAW_TILE: align16(m)}[mode]
            elif packed and mode == CONSTANT:
                place = 0
            slot += m == TILE and mode != CONSTANT
            entries.append((mode, d, base, m, place, in_unit))
        if layout == "compact":
            unit_at = position
            position += sum(place for *_, place, _ in entries)
        dynamic_at = position
        position += align16(sum(d for _, d, *_ in entries))
        require(position <= len(frame), "group ends behind the frame")
        require(not packed or slot <= slots[-1], "slot")
        for mode, d, base, m, place, in_unit in entries:
            unit, dynamic = frame[unit_at : unit_at + place], frame[dynamic_at : dynamic_at + d]
            if mode == RAW_TILE:
                dynamic = unit[align16(m) : align16(m) + in_unit] + dynamic
            values.append(decode_tile(mode, base, unit, dynamic, m))
            unit_at, dynamic_at = unit_at + place, dynamic_at + d
    require(not packed or slots[-1] == slot, "slot")
    require(position == len(frame), "frame does not end with its last group")
    return np.concatenate(values).astype("<u2").tobytes() if values else b""


def decode_dense(frame: bytes, dtype: int, count: int) -> bytes:
    kind = dense.elements_of(dtype, SIZES[dtype])
    geometry = Geometry(count * kind.parts)
    require(len(frame) >= geometry.tables_end, "smaller than its tables")
    require(len(frame) <= geometry.dense_limit(count * SIZES[dtype]), "larger than its count allows")
    position = geometry.tables_end
    values = []
    for g in range(geometry.groups):
        (offset,) = struct.unpack_from("<Q", frame, HEADER_BYTES + 8 * g)
        require(offset == position - geometry.tables_end, "group offset")
        entries = []
        for t in geometry.group(g):
            (word,) = struct.unpack_from("<H", frame, geometry.word_begin + 2 * t)
            mode, d, base, m = word >> 12, word & 0xFFF, frame[geometry.base_begin + t], geometry.m(t)
            dense.check_entry(kind, mode, base, d, m)
            entries.append((mode, d, base, m, dense.unit_size(kind, mode, m)))
        unit_at, dynamic_at = position, position + sum(size for *_, size in entries)
        position = dynamic_at + align16(sum(d for _, d, *_ in entries))
        require(position <= len(frame), "group ends behind the frame")
        for mode, d, base, m, size in entries:
            unit, dynamic = frame[unit_at : unit_at + size], frame[dynamic_at : dynamic_at + d]
            values.append(dense.decode_tile(kind, mode, base, unit, dynamic, m))
            unit_at, dynamic_at = unit_at + size, dynamic_at + d
    require(position == len(frame), "frame does not end with its last group")
    return b"".join(values)


def decode(frame: bytes) -> tuple[int, bytes]:
    """(dtype, bytes of the values). Raises FormatError as section 6 demands."""
    require(len(frame) >= HEADER_BYTES, "no room for a header")
    magic, version, dtype, code, flags, count, frame_bytes, check = struct.unpack_from("<IBBBBQQQ", frame)
    require(magic == MAGIC, "magic")
    require(version == VERSION, "version")
    require(struct.unpack_from("<I", frame, 60)[0] == header_check(frame[:60]), "header check")
    require(dtype in SIZES and code in (RAW, FAST, DENSE) and count <= MAX_COUNT, "dtype, code or count")
    require(flags & ~CHECKSUM in LAYOUTS.values() and not any(frame[32:60]), "flags or reserved bytes")
    require(bool(flags & CHECKSUM) or check == 0, "checksum without its flag")
    require(code != FAST or dtype == BFLOAT16, "dtype of code fast")
    require(frame_bytes % 16 == 0, "frame size")
    data_bytes = count * SIZES[dtype]
    require(code != RAW or frame_bytes == align16(HEADER_BYTES + data_bytes), "size of a raw frame")
    require(frame_bytes >= HEADER_BYTES, "size of a frame")
    require(frame_bytes <= len(frame), "truncated")
    frame = frame[:frame_bytes]
    if flags & CHECKSUM:
        require(checksum(frame[HEADER_BYTES:]) == check, "checksum")
    if code == RAW:
        return dtype, frame[HEADER_BYTES : HEADER_BYTES + data_bytes]
    # Tables alone take count / 1024 bytes; refuse a count that cannot be before computing with it tile by tile.
    require(-(-count // TILE) <= frame_bytes, "smaller than its tables")
    if code == DENSE:
        try:
            return dtype, decode_dense(frame, dtype, count)
        except dense.TileError as error:
            raise FormatError(str(error)) from None
    layout = next(name for name, flag in LAYOUTS.items() if flag == flags & ~CHECKSUM)
    return dtype, decode_fast(frame, count, layout)
