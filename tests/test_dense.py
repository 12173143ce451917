"""Code dense: every bit of every dtype comes back, frames are those of the numpy implementation, lies are refused."""

from __future__ import annotations

import struct

import dense_reference as dense
import format_reference as ref
import pytest
import torch
import zipccl
from codec_paths import PATHS, error_of, raw_bytes
from hypothesis import given
from hypothesis import strategies as st
from test_codec import CASES, COUNTS, DTYPES, bf16_tensors, check_exact, generator, normal, quickly, random_bits
from test_format import forge

every_path = pytest.mark.parametrize("path", PATHS)

FLOATS = [
    dtype
    for dtype in DTYPES
    if (dtype.is_floating_point or dtype.is_complex) and dtype is not getattr(torch, "float8_e8m0fnu", None)
]
TILE = 1024


def number_of(dtype: torch.dtype) -> tuple[int, int]:
    return ref.DTYPES[str(dtype).removeprefix("torch.")]


def reference_frame(t: torch.Tensor, checksum: bool = True) -> bytes:
    return ref.encode(raw_bytes(t), number_of(t.dtype)[0], ref.DENSE, check=checksum)


def check_same(path, t: torch.Tensor) -> bytes:
    """Round trip, and the reference's frame."""
    frame = check_exact(path, t, code="dense")
    assert frame == reference_frame(t)
    return frame


def bits_of(path, t: torch.Tensor) -> float:
    return 8 * len(path.compress(t, code="dense")) / t.numel()


def modes(frame: bytes) -> list[int]:
    _, _, dtype, _, _, count, _, _ = struct.unpack_from("<IBBBBQQQ", frame)
    geometry = ref.Geometry(count * dense.elements_of(dtype, ref.SIZES[dtype]).parts)
    words = struct.unpack_from(f"<{geometry.tiles}H", frame, geometry.word_begin)
    return [word >> 12 for word in words]


