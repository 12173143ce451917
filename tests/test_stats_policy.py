"""The link model, the switcher, and the counters of a group."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zipccl import _C

GB = 1e9
PRIOR = 0.75
RAW_OR_ZIP = ["raw", "zip"]
ALL = ["raw", "zip", "zip2"]
OPS = ["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather"]


def switcher(alpha=50e-6, bytes_per_s=1 * GB, fixed=10e-6, encode=20 * GB, decode=40 * GB):
    s = _C.Switcher(PRIOR)
    s.set_measurements(alpha, bytes_per_s, fixed, encode, decode)
    return s


def explain(s, world, nbytes, op="all_gather", allowed=RAW_OR_ZIP):
    return s.explain(op, world, nbytes, allowed)


# ---- model -----------------------------------------------------------------------------------------------------


def test_modelled_seconds():
    d = explain(switcher(), 4, 10**6)
    assert d.raw_seconds == pytest.approx(50e-6 + 3e6 / GB)
    encode, decode = 10e-6 + 1e6 / (20 * GB), 10e-6 + 3e6 / (40 * GB)
    assert d.zip_seconds == pytest.approx(encode + 2 * 50e-6 + PRIOR * 3e6 / GB + decode)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("link, choice", [(0.1 * GB, "zip"), (1 * GB, "zip"), (100 * GB, "raw")])
def test_slow_links_zip_and_fast_ones_do_not(op, link, choice):
    assert explain(switcher(bytes_per_s=link), 2, 1 << 30, op).choice == choice


@pytest.mark.parametrize("op", OPS)
def test_small_calls_stay_raw(op):
    """Below some size the second round of messages costs more than the saved bytes; above it never again."""
    choices = [explain(switcher(), 2, 1 << k, op).choice for k in range(40)]
    first = choices.index("zip")
    assert 0 < first < 30
    assert choices == ["raw"] * first + ["zip"] * (40 - first)
    for k, pays in [(first - 2, False), (first + 2, True)]:  # what the reason says agrees with the choice
        link, below = map(float, re.findall(r"([\d.]+) GB/s", explain(switcher(), 2, 1 << k, op).reason))
        assert (link < below) == pays


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_break_even_separates_zip_from_raw(op, world):
    """For large calls and without fixed costs, the link rate at which the choice turns is the formula's."""
    at = _C.break_even(op, 20 * GB, 40 * GB, world, PRIOR)
    for factor, choice in [(0.8, "zip"), (1.25, "raw")]:
        assert explain(switcher(alpha=0, fixed=0, bytes_per_s=factor * at), world, 1 << 40, op).choice == choice


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_break_even_is_zipccls(world):
    """Section 5.3 of the paper has one codec rate G for both directions. It counts world * shard bytes moved by every
    rank: B* = (1 - e) G / (1 + 1/N). Here each rank moves the world - 1 other shards, so 1/N becomes 1/(N-1). For
    all-to-all, B* = (1 - e) G / 2 either way."""
    rate = 20 * GB
    gathered = (1 - PRIOR) * rate / (1 + 1 / (world - 1))
    assert _C.break_even("all_gather", rate, rate, world, PRIOR) == pytest.approx(gathered)
    assert _C.break_even("all_to_all", rate, rate, world, PRIOR) == pytest.approx((1 - PRIOR) * rate / 2)


def test_sizes_are_64_bit():
    d = explain(switcher(), 2, 1 << 40)
    assert d.raw_seconds == pytest.approx((1 << 40) / GB, rel=1e-3)


# ---- what real calls teach -------------------------------------------------------------------------------------


def choice_of(d) -> str:
    return "raw" if d.choice == "raw" else "zip2" if d.design == 2 else "zip"


