"""DynamiQ: gradients summed at a few bits per coordinate ("section" here means the DynamiQ paper, arXiv 2602.08923).

Lossy, and reached by name alone: no collective of torch leads here. Works on groups of the backends zipccl, gloo and
NCCL::

    state = zipccl.DynamiQState(bits=5.0)
    ddp_model.register_comm_hook(state, zipccl.dynamiq_hook)

    zipccl.dynamiq.all_reduce(tensor, state)  # the same outside a hook
"""

import copy
import datetime
import math
import numbers
import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.weak import WeakTensorKeyDictionary

from zipccl import _C
from zipccl.backend import channels, check_same, make_worker_gloo

TOPOLOGIES = ("auto", "direct", "ring", "butterfly", "hierarchical")
WIDTHS = ("fine", "paper")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_BITS, _MOST_BITS = 1.0, 16.0
_LEAST_MET = {"fine": 1.5, "paper": 2.85}  # the narrowest codes with their scales and statistics take that much
_FEWEST_PACKED = 2048  # coordinates per rank, as in csrc/backend/dynamiq_channel.cpp
_VERSION = 2  # of state_dict()
_SAVED = ("version", "seed", "calls", "steps", "rank", "residuals")  # in every version
# Few levels mean that every hop enlarges what the next has to round: measured, the error of a ring then grows
# exponentially with its length.
_LONGEST_RING, _LEAST_RING_BITS = 16, 4.0


class _Lost:
    """In place of a group that was not pickled."""

    def __repr__(self) -> str:
        return "<a group that was not pickled>"

    def __reduce__(self) -> str:
        return "_LOST"  # there is one


_LOST = _Lost()


