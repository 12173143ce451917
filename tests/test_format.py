"""Frames are what docs/format.md says: every implementation makes the bytes of the numpy one, and reads them."""

from __future__ import annotations

import functools
import itertools
import struct

import format_reference as ref
import numpy as np
import pytest
import torch
from codec_paths import PATHS, bf16, error_of, raw_bytes
from golden.make_golden import HERE, goldens
from test_codec import CASES, COUNTS, DTYPES, LAYOUTS, normal, packed_kinds, random_bits

every_path = pytest.mark.parametrize("path", PATHS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def tensor_of(dtype: str, data: bytes) -> torch.Tensor:
    t = torch.empty(len(data) // ref.DTYPES[dtype][1], dtype=getattr(torch, dtype))
    if data:
        t.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return t


@functools.cache
def reference_frame(data: bytes, layout: str, check: bool) -> bytes:
    return ref.encode(data, layout=layout, check=check)


def check_same(path, t: torch.Tensor, layout: str, checksum: bool) -> None:
    expected = reference_frame(raw_bytes(t), layout, checksum)
    assert path.compress(t, layout=layout, checksum=checksum) == expected
    assert raw_bytes(path.decompress(expected)) == raw_bytes(t)


@every_path
@every_layout
@pytest.mark.parametrize("name", CASES)
def test_same_bytes_as_reference(path, layout, name):
    check_same(path, CASES[name], layout, checksum=True)


@every_path
@every_layout
def test_same_bytes_as_reference_at_every_count(path, layout):
    for n in COUNTS:
        if n < 3000:
            check_same(path, normal(n, 7), layout, checksum=False)
            check_same(path, random_bits(n, 8), layout, checksum=True)
            check_same(path, torch.zeros(n).bfloat16(), layout, checksum=n % 2 == 0)
    for n in (32767, 32769):
        check_same(path, normal(n, 7), layout, checksum=True)


@every_path
def test_same_window_as_reference(path):
    """The encoder's choice of base: ties, limits at both ends, zeros, tails of every length that changes the sample."""
    tiles = []
    for seed in range(120):
        g = torch.Generator().manual_seed(seed)
        low = int(torch.randint(0, 256, (1,), generator=g))
        width = int(torch.randint(1, 14, (1,), generator=g))
        e = (low + torch.randint(0, width, (1024,), generator=g)) % 256
        e[torch.rand(1024, generator=g) < seed % 4 / 4] = 0
        tiles.append(e.int() << 7 | torch.randint(0, 128, (1024,), generator=g).int())
    check_same(path, bf16(torch.cat(tiles)), "compact", checksum=True)
    for seed, tile in enumerate(tiles[:40]):
        check_same(path, bf16(tile[: 385 + 16 * seed + seed % 11]), "compact", checksum=True)


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_dtypes_same_bytes_as_reference(path, dtype):
    number, size = ref.DTYPES[str(dtype).removeprefix("torch.")]
    data = raw_bytes(torch.arange(101 * size) % 2).replace(b"\0\0\0\0\0\0\0", b"")[: 101 * size]
    t = tensor_of(str(dtype).removeprefix("torch."), data)
    for code in ("fast", "raw"):
        for layout in LAYOUTS:
            for checksum in (False, True):
                expected = ref.encode(data, number, ref.FAST if code == "fast" else ref.RAW, layout, checksum)
                assert path.compress(t, code, layout, checksum) == expected
                assert ref.decode(expected) == (number, data)


def test_reference_decodes_what_it_encodes():
    for t in CASES.values():
        data = raw_bytes(t[:3000])
        for layout in LAYOUTS:
            assert ref.decode(reference_frame(data, layout, layout != "split")) == (ref.BFLOAT16, data)
    data = raw_bytes(packed_kinds())
    assert ref.decode(reference_frame(data, "packed", True)) == (ref.BFLOAT16, data)


# ---- Golden frames --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", goldens(), ids=lambda g: g.name)
@every_path
def test_golden(path, golden):
    frame = golden.path.read_bytes()
    t = tensor_of(golden.dtype, golden.data)
    out = path.decompress(frame)
    assert out.dtype == t.dtype and raw_bytes(out) == golden.data
    assert path.compress(t, golden.code, golden.layout, golden.checksum) == frame


def test_golden_files_are_complete_and_small():
    assert {g.path for g in goldens()} == set(HERE.glob("*.zpcl"))
    assert sum(g.path.stat().st_size for g in goldens()) < 80_000
    for golden in goldens():
        assert ref.decode(golden.path.read_bytes()) == (ref.DTYPES[golden.dtype][0], golden.data)


# ---- Forged frames: checks that hold over tables that lie -----------------------------------------------------------


def forge(frame: bytes, at: int, value: bytes, size: int | None = None) -> bytes:
    """Overwrites bytes behind the header and makes the checks hold again."""
    _, _, dtype, code, flags, count, _, _ = struct.unpack_from("<IBBBBQQQ", frame)
    payload = bytearray(frame[64:])
    payload[at - 64 : at - 64 + len(value)] = value
    payload = bytes(payload[: (size or len(frame)) - 64]).ljust((size or len(frame)) - 64, b"\0")
    return ref.seal(dtype, code, flags, count, payload)


@every_path
@every_layout
@pytest.mark.parametrize("checksum", [False, True])
def test_forged_tables_are_refused(path, layout, checksum):
    count = 33 * 1024 + 700
    t = torch.cat([torch.zeros(1024), torch.zeros(31 * 1024), torch.zeros(1724)]).bfloat16()
    t[1024:2048] = random_bits(1024, 1)
    t[2048:3072] = normal(1024, 2)
    t[-700:] = normal(700, 3)
    frame = path.compress(t, layout=layout, checksum=checksum)
    geometry = ref.Geometry(count)
    words, bases = geometry.word_begin, geometry.base_begin
    (window_word,) = struct.unpack_from("<H", frame, words + 4)
    assert 0 < window_word < 100  # a window tile with some escapes

    cases = {
        "group offsets": [
            (64, struct.pack("<Q", 16)),
            (72, struct.pack("<Q", 0)),
            (72, struct.pack("<q", -16)),
            (72, struct.pack("<Q", 1 << 40)),
            (words + 2 * 33, struct.pack("<H", 700)),  # more dynamic bytes than the frame has
        ],
        "invalid tile entry": [
            (words, struct.pack("<H", 1 << 12 | 3)),
            (words, struct.pack("<H", (4 if layout == "packed" else 3) << 12 | 2)),
            (words + 2, struct.pack("<H", 2 << 12 | 1023)),
            (words + 4, struct.pack("<H", 1025)),
            (words + 2 * 33, struct.pack("<H", 701)),
            (bases, b"\x01"),
            (bases + 1, b"\x01"),
            (bases + 2, b"\xfa"),
        ],
    }
    for text, forgeries in cases.items():
        for at, value in forgeries:
            forged = forge(frame, at, value)
            assert text in error_of(path, forged)
            with pytest.raises(ref.FormatError):
                ref.decode(forged)
    assert "group offsets" in error_of(path, forge(frame, 64, b"", len(frame) + 16))

    # One escape more or fewer than the planes have, where the padded sizes stay the same.
    for change in (-1, 1):
        text = error_of(path, forge(frame, words + 4, struct.pack("<H", window_word + change)))
        assert "escape codes" in text or "group offsets" in text

    assert raw_bytes(path.decompress(forge(frame, 64, frame[64:80]))) == raw_bytes(t)  # the forger's own test


@every_path
@pytest.mark.parametrize("checksum", [False, True])
def test_forged_packed_frames_are_refused(path, checksum):
    """Four groups of 32 tiles: tiles 0 and 1 are constant, 69 and 70 raw, and so is the last, which is not full."""
    t = normal(3 * 32768 + 31 * 1024 + 400, 1)
    t[:2048] = 1.5
    t[69 * 1024 : 71 * 1024] = random_bits(2048, 2)
    t[-400:] = random_bits(400, 3)
    frame = path.compress(t, layout="packed", checksum=checksum)
    geometry = ref.Geometry(len(t))
    at, words = geometry.tables_end, geometry.word_begin
    assert struct.unpack_from("<5Q", frame, at) == (0, 30, 62, 94, 125)
    assert struct.unpack_from("<H", frame, words + 2 * 127) == (2 << 12 | 16,)

    def refused(text: str, *forgeries: tuple[int, bytes]) -> None:
        forged = frame
        for place, value in forgeries:
            forged = forge(forged, place, value)
        assert forged != frame and text in error_of(path, forged)
        with pytest.raises(ref.FormatError):
            ref.decode(forged)

    for slots in (
        (1, 30, 62, 94, 125),
        (1, 31, 63, 95, 126),
        (0, 29, 61, 93, 124),
        (0, 31, 62, 94, 125),
        (0, 30, 62, 94, 124),
        (0, 30, 62, 94, 126),
        (0, 30, 62, 94, 129),  # more than tiles
        (0, 30, 20, 94, 125),
        (0, 0, 0, 0, 0),
        (0, 30, 62, 94, 1 << 40),
        (0, 30, 62, 94, (1 << 64) - 1),
        (0, 30, 62, 94, (1 << 64) // 1408 + 2),  # 1408 times that is small, modulo 2^64
        (0, 30, 62, (1 << 64) - 31, 0),
        ((1 << 64) - 30, 0, 32, 64, 95),
        (0, (1 << 30) + 30, (1 << 30) + 62, (1 << 30) + 94, 125),  # right for groups 1 and 2 but for their place
        (0, 30, (1 << 63) + 62, (1 << 63) + 94, 125),
    ):
        refused("frame is corrupt", (at, struct.pack("<5Q", *slots)))

    constant, raw, held = 1 << 12 | 2, 2 << 12, 3 << 12 | 2
    for tile, word in (
        (69, raw | 1024),  # as in other layouts
        (69, raw | 639),
        (69, raw | 641),
        (127, raw | 400),
        (127, raw | 17),
        (37, raw | 640),  # with the base of a window
        (37, held),
        (69, held + 1),
        (127, constant),  # not full
        (0, 4 << 12 | 2),
    ):
        refused("invalid tile entry", (words + 2 * tile, struct.pack("<H", word)))
    # Tiles with a place and none in the slots, or the other way round; and with slots that agree.
    for tile, word, slots in (
        (0, held, (0, 31, 63, 95, 126)),
        (0, raw | 640, (0, 31, 63, 95, 126)),
        (69, constant, (0, 30, 62, 93, 124)),
    ):
        change = words + 2 * tile, struct.pack("<H", word)
        refused("group offsets", change)
        refused("frame is corrupt", change, (at, struct.pack("<5Q", *slots)))
    refused("group offsets", (words + 2 * 69, struct.pack("<H", held)))  # fewer dynamic bytes

    assert raw_bytes(path.decompress(forge(frame, at, frame[at : at + 40]))) == raw_bytes(t)  # the forger's own test


@every_path
def test_any_mode_of_equal_values(path):
    """In a packed frame, whatever the encoder would choose: constant, held or raw, each of them full or not."""
    t = torch.cat([normal(1024, 1), torch.full((3 * 1024,), 3.0).bfloat16(), torch.zeros(300).bfloat16()])
    values = np.frombuffer(raw_bytes(t), "<u2")
    tiles = [ref.encode_tile(values[at : at + ref.TILE]) for at in range(0, len(values), ref.TILE)]

    def equal_values(tile: int, mode: int) -> tuple[int, int, bytes, bytes]:
        of_tile = values[ref.TILE * tile :][: ref.TILE]
        if mode != ref.RAW_TILE:
            return mode, 0, b"", of_tile[:1].tobytes()
        e = ref.exponents(of_tile).astype(np.uint8).tobytes()
        return mode, 0, ref.pad16(ref.sign_mantissa(of_tile).tobytes()) + e[:384], e[384:]

    frames = set()
    for last in (ref.HELD, ref.RAW_TILE):
        for first, second, third in itertools.permutations((ref.CONSTANT, ref.HELD, ref.RAW_TILE)):
            modes = [first, second, third, last]
            tiles[1:] = [equal_values(tile, mode) for tile, mode in enumerate(modes, 1)]
            frame = ref.seal(ref.BFLOAT16, ref.FAST, ref.PACKED, len(t), ref.assemble(len(t), tiles, "packed"))
            frames.add(frame)
            assert raw_bytes(path.decompress(frame)) == raw_bytes(t) and ref.decode(frame)[1] == raw_bytes(t)
    assert len(frames) == 12


@every_path
def test_forged_headers_are_refused(path):
    frame = ref.encode(raw_bytes(normal(3000)))
    payload = frame[64:]
    size, check = len(frame), ref.checksum(payload)

    def header(dtype=11, code=1, flags=1, count=3000, frame_bytes=size, checksum=check) -> bytes:
        return ref.make_header(dtype, code, flags, count, frame_bytes, checksum) + payload

    assert raw_bytes(path.decompress(header())) == raw_bytes(normal(3000))
    for forged in (
        header(dtype=21),
        header(dtype=5),
        header(code=3),
        header(code=0),
        header(flags=7),
        header(flags=9),
        header(flags=0),
        header(count=0),
        header(count=1 << 56),
        header(count=(1 << 56) + 1),
        header(count=(1 << 64) - 1),
        header(frame_bytes=size + 8),
        header(frame_bytes=64),
        header(flags=5, frame_bytes=112),  # without the fourth table
        header(flags=5, frame_bytes=128 + 960 + 384 - 16),  # or the place of the last tile behind it
        header(frame_bytes=(1 << 64) - 16),
    ):
        assert "header is corrupt" in error_of(path, forged)
        with pytest.raises(ref.FormatError):
            ref.decode(forged)
    assert "truncated" in error_of(path, header(frame_bytes=size + 16))
    assert "checksum" in error_of(path, header(checksum=check ^ 1))
    reserved = frame[:40] + b"\1" + frame[41:60]
    assert "header is corrupt" in error_of(path, reserved + struct.pack("<I", ref.header_check(reserved)) + payload)
