"""A timeout set when a group exists, as trainers do after their first step, counts for every kind of call."""

import datetime
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from torch.distributed import distributed_c10d as c10d

LONG, SHORT = 600, 2  # seconds; a rank that waited for the first would outlast the test
EVERYTHING = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce")


def wait_in_vain(rank, attached, mode):
    """The call on rank 0 that rank 1 does not make."""
    options = zipccl.Options(**dict.fromkeys(EVERYTHING, mode), min_bytes=0)
    if attached:
        ranks.init("gloo", timeout=LONG)
        zipccl.attach(options=options)
    else:
        ranks.init("zipccl", timeout=LONG, pg_options=options)
    x = torch.ones(1000, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(torch.empty(2000, dtype=torch.bfloat16), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c10d._set_pg_timeout(datetime.timedelta(seconds=SHORT), None)
    store = c10d._get_default_store()
    if rank == 0:
        try:
            dist.all_gather_into_tensor(torch.empty(2000, dtype=torch.bfloat16), x)
        except RuntimeError as error:
            store.set("gave up", str(error))
    store.wait(["gave up"], datetime.timedelta(seconds=LONG))
    return store.get("gave up").decode()


@pytest.mark.parametrize("mode", ["raw", "zip"])
@pytest.mark.parametrize("attached", [False, True], ids=["zipccl", "attached"])
def test_set_pg_timeout(attached, mode):
    texts = ranks.run(wait_in_vain, 2, attached, mode, timeout=45)
    assert all("tim" in text.lower() for text in texts), texts


def set_of_other_groups(rank):
    ranks.init("zipccl", timeout=LONG)
    short = datetime.timedelta(seconds=SHORT)
    plain, outside = dist.new_group(backend="gloo"), dist.new_group([1])
    c10d._set_pg_timeout(short, plain)
    assert plain._get_backend(torch.device("cpu")).options._timeout == short
    group = c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert group.inner("cpu").options._timeout == datetime.timedelta(seconds=LONG)
    if rank == 0:
        with pytest.raises(ValueError, match="Invalid process group"):
            c10d._set_pg_timeout(short, outside)


def test_other_groups_are_torchs_own():
    ranks.run(set_of_other_groups, 2)


def dynamiq_in_vain(rank, backend):
    ranks.init(backend, timeout=LONG)
    state, x = zipccl.DynamiQState(), torch.ones(10_000)
    zipccl.dynamiq.all_reduce(x, state)
    c10d._set_pg_timeout(datetime.timedelta(seconds=SHORT), None)
    store = c10d._get_default_store()
    if rank == 0:
        with pytest.raises(zipccl.Error, match="(?i)dynamiq all_reduce .*timed out"):
            zipccl.dynamiq.all_reduce(x, state)
        store.set("gave up", "")
    store.wait(["gave up"], datetime.timedelta(seconds=LONG))


@pytest.mark.parametrize("backend", ["zipccl", "gloo"])
def test_dynamiq(backend):
    ranks.run(dynamiq_in_vain, 2, backend, timeout=45)
