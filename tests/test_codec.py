"""zipccl.compress and zipccl.decompress: every bit comes back, on every path; broken frames are errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import zipccl
from codec_paths import PATHS, Path, as_tensor, bf16, error_of, raw_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zipccl import _C

every_path = pytest.mark.parametrize("path", PATHS)
LAYOUTS = ["compact", "split", "packed"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

DTYPES = [
    getattr(torch, name)
    for name in (
        "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16 "
        "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz uint16 uint32 uint64 float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(n: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return (torch.randn(n, generator=generator(seed)) * scale).bfloat16()


def random_bits(n: int, seed: int = 0) -> torch.Tensor:
    return bf16(torch.randint(0, 65536, (n,), generator=generator(seed), dtype=torch.int32))


def check_exact(path: Path, t: torch.Tensor, **options) -> bytes:
    """Round trip; returns the frame."""
    frame = path.compress(t, **options)
    out = path.decompress(frame)
    assert out.dtype == t.dtype and out.shape == (t.numel(),)
    assert raw_bytes(out) == raw_bytes(t)
    return frame


def packed_kinds() -> torch.Tensor:
    """Groups with tiles of all kinds, of which packed frames look at some closely: section 5.3 of docs/format.md."""

    def group(seed: int, constant=(), raw=(), equal: dict | None = None) -> torch.Tensor:
        """equal: how many values some tiles begin with."""
        tiles = normal(32768, seed).reshape(32, 1024)
        for tile in constant:
            tiles[tile] = tile - 1.5
        for tile in raw:
            tiles[tile] = random_bits(1024, seed + tile)
        for tile, n in (equal or {}).items():
            tiles[tile, :n] = 1.5
        return tiles.reshape(-1)

    return torch.cat(
        [
            group(60, constant=(0, 1, 7, 31), raw=(2, 8, 30)),
            group(61),
            group(62, constant=(1, 10, 12, 20, 22, 29, 31), raw=(0, 11)),
            group(63, constant=range(32)),
            group(64, raw=range(32)),
            group(65, equal={tile: 1023 for tile in range(32)}),
            *(group(66 + tile, constant=(5, 6), equal={tile: 4}) for tile in (0, 11, 21, 30)),
            group(99, constant=(5, 6), equal={tile: 3 for tile in (0, 11, 21, 30)} | {1: 4, 29: 4}),
            group(100, constant=(3,), raw=(31,), equal={11: 4})[: 31 * 1024 + 500],
        ]
    )


def every_pattern() -> torch.Tensor:
    return bf16(torch.arange(65536, dtype=torch.int32))


CASES = {
    "every pattern": every_pattern(),
    "every pattern, shuffled": every_pattern()[torch.randperm(65536, generator=generator(1))],
    "random bits": random_bits(70001),
    "normal": normal(70001),
    "NaN payloads": bf16(torch.cat([torch.arange(0x7F81, 0x8000), torch.arange(0xFF81, 0x10000)]).repeat(30)),
    "negative zeros": bf16(torch.full((5000,), 0x8000)),
    "both zeros": bf16(torch.arange(5000) % 2 * 0x8000),
    "denormals": bf16(torch.arange(4000) % 128 + torch.arange(4000) % 3 * 0x4000),
    "infinities": torch.tensor([float("inf"), -float("inf"), 1.0, -0.0]).bfloat16().repeat(1000),
    "zeros": torch.zeros(100000).bfloat16(),
    "all equal": bf16(torch.full((40000,), 0x7FC1)),
    "mixture of scales": torch.cat([normal(700, k, 10.0 ** (k - 20)) for k in range(40)]),
    "zero rows": torch.cat([torch.zeros(3000).bfloat16(), normal(1000), torch.zeros(30000).bfloat16(), normal(3000)]),
    "one odd value in a constant": torch.cat([torch.ones(1023), torch.zeros(1), torch.ones(2000)]).bfloat16(),
    "exponents at the top": bf16(torch.arange(3000) % 8 * 128 + 0x7C00),
    "packed kinds": packed_kinds(),
    "many escapes": torch.where(torch.arange(5000) % 2 == 0, normal(5000), random_bits(5000)),
}


@every_path
@every_layout
@pytest.mark.parametrize("name", CASES)
def test_every_bit_comes_back(path, layout, name):
    check_exact(path, CASES[name], layout=layout)
    check_exact(path, CASES[name], layout=layout, checksum=False)


COUNTS = sorted(
    {0, 1, 2, 3, 384, 385, 386, 700, 5000}
    | {b + d for b in (8, 16, 32, 128, 256, 512, 768, 1024, 2048, 32768, 65536) for d in (-1, 0, 1)}
)


@every_path
@every_layout
def test_every_count(path, layout):
    t, zeros = normal(max(COUNTS), 3), torch.zeros(max(COUNTS)).bfloat16()
    for n in COUNTS:
        check_exact(path, t[:n], layout=layout)
        check_exact(path, zeros[:n], layout=layout)


@every_path
def test_empty(path):
    for dtype in DTYPES:
        frame = check_exact(path, torch.empty(0, dtype=dtype))
        assert len(frame) == 64
    check_exact(path, torch.empty(3, 0, 5).bfloat16())


@every_path
def test_any_shape_and_stride(path):
    matrix = normal(300 * 200).reshape(300, 200).to(path.device)  # here, as a copy to the device loses most strides
    for t in (
        matrix,
        matrix.t(),
        matrix[::3, 1::2],
        matrix[:, 5],
        matrix[7],
        matrix[1:, 1:],
        matrix.flip(0),
        matrix[:1, :1].expand(60, 70),
        matrix.reshape(3, 100, 200).permute(2, 0, 1),
        torch.tensor(1.5).bfloat16(),
        torch.randn(40, 60, generator=generator(4)).to(path.device)[::2].t(),
    ):
        check_exact(path, t)


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(path, dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    for n in (1, 5, 4096, 70001):
        data = torch.randint(0, 256, (n * size,), generator=generator(n), dtype=torch.uint8)
        t = (data & 1 if dtype == torch.bool else data).view(dtype)
        frame = check_exact(path, t)
        if dtype != torch.bfloat16:
            assert len(frame) == -(-(64 + n * size) // 16) * 16
        check_exact(path, t, code="raw", layout="split", checksum=False)


@every_path
def test_conjugate_and_negative_views(path):
    z = torch.randn(1000, generator=generator(5), dtype=torch.complex64).to(path.device)
    check_exact(path, z.conj())
    check_exact(path, z.conj().imag)


def test_what_needs_grad_can_be_compressed():
    t = torch.randn(2000, requires_grad=True)
    out = zipccl.decompress(zipccl.compress(t))
    assert not out.requires_grad and torch.equal(out, t.detach())


@pytest.mark.parametrize("n", [1, 2, 1000, 1024, 1025, 100_000, 1 << 20])
def test_split_frames_are_no_larger_than_promised(n):
    for t in (normal(n), random_bits(n)):
        size = zipccl.compress(t, layout="split").numel()
        assert size <= 2 * n * (1 + 1 / 512) + 192 + 384 * -(-n // 1024)
    assert n < 100_000 or 1.18 < size / (2 * n) < 1.20  # random bits cannot be compressed


@every_path
def test_sizes(path):
    n = 1 << 20
    for t in (normal(n), random_bits(n), CASES["mixture of scales"]):
        for checksum in (False, True):
            size = len(path.compress(t, checksum=checksum))
            assert size <= 2 * t.numel() * (1 + 1 / 512) + 192
    bits = 8 * len(path.compress(normal(n))) / n
    assert bits < 11.3  # normal numbers: 8 bits of sign and mantissa, 3 of code, and few escapes
    assert len(path.compress(torch.zeros(n).bfloat16())) < n / 100
    assert len(path.compress(normal(n), code="raw")) == 2 * n + 64


@pytest.mark.parametrize("isa", _C.isas())
def test_large_frames_are_packed(isa):
    n = 24 << 20
    t = torch.zeros(n).bfloat16()
    t[32768 : 32768 + len(packed_kinds())] = packed_kinds()
    for count, layout, is_layout in (
        (n, "compact", "packed"),
        (n - 1, "compact", "compact"),
        (n - 1, "packed", "packed"),
        (n, "split", "split"),
    ):
        frame = _C.compress(t[:count], "fast", layout, False, isa)
        assert _C.frame_info(frame)["layout"] == is_layout
        assert torch.equal(_C.decompress(frame, isa).view(torch.int16), t[:count].view(torch.int16))
    for code in ("dense", "raw"):
        assert _C.frame_info(_C.compress(t, code, "compact", False, isa))["layout"] == "compact"


@every_path
def test_packed_frames_are_hardly_larger(path):
    n = 1 << 20
    for t in (normal(n), random_bits(n), torch.zeros(n).bfloat16()):
        packed, compact = (len(path.compress(t, layout=layout)) for layout in ("packed", "compact"))
        table = 8 * (n // 32768 + 1)
        assert compact + table <= packed < compact + table + 32


@settings(max_examples=300, deadline=None)
@given(count=st.one_of(st.integers(0, 2**18), st.integers(0, 2**56)), layout=st.sampled_from(["compact", "packed"]))
def test_property_bounds_are_those_promised(count, layout):
    bound = _C.frame_bound(torch.zeros(1).bfloat16().expand(count), layout=layout)
    more = 192 if layout == "compact" and count < 24 << 20 else 576
    assert 512 * (bound - more) <= 513 * 2 * count


@every_path
def test_input_is_not_written(path):
    t = normal(5000)
    before = t.clone()
    frame = path.compress(t)
    as_given = as_tensor(frame).to(path.device)
    _C.decompress(as_given, path.isa)
    assert raw_bytes(t) == raw_bytes(before) and as_given.cpu().numpy().tobytes() == frame


@pytest.mark.parametrize("isa", _C.isas())
def test_the_environment_names_an_instruction_set(isa):
    command = [sys.executable, "-c", "from zipccl import _C; print(_C.isas()[-1])"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"ZIPCCL_ISA": isa})
    assert done.stdout.strip() == isa, done.stderr


@pytest.mark.parametrize("isa", ["avx1024", ""])
def test_the_environment_names_no_instruction_set(isa):
    command = [sys.executable, "-c", "import zipccl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"ZIPCCL_ISA": isa})
    known = tuple(sorted(_C.isas()))
    assert done.returncode == 1
    assert f"ValueError: ZIPCCL_ISA must be one of {known} on this processor, not {isa!r}" in done.stderr


def test_public_interface():
    t = normal(3000)
    frame = zipccl.compress(t)
    assert frame.numpy().tobytes() == _C.compress(t, "fast", "compact", True, "best").numpy().tobytes()
    assert torch.equal(frame, zipccl.compress(t, "fast", layout="compact", checksum=True))
    assert torch.equal(zipccl.decompress(frame), t)
    with pytest.raises(ValueError, match="code"):
        zipccl.compress(t, "no such code")
    with pytest.raises(ValueError, match="layout"):
        zipccl.compress(t, layout="no such layout")
    with pytest.raises(TypeError):
        zipccl.compress([1.0, 2.0])
    with pytest.raises(TypeError, match="uint8"):
        zipccl.decompress(t)
    with pytest.raises(TypeError, match="1-D"):
        zipccl.decompress(frame.reshape(2, -1))
    assert issubclass(zipccl.FrameError, zipccl.Error) and issubclass(zipccl.Error, RuntimeError)


# ---- Broken frames --------------------------------------------------------------------------------------------------


@every_path
def test_frame_may_be_longer_or_misaligned(path):
    t = normal(3000)
    frame = path.compress(t)
    assert raw_bytes(path.decompress(frame + b"\xee" * 100)) == raw_bytes(t)
    shifted = as_tensor(b"\0" * 5 + frame).to(path.device)[5:]
    assert raw_bytes(_C.decompress(shifted, path.isa)) == raw_bytes(t)
    strided = torch.stack([as_tensor(frame), as_tensor(frame)], 1).to(path.device)[:, 0]
    assert raw_bytes(_C.decompress(strided, path.isa)) == raw_bytes(t)


@every_path
@every_layout
@pytest.mark.parametrize("checksum", [False, True])
def test_truncated_at_every_length(path, layout, checksum):
    small = path.compress(normal(450), layout=layout, checksum=checksum)
    long = path.compress(torch.cat([normal(40000), torch.zeros(3000).bfloat16()]), layout=layout, checksum=checksum)
    step = 1 if path.device == "cpu" else 13
    for frame, lengths in ((small, range(0, len(small), step)), (long, range(0, len(long), 997))):
        for n in lengths:
            assert "frame is truncated" in error_of(path, frame[:n])


@every_path
@every_layout
def test_every_bit_flip_is_noticed(path, layout):
    frame = path.compress(normal(450), layout=layout)
    for bit in range(0, 8 * len(frame), 1 if path.device == "cpu" else 7):
        broken = bytearray(frame)
        broken[bit // 8] ^= 1 << bit % 8
        error_of(path, bytes(broken))


@every_path
@every_layout
def test_bit_flips_without_checksum_stay_in_bounds(path, layout):
    frame = path.compress(normal(1500), layout=layout, checksum=False)
    tables_end = 64 + 16 + 16 + 16 + 16 * (layout == "packed")
    for bit in range(0, 8 * len(frame), 3 if path.device == "cpu" else 29):
        broken = bytearray(frame)
        broken[bit // 8] ^= 1 << bit % 8
        if bit < 8 * 64:
            error_of(path, bytes(broken))
            continue
        try:
            out = path.decompress(bytes(broken))
        except zipccl.FrameError:
            continue
        assert out.shape == (1500,)
        if bit >= 8 * tables_end:
            assert (out.view(torch.int16) != normal(1500).view(torch.int16)).sum() <= 1


@every_path
def test_errors_name_the_cause(path):
    frame = path.compress(normal(3000))

    def flipped(at: int) -> bytes:
        return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]

    assert "truncated" in error_of(path, b"")
    assert "wrong magic" in error_of(path, bytes(200))
    assert "wrong magic" in error_of(path, flipped(0))
    assert "version" in error_of(path, flipped(4))
    assert "header is corrupt" in error_of(path, flipped(8))
    assert "checksum" in error_of(path, flipped(1000))


# ---- Property tests -------------------------------------------------------------------------------------------------

quickly = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def group_of_tiles(seed: int, kinds: int) -> torch.Tensor:
    """A whole group: with 2 kinds tiles may be raw, with 3 constant, with 4 constant but for the end."""
    tiles = normal(32768, seed, 2.0 ** (seed % 250 - 125)).reshape(32, 1024)
    kind = torch.randint(0, kinds, (32, 1), generator=generator(seed))
    tiles = torch.where(kind == 1, random_bits(32768, seed).reshape(32, 1024), tiles)
    tiles = torch.where(kind == 2, bf16(torch.tensor(seed % 65536)), tiles)
    equal = (kind == 3) & (torch.arange(1024) < 1 + seed % 1024)
    return torch.where(equal, bf16(torch.tensor(seed // 65536)), tiles).reshape(-1)


@st.composite
def bf16_tensors(draw) -> torch.Tensor:
    """Whole groups, or none, then runs of values of one kind, of lengths that tiles do not respect."""
    groups = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    pieces = [group_of_tiles(draw(st.integers(0, 2**31)), draw(st.integers(1, 4))) for _ in range(groups)]
    for _ in range(draw(st.integers(0, 6))):
        n = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000)))
        seed = draw(st.integers(0, 2**31))
        kind = draw(st.sampled_from(["constant", "normal", "bits", "few exponents"]))
        if kind == "constant":
            pieces.append(bf16(torch.full((n,), seed % 65536)))
        elif kind == "normal":
            pieces.append(normal(n, seed, 2.0 ** (seed % 250 - 125)))
        elif kind == "bits":
            pieces.append(random_bits(n, seed))
        else:
            spread = torch.randint(0, 1 + seed % 12, (n,), generator=generator(seed)) + seed % 244
            pieces.append(bf16(random_bits(n, seed).view(torch.int16).int() & 0x807F | spread.int() << 7))
    return torch.cat(pieces) if pieces else torch.empty(0).bfloat16()


@every_path
@quickly
@given(t=bf16_tensors(), layout=st.sampled_from(LAYOUTS), checksum=st.booleans())
def test_property_round_trip(path, t, layout, checksum):
    check_exact(path, t, layout=layout, checksum=checksum)


@every_path
@quickly
@given(data=st.binary(max_size=400))
def test_property_garbage_is_refused(path, data):
    error_of(path, data)


@every_path
@quickly
@given(t=bf16_tensors(), layout=st.sampled_from(LAYOUTS), data=st.data())
def test_property_damage_is_noticed(path, t, layout, data):
    frame = path.compress(t, layout=layout)
    begin = data.draw(st.integers(0, len(frame) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=60))
    broken = (frame[:begin] + damage + frame[begin + len(damage) :])[: len(frame)]
    try:
        out = path.decompress(broken)
    except zipccl.FrameError:
        return
    assert broken == frame and raw_bytes(out) == raw_bytes(t)


@pytest.mark.parametrize("thing, said", [([1, 2], "list"), (torch.eye(3).to_sparse(), "torch.sparse_coo")])
def test_what_is_no_dense_tensor_is_named(thing, said):
    with pytest.raises(TypeError, match=f"^compress takes a dense torch.Tensor, not {said}$"):
        zipccl.compress(thing)
    if not isinstance(thing, torch.Tensor):
        with pytest.raises(TypeError, match=f"^a frame is a 1-D tensor of torch.uint8, not {said}$"):
            zipccl.decompress(thing)
