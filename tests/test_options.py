"""Options of a group: values, environment, agreement between ranks; and what stats() counts."""

import types
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from zipccl.options import from_pg_options

BF16 = torch.bfloat16


# ---- values and environment ------------------------------------------------------------------------------------


def test_defaults():
    options = zipccl.Options()
    assert (options.all_gather, options.code, options.min_bytes, options.checksum) == ("auto", "auto", None, False)
    assert options.inner_backends() == {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    "variable, text, field, value",
    [
        ("ZIPCCL_ALL_GATHER", "zip", "all_gather", "zip"),
        ("ZIPCCL_CODE", "fast", "code", "fast"),
        ("ZIPCCL_CODE", "dense", "code", "dense"),
        ("ZIPCCL_MIN_BYTES", "65536", "min_bytes", 65536),
        ("ZIPCCL_MIN_BYTES", "0", "min_bytes", 0),
        ("ZIPCCL_MAX_SMS", "32", "max_sms", 32),
        ("ZIPCCL_CHECKSUM", "1", "checksum", True),
        ("ZIPCCL_CHECKSUM", "true", "checksum", True),
        ("ZIPCCL_CHECKSUM", "0", "checksum", False),
        ("ZIPCCL_INNER", "gloo", "inner", "gloo"),
    ],
)
def test_environment(monkeypatch, variable, text, field, value):
    monkeypatch.setenv(variable, text)
    assert getattr(zipccl.Options(), field) == value


def test_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("ZIPCCL_ALL_GATHER", "zip")
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "7")
    assert zipccl.Options(all_gather="raw", min_bytes=0).all_gather == "raw"
    assert zipccl.Options(all_gather="raw", min_bytes=0).min_bytes == 0


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"all_gather": "yes"}, r"all_gather must be one of \('auto', 'zip', 'raw'\), not 'yes'"),
        ({"all_gather": None}, "all_gather must be one of .* not None"),
        ({"code": "lz4"}, r"code must be one of \('auto', 'fast', 'dense'\), not 'lz4'"),
        ({"min_bytes": -1}, "min_bytes must be a number of bytes, 0 or more, not -1"),
        ({"min_bytes": 1.5}, "min_bytes must be a number of bytes, 0 or more, not 1.5"),
        ({"min_bytes": "64k"}, "min_bytes must be a number of bytes, 0 or more, not '64k'"),
        ({"min_bytes": 1 << 63}, "min_bytes must be below 2.63, not 9223372036854775808"),
        ({"max_sms": 1 << 31}, "max_sms must be below 2.31, not 2147483648"),
        ({"nccl_options": 3}, "nccl_options must be ProcessGroupNCCL.Options, not 3"),
        ({"max_sms": 0}, "max_sms must be a number of multiprocessors, 1 or more, not 0"),
        ({"max_sms": True}, "max_sms must be a number of multiprocessors, 1 or more, not True"),
        ({"checksum": "maybe"}, "checksum must be True or False, not 'maybe'"),
        ({"wire_dtype": torch.int8}, "wire_dtype must be .* not torch.int8"),
        ({"all_to_all_design": 3}, 'all_to_all_design must be "auto", 1 or 2, not 3'),
        ({"inner": 5}, "inner must be .* not 5"),
        ({"inner": "mpi"}, "inner must be .* not 'mpi'"),
        ({"inner": "cpu:nccl"}, "inner must be .* not 'cpu:nccl'"),
        ({"inner": "cpu:gloo,"}, "inner must be .* not 'cpu:gloo,'"),
    ],
)
def test_wrong_values(wrong, said):
    with pytest.raises(ValueError, match=said):
        zipccl.Options(**wrong)


@pytest.mark.parametrize(
    "variable, text, said",
    [
        ("ZIPCCL_ALL_GATHER", "on", "ZIPCCL_ALL_GATHER must be one of"),
        ("ZIPCCL_INNER", "mpi", "ZIPCCL_INNER must be"),
        ("ZIPCCL_MIN_BYTES", "1 MiB", "ZIPCCL_MIN_BYTES must be a number of bytes, not '1 MiB'"),
        ("ZIPCCL_MIN_BYTES", "-1", "ZIPCCL_MIN_BYTES must be a number of bytes, not '-1'"),
        ("ZIPCCL_CHECKSUM", "maybe", "ZIPCCL_CHECKSUM must be 0 or 1, not 'maybe'"),
        ("ZIPCCL_DEBUG", "debug", "ZIPCCL_DEBUG must be INFO or OFF, not 'debug'"),
    ],
)
def test_wrong_environment(monkeypatch, variable, text, said):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=said):
        zipccl.Options().native()


