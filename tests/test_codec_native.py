"""The CPU codec without torch: tests/fuzz/fuzz_decode.cpp under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / "tests/fuzz/fuzz_decode.cpp", *sorted((ROOT / "csrc/codec").glob("*.cpp"))]
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
    f"-I{ROOT / 'csrc'}",
    "-fno-sanitize-recover=all",
]

ROUNDS = 1500  # about 25 seconds on an idle core


def build(compiler: str, flags: list[str], out: Path) -> None:
    command = [compiler, *FLAGS, *flags, "-o", str(out), *map(str, SOURCES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def run(command: list[str]) -> str:
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # ASan must come first
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_broken_frames_under_sanitizers(tmp_path):
    program = tmp_path / "fuzz_decode"
    build("g++", ["-fsanitize=address,undefined"], program)
    summary = run([str(program), str(ROUNDS)])
    print(summary)
    assert summary.startswith(f"{ROUNDS} rounds")


def has_libfuzzer(tmp_path: Path) -> bool:
    source = tmp_path / "probe.cpp"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
    command = ["clang++", "-fsanitize=fuzzer,address,undefined", str(source), "-o", str(tmp_path / "probe")]
    return bool(shutil.which("clang++")) and subprocess.run(command, capture_output=True, timeout=100).returncode == 0


def test_libfuzzer_target(tmp_path):
    """A short run, with the golden frames as its corpus."""
    if not has_libfuzzer(tmp_path):
        pytest.skip("needs clang++ with libFuzzer")
    program, corpus = tmp_path / "fuzz_decode", tmp_path / "corpus"
    build("clang++", ["-DZIPCCL_LIBFUZZER", "-fsanitize=fuzzer,address,undefined"], program)
    shutil.copytree(ROOT / "tests/golden", corpus, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    run([str(program), "-seed=1", "-runs=20000", "-max_total_time=10", f"-artifact_prefix={tmp_path}/", str(corpus)])
