"""Registers "zipccl" with torch.distributed and builds its groups."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import datetime
import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zipccl import _C
from zipccl._version import __version__
from zipccl.environment import warn_of_unknown
from zipccl.options import COLLECTIVES, Options, from_pg_options

NAME = "zipccl"
_torch_split_source = getattr(c10d, "_get_split_source", None)
_torch_set_timeout = getattr(c10d, "_set_pg_timeout", None)
# DynamiQ's, one per group, made at its first use and kept for the group's life: its calls must stay in order.
channels: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.DynamiqChannel] = weakref.WeakKeyDictionary()
_EXIT_PATIENCE_S = 5.0  # for calls in flight when a program ends without destroy_process_group()


def register() -> None:
    """Makes ``init_process_group("zipccl")`` known for CPU and CUDA tensors. Touches no GPU; may be called again."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _C.set_splitter(_split)
        if _torch_split_source is not None:
            c10d._get_split_source = _split_source
        if _torch_set_timeout is not None:
            c10d._set_pg_timeout = _set_timeout
        atexit.register(_drain, os.getpid())


def _split_source(group: dist.ProcessGroup) -> dist.Backend | None:
    """What torch may split new NCCL groups from: under attach() what it is without zipccl, else nothing.

    Left to itself, torch puts the ZipBackend into the options of NCCL, which refuses it.
    """
    source = _torch_split_source(group)
    if isinstance(source, _C.ZipBackend):
        return None if NAME in c10d._world.pg_map[group][0] else source.inner("cuda")
    return source


def _set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup | None = None) -> None:
    """As trainers call it. torch knows by their types which backends have timeouts to set, and warns of others."""
    try:
        own = zip_backends(group)
    except ValueError:
        own = []
    with warnings.catch_warnings():
        if own:
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
        _torch_set_timeout(timeout, group)
    for backend in own:
        backend.set_timeout(timeout)
    channel = channels.get(group or c10d._get_default_group())
    if channel is not None:
        channel.set_timeout(timeout)


def _drain(pid: int) -> None:
    """Threads that still hold tensors do not survive the end of Python."""
    if os.getpid() == pid:  # a forked child has no threads to wait for
        _C.drain_workers(_EXIT_PATIENCE_S)


def _create(group: Any, pg_options: Any) -> _C.ZipBackend:
    """torch's creator: called once per group on every member, for both devices."""
    warn_of_unknown()
    options = from_pg_options(pg_options)
    devices = options.inner_backends()
    if "cpu" not in devices and not torch.cuda.is_available():
        raise RuntimeError(f"zipccl: options say inner={options.inner!r}, but torch sees no GPU")
    check_same_options(group, options)
    cpu = _gloo(group, "gloo") if "cpu" in devices else None
    cuda = _nccl(group, options) if "cuda" in devices and torch.cuda.is_available() else None
    may_zip = any(getattr(options, name) != "raw" for name in COLLECTIVES)
    return build(group, options.native(), cpu, cuda, zip_cpu=may_zip)


def build(group: Any, settings: dict[str, Any], cpu: Any, cuda: Any, zip_cpu: bool) -> _C.ZipBackend:
    """A ZipBackend over inner backends that are there.

    Args:
        group: what torch tells creators of it.
        settings: ``Options.native()``.
        zip_cpu: CPU tensors may be zipped, now or later.
    """
    if cuda is not None and _C.cuda_version is None and {"zip", "auto"} & set(settings["modes"].values()):
        warnings.warn(
            "zipccl was built without CUDA, so CUDA tensors travel raw: install it again with ZIPCCL_CUDA=1",
            stacklevel=3,
        )
    # Zipped CPU collectives run on their own thread; their messages must not mix with those of the caller's thread.
    # It has as many threads as gloo's own, though calls rarely overlap: on a busy machine one thread alone that has all
    # to do waits long for its turns (0.25 ms became 1.3 ms where compilers ran on both of two cores).
    cpu_zip = _gloo(group, "gloo-zip") if cpu is not None and zip_cpu and group.group_size > 1 else None
    for gloo in (cpu, cpu_zip):
        if gloo is not None:
            _make_known(gloo)
    backend = _C.ZipBackend(group.group_rank, group.group_size, cpu, cpu_zip, cuda, settings)
    backend.name_group(group.group_id)  # torch names what it knows of, which may be a wrapper of this
    return backend


@dataclasses.dataclass
class _Part:
    """A part of a group that is split, in torch's words for new groups."""

    store: dist.Store
    group_rank: int
    group_size: int
    global_ranks_in_group: list[int]
    group_id: str
    timeout: datetime.timedelta


