"""Which calls are accepted is settled by the call alone: the same whatever "auto" decides, and as with "zip".

Where gloo refuses a call, for its shapes, its gradients or because it has no such collective, zipccl either carries it
always or refuses it always, and then in gloo's words.
"""

import datetime
import re

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from samples import BF16
from zipccl import _C

N = 64


def t(*shape, grad=False, dtype=BF16):
    return torch.full(shape, dist.get_rank() + 1.0, dtype=dtype).requires_grad_(grad)


def strided(n):
    return torch.zeros(n, 2, dtype=BF16)[:, 0]


def cases(world: int) -> dict:
    """Name -> call(group)."""
    whole = world * N

    def gather(out, x):
        return lambda group: dist.all_gather_into_tensor(out(), x(), group=group)

    def gather_list(out, x):
        return lambda group: dist.all_gather([out(i) for i in range(world)], x(), group=group)

    def exchange(out, x, *splits):
        return lambda group: dist.all_to_all_single(out(), x(), *splits, group=group)

    def exchange_list(out, x):
        return lambda group: dist.all_to_all([out() for _ in range(world)], [x() for _ in range(world)], group=group)

    def broadcast(x):
        return lambda group: dist.broadcast(x(), 0, group=group)

    def scatter(out, x):
        return lambda group: dist.scatter(out(), [x()] * world if dist.get_rank() == 0 else None, 0, group=group)

    def collect(x, out):
        def call(group):
            dist.gather(x(), [out() for _ in range(world)] if dist.get_rank() == 0 else None, 0, group=group)

        return call

    def reduce_scatter(out, x, op=dist.ReduceOp.SUM):
        return lambda group: dist.reduce_scatter_tensor(out(), x(), op, group=group)

    def reduce_scatter_list(out, x):
        return lambda group: dist.reduce_scatter(out(), [x()] * world, group=group)

    def all_reduce(x, op=dist.ReduceOp.SUM):
        return lambda group: dist.all_reduce(x(), op, group=group)

    return {
        "all_gather": gather(lambda: t(whole), lambda: t(N)),
        "all_gather, stacked": gather(lambda: t(world, N), lambda: t(N)),
        "all_gather, other shape": gather(lambda: t(world * 8, 8), lambda: t(N)),
        "all_gather, one row": gather(lambda: t(1, whole), lambda: t(N)),
        "all_gather, scalars": gather(lambda: t(world), lambda: t()),
        "all_gather, input with gradient": gather(lambda: t(whole), lambda: t(N, grad=True)),
        "all_gather, output with gradient": gather(lambda: t(whole, grad=True), lambda: t(N)),
        "all_gather, strided and other shape": gather(lambda: torch.zeros(N, world, dtype=BF16).t(), lambda: t(N)),
        "all_gather, strided": gather(lambda: strided(whole), lambda: strided(N)),
        "all_gather, too short": gather(lambda: t(N), lambda: t(N)),
        "all_gather, other dtype": gather(lambda: t(whole), lambda: t(N, dtype=torch.float16)),
        "all_gather list": gather_list(lambda i: t(N), lambda: t(N)),
        "all_gather list, other shape": gather_list(lambda i: t(8, 8), lambda: t(N)),
        "all_gather list, one other shape": gather_list(lambda i: t(8, 8) if i else t(N), lambda: t(N)),
        "all_gather list, strided and other shape": gather_list(lambda i: t(16, 8)[::2], lambda: t(N)),
        "all_gather list, gradients": gather_list(lambda i: t(N, grad=True), lambda: t(N, grad=True)),
        "all_gather list, strided": gather_list(lambda i: strided(N), lambda: strided(N)),
        "all_to_all": exchange(lambda: t(whole), lambda: t(whole)),
        "all_to_all, other shape": exchange(lambda: t(world * 8, 8), lambda: t(whole)),
        "all_to_all, one row": exchange(lambda: t(1, whole), lambda: t(whole)),
        "all_to_all, gradients": exchange(lambda: t(whole, grad=True), lambda: t(whole, grad=True)),
        "all_to_all, strided": exchange(lambda: strided(whole), lambda: strided(whole)),
        "all_to_all, splits": exchange(lambda: t(world * 8, 8), lambda: t(whole), [8] * world, [N] * world),
        "all_to_all, wrong splits": exchange(lambda: t(whole), lambda: t(whole), [N] * world, [N + 1] * world),
        "all_to_all list, gradients": exchange_list(lambda: t(N, grad=True), lambda: t(N, grad=True)),
        "all_to_all list, other shape": exchange_list(lambda: t(8, 8), lambda: t(N)),
        "broadcast": broadcast(lambda: t(N)),
        "broadcast, gradient": broadcast(lambda: t(N, grad=True)),
        "broadcast, scalar": broadcast(lambda: t()),
        "broadcast, other shapes": broadcast(lambda: t(N) if dist.get_rank() else t(8, 8)),
        "scatter": scatter(lambda: t(N), lambda: t(N)),
        "scatter, gradients": scatter(lambda: t(N, grad=True), lambda: t(N, grad=True)),
        "scatter, other shape": scatter(lambda: t(8, 8), lambda: t(N)),
        "gather": collect(lambda: t(N), lambda: t(N)),
        "gather, gradients": collect(lambda: t(N, grad=True), lambda: t(N, grad=True)),
        "gather, other shape": collect(lambda: t(8, 8), lambda: t(N)),
        "reduce_scatter": reduce_scatter(lambda: t(N), lambda: t(whole)),
        "reduce_scatter, stacked": reduce_scatter(lambda: t(N), lambda: t(world, N)),
        "reduce_scatter, other shape": reduce_scatter(lambda: t(8, 8), lambda: t(whole)),
        "reduce_scatter, one row": reduce_scatter(lambda: t(N), lambda: t(1, whole)),
        "reduce_scatter, gradients": reduce_scatter(lambda: t(N, grad=True), lambda: t(whole, grad=True)),
        "reduce_scatter, too long": reduce_scatter(lambda: t(N), lambda: t(whole + world)),
        "reduce_scatter, mean": reduce_scatter(lambda: t(N), lambda: t(whole), dist.ReduceOp.AVG),
        "reduce_scatter list": reduce_scatter_list(lambda: t(N), lambda: t(N)),
        "reduce_scatter list, other shape": reduce_scatter_list(lambda: t(8, 8), lambda: t(N)),
        "reduce_scatter list, strided and other shape": reduce_scatter_list(lambda: t(N), lambda: t(16, 8)[::2]),
        "reduce_scatter list, gradients": reduce_scatter_list(lambda: t(N, grad=True), lambda: t(N, grad=True)),
        "all_reduce": all_reduce(lambda: t(N)),
        "all_reduce, gradient": all_reduce(lambda: t(N, grad=True)),
        "all_reduce, mean": all_reduce(lambda: t(N), dist.ReduceOp.AVG),
        "all_reduce, scalar": all_reduce(lambda: t()),
    }


