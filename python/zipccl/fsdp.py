"""What FSDP2 (torch's ``fully_shard``) sends: compressed, per collective."""

import dataclasses
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zipccl.attach import attach, override
from zipccl.backend import zip_backends
from zipccl.dynamiq import DynamiQState, all_reduce, reduce_scatter
from zipccl.options import COLLECTIVES, Options

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:  # torch without custom collectives in FSDP2: use() says so
    AllGather = ReduceScatter = object

_LOSSLESS = ("auto", "zip", "raw")


_APART = 0x9E3779B97F4A7C15


@dataclasses.dataclass
class Choice:
    """What ``use()`` has set: states to save with a checkpoint, None where nothing is lossy."""

    reduce_scatter: DynamiQState | None = None
    all_reduce: DynamiQState | None = None


def use(
    model: nn.Module,
    all_gather: str | None = None,
    reduce_scatter: str | None = None,
    bits: float | None = None,
    *,
    all_reduce: str | None = None,
    **dynamiq: Any,
) -> Choice:
    """Chooses how the FSDP2 modules of a model communicate. To be called on every rank, after ``fully_shard``.

    Parameters are only ever gathered losslessly. Gradients are rounded where "dynamiq" says so, and nowhere else.

    Args:
        model: a module that ``fully_shard`` was applied to, or one that contains such modules.
        all_gather: ``"zip"``, ``"auto"`` or ``"raw"`` (``zipccl.Options``), of parameters; None: as it is.
        reduce_scatter: of gradients. ``"dynamiq"``: DynamiQ (lossy; each part is summed in fp32 and packed once).
            ``"zip"``, ``"auto"``, ``"raw"``: lossless, though ``"zip"`` and ``"auto"`` sum in another order. None: as
            it is.
        bits: of DynamiQ, per coordinate; default: 5.
        all_reduce: of gradients between replicas, in HSDP: the same values. None: ``"dynamiq"`` where
            ``reduce_scatter`` is, else as it is.
        dynamiq: more arguments of ``DynamiQState``: topology, widths, seed, correlated, ...

    Returns:
        The states in use; ``state_dict()`` of each belongs in checkpoints.

    Raises:
        ValueError: the model has no FSDP2 modules, an argument or value is unknown or does nothing here, ``all_reduce``
            without HSDP, or an argument of DDP's hook (warm-up, exemptions, error feedback).
        RuntimeError: this torch has no custom collectives in FSDP2, or keeps its groups elsewhere.
    """
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError("the model has no FSDP2 modules: call torch.distributed.fsdp.fully_shard first")
    if ReduceScatter is object or not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(f"torch {torch.__version__} has no custom collectives in FSDP2")
    for name, value, known in (
        ("all_gather", all_gather, _LOSSLESS),
        ("reduce_scatter", reduce_scatter, (*_LOSSLESS, "dynamiq")),
        ("all_reduce", all_reduce, (*_LOSSLESS, "dynamiq")),
    ):
        if value is not None and value not in known:
            raise ValueError(f"{name} must be one of {known}, not {value!r}")
    lossy = "dynamiq" in (reduce_scatter, all_reduce)
    if bits is not None:
        dynamiq["bits"] = bits
    unknown = dynamiq.keys() - inspect.signature(DynamiQState).parameters.keys() | dynamiq.keys() & {"group"}
    if unknown or (dynamiq and not lossy):
        raise ValueError(
            f"{', '.join(sorted(unknown or dynamiq))}: no argument of use(){'' if unknown else ' without dynamiq'}"
        )
    ignored = {"warmup_steps", "exempt_below", "exempt_1d", "error_feedback"} & dynamiq.keys()
    if ignored:
        raise ValueError(f"{', '.join(sorted(ignored))}: not in FSDP2, which has no buckets to know again")
    replicated = any(_replicas(group) is not None for module in modules for group in _param_groups(module))
    if all_reduce is not None and not replicated:
        raise ValueError("all_reduce is HSDP's: this model has no replicas")
    if all_reduce is None and replicated and reduce_scatter == "dynamiq":
        all_reduce = "dynamiq"

    # The replicas' sums are of values that were rounded already: other random numbers, or the errors would add up.
    apart = dynamiq | {"seed": (dynamiq.get("seed", 0) + _APART) % 2**63}
    choice = Choice()
    installed = False
    for module in modules:
        for group in _param_groups(module):
            shards = getattr(group.mesh_info, "shard_process_group", None)
            if all_gather is not None and shards is not None:
                _lossless_group(shards)
                module.set_custom_all_gather(_LosslessAllGather(all_gather))
            if reduce_scatter == "dynamiq" and shards is not None:
                choice.reduce_scatter = choice.reduce_scatter or DynamiQState(shards, **dynamiq)
                _same_group(choice.reduce_scatter, shards)
                module.set_custom_reduce_scatter(_DynamiqReduceScatter(choice.reduce_scatter))
            elif reduce_scatter is not None and shards is not None:
                _lossless_group(shards)
                module.set_custom_reduce_scatter(_LosslessReduceScatter(reduce_scatter))
            replicas = _replicas(group)
            installed |= shards is not None or replicas is not None
            if all_reduce is not None and replicas is not None:
                if all_reduce == "dynamiq":
                    choice.all_reduce = choice.all_reduce or DynamiQState(replicas, **apart)
                    _same_group(choice.all_reduce, replicas)
                    _replace_replicas(group, _DynamiqReplicas(choice.all_reduce))
                else:
                    _lossless_group(replicas)
                    _replace_replicas(group, _LosslessReplicas(replicas, all_reduce))
    if not installed:
        raise RuntimeError(f"torch {torch.__version__}: FSDP2 keeps its groups elsewhere than this zipccl knows")
    return choice