def _split(parent: _C.ZipBackend, store: dist.Store, ranks: list[int], options: Any) -> _C.ZipBackend | None:
    """Every rank of the parent calls this; ranks: of the part, as ranks of the parent. Options are the parent's."""
    gloo, nccl = parent.inner("cpu"), parent.inner("cuda")
    cuda = None
    if nccl is not None:  # ncclCommSplit needs the ranks outside the part too
        given = options if isinstance(options, dist.ProcessGroupNCCL.Options) else copy.deepcopy(nccl.options)
        given.group_name, given._timeout = options.group_name, options._timeout
        cuda = _C.split_inner(nccl, dist.PrefixStore("nccl/", store), ranks, given)
    if parent.rank() not in ranks:
        return None
    everybody = (gloo or nccl).options.global_ranks_in_group or range(parent.size())
    members, me = [everybody[r] for r in ranks], ranks.index(parent.rank())
    part = _Part(store, me, len(ranks), members, options.group_name, options._timeout)
    cpu = _gloo(part, "gloo") if gloo is not None else None
    return build(part, parent.settings(), cpu, cuda, zip_cpu=parent.can_zip_cpu())


def check_same_options(group: Any, options: Options, key: str = "zipccl/options") -> None:
    """Ranks that differ in options or build would make different calls and hang. A collective call.

    Raises:
        RuntimeError: on every rank, where one differs from rank 0.
    """
    own = f"{options.fingerprint()} {_build(options)}"
    check_same(group.store, group.group_rank, group.group_size, group.timeout, key, own, f"group {group.group_id!r}")


def check_same(
    store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, key: str, own: str, of: str
) -> None:
    """Compares words of ``name=value`` between ranks. A collective call; every rank gets the same answer.

    Raises:
        RuntimeError: a rank has others than rank 0, or does not come within the timeout.
    """
    if size == 1:
        return
    # A store may outlive a group and meet the next one of its name.
    key = f"{key}/{(store.add(f'{key}/turns', 1) - 1) // size}"
    store.set(f"{key}/came/{rank}", "")

    def wait_for(name: str) -> None:
        try:
            store.wait([f"{key}/{name}"], timeout)
        except RuntimeError as error:  # of the store's own type
            late = [r for r in range(size) if not store.check([f"{key}/came/{r}"])]
            raise type(error)(
                f"zipccl: rank {rank} of {of} waited {timeout.total_seconds():g} s in vain for "
                f"{f'ranks {late}' if late else 'the others'} ({error})"
            ) from error

    if rank == 0:
        store.set(f"{key}/first", own)
    wait_for("first")
    first = store.get(f"{key}/first").decode()
    if own != first:
        store.set(f"{key}/other", f"{rank} {own}")
    if store.add(f"{key}/compared", 1) == size:
        store.set(f"{key}/all", "compared")
    wait_for("all")
    if not store.check([f"{key}/other"]):
        return
    other, text = store.get(f"{key}/other").decode().split(" ", 1)
    has = [word for word in text.split() if word not in first.split()]
    instead = [word for word in first.split() if word not in text.split()]
    raise RuntimeError(
        f"zipccl: rank {other} of {of} has options {' '.join(has)!r}, rank 0 has {' '.join(instead)!r}: every rank "
        "must pass the same, to the same build of zipccl"
    )


def _build(options: Options) -> str:
    """What of a build shows on the wire: the version's messages, its frames, and whether CUDA tensors are zipped."""
    said = f"zipccl={__version__} frames={_C.frame_version}"
    return f"{said} zips_cuda={_C.cuda_version is not None}" if "cuda" in options.inner_backends() else said


def _make_known(gloo: dist.Backend) -> None:
    """The first call of a gloo backend, on the thread that makes groups.

    It enters the backend in the one table that torch's flight recorder has for all gloo backends of a process, without
    a lock: first calls made by several worker threads at once have destroyed that table.
    """
    gloo.barrier().wait()


def make_worker_gloo(group: Any, prefix: str) -> dist.Backend:
    """A gloo for one worker thread and nobody else. group: facts, as torch gives them to creators."""
    gloo = _gloo(group, prefix, threads=1)
    _make_known(gloo)
    return gloo


def _gloo(group: Any, prefix: str, threads: int | None = None) -> dist.Backend:
    """``threads``: that run its calls; default: torch's own choice."""
    make = dist.ProcessGroupGloo
    options = make._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]  # as torch reads it
    options._devices = [make.create_device(interface=name) for name in interfaces] or [make.create_default_device()]
    options._threads = threads or 2 * len(options._devices)
    options._timeout = group.timeout
    options.global_ranks_in_group = list(group.global_ranks_in_group)
    options.group_name = group.group_id
    gloo = make(dist.PrefixStore(f"{prefix}/", group.store), group.group_rank, group.group_size, options)
    gloo._set_sequence_number_for_group()
    return gloo


