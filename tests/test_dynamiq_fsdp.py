"""zipccl.fsdp.use(): FSDP2 and HSDP against the same training on plain gloo."""

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def build(mesh, policy, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 48))
    model.to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(rank, backend, shape, used, reduce_dtype=torch.float32, factor=None, device="cpu"):
    """Full parameters after training, and the traffic of what was chosen."""
    device = ranks.device(device)
    if backend is not None:
        ranks.init(backend)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    model = build(mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype), device)
    choice = zipccl.fsdp.use(model, **used) if used is not None else None
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.set_gradient_divide_factor(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(5):
        x = torch.randn(16, 48, generator=data).to(device)
        nn.functional.mse_loss(model(x).float(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.full_tensor().detach().cpu() for p in model.parameters()]
    stats = {}
    if choice is not None:
        shards = mesh["shard"].get_group()
        stats["all_gather"] = zipccl.stats(shards).get("all_gather", {}) if "all_gather" in used else {}
        for name in ("reduce_scatter", "all_reduce"):
            state = getattr(choice, name)
            assert (
                state is None
                or name == "reduce_scatter"
                or choice.reduce_scatter is None
                or (
                    state.seed
                    != choice.reduce_scatter.seed  # the same random numbers for both would add up their errors
                )
            )
            stats[name] = state.stats()[name] if state else {}
    return parameters, stats


def distance(a, b):
    top = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))
    return (top / sum(float(y.square().sum()) for y in b)) ** 0.5


@pytest.mark.parametrize("backend", ["zipccl", "gloo"])
def test_fsdp2(backend):
    plain = ranks.run(train, 2, "gloo", (2,), None)
    used = {"all_gather": "zip", "reduce_scatter": "dynamiq", "bits": 8.0, "topology": "direct"}
    packed = ranks.run(train, 2, backend, (2,), used)
    for parameters, stats in packed:
        assert all(same_bits(p, q) for p, q in zip(parameters, packed[0][0], strict=True))
        assert distance(parameters, plain[0][0]) < 1e-2
        assert stats["all_gather"]["zipped_calls"] > 0
        assert stats["reduce_scatter"]["packed_calls"] == 5 * 3


@pytest.mark.parametrize("all_reduce", [None, "zip"])
def test_hsdp(all_reduce):
    plain = ranks.run(train, 4, "gloo", (2, 2), None)
    used = {"reduce_scatter": "dynamiq", "all_reduce": all_reduce, "bits": 8.0, "topology": "direct"}
    packed = ranks.run(train, 4, "zipccl", (2, 2), used)
    for parameters, stats in packed:
        assert all(same_bits(p, q) for p, q in zip(parameters, packed[0][0], strict=True))
        assert distance(parameters, plain[0][0]) < 1e-2
        assert stats["reduce_scatter"]["packed_calls"] == 5 * 3
        assert (stats["all_reduce"].get("packed_calls", 0) == 5 * 3) == (all_reduce is None)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"all_gathr": "zip"}, "all_gathr: no argument"),
        ({"reduce_scatter": "dynamiq", "topolgy": "ring"}, "topolgy: no argument"),
        ({"all_gather": "zip", "bits": 99}, "bits: no argument of use.. without dynamiq"),
        ({"reduce_scatter": "dynamiq", "bits": 99}, "bits must lie between"),
        ({"reduce_scatter": "zip", "topology": "ring"}, "topology: no argument of use.. without dynamiq"),
    ],
    ids=str,
)
def test_arguments_that_do_nothing_are_refused(wrong, said):
    ranks.run(misuse, 1, wrong, said)


def misuse(rank, wrong, said):
    ranks.init("gloo")
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=said):
        zipccl.fsdp.use(model, **wrong)


def on_cuda(rank):
    """HSDP without and with zipccl, by the same ranks."""
    ranks.init("nccl", timeout=60)
    used = {"reduce_scatter": "dynamiq", "bits": 8.0, "topology": "direct"}
    return [train(rank, None, (2, 2), u, device="cuda") for u in (None, used)]


@pytest.mark.cuda
def test_hsdp_on_cuda():
    got = ranks.run(on_cuda, 4, timeout=120)
    plain = got[0][0][0]
    for _, (parameters, stats) in got:
        assert all(same_bits(p, q) for p, q in zip(parameters, got[0][1][0], strict=True))
        assert distance(parameters, plain) < 1e-2
        assert stats["reduce_scatter"]["packed_calls"] == stats["all_reduce"]["packed_calls"] == 5 * 3


def test_lossless_choices_change_no_bit():
    """Ranks' sums of two have one order, so the zipped reduce-scatter has gloo's bits too."""
    plain = ranks.run(train, 2, "gloo", (2,), None)
    for backend in ("zipccl", "gloo"):
        zipped = ranks.run(train, 2, backend, (2,), {"all_gather": "zip", "reduce_scatter": "zip"})
        assert all(same_bits(p, q) for p, q in zip(zipped[0][0], plain[0][0], strict=True))
        assert zipped[0][1]["all_gather"]["zipped_calls"] > 0


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float16])
def test_reduce_dtypes(reduce_dtype):
    plain = ranks.run(train, 2, "gloo", (2,), None)
    used = {"reduce_scatter": "dynamiq", "bits": 8.0, "topology": "direct"}
    packed = ranks.run(train, 2, "gloo", (2,), used, reduce_dtype)
    assert distance(packed[0][0], plain[0][0]) < 1e-2
    assert all(same_bits(p, q) for p, q in zip(packed[1][0], packed[0][0], strict=True))


def test_gradient_divide_factor():
    """torch asks for PREMUL_SUM then, which gloo itself cannot do."""
    plain = ranks.run(train, 2, "gloo", (2,), None)
    used = {"reduce_scatter": "dynamiq", "bits": 8.0, "topology": "direct"}
    packed = ranks.run(train, 2, "gloo", (2,), used, torch.float32, 2.0)
    assert distance(packed[0][0], plain[0][0]) < 1e-2
    more = ranks.run(train, 2, "gloo", (2,), used, torch.float32, 1.0)
    assert distance(more[0][0], plain[0][0]) > 1e-2


def refusals(rank):
    ranks.init("gloo")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    said = []
    for model, used in (
        (nn.Linear(2, 2), {}),
        (fully_shard(nn.Linear(2, 2), mesh=mesh), {"all_gather": "dynamiq"}),
        (fully_shard(nn.Linear(2, 2), mesh=mesh), {"all_reduce": "dynamiq"}),
        (fully_shard(nn.Linear(2, 2), mesh=mesh), {"reduce_scatter": "dynamiq", "error_feedback": True}),
    ):
        with pytest.raises(ValueError) as error:
            zipccl.fsdp.use(model, **used)
        said.append(str(error.value))
    dist.destroy_process_group()
    return said


def test_what_cannot_be_is_said():
    no_module, lossy_weights, no_replicas, of_buckets = ranks.run(refusals, 1)[0]
    assert "fully_shard" in no_module
    assert "all_gather" in lossy_weights
    assert "replicas" in no_replicas
    assert "error_feedback" in of_buckets
