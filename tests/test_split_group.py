"""Groups split from zipccl groups, as torch.distributed.split_group() and DeviceMesh make them.

torch splits only groups that are bound to a device, which it lets no CPU be. On the CPU the groups here are bound to a
GPU that is not there while they are split; the inner backends are gloo all the same.
"""

import copy
import datetime

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits
from samples import BF16, random_bits
from torch.distributed.device_mesh import init_device_mesh
from zipccl import _C

CPU = torch.device("cpu")
ALL_ZIP = {name: "zip" for name in ("all_gather", "all_to_all", "broadcast", "scatter", "gather")}
OF_NEW_GROUPS = {f"ZIPCCL_{name.upper()}": mode for name, mode in ALL_ZIP.items()}  # environment


def start(device="cpu", **options):
    where = ranks.device(device)
    options = zipccl.Options(**(ALL_ZIP | options))
    ranks.init("zipccl", pg_options=options, **({"device_id": where} if device == "cuda" else {}))
    return where


def split_group(parts, parent=None, **kwargs):
    """dist.split_group()"""
    default = dist.group.WORLD
    if default.bound_device_id is not None:
        return dist.split_group(parent, parts, **kwargs)
    default.bound_device_id = torch.device("cuda", 0)
    group = dist.split_group(parent, parts, **kwargs)
    default.bound_device_id = None
    if group is not None:
        group.bound_device_id = None
    return group


def check_collectives(group, members, where=CPU, zips=True):
    """Bit for bit, between these global ranks in this order."""
    me, world, count = dist.get_rank(group), dist.get_world_size(group), 3000
    assert [dist.get_global_rank(group, r) for r in range(world)] == members == dist.get_process_group_ranks(group)
    assert members[me] == dist.get_rank()
    out = torch.empty(world * count, dtype=BF16, device=where)
    dist.all_gather_into_tensor(out, random_bits(members[me], count).to(where), group=group)
    assert same_bits(out, torch.cat([random_bits(r, count) for r in members]))
    x = random_bits(10 + members[me], world * count).to(where)
    dist.all_to_all_single(torch.empty_like(x), x, group=group)
    dist.broadcast(t := random_bits(members[me], count).to(where), members[-1], group=group)
    assert same_bits(t, random_bits(members[-1], count))
    dist.all_reduce(s := torch.ones(5, device=where), group=group)
    assert s.tolist() == [world] * 5
    dist.all_gather_object(objects := [None] * world, members[me], group=group)
    assert objects == members
    dist.barrier(group)
    if zips and world > 1:
        assert zipccl.stats(group)["all_gather"]["zipped_calls"] == 1


def split(parts, parent=None):
    """parts: of ranks of the parent. Returns the group (None: in no part) and its global ranks."""
    group = split_group(parts, parent)
    me = dist.get_rank(parent)
    mine = [sorted(part) for part in parts if me in part]
    assert (group is None) == (not mine)
    return group, [dist.get_global_rank(parent or dist.group.WORLD, r) for r in mine[0]] if mine else []


# ---- the CPU ---------------------------------------------------------------------------------------------------


def check_parts(rank, parts):
    start()
    group, members = split(parts)
    if group is not None:
        check_collectives(group, members)
        assert dist.get_backend(group) == "zipccl" and group.group_name != dist.group.WORLD.group_name
        backends = {group._get_backend(torch.device(d)) for d in ("cpu", "cuda")}
        assert len(backends) == 1 and type(backends.pop()) is _C.ZipBackend
        dist.destroy_process_group(group)
    check_collectives(dist.group.WORLD, list(range(dist.get_world_size())))  # none the worse, nor counted with
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "world, parts",
    [
        (1, [[0]]),
        (2, [[0], [1]]),
        (2, [[1, 0]]),  # torch sorts them
        (3, [[0, 2]]),  # rank 1 in none
        (4, [[0, 2], [1, 3]]),
        (4, [[3], [0, 1, 2]]),
        (4, [[2, 1]]),
    ],
)
def test_parts(world, parts):
    ranks.run(check_parts, world, parts)


def check_again_and_again(rank):
    """Parts of parts, the same part twice at once, and new groups beside them."""
    start()
    first, members = split([[0, 1, 2], [3]])
    again, _ = split([[0, 1, 2], [3]])
    check_collectives(first, members)
    check_collectives(again, members)
    if rank < 3:
        inner, inner_members = split([[0, 2]], first)
        if inner is not None:
            check_collectives(inner, inner_members)
    beside = dist.new_group([1, 3])
    if rank in (1, 3):
        check_collectives(beside, [1, 3])
        split([[0], [1]], beside)
    work = dist.all_gather_into_tensor(
        torch.empty(len(members) * 50_000, dtype=BF16), random_bits(rank, 50_000), group=first, async_op=True
    )
    work.wait()
    dist.destroy_process_group()