ONE_SIDED = ("scatter, other shape", "gather, other shape")  # the root refuses, and the others wait for it


def answer(call, group) -> str:
    try:
        call(group)
    except Exception as error:
        first = str(error).split("\n")[0]
        # Which call or which rank it was; and lines of the log that came before.
        return re.sub(r"^zipccl \w+ \(.*? bytes\): |\[rank\d\]:|\[[FE]\d+ [\d:.]+ \w+\.cpp:\d+\] ", "", first)
    return "accepted"


def answers(rank, mode, times):
    ranks.init("gloo")
    found = {}

    def group(timeout):
        options = {} if mode == "gloo" else {"pg_options": zipccl.Options(**_options(mode))}
        backend = "gloo" if mode == "gloo" else "zipccl"
        return dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=timeout), **options)

    common = group(20)
    for name, call in cases(dist.get_world_size()).items():
        here, again = (group(1), 1) if name in ONE_SIDED else (common, times)
        found[name] = sorted({answer(call, here) for _ in range(again)})
    return found


def _options(mode: str) -> dict:
    collectives = dict.fromkeys(zipccl.options.COLLECTIVES, mode)
    if mode == "raw":  # something must be zipped, or the group has no second way to carry what gloo refuses
        collectives["all_gather"] = "auto"
    return {"min_bytes": 10**9 if mode == "raw" else 0} | collectives


@pytest.fixture(scope="module")
def of_gloo():
    return ranks.run(answers, 2, "gloo", 1)


def compare(found, of_gloo) -> None:
    for rank in range(2):
        for name, said in found[rank].items():
            (gloo,) = of_gloo[rank][name]
            assert len(said) == 1, (name, said)
            if name not in ONE_SIDED or rank == 0:
                assert said in (["accepted"], [gloo]), (name, said, gloo)
                assert said == ["accepted"] or gloo != "accepted", name


def test_auto_answers_as_zip_does(of_gloo):
    zipped = ranks.run(answers, 2, "zip", 2)
    compare(zipped, of_gloo)
    auto = ranks.run(answers, 2, "auto", _C.trial_calls + 2)
    compare(auto, of_gloo)
    for z, a in zip(zipped, auto, strict=True):
        assert [n for n in z if z[n] != a[n] and n not in ONE_SIDED] == []


def test_raw_refuses_in_gloos_words(of_gloo):
    compare(ranks.run(answers, 2, "raw", 2), of_gloo)


def check_overlap(rank, mode):
    """An output whose values share memory is refused before anything moves; a source may be one value, spread."""
    ranks.init("zipccl", timeout=5, pg_options=zipccl.Options(broadcast=mode, min_bytes=0))
    spread = t(1).expand(N)
    if rank == 1:
        with pytest.raises(_C.Error, match="share one place in memory"):
            dist.broadcast(spread, 0)
    if rank == 0:
        with pytest.raises((RuntimeError, _C.Error)):  # times out: the other never came
            dist.broadcast(spread, 0)
            dist.broadcast(t(N), 1)


def check_spread_source(rank, mode):
    ranks.init("zipccl", pg_options=zipccl.Options(broadcast=mode, min_bytes=0))
    for _ in range(8):
        x = t(1).expand(N) if rank == 0 else t(N)
        dist.broadcast(x, 0)
        assert x.tolist() == [1] * N


@pytest.mark.parametrize("mode", ["auto", "zip"])
@pytest.mark.parametrize("check", [check_overlap, check_spread_source])
def test_outputs_that_overlap_themselves(check, mode):
    ranks.run(check, 2, mode)
