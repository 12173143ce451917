"""The link model, the switcher, and the counters of a group."""

import pytest
from zipccl import _C

GB = 1e9
PRIOR = 0.75


def switcher(alpha=50e-6, bytes_per_s=1 * GB, fixed=10e-6, encode=20 * GB, decode=40 * GB):
    s = _C.Switcher(PRIOR)
    s.set_measurements(alpha, bytes_per_s, fixed, encode, decode)
    return s


# ---- model and switcher ----------------------------------------------------------------------------------------


def test_modelled_seconds():
    d = switcher().all_gather(4, 10**6)
    assert d.raw_seconds == pytest.approx(50e-6 + 3e6 / GB)
    encode, decode = 10e-6 + 1e6 / (20 * GB), 10e-6 + 3e6 / (40 * GB)
    assert d.zip_seconds == pytest.approx(encode + 2 * 50e-6 + PRIOR * 3e6 / GB + decode)


@pytest.mark.parametrize("link, choice", [(0.1 * GB, "zip"), (1 * GB, "zip"), (100 * GB, "raw")])
def test_slow_links_zip_and_fast_ones_do_not(link, choice):
    assert switcher(bytes_per_s=link).all_gather(2, 1 << 30).choice == choice


def test_small_calls_stay_raw():
    """Below some size the second round of messages costs more than the saved bytes; above it never again."""
    choices = [switcher().all_gather(2, 1 << k).choice for k in range(40)]
    first = choices.index("zip")
    assert 0 < first < 30
    assert choices == ["raw"] * first + ["zip"] * (40 - first)


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_break_even_separates_zip_from_raw(world):
    """For large shards and without fixed costs, the link rate at which the choice turns is the formula's."""
    at = _C.all_gather_break_even(20 * GB, 40 * GB, world, PRIOR)
    for factor, choice in [(0.8, "zip"), (1.25, "raw")]:
        s = switcher(alpha=0, fixed=0, bytes_per_s=factor * at)
        assert s.all_gather(world, 1 << 40).choice == choice


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_break_even_is_zipccls(world):
    """Section 5.3 of the paper has one codec rate G for both directions, counted on world * shard bytes moved by every
    rank: B* = (1 - e) G / (1 + 1/N). Here each rank moves the world - 1 other shards, so 1/N becomes 1/(N-1)."""
    rate = 20 * GB
    expected = (1 - PRIOR) * rate / (1 + 1 / (world - 1))
    assert _C.all_gather_break_even(rate, rate, world, PRIOR) == pytest.approx(expected)


def test_ratio_follows_what_was_seen():
    s = _C.Switcher(PRIOR)
    assert s.ratio == PRIOR and not s.measured
    for _ in range(60):
        s.observe(1000, 400)
    assert s.ratio == pytest.approx(0.4, abs=1e-6)
    s.observe(0, 0)  # nothing moved, nothing learnt
    assert s.ratio == pytest.approx(0.4, abs=1e-6)


def test_one_odd_call_does_not_turn_the_ratio():
    s = _C.Switcher(PRIOR)
    s.observe(1, 1000)  # a frame of one value: mostly header
    assert PRIOR < s.ratio < 1


def test_data_that_does_not_compress_goes_raw():
    s = switcher(bytes_per_s=0.1 * GB)
    assert s.all_gather(2, 1 << 30).choice == "zip"
    for _ in range(60):
        s.observe(1000, 1002)
    assert s.all_gather(2, 1 << 30).choice == "raw"


def test_sizes_are_64_bit():
    d = switcher().all_gather(2, 1 << 40)
    assert d.raw_seconds == pytest.approx((1 << 40) / GB, rel=1e-3)
