"""What only a GPU shows: collectives of CUDA tensors over NCCL, streams, memory, graphs. Several ranks share a GPU.

Values are compared as integers, against what every rank can compute of the others' inputs.
"""

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(zipccl._C.cuda_version is None, reason="needs a build with CUDA"),
]

BF16 = torch.bfloat16
ALL_ZIP = {name: "zip" for name in zipccl.options.COLLECTIVES}
WORLDS = [2, 3]


def start(**options) -> torch.device:
    where = ranks.device("cuda")
    ranks.init("zipccl", pg_options=zipccl.Options(**(ALL_ZIP | {"min_bytes": 0} | options)))
    return where


def values(seed: int, count: int, dtype=BF16) -> torch.Tensor:
    """On the CPU, so that every rank can make every rank's."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def any_bits(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-32768, 32768, (count,), generator=generator, dtype=torch.int32).to(torch.int16).view(BF16)


# ---- values ----------------------------------------------------------------------------------------------------


def check_all_to_all(rank, design, checksum):
    where, world = start(all_to_all_design=design, checksum=checksum), dist.get_world_size()
    counts = torch.randint(0, 9000, (world, world), generator=torch.Generator().manual_seed(5))
    counts[0, world - 1] = 0
    counts[1] = 0  # sends nothing at all
    for make in (values, any_bits):
        sends, receives = counts[rank].tolist(), counts[:, rank].tolist()
        for _ in range(3):
            output = torch.empty(sum(receives), dtype=BF16, device=where)
            dist.all_to_all_single(output, make(rank, sum(sends)).to(where), receives, sends)
            parts = [make(r, int(counts[r].sum())).split(counts[r].tolist())[rank] for r in range(world)]
            assert same_bits(output, torch.cat(parts))
        whole = make(rank, world * 5001).to(where)
        output = torch.empty_like(whole)
        dist.all_to_all_single(output, whole)
        assert same_bits(output, torch.cat([make(r, world * 5001).chunk(world)[rank] for r in range(world)]))
        outputs = [torch.empty(r + 100, dtype=BF16, device=where)[::1] for r in range(world)]
        dist.all_to_all(outputs, [make(rank, rank + 100).to(where)] * world)
        assert all(same_bits(out, make(r, r + 100)) for r, out in enumerate(outputs))
    tokens = torch.arange(world, device=where)
    swapped = torch.empty_like(tokens)
    dist.all_to_all_single(swapped, tokens)
    assert swapped.tolist() == [rank] * world
    return zipccl.stats()["all_to_all"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("design, checksum", [(1, False), (2, False), ("auto", True)])
def test_all_to_all(world, design, checksum):
    for moved in ranks.run(check_all_to_all, world, design, checksum, timeout=120):
        assert 0 < moved["zipped_calls"] < moved["calls"]


def check_sizes_ahead(rank, inner):
    """From the second call on, as much goes at once as frames are expected to have; a rest where they have more."""
    where, world = start(inner=inner), dist.get_world_size()

    def constant(seed, count):
        return torch.full((count,), float(seed % 7), dtype=BF16)

    def some_rank(seed, count):  # ranks with frames of other kinds: all pad to the largest
        return (any_bits if seed % 3 == 0 else constant)(seed, count)

    kinds = [values, values, any_bits, constant, values, some_rank, values, values]
    sizes = [50_000, 1, 4095, 4096, 300_001]
    for step, make in enumerate(kinds):
        for count in sizes:
            output = torch.empty(world * count, dtype=BF16, device=where)
            dist.all_gather_into_tensor(output, make(7 * step + rank, count).to(where))
            assert same_bits(output, torch.cat([make(7 * step + r, count) for r in range(world)]))
        outputs = [torch.empty(world * count, dtype=BF16, device=where) for count in sizes]
        with dist._coalescing_manager(device=where):  # one inner call of many, some of which have no rest
            for output, count in zip(outputs, sizes, strict=True):
                dist.all_gather_into_tensor(output, make(step + 11 * rank, count).to(where))
        for output, count in zip(outputs, sizes, strict=True):
            assert same_bits(output, torch.cat([make(step + 11 * r, count) for r in range(world)]))
    zipccl.stats().reset()
    for _ in range(4):
        output = torch.empty(world * 300_001, dtype=BF16, device=where)
        dist.all_gather_into_tensor(output, values(rank, 300_001).to(where))
    stats = zipccl.stats()["all_gather"]
    assert stats["zipped_calls"] == 4 and stats["wire_bytes"] < 0.78 * stats["raw_bytes"]


@pytest.mark.parametrize("inner", [None, "cuda:nccl"], ids=["sizes by the faster", "sizes by NCCL"])
@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_sends_ahead_of_sizes(world, inner):
    ranks.run(check_sizes_ahead, world, inner, timeout=90)


def reference_sum(inputs, op):
    total = None
    for x in inputs:
        x = x.float() * (0.5 if op == "premul" else 1.0)
        total = x if total is None else total + x
    return total / len(inputs) if op == "avg" else total


def reduce_op(op):
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}.get(op) or dist._make_nccl_premul_sum(0.5)


def check_reductions(rank, wire):
    where, world = start(wire_dtype=wire), dist.get_world_size()
    for dtype in (BF16, torch.float32, torch.float16):
        sent_as = wire if wire and wire.itemsize < dtype.itemsize else dtype  # only wider inputs are narrowed
        for op in ("sum", "avg", "premul"):
            for count in (1, 1023, 40001):
                inputs = [values(r, world * count, dtype) for r in range(world)]
                sent = [x.to(sent_as) for x in inputs]
                output = torch.empty(count, dtype=dtype, device=where)
                dist.reduce_scatter_tensor(output, inputs[rank].to(where), op=reduce_op(op))
                expected = reference_sum([x.chunk(world)[rank] for x in sent], op).to(dtype)
                assert same_bits(output, expected), (dtype, op, count)

                tensor = inputs[rank][: world * count - 1].to(where)
                dist.all_reduce(tensor, op=reduce_op(op))
                expected = reference_sum([x[: world * count - 1] for x in sent], op).to(sent_as).to(dtype)
                assert same_bits(tensor, expected), (dtype, op, count)
    big = torch.tensor([rank], device=where)
    dist.all_reduce(big, op=dist.ReduceOp.MAX)
    assert big.item() == world - 1
    return zipccl.stats()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("wire", [None, BF16], ids=["own", "bf16"])
def test_reductions_are_the_fixed_order_sum(world, wire):
    for moved in ranks.run(check_reductions, world, wire, timeout=120):
        assert moved["reduce_scatter"]["zipped_calls"] == 27


def check_max_sms(rank):
    where, world, count = start(max_sms=2, checksum=True), dist.get_world_size(), 100_001
    for make in (values, any_bits):
        gathered = torch.empty(world * count, dtype=BF16, device=where)
        dist.all_gather_into_tensor(gathered, make(rank, count).to(where))
        assert same_bits(gathered, torch.cat([make(r, count) for r in range(world)]))
    inputs = [values(r, world * count) for r in range(world)]
    output = torch.empty(count, dtype=BF16, device=where)
    dist.reduce_scatter_tensor(output, inputs[rank].to(where))
    assert same_bits(output, reference_sum([x.chunk(world)[rank] for x in inputs], "sum").to(BF16))
    return zipccl.stats()


def test_few_multiprocessors():
    for moved in ranks.run(check_max_sms, 2, timeout=120):
        assert moved["all_gather"]["zipped_calls"] == 2 and moved["reduce_scatter"]["zipped_calls"] == 1


def check_rooted(rank):
    where, world = start(), dist.get_world_size()
    for root in range(world):
        for make in (values, any_bits):
            tensor = make(rank, 7777).to(where)
            dist.broadcast(tensor, root)
            assert same_bits(tensor, make(root, 7777))
            mine = torch.empty(777, dtype=BF16, device=where)
            parts = [make(r, 777).to(where) for r in range(world)] if rank == root else None
            dist.scatter(mine, parts, src=root)
            assert same_bits(mine, make(rank, 777))
            gathered = [torch.empty(777, dtype=BF16, device=where) for _ in range(world)] if rank == root else None
            dist.gather(make(rank, 777).to(where), gathered, dst=root)
            if rank == root:
                assert all(same_bits(t, make(r, 777)) for r, t in enumerate(gathered))
    dist.barrier()  # the others have nothing to wait for, and must not leave before the root has received
    return zipccl.stats()


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_scatter_gather(world):
    for moved in ranks.run(check_rooted, world, timeout=120):
        assert all(moved[op]["zipped_calls"] == 2 * world for op in ("broadcast", "scatter", "gather"))


def check_strided(rank, mode):
    """NCCL's refusal, whether the call would be zipped or not."""
    where, world = start(**dict.fromkeys(ALL_ZIP, mode)), dist.get_world_size()
    strided = torch.zeros(1000, 2, dtype=BF16, device=where)[:, 0]
    dense = torch.zeros(world * 1000, dtype=BF16, device=where)
    calls = [
        lambda: dist.all_gather_into_tensor(dense, strided),
        lambda: dist.broadcast(strided, 0),
        lambda: dist.all_reduce(strided),
    ]
    for _ in range(zipccl._C.trial_calls + 1 if mode == "auto" else 1):
        for call in calls:
            with pytest.raises((ValueError, RuntimeError), match="contiguous"):
                call()
    parts, wide = list(dense.chunk(world)), torch.zeros(world * 1000, 2, dtype=BF16, device=where)[:, 0]
    for call in (  # NCCL would not notice
        lambda: dist.reduce_scatter_tensor(parts[0], wide),
        lambda: dist.reduce_scatter_tensor(strided, dense),
        lambda: dist.scatter(strided, parts if rank == 0 else None, 0),
    ):
        with pytest.raises(zipccl.Error, match=rf"\(rank {rank} of {world}, .*gaps between its values"):
            call()
    outs = [torch.zeros(1000, 2, dtype=BF16, device=where)[:, 0] for _ in range(world)]  # these NCCL's group takes
    dist.all_gather(outs, values(rank, 1000).to(where))
    assert all(same_bits(out, values(r, 1000)) for r, out in enumerate(outs))
    moved = torch.empty(world, 1000, dtype=BF16, device=where)  # but any shape of that many values
    dist.all_gather_into_tensor(moved, values(rank, 1000).to(where).view(10, 100))
    assert same_bits(moved, torch.stack([values(r, 1000) for r in range(world)]))


