"""Inner backends that move nothing: they record what reaches them and answer from a script.

With them a test is one rank of any world, sees what ZipBackend sends where, and chooses what "other ranks" send back.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
import zipccl
from torch.utils import cpp_extension
from zipccl import _C

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests" / "native" / "recording_backend.cpp"
NAME = "zipccl_test_native"


@functools.cache
def native() -> ModuleType:
    """tests/native/recording_backend.cpp, compiled when it or torch has changed (half a minute)."""
    of = f"{SOURCE.read_text()}{torch.__version__}{sys.version}"
    library = ROOT / "build" / "tests" / f"{NAME}-{hashlib.sha256(of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(prefix="zipccl-native-") as directory:
            preloaded = os.environ.pop("LD_PRELOAD", None)  # a sanitizer, which compilers do not bear
            cpp_extension.load(
                NAME, [str(SOURCE)], build_directory=directory, extra_cflags=["-O0"], is_python_module=False
            )
            if preloaded is not None:
                os.environ["LD_PRELOAD"] = preloaded
            library.parent.mkdir(parents=True, exist_ok=True)
            # At once: another process may have the library open already.
            with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as file:
                pass
            shutil.copy(Path(directory, f"{NAME}.so"), file.name)
            Path(file.name).replace(library)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    return module


class Inner:
    """A ZipBackend over three recorders: the CPU's, the one for zipped CPU calls, and the GPU's (where asked for).

    Without the second one (``zip_cpu=False``) sizes of CUDA calls cannot but travel over the GPU's.
    """

    def __init__(self, rank: int = 0, size: int = 2, cuda: bool = False, zip_cpu: bool = True, **options):
        make = native().Recorder
        self.cpu, self.zip = make(rank, size), make(rank, size) if zip_cpu else None
        self.cuda = make(rank, size) if cuda else None
        options = {"all_gather": "zip"} | options
        self.backend = _C.ZipBackend(rank, size, self.cpu, self.zip, self.cuda, zipccl.Options(**options).native())

    def take_calls(self) -> dict[str, list]:
        """Recorder -> its calls since the last time, for recorders that had any."""
        recorders = {"cpu": self.cpu, "zip": self.zip, "cuda": self.cuda}
        calls = {name: recorder.take_calls() for name, recorder in recorders.items() if recorder}
        return {name: list_ for name, list_ in calls.items() if list_}


def plain(calls: list) -> list[tuple]:
    """Calls in a form that compares: tensors by where they lie and what they are."""
    return [
        (c.name, c.arguments, [(t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for t in c.tensors]) for c in calls
    ]
