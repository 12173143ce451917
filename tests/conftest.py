"""What every test starts from, whatever the caller's shell has set."""

import os

import pytest
import torch

BUILD_KNOBS = ("ZIPCCL_CUDA",)

for name in list(os.environ):
    if name.startswith("ZIPCCL_") and name not in BUILD_KNOBS:
        del os.environ[name]  # options of the caller's jobs
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine, whose host name may not resolve


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
