"""What ran where: the facts every --json carries."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone

import torch
import zipccl

_load_before = os.getloadavg()[0]  # what else ran on this machine when the program began


def describe(device: str) -> dict:
    facts = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(sys.executable), *_arguments()]),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": _load_before,
        "zipccl": zipccl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return facts


def _arguments() -> list[str]:
    """The command line, without where the results went."""
    kept = [a for i, a in enumerate(sys.argv) if "--json" not in (a, sys.argv[i - 1])]
    return [a for a in kept if not a.startswith("--json=")]


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