@pytest.mark.parametrize("mode", ["zip", "auto"])
def test_strided_tensors_are_refused_as_by_nccl(mode):
    ranks.run(check_strided, 2, mode, timeout=60)


def check_memory_formats(rank, mode, who):
    """NCCL moves the memory of channels-last tensors as it lies, whatever the other ranks' format. So must we."""
    where, world = start(**dict.fromkeys(ALL_ZIP, mode)), dist.get_world_size()
    inner = dist.new_group(backend="nccl")

    def image(seed, rows=2 * world):
        t = torch.randint(-8, 8, (rows, 4, 24, 24), generator=torch.Generator().manual_seed(seed)).to(BF16).to(where)
        return t.to(memory_format=torch.channels_last) if rank in who else t

    def otherwise(t):
        return t.contiguous() if rank in who else t.to(memory_format=torch.channels_last)

    def whole(group):
        dist.all_gather_into_tensor(out := image(9, world * 2), image(rank, 2), group=group)
        return [out]

    def whole_list(group, more=0):
        outs = [image(9, 2 + more * r) for r in range(world)]
        dist.all_gather(outs, image(rank, 2 + more * rank), group=group)
        return outs

    def exchange(group, *splits):
        dist.all_to_all_single(out := image(9), image(rank), *splits, group=group)
        return [out]

    def exchange_list(group):
        outs = [image(9, 2) for _ in range(world)]
        dist.all_to_all(outs, [image(rank + 7 * r, 2) for r in range(world)], group=group)
        return outs

    def one(group):
        dist.broadcast(out := image(rank), 1, group=group)
        return [out]

    def parts(group, change=lambda t: t):
        ins = [change(image(r, 2)) for r in range(world)] if rank == 0 else None
        dist.scatter(out := image(9, 2), ins, 0, group=group)
        return [out]

    def collected(group, change=lambda t: t):
        outs = [change(image(9, 2)) for _ in range(world)] if rank == 0 else None
        dist.gather(image(rank, 2), outs, 0, group=group)
        return outs or []

    def total(group):
        dist.all_reduce(out := image(rank), group=group)
        return [out]

    def total_part(group):
        dist.reduce_scatter_tensor(out := image(9, 2), image(rank), group=group)
        return [out]

    def total_transposed(group):  # not dense in any memory format, but without gaps
        x, out = image(rank).reshape(2 * world, -1), image(9, 2).reshape(2, -1)
        dist.reduce_scatter_tensor(out, x.t() if rank in who else x, group=group)
        return [out]

    rows = [2] * world
    calls = [
        whole,
        whole_list,
        lambda g: whole_list(g, more=1),
        exchange,
        lambda g: exchange(g, rows, rows),
        exchange_list,
        one,
        parts,
        lambda g: parts(g, otherwise),
        collected,
        lambda g: collected(g, otherwise),
        total,
        total_part,
        total_transposed,
    ]
    wrong = set()
    for number, call in enumerate(calls):
        truth = call(inner)
        for _ in range(zipccl._C.trial_calls + 2 if mode == "auto" else 1):
            for out, expected in zip(call(None), truth, strict=True):
                if out.stride() != expected.stride() or not same_bits(out, expected):
                    wrong.add(number)
    assert not wrong, wrong
    if mode == "zip":  # by value; what torch's NCCL makes of this is no sum at all
        dist.reduce_scatter(out := image(9, 2), [image(rank + 7 * r, 2) for r in range(world)])
        assert torch.equal(out, sum(image(r + 7 * rank, 2) for r in range(world)))
    torch.cuda.synchronize()
    dist.barrier()
    return zipccl.stats()


