"""torch's own users of process groups, on "zipccl" as on the inner backend; and the life of groups.

All that moves values is zipped where it can be, whatever its size; sums stay raw, as by default.
"""

import json
import os
import subprocess
import sys

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
MOVES = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
ZIP = {f"ZIPCCL_{name.upper()}": "zip" for name in MOVES}


def zipped_calls() -> int:
    return zipccl.stats().get("all_gather", {"zipped_calls": 0})["zipped_calls"]


def can_zip(device: str) -> bool:
    return device == "cpu" or zipccl._C.cuda_version is not None


def both(work, world: int, device: str, *args) -> None:
    """work() over the inner backend and over zipccl: equal results, tensors bit by bit."""
    inner = "gloo" if device == "cpu" else "nccl"
    expected = ranks.run(work, world, inner, device, *args, env=ZIP)
    found = ranks.run(work, world, "zipccl", device, *args, env=ZIP)
    for e, f in zip(expected, found, strict=True):
        assert e.keys() == f.keys()
        for name in e:
            if isinstance(e[name], torch.Tensor):
                assert same_bits(e[name], f[name]), name
            else:
                assert e[name] == f[name], name


# ---- training --------------------------------------------------------------------------------------------------


def model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(40, 7)).to(device)  # 7: does not divide by the ranks