def test_parts_of_parts():
    ranks.run(check_again_and_again, 4, env=OF_NEW_GROUPS)


def check_new_group_of_a_bound_group(rank):
    """torch asks the default group's backend what new groups may be split from, by methods that only NCCL has."""
    start()
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    assert dist.distributed_c10d._get_split_source(dist.group.WORLD) is None
    for backend in (None, "gloo"):
        group = dist.new_group([0, 2], backend=backend)
        if rank != 1:
            dist.all_reduce(t := torch.ones(2), group=group)
            assert t.tolist() == [2, 2]
    dist.group.WORLD.bound_device_id = None


def test_new_group_of_a_bound_group():
    ranks.run(check_new_group_of_a_bound_group, 3)


def check_inherited(rank):
    """A part has its parent's options, those of the moment, and a timeout and a name of its own."""
    start(all_gather="auto", checksum=True)
    with zipccl.override(broadcast="raw"):
        group = split_group([[0, 1]], timeout=datetime.timedelta(seconds=7), group_desc="pair")
    parent, part = dist.group.WORLD._get_backend(CPU), group._get_backend(CPU)
    assert part.settings()["modes"] == parent.settings()["modes"] | {"broadcast": "raw"}
    assert part.settings()["checksum"] and part.can_zip_cpu()
    gloo = part.inner("cpu")
    assert gloo.options._timeout.total_seconds() == 7 and parent.inner("cpu").options._timeout.total_seconds() == 30
    assert gloo.options.group_name == group.group_name and group.group_desc == "pair"
    assert gloo.options.global_ranks_in_group == [0, 1]
    assert part.options._timeout.total_seconds() == 7 and part.options.backend == "zipccl"
    other = copy.deepcopy(part.options)
    other.group_name = "another"
    assert part.options.group_name != "another"
    # As torch's C++ callers do, without options: named after the ranks.
    bare = dist.group.WORLD.split_group([0, 1])
    bare.allreduce([t := torch.ones(2)]).wait()
    assert t.tolist() == [2, 2] and bare.size() == 2


def test_what_a_part_inherits():
    ranks.run(check_inherited, 2)


def check_raw_group(rank):
    """A group that can never zip has parts that cannot either."""
    start(**{name: "raw" for name in ALL_ZIP})
    group, members = split([[0, 1]])
    check_collectives(group, members, zips=False)
    assert not group._get_backend(CPU).can_zip_cpu()


def test_parts_of_a_raw_group():
    ranks.run(check_raw_group, 2)


def check_device_mesh(rank, device):
    """On CUDA DeviceMesh splits; on the CPU it makes new groups."""
    where = start(device)
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for name in mesh.mesh_dim_names:
        check_collectives(mesh[name].get_group(), mesh[name].mesh.tolist(), where, zips=_zips(device))


def _zips(device) -> bool:
    return device == "cpu" or zipccl._C.cuda_version is not None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_device_mesh(device):
    ranks.run(check_device_mesh, 4, device, timeout=60, env=OF_NEW_GROUPS)


# ---- CUDA: by NCCL's own split ---------------------------------------------------------------------------------


def check_cuda(rank, parts, attached):
    where = ranks.device("cuda")
    if attached:
        ranks.init("nccl", device_id=where)
        zipccl.attach(options=zipccl.Options(**ALL_ZIP))
    else:
        start("cuda")
    nccl = dist.group.WORLD._get_backend(where).inner("cuda")
    before = nccl.comm_split_count()
    group, members = split(parts)
    assert nccl.comm_split_count() == before + 1
    if group is not None:
        check_collectives(group, members, where, zips=_zips("cuda"))
        if not attached:
            out = torch.empty(len(members) * 500, dtype=BF16)
            dist.all_gather_into_tensor(out, random_bits(rank, 500), group=group)
            assert same_bits(out, torch.cat([random_bits(r, 500) for r in members]))
    new = dist.new_group(parts[0])  # torch has ranks outside call perform_nocolor_split()
    if rank in parts[0]:
        check_collectives(new, sorted(parts[0]), where, zips=False)  # options of its own
    plain = dist.new_group(parts[0], backend="nccl")
    if rank in parts[0]:
        dist.all_reduce(t := torch.ones(2, device=where), group=plain)
        assert t.tolist() == [len(parts[0])] * 2
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.parametrize("attached, parts", [(False, [[0, 2]]), (True, [[1], [2, 0]])], ids=["zipccl", "attached"])
def test_cuda(parts, attached):
    ranks.run(check_cuda, 3, parts, attached, timeout=60)
