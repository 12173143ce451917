"""Benchmarks must measure what they say: every figure of a small run that is not a time is computed here once more."""

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
import zipccl

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import codec  # noqa: E402
import collectives  # noqa: E402
import harness  # noqa: E402
import plot_codec  # noqa: E402
from all_gather import AllGather  # noqa: E402

FACTS = {"what", "date", "command", "device", "zipccl", "torch", "python"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / script), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture
def tensor_file(tmp_path) -> Path:
    path = tmp_path / "values_bf16.bin"
    values = torch.randn(50_001, generator=torch.Generator().manual_seed(3)).bfloat16()
    values[:3] = torch.tensor([0x7FC1, -0x8000, 1], dtype=torch.int16).view(torch.bfloat16)  # a NaN, -0.0, a denormal
    path.write_bytes(values.view(torch.uint8).numpy().tobytes())
    return path


def test_codec(tmp_path, tensor_file):
    done = run("codec.py", "--min-bytes", "64K", "--max-bytes", "256K", "--factor", "2",
               "--tensor", str(tensor_file), "--json", str(tmp_path / "codec.json"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "codec.json").read_text())
    assert FACTS <= facts.keys() and facts["what"] == "codec" and facts["values"] == tensor_file.name
    rows = facts["rows"]
    sizes = [64 << 10, 128 << 10, 256 << 10]
    assert [(row["bytes"], row["code"]) for row in rows] == [(n, code) for n in sizes for code in ("fast", "dense")]
    for row in rows:
        values = harness.Values(tensor_file).take(row["bytes"] // 2)
        assert row["frame_bytes"] == len(zipccl.compress(values, row["code"], checksum=False))
        assert row["mismatches"] == 0
        assert row["bits"] == pytest.approx(16 * row["frame_bytes"] / row["bytes"])
        limit = row["copy_gbps"] / (1 + row["bits"] / 16)
        for way in ("encode", "decode"):
            assert row[f"{way}_gbps"] > 0
            assert row[f"{way}_share"] == pytest.approx(row[f"{way}_gbps"] / limit)
    for row in facts["rivals"]:
        for code in ("fast", "dense"):
            ratio = row[f"encode_gbps_{code}"] / row["encode_gbps"]
            assert row[f"encode_ratio_{code}"] == pytest.approx(ratio)
        assert row["exact"]
    svg = xml.etree.ElementTree.fromstring(plot_codec.draw(facts))
    lines = {"zipccl fast", "zipccl dense", "limit"} | {row["rival"] for row in facts["rivals"]}
    assert len(svg.findall(".//{*}polyline")) == 2 * len(lines)
    assert lines | {"64K", "128K", "256K"} <= {element.text for element in svg.findall(".//{*}text")}
    assert "64 KiB" in done.stdout and "mismatches" in done.stdout


def test_dtypes(tmp_path):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(4)).bfloat16()
    for name, t in (("bfloat16", values), ("float32_of_bfloat16", values.float())):
        (tmp_path / f"weights_{name}.bin").write_bytes(t.view(torch.uint8).numpy().tobytes())
    command = [sys.executable, str(BENCHMARKS / "dtypes.py"), str(tmp_path), "--json", str(tmp_path / "dtypes.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "dtypes.json").read_text())["rows"]
    assert [(r["dtype"], r["kind"], r["values"], r["raw_bits"]) for r in rows] == [
        ("bfloat16", "weights", 5000, 16), ("float32 of bfloat16", "weights", 5000, 32),
    ]  # fmt: skip
    assert rows[0]["dense_bits"] == 8 * len(zipccl.compress(values, "dense", checksum=False)) / 5000
    assert rows[1]["fast_bits"] >= 32 > 13 > rows[1]["dense_bits"]
    assert "float32 of bfloat16" in done.stdout


def test_collectives(tmp_path, tensor_file):
    done = run("collectives.py", "--min-bytes", "64K", "--max-bytes", "256K", "--tensor", str(tensor_file),
               "--json", str(tmp_path / "collectives.json"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "collectives.json").read_text())
    assert FACTS <= facts.keys() and facts["ranks"] == 2 and facts["inner"] == "gloo"
    rows = facts["collectives"]["all_gather"]
    assert [row["bytes"] for row in rows] == [64 << 10, 256 << 10]
    for row in rows:
        assert row["mismatches"] == 0 and row["calls"] >= 5
        frame = len(zipccl.compress(harness.Values(tensor_file).take(row["bytes"] // 2), checksum=False))
        assert row["wire_over_raw"] == pytest.approx(frame / row["bytes"], rel=0.02)
        assert row["speedup_zip"] == pytest.approx(row["raw_ms"] / row["zip_ms"])
        assert row["busbw_raw"] == pytest.approx(row["bytes"] / row["raw_ms"] / 1e6)
        assert row["auto"] in ("zip", "raw")
    assert "all_gather, size: bytes each rank contributes" in done.stdout


def test_overhead(tmp_path):
    done = run("overhead.py", "--min-bytes", "64", "--max-bytes", "64", "--rounds", "3",
               "--json", str(tmp_path / "overhead.json"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "overhead.json").read_text())
    assert FACTS <= facts.keys() and len(facts["collectives"]) == 6
    for rows in facts["collectives"].values():
        assert [(row["bytes"], row["async"]) for row in rows] == [(64, "sync"), (64, "async")]
        for row in rows:
            assert row["more_us"] == pytest.approx(row["zipccl_us"] - min(row["inner_us"], row["again_us"]))


def test_all_gather_knows_what_must_come_out(tensor_file):
    values = harness.Values(tensor_file)
    ranks = [AllGather(2000, values, rank, 3, torch.device("cpu")) for rank in range(3)]
    gathered = torch.cat([rank.input for rank in ranks])
    assert all(harness.mismatches(rank.expected(), gathered) == 0 for rank in ranks)
    assert harness.mismatches(ranks[0].input, ranks[1].input) > 900, "ranks must hold different values"
    assert ranks[0].output.shape == gathered.shape and ranks[0].bus_bytes() == 4000


def test_mismatches_compares_bits():
    a = torch.tensor([0.0, float("nan"), 1.0, 2.0], dtype=torch.bfloat16)
    assert harness.mismatches(a, a.clone()) == 0, "a NaN equals itself"
    b = a.clone()
    b[0] = -0.0
    b.view(torch.int16)[1] ^= 1
    assert harness.mismatches(a, b) == 2


def test_values_repeat_to_any_size(tensor_file):
    values = harness.Values(tensor_file)
    taken = values.take(120_000)
    assert len(taken) == 120_000
    assert (
        harness.mismatches(taken[:50_001], values.base) == harness.mismatches(taken[50_001:100_002], values.base) == 0
    )
    synthetic = harness.Values()
    assert harness.mismatches(synthetic.take(4096), harness.Values().take(4096)) == 0
    assert synthetic.take(4096).isfinite().all()


def test_sizes():
    assert [harness.size(s) for s in ("2", "64K", "1M", "1MiB", "3G")] == [2, 1 << 16, 1 << 20, 1 << 20, 3 << 30]
    assert [harness.show_size(n) for n in (2, 1 << 16, 1 << 20, 3 << 30, 1025)] == [
        "2 B", "64 KiB", "1 MiB", "3 GiB", "1025 B",
    ]  # fmt: skip
    for wrong in ("", "K", "1T", "-1", "1.5M"):
        with pytest.raises(argparse.ArgumentTypeError):
            harness.size(wrong)


@pytest.mark.parametrize("script", [codec, collectives])
def test_arguments_that_cannot_work_are_refused(script, tmp_path, monkeypatch, capsys):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"xyz")
    for arguments, reason in (
        (["--factor", "1"], "at least 2"),
        (["--min-bytes", "1M", "--max-bytes", "64K"], "not above"),
        (["--tensor", str(odd)], "not a file of 16-bit values"),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert ended.value.code == 2 and reason in capsys.readouterr().err
