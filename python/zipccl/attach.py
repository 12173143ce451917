"""zipccl under groups that others have made: attach, detach, override."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zipccl import _C
from zipccl.backend import build, check_same_options, zip_backends
from zipccl.options import COLLECTIVES, Options

_BACKEND_TYPES = {"cpu": ("gloo", "GLOO"), "cuda": ("nccl", "NCCL")}


@dataclasses.dataclass
class _Attached:
    facts: Any  # of the group, as torch gives them to creators
    backend: _C.ZipBackend
    times: int = 0


# torch keeps the first plug-in of a group for the group's life, so it is made once and registered again.
_attached: weakref.WeakKeyDictionary[dist.ProcessGroup, _Attached] = weakref.WeakKeyDictionary()
_new_groups: Options | None = None  # options for groups to come
_make_group = c10d._new_process_group_helper


def attach(group: dist.ProcessGroup | None = None, options: Options | None = None, new_groups: bool = False) -> None:
    """Puts zipccl under an existing gloo or NCCL group. Its name, ``get_backend()`` and everything else stay.

    A collective call: every rank of the group must make it, with the same options. May be called again, to change
    options or after ``detach()``.

    Args:
        group: default: the default group.
        options: default: ``Options()``.
        new_groups: attach to every group that is made from now on too, until ``detach(new_groups=True)``.

    Raises:
        ValueError: the group is a zipccl group, or has neither gloo for CPU tensors nor NCCL for CUDA tensors.
    """
    global _new_groups
    group = group or c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group")
    if not isinstance(options, Options | None):
        raise TypeError(f"options must be zipccl.Options, not {type(options).__name__}")
    options = options or Options()
    _attach(group, options, dist.get_process_group_ranks(group))
    if new_groups:
        _new_groups = options
        c10d._new_process_group_helper = _make_group_attached


def detach(group: dist.ProcessGroup | None = None, new_groups: bool = False) -> None:
    """Takes zipccl out again: the group's calls go to its own backends. Nothing to do for a group without.

    A collective call, like ``attach()``. Calls in flight complete. ``new_groups``: groups made from now on are left
    alone again.
    """
    global _new_groups
    group = group or c10d._get_default_group()
    attached = _attached.get(group)
    if attached is not None:
        for device in group._device_types:
            inner = attached.backend.inner(device.type)
            if inner is not None:
                group._register_backend(device, _backend_type(device.type), inner)
    if new_groups:
        _new_groups = None
        c10d._new_process_group_helper = _make_group


@contextlib.contextmanager
def override(group: dist.ProcessGroup | None = None, **changes: Any) -> Iterator[None]:
    """Other options for the calls inside the ``with``: ``override(all_gather="raw")``. The same on every rank.

    Args:
        group: default: the default group.
        changes: fields of ``Options`` except ``code``, ``inner`` and ``nccl_options``.

    Raises:
        ValueError: an unknown field or value, or the group is not a zipccl group.
    """
    fixed = {"code", "inner", "nccl_options"} & changes.keys()
    if fixed:
        raise ValueError(f"{sorted(fixed)} cannot be changed for a while: they are fixed when a group is made")
    try:
        wanted = Options(**changes).native()
    except TypeError as error:
        raise ValueError(str(error)) from None
    backends = zip_backends(group)
    if any(wanted["modes"][name] != "raw" for name in COLLECTIVES if name in changes):
        for backend in backends:
            if backend.inner("cpu") is not None and not backend.can_zip_cpu() and backend.size() > 1:
                raise ValueError("this group was made with every collective raw, so it has no way to zip CPU tensors")
    before = [backend.settings() for backend in backends]
    for backend, old in zip(backends, before, strict=True):
        new = {**old, **{name: wanted[name] for name in changes if name not in COLLECTIVES}}
        new["modes"] = {**old["modes"], **{name: wanted["modes"][name] for name in changes if name in COLLECTIVES}}
        backend.change_settings(new)
    try:
        yield
    finally:
        for backend, old in zip(backends, before, strict=True):
            backend.change_settings(old)


def _backend_type(device: str) -> Any:
    return getattr(dist.ProcessGroup.BackendType, _BACKEND_TYPES[device][1])


def _attach(group: dist.ProcessGroup, options: Options, global_ranks: list[int]) -> None:
    attached = _attached.get(group) or _build_under(group, options, global_ranks)
    _attached[group] = attached
    attached.times += 1  # also where ranks then find that they disagree, so that they can try again
    check_same_options(attached.facts, options, f"zipccl/options/{attached.times}")
    attached.backend.change_settings(options.native())
    for device in group._device_types:
        if attached.backend.inner(device.type) is not None:
            group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, attached.backend)


def _build_under(group: dist.ProcessGroup, options: Options, global_ranks: list[int]) -> _Attached:
    inner = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(getattr(backend, "wrapped_pg", backend), _C.ZipBackend):
            raise ValueError(f"group {group.group_name!r} is a zipccl group already")
        name, _ = _BACKEND_TYPES.get(device.type, (None, None))
        if backend.name() == name:
            inner[device.type] = backend
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
    return _Attached(facts, build(facts, options.native(), inner.get("cpu"), inner.get("cuda"), zip_cpu=True))


def _make_group_attached(group_size: int, group_rank: int, global_ranks: list[int], *args: Any, **kwargs: Any) -> Any:
    made = _make_group(group_size, group_rank, global_ranks, *args, **kwargs)
    group = made[0]
    if isinstance(group, dist.ProcessGroup) and _new_groups is not None:
        backends = {group._get_backend(device).name() for device in group._device_types}
        if backends & {"gloo", "nccl"}:
            _attach(group, _new_groups, list(global_ranks) or list(range(group_size)))
    return made
