"""Every virtual of c10d::Backend: whether it is zipccl's own, forwarded or refused, and that it is so."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import zipccl
from recorder import Inner, native, plain
from torch.utils import cpp_extension
from zipccl import _C

OWN, FORWARDED, REFUSED = "own", "forwarded", "refused"


class Row(NamedTuple):
    """Where a call on CPU tensors arrives, in a group without and with a CUDA backend.

    A text instead of receivers: the error that is raised. "zip" is the CPU backend that zipped calls use alone.
    """

    kind: str
    cpu_only: tuple | str = ("cpu",)
    with_cuda: tuple | str = ("cpu",)


BY_DEVICE = Row(FORWARDED)
EVERYWHERE = Row(FORWARDED, ("cpu", "zip"), ("cpu", "zip", "cuda"))
CUDA_FIRST = Row(FORWARDED, ("cpu",), ("cuda",))


def unsupported(name: str) -> Row:
    error = f"Backend zipccl (does not support|does not implement|is missing implementation of) {name}"
    return Row(REFUSED, error, error)


TABLE = {
    "_allgather_base": Row(OWN),
    "allgather": Row(OWN),
    "allgather_into_tensor_coalesced": Row(OWN),
    "alltoall": Row(OWN),
    "alltoall_base": Row(OWN),
    "broadcast": Row(OWN),
    "gather": Row(OWN),
    "scatter": Row(OWN),
    "_reduce_scatter_base": Row(OWN),
    "reduce_scatter": Row(OWN),
    "reduce_scatter_tensor_coalesced": Row(OWN),
    "allreduce": Row(OWN),
    "getBackendName": Row(OWN, (), ()),
    # ---- collectives and messages, by the device of the tensors ----
    "allgather_coalesced": BY_DEVICE,
    "allreduce_coalesced": BY_DEVICE,
    "allreduce_sparse": BY_DEVICE,
    "barrier": BY_DEVICE,
    "monitoredBarrier": BY_DEVICE,  # only gloo has one
    "recv": BY_DEVICE,
    "recvAnysource": BY_DEVICE,
    "reduce": BY_DEVICE,
    "send": BY_DEVICE,
    "allocateTensor": BY_DEVICE,
    "eagerConnectSingleDevice": BY_DEVICE,
    # ---- to every inner backend ----
    "abort": EVERYWHERE,
    "enableCollectivesTiming": EVERYWHERE,
    "setGroupUid": EVERYWHERE,
    "setSequenceNumberForGroup": EVERYWHERE,
    "setTimeout": EVERYWHERE,
    "shutdown": EVERYWHERE,
    # ---- to the one that knows ----
    "endCoalescing": CUDA_FIRST,
    "getError": CUDA_FIRST,
    "getMemAllocator": CUDA_FIRST,
    "startCoalescing": CUDA_FIRST,
    "supportsCoalescing": CUDA_FIRST,
    "getSequenceNumberForGroup": BY_DEVICE,  # of the last collective
    "registerOnCompletionHook": Row(FORWARDED, "supports onCompletion hook, but got zipccl", ("cuda",)),
    "waitForPendingWorks": Row(FORWARDED, "supports waitForPendingWorks, but got zipccl", ("cuda",)),
    "supportsTensorAlloc": Row(FORWARDED, (), ("cuda",)),
    "getBackendOptions": Row(OWN, (), ()),
    "supportsSplitting": Row(OWN, (), ()),
    "split": Row(OWN, (), ()),  # tests/test_split_group.py
    # ---- refused: torch then takes its general path, which works ----
    "merge": unsupported("merge"),
    "supportsShrinking": Row(REFUSED, (), ()),
    "shrink": unsupported("shrink"),
    "supportsTimeEstimation": Row(REFUSED, (), ()),
}

# Virtuals of torch newer than 2.11. Their base versions refuse, or call the old names above, which we override.
NEWER_TORCH = {
    "suspend",
    "resume",
    "getMemoryStats",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "registerAbortHook",
    "unregisterAbortHook",
    "supportsReconfigure",
    "get_reconfigure_handle",
    "reconfigure",
    "supportsWindow",
    "new_window",
    "capabilities",
}


def virtuals() -> set[str]:
    (header,) = (
        path
        for include in cpp_extension.include_paths("cpu")
        if (path := Path(include, "torch/csrc/distributed/c10d/Backend.hpp")).exists()
    )
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(), flags=re.S)
    return set(re.findall(r"\bvirtual\b[^;{(]*?(\w+)\s*\(", text))


PRESENT = virtuals()


def names(kind: str) -> list[str]:
    return sorted(name for name, row in TABLE.items() if row.kind == kind and name in PRESENT)


def test_the_table_knows_every_virtual_of_this_torch():
    assert len(PRESENT) > 40 and "broadcast" in PRESENT  # the header was understood
    unknown = PRESENT - TABLE.keys() - NEWER_TORCH
    assert not unknown, f"torch {torch.__version__} has virtuals that nobody decided on: {sorted(unknown)}"


def tensors(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.arange(n, dtype=dtype, device=device) for n in (6, 12, 6, 6)]


def check_arrival(name: str, inner: Inner, receivers: tuple, device: str, values: list[torch.Tensor]) -> None:
    direct = native().Recorder(0, 2)
    expected_result = native().invoke(direct, name, values, torch.device(device))
    expected = plain(direct.take_calls())
    assert len(expected) == 1
    inner.take_calls()

    result = native().invoke(inner.backend, name, values, torch.device(device))
    arrived = {receiver: plain(calls) for receiver, calls in inner.take_calls().items()}
    assert arrived == {receiver: expected for receiver in receivers}
    if isinstance(expected_result, torch.distributed.Work):
        assert result is getattr(inner, receivers[0]).last_work()
    elif isinstance(expected_result, torch.Tensor):
        assert torch.equal(result, expected_result)
    elif name == "registerOnCompletionHook":
        assert result is True  # hasHooks(), which torch asks of the backend it knows
    else:
        assert result == expected_result


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu-only", "with-cuda"])
@pytest.mark.parametrize("name", names(FORWARDED))
def test_forwarded(name, cuda):
    inner = Inner(cuda=cuda)
    expected = TABLE[name].with_cuda if cuda else TABLE[name].cpu_only
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            native().invoke(inner.backend, name, tensors(), torch.device("cpu"))
        assert inner.take_calls() == {}
    elif expected:
        check_arrival(name, inner, expected, "cpu", tensors())
    else:
        assert native().invoke(inner.backend, name, tensors(), torch.device("cpu")) is False
        assert inner.take_calls() == {}


@pytest.mark.parametrize("name", ["barrier", "allocateTensor", "eagerConnectSingleDevice"])
def test_forwarded_to_the_device_that_is_named(name):
    check_arrival(name, Inner(cuda=True), ("cuda",), "cuda:0", tensors())


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", [name for name in names(FORWARDED) + names(OWN) if TABLE[name] in (BY_DEVICE, Row(OWN))]
)
def test_cuda_tensors_go_to_the_cuda_backend(name):
    receivers = ("cpu",) if name == "monitoredBarrier" else ("cuda",)
    inner = Inner(cuda=True)
    if name == "getSequenceNumberForGroup":
        inner.backend.allreduce([torch.ones(1, device="cuda")]).wait()
    check_arrival(name, inner, receivers, "cuda:0", tensors("cuda"))


@pytest.mark.cuda
def test_a_barrier_without_a_device_is_the_last_collectives():
    inner = Inner(cuda=True)
    inner.backend.allreduce([torch.ones(1, device="cuda")]).wait()
    inner.take_calls()
    inner.backend.barrier()
    assert list(inner.take_calls()) == ["cuda"]


@pytest.mark.cuda
def test_a_barrier_of_a_group_without_gloo():
    """As under an attached NCCL group; torch names a CPU tensor's device unless told otherwise."""
    cuda = native().Recorder(0, 2)
    _C.ZipBackend(0, 2, None, None, cuda, zipccl.Options().native()).barrier()
    assert [c.name for c in cuda.take_calls()] == ["barrier"]


