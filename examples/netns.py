"""A two-node network of chosen speed on one Linux machine.

Two network namespaces joined by a veth pair, each end shaped by a token bucket filter. The bucket holds 2 ms of the
rate, so that messages of a megabyte already feel the link (with a bucket of 4 MB they would pass unshaped):

    with ShapedLink("1gbit") as link:
        subprocess.Popen(link.enter(0) + ["python", "rank0.py"])   # side 0, has address link.address
        subprocess.Popen(link.enter(1) + ["python", "rank1.py"])   # side 1

The namespaces have no names. Each is kept alive by one small process that ends when its standard input closes, so the
kernel removes everything, shaping included, however the program ends: return, exception, Ctrl-C or kill -9.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess

INTERFACE = "zip0"  # the name of the link in both namespaces
_SMALLEST_BUCKET = 128 << 10  # bytes; must hold the largest packet, 64 KiB when the kernel sends segments in one piece
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class LinkError(RuntimeError):
    """Why there can be no shaped link here, in one sentence for the user."""


class ShapedLink:
    address = ADDRESSES[0]
    interface = INTERFACE

    def __init__(self, rate: str):
        self.rate = rate
        self.bits_per_second = parse_rate(rate)
        self._keepers: list[subprocess.Popen] = []

    def __enter__(self) -> ShapedLink:
        check_possible()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def enter(self, side: int) -> list[str]:
        """What to put before a command so that it runs on that side of the link."""
        return ["nsenter", f"--net=/proc/{self._keepers[side].pid}/ns/net"]

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.stdin.close()
        for keeper in self._keepers:
            keeper.wait()
            keeper.stdout.close()
            keeper.stderr.close()
        self._keepers = []

    def _build(self) -> None:
        bucket = max(_SMALLEST_BUCKET, int(self.bits_per_second / 8 * 0.002))
        for _ in range(2):
            # cat echoes one line once it runs, which is when its namespace exists; then it waits for the end of input.
            pipe = subprocess.PIPE
            keeper = subprocess.Popen(["unshare", "--net", "cat"], bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
            self._keepers.append(keeper)
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.write(b"ready\n")
            if keeper.stdout.readline() != b"ready\n":
                raise _refused(keeper.stderr.read().decode())
        _ip(*self.enter(0), "ip", "link", "add", INTERFACE, "type", "veth",
            "peer", "name", INTERFACE, "netns", str(self._keepers[1].pid))  # fmt: skip
        for side, address in enumerate(ADDRESSES):
            inside = self.enter(side)
            _ip(*inside, "ip", "address", "add", f"{address}/30", "dev", INTERFACE)
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, "ip", "link", "set", INTERFACE, "up")
            _ip(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                "rate", self.rate, "burst", str(bucket), "latency", "50ms")  # fmt: skip


def parse_rate(rate: str) -> float:
    """Bits per second of a rate in tc's spelling."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)bit", rate.lower())
    if not match or float(match[1]) == 0:
        raise LinkError(f"'{rate}' is not a rate: write it as tc does, for example 1gbit or 500mbit.")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match[2]]


def check_possible() -> None:
    """Raises LinkError when this user or machine cannot have a shaped link."""
    if os.name != "posix" or os.uname().sysname != "Linux":
        raise LinkError("A shaped link needs Linux network namespaces.")
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            raise LinkError(f"A shaped link needs the program '{program}': install the package {package}.")
    if os.geteuid() != 0:
        raise LinkError("A shaped link needs root, to make network namespaces: run the same command with sudo.")


def _ip(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise _refused(done.stderr)


def _refused(said: str) -> LinkError:
    reason = " ".join(said.split()) or "no reason given"
    return LinkError(
        f"This machine refuses network namespaces, veth pairs or traffic shaping, as containers often do ({reason}); "
        "leave the link away or run on a machine of your own."
    )
