"""Builds zipccl and its extension zipccl._C.

Environment:
  ZIPCCL_CUDA=auto|0|1   auto builds CUDA when torch has it and nvcc is found; 1 fails when that is impossible
  TORCH_CUDA_ARCH_LIST   architectures, default those of the visible GPUs, else "8.0;9.0+PTX"
  MAX_JOBS               compilers at once, default min(cores, free memory / 4 GiB)
  CXX, CUDA_HOME         as torch.utils.cpp_extension reads them
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.errors import CompileError, LinkError

try:
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension as BuildExtensionBase
except ImportError as error:
    torch, torch_error = None, error
    from setuptools.command.build_ext import build_ext as BuildExtensionBase

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = "8.0;9.0+PTX"
BYTES_PER_JOB = 4 << 30  # one compiler over torch's headers stays below this

# What torch offers is read from its headers, never from its version.
# (macro, header under torch's include directory, regular expression): defined when the expression is found.
C10D_BACKEND = "torch/csrc/distributed/c10d/Backend.hpp"
TORCH_FEATURES = [
    ("ZIPCCL_TORCH_HAS_SET_GROUP_UID", C10D_BACKEND, r"virtual\s[^;{]*\bsetGroupUid\("),  # not virtual in 2.9
]


def fail(sentence: str):
    raise SystemExit(f"\nzipccl: {sentence}")


# ---- What this machine offers ----------------------------------------------------------------------------------


def compiler() -> str:
    cxx = os.environ.get("CXX", "c++")
    if not shutil.which(cxx.split()[0]):
        fail(f"no C++ compiler ({cxx}): install one (Debian, Ubuntu: apt-get install g++) or set CXX.")
    return cxx


def compiler_version(command: str) -> str:
    return subprocess.run([*command.split(), "--version"], capture_output=True, text=True).stdout.split("\n")[0]


def check_headers() -> None:
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        fail("this Python has no Python.h: install its headers (Debian, Ubuntu: apt-get install python3-dev).")
    if not any(Path(d, C10D_BACKEND).exists() for d in cpp_extension.include_paths("cpu")):
        fail("this torch has no C++ headers of torch.distributed: install a Linux wheel of torch (pip install torch).")


def nvcc_version(nvcc: Path) -> str:
    found = re.search(r"release (\d+\.\d+)", subprocess.check_output([nvcc, "--version"], text=True))
    return found.group(1) if found else fail(f"{nvcc} --version names no release: set CUDA_HOME to a CUDA toolkit.")


def find_nvcc() -> "Path | None":
    nvcc = Path(cpp_extension.CUDA_HOME or "", "bin", "nvcc")
    return nvcc if cpp_extension.CUDA_HOME and nvcc.exists() else None


def choose_cuda(mode: str, torch_cuda: "str | None", nvcc_cuda: "str | None") -> bool:
    """Whether to build CUDA. torch_cuda, nvcc_cuda: versions such as "13.0", None when there is none."""
    if mode not in ("auto", "0", "1"):
        fail(f"ZIPCCL_CUDA={mode} is not one of auto, 0, 1.")
    if mode == "0":
        return False
    if torch_cuda is None:
        return mode == "1" and fail("ZIPCCL_CUDA=1, but this torch is built without CUDA: pip install a CUDA torch.")
    if nvcc_cuda is None:
        return mode == "1" and fail("ZIPCCL_CUDA=1, but there is no nvcc: set CUDA_HOME to a CUDA toolkit.")
    if nvcc_cuda.split(".")[0] != torch_cuda.split(".")[0]:
        fail(
            f"nvcc is CUDA {nvcc_cuda} but torch is built for CUDA {torch_cuda}: set CUDA_HOME to a CUDA "
            f"{torch_cuda.split('.')[0]} toolkit, or ZIPCCL_CUDA=0 to build for the CPU alone."
        )
    return True


def cuda_archs() -> str:
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return os.environ["TORCH_CUDA_ARCH_LIST"]
    visible = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(visible)) or DEFAULT_ARCHS


def free_memory() -> int:
    """Bytes this process may still take: the machine's, or its cgroup's when that is less."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(available.group(1)) << 10 if available else 0
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        pass
    return free