def agree(ranks, op, nbytes, shared=True) -> bool:
    """Where due, as csrc/backend/perform.cpp does it. nbytes: of each rank."""
    wants = {s.wants_agreement(op, n, shared) for s, n in zip(ranks, nbytes, strict=True)}
    assert len(wants) == 1
    if not wants.pop():
        return False
    if not shared:
        sizes = [max(of_ranks) for of_ranks in zip(*[s.own_sizes(op) for s in ranks], strict=True)]
        for s in ranks:
            s.agree_sizes(op, sizes)
    seen = [s.seen(op, n, shared) for s, n in zip(ranks, nbytes, strict=True)]
    for s, n in zip(ranks, nbytes, strict=True):
        s.agree(op, n, [max(of_ranks) for of_ranks in zip(*seen, strict=True)], shared)
    return True


def calls(s, n, seconds, op="all_gather", nbytes=1 << 24, allowed=RAW_OR_ZIP, wire=PRIOR, world=2):
    """n calls on one rank that agrees with itself; seconds: choice -> what such a call takes. Returns the choices."""
    made = []
    for _ in range(n):
        d = s.decide(op, world, nbytes, allowed)
        choice = choice_of(d)
        made.append(choice)
        zipped = choice != "raw"
        s.record(op, nbytes, d, seconds[choice], 1000 if zipped else 0, int(1000 * wire) if zipped else 0)
        agree([s], op, [nbytes])
    return made


def test_ratio_follows_what_was_agreed():
    s = switcher(bytes_per_s=0.1 * GB)
    assert s.ratio("all_gather") == PRIOR
    calls(s, 400, {"raw": 1, "zip": 0.5}, wire=0.4)
    assert s.ratio("all_gather") == pytest.approx(0.4, abs=1e-3)
    assert s.ratio("broadcast") == PRIOR  # each collective has its own tensors


def test_one_ranks_view_alone_changes_nothing():
    s = switcher(bytes_per_s=0.1 * GB)
    before = explain(s, 2, 1 << 24)
    assert before.choice == "zip"
    for _ in range(10):
        s.record("all_gather", 1 << 24, before, 100.0, 1000, 1400)
    after = explain(s, 2, 1 << 24)
    assert (after.choice, after.zip_seconds) == (before.choice, before.zip_seconds)


def test_times_overrule_the_model():
    """The model says zip; zipped calls take far longer than raw ones."""
    s = switcher(bytes_per_s=0.1 * GB)
    otherwise = ", but the times of real calls say otherwise"
    assert not explain(s, 2, 1 << 24).reason.endswith(otherwise)
    made = calls(s, 400, {"raw": 0.1, "zip": 0.3})
    assert made[0] == "zip"
    assert made[-100:].count("raw") >= 98
    assert explain(s, 2, 1 << 24).reason.endswith(otherwise)
    calls(agreeing := switcher(bytes_per_s=0.1 * GB), 400, {"raw": 0.3, "zip": 0.1})
    assert explain(agreeing, 2, 1 << 24).choice == "zip" and "otherwise" not in explain(agreeing, 2, 1 << 24).reason


def test_a_wrong_raw_is_found_out():
    """The model says raw, though not by much; trying zip once in a while shows that it is better."""
    s = switcher(bytes_per_s=3.9 * GB)
    made = calls(s, 300, {"raw": 0.1, "zip": 0.02})
    assert made[0] == "raw" and made[-20:].count("zip") >= 19


def test_a_trial_settles_it_early():
    """After the first few calls times decide, whatever the model said."""
    s = switcher(bytes_per_s=3 * GB)
    made = calls(s, 40, {"raw": 0.1, "zip": 0.14})
    assert set(made[: _C.trial_calls]) == {"raw", "zip"}
    assert set(made[_C.trial_calls :]) == {"raw"}


def test_conditions_that_change_are_noticed():
    s = switcher(bytes_per_s=3 * GB)
    assert calls(s, 200, {"raw": 0.1, "zip": 0.14})[-1] == "raw"
    assert calls(s, 800, {"raw": 1.0, "zip": 0.7})[-50:].count("zip") >= 49