def test_what_is_given_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("ZIPCCL_ALL_REDUCE", "zip")
    assert zipccl.Options().all_reduce == "zip"
    assert zipccl.Options(all_reduce="raw").all_reduce == "raw"  # which is the default, too


def test_unknown_fields_are_named():
    with pytest.raises(TypeError, match="no field 'allgather'; it has all_gather, "):
        zipccl.Options(allgather="zip")


def test_wire_dtype_by_name():
    assert zipccl.Options(wire_dtype="bfloat16").wire_dtype == torch.bfloat16


def check_override(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(**{name: "raw" for name in zipccl.options.COLLECTIVES}))
    with pytest.raises(ValueError, match="made with every collective raw"):
        with zipccl.override(all_gather="zip"):
            pass
    with zipccl.override(min_bytes=5):
        pass


def test_override_says_when_a_group_cannot_zip():
    ranks.run(check_override, 2)


@pytest.mark.parametrize(
    "inner, backends",
    [
        ("gloo", {"cpu": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:gloo", {"cpu": "gloo"}),
        ("cpu:gloo, cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
    ],
)
def test_inner_backends(inner, backends):
    assert zipccl.Options(inner=inner).inner_backends() == backends


# ---- pg_options ------------------------------------------------------------------------------------------------


def test_pg_options_of_other_kinds():
    assert from_pg_options(None) == zipccl.Options()
    ours = zipccl.Options(all_gather="raw")
    assert from_pg_options(ours) is ours
    with pytest.raises(TypeError, match="pg_options must be zipccl.Options or ProcessGroupNCCL.Options, not dict"):
        from_pg_options({"all_gather": "zip"})


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccls_options_are_taken():
    """Megatron passes them."""
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options = from_pg_options(nccl)
    assert options.nccl_options is nccl and options.all_gather == "auto"


def check_nccl_options(rank):
    nccl = dist.ProcessGroupNCCL.Options()
    ranks.init("zipccl", pg_options=nccl)
    dist.all_reduce(t := torch.ones(2))
    assert t.tolist() == [2, 2]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_a_group_with_nccls_options():
    ranks.run(check_nccl_options, 2)


def check_subgroup_options(rank):
    """A group's options are its own; new_group without options takes the defaults, as torch's backends do."""
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip"))
    raw = dist.new_group([0, 1], pg_options=zipccl.Options(all_gather="raw"))
    default = dist.new_group([0, 1])
    outs = [torch.empty(100, dtype=BF16) for _ in range(2)]
    zipped = {}
    for name, group in (("world", dist.group.WORLD), ("raw", raw), ("default", default)):
        dist.all_gather(outs, torch.ones(100, dtype=BF16), group=group)
        zipped[name] = zipccl.stats(group)["all_gather"]["zipped_calls"]
    assert zipped == {"world": 1, "raw": 0, "default": 0}
    plain = dist.new_group([0, 1], backend="gloo")
    with pytest.raises(ValueError, match="is not a zipccl group"):
        zipccl.stats(plain)


def test_options_are_a_groups_own():
    ranks.run(check_subgroup_options, 2)


# ---- ranks must agree ------------------------------------------------------------------------------------------


def check_mismatch(rank, differing):
    name = next(iter(differing))
    said = rf"rank 2 of group '.*' has options '{name}=[^']*', rank 0 has '{name}=[^']*': every rank must pass the same"
    with pytest.raises(RuntimeError, match=said):  # on every rank
        ranks.init("zipccl", timeout=20, pg_options=zipccl.Options(**(differing if rank == 2 else {})))


@pytest.mark.parametrize("differing", [{"all_gather": "zip"}, {"min_bytes": 5}, {"checksum": True}, {"inner": "gloo"}])
def test_a_rank_that_differs_is_told(differing):
    ranks.run(check_mismatch, 3, differing)


def check_builds(rank, attribute, value, options, differs):
    if rank == 2:
        setattr(zipccl._C, attribute, value)
    said = ""
    try:
        ranks.init("zipccl", timeout=3 if differs else 30, pg_options=zipccl.Options(**options))
    except RuntimeError as error:
        said = str(error)
    if rank == 2 and differs:
        assert "rank 2 of group" in said and "to the same build of zipccl" in said, said
    if not differs:
        dist.all_reduce(t := torch.ones(2))
        assert said == "" and t.tolist() == [3, 3]


@pytest.mark.parametrize(
    "attribute, value, options, differs",
    [
        ("frame_version", 99, {}, True),
        ("cuda_version", None if zipccl._C.cuda_version else "13.0", {}, True),
        ("cuda_version", None if zipccl._C.cuda_version else "13.0", {"inner": "gloo"}, False),  # no CUDA tensors
    ],
)
def test_a_rank_of_another_build_is_told(attribute, value, options, differs):
    ranks.run(check_builds, 3, attribute, value, options, differs)


# ---- stats -----------------------------------------------------------------------------------------------------


def frame_bytes(values: torch.Tensor, checksum: bool) -> int:
    return zipccl.compress(values, checksum=checksum).numel()


def check_stats(rank, checksum):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip", checksum=checksum, min_bytes=3000))
    world = dist.get_world_size()
    assert zipccl.stats() == {}

    def shard(r, call):
        spread = 0.02 if r == 0 else 10.0 ** torch.arange(2000 + call) % 30  # frames of different sizes
        return (torch.randn(2000 + call, generator=torch.Generator().manual_seed(r)) * spread).to(BF16)

    raw = wire = 0
    for call in range(4):  # zipped
        out = torch.empty(world * (2000 + call), dtype=BF16)
        dist.all_gather_into_tensor(out, shard(rank, call))
        raw += (world - 1) * 2 * (2000 + call)
        wire += (world - 1) * max(frame_bytes(shard(r, call), checksum) for r in range(world))
    outs = [torch.empty(world * n, dtype=BF16) for n in (2000, 2001)]  # one call of two tensors
    with dist._coalescing_manager(async_ops=True) as manager:
        for call, out in enumerate(outs):
            dist.all_gather_into_tensor(out, shard(rank, call))
            raw += (world - 1) * 2 * (2000 + call)
            wire += (world - 1) * max(frame_bytes(shard(r, call), checksum) for r in range(world))
    manager.wait()
    for dtype, count in ((torch.float32, 5000), (BF16, 400)):  # raw: by dtype, by min_bytes
        out = torch.empty(world * count, dtype=dtype)
        dist.all_gather_into_tensor(out, torch.zeros(count, dtype=dtype))
        raw += (world - 1) * count * out.element_size()
        wire += (world - 1) * count * out.element_size()
    dist.all_reduce(torch.ones(5))  # raw by default, counted by itself
    dist.barrier()  # moves no data: not counted

    stats = zipccl.stats()
    counted = stats["all_gather"]
    seconds = counted.pop("seconds")
    assert counted == {"calls": 7, "zipped_calls": 5, "raw_bytes": raw, "wire_bytes": wire}
    assert wire < raw
    assert seconds.keys() == {"encode", "sizes", "transfer", "decode"} and all(s > 0 for s in seconds.values())
    assert stats.keys() == {"all_gather", "all_reduce"}
    assert (stats["all_reduce"]["calls"], stats["all_reduce"]["zipped_calls"]) == (1, 0)
    stats.reset()
    assert zipccl.stats() == {} and stats["all_gather"]["calls"] == 7  # a snapshot stays what it was
    dist.all_gather_into_tensor(out, torch.zeros(400, dtype=BF16))
    assert zipccl.stats()["all_gather"]["calls"] == 1


@pytest.mark.parametrize("checksum", [False, True])
def test_counters_are_an_independent_count(checksum):
    ranks.run(check_stats, 3, checksum)


def check_one_rank(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip"))
    dist.all_gather_into_tensor(out := torch.empty(9, dtype=BF16), torch.ones(9, dtype=BF16))
    assert (out == 1).all()
    counted = zipccl.stats()["all_gather"]
    assert (counted["calls"], counted["zipped_calls"], counted["raw_bytes"], counted["wire_bytes"]) == (1, 0, 0, 0)
    assert "one rank" in zipccl.explain().reason
    head, row = (line.split() for line in str(zipccl.stats()).splitlines())
    assert head == ["calls", "zipped", "raw", "MB", "wire", "MB", "saved"]
    assert row == ["all_gather", "1", "0", "0.00", "0.00", "-"]
    zipccl.stats().reset()
    assert str(zipccl.stats()) == "no collective of this group was called yet"


def test_a_group_of_one_moves_nothing():
    ranks.run(check_one_rank, 1)


def test_counters_print_as_a_table():
    stats = zipccl.backend.Stats([])
    stats["all_gather"] = {"calls": 7, "zipped_calls": 5, "raw_bytes": 2_000_000, "wire_bytes": 1_415_000}
    assert str(stats).splitlines()[1].split() == ["all_gather", "7", "5", "2.00", "1.42", "29.2", "%"]


# ---- auto, explain, ZIPCCL_DEBUG -------------------------------------------------------------------------------


def check_auto(rank):
    """Whatever the link: right results, one decision on all ranks, and the counters say which."""
    ranks.init("zipccl")
    world = dist.get_world_size()
    decision = zipccl.explain("all_gather", bytes=4 << 20)
    assert decision.choice in ("zip", "raw") and decision.raw_seconds > 0 and decision.zip_seconds > 0
    count = 2 << 20
    out = torch.empty(world * count, dtype=BF16)
    for _ in range(3):
        dist.all_gather_into_tensor(out, torch.full((count,), rank + 1.0, dtype=BF16))
        assert out.view(world, count)[:, ::9999].float().mean(1).tolist() == [r + 1 for r in range(world)]
    zipped = zipccl.stats()["all_gather"]["zipped_calls"]
    small = zipccl.explain(bytes=1000)
    assert small.choice == "raw" and "min_bytes" in small.reason
    with pytest.raises(ValueError, match="all_to_some"):
        zipccl.explain("all_to_some")
    return decision.reason, zipped


def test_auto_is_one_decision():
    answers = ranks.run(check_auto, 3)
    assert len(set(answers)) == 1


def check_explain_raw(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="raw"))
    reasons = [zipccl.explain(op, bytes=64 << 20, device="cpu").reason for op in ("all_gather", "all_reduce")]
    with zipccl.override(all_gather="auto"):
        return [*reasons, zipccl.explain(bytes=64 << 20, device="cpu").reason]


def test_explain_says_what_auto_would_do_in_a_raw_group():
    reasons = ranks.run(check_explain_raw, 2)
    assert reasons[0] == reasons[1]
    gather, reduce, automatic = reasons[0]
    assert "expected" in gather and gather.endswith('; not asked here: this group has all_gather="raw"')
    assert "expected" in reduce and reduce.endswith('; not asked here: this group has all_reduce="raw"')
    assert "expected" in automatic and "not asked" not in automatic


def check_log(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip"))
    for dtype in (BF16, torch.float32):
        dist.all_gather_into_tensor(torch.empty(200, dtype=dtype), torch.ones(100, dtype=dtype))
    dist.all_reduce(torch.ones(3))
    with open("/proc/self/fd/2") as log:
        return [line for line in log if line.startswith("zipccl:")]


def test_debug_prints_one_line_per_decision():
    lines = ranks.run(check_log, 2, env={"ZIPCCL_DEBUG": "INFO"})
    dtype = "below min_bytes, or a dtype that code leaves raw"
    expected = [
        "zipccl: all_gather of 200 bytes: zip (raw is not allowed)\n",
        f"zipccl: all_gather that brings 400 bytes here: raw ({dtype})\n",
        "zipccl: all_reduce that brings 12 bytes here: raw (its option says raw)\n",
    ]
    assert lines == [expected, []]
    assert ranks.run(check_log, 2) == [[], []]


@pytest.mark.parametrize("mode, warned", [("auto", True), ("zip", True), ("raw", False)])
def test_a_build_without_cuda_says_so_where_a_gpu_is_used(monkeypatch, mode, warned):
    monkeypatch.setattr(zipccl._C, "cuda_version", None)
    settings = zipccl.Options(**dict.fromkeys(zipccl.options.COLLECTIVES, mode)).native()
    no_group = types.SimpleNamespace(group_rank=0, group_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(TypeError):  # this is no NCCL
            zipccl.backend.build(no_group, settings, None, object(), zip_cpu=False)
    assert ["built without CUDA" in str(w.message) for w in caught] == [True] * warned


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_alone_without_a_gpu_is_refused_at_once():
    with pytest.raises(RuntimeError, match="inner='nccl', but torch sees no GPU"):
        dist.init_process_group("zipccl", store=dist.HashStore(), rank=0, world_size=1,
                                pg_options=zipccl.Options(inner="nccl"))  # fmt: skip
