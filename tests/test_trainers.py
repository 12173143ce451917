"""torch's own trainers on "zipccl", with default options and with all movement of data zipped: gloo's bits.

Each work() runs on gloo, on zipccl, and on zipccl with everything zipped; losses and parameters are compared.
"""

import shutil

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import zipccl
from ranks import same_bits
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

BF16 = torch.bfloat16
MOVERS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
ZIP = {f"ZIPCCL_{name.upper()}": "zip" for name in MOVERS} | {"ZIPCCL_MIN_BYTES": "0"}


def compare(work, world: int, zips: tuple[str, ...] = ()) -> None:
    """`zips`: collectives that must really have been zipped in the third run."""
    expected = ranks.run(train_on, world, work, "gloo", timeout=120)
    for env in ({}, ZIP):
        found = ranks.run(train_on, world, work, "zipccl", timeout=120, env=env)
        for (e, _), (f, zipped) in zip(expected, found, strict=True):
            assert e.keys() == f.keys()
            for name in e:
                assert same_bits(e[name], f[name]), f"{work.__name__}: {name} differs, with {env}"
            for op in zips if env else ():
                assert zipped.get(op, 0) > 0, f"{work.__name__}: no {op} was zipped"


def train_on(rank, work, backend):
    ranks.init(backend)
    results = work(rank)
    zipped: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map) if backend == "zipccl" else []:
        for op, s in zipccl.stats(group).items():
            zipped[op] = zipped.get(op, 0) + s["zipped_calls"]
    return {name: t.detach().cpu() for name, t in results.items()}, zipped


# ---- models ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three blocks and a head of 7, which does not divide by the ranks; one layer is used in every other step only."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(3))
        self.sometimes = nn.Linear(40, 40)
        self.norm = nn.BatchNorm1d(40)  # buffers, which DDP broadcasts
        self.head = nn.Linear(40, 7)
        self.to(dtype)

    def forward(self, x, with_sometimes=True):
        for block in self.blocks:
            x = block(x)
        if with_sometimes:
            x = self.sometimes(x)
        return self.head(self.norm(x))


def batch(rank: int, step: int):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 40, generator=generator), torch.randint(0, 7, (16,), generator=generator)


def train(module, rank, steps=3, backward_only=lambda step: False, clip=True, forward=None) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, target = batch(rank, step)
        output = forward(module, x, step) if forward else module(x)
        loss = nn.functional.cross_entropy(output.float(), target)
        loss.backward()
        losses.append(loss.detach())
        if backward_only(step):
            continue
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses)}


def parameters(module, prefix="") -> dict[str, torch.Tensor]:
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.named_parameters()}
    return {f"{prefix}{n}": p for n, p in full.items()} | {f"{prefix}{n}": b for n, b in module.named_buffers()}


# ---- data parallel ---------------------------------------------------------------------------------------------


def ddp(rank):
    results = {}

    def wrap(**kw):
        return nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.01, **kw)

    def take(name, module, losses):
        results.update({f"{name} {n}": t for n, t in (losses | parameters(module)).items()})

    module = wrap()
    take("plain", module, train(module, rank))

    module = wrap(find_unused_parameters=True)
    take("unused", module, train(module, rank, forward=lambda m, x, step: m(x, with_sometimes=step % 2 == 0)))

    module = wrap(gradient_as_bucket_view=True, static_graph=True)
    take("static", module, train(module, rank))

    def accumulate(module, x, step):
        if step % 2 == 0:
            with module.no_sync():
                return module(x)
        return module(x)

    module = wrap()
    take("no_sync", module, train(module, rank, 4, lambda step: step % 2 == 0, forward=accumulate))

    module, losses = wrap(broadcast_buffers=False), []
    with Join([module]):  # ranks with inputs of other lengths
        for step in range(2 + rank):
            loss = nn.functional.cross_entropy(module(batch(rank, step)[0]), batch(rank, step)[1])
            loss.backward()
            losses.append(loss.detach())
    results["join"] = torch.stack(losses)
    take("join", module, {n: p.grad for n, p in module.named_parameters()})

    torch.manual_seed(rank)  # replicas start from rank 0's values
    odd = nn.Linear(300, 300).to(BF16)
    take("start", nn.parallel.DistributedDataParallel(odd), {})
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_ddp(world):
    compare(ddp, world, ("broadcast",))


def fsdp1(rank):
    policy = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16)
    results = {}
    for name, kw in {"full": {}, "mixed": {"mixed_precision": policy}}.items():
        net = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(2)], nn.Linear(40, 7))
        module = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"), **kw)
        results |= {f"{name} {n}": t for n, t in train(module, rank, clip=False).items()}
        with FullyShardedDataParallel.summon_full_params(module):
            results |= {f"{name} {n}": p.detach().clone() for n, p in module.named_parameters()}
    return results


def test_fsdp1():
    compare(fsdp1, 2, ("all_gather",))


def fsdp2(rank):
    world, results = dist.get_world_size(), {}
    meshes = {"flat": init_device_mesh("cpu", (world,))}
    if world == 4:
        meshes["hybrid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    pure = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    for where, mesh in meshes.items():
        for name, kw in {
            "fp32": {"reshard_after_forward": True},
            "mixed": {"reshard_after_forward": True, "mp_policy": mixed},
            "kept": {"reshard_after_forward": False, "mp_policy": pure},
        }.items():
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(3)]
            module = nn.Sequential(*layers, nn.Linear(40, 7))
            for layer in module:
                fully_shard(layer, mesh=mesh, **kw)
            fully_shard(module, mesh=mesh, **kw)
            taken = train(module, rank) | parameters(module)
            results |= {f"{where} {name} {n}": t for n, t in taken.items()}
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fsdp2_and_hsdp(world):
    compare(fsdp2, world, ("all_gather",))


