"""The environment variables of zipccl: one list, and a warning about others of that prefix, which do nothing."""

from __future__ import annotations

import difflib
import functools
import os
import warnings

from zipccl.options import VARIABLES

PREFIX = "ZIPCCL_"
KNOWN = (
    *VARIABLES.values(),
    "ZIPCCL_DEBUG",  # options.py
    "ZIPCCL_ISA",  # codec.py, csrc/codec/frame.cpp
    "ZIPCCL_CUDA",  # setup.py
)


@functools.cache
def warn_of_unknown() -> None:
    """Warns of variables that look like options and are none. Once per process, when its first group is made."""
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in KNOWN:
            warnings.warn(f"zipccl reads no environment variable {name}; {_meant(name)}", stacklevel=2)


def _meant(name: str) -> str:
    # By what follows the prefix: with it all names would look alike.
    ends = [known.removeprefix(PREFIX) for known in KNOWN]
    close = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), ends, n=1)
    return f"is {PREFIX}{close[0]} meant?" if close else f"it reads {', '.join(KNOWN)}"
