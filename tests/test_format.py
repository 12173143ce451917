"""Frames are what docs/format.md says: every implementation makes the bytes of the numpy one, and reads them."""

from __future__ import annotations

import functools
import struct

import format_reference as ref
import pytest
import torch
from codec_paths import PATHS, bf16, error_of, raw_bytes
from golden.make_golden import HERE, goldens
from test_codec import CASES, COUNTS, DTYPES, normal, random_bits

every_path = pytest.mark.parametrize("path", PATHS)
both_layouts = pytest.mark.parametrize("layout", ["compact", "split"])


def tensor_of(dtype: str, data: bytes) -> torch.Tensor:
    t = torch.empty(len(data) // ref.DTYPES[dtype][1], dtype=getattr(torch, dtype))
    if data:
        t.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return t


@functools.cache
def reference_frame(data: bytes, split: bool, check: bool) -> bytes:
    return ref.encode(data, split=split, check=check)


def check_same(path, t: torch.Tensor, layout: str, checksum: bool) -> None:
    expected = reference_frame(raw_bytes(t), layout == "split", checksum)
    assert path.compress(t, layout=layout, checksum=checksum) == expected
    assert raw_bytes(path.decompress(expected)) == raw_bytes(t)


@every_path
@both_layouts
@pytest.mark.parametrize("name", CASES)
def test_same_bytes_as_reference(path, layout, name):
    check_same(path, CASES[name], layout, checksum=True)


@every_path
@both_layouts
def test_same_bytes_as_reference_at_every_count(path, layout):
    for n in COUNTS:
        if n < 3000:
            check_same(path, normal(n, 7), layout, checksum=False)
            check_same(path, random_bits(n, 8), layout, checksum=True)
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
        for layout in ("compact", "split"):
            for checksum in (False, True):
                expected = ref.encode(
                    data, number, ref.FAST if code == "fast" else ref.RAW, layout == "split", checksum
                )
                assert path.compress(t, code, layout, checksum) == expected
                assert ref.decode(expected) == (number, data)


def test_reference_decodes_what_it_encodes():
    for t in CASES.values():
        data = raw_bytes(t[:3000])
        assert ref.decode(reference_frame(data, False, True)) == (ref.BFLOAT16, data)
        assert ref.decode(reference_frame(data, True, False)) == (ref.BFLOAT16, data)


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
    assert sum(g.path.stat().st_size for g in goldens()) < 60_000
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
@both_layouts
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
            (words, struct.pack("<H", 3 << 12 | 2)),
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
        header(flags=5),
        header(flags=0),
        header(count=0),
        header(count=1 << 56),
        header(count=(1 << 56) + 1),
        header(count=(1 << 64) - 1),
        header(frame_bytes=size + 8),
        header(frame_bytes=64),
        header(frame_bytes=(1 << 64) - 16),
    ):
        assert "header is corrupt" in error_of(path, forged)
        with pytest.raises(ref.FormatError):
            ref.decode(forged)
    assert "truncated" in error_of(path, header(frame_bytes=size + 16))
    assert "checksum" in error_of(path, header(checksum=check ^ 1))
    reserved = frame[:40] + b"\1" + frame[41:60]
    assert "header is corrupt" in error_of(path, reserved + struct.pack("<I", ref.header_check(reserved)) + payload)
