"""Runs a function on several ranks at once, and never hangs.

    def work(rank, scale):                 # at module level: ranks import it by name
        ranks.init("zipccl")
        ...
        return anything that can be pickled

    results = ranks.run(work, 2, 1.5)      # one result per rank, or RankFailed with the guilty rank's traceback

Ranks are forked from a server that has torch imported already, so a run costs a fraction of a second. They leave by
os._exit, or are killed: the ordinary end of a torch process takes seconds and is tested by itself (test_groups.py).
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Asking CUDA itself whether there is a GPU would spoil it for the processes forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel", "torch._dynamo", "zipccl"]
)

_LOG_BYTES = 4000  # of a rank's output, shown when something went wrong
_GRACE_S = 3  # for a failed rank's peers to report what they know


class RankFailed(AssertionError):
    pass


def run(
    work: Callable,
    world: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    killed: tuple[int, ...] = (),
) -> list[Any]:
    """work(rank, *args) on `world` ranks; their results in rank order. Ranks in `killed` must die by SIGKILL: None."""
    with tempfile.TemporaryDirectory(prefix="zipccl-ranks-") as directory:
        processes: list[Any] = []
        pipes: dict[Any, int] = {}  # reading end -> rank
        try:
            for rank in range(world):
                reader, writer = _context.Pipe(duplex=False)
                setting = _environment(rank, world, directory) | (env or {})
                process = _context.Process(target=_main, args=(writer, directory, rank, setting, work, args))
                process.start()
                writer.close()
                processes.append(process)
                pipes[reader] = rank
            results, failures = _collect(pipes, processes, time.monotonic() + timeout, killed)
            if len(results) < world and not failures:
                for process in processes:
                    _dump_stacks(process)
                missing = sorted(set(range(world)) - results.keys())
                raise RankFailed(f"ranks {missing} still ran after {timeout} s{_logs(directory, missing)}")
            if failures:
                said = "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
                raise RankFailed(f"{said}{_logs(directory, list(failures))}")
            return [results[rank] for rank in range(world)]
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()


def _environment(rank: int, world: int, directory: str) -> dict[str, str]:
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "RANKS_DIRECTORY": directory}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        # NCCL refuses two ranks of one host on one GPU; as ranks of different hosts they talk over sockets.
        env |= {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    return env


def _collect(
    pipes: dict[Any, int], processes: list[Any], deadline: float, killed: tuple[int, ...]
) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and failures (in order of arrival) by rank, until all have spoken or the time is up."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = dict(pipes)
    while open_pipes:
        ready = multiprocessing.connection.wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(_GRACE_S)
                ok, value = False, f"died without a word, exit code {processes[rank].exitcode}"
                if rank in killed and processes[rank].exitcode == -signal.SIGKILL:
                    ok, value = True, None
            pipe.close()
            if ok:
                results[rank] = value
            else:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                failures[rank] = value
    return results, failures


def _dump_stacks(process: Any) -> None:
    if process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes all stacks into the rank's log
        time.sleep(0.2)


def _logs(directory: str, of: list[int]) -> str:
    text = ""
    for rank in of:
        log = Path(directory, f"rank{rank}.log")
        said = log.read_text(errors="replace")[-_LOG_BYTES:] if log.exists() else ""
        text += f"\n---- output of rank {rank} ----\n{said}" if said else ""
    return text


# ---- in a rank -------------------------------------------------------------------------------------------------


def _main(pipe: Any, directory: str, rank: int, env: dict[str, str], work: Callable, args: tuple) -> None:
    os.environ.update(env)
    log = os.open(f"{directory}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    try:
        dist.set_debug_level_from_env()
        torch.set_num_threads(1)
        # Plain pickle: torch's own way of sending tensors needs this process alive when they arrive.
        answer = pickle.dumps((True, work(rank, *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    sys.stdout.flush()
    if torch.cuda.is_initialized():
        # A rank's GPU is through with a call before NCCL has sent all of it: going now would break the peers' calls.
        multiprocessing.parent_process().join(60)  # run() kills us when all have spoken
    os._exit(0)


_inits = 0


def init(backend: str = "zipccl", timeout: float = 30, **kwargs: Any) -> dist.ProcessGroup:
    """init_process_group() for this rank, over a file of its own so that no port is needed."""
    global _inits
    _inits += 1
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{os.environ['RANKS_DIRECTORY']}/store{_inits}", world()),
        rank=int(os.environ["RANK"]),
        world_size=world(),
        timeout=datetime.timedelta(seconds=timeout),
        **kwargs,
    )
    return dist.distributed_c10d._get_default_group()


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def device(kind: str) -> torch.device:
    """This rank's device of that kind; several ranks share a GPU where there are too few."""
    if kind == "cpu":
        return torch.device("cpu")
    found = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


# ---- for comparisons -------------------------------------------------------------------------------------------

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: torch.Tensor) -> torch.Tensor:
    """The values as integers on the CPU, so that NaNs compare by payload and -0.0 differs from 0.0."""
    t = t.detach().cpu().contiguous()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(_INTEGERS[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