@pytest.mark.parametrize("name", names(REFUSED))
def test_refused(name):
    """Whatever the inner backends could do: the recorders say yes to everything."""
    inner = Inner(cuda=True)
    if isinstance(TABLE[name].cpu_only, str):
        with pytest.raises(RuntimeError, match=TABLE[name].cpu_only):
            native().invoke(inner.backend, name, tensors(), torch.device("cpu"))
    else:
        assert native().invoke(inner.backend, name, tensors(), torch.device("cpu")) is False
    assert inner.take_calls() == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_devices_without_an_inner_backend_are_named(device):
    backend = _C.ZipBackend(0, 2, None, None, None, zipccl.Options().native())
    with pytest.raises(RuntimeError, match=f"no inner backend for {device}"):
        native().invoke(backend, "allocateTensor", tensors(), torch.device(device))
    # torch asks for the device the default group is bound to, whatever this group serves.
    native().invoke(backend, "eagerConnectSingleDevice", tensors(), torch.device(device))
    with pytest.raises(RuntimeError, match="no inner backend for cpu"):
        backend.allreduce(tensors()[:1])


# ---- own -------------------------------------------------------------------------------------------------------

COLLECTIVES = [name for name in names(OWN) if TABLE[name] == Row(OWN)]
GATHERS = [name for name in COLLECTIVES if "allgather" in name]


