"""The DDP hook: every mode of DDP against the same training without a hook, replicas bit for bit alike."""

import contextlib
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MODES = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "no_sync": {},
    "bfloat16": {},
    "autocast": {},
    "compiled": {},
}


class Net(nn.Module):
    """Several buckets' worth of parameters: matrices, biases, a branch that some steps leave out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = nn.LayerNorm(256)
        self.side = nn.Linear(256, 256)
        self.last = nn.Linear(256, 16)

    def forward(self, x, side=True):
        x = self.norm(torch.tanh(self.first(x)))
        if side:
            x = x + self.side(x)
        return self.last(x)


def train(rank, mode, backend, options, device="cpu", steps=6):
    """Losses, parameters after training, and how many buckets the hook has seen. backend None: there is a group."""
    device = ranks.device(device)
    if backend is not None:
        ranks.init(backend)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    megabytes = 1 if mode == "compiled" else 0.1  # dynamo wants room for DDP's first bucket
    model = DistributedDataParallel(Net().to(device, dtype), bucket_cap_mb=megabytes, **MODES[mode])
    state, seen = None, []
    if options is not None:
        state = zipccl.DynamiQState(**options)

        def counting_hook(state, bucket):
            seen.append(bucket.index())
            return zipccl.dynamiq_hook(state, bucket)

        model.register_comm_hook(state, counting_hook)
    forward = torch.compile(model, backend="eager") if mode == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    losses = []
    for step in range(steps):
        x = torch.randn(32, 64, generator=data, dtype=torch.float32).to(device, dtype)
        y = torch.roll(x, 3, 1)[:, :16]
        quiet = mode == "no_sync" and step % 3 < 2
        with model.no_sync() if quiet else contextlib.nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast"):
                out = forward(x, side=mode != "unused" or step % 2 == 0)
            loss = nn.functional.mse_loss(out.float(), y.float())
            loss.backward()
        if not quiet:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    parameters = [p.detach().cpu() for p in model.module.parameters()]
    return losses, parameters, len(set(seen)), state and (state.calls, state.steps, state.stats())


def distance(a, b):
    """Relative, over all parameters."""
    top = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True))
    return (top / sum(float(y.double().square().sum()) for y in b)) ** 0.5


@pytest.mark.parametrize("mode", MODES)
def test_trains_as_without_a_hook(mode):
    plain = ranks.run(train, 2, mode, "gloo", None)
    packed = ranks.run(train, 2, mode, "gloo", {"bits": 8.0, "topology": "direct"})
    for _, parameters, buckets, (calls, steps, stats) in packed:
        assert all(same_bits(p, q) for p, q in zip(parameters, packed[0][1], strict=True))
        assert distance(parameters, plain[0][1]) < 5e-3
        assert buckets > 1 or mode == "compiled"
        assert steps == (2 if mode == "no_sync" else 6)
        assert stats["all_reduce"]["packed_calls"] == calls >= buckets * (steps - 1)
    again = ranks.run(train, 2, mode, "gloo", {"bits": 8.0, "topology": "direct"})
    assert all(same_bits(p, q) for p, q in zip(again[0][1], packed[0][1], strict=True))


@pytest.mark.parametrize("world", [1, 3])
def test_other_world_sizes_on_zipccl_groups(world):
    plain = ranks.run(train, world, "plain", "gloo", None)
    packed = ranks.run(train, world, "plain", "zipccl", {"bits": 8.0})
    assert distance(packed[0][1], plain[0][1]) < 5e-3
    assert all(same_bits(p, q) for got in packed for p, q in zip(got[1], packed[0][1], strict=True))
    if world == 1:  # nothing moves, so nothing is rounded
        assert distance(packed[0][1], plain[0][1]) == 0


def on_cuda(rank):
    ranks.init("zipccl", timeout=60)
    found = []
    for mode in ("plain", "bucket_view", "no_sync", "bfloat16"):
        options = {"bits": 8.0, "topology": "direct"}
        found.append((train(rank, mode, None, None, "cuda"), train(rank, mode, None, options, "cuda")))
    return found


@pytest.mark.cuda
def test_on_cuda():
    got = ranks.run(on_cuda, 2, timeout=120)
    for (plain, packed), (_, other) in zip(*got, strict=True):
        assert all(same_bits(p, q) for p, q in zip(packed[1], other[1], strict=True))
        assert distance(packed[1], plain[1]) < 5e-3
        assert packed[3][2]["all_reduce"]["packed_calls"] > 0


def uneven(rank):
    ranks.init("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
    model.register_comm_hook(zipccl.DynamiQState(bits=8.0, topology="direct"), zipccl.dynamiq_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for _ in range(2 + 2 * rank):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.module.parameters()]


def test_join():
    a, b = ranks.run(uneven, 2)
    assert all(same_bits(p, q) for p, q in zip(a, b, strict=True))


class Bucket:
    """What the hook asks of DDP's."""

    def __init__(self, values):
        self.values = values

    def buffer(self):
        return self.values

    def index(self):
        return 0

    def is_last(self):
        return True


