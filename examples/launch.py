"""Starts the ranks of distributed programs as fresh processes, hears from them, and notices when one dies.

In the parent:

    results = launch.run({"gloo": [script, "--worker", ...], "zipccl": [...]}, cluster, on_message=show)

In the script, when it is started as a rank:

    launch.rank_main(work)     # work() may call launch.tell({...}); what it returns is that rank's result

Several programs live side by side but compute in turns, if they call launch.wait_for_turn() wherever they may pause:
what else the machine does then slows them alike. Under torchrun the parent is itself one rank of many and starts that
one rank of each program; otherwise it starts all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import zipccl
from netns import ShapedLink

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
_PIPE = "LAUNCH_PIPE"  # file descriptor on which a rank sends its messages
_LOG_LINES = 40  # of a dead rank, shown to the user


class RankDied(RuntimeError):
    pass


def inner_name(device: str) -> str:
    """The backend under zipccl, and the one to compare it with."""
    return "nccl" if device == "cuda" else "gloo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, default=2, help="how many to start (default 2; torchrun has its own)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--ranks-per-gpu", type=positive, help="several ranks on one GPU, over sockets")
    parser.add_argument("--link", metavar="RATE", help="join the ranks by a link of this rate, for example 1gbit")
    parser.add_argument(
        "--transport",
        choices=["default", "sockets"],
        default="default",
        help="sockets: NCCL uses neither NVLink, shared memory nor InfiniBand; default: what it finds",
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text!r}")
    return int(text)


def resolve(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Puts real values in place of defaults that depend on the machine, or ends with what is wrong."""
    if UNDER_TORCHRUN:
        args.ranks = int(os.environ["WORLD_SIZE"])
        if args.link:
            parser.error("--link: makes its own two nodes on one machine, so it does not go with torchrun")
    if args.ranks < 2:
        parser.error("--ranks: one rank alone has nobody to send to; use 2 or more")

    why_not = None
    if not torch.cuda.is_available():
        why_not = "torch sees no GPU"
    elif zipccl._C.cuda_version is None:
        why_not = "this zipccl was built without CUDA; reinstall it with ZIPCCL_CUDA=1"
    if args.device == "cuda" and why_not:
        parser.error(f"--device cuda: {why_not}")
    if args.device == "auto":
        args.device = "cpu" if why_not else "cuda"

    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if not gpus or UNDER_TORCHRUN:
        args.ranks_per_gpu = args.ranks_per_gpu or 1
    elif not args.ranks_per_gpu:
        args.ranks_per_gpu = -(-args.ranks // gpus)
    elif args.ranks_per_gpu * gpus < args.ranks:
        parser.error(f"--ranks-per-gpu {args.ranks_per_gpu}: too few for {args.ranks} ranks on {gpus} GPU(s)")


@dataclass
class Cluster:
    """Which ranks run, where, and how they reach each other."""

    world: int
    device: str  # "cpu" or "cuda"
    ranks_per_gpu: int = 1
    link: ShapedLink | None = None
    transport: str = "default"  # or "sockets"

    @property
    def ranks(self) -> list[int]:
        """Those this process starts."""
        return [int(os.environ["RANK"])] if UNDER_TORCHRUN else list(range(self.world))

    @property
    def prints(self) -> bool:
        return self.ranks[0] == 0

    def side(self, rank: int) -> int:
        """The end of the shaped link a rank lives on: the first half of the ranks on 0, the rest on 1."""
        return rank * 2 // self.world

    def environment(self, rank: int, port: int) -> dict[str, str]:
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        if not UNDER_TORCHRUN:
            address = self.link.address if self.link else "127.0.0.1"
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world)}
            env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
            interface = self.link.interface if self.link else "lo"
            if self.link or os.path.exists("/sys/class/net/lo"):
                env["GLOO_SOCKET_IFNAME"] = interface
            if self.link:  # as on two hosts: sockets between the sides, whatever shares the machine
                env |= {"NCCL_SOCKET_IFNAME": interface, "NCCL_NET": "Socket", "NCCL_HOSTID": f"side{self.side(rank)}"}
                env["NCCL_MNNVL_ENABLE"] = "0"
            elif self.transport == "sockets":
                env.setdefault("NCCL_SOCKET_IFNAME", interface)
        if self.transport == "sockets":
            env |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
        if self.device == "cuda" and self.ranks_per_gpu > 1:
            # NCCL refuses two ranks of one host on one GPU; as ranks of different hosts they talk over sockets.
            env |= {"NCCL_HOSTID": f"h{rank}", "NCCL_NET": "Socket"}
            env.setdefault("NCCL_SOCKET_IFNAME", "lo")
        local = int(env["LOCAL_RANK"])
        env["LOCAL_GPU"] = str(local // self.ranks_per_gpu)
        return env


# ---- In the parent --------------------------------------------------------------------------------------------


OnMessage = Callable[[str, int, dict], None]  # program, rank, message


def run(commands: dict[str, list[str]], cluster: Cluster, on_message: OnMessage) -> dict[str, dict[int, Any]]:
    """Runs each program, `python command...`, once per rank. Returns what every work() returned, by program and rank.

    Raises RankDied, with the end of that rank's output, as soon as one of them ends in any other way.
    """
    with tempfile.TemporaryDirectory(prefix="zipccl-") as directory:
        ranks: list[_Rank] = []
        try:
            for program, command in commands.items():
                port = _free_port()
                for rank in cluster.ranks:
                    ranks.append(_Rank(program, rank, command, cluster, port, directory))
            _watch(ranks, on_message)
            return {p: {r.rank: r.result for r in ranks if r.program == p} for p in commands}
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    def __init__(self, program: str, rank: int, command: list[str], cluster: Cluster, port: int, directory: str):
        self.program, self.rank = program, rank
        self.log_path = Path(directory, f"{program}-rank{rank}.log")
        self.reader, writer = os.pipe()
        env = cluster.environment(rank, port) | {_PIPE: str(writer)}
        prefix = cluster.link.enter(cluster.side(rank)) if cluster.link else []
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[writer],
            )
        os.close(writer)
        self.buffer = b""
        self.result: Any = None
        self.done = False
        self.waiting = False  # for its turn

    def give_turn(self) -> None:
        if self.waiting:
            self.waiting = False
            with contextlib.suppress(BrokenPipeError):  # it died; its pipe will say so
                self.process.stdin.write(b"t")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        os.close(self.reader)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _watch(ranks: list[_Rank], on_message: OnMessage) -> None:
    """Passes messages on and turns round until every rank is done."""
    programs = list(dict.fromkeys(rank.program for rank in ranks))
    turn = programs[-1]  # so the first one's comes next
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.reader, selectors.EVENT_READ, rank)
        # A pipe closes when its rank ends, so waiting on the pipes is waiting for messages and deaths alike.
        while selector.get_map():
            for key, _ in selector.select():
                rank = key.data
                data = os.read(rank.reader, 1 << 20)
                if not data:
                    selector.unregister(rank.reader)
                    if rank.process.wait() != 0 or not rank.done:
                        raise RankDied(_describe_death(ranks, rank))
                *lines, rank.buffer = (rank.buffer + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "result" in message:
                        rank.result, rank.done = message["result"], True
                    elif "waiting" in message:
                        rank.waiting = True
                    else:
                        on_message(rank.program, rank.rank, message)
            if all(r.waiting or r.done for r in ranks):  # so the one whose turn it was has ended it
                unfinished = [p for p in programs if any(r.program == p and not r.done for r in ranks)]
                after = [p for p in unfinished if programs.index(p) > programs.index(turn)]
                turn = (after or unfinished or [turn])[0]
                for r in ranks:
                    if r.program == turn:
                        r.give_turn()


def _describe_death(ranks: list[_Rank], first: _Rank) -> str:
    # When one rank dies its peers fail too, moments later. The one that wrote to its log first is the cause.
    time.sleep(0.05)
    dead = [r for r in ranks if r.process.poll() not in (None, 0)] or [first]
    cause = min(dead, key=lambda r: r.log_path.stat().st_mtime_ns)
    code = cause.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    log = cause.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    said = "\n".join(f"  | {line}" for line in log) or "  | (it printed nothing)"
    return f"rank {cause.rank} of the {cause.program} run {how}; the others were stopped. Its last output:\n{said}"


def exit_cleanly_on_sigterm() -> None:
    """Makes SIGTERM unwind the stack, so that ranks and namespaces are removed as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


# ---- In a rank ------------------------------------------------------------------------------------------------


def tell(message: dict) -> None:
    """Sends a message to the parent."""
    with os.fdopen(os.dup(int(os.environ[_PIPE])), "wb") as pipe:
        pipe.write(json.dumps(message).encode() + b"\n")


def wait_for_turn() -> None:
    """Ends this rank's turn, if it has one, and returns when it has the next."""
    tell({"waiting": True})
    _turns.acquire()


_turns = threading.Semaphore(0)


def rank_main(work: Callable[[], Any]) -> NoReturn:
    threading.Thread(target=_listen, daemon=True).start()
    code = 0
    try:
        tell({"result": work()})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown with torch loaded takes seconds


def _listen() -> None:
    """The parent writes one byte per turn. When it is gone, however it went, so is this rank."""
    while os.read(0, 1):
        _turns.release()
    os._exit(1)
