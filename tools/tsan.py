"""Tests with several threads and ranks over an extension built with ThreadSanitizer: `make tsan` (g++, Linux).

torch is not built so: what it reads and writes is not seen, only its locks are. A race on purpose, made first, shows
that races are seen. Other tests: `make tsan ARGS="tests/test_groups.py -k flight"`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "tsan"
REPORT = OUT / "report"  # and a dot and a process number
FLAG = "-fsanitize=thread"
TESTS = [
    "tests/test_codec_threads.py",
    "tests/test_random_collectives.py",
    "tests/test_raw_again.py",
    "tests/test_threads.py",
    "tests/test_faults.py",
]
# The standard library, not built so either, counts who holds an exception.
KNOWN = "race:std::__exception_ptr::exception_ptr::_M_release\n"
CANARY = """
#include <thread>
static int shared;
extern "C" int race() {
  std::thread other([] { for (int i = 0; i < 1000; ++i) ++shared; });
  for (int i = 0; i < 1000; ++i) ++shared;
  other.join();
  return shared;
}
"""


def build(cxx: list[str]) -> None:
    """The extension and the canary. Times of files are kept, so that only what has changed is compiled again."""
    shutil.rmtree(OUT / "csrc", ignore_errors=True)
    shutil.copytree(ROOT / "csrc", OUT / "csrc")
    built = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    shutil.copytree(ROOT / "python", OUT / "python", dirs_exist_ok=True, ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, OUT / name)
    flags = {"CFLAGS": FLAG, "LDFLAGS": FLAG, "ZIPCCL_CUDA": "0"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"],
        cwd=OUT,
        check=True,
        env=os.environ | flags,
    )
    source, library = OUT / "canary.cpp", OUT / "canary.so"
    source.write_text(CANARY)
    subprocess.run([*cxx, FLAG, "-O1", "-g", "-fPIC", "-shared", "-o", library, source], check=True)


def run(cxx: list[str], *command: str) -> tuple[int, str]:
    """Exit status and reports of a Python command under the sanitizer."""
    for old in OUT.glob("report.*"):
        old.unlink()
    runtime = subprocess.check_output([*cxx, "-print-file-name=libtsan.so"], text=True).strip()
    known = OUT / "known"
    known.write_text(KNOWN)
    options = f"ignore_noninstrumented_modules=1 die_after_fork=0 handle_segv=0 exitcode=0 log_path={REPORT}"
    options += f" suppressions={known}"
    env = os.environ | {"LD_PRELOAD": runtime, "TSAN_OPTIONS": options, "PYTHONPATH": str(OUT / "python")}
    # Without random addresses, which some sanitizers have no room for.
    done = subprocess.run(["setarch", platform.machine(), "-R", sys.executable, *command], cwd=ROOT, env=env)
    return done.returncode, "".join(path.read_text(errors="replace") for path in sorted(OUT.glob("report.*")))


def main() -> int:
    cxx = os.environ.get("CXX", "c++").split()
    OUT.mkdir(parents=True, exist_ok=True)
    build(cxx)
    code, reports = run(cxx, "-c", f"import ctypes; ctypes.CDLL({str(OUT / 'canary.so')!r}).race()")
    if code or "data race" not in reports:
        print(f"the sanitizer does not see a race that is there (exit status {code})")
        return 1
    where = f"import sys, zipccl; sys.exit(not zipccl._C.__file__.startswith({str(OUT)!r}))"
    code, _ = run(cxx, "-c", where)
    if code:
        print("the tests would not use the extension that was built for them")
        return 1
    code, reports = run(cxx, "-m", "pytest", "-q", *(sys.argv[1:] or TESTS))
    print(reports or "no races")
    return code or bool(reports)


if __name__ == "__main__":
    sys.exit(main())
