"""The quantiser makes the bytes and numbers of docs/dynamiq.md, on every device."""

from __future__ import annotations

import numpy as np
import pytest
import quantizer_reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zipccl import _C

Q = _C.quantizer
both_widths = pytest.mark.parametrize("widths", ["fine", "paper"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


def spread(seed: int, count: int, octaves: float = 5.0) -> torch.Tensor:
    """Normal values whose scale changes from super-group to super-group, and a little from group to group."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.randn(count // 256 + 1, generator=g).mul(octaves).repeat_interleave(256)[:count]
    small = torch.randn(count // 16 + 1, generator=g).repeat_interleave(16)[:count]
    return torch.randn(count, generator=g) * torch.exp2(scale + small - 8)


def special(count: int) -> torch.Tensor:
    """Every kind of value that is not ordinary, one kind to a super-group where there is room."""
    x = spread(3, count)
    marks = {
        5: float("nan"), 256 + 17: float("inf"), 512 + 18: -float("inf"), 768 + 3: 3.4e38, 1024 + 200: -3.4e38,
        1280 + 1: 1e-40, 2048: 1e30, 2304 + 9: 2.0**-120,
    }  # fmt: skip
    for at, value in marks.items():
        if at < count:
            x[at] = value
    x[1280:1536] *= 1e-40  # denormals
    x[1536:1792] = 0
    x[1792:2048] = -0.0
    x[2304:2560] *= 2.0**-115
    x[2560:2816][::3] = 0
    x[2816:2832] = 0
    x[3072:3328].abs_()
    x[3328:3584].abs_().neg_()
    x[3584:3840] = 2.0**-3
    return x


CASES = {
    "spread": spread(1, 40 * 256),
    "narrow": spread(2, 40 * 256, octaves=0.5),
    "tail": spread(4, 33 * 256 + 77),
    "special": special(16 * 256),
    "special tail": special(16 * 256 - 5),
    "zeros": torch.zeros(5 * 256 + 1),
    "mostly zeros": torch.cat([torch.zeros(30 * 256), spread(5, 300), torch.zeros(999)]),
    "short": spread(6, 100),
    "one": torch.tensor([0.5]),
    "all nan": torch.full((700,), float("nan")),
}


class Bucket:
    """One bucket in both implementations."""

    def __init__(self, x: torch.Tensor, device="cpu", *, domains=1, parts=3, widths="fine", bits=5.0, ranks=1):
        self.x = x.float()
        self.shape = Q.Shape(x.numel(), domains, parts, widths, bits)
        self.ref = ref.Shape(x.numel(), domains, parts, widths, bits)
        self.on_device = x.to(device)
        self.stats = Q.statistics(self.shape, self.on_device)
        self.plan = Q.allocate(self.shape, self.stats, ranks)
        self.ref_stats = ref.statistics(self.ref, self.x.numpy())
        self.ref_plan = ref.allocate(self.ref, self.ref_stats, ranks)
        self.all_parts = domains * parts

    def empty(self, parts=None) -> torch.Tensor:
        n = (self.all_parts if parts is None else parts) * self.shape.part_bytes
        return torch.full((n,), 0xAB, dtype=torch.uint8, device=self.plan.device)

    def pack(self, key: ref.Key, x=None, **more) -> torch.Tensor:
        """All parts, packed."""
        out = self.empty()
        x = self.on_device if x is None else x
        Q.combine(self.shape, self.plan, x=x, packed_out=out, **key_arguments(key), **more)
        return out

    def unpack(self, packed: torch.Tensor, **more) -> torch.Tensor:
        out = torch.full_like(self.on_device, 99, dtype=torch.float32)
        Q.combine(self.shape, self.plan, packed=packed, out=out, **more)
        return out

    def ref_pack(self, key: ref.Key, **more) -> np.ndarray:
        more = {"x": self.x.numpy(), **more}
        parts = [
            ref.pack(self.ref, self.ref_plan, p, ref.combine(self.ref, self.ref_plan, p, **more), key)
            for p in range(self.all_parts)
        ]
        return np.concatenate(parts)

    def ref_unpack(self, packed: np.ndarray, means=0) -> np.ndarray:
        out = np.full(self.ref.count, 99, np.float32)
        for p, part in enumerate(packed.reshape(self.all_parts, -1)):
            y = ref.combine(self.ref, self.ref_plan, p, packed=[part])
            ref.scatter(self.ref, self.ref_plan, p, y, out, means)
        return out

    def steps(self) -> torch.Tensor:
        """The most that a stochastic rounding can move each coordinate, from the width and its group's magnitude."""
        assert self.ref.domains == 1
        most = torch.nn.functional.pad(self.x, (0, -self.ref.count % 256)).abs().view(-1, 16, 16).amax(2)
        most = torch.maximum(most, 0.18 * most.amax(1, keepdim=True)).view(-1)  # smaller scales do not exist
        out = torch.zeros(self.ref.count, dtype=torch.float64)
        for p in range(self.all_parts):
            for b, super_group in zip(self.ref_plan.widths(0), self.ref_plan.order[p], strict=True):
                if super_group != ref.NONE:
                    begin, end = self.ref.span(super_group)
                    fine = 2 * 1.25 if b == 1 else min(2, 1.25 * 2 ** (b - 1) / (2 ** (b - 1) - 1)) / 2 ** (b - 1)
                    out[begin:end] = fine if self.ref.widths == "fine" else {2: 1, 4: 0.18, 8: 0.016}[b]
        return out * most.repeat_interleave(16)[: self.ref.count]


def key_arguments(key: ref.Key) -> dict:
    return {"key": (key.seed, key.step, key.bucket), "index": (key.index, key.of), "nearest": key.nearest}


def integers(v) -> np.ndarray:
    """fp32 values as bits, NaNs alike."""
    v = v.cpu().numpy() if isinstance(v, torch.Tensor) else v
    return np.where(np.isnan(v), np.float32(np.nan), v).view(np.uint32)


def check_plan(b: Bucket) -> None:
    s, r = b.shape, b.ref
    for name in ("slots", "part_bytes", "super_groups", "stats_bytes"):
        assert getattr(s, name) == getattr(r, name), name
    stats = b.stats.cpu()
    stats = stats.numpy() if s.widths == "fine" else stats.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(stats, b.ref_stats)
    plan = b.plan.cpu().numpy()
    rows = plan[: 48 * s.domains].view(np.uint32).reshape(s.domains, 12)
    np.testing.assert_array_equal(rows, b.ref_plan.rows[:, 1:13])
    order = plan[s.orders_at :][: 4 * b.all_parts * s.slots].view(np.uint32)
    np.testing.assert_array_equal(order, b.ref_plan.order.reshape(-1))
    if s.widths == "paper":
        means = plan[s.means_at :][: 4 * s.super_groups].view(np.float32)
        np.testing.assert_array_equal(integers(means), integers(b.ref_plan.means))


# ---- The reference ----------------------------------------------------------------------------------------------


@both_widths
@pytest.mark.parametrize("name", CASES)
def test_same_bytes_as_reference(device, widths, name):
    b = Bucket(CASES[name], device, widths=widths)
    check_plan(b)
    key = ref.Key(seed=0x1234567890ABCDEF, step=(5 << 32) + 6, bucket=7, index=2, of=5)
    packed, expected = b.pack(key, x_means=1), b.ref_pack(key, x_means=1)
    np.testing.assert_array_equal(packed.cpu().numpy(), expected)
    np.testing.assert_array_equal(integers(b.unpack(packed, out_means=3)), integers(b.ref_unpack(expected, 3)))


@both_widths
def test_same_bytes_where_the_caller_flushes_denormals(widths):
    name, key = "special", ref.Key(seed=5, index=1, of=3)
    expected = Bucket(CASES[name], widths=widths)
    packed = expected.pack(key)
    values = expected.unpack(packed)
    x = CASES[name].clone()  # before: copies of other dtypes flush, too
    assert torch.set_flush_denormal(True)
    try:
        stats = Q.statistics(expected.shape, x)
        plan = Q.allocate(expected.shape, stats, 1)
        found, out = expected.empty(), torch.empty_like(values)
        Q.combine(expected.shape, plan, x=x, packed_out=found, **key_arguments(key))
        Q.combine(expected.shape, plan, packed=found, out=out)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(stats.view(torch.uint8), expected.stats.view(torch.uint8)) and torch.equal(found, packed)
    np.testing.assert_array_equal(integers(out), integers(values))


@both_widths
@pytest.mark.parametrize("bits", [1.0, 2.5, 3.0, 3.7, 4.0, 6.0, 8.5, 16.0])
def test_same_bytes_at_every_budget(device, widths, bits):
    b = Bucket(CASES["spread"], device, widths=widths, bits=bits, parts=2)
    check_plan(b)
    key = ref.Key(index=1, of=2)
    np.testing.assert_array_equal(b.pack(key).cpu().numpy(), b.ref_pack(key))


@both_widths
@pytest.mark.parametrize("domains, parts", [(1, 1), (1, 7), (3, 2), (5, 1), (1, 60)])
def test_same_bytes_however_it_is_cut(device, widths, domains, parts):
    b = Bucket(spread(8, 3 * 5 * 601), device, widths=widths, domains=domains, parts=parts)
    check_plan(b)
    key = ref.Key(seed=3)
    packed = b.pack(key)
    np.testing.assert_array_equal(packed.cpu().numpy(), b.ref_pack(key))
    np.testing.assert_array_equal(integers(b.unpack(packed)), integers(b.ref_unpack(packed.cpu().numpy())))


@both_widths
@pytest.mark.parametrize("index, of", [(0, 1), (0, 2), (6, 7), (63, 64), (999, 1000), (65535, 65536)])
def test_same_bytes_at_every_stratum(device, widths, index, of):
    b = Bucket(CASES["narrow"], device, widths=widths, bits=4.0)
    key = ref.Key(seed=1 << 63, step=1, index=index, of=of)
    np.testing.assert_array_equal(b.pack(key).cpu().numpy(), b.ref_pack(key))


@both_widths
def test_same_bytes_rounded_to_nearest(device, widths):
    b = Bucket(CASES["special"], device, widths=widths, bits=3.0)
    key = ref.Key(nearest=True)
    np.testing.assert_array_equal(b.pack(key).cpu().numpy(), b.ref_pack(key))


@both_widths
@pytest.mark.parametrize("n", [1, 2, 5])
def test_recompressed_sum(device, widths, n):
    """Decompress n inputs, add own values, average, recompress: for all parts, and for a run of them."""
    b = Bucket(CASES["special tail"], device, widths=widths, ranks=n + 1)
    inputs = [b.ref_pack(ref.Key(index=i, of=n), x=spread(20 + i, b.ref.count).numpy()) for i in range(n)]
    own = ref.Key(seed=9)
    expected = np.concatenate(
        [
            ref.pack(
                b.ref, b.ref_plan, p,
                ref.combine(b.ref, b.ref_plan, p, x=b.x.numpy(), x_means=1, scale=1 / 3,
                            packed=[i.reshape(b.all_parts, -1)[p] for i in inputs]), own,
            )
            for p in range(b.all_parts)
        ]
    )  # fmt: skip
    packed = torch.from_numpy(np.stack(inputs)).to(device)
    out = b.pack(own, packed=packed, x_means=1, scale=1 / 3)
    np.testing.assert_array_equal(out.cpu().numpy(), expected)

    some = b.empty(1)
    with_rubbish = torch.cat([packed[:1], torch.full_like(packed[:1], 0xEE), packed[1:]])
    one = with_rubbish.view(n + 2 - 1, b.all_parts, -1)[:, 1].contiguous()
    Q.combine(
        b.shape, b.plan, part=1, parts=1, x=b.on_device, x_means=1, packed=one, skip=1, scale=1 / 3, packed_out=some,
        **key_arguments(own),
    )  # fmt: skip
    np.testing.assert_array_equal(some.cpu().numpy(), expected.reshape(b.all_parts, -1)[1])


# ---- Values in and out ------------------------------------------------------------------------------------------


@both_widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(device, widths, dtype):
    x = special(16 * 256 - 5).to(dtype)
    b = Bucket(x, device, widths=widths)
    check_plan(b)
    key = ref.Key(seed=4)
    packed = b.pack(key)
    np.testing.assert_array_equal(packed.cpu().numpy(), b.ref_pack(key))
    out = torch.empty_like(b.on_device)
    Q.combine(b.shape, b.plan, packed=packed, out=out)
    assert torch.equal(out.cpu().nan_to_num(7), b.unpack(packed).cpu().to(dtype).nan_to_num(7))
    assert torch.equal(out.isnan(), b.unpack(packed).isnan())


@both_widths
def test_places(device, widths):
    """Sums may be kept part by part, and a shard alone may be written."""
    b = Bucket(spread(8, 3 * 1000), device, domains=3, parts=2, widths=widths, ranks=2)
    first, second = b.pack(ref.Key(index=0, of=2)), b.pack(ref.Key(index=1, of=2))
    whole = torch.empty(3000, device=device)
    Q.combine(b.shape, b.plan, packed=torch.stack([first, second]), out=whole)

    part_bytes, run = b.shape.part_bytes, slice(2 * b.shape.part_bytes, 4 * b.shape.part_bytes)
    sums = torch.full((2 * b.shape.slots * 256,), 5.0, device=device)
    Q.combine(b.shape, b.plan, part=2, parts=2, packed=first[run], out=sums, out_place="parts")
    Q.combine(
        b.shape, b.plan, part=2, parts=2, x=sums, x_place="parts", packed=second[run], out=sums, out_place="parts"
    )
    empty = b.plan.cpu().numpy()[b.shape.orders_at :].view(np.uint32)[2 * b.shape.slots : 4 * b.shape.slots] == ref.NONE
    assert not sums.view(-1, 256)[torch.from_numpy(empty).to(device)].any()
    shard = torch.empty(1000, device=device)
    Q.combine(b.shape, b.plan, part=2, parts=2, x=sums, x_place="parts", out=shard, out_first=1000)
    assert torch.equal(shard, whole[1000:2000])
    own = torch.empty(part_bytes, dtype=torch.uint8, device=device)
    from_parts = torch.empty_like(own)
    Q.combine(b.shape, b.plan, part=3, parts=1, x=shard, x_first=1000, packed_out=own)
    Q.combine(b.shape, b.plan, part=3, parts=1, x=sums[sums.numel() // 2 :], x_place="parts", packed_out=from_parts)
    assert torch.equal(own, from_parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_addresses(device, dtype):
    """Values need no more alignment than their dtype."""
    b = Bucket(spread(9, 2000).to(dtype), device)
    room = torch.zeros(2003, dtype=dtype, device=device)
    shifted = room[3:]
    shifted.copy_(b.on_device)
    packed = b.pack(ref.Key(), x=shifted)
    assert torch.equal(packed, b.pack(ref.Key()))
    Q.combine(b.shape, b.plan, packed=packed, out=shifted)
    assert torch.equal(shifted, b.unpack(packed).to(dtype))
    assert not room[:3].any()


def test_in_place(device):
    b = Bucket(spread(10, 3000), device)
    packed = b.pack(ref.Key())
    expected = b.on_device + b.unpack(packed)
    Q.combine(b.shape, b.plan, x=b.on_device, packed=packed, out=b.on_device)
    assert torch.equal(b.on_device, expected)


@both_widths
def test_residual_makes_the_long_run_exact(device, widths):
    b = Bucket(spread(11, 2100), device, widths=widths, bits=4.0)
    residual = torch.zeros_like(b.on_device)
    total = torch.zeros(b.ref.count, dtype=torch.float64, device=device)
    for step in range(4):
        before = residual.clone()
        packed = b.pack(ref.Key(step=step, nearest=True), residual=residual)
        sent = b.unpack(packed)
        assert torch.equal(residual, b.on_device + before - sent)
        total += sent
    assert torch.allclose(total + residual, 4 * b.on_device.double(), rtol=1e-5, atol=0)


# ---- What the numbers are worth ---------------------------------------------------------------------------------


@both_widths
@pytest.mark.parametrize("bits", [2.9, 5.0])
def test_unbiased(widths, bits):
    """The mean of many roundings is the value: every coordinate within its standard error's reach."""
    b = Bucket(spread(12, 16 * 256, octaves=1.5), widths=widths, bits=bits, parts=1)
    n = 1000
    total, squares = torch.zeros(b.ref.count, dtype=torch.float64), torch.zeros(b.ref.count, dtype=torch.float64)
    for seed in range(n):
        d = b.unpack(b.pack(ref.Key(seed=seed, index=seed % 3, of=3))).double() - b.x
        total += d
        squares += d * d
    mean, error = total / n, (squares / n / n).sqrt()
    # A rounding too rare to have happened is worth at most a few steps in all.
    z = mean / (error + b.steps() / n)
    assert z.abs().max() < 5
    # Coordinates are not all independent: a super-group has one permutation, a group of "paper" one random scale.
    assert 0.5 < (mean**2).sum() / (error**2).sum() < 2


@pytest.mark.parametrize("n", [2, 3, 8, 20])
def test_roundings_of_a_coordinate_cancel(n):
    """Ranks with the same values: n stratified roundings are off by less than one step in all, not by about sqrt(n)."""
    b = Bucket(spread(13, 12 * 256, octaves=1), bits=4.0)
    rounded = torch.stack([b.unpack(b.pack(ref.Key(index=i, of=n))) for i in range(n)])
    off = (rounded.double().sum(0) - n * b.x.double()).abs()
    assert (off <= 1.001 * b.steps() + 1e-5 * b.x.abs()).all()
    assert ((rounded - b.x).abs() <= 1.001 * b.steps()).all()
    for i in range(n):
        alone = ((rounded[i] - b.x) ** 2).mean()
        assert 0.5 < alone / ((rounded - b.x) ** 2).mean() < 2


def mean_of_ranks(ranks: torch.Tensor, widths: str, bits: float) -> tuple[float, float]:
    """Relative squared error of the ranks' sum over the direct topology, and bits per coordinate."""
    n, count = ranks.shape
    shape = Q.Shape(count, 1, n, widths, bits)
    stats = torch.stack([Q.statistics(shape, r) for r in ranks])
    plan = Q.allocate(shape, stats.amax(0) if shape.stats_maximum else stats.sum(0), n)
    size = shape.part_bytes
    sent, gathered = torch.empty(n, n * size, dtype=torch.uint8), torch.empty(n * size, dtype=torch.uint8)
    for r in range(n):
        Q.combine(shape, plan, x=ranks[r], x_means=1, packed_out=sent[r], index=(r, n))
    for r in range(n):
        own = slice(r * size, (r + 1) * size)
        Q.combine(
            shape, plan, part=r, parts=1, x=ranks[r], x_means=1, packed=sent[:, own].contiguous(), skip=r,
            packed_out=gathered[own], index=(r, n),
        )  # fmt: skip
    out = torch.empty(count)
    Q.combine(shape, plan, packed=gathered, out=out, out_means=n)
    exact = ranks.double().sum(0)
    error = float(((out - exact) ** 2).sum() / (exact**2).sum())
    return error, 8 * (n * size + shape.stats_bytes) / count


def test_error_of_a_sum():
    """Eight ranks, energies over many octaves: the errors that this arithmetic reaches, a quarter allowed on top."""
    scale = torch.randn(300, generator=torch.Generator().manual_seed(14)).mul(3).exp2().repeat_interleave(256)
    ranks = scale * torch.randn(8, 300 * 256, generator=torch.Generator().manual_seed(15))
    limits = {
        ("fine", 5.0): 5.3e-6, ("fine", 4.0): 2.3e-5, ("fine", 3.0): 1.05e-3, ("fine", 2.8): 3.1e-4,
        ("paper", 5.0): 8.3e-5, ("paper", 4.0): 1.2e-4,
    }  # fmt: skip
    for (widths, bits), limit in limits.items():
        error, used = mean_of_ranks(ranks, widths, bits)
        assert error < 1.25 * limit, (widths, bits)
        assert bits - 0.03 < used <= bits


# ---- Values that are not ordinary -------------------------------------------------------------------------------


@both_widths
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_stays_where_it_is(device, widths, value):
    x = spread(16, 6 * 256)
    x[700] = value
    b = Bucket(x, device, widths=widths)
    out = b.unpack(b.pack(ref.Key(), x_means=1), out_means=1).cpu()
    assert out[512:768].isnan().all()
    assert out[:512].isfinite().all() and out[768:].isfinite().all()


def test_a_sum_that_overflows(device):
    b = Bucket(torch.full((512,), 3e38), device)
    packed = b.pack(ref.Key())
    out = torch.empty(512, device=device)
    Q.combine(b.shape, b.plan, x=b.on_device, packed=packed, packed_out=packed)
    Q.combine(b.shape, b.plan, packed=packed, out=out)
    assert not out.isfinite().any()


def with_zeros() -> torch.Tensor:
    """A super-group of zeros, groups of zeros, and zeros here and there."""
    x = spread(17, 8 * 256)
    x[256:512] = 0
    x[512 + 32 : 512 + 48] = -0.0
    x[1024 : 1024 + 240] = 0
    x[1300:][torch.rand(len(x) - 1300, generator=torch.Generator().manual_seed(1)) < 0.3] = 0
    return x


@pytest.mark.parametrize("bits", [1.0, 2.0, 2.5, 2.9, 3.0, 4.0, 5.0, 8.5])
def test_zeros_stay_zeros(device, bits):
    """Fine widths: every zero from 3 bits on, below that those of super-groups with two bits and of whole groups; in
    sums of sums, too."""
    x = with_zeros()
    b = Bucket(x, device, bits=bits)
    width = torch.zeros(8, dtype=torch.int64)
    for order in b.ref_plan.order:
        for slot_width, super_group in zip(b.ref_plan.widths(0), order, strict=True):
            if super_group != ref.NONE:
                width[super_group] = slot_width
    zero = x == 0
    whole = zero.view(-1, 16).all(1).repeat_interleave(16)
    exact = whole | (zero & (width.repeat_interleave(256) > 1))
    assert exact.sum() > 500 and (width == 1).any() == (bits < 2.9) and (bits < 2.9 or (exact == zero).all())
    for seed in range(5):
        packed = b.pack(ref.Key(seed=seed, of=2))
        out = b.unpack(packed).cpu()
        assert not integers(out)[exact.numpy()].any()
        Q.combine(
            b.shape, b.plan, x=b.on_device, packed=packed, packed_out=packed,
            **key_arguments(ref.Key(seed=seed, index=1, of=2)),
        )  # fmt: skip
        assert not integers(b.unpack(packed))[exact.numpy()].any()


def test_super_groups_of_zeros_stay_zeros_in_the_papers_mode(device):
    x = with_zeros()
    for values, zeros in ((x, slice(256, 512)), (torch.zeros(1000), slice(None))):
        b = Bucket(values, device, widths="paper", ranks=4)
        assert not integers(b.unpack(b.pack(ref.Key(), x_means=1), out_means=4).cpu()[zeros]).any()


def test_one_huge_value(device):
    x = spread(18, 40 * 256)
    b = Bucket(x, device, bits=6.0)
    y = x.clone()
    y[300] = 3e38
    huge = Bucket(y, device, bits=6.0)
    out = huge.unpack(huge.pack(ref.Key())).cpu()
    assert abs(out[300] / 3e38 - 1) < 1e-2
    elsewhere = torch.arange(x.numel()) // 256 != 1
    error = ((out - x)[elsewhere] ** 2).sum() / (x[elsewhere] ** 2).sum()
    plain = ((b.unpack(b.pack(ref.Key())).cpu() - x)[elsewhere] ** 2).sum() / (x[elsewhere] ** 2).sum()
    assert error < 3 * plain


def test_tiny_values(device):
    for exponent in (-149, -140, -126, -115, -100):
        x = torch.randint(-4, 5, (512,), generator=torch.Generator().manual_seed(2)).float() * 2.0**exponent
        b = Bucket(x, device)
        out = b.unpack(b.pack(ref.Key())).cpu()
        assert ((out - x).abs() <= b.steps().clamp(min=2.0**-112)).all()


# ---- Any shape --------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape(data):
    """The budget is kept and used, and every super-group travels once."""
    widths = data.draw(st.sampled_from(["fine", "paper"]))
    domains, parts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    count = domains * data.draw(st.integers(1, 20000))
    bits = data.draw(st.floats(1, 16, width=32))
    x = spread(data.draw(st.integers(0, 99)), count, octaves=data.draw(st.sampled_from([0.0, 1.0, 6.0])))
    if data.draw(st.booleans()):
        x[torch.randint(0, count, (count // 2,))] = 0
    b = Bucket(x, domains=domains, parts=parts, widths=widths, bits=bits)
    check_plan(b)
    rows = b.ref_plan.rows[:, 1:13]
    assert (rows.sum(1) <= b.ref.units).all()
    widest = 12 if widths == "fine" else 8
    if widths == "fine" and bool((b.stats > 0).all()):
        assert (rows.sum(1) == b.ref.units).all()
    order = b.ref_plan.order.reshape(-1)
    assert sorted(order[order != ref.NONE].tolist()) == list(range(b.ref.super_groups))

    budget = int(float(np.float32(bits)) * count) // 8
    used = b.all_parts * b.shape.part_bytes + b.shape.stats_bytes
    if b.ref.units > 2 * b.ref.slots:
        assert used <= budget
    if b.ref.units < widest * b.ref.slots:
        assert used > budget - 48 * b.all_parts
    out = b.unpack(b.pack(ref.Key(seed=1)))
    assert out.isfinite().all()
    # A rounding moves a value by less than a step, which is less than twice the super-group's largest magnitude.
    most = torch.nn.functional.pad(x.view(domains, -1), (0, -(count // domains) % 256)).abs().view(-1, 256).amax(1)
    limit = most.view(domains, -1).repeat_interleave(256, 1)[:, : count // domains].reshape(-1)
    assert ((out - x).abs() <= 2.6 * limit).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["fine", "paper"]), st.sampled_from([2.7, 5.0]))
def test_any_bytes_decode(seed, widths, bits):
    b = Bucket(CASES["tail"], widths=widths, bits=bits)
    rubbish = torch.randint(0, 256, b.empty().shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    np.testing.assert_array_equal(integers(b.unpack(rubbish)), integers(b.ref_unpack(rubbish.numpy())))


def test_empty_bucket(device):
    shape = Q.Shape(0, 4, 2)
    assert (shape.part_bytes, shape.plan_bytes, shape.stats_bytes, shape.slots) == (0, 0, 0, 0)
    nothing = torch.empty(0, device=device)
    stats = Q.statistics(shape, nothing)
    plan = Q.allocate(shape, stats, 1)
    Q.combine(shape, plan, x=nothing, packed_out=torch.empty(0, dtype=torch.uint8, device=device))
    assert stats.numel() == plan.numel() == 0


def test_large_buckets_have_sizes():
    """Sizes are 64-bit: two to the 31 coordinates and more, of which nothing is allocated here."""
    for count in (2**31, 2**31 + 256, 2**37):
        for widths in ("fine", "paper"):
            shape, expected = Q.Shape(count, 1, 8, widths, 5.0), ref.Shape(count, 1, 8, widths, 5.0)
            assert (shape.part_bytes, shape.slots) == (expected.part_bytes, expected.slots)
            used = 8 * shape.part_bytes + shape.stats_bytes
            assert 0 <= 5 * count // 8 - used < 48 * 8


@pytest.mark.parametrize(
    "arguments",
    [
        {"count": 10, "domains": 0}, {"count": 10, "domains": 3}, {"count": 10, "parts": 0}, {"count": 10, "bits": 0.5},
        {"count": 10, "bits": float("nan")}, {"count": 10, "widths": "coarse"}, {"count": 2**60},
    ],
)  # fmt: skip
def test_shapes_that_are_refused(arguments):
    with pytest.raises(ValueError):
        Q.Shape(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"index": (2, 2)}, {"index": (0, 0)}, {"index": (0, 65537)}, {"parts": 4}, {"part": 4},
        {"packed": torch.zeros(100, dtype=torch.uint8)}, {"x": torch.zeros(999)}, {"x_place": "elsewhere"},
        {"x": torch.zeros(1000, dtype=torch.float64)}, {"out": torch.zeros(1000)}, {"residual": torch.zeros(999)},
    ],
)  # fmt: skip
def test_calls_that_are_refused(arguments):
    b = Bucket(spread(19, 1000))
    given = {"x": b.x, "packed_out": b.empty(), **arguments}
    if not arguments:
        del given["packed_out"]
    with pytest.raises((ValueError, TypeError, _C.Error)):
        Q.combine(b.shape, b.plan, **given)