class DynamiQState:
    """What DynamiQ is to do, and where in its random numbers a run is. The same on every rank.

    ``copy.copy()`` and ``copy.deepcopy()`` both make a state of its own, of the same group. Pickling leaves the group
    out: an unpickled state that had one of its own raises ValueError wherever it is used, until ``.group`` is set.

    Args:
        group: whose ranks are summed; default: the default group. Looked up at the first use.
        bits: per coordinate and direction, everything counted (statistics, scales, values), 1 to 16; a
            warning says where so few cannot be met (below 1.5, with ``widths="paper"`` 2.85). The paper's choice is 5
            (section 5). A ring of more than 16 ranks needs 4.
        topology: how partial sums travel: ``"direct"`` (each is packed once, summed in fp32 and packed once more),
            ``"butterfly"``, ``"ring"`` (packed again at every hop), ``"hierarchical"`` (raw inside nodes, packed
            between them), or ``"auto"``: the fastest on the link as measured at the first use, direct in doubt. In a
            single node whose link is fast enough that is a raw sum, with nothing packed.
        widths: ``"fine"``: 0 to 12 bits per super-group, by rate-distortion. ``"paper"``: 2, 4 or 8 bits by the
            paper's thresholds, its non-uniform levels and means (sections 3.1 and 3.2).
        seed: of the rounding. The same seed and the same calls give the same bits, on every run and device.
        node_size: consecutive ranks that share a node; default: ``LOCAL_WORLD_SIZE`` where it divides the group's size
            and the group spans the whole job. At the first use ranks compare theirs: where they differ,
            ``"hierarchical"`` raises an error on all of them and ``"auto"`` takes nodes to be unknown.
        warmup_steps: the hook's first steps (backward passes that synchronise) are left uncompressed.
        exempt_below: the hook sums parameters of fewer elements in fp32, uncompressed.
        exempt_1d: and those of at most one dimension (norms, biases).
        error_feedback: round finished sums to nearest and carry what that loses into the next call with the same
            parameters. Less error, no longer unbiased in each step; 4 bytes of memory per coordinate, and during a
            call 4 more where gradients are not fp32. Not with ``"hierarchical"``.
        correlated: stratify the rounding of the ranks (section 3.3), so that their errors cancel.
        block_bytes: values, counted as fp32, that go through the pipeline together; default 8 MiB on the CPU, 128 MiB
            on CUDA.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: another argument is not one of those named above.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        bits: float = 5.0,
        topology: str = "auto",
        widths: str = "fine",
        seed: int = 0,
        *,
        node_size: int | None = None,
        warmup_steps: int = 0,
        exempt_below: int = 0,
        exempt_1d: bool = False,
        error_feedback: bool = False,
        correlated: bool = True,
        block_bytes: int | None = None,
    ):
        nobody = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives ranks that are not in the group
        if not (group is None or group is nobody or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group must be a process group or None, not {group!r} (bits and others go by name)")
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {TOPOLOGIES}, not {topology!r}")
        if widths not in WIDTHS:
            raise ValueError(f"widths must be one of {WIDTHS}, not {widths!r}")
        if not isinstance(bits, numbers.Real) or isinstance(bits, bool):
            raise ValueError(f"bits must be a number, not {bits!r}")
        if not _LEAST_BITS <= bits <= _MOST_BITS:
            raise ValueError(f"bits must lie between {_LEAST_BITS} and {_MOST_BITS}, not {bits}")
        if bits < _LEAST_MET[widths]:
            text = (
                f"{bits} bits with widths={widths!r} are not enough: codes and scales take up to {_LEAST_MET[widths]}"
            )
            warnings.warn(text, stacklevel=2)
        seed = _whole("seed", seed, 0, 2**64 - 1)
        node_size = None if node_size is None else _whole("node_size", node_size, 1)
        warmup_steps = _whole("warmup_steps", warmup_steps, 0)
        exempt_below = _whole("exempt_below", exempt_below, 0)
        block_bytes = None if block_bytes is None else _whole("block_bytes", block_bytes, 1024)
        flags = {"exempt_1d": exempt_1d, "error_feedback": error_feedback, "correlated": correlated}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")
        if error_feedback and topology == "hierarchical":
            raise ValueError('error_feedback does not go with topology="hierarchical"')
        self.group = group
        self.bits = float(bits)
        self.topology = topology
        self.widths = widths
        self.seed = seed
        self.node_size = node_size
        self.warmup_steps = warmup_steps
        self.exempt_below = exempt_below
        self.exempt_1d = exempt_1d
        self.error_feedback = error_feedback
        self.correlated = correlated
        self.block_bytes = block_bytes
        self.calls = 0  # made so far; the place in the random numbers
        self.steps = 0  # optimizer steps the hook has seen
        self._residuals = Residuals()
        self._residuals_of: int | None = None  # rank; None: nobody's yet
        self._compared: tuple[weakref.ref, str] | None = None  # with the other ranks: in which group, and what

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("bits", "topology", "widths", "seed"))
        return f"<DynamiQState {said}: {self.calls} calls, {self.steps} steps>"

    def state_dict(self) -> dict[str, Any]:
        """Everything of this state that a resumed run needs; tensors only with ``error_feedback``. Needs no process
        group.

        DDP puts all gradients in one bucket in the first step after it was made, so a resumed run rounds that step
        otherwise than the run it goes on from.

        What error feedback carries belongs to a rank and to parameters: on another rank, or with a model whose
        parameters DDP's first step brings in another order or size, it is dropped.
        """
        return {
            "version": _VERSION,
            "seed": self.seed,
            "calls": self.calls,
            "steps": self.steps,
            "rank": self._residuals_of,
            "residuals": self._residuals.saved(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` gave. Needs no process group.

        Raises:
            ValueError: the dict is of a newer zipccl, or lacks something.
        """
        if state.get("version", _VERSION) > _VERSION:
            raise ValueError(f"this state of DynamiQ has version {state['version']}, this zipccl knows {_VERSION}")
        missing = [name for name in _SAVED if name not in state]
        if missing:
            raise ValueError(f"this is no state_dict() of DynamiQState: {', '.join(missing)} missing")
        self.seed, self.calls, self.steps = state["seed"], state["calls"], state["steps"]
        # Version 1 knew them by bucket, not by parameter.
        self._residuals.load(state["residuals"] if state["version"] >= 2 else {})
        self._residuals_of = state["rank"]

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled.
        return {**self.__dict__, "group": None if self.group is None else _LOST, "_compared": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "DynamiQState":
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo), group=self.group)
        return made

    def __copy__(self) -> "DynamiQState":
        return copy.deepcopy(self)

    def stats(self) -> dict[str, dict[str, int]]:
        """What this group's DynamiQ calls have moved on this rank, by ``"all_reduce"`` and ``"reduce_scatter"``:
        ``calls``, ``packed_calls``, ``raw_bytes`` (received had nothing been packed) and ``wire_bytes`` (received
        between teams of ranks that pack; raw traffic inside nodes is not counted)."""
        return _channel(self._group()).stats()

    def explain(self, tensor: torch.Tensor) -> tuple[str, bool, float]:
        """The way a tensor goes: topology, whether raw inside nodes, and expected seconds (0: not estimated).

        A collective call: with ``"auto"`` the first one measures the link.
        """
        channel = self._channel()
        return channel.choose(tensor.device, tensor.numel(), tensor.itemsize, self._options())

    # ---- inside ----

    def _group(self) -> dist.ProcessGroup:
        if self.group is _LOST:
            raise ValueError("this DynamiQState was unpickled and has lost its group: set .group (None: the default)")
        return self.group if self.group is not None else c10d._get_default_group()

    def _channel(self) -> _C.DynamiqChannel:
        """Collective at a state's first use in a group, and when what it holds has changed: ranks compare states."""
        group = self._group()
        if group not in c10d._world.pg_map:
            raise ValueError("the process group of this DynamiQState was destroyed: set .group (None: the default)")
        own = " ".join(f"{name}={getattr(self, name)}" for name in _SAME)
        if self._compared is None or self._compared[0]() is not group or self._compared[1] != own:
            turn = _turns[group] = _turns.get(group, 0) + 1
            store, of = c10d._world.pg_map[group][1], f"DynamiQ's group {group.group_name!r}"
            check_same(store, group.rank(), group.size(), _timeout(group), f"zipccl-dynamiq/{turn}", own, of)
            self._compared = weakref.ref(group), own
        return _channel(group)

    def _options(self) -> dict[str, Any]:
        ranks = self._group().size()
        if self.topology == "ring" and ranks > _LONGEST_RING and self.bits < _LEAST_RING_BITS:
            raise ValueError(
                f"at {self.bits:g} bits the hops of a ring of {ranks} ranks add up to more than the sum: use another "
                f"topology, or at least {_LEAST_RING_BITS:g} bits"
            )
        return {
            "bits": self.bits,
            "widths": self.widths,
            "topology": self.topology,
            "correlated": self.correlated,
            "node_size": self._node_size(),
            "block_bytes": self.block_bytes or 0,
        }

    def _node_size(self) -> int:
        if self.topology not in ("auto", "hierarchical") or self.error_feedback:
            return 1
        size = self._group().size()
        found = self.node_size
        if found is None:
            found = 1
            if size == dist.get_world_size():  # only there do consecutive ranks share nodes for certain
                found, differ = _local_world_size(self._group())
                if differ and self.topology == "hierarchical":
                    raise ValueError(differ)
            found = 1 if size % found else found
        if size % found:
            raise ValueError(f"node_size {found} does not divide the group's {size} ranks")
        if self.topology == "hierarchical" and self.node_size is None and found == 1:
            raise ValueError('topology="hierarchical" needs node_size, or LOCAL_WORLD_SIZE in the environment')
        return found

    def _next_call(self) -> int:
        self.calls += 1
        return self.calls - 1

    def _carried(self) -> "Residuals | None":
        if not self.error_feedback:
            return None
        rank = self._group().rank()
        if self._residuals_of not in (None, rank):
            self._residuals.load({})
        self._residuals_of = rank  # state_dict() may be called when the group is gone
        return self._residuals


