"""override() from several threads, attach(new_groups=True) across the life of the default group, mistakes with both."""

import importlib
import threading

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl


def settings(group=None):
    (backend,) = zipccl.backend.zip_backends(group)
    return backend.settings()


def overlapping(rank):
    ranks.init("zipccl", pg_options=zipccl.Options(min_bytes=7))
    before = settings()
    opened, closed = threading.Event(), threading.Event()

    def first():
        with zipccl.override(all_gather="zip", min_bytes=1):
            opened.set()
            assert closed.wait(30)

    # The thread opens first and closes last; then it opens first and closes first.
    for closes_last in (True, False):
        opened.clear(), closed.clear()
        thread = threading.Thread(target=first)
        thread.start()
        assert opened.wait(30)
        assert settings()["modes"]["all_gather"] == "zip"  # of the group, so in this thread too
        with zipccl.override(all_gather="raw", broadcast="zip"):
            assert settings()["modes"] == before["modes"] | {"all_gather": "raw", "broadcast": "zip"}
            assert settings()["min_bytes"] == 1
            if not closes_last:
                closed.set()
                thread.join()
                assert settings()["modes"] == before["modes"] | {"all_gather": "raw", "broadcast": "zip"}
                assert settings()["min_bytes"] == 7
        if closes_last:
            assert settings()["modes"] == before["modes"] | {"all_gather": "zip"}
            closed.set()
            thread.join()
        assert settings() == before


def test_overrides_close_in_any_order():
    ranks.run(overlapping, 1)


def many_threads(rank):
    ranks.init("zipccl")
    before = settings()
    failed = []

    def work(seed):
        try:
            for i in range(300):
                with zipccl.override(min_bytes=seed + i), zipccl.override(all_gather=("zip", "raw")[i % 2]):
                    assert settings() != before
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(1000 * seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and settings() == before
    assert not importlib.import_module("zipccl.attach")._overridden


def test_overrides_of_many_threads_leave_nothing_behind():
    ranks.run(many_threads, 1)


def attached_within(rank):
    ranks.init("gloo")
    zipccl.attach(options=zipccl.Options(min_bytes=7))
    with zipccl.override(all_gather="raw"):
        zipccl.attach(options=zipccl.Options(min_bytes=9, all_gather="zip"))
        assert (settings()["min_bytes"], settings()["modes"]["all_gather"]) == (9, "raw")
    assert (settings()["min_bytes"], settings()["modes"]["all_gather"]) == (9, "zip")


def test_attach_within_an_override_stays():
    ranks.run(attached_within, 2)


def is_attached(group=None):
    try:
        return bool(zipccl.backend.zip_backends(group))
    except ValueError:
        return False


def born_again(rank):
    ranks.init("gloo")
    zipccl.attach(options=zipccl.Options(min_bytes=7), new_groups=True)
    dist.destroy_process_group()
    ranks.init("gloo")
    group = dist.new_group()
    assert is_attached() and is_attached(group)  # as attach() says
    assert settings()["min_bytes"] == settings(group)["min_bytes"] == 7
    out = torch.empty(4)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out.tolist() == [0, 0, 1, 1]
    dist.destroy_process_group()

    zipccl.detach(new_groups=True)  # without any group
    with pytest.raises(ValueError, match="Default process group"):
        zipccl.detach()
    ranks.init("gloo")
    assert not is_attached() and not is_attached(dist.new_group())


def test_attach_to_new_groups_lasts_until_detach():
    ranks.run(born_again, 2)


def named(rank):
    ranks.init("gloo")
    zipccl.attach(options=zipccl.Options(reduce_scatter="zip", min_bytes=0))
    name, x = dist.group.WORLD.group_name, torch.ones(2000)
    with pytest.raises(zipccl.Error, match=rf"reduce_scatter \(rank {rank} of 2, group {name}, .*another reduce op"):
        dist.reduce_scatter_tensor(x[:1000], x, op=dist.ReduceOp.AVG if rank == 1 else dist.ReduceOp.SUM)


def test_errors_name_the_group():
    ranks.run(named, 2)


def meaningless(rank):
    ranks.init("gloo")
    for options in ({"inner": "cpu:gloo"}, {"nccl_options": dist.ProcessGroupNCCL.Options()}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} means nothing to attach"):
            zipccl.attach(options=zipccl.Options(**options))
    assert not is_attached()
    zipccl.attach()
    assert is_attached()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_options_that_mean_nothing_to_attach():
    ranks.run(meaningless, 2)
    ranks.run(meaningless, 2, env={"ZIPCCL_INNER": "gloo"})  # for groups of zipccl's own


def lonely(rank, before):
    ranks.init("gloo", timeout=1)
    if before:
        zipccl.attach()
    if rank == 0:
        with pytest.raises(RuntimeError, match="every rank of the group must call it .*Wait timeout") as caught:
            zipccl.attach()
        assert f"group {dist.group.WORLD.group_name!r}" in str(caught.value)


@pytest.mark.parametrize("before", [False, True])
def test_attach_on_one_rank_alone(before):
    ranks.run(lonely, 2, before)
