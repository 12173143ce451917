"""zipccl: a torch.distributed backend that moves fewer bytes, and gives every bit back.

``import zipccl`` registers the backend "zipccl"; ``torch.distributed.init_process_group("zipccl")`` uses it.
"""

import importlib

from zipccl import _build_check

_build_check.check()

from zipccl._C import Error, FrameError  # noqa: E402
from zipccl._version import __version__  # noqa: E402
from zipccl.attach import attach, detach, override  # noqa: E402
from zipccl.backend import explain, register, stats  # noqa: E402
from zipccl.codec import compress, decompress  # noqa: E402
from zipccl.dynamiq import DynamiQState, dynamiq_hook  # noqa: E402
from zipccl.options import Options  # noqa: E402

__all__ = [
    "DynamiQState",
    "Error",
    "FrameError",
    "Options",
    "__version__",
    "attach",
    "compress",
    "decompress",
    "detach",
    "dynamiq_hook",
    "explain",
    "override",
    "register",
    "stats",
]

Error.__doc__ = (
    "What zipccl raises for what only it can find wrong: a RuntimeError whose text names call, rank and cause."
)
FrameError.__doc__ = (
    "A frame that cannot be decoded: corrupt, truncated, of a newer zipccl, or not what the call expects."
)

register()


def __getattr__(name: str):
    if name == "fsdp":  # imports much of torch, for those who use it
        return importlib.import_module("zipccl.fsdp")
    raise AttributeError(f"module 'zipccl' has no attribute {name!r}")