def _nccl(group: Any, options: Options) -> dist.Backend:
    nccl_options = options.nccl_options or dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = group.timeout
    nccl_options.global_ranks_in_group = list(group.global_ranks_in_group)
    nccl_options.group_name = group.group_id
    nccl = dist.ProcessGroupNCCL(
        dist.PrefixStore("nccl/", group.store), group.group_rank, group.group_size, nccl_options
    )
    nccl._set_sequence_number_for_group()
    return nccl


def zip_backends(group: dist.ProcessGroup | None = None) -> list[_C.ZipBackend]:
    """The zipccl backends of a group (default: the default group), each once.

    Raises:
        ValueError: the group has none.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if isinstance(group, str):
        raise TypeError(f"a group is wanted, not its name {group!r}")
    found: list[_C.ZipBackend] = []
    for device in getattr(group, "_device_types", ()):  # none: this rank is not in it
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, _C.ZipBackend) and backend not in found:
            found.append(backend)
    if not found:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError("this rank is not in the group")
        raise ValueError(
            f'process group {group.group_name!r} is not a zipccl group: init_process_group("zipccl"), '
            'new_group(backend="zipccl") and zipccl.attach() make such'
        )
    return found


class Stats(dict):
    """A snapshot of counters; ``reset()`` sets the group's own to zero.

    ``scratch_bytes``: host memory that zipped CPU calls hold between calls, at most twice what they used at once.
    Scratch of CUDA calls comes from torch's caching allocator and shows in ``torch.cuda.memory_stats()``.
    """

    def __init__(self, backends: list[_C.ZipBackend]):
        super().__init__()
        self._backends = backends
        self.scratch_bytes = sum(backend.scratch_bytes() for backend in backends)
        for backend in backends:
            self.update(backend.stats())

    def __str__(self) -> str:
        """A table: megabytes (10^6 bytes) that this rank has received, and what was saved of them."""
        if not self:
            return "no collective of this group was called yet"
        lines = [f"{'':<16}{'calls':>8}{'zipped':>8}{'raw MB':>12}{'wire MB':>12}{'saved':>9}"]
        for name, of in self.items():
            raw, wire = of["raw_bytes"], of["wire_bytes"]
            saved = f"{100 * (1 - wire / raw):.1f} %" if raw else "-"
            counts = f"{of['calls']:>8}{of['zipped_calls']:>8}"
            lines.append(f"{name:<16}{counts}{raw / 1e6:>12.2f}{wire / 1e6:>12.2f}{saved:>9}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple:
        return dict, (dict(self),)  # a copy elsewhere has no group

    def reset(self) -> None:
        """Sets the group's counters on this rank to zero; this snapshot stays as it is."""
        for backend in self._backends:
            backend.reset_stats()


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """What a group's own collectives have moved, on this rank. ``print()`` shows a table.

    Returns:
        A dict from collective (``"all_gather"``) to ``calls``, ``zipped_calls``, ``raw_bytes`` (received from other
        ranks had nothing been zipped), ``wire_bytes`` (received in truth, padding included) and ``seconds`` by phase
        (``encode``, ``sizes``, ``transfer``, ``decode``: host time of zipped calls; on CUDA all but ``sizes`` is the
        cost of enqueueing). Collectives that were never called are absent.

    Raises:
        ValueError: the group is not a zipccl group.
    """
    return Stats(zip_backends(group))


def explain(
    op: str = "all_gather",
    bytes: int = 64 << 20,
    group: dist.ProcessGroup | None = None,
    device: str | torch.device | None = None,
) -> _C.Decision:
    """What ``"auto"`` does with a collective of this size on this group, and why, whatever the group's own option is.

    A collective call: the first one of a group measures the link, so every rank must make it.

    Args:
        op: ``"all_gather"``, ``"all_to_all"``, ``"broadcast"``, ``"scatter"``, ``"gather"``, ``"reduce_scatter"`` or
            ``"all_reduce"``.
        bytes: raw bytes of the call, taken as bf16: of one rank's shard for all-gather, of one rank's whole input for
            all-to-all and reduce-scatter, of the tensor otherwise.
        device: whose tensors; default: the current CUDA device if the group has NCCL, else the CPU.

    Returns:
        An object with ``choice`` (``"zip"`` or ``"raw"``), ``reason`` (also says so if the group's option is another
        than ``"auto"``), ``raw_seconds`` and ``zip_seconds`` (expected).

    Raises:
        ValueError: another collective, a negative size, or the group is not a zipccl group.
        RuntimeError: the group has no backend, or this build no codec, for such tensors.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"op must be one of {COLLECTIVES}, not {op!r}")
    if not isinstance(bytes, int) or bytes < 0:
        raise ValueError(f"bytes must be a number, 0 or more, not {bytes!r}")
    backend = zip_backends(group)[0]
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if backend.inner("cuda") else "cpu"
    return backend.explain(op, torch.device(device), bytes)