# ---- FSDP2's parts ------------------------------------------------------------------------------------------------


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # newer torch: several
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _replicas(group: Any) -> dist.ProcessGroup | None:
    replicas = getattr(group.mesh_info, "replicate_process_group", None)
    return replicas._real if isinstance(replicas, _Replicas) else replicas


def _replace_replicas(group: Any, replicas: dist.ProcessGroup) -> None:
    """FSDP2 calls dist.all_reduce on this group and has no other way in; the mesh itself stays as it is."""
    info = group.mesh_info
    changed = object.__new__(type(info))
    changed.__dict__.update(info.__dict__, replicate_process_group=replicas)
    group.mesh_info = changed
    if group._all_reduce_process_group is not replicas:
        raise RuntimeError(f"torch {torch.__version__}: FSDP2 finds HSDP's replicas elsewhere than this zipccl knows")


def _same_group(state: DynamiQState, group: dist.ProcessGroup) -> None:
    if state.group is not group:
        raise ValueError("modules on different meshes need a call of zipccl.fsdp.use() each")


def _lossless_group(group: dist.ProcessGroup) -> None:
    """A group whose collectives zipccl can compress; others of its calls stay as they are."""
    try:
        zip_backends(group)
    except ValueError:
        attach(group, Options(**dict.fromkeys(COLLECTIVES, "raw")))


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _LosslessAllGather(_Allocates, AllGather):
    def __init__(self, mode: str):
        self._mode = mode

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with override(group, all_gather=self._mode):
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _LosslessReduceScatter(_Allocates, ReduceScatter):
    def __init__(self, mode: str):
        self._mode = mode

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with override(group, reduce_scatter=self._mode):
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class _DynamiqReduceScatter(_Allocates, ReduceScatter):
    def __init__(self, state: DynamiQState):
        self._state = state

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Ordered with the current stream, as FSDP2 expects; there is nothing left to wait for."""
        reduce_scatter(output_tensor, input_tensor, self._state, op)


class _Replicas(dist.ProcessGroup):
    """The group of HSDP's replicas as FSDP2 sees it: its all-reduce is another."""

    def __init__(self, real: dist.ProcessGroup):
        super().__init__(real.rank(), real.size())
        self._real = real

    @property
    def group_name(self) -> str:
        return self._real.group_name


class _DynamiqReplicas(_Replicas):
    def __init__(self, state: DynamiQState):
        super().__init__(state.group)
        self._state = state

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> None:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        for tensor in tensors:
            all_reduce(tensor, self._state, op)


class _LosslessReplicas(_Replicas):
    def __init__(self, real: dist.ProcessGroup, mode: str):
        super().__init__(real)
        self._mode = mode

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        with override(self._real, all_reduce=self._mode):
            return self._real.allreduce(tensors, opts)