def test_near_ties_do_not_flutter():
    s = switcher(bytes_per_s=0.1 * GB)
    rng = random.Random(5)
    made = []
    for _ in range(2000):
        made += calls(s, 1, {"raw": 0.1 * rng.uniform(0.99, 1.01), "zip": 0.0975 * rng.uniform(0.99, 1.01)})
    changes = sum(a != b for a, b in zip(made, made[1:], strict=False))
    tried = 2 * (len(made) // (2 * _C.agree_every))
    assert changes <= _C.trial_calls + tried + 2


def test_hopeless_choices_are_never_tried():
    s = switcher(bytes_per_s=1000 * GB)
    assert set(calls(s, 300, {"raw": 0.001, "zip": 1.0})) == {"raw"}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("better", ["zip", "raw"])
def test_a_choice_given_up_by_accident_comes_back(better, world):
    """While it was tried, something else held up one rank by a second, each time."""
    ranks = [switcher(bytes_per_s=3 * GB) for _ in range(world)]
    cost = {"raw": 0.1, "zip": 0.07} if better == "zip" else {"raw": 0.07, "zip": 0.1}
    made = []
    for call in range(1500):
        decisions = [s.decide("all_gather", 2, 1 << 24, RAW_OR_ZIP) for s in ranks]
        assert len({(choice_of(d), d.reason, d.trial, d.timed) for d in decisions}) == 1
        made.append(choice_of(decisions[0]))
        for rank, (s, d) in enumerate(zip(ranks, decisions, strict=True)):
            held_up = made[-1] == better and call < _C.trial_calls and rank == world - 1
            s.record("all_gather", 1 << 24, d, cost[made[-1]] + held_up, 0, 0)
        agree(ranks, "all_gather", [1 << 24] * world)
    trial = made[: _C.trial_calls]
    assert better in trial and made[_C.trial_calls : 100].count(better) == 0
    assert made[-500:].count(better) > 480


def test_what_is_really_worse_is_seldom_tried_again():
    s = switcher(bytes_per_s=3 * GB)
    made = calls(s, 30_000, {"raw": 0.1, "zip": 0.9})
    assert 1 <= made[_C.trial_calls :].count("zip") <= 5


def test_what_is_confirmed_is_asked_ever_more_rarely():
    """Times that stay as they were: agreements 32, 64, 128 ... calls apart, few calls timed. News: as at first."""
    s = switcher(bytes_per_s=100 * GB)
    asked, timed = [], []

    def run(calls, raw):
        for _ in range(calls):
            d = s.decide("all_gather", 2, 1 << 24, RAW_OR_ZIP)
            timed.append(d.timed)
            if d.timed:
                s.record("all_gather", 1 << 24, d, raw if d.choice == "raw" else 1.2 * raw, 0, 0)
            if agree([s], "all_gather", [1 << 24]):
                asked.append(len(timed))

    run(20_000, 1e-4)
    gaps = [b - a for a, b in zip(asked, asked[1:], strict=False)]
    assert asked[0] == _C.trial_calls and gaps[:3] == [32, 64, 128] and max(gaps) == _C.agree_rarely == gaps[-1]
    assert sum(timed) <= _C.trial_calls + 8 * len(asked) + 8
    known = len(asked)
    run(_C.agree_rarely + 200, 5e-4)
    assert asked[known + 1] - asked[known] == _C.agree_every


@pytest.mark.parametrize("faster, slower", [("zip", "zip2"), ("zip2", "zip")])
def test_designs_are_timed_against_each_other(faster, slower):
    """Forced zip leaves only the design to choose; nothing needs to be measured for it."""
    s = _C.Switcher(PRIOR)
    made = calls(s, 400, {faster: 0.1, slower: 0.2}, op="all_to_all", allowed=["zip", "zip2"])
    assert made[0] == "zip2"  # without a word against it, most bytes should move at once
    assert made[-60:].count(faster) >= 58


def test_ranks_with_other_clocks_decide_alike():
    """Eight ranks, each with clocks, loads and compression of its own, agree every so often by maximum: every decision
    is the same everywhere, at every call."""
    world = 8
    ranks = [_C.Switcher(PRIOR) for _ in range(world)]
    rng = random.Random(7)
    for s in ranks:
        s.set_measurements(50e-6, 0.5 * GB, 10e-6, 20 * GB, 40 * GB)
    made = []
    for call in range(1500):
        op = rng.choice(["all_gather", "all_to_all"])
        nbytes = 1 << rng.randrange(12, 26)
        allowed = ALL if op == "all_to_all" else RAW_OR_ZIP
        decisions = [s.decide(op, world, nbytes, allowed) for s in ranks]
        assert len({(d.choice, d.design, d.reason) for d in decisions}) == 1, call
        made.append(choice_of(decisions[0]))
        for s, d in zip(ranks, decisions, strict=True):
            zipped = made[-1] != "raw"
            wire = int(1000 * rng.uniform(0.6, 1.1)) if zipped else 0
            s.record(op, nbytes, d, nbytes / GB * rng.uniform(0.5, 3), 1000 if zipped else 0, wire)
        agree(ranks, op, [nbytes] * world)
    assert set(made) == set(ALL)  # the run really went through all of them


# ---- sizes that no rank knows whole: all-to-all with splits ------------------------------------------------------


def uneven(ranks, sizes, cost, allowed=ALL, least=0):
    """Calls of which each rank knows its own bytes alone (sizes: one list per call); cost(choice, bytes of the busiest
    rank) -> seconds. Returns the choices, which must be alike on all ranks."""
    made = []
    for of_ranks in sizes:
        decisions = [s.decide("all_to_all", len(ranks), n, allowed, False, least)
                     for s, n in zip(ranks, of_ranks, strict=True)]  # fmt: skip
        assert len({(choice_of(d), d.reason, d.trial) for d in decisions}) == 1
        made.append(choice_of(decisions[0]))
        zipped = made[-1] != "raw"
        for s, n, d in zip(ranks, of_ranks, decisions, strict=True):
            seconds = cost(made[-1], max(of_ranks))
            s.record("all_to_all", n, d, seconds, 1000 if zipped else 0, 710 if zipped else 0, False)
        agree(ranks, "all_to_all", of_ranks, shared=False)
    return made


def zip_pays_from(least):
    """Seconds of calls on a machine where frames pay from that size on; design 2 is the better one."""

    def cost(choice, nbytes):
        raw = 1e-4 + nbytes / GB
        if choice == "raw":
            return raw
        return raw * (0.75 if nbytes >= least else 1.5) * (1.0 if choice == "zip2" else 1.1)

    return cost


@pytest.mark.parametrize("nbytes, best", [(1 << 24, "zip2"), (1 << 18, "raw")])
def test_uneven_calls_are_decided_by_how_large_they_were(nbytes, best):
    """Whatever a rank's own share; the first call is raw, since nobody knows anything yet."""
    ranks = [switcher() for _ in range(4)]
    rng = random.Random(3)
    sizes = [[nbytes, *(rng.randrange(nbytes) for _ in range(3))] for _ in range(300)]
    made = uneven(ranks, sizes, zip_pays_from(1 << 20))
    assert made[0] == "raw" and made[-60:].count(best) >= 58


def test_uneven_calls_that_grow_are_decided_anew():
    ranks = [switcher() for _ in range(2)]
    cost = zip_pays_from(1 << 20)
    assert set(uneven(ranks, [[1 << 16, 0]] * 200, cost)[-32:]) == {"raw"}
    again = _C.agree_rarely_unshared + 100
    assert uneven(ranks, [[5, 1 << 25]] * again, cost)[-60:].count("zip2") >= 58
    assert uneven(ranks, [[1 << 16, 0]] * again, cost)[-60:].count("raw") >= 58


def test_a_mixture_of_sizes_goes_by_what_takes_longest():
    """Large and small calls in turn: the choice is made for all of them, from timings that are not mixed up."""
    ranks = [switcher() for _ in range(2)]
    sizes = [[1 << 25, 1 << 24] if i % 2 else [1 << 14, 1 << 13] for i in range(300)]
    assert uneven(ranks, sizes, zip_pays_from(1 << 20))[-60:].count("zip2") >= 58
    ranks = [switcher() for _ in range(2)]
    sizes = [[1 << 19, 1 << 18] if i % 10 else [1 << 20, 1 << 20] for i in range(600)]
    assert uneven(ranks, sizes, zip_pays_from(1 << 20))[-60:].count("raw") >= 56


def test_small_uneven_calls_stay_raw_without_a_measurement():
    """Below min_bytes nothing is tried, and ranks seldom ask each other."""
    ranks = [_C.Switcher(PRIOR) for _ in range(2)]
    asked = 0
    for _ in range(400):
        decisions = [s.decide("all_to_all", 2, 1 << 14, ALL, False, 1 << 20) for s in ranks]
        assert [d.choice for d in decisions] == ["raw", "raw"]
        asked += agree(ranks, "all_to_all", [1 << 14] * 2, shared=False)
        assert not any(s.wants_measurements("all_to_all", 1 << 14, ALL, False, 1 << 20) for s in ranks)
    assert asked == 4  # after 1, 32, 64 and 128 calls more
    uneven(ranks, [[1 << 24, 1 << 14]] * _C.agree_rarely_unshared, lambda choice, n: 1.0, least=1 << 20)
    assert all(s.wants_measurements("all_to_all", 1 << 14, ALL, False, 1 << 20) for s in ranks)


def test_uneven_ranks_with_other_clocks_and_shares_decide_alike():
    """Every rank has a clock and shares of its own; some times become known too late, or never."""
    world = 5
    ranks = [switcher(bytes_per_s=0.5 * GB) for _ in range(world)]
    rng = random.Random(11)
    made, late = [], []
    for call in range(1200):
        scale = 1 << rng.choice([12, 20, 22, 25]) if call % 400 < 300 else 1 << 13
        shares = [rng.randrange(scale) for _ in ranks]
        allowed = ALL if call % 150 < 120 else ["zip", "zip2"]  # as override() would
        decisions = [s.decide("all_to_all", world, n, allowed, False, 1 << 14)
                     for s, n in zip(ranks, shares, strict=True)]  # fmt: skip
        assert len({(choice_of(d), d.reason, d.trial) for d in decisions}) == 1, call
        made.append(choice_of(decisions[0]))
        for s, n, d in zip(ranks, shares, decisions, strict=True):
            zipped = made[-1] != "raw"
            wire = int(1000 * rng.uniform(0.6, 1.1)) if zipped else 0
            seen = (s, n, d, scale / GB * rng.uniform(0.5, 3), 1000 if zipped else 0, wire)
            late.append(seen)
        rng.shuffle(late)
        while len(late) > 8:
            s, n, d, seconds, raw, wire = late.pop()
            s.record("all_to_all", n, d, seconds, raw, wire, False)
        agree(ranks, "all_to_all", shares, shared=False)
    assert set(made) == set(ALL)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_taken_back_was_never_decided(data):
    """Two switchers see the same calls; one also decides on calls that are then not made."""
    plain, other = switcher(bytes_per_s=5 * GB), switcher(bytes_per_s=5 * GB)
    calls = st.tuples(
        st.sampled_from([("all_gather", True), ("all_to_all", False)]), st.sampled_from([1 << 20, 1 << 24])
    )
    for call in range(data.draw(st.integers(1, 150))):
        if data.draw(st.integers(0, 3)) == 0:
            (op, shared), nbytes = data.draw(calls)
            other.decide(op, 2, nbytes, ALL, shared)
            other.take_back()
            other.take_back()  # there is but one to take back
        (op, shared), nbytes = data.draw(calls)
        made = [s.decide(op, 2, nbytes, ALL, shared) for s in (plain, other)]
        assert len({(choice_of(d), d.reason, d.timed, d.trial) for d in made}) == 1, call
        for s, d in zip((plain, other), made, strict=True):
            s.record(op, nbytes, d, nbytes / GB, 1000 * (d.choice != "raw"), 710 * (d.choice != "raw"), shared)
        agree([plain, other], op, [nbytes] * 2, shared)
        assert plain.own_sizes(op) == other.own_sizes(op)


# ---- what need not be decided again --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_raw_again_says_what_decide_would(data):
    """Two switchers see the same calls; one is asked raw_again() first. Decisions, agreements and counts stay alike."""
    full, quick = switcher(bytes_per_s=5 * GB), switcher(bytes_per_s=5 * GB)
    skipped = 0
    for _ in range(data.draw(st.integers(1, 6))):
        op, shared = data.draw(st.sampled_from([("all_gather", True), ("all_to_all", False), ("broadcast", True)]))
        nbytes = data.draw(st.sampled_from([1 << 14, 1 << 20, (1 << 20) + 16, 1 << 24]))
        allowed = data.draw(st.sampled_from([ALL if op == "all_to_all" else RAW_OR_ZIP, ["raw"], ["zip"]]))
        least = data.draw(st.sampled_from([0, 1 << 20]))
        raw, zipped = data.draw(st.sampled_from([(1.0, 2.0), (1.0, 1.1), (1.0, 0.5)]))
        for call in range(data.draw(st.integers(1, 300))):
            d = full.decide(op, 2, nbytes, allowed, shared, least)
            if quick.raw_again(op, nbytes, allowed, shared, least):
                skipped += 1
                assert d.choice == "raw" and not d.timed and not d.trial
                seen = []
            else:
                mine = quick.decide(op, 2, nbytes, allowed, shared, least)
                assert (choice_of(mine), mine.reason, mine.timed) == (choice_of(d), d.reason, d.timed), call
                seen = [(quick, mine)]
            for s, of in [(full, d), *seen]:
                seconds = (raw if d.choice == "raw" else zipped) * nbytes / GB
                if of.timed:
                    s.record(op, nbytes, of, seconds, 1000 * (d.choice != "raw"), 710 * (d.choice != "raw"), shared)
            assert quick.wants_agreement(op, nbytes, shared) == full.wants_agreement(op, nbytes, shared)
            if not shared:
                assert quick.own_sizes(op) == full.own_sizes(op)
            agree([full], op, [nbytes], shared)
            agree([quick], op, [nbytes], shared)
        assert full.explain(op, 2, nbytes, RAW_OR_ZIP).reason == quick.explain(op, 2, nbytes, RAW_OR_ZIP).reason


def test_small_calls_of_unshared_sizes_are_rarely_decided():
    """Of those only agreements take the long way, also while sizes change and agreements come often."""
    s, decided = switcher(bytes_per_s=100 * GB), 0
    for call in range(3200):
        nbytes = 64 << (call // 100 % 8)
        if not s.raw_again("all_to_all", nbytes, ALL, False, 1 << 20):
            decided += 1
            s.decide("all_to_all", 2, nbytes, ALL, False, 1 << 20)
        agree([s], "all_to_all", [nbytes], shared=False)
    assert decided < 3200 / 12


def test_a_settled_raw_is_rarely_decided():
    s, decided = switcher(bytes_per_s=100 * GB), 0
    for _ in range(5000):
        if not s.raw_again("all_gather", 1 << 24, RAW_OR_ZIP):
            decided += 1
            d = s.decide("all_gather", 2, 1 << 24, RAW_OR_ZIP)
            if d.timed:
                s.record("all_gather", 1 << 24, d, 1e-4 if d.choice == "raw" else 2e-4, 0, 0)
            agree([s], "all_gather", [1 << 24])
    assert decided < 200
    assert not s.raw_again("all_gather", 1 << 23, RAW_OR_ZIP)  # another size class
    assert not s.raw_again("all_gather", 1 << 24, ["raw", "zip2"])
