"""The CPU backend's worker without torch: tests/native/worker_stress.cpp under ThreadSanitizer."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / "tests/native/worker_stress.cpp", ROOT / "csrc/backend/worker.cpp"]
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'csrc'}"]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_the_worker_under_thread_sanitizer(tmp_path):
    program = tmp_path / "worker_stress"
    command = ["g++", *FLAGS, "-fsanitize=thread", "-o", str(program), *map(str, SOURCES)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=250)
    if "unexpected memory mapping" in done.stderr and shutil.which("setarch"):
        # Older ThreadSanitizers cannot place their shadow memory where addresses are widely random.
        fixed = ["setarch", platform.machine(), "-R", str(program)]
        done = subprocess.run(fixed, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and done.stdout == "all is well\n", done.stdout + done.stderr
