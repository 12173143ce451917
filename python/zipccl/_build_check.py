"""Refuses an extension that this torch cannot load, before the dynamic linker does so with an undefined symbol.

torch's C++ interface changes from one minor version to the next, so the extension must be built anew for each. The
build leaves its facts in zipccl/_build_info.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType


def rebuild_command(package_dir: Path) -> str:
    """What to type; an editable install knows its own sources."""
    source = package_dir.parents[1]
    if (source / "setup.py").exists() and (source / "csrc").is_dir():
        return f"pip install --no-build-isolation -e {source}"
    return "pip install --no-build-isolation . (in zipccl's source directory)"


def minor(version: str) -> str:
    """ "2.11.0+cu130" -> "2.11" """
    return ".".join(version.split(".")[:2])


def check_build(info: ModuleType | None, extension_exists: bool, torch_version: str, rebuild: str) -> None:
    if info is None or not extension_exists:
        raise ImportError(f"zipccl's extension is not built for this Python; type: {rebuild}")
    if minor(info.TORCH_VERSION) != minor(torch_version):
        raise ImportError(
            f"zipccl was built for torch {minor(info.TORCH_VERSION)} but this is torch {minor(torch_version)}; "
            f"type: {rebuild}"
        )


def check() -> None:
    """To be called before zipccl._C is imported."""
    import torch

    try:
        info = importlib.import_module("zipccl._build_info")
    except ModuleNotFoundError:
        info = None
    extension_exists = importlib.util.find_spec("zipccl._C") is not None
    check_build(info, extension_exists, torch.__version__, rebuild_command(Path(__file__).resolve().parent))