def called_in_turn(rank):
    """Rank 1 calls its hook only when rank 0's has come back."""
    ranks.init("gloo")
    store = dist.distributed_c10d._get_default_store()
    state = zipccl.DynamiQState(topology="direct")
    state._channel()
    if rank == 1:
        store.get("rank 0 goes on")
    future = zipccl.dynamiq_hook(state, Bucket(torch.ones(20_000)))
    if rank == 0:
        assert not future.done()
        store.set("rank 0 goes on", "")
    return float((future.wait() - 1).abs().max())


def test_the_hook_does_not_wait_for_peers():
    for error in ranks.run(called_in_turn, 2):
        assert error < 0.1


def one_backward(rank, options):
    """Gradients of one step with the hook, and the exact averages."""
    ranks.init("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
    state = zipccl.DynamiQState(topology="direct", **options)
    model.register_comm_hook(state, zipccl.dynamiq_hook)
    torch.manual_seed(rank)
    x = torch.randn(8, 64)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
    parameters = list(model.module.parameters())
    exact = torch.autograd.grad(model.module(x).square().sum(), parameters)
    for g in exact:
        dist.all_reduce(g.div_(dist.get_world_size()))
    return found, dict(zip(found[0], exact, strict=True)), state.steps


def test_exempt_parameters_are_exact():
    (first, second), exact, _ = ranks.run(one_backward, 2, {"bits": 3.0, "exempt_1d": True, "exempt_below": 5000})[0]
    for name, gradient in exact.items():
        exempt = gradient.dim() == 1 or gradient.numel() < 5000
        assert torch.allclose(first[name], gradient, rtol=1e-5, atol=1e-6) == exempt, name
        assert torch.allclose(second[name], gradient, rtol=1e-5, atol=1e-6) == exempt, name


def test_warm_up_steps_are_not_packed():
    (first, second), exact, steps = ranks.run(one_backward, 2, {"bits": 3.0, "warmup_steps": 1})[0]
    assert all(torch.allclose(first[name], exact[name], rtol=1e-5, atol=1e-6) for name in exact)
    assert not torch.allclose(second["side.weight"], exact["side.weight"], rtol=1e-5, atol=1e-6)
    assert steps == 2


def resumed(rank, error_feedback):
    """Sums of 4 calls; the last two once in one go, once from a state that was saved, pickled and loaded."""
    options = {"bits": 3.0, "topology": "direct", "seed": 5, "error_feedback": error_feedback}
    state = zipccl.DynamiQState(**options)
    ranks.init("gloo")
    rows = [torch.randn(5000, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(4)]
    for row in rows[:2]:
        zipccl.dynamiq.all_reduce(row.clone(), state)
    saved, pickled = pickle.loads(pickle.dumps(state.state_dict())), pickle.dumps(state)
    one_go = [zipccl.dynamiq.all_reduce(row.clone(), state) for row in rows[2:]]
    fresh = zipccl.DynamiQState(**(options | {"seed": 0}))
    fresh.load_state_dict(saved)
    loaded = [zipccl.dynamiq.all_reduce(row.clone(), fresh) for row in rows[2:]]
    copy = pickle.loads(pickled)
    unpickled = [zipccl.dynamiq.all_reduce(row.clone(), copy) for row in rows[2:]]
    return one_go, loaded, unpickled


@pytest.mark.parametrize("error_feedback", [False, True])
def test_state_resumes_bit_for_bit(error_feedback):
    for one_go, loaded, unpickled in ranks.run(resumed, 2, error_feedback):
        assert all(same_bits(a, b) for a, b in zip(one_go, loaded, strict=True))
        assert all(same_bits(a, b) for a, b in zip(one_go, unpickled, strict=True))


class BucketOf(Bucket):
    def __init__(self, index, parameters):
        super().__init__(torch.empty(sum(p.numel() for p in parameters)))
        self._index, self._parameters = index, parameters

    def index(self):
        return self._index

    def parameters(self):
        return self._parameters


def test_residuals_follow_their_parameters():
    a, b, c = (torch.empty(*shape) for shape in ((6,), (2, 3), (4,)))
    kept = zipccl.dynamiq.Residuals()
    kept.of_bucket(BucketOf(0, [a, b])).copy_(torch.arange(10.0, 22.0))
    kept.of_bucket(BucketOf(1, [c])).copy_(torch.arange(30.0, 34.0))
    saved = kept.saved()
    assert kept.of_bucket(BucketOf(0, [c, b])).tolist() == [*range(30, 34), *range(16, 22)]  # rebuilt
    rebuilt = kept.of_bucket(BucketOf(1, [a]))
    assert rebuilt.tolist() == [*range(10, 16)]
    rebuilt.zero_()
    assert kept.of_bucket(BucketOf(1, [a])) is rebuilt  # now one tensor, written in place
    kept.load(saved)  # back to an earlier step, with the buckets of now
    assert kept.of_bucket(BucketOf(1, [a])).tolist() == [*range(10, 16)]
    restarted = zipccl.dynamiq.Residuals()
    restarted.load(saved)
    assert restarted.of_bucket(BucketOf(0, [a, b])).tolist() == [*range(10, 22)]
    assert restarted.of_bucket(BucketOf(1, [b, c])).tolist() == [*range(16, 22), 0, 0, 0, 0]  # c is 1.1 now, not 1.0


def fed_back(rank):
    """Averages of one gradient in step after step, across DDP's rebuilding of its buckets."""
    ranks.init("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
    state = zipccl.DynamiQState(bits=3.0, topology="direct", error_feedback=True)
    model.register_comm_hook(state, zipccl.dynamiq_hook)
    torch.manual_seed(rank)
    x = torch.randn(8, 64)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(20):
        model.zero_grad()
        model(x).square().sum().backward()
        for t, p in zip(total, model.parameters(), strict=True):
            t += p.grad / 20
    exact = torch.autograd.grad(model.module(x).square().sum(), list(model.module.parameters()))
    for g in exact:
        dist.all_reduce(g.div_(dist.get_world_size()))
    first = [p.grad for p in model.parameters()]
    return distance(total, exact), distance(first, exact)


def test_error_feedback_across_rebuilt_buckets():
    for mean, single in ranks.run(fed_back, 2):
        assert mean < single / 4


def names_and_residuals(rank):
    """Parameters' names, dimensions and what is carried for each, in a run and in one that goes on from it."""
    ranks.init("gloo")
    options = {"bits": 2.0, "topology": "direct", "error_feedback": True, "warmup_steps": 1, "exempt_1d": True}
    found, saved = [], None
    for steps in (3, 1):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
        state, names = zipccl.DynamiQState(**options), {}
        if saved is not None:
            state.load_state_dict(saved)

        def hook(state, bucket, names=names):
            future = zipccl.dynamiq_hook(state, bucket)
            known = state._residuals.names_of(bucket)
            names.update(zip(map(id, bucket.parameters()), known, strict=True))
            return future

        model.register_comm_hook(state, hook)
        torch.manual_seed(rank)
        x = torch.randn(8, 64)
        for _ in range(steps):
            model(x).square().sum().backward()
        saved = state.state_dict()
        parameters = list(model.module.parameters())
        carried = [saved["residuals"].get(names[id(p)]) for p in parameters]
        found.append(([names[id(p)] for p in parameters], [p.dim() for p in parameters], carried))
    return found


def test_error_feedback_with_warm_up_and_exemptions_goes_on():
    both = ranks.run(names_and_residuals, 2)
    for (names, dims, carried), (names_again, _, _) in both:
        assert names == names_again
        assert not any(kept.any() for kept, dim in zip(carried, dims, strict=True) if dim == 1)
    anything = [any(kept.any() for kept in rank[0][2]) for rank in both]
    assert any(anything)


def test_state_needs_no_process_group():
    state = zipccl.DynamiQState(seed=3)
    state.calls = 7
    other = zipccl.DynamiQState()
    other.load_state_dict(state.state_dict())
    assert (other.seed, other.calls) == (3, 7)
    with pytest.raises(ValueError, match="version"):
        other.load_state_dict({**state.state_dict(), "version": 99})


@pytest.mark.parametrize("widths, bits", [("fine", 1.4), ("paper", 2.5)])
def test_budgets_that_cannot_be_met_are_named(widths, bits):
    with pytest.warns(UserWarning, match=f"{bits} bits with widths='{widths}' are not enough"):
        zipccl.DynamiQState(bits=bits, widths=widths)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 0.5},
        {"bits": 17},
        {"topology": "tree"},
        {"widths": "coarse"},
        {"node_size": 0},
        {"node_size": 1.5},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"warmup_steps": -1},
        {"exempt_below": -1},
        {"block_bytes": 10},
        {"topology": "hierarchical", "error_feedback": True},
    ],
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)) if "error_feedback" not in wrong else "error_feedback"):
        zipccl.DynamiQState(**wrong)
