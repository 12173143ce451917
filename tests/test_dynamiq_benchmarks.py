"""What DynamiQ is compared with must be what it is called, in one process and between ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(1, str(BENCHMARKS))

import simulate  # noqa: E402
from baselines import CODECS, BaselineState, all_reduce, baseline_hook  # noqa: E402


def values(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=draw) * torch.exp(4 * torch.sin(torch.arange(count) / 500))


@pytest.mark.parametrize("name", CODECS)
def test_codecs_keep_what_they_can_hold(name):
    codec = CODECS[name]
    x = values(codec.block * 40)
    x[: codec.block] = 0
    packed = codec.pack(x)
    assert packed.dtype == torch.uint8
    assert packed.numel() * 8 == codec.bits * x.numel()
    once = codec.unpack(packed)
    assert (once[: codec.block] == 0).all()
    assert torch.allclose(codec.unpack(codec.pack(once)), once, rtol=1e-6)
    coarse = {"fp8": 2**-4, "int4": 1 / 7, "mxfp8": 2**-3, "mxfp6": 2**-2, "mxfp4": 0.34}[name]
    rows, kept = x.view(-1, codec.block), once.view(-1, codec.block)
    assert ((rows - kept).abs() <= coarse * rows.abs().amax(1, keepdim=True)).all()


def test_mxfp8_elements_are_torchs():
    codec = CODECS["mxfp8"]
    x = values(3200).view(-1, 32)
    power = torch.frexp(x.abs().amax(1, keepdim=True))[1] - 1 - 8
    want = torch.ldexp(torch.ldexp(x, -power).clamp(-448, 448).to(torch.float8_e4m3fn).float(), power)
    assert torch.equal(codec.unpack(codec.pack(x.view(-1))).view(-1, 32), want)


def sums(rank, count):
    ranks.init("gloo")
    n = dist.get_world_size()
    rows = [values(count, seed) for seed in range(n)]
    found = []
    for codec in CODECS.values():
        for topology in ("direct", "ring"):
            found.append(all_reduce(rows[rank].clone(), BaselineState(codec, topology)))
    model = DistributedDataParallel(nn.Linear(20, 30))
    model.register_comm_hook(BaselineState(CODECS["fp8"]), baseline_hook)
    model(torch.full((4, 20), rank + 1.0)).sum().backward()
    return found, model.module.weight.grad


def test_ranks_agree_with_one_process():
    n, count = 3, 2500
    rows = [values(count, seed) for seed in range(n)]
    exact = sum(row.double() for row in rows)
    (first, gradient), *others = ranks.run(sums, n, count)
    for found, other in others:
        assert all(same_bits(a, b) for a, b in zip(found, first, strict=True))
        assert same_bits(gradient, other)
    assert torch.allclose(gradient, torch.full_like(gradient, 8.0), rtol=0.1)
    cases = [(codec, topology) for codec in CODECS.values() for topology in ("direct", "ring")]
    for got, (codec, topology) in zip(first, cases, strict=True):
        want = simulate.baseline(rows.__getitem__, n, topology, codec)
        errors = [float((x.double() - exact).square().sum() / exact.square().sum()) for x in (got, want)]
        assert errors[0] == pytest.approx(errors[1], rel=0.5)  # chunks have other sinks
        assert errors[1] < 0.1


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_speed(tmp_path):
    run(
        "dynamiq_speed.py", "--device", "cpu", "--min-bytes", "64K", "--max-bytes", "64K", "--json", str(tmp_path / "a")
    )
    rows = json.loads((tmp_path / "a").read_text())["rows"]
    assert all(row["ranks_alike"] and 0 <= row["vnmse"] < 0.2 for row in rows)
    assert {"bf16", "dynamiq 5 bits auto", "fp8 direct"} <= {row["method"] for row in rows}


def test_error_and_ablation(tmp_path):
    run("dynamiq_error.py", "--workers", "4", "--bits", "5", "--super-groups", "128", "--json", str(tmp_path / "b"))
    found = {(r["method"], r["topology"]): r["vnmse"] for r in json.loads((tmp_path / "b").read_text())["rows"]}
    assert found["dynamiq-fine", "direct"] < found["dynamiq-paper", "direct"] < found["mxfp4", "direct"]
    assert found["dynamiq-paper", "direct"] < found["dynamiq-paper", "ring"]
    run("dynamiq_ablation.py", "--json", str(tmp_path / "c"))
    errors = [row["vnmse"] for row in json.loads((tmp_path / "c").read_text())["rows"][:5]]
    assert errors == sorted(errors, reverse=True)  # each technique helps


def test_training(tmp_path):
    small = ["--steps", "4", "--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--workers", "2"]
    run("dynamiq_training.py", *small, "--json", str(tmp_path / "d"))
    runs = {r["method"]: r["final_loss"] for r in json.loads((tmp_path / "d").read_text())["runs"]}
    assert len(runs) == 11
    assert all(loss == pytest.approx(runs["fp32"], rel=0.02) for loss in runs.values())


@pytest.mark.parametrize("script", ["dynamiq_speed.py", "dynamiq_training.py"])
def test_unknown_methods_are_named(script):
    command = [sys.executable, str(BENCHMARKS / script), "--methods", "bf16", "dynamic"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "'dynamic' is none of ['" in done.stderr