def build_jobs(cores: int, free: int) -> int:
    return max(1, min(cores, free // BYTES_PER_JOB))


def torch_features(include_dir: str) -> "list[tuple[str, None]]":
    found = []
    for macro, header, pattern in TORCH_FEATURES:
        path = Path(include_dir, header)
        if path.exists() and re.search(pattern, path.read_text()):
            found.append((macro, None))
    return found


# ---- The extension ---------------------------------------------------------------------------------------------


def sources(cuda: bool) -> "list[str]":
    """Relative, as setuptools wants them: an absolute source would put its object outside the build directory."""
    suffixes = (".cpp", ".cu") if cuda else (".cpp",)
    return sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*") if p.suffix in suffixes)


def make_extension(cuda: bool, archs: str) -> Extension:
    device = "cuda" if cuda else "cpu"
    system_includes = [*cpp_extension.include_paths(device), sysconfig.get_paths()["include"]]
    macros = [("ZIPCCL_TORCH_VERSION", f'"{torch.__version__}"'), *torch_features(system_includes[0])]
    if cuda:
        macros += [
            ("ZIPCCL_WITH_CUDA", None),
            ("ZIPCCL_CUDA_VERSION", f'"{torch.version.cuda}"'),
            ("ZIPCCL_CUDA_ARCHS", f'"{archs}"'),
        ]
    # -isystem keeps our warnings to our files; -std is cpp_extension's, which knows what its torch needs.
    isystem = [flag for path in system_includes for flag in ("-isystem", path)]
    make = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    return make(
        "zipccl._C",
        sources(cuda),
        depends=sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*") if p.suffix in (".h", ".cuh")),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=macros,
        extra_compile_args={
            "cxx": ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", *isystem],
            "nvcc": ["-O3", "-Xcompiler=-fvisibility=hidden,-Wall,-ffp-contract=off", *isystem],
        },
    )


class BuildExtension(BuildExtensionBase):
    def finalize_options(self):
        super().finalize_options()
        self.force = True  # distutils does not see that flags have changed; ninja does

    def run(self):
        if torch is None:
            fail(
                f"torch cannot be imported here ({torch_error}): install torch, then let the build see it with "
                "pip install --no-build-isolation ."
            )
        cxx = compiler()
        check_headers()
        nvcc = find_nvcc()
        nvcc_cuda = nvcc_version(nvcc) if nvcc else None
        cuda = choose_cuda(os.environ.get("ZIPCCL_CUDA", "auto"), torch.version.cuda, nvcc_cuda)
        archs = cuda_archs() if cuda else ""
        if cuda:
            os.environ["TORCH_CUDA_ARCH_LIST"] = archs
        jobs = os.environ.setdefault("MAX_JOBS", str(build_jobs(len(os.sched_getaffinity(0)), free_memory())))
        extension = make_extension(cuda, archs)
        # An editable install would build in a temporary directory; a fixed one lets ninja skip what has not changed.
        self.build_temp = str(Path("build", f"temp-{sys.implementation.cache_tag}-{'cuda' if cuda else 'cpu'}"))

        summary = {
            "builds": f"zipccl._C from {len(extension.sources)} files, {'CPU and CUDA' if cuda else 'CPU alone'}",
            "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
            "python": sys.version.split()[0],
            "compiler": compiler_version(cxx),
            "nvcc": f"{nvcc_cuda} ({nvcc})" if nvcc else "not found",
            "archs": archs or "none",
            "features": " ".join(name for name, _ in torch_features(cpp_extension.include_paths("cpu")[0])) or "none",
            "jobs": f"{jobs}, {'ninja' if self.use_ninja else 'no ninja: one file at a time'}",
        }
        print("zipccl build", *(f"  {key:9} {value}" for key, value in summary.items()), sep="\n", flush=True)

        # The placeholder from setup() has been finalized; it takes over what the real one was made with.
        for name in vars(extension):
            if not name.startswith("_") and name != "name":
                setattr(self.extensions[0], name, getattr(extension, name))
        try:
            super().run()
        except (RuntimeError, CompileError, LinkError):
            fail("the compiler failed; its message stands above.")
        self.write_build_info(cuda, archs)

    def build_extensions(self):
        # a.cpp and a.cu must not share an object file.
        plain = self.compiler.object_filenames

        def object_filenames(source_filenames, *args, **kwargs):
            objects = plain(source_filenames, *args, **kwargs)
            return [
                o[: -len(".o")] + ".cu.o" if s.endswith(".cu") else o
                for s, o in zip(source_filenames, objects, strict=True)
            ]

        self.compiler.object_filenames = object_filenames
        super().build_extensions()

    def build_info_path(self) -> Path:
        if self.inplace:
            return Path(self.get_finalized_command("build_py").get_package_dir("zipccl"), "_build_info.py")
        return Path(self.build_lib, "zipccl", "_build_info.py")

    def write_build_info(self, cuda: bool, archs: str) -> None:
        """zipccl/_build_check.py reads this before it dares to load the extension."""
        self.build_info_path().write_text(
            "# Written by setup.py when the extension was built.\n"
            f"TORCH_VERSION = {str(torch.__version__)!r}\n"
            f"CUDA_VERSION = {torch.version.cuda if cuda else None!r}\n"
            f"CUDA_ARCHS = {archs!r}\n"
        )

    def get_outputs(self):
        return [*super().get_outputs(), str(self.build_info_path())]


def add_ninja_to_path() -> None:
    """A pip-installed ninja is not on PATH when the environment's Python is called without activating it."""
    try:
        from ninja import BIN_DIR
    except (ImportError, FileNotFoundError):  # versions differ in what they do when the program is not found
        return
    os.environ["PATH"] = BIN_DIR + os.pathsep + os.environ.get("PATH", "")


if __name__ == "__main__":
    add_ninja_to_path()
    setup(
        license="Apache-2.0",
        ext_modules=[Extension("zipccl._C", [])],
        cmdclass={"build_ext": BuildExtension},
    )