def _whole(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must lie between {least} and {most}, not {value}")
    return int(value)


class Residuals:
    """What error feedback carries, by parameter: DDP rebuilds its buckets after the first step.

    A parameter's name is the bucket and the place where it was first seen, which a restarted run gives it again.
    """

    _CALLS = "calls"  # name of what ``all_reduce()`` outside a hook carries

    def __init__(self):
        self._names = WeakTensorKeyDictionary()
        self.load({})

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Takes over what ``saved()`` gave; drops everything else."""
        self._pieces = {name: piece.clone() for name, piece in saved.items()}  # by name; views of flat tensors
        self._flat: dict[int, tuple[list[str], torch.Tensor]] = {}  # by bucket: its parameters' names, all pieces

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return self.saved()

    def __setstate__(self, saved: dict[str, torch.Tensor]) -> None:
        self.__init__()
        self.load(saved)

    def saved(self) -> dict[str, torch.Tensor]:
        """fp32 tensors by name."""
        return {name: piece.clone() for name, piece in self._pieces.items()}

    def of_calls(self, like: torch.Tensor) -> torch.Tensor:
        """The fp32 residual of a tensor outside a hook; zeros where the last one had another size."""
        kept = self._piece(self._CALLS, like.numel(), like.device)
        self._pieces[self._CALLS] = kept
        return kept

    def names_of(self, bucket: dist.GradBucket) -> list[str]:
        """Of its parameters. To be called for every bucket from the first step on, even if nothing is carried yet."""
        parameters = bucket.parameters()
        for place, parameter in enumerate(parameters):
            if parameter not in self._names:
                self._names[parameter] = f"{bucket.index()}.{place}"
        return [self._names[parameter] for parameter in parameters]

    def of_bucket(self, bucket: dist.GradBucket) -> torch.Tensor:
        """The fp32 residual of a bucket, laid out as its buffer."""
        parameters, device = bucket.parameters(), bucket.buffer().device
        names = self.names_of(bucket)
        known, flat = self._flat.get(bucket.index(), (None, None))
        if known != names:
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.cat([self._piece(name, size, device) for name, size in zip(names, sizes, strict=True)])
            self._pieces.update(zip(names, flat.split(sizes), strict=True))
            self._flat[bucket.index()] = (names, flat)
        return flat

    def _piece(self, name: str, size: int, device: torch.device) -> torch.Tensor:
        kept = self._pieces.get(name)
        if kept is None or kept.numel() != size:
            return torch.zeros(size, dtype=torch.float32, device=device)
        return kept.to(device)


# Per group: LOCAL_WORLD_SIZE, 1 where ranks differ; and then what to say about it.
_node_sizes: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, str]]" = weakref.WeakKeyDictionary()


def _local_world_size(group: dist.ProcessGroup) -> tuple[int, str]:
    """Collective where it is the group's first: rank 0 compares, so that every rank takes the same decision."""
    if group not in _node_sizes:
        store = c10d.PrefixStore("zipccl-local-world-size", c10d._world.pg_map[group][1])
        store.set(str(group.rank()), os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if group.rank() == 0:
            sizes = [store.get(str(rank)).decode() for rank in range(group.size())]
            other = [rank for rank, size in enumerate(sizes) if size != sizes[0]]
            store.set("other", " ".join(map(str, other)))
        other = store.get("other").decode().split()
        size = store.get("0").decode()
        differ = f"LOCAL_WORLD_SIZE is {size} on rank 0, and not on ranks {', '.join(other)}: give node_size"
        fits = not other and size.isdecimal() and int(size) > 0
        _node_sizes[group] = (int(size) if fits else 1, differ if other else "")
    return _node_sizes[group]


# What all ranks must pass alike, and how often the ranks of a group have compared it.
_SAME = (
    "bits", "topology", "widths", "seed", "node_size", "warmup_steps", "exempt_below", "exempt_1d", "error_feedback",
    "correlated", "block_bytes",
)  # fmt: skip
_turns: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    backend = group._get_backend(group._device_types[0])
    return getattr(backend, "wrapped_pg", backend).options._timeout  # TORCH_DISTRIBUTED_DEBUG=DETAIL


def _channel(group: dist.ProcessGroup) -> _C.DynamiqChannel:
    """Collective where it is the group's first."""
    channel = channels.get(group)
    if channel is not None:
        return channel
    cpu = cuda = None
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        inner = backend.inner(device.type) if isinstance(backend, _C.ZipBackend) else backend
        if inner is None:
            continue
        if device.type == "cpu" and inner.name() == "gloo":
            cpu = _own_gloo(group, inner)
        if device.type == "cuda" and inner.name() == "nccl":
            cuda = inner
    if cpu is None and cuda is None:
        raise ValueError(f"DynamiQ needs gloo or NCCL under a group, and {group.group_name!r} has neither")
    channel = _C.DynamiqChannel(group.rank(), group.size(), cpu, cuda)
    channels[group] = channel
    return channel


def _own_gloo(group: dist.ProcessGroup, gloo: dist.Backend) -> dist.Backend:
    """Its messages must not mix with those that the caller's thread sends over the group's."""
    facts = c10d._DistributedBackendOptions()
    _, facts.store = c10d._world.pg_map[group]
    facts.group_rank, facts.group_size = group.rank(), group.size()
    facts.timeout = gloo.options._timeout
    facts.group_id = group.group_name
    facts.global_ranks_in_group = dist.get_process_group_ranks(group)
    return make_worker_gloo(facts, "zipccl-dynamiq")


def scale_of(op: Any, ranks: int) -> float:
    """What a reduction that is a scaled sum multiplies the sum with.

    Raises:
        ValueError: it is another reduction.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return float(factor)
    raise ValueError(f"DynamiQ sums and averages; it cannot do {op}")


def all_reduce(tensor: torch.Tensor, state: DynamiQState, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Sums a tensor over the ranks of ``state.group``, in place.

    All ranks get the same bits. A NaN or an infinity spoils the 256 coordinates around it (they come out as NaN), so
    that loss scalers notice. Super-groups of zeros stay zeros.

    Args:
        tensor: float32, bfloat16 or float16, any shape and strides, on the CPU or a GPU. The result is ready with
            respect to the current stream.
        op: ``SUM`` or ``AVG``.

    Returns:
        ``tensor``.

    Raises:
        TypeError: another dtype, or ``state`` is no DynamiQState.
        ValueError: another reduction.
        RuntimeError: a peer is gone, the operation timed out, or, of CPU tensors, another rank makes another call
            (size, dtype, ``op``, options): then on every rank, with nothing changed, and calls can go on.
    """
    _check_state(state, "zipccl.dynamiq.all_reduce(tensor, zipccl.DynamiQState())")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"DynamiQ takes float32, bfloat16 and float16, not {tensor.dtype}")
    group = state._group()
    scale = scale_of(op, group.size())
    with torch.no_grad():
        flat = tensor.detach().reshape(-1).contiguous()
        carried = state._carried()
        residual = None if carried is None else carried.of_calls(flat)
        channel = state._channel()
        channel.all_reduce(flat, state._options(), scale, state.seed, state._next_call(), [], residual, False).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
    return tensor


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, state: DynamiQState, op: Any = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Sums a tensor over the ranks of ``state.group``; each rank keeps its part.

    The part is summed in fp32 and not packed again, so only the first half of an all-reduce's error is there.
    ``"hierarchical"`` counts as ``"auto"`` without nodes.

    Args:
        output: float32, bfloat16 or float16, contiguous, [N].
        input: any of these dtypes, contiguous, [ranks x N].
        op: ``SUM``, ``AVG`` or ``PREMUL_SUM``.

    Returns:
        ``output``.

    Raises:
        TypeError, ValueError, RuntimeError: as ``all_reduce``.
    """
    _check_state(state, "zipccl.dynamiq.reduce_scatter(output, input, zipccl.DynamiQState())")
    group = state._group()
    scale = scale_of(op, group.size())
    with torch.no_grad():
        channel = state._channel()
        flat_in, flat_out = input.detach().view(-1), output.detach().view(-1)
        options = state._options() | ({"topology": "auto"} if state.topology == "hierarchical" else {})
        channel.reduce_scatter(flat_in, flat_out, options, scale, state.seed, state._next_call()).wait()
    return output


def _check_state(state: Any, example: str) -> None:
    if not isinstance(state, DynamiQState):
        raise TypeError(f"a zipccl.DynamiQState is wanted, as in {example}, not {state!r}")


def _exempt(state: DynamiQState, bucket: dist.GradBucket) -> list[torch.Tensor]:
    if not state.exempt_1d and state.exempt_below <= 0:
        return []
    return [
        gradient
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        if (state.exempt_1d and parameter.dim() <= 1) or parameter.numel() < state.exempt_below
    ]


# DDP checks these annotations as they stand here.
def dynamiq_hook(state: DynamiQState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: averages a bucket of gradients with DynamiQ.

    Works on whatever buckets DDP makes, beside the backward pass: on the CPU in a thread of its own, on CUDA on a
    stream of its own. Buckets of dtypes other than float32, bfloat16 and float16 are averaged uncompressed.

    Args:
        state: the hook's state; one per DDP model.
        bucket: DDP's.

    Returns:
        A future of the bucket's buffer.

    Raises:
        TypeError, RuntimeError: as ``all_reduce``; DDP raises them from ``backward()``.
    """
    _check_state(state, "register_comm_hook(zipccl.DynamiQState(), zipccl.dynamiq_hook)")
    buffer = bucket.buffer()
    group = state._group()
    channel = state._channel()
    scale = 1.0 / group.size()
    carried = state._carried()
    if carried is not None:
        carried.names_of(bucket)
    warming_up = state.steps < state.warmup_steps
    if bucket.is_last():
        state.steps += 1
    if warming_up or buffer.dtype not in DTYPES:
        future = channel.all_reduce_raw(buffer, scale, True)
    else:
        exempt = _exempt(state, bucket)
        residual = None if carried is None else carried.of_bucket(bucket)
        call = state._next_call()
        future = channel.all_reduce(buffer, state._options(), scale, state.seed, call, exempt, residual, True)
    return future.then(lambda done: done.value())  # DDP wants a future that Python has filled


def wire_bytes(count: int, ranks: int, bits: float) -> int:
    """Bytes that a rank receives for an all-reduce of ``count`` coordinates, at most.

    That is 2 (n - 1) / n of them at ``bits`` each, or, of fewer than 2048 n, which are summed uncompressed, at 32 bits.
    Rounding can add a little to small buckets: less than 16 (n - 1) bytes, with ``widths="paper"`` 32 (n - 1).
    More arrive where so few bits cannot be met: as ``DynamiQState`` says, and below 3 bits also of little more than
    2048 n coordinates.
    """
    each = bits if count >= _FEWEST_PACKED * ranks else 32
    return math.ceil(2 * (ranks - 1) / ranks * count * each / 8)