def test_own_name():
    assert Inner().backend.name() == "zipccl"


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu-only", "with-cuda"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(
    "modes, options, dtype",
    [
        ("raw", {}, torch.bfloat16),
        ("zip", {"min_bytes": 10**6}, torch.bfloat16),
        ("auto", {}, torch.bfloat16),  # far below auto's own limit
        ("zip", {}, torch.float32),  # a frame could only carry it raw; and sums of so few values are raw
        ("zip", {}, torch.int64),
    ],
    ids=["raw", "min-bytes", "auto-small", "float32", "int64"],
)
def test_raw_calls_are_forwarded_untouched(name, modes, options, dtype, cuda):
    """alltoall: with arguments that do not fit each other, which the inner backend is to say."""
    inner = Inner(cuda=cuda, **dict.fromkeys(zipccl.options.COLLECTIVES, modes), **options)
    check_arrival(name, inner, ("cpu",), "cpu", tensors(dtype=dtype))


@pytest.mark.parametrize("name", GATHERS)
def test_zipped_all_gathers_go_as_sizes_and_frames(name):
    inner = Inner()
    values = tensors(dtype=torch.bfloat16)
    for out in values[1:]:
        out.fill_(-1)
    work = native().invoke(inner.backend, name, values, torch.device("cpu"))
    assert work.wait()
    calls = inner.take_calls()
    assert list(calls) == ["zip"]  # the caller's own backend stays free for the caller's other calls
    assert [c.name for c in calls["zip"]] == ["recv", "send"] * 2
    heard, told, *frames = calls["zip"]
    assert heard.arguments == told.arguments == "1 8 "  # peer, tag: for messages of four words
    _, frame_bytes, *unused = told.tensors[0].view(torch.int64).tolist()
    assert unused == [0, 0]
    for message in frames:
        (frame,) = message.tensors
        assert (frame.dtype, frame.numel(), message.arguments) == (torch.uint8, frame_bytes, "1 0 ")
    outputs = values[2:] if name == "allgather" else list(values[1].chunk(2))  # the recorder echoes
    assert all(torch.equal(out, values[0]) for out in outputs)


def test_data_is_asked_for_before_it_is_sent():
    """Otherwise a rank's request would queue behind what it sends itself, and a connection carry one way at a time."""
    inner = Inner(size=3, all_to_all="zip", all_to_all_design=1, min_bytes=0)
    out, x = torch.empty(2, 3000, dtype=torch.bfloat16)
    inner.backend.alltoall_base(out, x, [], [], torch.distributed.AllToAllOptions()).wait()
    data = [c for c in inner.take_calls()["zip"] if c.arguments.split()[1:2] == ["0"]]
    assert [(c.name, c.arguments) for c in data] == [
        ("recv", "2 0 "),
        ("recv", "1 0 "),
        ("send", "1 0 "),
        ("send", "2 0 "),
    ]


def test_several_tensors_go_in_one_call():
    inner = Inner(size=3)
    ins = [torch.arange(n, dtype=torch.bfloat16) for n in (5, 300, 1)]
    outs = [torch.empty(3 * t.numel(), dtype=torch.bfloat16) for t in ins]
    native().all_gather_coalesced(inner.backend, outs, ins).wait()
    names = [c.name for c in inner.take_calls()["zip"]]
    assert names == ["recv", "recv", "send", "send", "allgather_into_tensor_coalesced"]
    for out, in_ in zip(outs, ins, strict=True):
        assert torch.equal(out, in_.repeat(3))


def test_inside_a_coalescing_window_all_is_raw():
    """The inner backend holds calls back there, so sizes would never come."""
    inner = Inner()
    inner.backend._start_coalescing()
    values = tensors(dtype=torch.bfloat16)
    inner.backend._allgather_base(values[1], values[0])
    work = inner.backend._end_coalescing()
    assert [c.name for c in inner.take_calls()["cpu"]] == ["startCoalescing", "_allgather_base", "endCoalescing"]
    assert work.wait() and work.is_completed()
    inner.backend._allgather_base(values[1], values[0]).wait()
    assert list(inner.take_calls()) == ["zip"]  # and after it no longer


def test_shutdown_reaches_the_inner_backends_once():
    inner = Inner(cuda=True)
    inner.backend.shutdown()
    inner.backend.shutdown()
    assert {name: [c.name for c in calls] for name, calls in inner.take_calls().items()} == {
        name: ["shutdown"] for name in ("cpu", "zip", "cuda")
    }
