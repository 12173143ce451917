"""The build: what it chooses, what it says when it cannot, what an sdist holds, and the check at import."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_under_test", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load("setup.py")
build_check = load("python/zipccl/_build_check.py")
check_layout = load("tools/check_layout.py")
setup_env = load("tools/setup_env.py")


def run(*args, **env):
    command = [sys.executable, "-W", "ignore", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)


# ---- setup.py --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, torch_cuda, nvcc_cuda, expected",
    [
        ("auto", "13.0", "13.0", True),
        ("auto", "13.0", "13.2", True),
        ("auto", "13.0", None, False),
        ("auto", None, "13.0", False),
        ("auto", None, None, False),
        ("1", "12.8", "12.4", True),
        ("0", "13.0", "13.0", False),
        ("0", "13.0", "12.4", False),
    ],
)
def test_choose_cuda(mode, torch_cuda, nvcc_cuda, expected):
    assert setup.choose_cuda(mode, torch_cuda, nvcc_cuda) is expected


@pytest.mark.parametrize(
    "mode, torch_cuda, nvcc_cuda, advice",
    [
        ("1", None, "13.0", "pip install a CUDA torch"),
        ("1", "13.0", None, "set CUDA_HOME"),
        ("1", "13.0", "12.4", "set CUDA_HOME to a CUDA 13 toolkit, or ZIPCCL_CUDA=0"),
        ("auto", "13.0", "12.4", "set CUDA_HOME to a CUDA 13 toolkit, or ZIPCCL_CUDA=0"),
        ("yes", "13.0", "13.0", "not one of auto, 0, 1"),
    ],
)
def test_choose_cuda_refuses(mode, torch_cuda, nvcc_cuda, advice):
    with pytest.raises(SystemExit, match=advice):
        setup.choose_cuda(mode, torch_cuda, nvcc_cuda)


@pytest.mark.parametrize("cores, free_gib, jobs", [(16, 64, 16), (16, 9, 2), (2, 64, 2), (8, 1, 1), (1, 0, 1)])
def test_build_jobs(cores, free_gib, jobs):
    assert setup.build_jobs(cores, free_gib << 30) == jobs


def test_free_memory_is_of_this_machine():
    assert 0 < setup.free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_torch_features_are_read_from_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(
        setup,
        "TORCH_FEATURES",
        [("HAS_A", "a.hpp", r"virtual\s[^;{]*\bfirst\("), ("HAS_B", "a.hpp", "second"), ("HAS_C", "none.hpp", ".")],
    )
    (tmp_path / "a.hpp").write_text("class Backend {\n  virtual std::vector<int>\n      first(int n) = 0;\n};\n")
    assert setup.torch_features(str(tmp_path)) == [("HAS_A", None)]


def test_sources_of_a_cpu_build_hold_no_cuda():
    assert not [s for s in setup.sources(cuda=False) if s.endswith(".cu")]
    assert {s for s in setup.sources(cuda=True) if s.endswith(".cpp")} == set(setup.sources(cuda=False))


def test_without_torch_the_build_says_what_to_type(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    build = run("setup.py", "build_ext", "--build-lib", tmp_path / "lib", PYTHONPATH=str(tmp_path))
    assert build.returncode != 0
    assert "pip install --no-build-isolation ." in build.stderr.strip().split("\n")[-1]
    version = run("setup.py", "--version", PYTHONPATH=str(tmp_path))  # metadata needs no torch
    assert version.returncode == 0, version.stderr


def test_without_a_compiler_the_build_says_what_to_type(tmp_path):
    build = run("setup.py", "build_ext", "--build-lib", tmp_path, CXX="no-such-compiler")
    assert build.returncode != 0
    assert "apt-get install g++" in build.stderr.strip().split("\n")[-1]


def test_sdist_builds_anywhere(tmp_path):
    made = run("setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path)
    assert made.returncode == 0, made.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}

    needed = {"setup.py", "pyproject.toml", "Makefile", "LICENSE", "README.md", ".ci/run", ".clang-format"}
    for pattern in ("csrc/**/*", "python/**/*.py", "tests/**/*", "benchmarks/**/*.py", "examples/*", "requirements/*"):
        needed |= {p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern) if p.is_file()}
    needed = {name for name in needed if "__pycache__" not in name} - {"python/zipccl/_build_info.py"}
    assert needed - names == set()
    unwanted = {n for n in names if n.endswith((".so", ".o", ".pyc", "_build_info.py")) or n.startswith("build/")}
    assert unwanted == set()


# ---- zipccl/_build_check.py ------------------------------------------------------------------------------------


def test_build_check_accepts_the_same_minor():
    build_check.check_build(SimpleNamespace(TORCH_VERSION="2.11.0+cu130"), True, "2.11.1+cpu", "make build")


@pytest.mark.parametrize("running", ["2.12.0", "2.1.0", "3.11.0"])
def test_build_check_refuses_another_minor(running):
    with pytest.raises(ImportError, match=r"built for torch 2\.11 but this is torch .*; type: make build$"):
        build_check.check_build(SimpleNamespace(TORCH_VERSION="2.11.0+cu130"), True, running, "make build")


@pytest.mark.parametrize(
    "info, exists", [(None, True), (None, False), (SimpleNamespace(TORCH_VERSION="2.11.0"), False)]
)
def test_build_check_refuses_what_is_not_built(info, exists):
    with pytest.raises(ImportError, match="not built for this Python; type: make build$"):
        build_check.check_build(info, exists, "2.11.0", "make build")


def test_rebuild_command(tmp_path):
    assert build_check.rebuild_command(ROOT / "python/zipccl") == f"pip install --no-build-isolation -e {ROOT}"
    assert "in zipccl's source directory" in build_check.rebuild_command(tmp_path / "site-packages/zipccl")


@pytest.mark.parametrize("removed", [None, "_build_info.py", "*.so"])
def test_import_of_a_stale_build(tmp_path, removed):
    """The whole way: `import zipccl` must fail by our sentence, before the extension is loaded."""
    package = tmp_path / "zipccl"
    shutil.copytree(ROOT / "python/zipccl", package, ignore=shutil.ignore_patterns("__pycache__"))
    if removed:
        for path in list(package.glob(removed)):
            path.unlink()
        expected = "not built for this Python"
    else:
        for path in package.glob("*.so"):
            path.write_bytes(b"not a library")
        (package / "_build_info.py").write_text("TORCH_VERSION = '1.0.0'\n")
        expected = "built for torch 1.0 but this is torch"
    result = run("-c", "import zipccl", PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    last = result.stderr.strip().split("\n")[-1]
    assert last.startswith("ImportError: ") and expected in last and "pip install --no-build-isolation" in last


# ---- tools -----------------------------------------------------------------------------------------------------


def test_layout_rules_hold_here():
    assert check_layout.breaks(ROOT) == []


def test_layout_breaks_are_found(tmp_path):
    for name, text in {
        "csrc/codec/a.cpp": "#include <vector>\n#include <c10/util/Half.h>\n",
        "csrc/policy/b.h": '#  include "torch/torch.h"\n',
        "csrc/backend/c.cpp": "#include <torch/torch.h>\n",
        "csrc/backend/d.cpp": "#include <sstream>\n\nstd::string s = (std::ostringstream() << 1).str();\n",
        "python/zipccl/long.py": "\n" * 601,
        "python/zipccl/short.py": "\n" * 600,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    places = [line.partition(": ")[0] for line in check_layout.breaks(tmp_path)]
    assert places == [
        "csrc/backend/d.cpp:1",
        "csrc/backend/d.cpp:3",
        "csrc/codec/a.cpp:2",
        "csrc/policy/b.h:1",
        "python/zipccl/long.py:601",
    ]


@pytest.mark.parametrize("version", [(3, 9, 1), (3, 14, 0)])
def test_python_outside_the_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(setup_env.sys, "version_info", version)
    with pytest.raises(SystemExit, match="zipccl needs 3.10 to 3.13"):
        setup_env.check_python()