def train(module: nn.Module, rank: int, device: torch.device, steps: int = 4) -> torch.Tensor:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 40, generator=generator).to(device)
        target = torch.randint(0, 7, (16,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(module(x).float(), target)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def fsdp2(rank, backend, device, reshard):
    where = ranks.device(device)
    ranks.init(backend)
    module = model(where)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in module:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    losses = train(module, rank, where)
    if backend == "zipccl" and can_zip(device):
        assert zipped_calls() >= 4 * (4 + (3 if reshard else 0))
    return {"losses": losses} | {n: p.full_tensor().detach().cpu() for n, p in module.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp2(world, reshard, device):
    both(fsdp2, world, device, reshard)


def ddp(rank, backend, device):
    where = ranks.device(device)
    ranks.init(backend)
    module = nn.parallel.DistributedDataParallel(
        model(where), device_ids=[where.index] if device == "cuda" else None, bucket_cap_mb=0.01
    )
    losses = train(module, rank, where)
    return {"losses": losses} | {n: p.detach().cpu() for n, p in module.named_parameters()}


def all_gather_hook(state, bucket):
    """A communication hook that averages bf16 gradients from an all-gather, in a chain of futures."""
    world, buffer = dist.get_world_size(), bucket.buffer()
    out = torch.empty(world * buffer.numel(), dtype=BF16, device=buffer.device)
    future = dist.all_gather_into_tensor(out, buffer.to(BF16), async_op=True).get_future()
    return future.then(lambda _: out.view(world, -1).float().mean(0))


def ddp_with_hook(rank, backend, device):
    where = ranks.device(device)
    ranks.init(backend)
    module = nn.parallel.DistributedDataParallel(
        model(where), device_ids=[where.index] if device == "cuda" else None, bucket_cap_mb=0.01
    )
    module.register_comm_hook(None, all_gather_hook)
    losses = train(module, rank, where)
    if backend == "zipccl" and can_zip(device):
        assert zipped_calls() >= 4
    return {"losses": losses} | {n: p.detach().cpu() for n, p in module.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("work", [ddp, ddp_with_hook])
def test_ddp(work, device):
    both(work, 2, device)


def dtensor(rank, backend, device):
    ranks.device(device)
    ranks.init(backend)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    whole = torch.randn(10, 9, generator=torch.Generator().manual_seed(1)).to(BF16).to(device)
    rows = distribute_tensor(whole, mesh, [Shard(0)])  # uneven for 3 ranks
    results = {
        "full": rows.full_tensor(),
        "columns": rows.redistribute(placements=[Shard(1)]).to_local(),
        "replicated": rows.redistribute(placements=[Replicate()]).to_local(),
        "summed": rows.sum(0).redistribute(placements=[Replicate()]).to_local(),
        "product": (rows @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])).full_tensor(),
    }
    partial = torch.distributed.tensor.DTensor.from_local(whole + rank, mesh, [Partial()])
    results["scattered"] = partial.redistribute(placements=[Shard(0)]).full_tensor()
    assert same_bits(results["full"].cpu(), whole.cpu())
    if backend == "zipccl" and can_zip(device):
        assert zipped_calls() >= 2
    return {name: t.detach().cpu() for name, t in results.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [2, 3])
def test_dtensor(world, device):
    both(dtensor, world, device)


# ---- everything else a group is asked for ----------------------------------------------------------------------


def everything(rank, backend, device):
    where = ranks.device(device)
    ranks.init(backend)
    world = dist.get_world_size()
    last, right, left = world - 1, (rank + 1) % world, (rank - 1) % world

    def mine(n=12, dtype=BF16):
        return (torch.arange(n) * 0.37 + rank).to(dtype).to(where)

    def empty(n):
        return torch.empty(n, dtype=BF16, device=where)

    r = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        dist.all_reduce(t := mine(), op)
        r[f"all_reduce {op}"] = t
    dist.reduce(t := mine(), last)
    r["reduce"] = t if rank == last else torch.zeros(1)
    dist.broadcast(t := mine(), last)
    r["broadcast"] = t
    parts = [empty(12) for _ in range(world)] if rank == 0 else None
    dist.gather(mine(), parts, 0)
    r["gather"] = torch.cat(parts) if parts else torch.zeros(1)
    dist.scatter(t := empty(12), [mine() * i for i in range(world)] if rank == last else None, last)
    r["scatter"] = t
    dist.reduce_scatter_tensor(t := torch.empty(12, device=where), mine(12 * world, torch.float32))
    r["reduce_scatter_tensor"] = t
    dist.reduce_scatter(t := empty(12), [mine() * i for i in range(world)])
    r["reduce_scatter"] = t
    dist.all_to_all_single(t := empty(3 * world), mine(3 * world))
    r["all_to_all_single"] = t
    splits = [i + 1 for i in range(world)]
    dist.all_to_all_single(t := empty((rank + 1) * world), mine(sum(splits)), [rank + 1] * world, splits)
    r["uneven all_to_all_single"] = t
    operations = [dist.P2POp(dist.isend, mine(), right), dist.P2POp(dist.irecv, t := empty(12), left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    r["batch_isend_irecv"] = t
    if backend == "zipccl" and can_zip(device):
        zipped = {name: s["zipped_calls"] for name, s in zipccl.stats().items()}
        assert zipped == {
            "all_to_all": 2,
            "broadcast": 1,
            "scatter": 1,
            "gather": 1,
            "all_reduce": 0,
            "reduce_scatter": 0,
        }

    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    r["all_gather_object"] = objects
    dist.broadcast_object_list(objects := [rank, "from", rank * 2], last)
    r["broadcast_object_list"] = objects
    dist.gather_object(rank, objects := [None] * world if rank == 0 else None, 0)
    r["gather_object"] = objects
    dist.scatter_object_list(objects := [None], [f"to {i}" for i in range(world)] if rank == 0 else None, 0)
    r["scatter_object_list"] = objects
    dist.barrier()
    dist.barrier(async_op=True).wait()

    # Groups of some ranks; the others take no part.
    for members in ([0, last], [last], list(range(world - 1))):
        group = dist.new_group(members)
        if rank not in members:
            continue
        outs = [torch.empty(12, dtype=BF16, device=where) for _ in members]
        dist.all_gather(outs, mine(dtype=BF16), group=group)
        r[f"group {members}"] = torch.cat(outs)
        dist.barrier(group)
        if backend == "zipccl" and can_zip(device):
            zipped = zipccl.stats(group)["all_gather"]["zipped_calls"]
            assert zipped == (1 if len(members) > 1 else 0)
    return {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in r.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_everything_else(device):
    both(everything, 3, device)


def mesh_2d(rank, backend, device):
    where = ranks.device(device)
    ranks.init(backend)
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).to(BF16).to(where)
    t = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    out = torch.empty(24, dtype=BF16, device=where)
    dist.all_gather_into_tensor(out, whole.view(-1)[12 * rank : 12 * rank + 12], group=mesh["replicate"].get_group())
    return {"full": t.full_tensor().cpu(), "across": out.cpu(), "flat": mesh._flatten().size()}


@pytest.mark.parametrize("device", DEVICES)
def test_device_mesh(device):
    both(mesh_2d, 4, device)


# ---- TORCH_DISTRIBUTED_DEBUG=DETAIL ----------------------------------------------------------------------------


def check_detail(rank):
    ranks.init("zipccl")
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
    out = torch.empty(2000, dtype=BF16)
    for _ in range(2):
        dist.all_gather_into_tensor(out, torch.full((1000,), rank + 1.0, dtype=BF16))
        assert out.view(2, 1000).mean(1).tolist() == [1, 2]
    dist.all_reduce(t := torch.ones(3))
    assert t.tolist() == [2, 2, 2]
    assert zipped_calls() == 2
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
        if rank == 0:
            dist.all_reduce(t)
        else:
            dist.all_gather_into_tensor(out, torch.ones(1000, dtype=BF16))
    dist.destroy_process_group()


def test_detail_debug_level():
    ranks.run(check_detail, 2, env=ZIP | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


# ---- names and life cycle --------------------------------------------------------------------------------------


def check_backend_string(rank, backend, zips_cpu):
    ranks.init(backend)
    assert dist.get_backend() == backend
    out = torch.empty(2000, dtype=BF16)
    dist.all_gather_into_tensor(out, torch.full((1000,), rank + 1.0, dtype=BF16))
    assert out.view(2, 1000).mean(1).tolist() == [1, 2]
    dist.all_gather_object(objects := [None, None], rank)
    assert objects == [0, 1]
    dist.barrier()
    assert zipped_calls() == (1 if zips_cpu else 0)
    group = dist.new_group([0, 1])
    dist.all_reduce(t := torch.ones(1), group=group)
    assert t.item() == 2
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "backend, zips_cpu",
    [("zipccl", True), ("cpu:zipccl", True), ("cpu:zipccl,cuda:zipccl", True), ("cpu:gloo,cuda:zipccl", False)],
)
def test_backend_strings(backend, zips_cpu):
    ranks.run(check_backend_string, 2, backend, zips_cpu, env=ZIP)


def check_life(rank):
    """Groups come and go; whoever holds one that has gone gets an error, not a hang."""
    for round_ in range(3):
        ranks.init("zipccl")
        outs = [torch.empty(50, dtype=BF16) for _ in range(2)]
        dist.all_gather(outs, torch.full((50,), rank + round_, dtype=BF16))
        assert [o[0].item() for o in outs] == [round_, round_ + 1]
        assert zipped_calls() == 1  # counters are a group's own
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        sub = dist.new_group([0, 1])
        dist.all_gather(outs, torch.full((50,), rank, dtype=BF16), group=sub)
        dist.destroy_process_group(sub)
        dist.destroy_process_group()
        with pytest.raises((ValueError, AssertionError)):
            dist.destroy_process_group()
        backend.shutdown()  # again
        with pytest.raises(RuntimeError, match="shut down"):
            backend.allgather([outs], [outs[0].clone()])


def test_destroy_and_init_again():
    ranks.run(check_life, 2, env=ZIP)


def check_destroy_with_calls_in_flight(rank):
    ranks.init("zipccl")
    outs = [torch.empty(2 * 200_000, dtype=BF16) for _ in range(5)]
    works = [dist.all_gather_into_tensor(o, torch.ones(200_000, dtype=BF16), async_op=True) for o in outs]
    dist.destroy_process_group()
    for work in works:
        work.wait()
    assert all((o == 1).all() for o in outs)


def test_destroy_with_calls_in_flight():
    ranks.run(check_destroy_with_calls_in_flight, 2, env=ZIP)


def check_callback_that_gathers(rank):
    ranks.init("zipccl")
    outs = [torch.empty(1000, dtype=BF16) for _ in range(4)]
    x = torch.full((500,), rank, dtype=BF16)

    def again(future):
        dist.all_gather_into_tensor(outs[1], x)  # waits, inside a callback, as PowerSGD's hook does
        return dist.all_gather_into_tensor(outs[2], x, async_op=True).get_future().wait()

    dist.all_gather_into_tensor(outs[0], x, async_op=True).get_future().then(again).wait()
    assert all(same_bits(o, outs[0]) for o in outs[:3])


def test_a_callback_may_gather():
    ranks.run(check_callback_that_gathers, 2, env=ZIP)


SCRIPT = """
import os, sys, torch, torch.distributed as dist, zipccl
rank, path, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("zipccl", store=dist.FileStore(path, 2), rank=rank, world_size=2)
x, out = torch.full((300_000,), rank, dtype=torch.bfloat16), torch.empty(600_000, dtype=torch.bfloat16)
dist.all_gather_into_tensor(out, x)
if case == "in flight":
    works = [dist.all_gather_into_tensor(torch.empty_like(out), x, async_op=True) for _ in range(3)]
    works[1].get_future().then(lambda f: len(f.value()))
print("end of script", flush=True)
"""


@pytest.mark.parametrize("case", ["idle", "in flight"])
def test_exit_without_destroy(case, tmp_path):
    """The ordinary end of a process: no hang, no crash, exit code 0."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(tmp_path / "store"), case],
            env=os.environ | ZIP,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0 and output.strip().endswith("end of script"), output
    finally:
        for process in processes:
            process.kill()


def test_import_touches_no_gpu_and_may_be_repeated():
    script = """
import importlib, sys, torch, torch.distributed as dist
import zipccl, zipccl.backend
assert not torch.cuda.is_initialized()
zipccl.register()
importlib.reload(zipccl.backend).register()
importlib.reload(zipccl)
assert dist.Backend.backend_capability["zipccl"] == ["cpu", "cuda"]
assert not torch.cuda.is_initialized()
import os; os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def check_inner_backends(rank):
    ranks.init("zipccl", timeout=17)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    gloo = backend.inner("cpu")
    assert gloo.name() == "gloo" and gloo.options._timeout.total_seconds() == 17
    assert gloo.options.group_name == dist.group.WORLD.group_name
    reversed_ = dist.new_group([1, 0])
    assert reversed_._get_backend(torch.device("cpu")).inner("cpu").options.global_ranks_in_group == [0, 1]
    backend._set_sequence_number_for_group()
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert backend._get_sequence_number_for_group() == before + 1


def test_inner_backends_know_their_group():
    ranks.run(check_inner_backends, 2)


def known_to_the_recorder() -> int:
    """gloo backends of this process that have made a call, as torch's flight recorder counts them."""
    return len(json.loads(_distributed_c10d._dump_fr_trace_json(True, False)).get("pg_status", {}))


def check_first_calls(rank):
    """The recorder enters a backend at its first call, unlocked: that call must not be a worker's."""
    ranks.init("zipccl")
    assert known_to_the_recorder() == 2  # one for calls that are forwarded, one for the worker
    dist.new_group(pg_options=zipccl.Options(all_gather="zip"))
    dist.new_group([rank], use_local_synchronization=True)  # alone: has no second one
    assert known_to_the_recorder() == 5
    gloo = dist.new_group(backend="gloo")
    assert known_to_the_recorder() == 5  # torch itself leaves it to the first call
    zipccl.attach(gloo)
    assert known_to_the_recorder() == 7
    for group in (None, gloo):
        with zipccl.override(group, all_gather="zip"):
            out = torch.empty(40, dtype=BF16)
            dist.all_gather_into_tensor(out, torch.full((20,), rank, dtype=BF16), group, async_op=True).wait()
            assert out[0] == 0 and out[-1] == 1
    assert known_to_the_recorder() == 7


@pytest.mark.skipif(not hasattr(_distributed_c10d, "_dump_fr_trace_json"), reason="this torch has no such recorder")
def test_no_worker_makes_the_first_call_of_a_backend():
    ranks.run(check_first_calls, 2)


def begun_before_a_barrier(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip", min_bytes=0))
    n, count = dist.get_world_size(), 1 << 20
    work, outs = [], [torch.zeros(n * count, dtype=torch.bfloat16) for _ in range(4)]
    for out in outs:
        work.append(dist.all_gather_into_tensor(out, torch.full((count,), rank + 1.0).bfloat16(), async_op=True))
    dist.barrier()
    done = [bool((out.view(n, count) == torch.arange(1, n + 1).bfloat16()[:, None]).all()) for out in outs]
    for w in work:
        w.wait()
    return done


def test_a_barrier_waits_for_compressed_calls_as_for_others():
    assert ranks.run(begun_before_a_barrier, 3) == [[True] * 4] * 3


def busy_behind_a_barrier(rank):
    """Rank 1 begins its all-gather only when rank 0, past its own barrier, tells it to."""
    ranks.init("zipccl", pg_options=zipccl.Options(all_gather="zip", min_bytes=0))
    word, out = torch.zeros(1), torch.zeros(2000, dtype=BF16)
    if rank == 1:
        dist.recv(word, 0)
    gather = dist.all_gather_into_tensor(out, torch.full((1000,), rank + 1.0, dtype=BF16), async_op=True)
    barrier = dist.barrier(async_op=True)
    if rank == 0:
        assert not barrier.is_completed()
        dist.send(word, 1)
    barrier.wait()
    assert out.sum() == 3000
    gather.wait()
    future = dist.barrier(async_op=True).get_future()
    future.wait()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"through {rank}", "")
    store.wait(["through 0", "through 1"])  # who leaves first closes connections that the other may still need
    return future.done()


def test_an_asynchronous_barrier_lets_the_caller_go_on():
    assert ranks.run(busy_behind_a_barrier, 2) == [True] * 2