# ---- tensor parallel -------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 48)
        self.down = nn.Linear(48, 24)
        self.to(BF16)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def tensor_parallel(rank):
    world, results = dist.get_world_size(), {}
    mesh = init_device_mesh("cpu", (world,))
    for name, plan in {
        "plain": {"up": ColwiseParallel(), "down": RowwiseParallel()},
        "sequence": {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    }.items():
        module = parallelize_module(MLP(), mesh, plan)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(2, 4 * world, 24, generator=torch.Generator().manual_seed(step)).to(BF16)
            if name == "sequence":
                x = distribute_tensor(x, mesh, [Shard(1)]).to_local()
            loss = module(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results[f"{name} loss {step}"] = loss.detach()
        results |= parameters(module, f"{name} ")
    return results


def test_tensor_parallel():
    compare(tensor_parallel, 2, ("all_gather",))


def redistribute(rank):
    """Every pair of placements, for sizes that divide by the ranks and sizes that do not; bf16, and int16, which gloo
    lacks but never sees here."""
    world, results = dist.get_world_size(), {}
    mesh = init_device_mesh("cpu", (world,))
    for shape in [(12, 24), (10, 9), (world, 1)]:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)
        for source in (Shard(0), Shard(1), Replicate()):
            t = distribute_tensor(whole, mesh, [source])
            for target in (Shard(0), Shard(1), Replicate()):
                local = t.redistribute(placements=[target])
                results[f"{shape} {source} {target}"] = local.to_local().clone()
                assert same_bits(local.full_tensor(), whole)
        partial = DTensor.from_local(whole + rank, mesh, [Partial()])
        for target in (Shard(0), Shard(1), Replicate()):
            results[f"{shape} partial {target}"] = partial.redistribute(placements=[target]).full_tensor()
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_redistribute(world):
    compare(redistribute, world, ("all_gather",))  # on the CPU torch makes its all-to-all of an all-gather


# ---- functional collectives, also compiled ---------------------------------------------------------------------


def functions(x):
    group = dist.group.WORLD
    gathered = functional.all_gather_tensor(x, 0, group)
    swapped = functional.all_to_all_single(gathered, None, None, group)
    spread = functional.broadcast(swapped * 2, 1, group)
    summed = functional.all_reduce(spread.float(), "sum", group)
    return functional.reduce_scatter_tensor(summed + 1, "sum", 0, group), gathered + 1


def functional_collectives(rank):
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(rank)).to(BF16)
    first, second = functions(x)
    return {"first": first * 1, "second": second}


def test_functional_collectives():
    compare(functional_collectives, 2, ("all_gather", "all_to_all", "broadcast"))


def compiled(rank):
    ranks.init("zipccl", timeout=150)
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(rank)).to(BF16)
    eager = functions(x)
    before = zipccl.stats()
    for found, expected in zip(torch.compile(functions, fullgraph=True)(x), eager, strict=True):
        assert same_bits(found * 1, expected * 1)
    after = zipccl.stats()
    for op in ("all_gather", "all_to_all", "broadcast"):
        assert after[op]["zipped_calls"] == before[op]["zipped_calls"] + 1


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
def test_compiled_functional_collectives(tmp_path):
    env = ZIP | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    ranks.run(compiled, 2, env=env, timeout=200)


# ---- attach ----------------------------------------------------------------------------------------------------


def attached(rank, under):
    """FSDP2 and DDP on a gloo group, zipccl coming and going under it between the steps."""
    ranks.init("gloo")
    options = zipccl.Options(**{name: "zip" for name in MOVERS}, min_bytes=0)
    other = dist.new_group()
    if under:
        zipccl.attach(options=options, new_groups=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(2)], nn.Linear(40, 7))
    for layer in module:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    fully_shard(module, mesh=mesh)
    results, zipped = {}, 0
    for i in range(3):
        results |= {f"{i} {n}": t for n, t in train(module, rank).items()}
        dist.broadcast(t := torch.full((900,), rank + i, dtype=BF16), i)
        results[f"broadcast {i}"] = t
        if under:
            zipped = sum(s["zipped_calls"] for s in zipccl.stats().values()) if i < 2 else zipped
            shard = sum(s["zipped_calls"] for s in zipccl.stats(mesh["shard"].get_group()).values())
            assert zipped == i + 1 if i < 2 else True
            assert shard > 0  # made after attach(new_groups=True)
            zipccl.detach()
            assert dist.get_backend() == "gloo"
            dist.broadcast(t.clone(), 0)  # on gloo
            zipccl.attach(options=options if i == 0 else zipccl.Options())
    if under:
        zipccl.detach(new_groups=True)
        with pytest.raises(ValueError, match="not a zipccl group"):
            zipccl.stats(dist.new_group())
        with pytest.raises(ValueError, match="not a zipccl group"):
            zipccl.stats(other)
    results |= parameters(module)
    dist.destroy_process_group()
    return results


def test_attach():
    expected = ranks.run(attached, 4, False, timeout=120)
    found = ranks.run(attached, 4, True, timeout=120)
    for e, f in zip(expected, found, strict=True):
        assert e.keys() == f.keys() and all(same_bits(e[n], f[n]) for n in e)
