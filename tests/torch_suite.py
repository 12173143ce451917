"""Runs tests of the distributed suite that torch ships (torch.testing._internal.distributed.distributed_test) over
gloo, or over zipccl in gloo's place.

The suite decides by the name of its backend what can be tested, so groups keep the name gloo, and zipccl is made where
they ask for it. As with torch's own runner every test has processes of its own: they are forked from ranks that have
imported the suite.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ranks
import torch
import torch.distributed as dist
import zipccl
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

SUITE = "torch.testing._internal.distributed.distributed_test"
NEEDS = (SUITE, "expecttest", "numpy")
LIMIT_S = 45  # of one test; hardly any takes two


class Outcome(NamedTuple):
    """Of one test on one rank."""

    state: str  # "passed", "skipped" or "failed"
    text: str = ""  # why
    zipped_calls: int = 0


def missing() -> list[str]:
    """What this Python lacks of what the suite imports."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def run(
    pattern: str, world: int, backend: str, env: dict[str, str], named: str = "gloo", gpu_tests: bool = False
) -> dict[str, list[Outcome]]:
    """Runs all tests whose names match.

    Args:
        backend: what is made where a group asks for gloo.
        named: what the suite is to take its backend for. To it "mpi" is the one that can do all-to-all on the CPU.
        gpu_tests: also run, on the CPU, what the suite would skip for want of GPUs.

    Returns:
        Name to the outcome on each rank.
    """
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as directory:
        env = {"BACKEND": named, "TEMP_DIR": directory, "MASTER_ADDR": "127.0.0.1"} | env
        by_rank = ranks.run(_run_all, world, directory, pattern, backend, gpu_tests, timeout=280, env=env)
    return {name: [Outcome(*outcomes[name]) for outcomes in by_rank] for name in by_rank[0]}


# ---- in a rank -------------------------------------------------------------------------------------------------


def _run_all(rank: int, directory: str, pattern: str, backend: str, gpu_tests: bool) -> dict[str, list]:
    conditions = importlib.import_module("torch.testing._internal.common_distributed")
    conditions.skip_if_small_worldsize = lambda test: test  # wants 8 ranks where 3 do
    if gpu_tests:
        _lift_gpu_conditions(conditions)
    suite = importlib.import_module(SUITE)
    suite.BACKEND = os.environ["BACKEND"] = "gloo"  # its decorators have seen the other name

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    if backend != "gloo":
        _make_instead_of_gloo(backend)
        _take_events_for_gloos(backend, suite)
    on_cpu = _OnCpu if gpu_tests else contextlib.nullcontext

    def test(name: str) -> Outcome:
        os.environ["TEMP_DIR"] = own = f"{directory}/{name}"
        Path(own, "test_dir").mkdir(parents=True, exist_ok=True)
        suite.Barrier.sync = _barrier_over(dist.FileStore(f"{own}/barriers", ranks.world()))
        case = Case(name)
        case.rank, case.file_name = rank, f"{own}/store"
        seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
        dist.init_process_group(
            suite.BACKEND,
            init_method=case.init_method,
            world_size=ranks.world(),
            rank=rank,
            timeout=datetime.timedelta(seconds=seconds),
        )
        group = c10d._get_default_group()
        case._barrier()  # what is skipped ends at once, perhaps before others have come this far
        torch.manual_seed(0)
        with on_cpu():
            getattr(case, name)()
        zipped = sum(op["zipped_calls"] for op in zipccl.stats(group).values()) if backend == "zipccl" else 0
        case._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        return Outcome("passed", "", zipped)

    skips = {skip.exit_code for skip in suite.TEST_SKIPS.values()}
    names = [name for name in dir(Case) if re.fullmatch(pattern, name)]
    names = [name for name in names if not getattr(getattr(Case, name), "__unittest_skip__", False)]
    return {name: _in_fork(lambda name=name: test(name), skips) for name in names}


def _barrier_over(store: dist.Store) -> Callable:
    """The suite's barrier besides the groups that are tested. Its own one sleeps a tenth of a second at a time."""
    turns = itertools.count()

    def sync(wait_for: int | None = None, timeout: float = 10) -> None:
        key, deadline = f"barrier{next(turns)}", time.monotonic() + timeout
        arrived = store.add(key, 1)
        while arrived < (wait_for or ranks.world()):
            if time.monotonic() > deadline:
                raise RuntimeError("barrier timeout")
            time.sleep(0.005)
            arrived = store.add(key, 0)

    return sync


def _in_fork(test: Callable[[], Outcome], skips: set[int]) -> list:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        outcome = json.dumps(_outcome(test, skips)).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(outcome)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(said) if said else Outcome("failed", f"died or took {LIMIT_S} s, wait status {status}")


def _outcome(test: Callable[[], Outcome], skips: set[int]) -> Outcome:
    try:
        return test()
    except unittest.SkipTest as skip:
        return Outcome("skipped", str(skip))
    except SystemExit as end:
        return Outcome("skipped" if end.code in skips else "failed", f"exit code {end.code}")
    except BaseException:
        return Outcome("failed", traceback.format_exc())


# ---- zipccl in gloo's place -------------------------------------------------------------------------------------


def _make_instead_of_gloo(backend: str) -> None:
    make = c10d._new_process_group_helper
    signature = inspect.signature(make)

    def make_other(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        call.arguments["backend"] = c10d.Backend(str(asked).replace("gloo", backend))
        made = make(*call.args, **call.kwargs)
        group = made[0]
        if isinstance(group, dist.ProcessGroup):  # what torch answers when asked for the group's backend
            c10d._world.pg_map[group] = (c10d.Backend(str(asked)), *c10d._world.pg_map[group][1:])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(str(asked))))
        return made

    c10d._new_process_group_helper = make_other


def _take_events_for_gloos(backend: str, suite: Any) -> None:
    """A compressed call is an event of zipccl's, with those of gloo inside."""
    events_of = suite.get_profiling_event

    def events(name: str, *args: Any, **kwargs: Any) -> list:
        own = events_of(name.replace("gloo:", f"{backend}:"), *args, **kwargs)
        return own or events_of(name, *args, **kwargs)

    suite.get_profiling_event = events


# ---- tests for GPUs, on the CPU ---------------------------------------------------------------------------------


def _on_cpu(device: Any) -> Any:
    """Integers are devices here, too."""
    kind = device.split(":")[0] if isinstance(device, str) else getattr(device, "type", None)
    return torch.device("cpu") if kind == "cuda" or type(device) is int else device


class _OnCpu(TorchFunctionMode):
    """Puts tensors that are asked for on a GPU on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if getattr(func, "__name__", "") == "to":
            args = (args[0], *map(_on_cpu, args[1:]))
        return func(*args, **kwargs)


def _lift_gpu_conditions(conditions: Any) -> None:
    """Before the suite is imported: its decorators let pass, and what they guard finds itself on the CPU."""
    conditions.skip_if_no_gpu = lambda test: test
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(conditions, name, lambda *args, **kwargs: lambda test: test)
    conditions.init_multigpu_helper = lambda world, backend: {rank: [rank] for rank in range(world)}
    torch.cuda.set_device = torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    move, make_ddp = torch.nn.Module.to, torch.nn.parallel.DistributedDataParallel.__init__

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return move(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    def init(
        self: Any, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        make_ddp(self, module, **kwargs)

    torch.nn.Module.to = to
    torch.nn.parallel.DistributedDataParallel.__init__ = init