@pytest.mark.parametrize("who", [(0,), (0, 1)], ids=["one", "all"])
@pytest.mark.parametrize("mode", ["zip", "auto", "raw"])
def test_memory_formats(mode, who):
    for moved in ranks.run(check_memory_formats, 2, mode, who, timeout=120):
        assert mode != "zip" or all(s["zipped_calls"] == s["calls"] for s in moved.values()), moved


def check_barrier(rank):
    """A barrier of a group that only made zipped calls is NCCL's, and waits for the GPU."""
    where, world, count = start(), dist.get_world_size(), 1 << 22
    out = torch.empty(world * count, dtype=BF16, device=where)
    for step in range(3):
        torch.cuda._sleep(50_000_000 if rank == 0 else 0)
        work = dist.all_gather_into_tensor(out, values(step + rank, count).to(where), async_op=True)
        dist.barrier()
        with torch.cuda.stream(torch.cuda.Stream(where)):  # waits for nothing
            found = out.cpu()
        work.wait()
        assert same_bits(found, torch.cat([values(step + r, count) for r in range(world)]))


def test_a_barrier_waits_for_zipped_calls():
    ranks.run(check_barrier, 2, timeout=60)


# ---- streams ---------------------------------------------------------------------------------------------------


def check_streams(rank):
    """Calls on side streams behind slow kernels; inputs overwritten and outputs read as soon as that is allowed."""
    where, world = start(), dist.get_world_size()
    side = torch.cuda.Stream(where)
    for step in range(5):
        with torch.cuda.stream(side):
            source = values(100 * step + rank, 1 << 20).to(where)
            torch.cuda._sleep(5_000_000)
            shard = source + 0  # ready only after the sleep
            out = torch.empty(world << 20, dtype=BF16, device=where)
            work = dist.all_gather_into_tensor(out, shard, async_op=True)
            torch.cuda._sleep(1_000_000)
            work.wait()
            shard.fill_(-1)
            copy = out.clone()
            out.fill_(-2)
        torch.cuda.current_stream().wait_stream(side)
        assert same_bits(copy, torch.cat([values(100 * step + r, 1 << 20) for r in range(world)]))
    for step in range(5):  # nobody waits, everything is dropped at once
        shard = values(step + rank, 1 << 18).to(where)
        dist.all_gather_into_tensor(torch.empty(world << 18, dtype=BF16, device=where), shard, async_op=True)
        del shard
        torch.full((1 << 18,), -1.0, dtype=BF16, device=where)
    torch.cuda.synchronize()


