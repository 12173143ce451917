"""zipccl under groups that others have made: attach, detach, override."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zipccl import _C
from zipccl.backend import build, check_same_options, zip_backends
from zipccl.environment import warn_of_unknown
from zipccl.options import COLLECTIVES, VARIABLES, Options

_BACKEND_TYPES = {"cpu": ("gloo", "GLOO"), "cuda": ("nccl", "NCCL")}


@dataclasses.dataclass
class _Attached:
    facts: Any  # of the group, as torch gives them to creators
    backend: _C.ZipBackend
    face: Any  # what the group gets: the backend, or torch's wrapper of it
    own: dict[str, Any]  # what the group had, by device type
    times: int = 0


# torch keeps the first plug-in of a group for the group's life, so it is made once and registered again.
_attached: weakref.WeakKeyDictionary[dist.ProcessGroup, _Attached] = weakref.WeakKeyDictionary()
_new_groups: Options | None = None  # options for groups to come


@dataclasses.dataclass
class _Overridden:
    base: dict[str, Any]  # settings without any override
    changes: dict[object, dict[str, Any]] = dataclasses.field(default_factory=dict)  # of open ones, oldest first


_overridden: dict[_C.ZipBackend, _Overridden] = {}  # only while an override is open
_overridden_lock = threading.Lock()
_make_group = c10d._new_process_group_helper


def attach(group: dist.ProcessGroup | None = None, options: Options | None = None, new_groups: bool = False) -> None:
    """Puts zipccl under an existing gloo or NCCL group. Its name, ``get_backend()`` and everything else stay.

    A collective call: every rank of the group must make it, with the same options. May be called again, to change
    options or after ``detach()``.

    Args:
        group: default: the default group.
        options: default: ``Options()``. Without ``inner`` and ``nccl_options``: the group has its backends already;
            ``ZIPCCL_INNER`` in the environment is for other groups.
        new_groups: attach to every gloo or NCCL group that is made from now on too, until ``detach(new_groups=True)``.
            ``destroy_process_group()`` does not end that: the default group of a later ``init_process_group()`` and
            the groups after it are attached as well.

    Raises:
        ValueError: the group is a zipccl group, was destroyed, or has neither gloo for CPU tensors nor NCCL for CUDA
            tensors; or an option means nothing here.
        RuntimeError: ranks pass different options, or one of them does not call within the group's timeout.
    """
    global _new_groups
    group = group or c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group")
    if group not in c10d._world.pg_map:
        raise ValueError(f"group {group.group_name!r} was destroyed")
    if not isinstance(options, Options | None):
        raise TypeError(f"options must be zipccl.Options, not {type(options).__name__}")
    options = options or Options()
    for name in ("inner", "nccl_options"):
        value = getattr(options, name)
        if value is not None and value != os.environ.get(VARIABLES.get(name, "")):
            raise ValueError(f"{name} means nothing to attach(): the group's own backends stay underneath")
    warn_of_unknown()
    _attach(group, options, dist.get_process_group_ranks(group))
    if new_groups:
        _new_groups = options
        c10d._new_process_group_helper = _make_group_attached


def detach(group: dist.ProcessGroup | None = None, new_groups: bool = False) -> None:
    """Takes zipccl out again: the group's calls go to its own backends. Nothing to do for a group without.

    A collective call, like ``attach()``. Calls in flight complete. ``new_groups``: groups made from now on are left
    alone again; that part is this process's own, and with it there need be no default group (any more).

    Raises:
        ValueError: no group is named, there is no default group, and ``new_groups`` is not set.
    """
    global _new_groups
    if group is None and (dist.is_initialized() or not new_groups):
        group = c10d._get_default_group()
    attached = None if group is None else _attached.get(group)
    if attached is not None:
        for kind, own in attached.own.items():
            group._register_backend(torch.device(kind), _backend_type(kind), own)
    if new_groups:
        _new_groups = None
        c10d._new_process_group_helper = _make_group


@contextlib.contextmanager
def override(group: dist.ProcessGroup | None = None, **changes: Any) -> Iterator[None]:
    """Other options for the calls inside the ``with``: ``override(all_gather="raw")``. The same on every rank.

    The change is the group's: while it is open, it holds for calls of all threads on this group. Several may be open
    at a time, nested or in several threads, and close in any order: of those still open the one opened last counts,
    field by field. ``attach()`` meanwhile changes the options underneath.

    Args:
        group: default: the default group.
        changes: fields of ``Options`` except ``code``, ``inner`` and ``nccl_options``.

    Raises:
        ValueError: an unknown field or value, or the group is not a zipccl group.
    """
    fixed = {"code", "inner", "nccl_options"} & changes.keys()
    if fixed:
        raise ValueError(f"override cannot change {', '.join(sorted(fixed))}, which is fixed when a group is made")
    try:
        wanted = Options(**changes).native()
    except TypeError as error:
        raise ValueError(str(error)) from None
    backends = zip_backends(group)
    if any(wanted["modes"][name] != "raw" for name in COLLECTIVES if name in changes):
        for backend in backends:
            if backend.inner("cpu") is not None and not backend.can_zip_cpu() and backend.size() > 1:
                raise ValueError("this group was made with every collective raw, so it has no way to zip CPU tensors")
    change = {name: wanted[name] for name in changes if name not in COLLECTIVES}
    change["modes"] = {name: wanted["modes"][name] for name in changes if name in COLLECTIVES}
    own = object()
    with _overridden_lock:
        for backend in backends:
            _overridden.setdefault(backend, _Overridden(backend.settings())).changes[own] = change
            _settle(backend)
    try:
        yield
    finally:
        with _overridden_lock:
            for backend in backends:
                del _overridden[backend].changes[own]
                _settle(backend)


def _settle(backend: _C.ZipBackend) -> None:
    """Gives a backend the settings that result from the overrides that are open now. Under the lock."""
    overridden = _overridden[backend]
    settings = overridden.base
    for change in overridden.changes.values():
        settings = {**settings, **change, "modes": {**settings["modes"], **change["modes"]}}
    if not overridden.changes:
        del _overridden[backend]
    backend.change_settings(settings)


def _change_base(backend: _C.ZipBackend, settings: dict[str, Any]) -> None:
    with _overridden_lock:
        if backend in _overridden:
            _overridden[backend].base = settings
            _settle(backend)
        else:
            backend.change_settings(settings)


def _backend_type(device: str) -> Any:
    return getattr(dist.ProcessGroup.BackendType, _BACKEND_TYPES[device][1])


def _attach(group: dist.ProcessGroup, options: Options, global_ranks: list[int]) -> None:
    try:
        _attach_with_all(group, options, global_ranks)
    except RuntimeError as error:  # of the store or of gloo, which waits for the others there: no type of its own
        if not re.search("time ?out|timed out", str(error), re.IGNORECASE):
            raise
        raise type(error)(
            f"zipccl: attach() waited in vain for other ranks of group {group.group_name!r}: every rank of the group "
            f"must call it ({error})"
        ) from error


def _attach_with_all(group: dist.ProcessGroup, options: Options, global_ranks: list[int]) -> None:
    attached = _attached.get(group) or _build_under(group, options, global_ranks)
    _attached[group] = attached
    attached.times += 1  # also where ranks then find that they disagree, so that they can try again
    check_same_options(attached.facts, options, f"zipccl/options/{attached.times}")
    _change_base(attached.backend, options.native())
    for kind in attached.own:
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, attached.face)


def _build_under(group: dist.ProcessGroup, options: Options, global_ranks: list[int]) -> _Attached:
    own, inner = {}, {}
    for device in group._device_types:
        backend = group._get_backend(device)
        bare = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(bare, _C.ZipBackend):
            raise ValueError(f"group {group.group_name!r} is a zipccl group already")
        name, _ = _BACKEND_TYPES.get(device.type, (None, None))
        if backend.name() == name:
            own[device.type], inner[device.type] = backend, bare
    if not inner:
        raise ValueError(f"group {group.group_name!r} has neither gloo for CPU tensors nor NCCL for CUDA tensors")
    facts = c10d._DistributedBackendOptions()
    _, store = c10d._world.pg_map[group]
    facts.store = dist.PrefixStore("zipccl-attach/", store)
    facts.group_rank = group.rank()
    facts.group_size = group.size()
    facts.timeout = next(iter(inner.values())).options._timeout
    facts.group_id = group.group_name
    facts.global_ranks_in_group = global_ranks
    made = face = build(facts, options.native(), inner.get("cpu"), inner.get("cuda"), zip_cpu=True)
    if own != inner:  # torch compares the ranks' calls, and must see those that are zipped too
        face = c10d._create_process_group_wrapper(
            made, group.group_name, facts.store, group.rank(), group.size(), facts.timeout
        )
    return _Attached(facts, made, face, own)


def _make_group_attached(group_size: int, group_rank: int, global_ranks: list[int], *args: Any, **kwargs: Any) -> Any:
    made = _make_group(group_size, group_rank, global_ranks, *args, **kwargs)
    group = made[0]
    if isinstance(group, dist.ProcessGroup) and _new_groups is not None:
        backends = {group._get_backend(device).name() for device in group._device_types}
        if backends & {"gloo", "nccl"}:
            _attach(group, _new_groups, list(global_ranks) or list(range(group_size)))
    return made