def values(dtype: torch.dtype, seed: int, n: int, scale: float = 0.02) -> torch.Tensor:
    """Normal numbers, some of them zero, some far smaller than the others."""
    t = torch.randn(n, generator=generator(seed), dtype=torch.float64) * scale
    t[torch.rand(n, generator=generator(seed + 1)) < 0.02] *= 1e-3
    t[n // 2 : n // 2 + n // 5 : 2] = 0
    if dtype.is_complex:
        t = torch.complex(t, t.flip(0))
    return t.to(dtype)


# ---- Every bit comes back -------------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("name", CASES)
def test_bf16(path, name):
    check_same(path, CASES[name])


@every_path
def test_every_count(path):
    t, zeros = normal(max(COUNTS), 3), torch.zeros(max(COUNTS)).bfloat16()
    for n in COUNTS:
        check_exact(path, t[:n], code="dense")
        check_exact(path, zeros[:n], code="dense")
        if n < 3000 or n in (32767, 32769):
            check_same(path, t[:n])
            check_same(path, random_bits(n, 8))


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_bits(path, dtype):
    size = dtype.itemsize
    for n in (0, 1, 2, 5, 63, TILE, TILE + 1, 34001):
        data = torch.randint(0, 256, (n * size,), generator=generator(n), dtype=torch.uint8)
        t = (data & 1 if dtype == torch.bool else data).view(dtype) if n else torch.empty(0, dtype=dtype)
        frame = check_same(path, t)
        assert len(frame) <= n * size * (1 + (1 / 256 if size == 1 else 1 / 512)) + 192


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_tiles(path, dtype):
    size = dtype.itemsize
    element = torch.randint(0, 256, (size,), generator=generator(9), dtype=torch.uint8)
    t = (element & 1 if dtype == torch.bool else element).repeat(40 * TILE + 77).view(dtype)
    if dtype.is_complex:
        t = torch.view_as_complex(torch.view_as_real(t)[:, :1].expand(-1, 2).contiguous())  # equal elements
    frame = check_same(path, t)
    assert set(modes(frame)) == {dense.CONSTANT} and len(frame) < t.numel() * size / 90 + 600
    t = t.clone()
    t.view(torch.uint8)[-1] ^= 1
    assert modes(check_same(path, t))[-1] != dense.CONSTANT


@every_path
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(path, dtype):
    for seed, scale in enumerate((0.02, 1.0, 3e4, 1e-7)):
        check_same(path, values(dtype, seed, 5 * TILE + 500, scale))
    check_same(path, values(dtype, 9, 300))


@every_path
def test_every_float16_and_float8(path):
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    check_same(path, halves)
    check_same(path, halves[torch.randperm(65536, generator=generator(1))])
    every_byte = torch.arange(256).to(torch.uint8).repeat(9)
    for dtype in FLOATS:
        if dtype.itemsize == 1:
            check_same(path, every_byte.view(dtype))
            check_same(path, every_byte[torch.randperm(9 * 256, generator=generator(2))].view(dtype))


@every_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nan_payloads_infinities_denormals(path, dtype):
    number = torch.int32 if dtype == torch.float32 else torch.int64
    sign, exponent = (31, 23) if dtype == torch.float32 else (63, 52)
    low = torch.arange(3000).to(number)
    for pattern in (0xFF if dtype == torch.float32 else 0x7FF, 0):
        for shift in (0, exponent - 12):
            t = low << shift | pattern << exponent | (low & 1) << sign
            check_same(path, t.view(dtype))


@every_path
def test_rests_of_shorter_types(path):
    """Numbers that a shorter type holds cost what it costs."""
    x = normal(64 * TILE, 1).float()
    n = x.numel()
    bf16_bits, half_bits, single_bits = bits_of(path, x.bfloat16()), bits_of(path, x.half()), 24 + 2.8
    for dtype in (torch.float32, torch.float64):
        for source, bits in ((torch.bfloat16, bf16_bits), (torch.float16, half_bits)):
            t = (x * 1.7).to(source).to(dtype)
            check_same(path, t[: 5 * TILE])
            assert abs(bits_of(path, t) - bits) < 0.05
    exact = (torch.randn(n, generator=generator(3)) * 0.02).double()
    assert bits_of(path, exact) < single_bits and bits_of(path, exact.float()) < single_bits
    t = exact.clone()
    t[5] += 2.0**-50  # needs every bit
    assert modes(check_same(path, t[: 2 * TILE])) == [0, 9]
    assert bits_of(path, x.bfloat16().float()) < 10.9


@every_path
def test_exponents_without_a_symbol(path):
    t = torch.randn(2 * TILE, generator=generator(4), dtype=torch.float64)
    t[3] = 1e-300
    assert modes(check_same(path, t))[0] == dense.RAW_TILE


@every_path
def test_shapes(path):
    def tile(weights: dict[int, int]) -> torch.Tensor:
        e = torch.tensor([x for x, n in weights.items() for _ in range(n)], dtype=torch.int32)
        mixed = e[torch.randperm(TILE, generator=generator(5))]
        return (mixed << 7 | torch.randint(0, 128, (TILE,), generator=generator(6)).int()).to(torch.int16)

    near = tile({120: 300, 121: 300, 122: 300, 119: 60, 123: 40, 117: 24})
    far = tile({120: 300, 121: 300, 122: 300, 119: 60, 123: 24, 117: 40})
    zeros = tile({0: 300, 120: 100, 121: 280, 122: 280, 119: 30, 123: 34})
    frame = check_same(path, torch.cat([near, far, zeros]).view(torch.bfloat16))
    assert modes(frame) == [0, 1, 2]


@every_path
def test_smaller_than_fast(path):
    for scale in (1e-3, 1.0):
        t = normal(1 << 18, 7, scale)
        assert len(path.compress(t, code="dense")) < 0.965 * len(path.compress(t, code="fast"))
        assert bits_of(path, t) < 10.72


@every_path
def test_same_choices_as_reference(path):
    """Base and shape: ties, both ends of the range, zeros, tails of every kind."""
    tiles = []
    for seed in range(150):
        g = torch.Generator().manual_seed(seed)
        low = int(torch.randint(0, 256, (1,), generator=g))
        width = int(torch.randint(1, 14, (1,), generator=g))
        e = (low + torch.randint(0, width, (TILE,), generator=g)) % 256
        e[torch.rand(TILE, generator=g) < seed % 5 / 60] = 0
        tiles.append((e.int() << 7 | torch.randint(0, 128, (TILE,), generator=g).int()).to(torch.int16))
    frame = check_same(path, torch.cat(tiles).view(torch.bfloat16))
    assert set(modes(frame)) >= {0, 1, 2}
    for seed, tile in enumerate(tiles[:40]):
        check_same(path, tile[: 85 + 16 * seed + seed % 11].view(torch.bfloat16))


@every_path
def test_layout_changes_nothing(path):
    t = normal(5000)
    compact = path.compress(t, code="dense")
    for layout in ("split", "packed"):
        frame = path.compress(t, code="dense", layout=layout)
        assert frame != compact and frame[64:] == compact[64:] and raw_bytes(path.decompress(frame)) == raw_bytes(t)


@every_path
def test_complex_and_lazy_views(path):
    z = torch.randn(3000, generator=generator(5), dtype=torch.complex64).to(path.device)
    check_exact(path, z.conj(), code="dense")
    check_exact(path, z.conj().imag, code="dense")


@every_path
@quickly
@given(t=bf16_tensors(), dtype=st.sampled_from([d for d in FLOATS if not d.is_complex]), checksum=st.booleans())
def test_property_round_trip(path, t, dtype, checksum):
    for u in (t, t.float().to(dtype)):
        frame = check_exact(path, u, code="dense", checksum=checksum)
        assert ref.decode(frame) == (number_of(u.dtype)[0], raw_bytes(u))


# ---- Broken frames --------------------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("checksum", [False, True])
def test_truncated(path, checksum):
    frame = path.compress(normal(3000), code="dense", checksum=checksum)
    for n in range(0, len(frame), 7 if path.device == "cpu" else 101):
        assert "frame is truncated" in error_of(path, frame[:n])


@every_path
def test_every_bit_flip_is_noticed(path):
    frame = path.compress(normal(450), code="dense")
    for bit in range(0, 8 * len(frame), 1 if path.device == "cpu" else 7):
        broken = bytearray(frame)
        broken[bit // 8] ^= 1 << bit % 8
        error_of(path, bytes(broken))


@every_path
def test_bit_flips_without_checksum_stay_in_bounds(path):
    for t in (normal(1500), normal(700).float()):
        frame = path.compress(t, code="dense", checksum=False)
        for bit in range(8 * 64, 8 * len(frame), 3 if path.device == "cpu" else 29):
            broken = bytearray(frame)
            broken[bit // 8] ^= 1 << bit % 8
            try:
                out = path.decompress(bytes(broken))
            except zipccl.FrameError:
                with pytest.raises(ref.FormatError):
                    ref.decode(bytes(broken))
                continue
            assert raw_bytes(out) == ref.decode(bytes(broken))[1]


@every_path
@pytest.mark.parametrize("checksum", [False, True])
def test_forged_tables_are_refused(path, checksum):
    t = torch.zeros(33 * TILE + 700).bfloat16()
    t[TILE : 2 * TILE] = random_bits(TILE, 1)
    t[2 * TILE : 3 * TILE] = normal(TILE, 2)
    t[-700:] = normal(700, 3)
    frame = path.compress(t, code="dense", checksum=checksum)
    geometry = ref.Geometry(t.numel())
    words, bases = geometry.word_begin, geometry.base_begin
    assert modes(frame)[:3] == [dense.CONSTANT, dense.RAW_TILE, 0]
    (window,) = struct.unpack_from("<H", frame, words + 4)
    cases = {
        "group offsets": [
            (64, struct.pack("<Q", 16)),
            (72, struct.pack("<Q", 0)),
            (72, struct.pack("<q", -16)),
            (72, struct.pack("<Q", 1 << 40)),
            (words + 2 * 33, struct.pack("<H", 700)),
        ],
        "invalid tile entry": [
            (words, struct.pack("<H", dense.CONSTANT << 12 | 3)),
            (words, struct.pack("<H", 14 << 12)),
            (words + 2, struct.pack("<H", dense.RAW_TILE << 12 | 1)),
            (words + 4, struct.pack("<H", 3 * 256 + TILE + 1)),
            (words + 4, struct.pack("<H", window | 3 << 12)),  # a rest that bf16 has not
            (words + 4, struct.pack("<H", window | 9 << 12)),
            (bases, b"\x01"),
            (bases + 1, b"\x01"),
        ],
        "codes": [
            (words + 4, struct.pack("<H", window - 1)),
            (words + 4, struct.pack("<H", window + 1)),
            (words + 4, struct.pack("<H", 0)),
        ],
    }
    for text, forgeries in cases.items():
        for at, value in forgeries:
            forged = forge(frame, at, value)
            found = error_of(path, forged)
            assert text in found or (text == "codes" and "group offsets" in found)
            with pytest.raises(ref.FormatError):
                ref.decode(forged)
    assert "group offsets" in error_of(path, forge(frame, 64, b"", len(frame) + 16))
    assert raw_bytes(path.decompress(forge(frame, 64, frame[64:80]))) == raw_bytes(t)  # the forger's own test


@every_path
def test_codes_that_lead_out_of_the_tile(path):
    """Level 1 all unnamed, and every level behind it: more codes than there are dynamic bytes."""
    t = normal(TILE, 4)
    frame = path.compress(t, code="dense", checksum=False)
    geometry = ref.Geometry(TILE)
    at = geometry.tables_end + TILE
    forged = forge(frame, at, b"\xff" * (len(frame) - at))
    assert "codes" in error_of(path, forged)
    with pytest.raises(ref.FormatError):
        ref.decode(forged)


@every_path
def test_forged_headers_are_refused(path):
    t = values(torch.float32, 1, 3000)
    frame = reference_frame(t)
    payload = frame[64:]
    true_size, true_check = len(frame), ref.checksum(payload)

    def header(dtype=6, code=2, flags=1, count=3000, size=true_size, check=true_check) -> bytes:
        return ref.make_header(dtype, code, flags, count, size, check) + payload

    assert raw_bytes(path.decompress(header())) == raw_bytes(t)
    for forged in (
        header(dtype=21),
        header(code=3),
        header(code=1),
        header(code=0),
        header(flags=7),
        header(flags=9),
        header(count=0),
        header(count=1 << 56),
        header(count=(1 << 64) - 1),
        header(size=len(frame) + 8),
        header(size=64),
    ):
        assert "header is corrupt" in error_of(path, forged)
        with pytest.raises(ref.FormatError):
            ref.decode(forged)
    assert "truncated" in error_of(path, header(size=len(frame) + 16))
    assert "checksum" in error_of(path, header(check=0))


@every_path
@quickly
@given(t=bf16_tensors(), data=st.data())
def test_property_damage_is_noticed(path, t, data):
    frame = path.compress(t, code="dense")
    begin = data.draw(st.integers(0, len(frame) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=60))
    broken = (frame[:begin] + damage + frame[begin + len(damage) :])[: len(frame)]
    try:
        out = path.decompress(broken)
    except zipccl.FrameError:
        return
    assert broken == frame and raw_bytes(out) == raw_bytes(t)