def test_calls_are_ordered_by_streams():
    ranks.run(check_streams, 2, timeout=120)


def check_future(rank):
    where, world = start(), dist.get_world_size()
    shard = values(rank, 1 << 16).to(where)
    out = torch.empty(world << 16, dtype=BF16, device=where)
    doubled = (
        dist.all_gather_into_tensor(out, shard, async_op=True).get_future().then(lambda f: f.value()[0].float() * 2)
    )
    expected = torch.cat([values(r, 1 << 16) for r in range(world)]).float() * 2
    assert same_bits(doubled.wait(), expected)


def test_futures_run_callbacks_behind_the_call():
    ranks.run(check_future, 2, timeout=120)


# ---- memory ----------------------------------------------------------------------------------------------------


def check_memory(rank, options):
    where, world = start(**options), dist.get_world_size()
    count = 1 << 20
    shard, whole = values(rank, count).to(where), values(rank, world * count).to(where)
    out, part, outs = torch.empty_like(whole), torch.empty_like(shard), [torch.empty_like(shard) for _ in range(world)]
    total, gathered = whole.float(), outs if rank == 0 else None
    splits = [[count + 1000, count - 1000], [count - 1000, count + 1000]][rank]
    seen = []
    for step in range(30):
        dist.all_gather_into_tensor(out, shard)
        dist.all_gather(outs, shard)
        with dist._coalescing_manager(device=where):
            for o in out.chunk(world):
                dist.all_gather_into_tensor(o, shard[: count // world])
        dist.all_to_all_single(out, whole)
        dist.all_to_all_single(out, whole, splits, splits)
        dist.all_to_all(outs, list(whole.chunk(world)))
        dist.broadcast(part, 1)
        dist.scatter(part, list(whole.chunk(world)) if rank == 0 else None, 0)
        dist.gather(shard, gathered, 0)
        dist.reduce_scatter_tensor(part, whole)
        dist.reduce_scatter(part, list(whole.chunk(world)))
        dist.all_reduce(total.fill_(rank))
        dist.all_gather_into_tensor(out, shard, async_op=True).wait()
        torch.cuda.synchronize()
        if step >= 10:
            stats = torch.cuda.memory_stats(where)
            seen.append((stats["reserved_bytes.all.current"], stats["num_device_alloc"], torch.cuda.memory_allocated()))
    dist.barrier()
    return seen, zipccl.stats()


@pytest.mark.parametrize(
    "options", [{}, {"all_to_all_design": 1}, {"code": "dense", "wire_dtype": BF16}], ids=["fast", "design 1", "dense"]
)
def test_steady_state_takes_no_new_memory(options):
    for seen, moved in ranks.run(check_memory, 2, options, timeout=120):
        assert len(set(seen)) == 1, seen
        assert moved.keys() == ALL_ZIP.keys() and all(s["zipped_calls"] for s in moved.values()), moved


# ---- graphs, both devices, faults ------------------------------------------------------------------------------


def check_graph(rank):
    """Sizes cannot be waited for in a graph: calls are captured raw, and replayed."""
    where, world = start(), dist.get_world_size()
    shard = torch.zeros(1 << 16, dtype=BF16, device=where)
    out = torch.empty(world << 16, dtype=BF16, device=where)
    swapped, sent = torch.empty_like(out), torch.zeros_like(shard)

    def calls():
        dist.all_gather_into_tensor(out, shard)
        dist.all_to_all_single(swapped, out, [1 << 16] * world, [1 << 16] * world)
        sent.copy_(shard)
        dist.broadcast(sent, world - 1)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    for step in range(3):
        shard.copy_(values(10 * step + rank, 1 << 16))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, torch.cat([values(10 * step + r, 1 << 16) for r in range(world)]))
        assert same_bits(swapped, values(10 * step + rank, 1 << 16).repeat(world))
        assert same_bits(sent, values(10 * step + world - 1, 1 << 16))
    calls()  # and zipped again
    return {op: (moved["calls"], moved["zipped_calls"]) for op, moved in zipccl.stats().items()}


def test_graph_capture_goes_raw():
    for moved in ranks.run(check_graph, 2, timeout=60):
        assert moved == dict.fromkeys(("all_gather", "all_to_all", "broadcast"), (3, 2))


def check_both_devices(rank):
    where, world = start(), dist.get_world_size()
    for _ in range(5):
        for place in (torch.device("cpu"), where):
            out = torch.empty(world * 5000, dtype=BF16, device=place)
            dist.all_gather_into_tensor(out, values(rank, 5000).to(place))
            assert same_bits(out, torch.cat([values(r, 5000) for r in range(world)]))
    dist.barrier()
    dist.destroy_process_group()


def test_cpu_and_cuda_tensors_in_one_group():
    ranks.run(check_both_devices, 2, timeout=120)


def check_attach(rank):
    where = ranks.device("cuda")
    group = ranks.init("nccl")
    shard, world = values(rank, 100_000).to(where), dist.get_world_size()
    expected = torch.cat([values(r, 100_000) for r in range(world)])
    zipped = []
    for _ in range(2):
        zipccl.attach(options=zipccl.Options(all_gather="zip"))
        out = torch.empty(world * 100_000, dtype=BF16, device=where)
        dist.all_gather_into_tensor(out, shard)
        assert same_bits(out, expected) and dist.get_backend() == "nccl" and group.name() == "nccl"
        zipped.append(zipccl.stats()["all_gather"]["zipped_calls"])
        with zipccl.override(all_gather="raw"):
            dist.all_gather_into_tensor(out, shard)
        assert zipccl.stats()["all_gather"]["zipped_calls"] == zipped[-1]
        zipccl.detach()
        dist.all_gather_into_tensor(out, shard)
        assert same_bits(out, expected)
    dist.barrier()
    dist.destroy_process_group()
    return zipped


def test_attach_to_nccl():
    assert ranks.run(check_attach, 2, timeout=120) == [[1, 2], [1, 2]]


def check_detail(rank, under, count=100_000):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: where calls differ every rank is told at once, calls that agree are as ever."""
    device = ranks.device("cuda")
    options = zipccl.Options(**ALL_ZIP, min_bytes=0)
    ranks.init(under, pg_options=options if under == "zipccl" else None)
    if under == "nccl":
        zipccl.attach(options=options)
    own = values(rank, 2 * count).to(device)
    out = torch.empty(4 * count, dtype=BF16, device=device)
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
        if rank == 0:
            dist.all_gather_into_tensor(out, own)
        else:
            dist.broadcast(own, 0)
    dist.all_gather_into_tensor(out, own)
    assert same_bits(out.cpu(), torch.cat([values(r, 2 * count) for r in range(2)]))
    got = torch.empty_like(own)
    dist.all_to_all_single(got, own)
    wanted = torch.cat([values(r, 2 * count)[rank * count : (rank + 1) * count] for r in range(2)])
    assert same_bits(got.cpu(), wanted)
    return zipccl.stats()["all_gather"]["zipped_calls"], zipccl.stats()["all_to_all"]["zipped_calls"]


@pytest.mark.parametrize("under", ["zipccl", "nccl"])
def test_debug_level_detail(under):
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert ranks.run(check_detail, 2, under, timeout=120, env=detail) == [(1, 1), (1, 1)]


def check_auto(rank):
    """Both choices, timed by events, decided alike: the counters of all ranks are equal."""
    where, world = start(**{name: "auto" for name in ("all_gather", "all_to_all", "reduce_scatter")}), 2
    for step in range(140):
        shard = values(step % 3 + rank, 1 << 18).to(where)
        out = torch.empty(world << 18, dtype=BF16, device=where)
        dist.all_gather_into_tensor(out, shard)
        if step % 20 == 0:
            assert same_bits(out, torch.cat([values(step % 3 + r, 1 << 18) for r in range(world)]))
        dist.all_to_all_single(torch.empty_like(out), out)
    torch.cuda.synchronize()
    dist.barrier()  # who leaves early takes what the other has not received yet
    moved = zipccl.stats()
    return [(op, moved[op]["calls"], moved[op]["zipped_calls"]) for op in sorted(moved)]


def test_auto_decides_alike():
    first, second = ranks.run(check_auto, 2, timeout=180)
    assert first == second
