"""One rank of zipccl among peers that a script plays: damaged frames, failing and silent peers, decisions."""

import datetime
import threading
import time

import pytest
import torch
import zipccl
from ranks import same_bits
from recorder import Inner, native

COUNT = 5000


def shard(rank: int, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def frame_of(values: torch.Tensor, checksum: bool = False) -> torch.Tensor:
    return zipccl.compress(values, checksum=checksum)


def pad(frames: list[torch.Tensor]) -> torch.Tensor:
    largest = max(f.numel() for f in frames)
    return torch.cat([torch.nn.functional.pad(f, (0, largest - f.numel())) for f in frames])


def words(inner: Inner, *from_a_peer: int) -> None:
    """What the next peer says."""
    inner.zip.reply("recv", [torch.tensor(from_a_peer)])


def opening(inner: Inner, *from_a_peer: int) -> None:
    """The same of the words that open a call: that it is the same one, and three more."""
    words(inner, *from_a_peer, *[0] * (3 - len(from_a_peer)))


def script(inner: Inner, frames: list[torch.Tensor], sizes: list[int] | None = None, rank: int = 0) -> None:
    """What the peers of `rank` say in one zipped call: sizes, then frames, of two ranks as messages, of more as an
    all-gather."""
    for r, size in enumerate(sizes or [f.numel() for f in frames]):
        if r != rank:
            opening(inner, size)
    gathered = pad(frames)
    if len(frames) == 2:
        inner.zip.reply("recv", [gathered.chunk(2)[1 - rank]])
    else:
        inner.zip.reply("_allgather_base", [gathered])


def data(calls: list, name: str) -> list:
    """Messages of data, which are those of tag 0."""
    return [c for c in calls if c.name == name and c.arguments.split()[1] == "0"]


def gather(inner: Inner, rank: int = 0, world: int = 2, count: int = COUNT) -> torch.Tensor:
    out = torch.empty(world * count, dtype=torch.bfloat16)
    inner.backend._allgather_base(out, shard(rank, count)).wait()
    return out


def test_what_the_peers_sent_is_what_comes_out():
    inner = Inner(rank=1, size=3)
    script(inner, [frame_of(shard(r)) for r in range(3)], rank=1)
    assert same_bits(gather(inner, 1, 3), torch.cat([shard(r) for r in range(3)]))


# ---- damaged frames --------------------------------------------------------------------------------------------


def damaged(how: str) -> torch.Tensor:
    frame = frame_of(shard(1), checksum=how == "payload")
    if how == "magic":
        frame[0] ^= 1
    elif how == "version":
        frame[4] += 1
    elif how == "header":
        frame[8] ^= 1  # the count
    elif how == "tile table":
        frame[64 + 16 + 1] = 0xF0  # mode of the first tile
    elif how == "payload":
        frame[-100] ^= 4
    elif how == "another count":
        frame = frame_of(shard(1, COUNT - 1))
    elif how == "another dtype":
        frame = frame_of(shard(1, COUNT // 4).float())
    return frame


DAMAGE = pytest.mark.parametrize(
    "how, cause",
    [
        ("magic", "not a zipccl frame"),
        ("version", "version is not supported"),
        ("header", "header is corrupt"),
        ("tile table", "invalid tile entry"),
        ("payload", "checksum mismatch"),
        ("another count", "another dtype or count"),
        ("another dtype", "another dtype or count"),
    ],
)


@DAMAGE
def test_a_damaged_frame_names_operation_rank_and_cause(how, cause):
    inner = Inner(checksum=how == "payload")
    script(inner, [frame_of(shard(0), checksum=how == "payload"), damaged(how)])
    with pytest.raises(zipccl.FrameError, match=rf"all_gather.*rank 0 of 2.*frame from rank 1: .*{cause}"):
        gather(inner)
    script(inner, [frame_of(shard(r)) for r in range(2)])
    assert same_bits(gather(inner), torch.cat([shard(0), shard(1)]))  # the group lives on


@pytest.mark.parametrize(
    "how, holds",
    [("another count", f"{COUNT - 1} values of BFloat16"), ("another dtype", f"{COUNT // 4} values of Float")],
)
def test_another_frame_than_expected_names_both_sizes(how, holds):
    inner = Inner()
    script(inner, [frame_of(shard(0)), damaged(how)])
    with pytest.raises(zipccl.FrameError, match=rf"frame from rank 1: .*: {holds}, not {COUNT} of BFloat16$"):
        gather(inner)
    with pytest.raises(zipccl.FrameError, match=rf"frame from the caller: .*: {holds}, not {COUNT} of BFloat16$"):
        zipccl._C.sum_into([frame_of(shard(0)), damaged(how)], torch.empty(COUNT, dtype=torch.bfloat16))


@pytest.mark.cuda
@pytest.mark.skipif(zipccl._C.cuda_version is None, reason="needs a build with CUDA")
@DAMAGE
def test_a_damaged_frame_on_the_gpu(how, cause):
    """Known when the GPU has passed the decoder: with a checksum in wait(), else at the latest in shutdown()."""
    inner = Inner(cuda=True, zip_cpu=False, checksum=how == "payload")
    frames = [frame_of(shard(0), checksum=how == "payload"), damaged(how)]
    inner.cuda.reply("_allgather_base", [torch.tensor([f.numel() for f in frames])])
    inner.cuda.reply("_allgather_base", [pad(frames)])
    out = torch.empty(2 * COUNT, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(zipccl.FrameError, match=rf"all_gather.*rank 0 of 2.*frame from rank 1: .*{cause}"):
        inner.backend._allgather_base(out, shard(0).cuda()).wait()
        assert how != "payload"
        torch.cuda.synchronize()
        inner.backend.shutdown()


def test_a_truncated_frame():
    """The announced size is smaller than the frame says."""
    inner = Inner()
    frames = [frame_of(shard(r)) for r in range(2)]
    script(inner, [frames[0], frames[1][:-16]])
    with pytest.raises(zipccl.FrameError, match="frame from rank 1: frame is truncated"):
        gather(inner)


@pytest.mark.parametrize("size", [0, -16, 48, 8, 6011, 1 << 40, 2**63 - 16])
def test_sizes_that_cannot_be_do_not_drive_memory(size):
    inner = Inner()
    script(inner, [frame_of(shard(r)) for r in range(2)], [frame_of(shard(0)).numel(), size])
    with pytest.raises(zipccl.Error, match=rf"rank 1 announced a frame of {size} bytes for {COUNT} values"):
        gather(inner)


@pytest.mark.parametrize("call", ["recv", "allgather_into_tensor_coalesced"], ids=["sizes", "frames"])
def test_an_inner_error_keeps_its_text(call):
    inner = Inner(size=3)
    inner.zip.fail_next(call, "Connection closed by peer [127.0.0.1]:123")
    ins = [shard(0), shard(1)]
    outs = [torch.empty(3 * COUNT, dtype=torch.bfloat16) for _ in ins]
    work = native().all_gather_coalesced(inner.backend, outs, ins)
    with pytest.raises(RuntimeError, match=r"zipccl .*\(rank 0 of 3.*: Connection closed by peer \[127.0.0.1\]:123"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        work.get_future().wait()


def exchange(inner: Inner, frame: torch.Tensor, ahead: int | None = None) -> torch.Tensor:
    """Design 2 of rank 0 with a rank 1 whose `frame` arrives, of which so much ahead (all)."""
    ahead = frame.numel() if ahead is None else ahead
    opening(inner, 2 * COUNT << 2 | 2, ahead, 0)  # raw bytes and design
    inner.zip.reply("recv", [frame[:ahead]])
    inner.zip.reply("recv", [frame[ahead:]])
    out, x = torch.empty(2 * COUNT, dtype=torch.bfloat16), shard(0, 2 * COUNT)
    inner.backend.alltoall_base(out, x, [], [], torch.distributed.AllToAllOptions()).wait()
    return out[COUNT:]


def with_size(frame: torch.Tensor, more: int) -> torch.Tensor:
    frame[16:24] = (frame.numel() + torch.tensor([more])).view(torch.uint8)
    return frame


@DAMAGE
def test_a_damaged_frame_in_design_2(how, cause):
    """A rank that cannot trust a header asks for no rest of the frame."""
    inner = Inner(all_to_all="zip", all_to_all_design=2, min_bytes=0, checksum=True)
    with pytest.raises(zipccl.FrameError, match=rf"all_to_all.*rank 0 of 2.*frame from rank 1: .*{cause}"):
        exchange(inner, damaged(how))
    assert len(data(inner.take_calls()["zip"], "recv")) == 1


@pytest.mark.parametrize("more", [16, -16, 8, 1 << 40, -(1 << 40)])
def test_a_damaged_size_in_design_2(more):
    inner = Inner(all_to_all="zip", all_to_all_design=2, min_bytes=0)
    with pytest.raises(zipccl.FrameError, match=r"frame from rank 1: .*header is corrupt"):
        exchange(inner, with_size(frame_of(shard(1)), more), 4096)
    assert len(data(inner.take_calls()["zip"], "recv")) == 1


def test_design_2_fetches_the_rest_of_a_sound_frame():
    inner = Inner(all_to_all="zip", all_to_all_design=2, min_bytes=0)
    assert same_bits(exchange(inner, frame_of(shard(1)), 4096), shard(1))
    assert len(data(inner.take_calls()["zip"], "recv")) == 2


def test_nothing_but_the_frame_goes_ahead():
    """Frames of zeros are much smaller than a rank expects that has seen none."""
    inner = Inner(all_to_all="zip", all_to_all_design=2, min_bytes=0)
    zeros = torch.zeros(2 * COUNT, dtype=torch.bfloat16)
    mine = frame_of(zeros[:COUNT])
    for filling in (shard(1), zeros[:COUNT]):  # scratch is used again, with what was there
        theirs = frame_of(filling)
        opening(inner, 2 * COUNT << 2 | 2, theirs.numel(), 0)
        inner.zip.reply("recv", [theirs])
        out = torch.empty_like(zeros)
        inner.backend.alltoall_base(out, zeros, [], [], torch.distributed.AllToAllOptions()).wait()
        sent = data(inner.take_calls()["zip"], "send")[0].tensors[0]
        assert same_bits(sent[: mine.numel()], mine) and not sent[mine.numel() :].any()


@pytest.mark.cuda
@pytest.mark.skipif(zipccl._C.cuda_version is None, reason="needs a build with CUDA")
def test_after_a_failed_exchange_a_rank_refuses_to_go_on():
    """Its peer has learnt what frames to expect of each other; this rank has not."""
    inner = Inner(cuda=True, zip_cpu=False, all_to_all="zip", all_to_all_design=2, min_bytes=0)
    x = shard(0, 2 * COUNT).cuda()
    out = torch.empty_like(x)
    inner.cuda.reply("alltoall_base", [torch.tensor([0, 1 << 40])])
    with pytest.raises(zipccl.Error, match="rank 1 announced a frame"):
        inner.backend.alltoall_base(out, x, [], [], torch.distributed.AllToAllOptions())
    inner.cuda.take_calls()
    for _ in range(2):
        with pytest.raises(zipccl.Error, match="all_to_all.*rank 0 of 2.*an earlier call failed on this rank"):
            inner.backend.alltoall_base(out, x, [], [], torch.distributed.AllToAllOptions())
    assert not {"alltoall", "alltoall_base"} & {c.name for c in inner.cuda.take_calls()}


LOST = "an earlier call failed on this rank"


@pytest.mark.parametrize("where", ["_allgather_base", "allreduce"], ids=["in the call", "agreeing"])
def test_after_a_call_that_failed_between_its_messages_nothing_more_is_sent(where):
    """What is left of it on the way would be taken for messages of later calls."""
    inner = Inner(size=3, all_gather="zip" if where != "allreduce" else "auto", min_bytes=0)
    inner.zip.fail_next(where, "gone")
    with pytest.raises(zipccl.Error, match="gone"):
        for _ in range(zipccl._C.trial_calls + 1):
            gather(inner, world=3)
    inner.take_calls()
    for _ in range(2):
        with pytest.raises(zipccl.Error, match=rf"all_gather \(rank 0 of 3.*{LOST}.*make a new group"):
            gather(inner, world=3)
    with pytest.raises(zipccl.Error, match=rf"zipccl explain \(rank 0 of 3.*{LOST}"):
        inner.backend.explain("all_gather", torch.device("cpu"), 1 << 20)
    assert not inner.take_calls()


def summed(inner: Inner, bad: int | None, tensors: int = 1, gather: bool = False) -> list[torch.Tensor]:
    """A reduction of ones with a rank 1 that has ones; of its frames, `bad` is damaged."""
    ones = torch.ones(COUNT, dtype=torch.bfloat16)
    of_sums = 1 | 0x3F80 << 2
    for part in range(tensors):
        frame = frame_of(ones)
        if bad == part:
            frame[0] ^= 1
        opening(inner, 2 * COUNT << 2 | 1, 0, of_sums)
        words(inner, frame.numel())
        inner.zip.reply("recv", [frame])
    if gather:
        script(inner, [frame_of(ones + ones)] * 2)
        inner.backend.allreduce([out := torch.ones(2 * COUNT, dtype=torch.bfloat16)]).wait()
        return [out]
    outs = [torch.empty_like(ones) for _ in range(tensors)]
    options = torch.distributed.ReduceScatterOptions()
    inner.backend.reduce_scatter(outs, [[ones, ones] for _ in outs], options).wait()
    return outs


@pytest.mark.parametrize(
    "kind, lives_on",
    [({"tensors": 1}, True), ({"tensors": 2}, False), ({"gather": True}, False)],
    ids=["the only one", "the first of two", "the first half of all_reduce"],
)
def test_a_damaged_frame_of_a_sum(kind, lives_on):
    """The group lives on only where the frame was found when nothing more was to be exchanged."""
    inner = Inner(reduce_scatter="zip", all_reduce="zip", min_bytes=0)
    with pytest.raises(zipccl.FrameError, match="frame from rank 1"):
        summed(inner, bad=0, **kind)
    inner.take_calls()
    if lives_on:
        assert all(bool((out == 2).all()) for out in summed(inner, bad=None, **kind))
        return
    with pytest.raises(zipccl.Error, match=LOST):
        summed(inner, bad=None, **kind)
    assert not inner.take_calls()


def test_a_window_is_its_threads_own():
    """Otherwise it would be up to the scheduler whether the call of another thread is zipped, on each rank anew."""
    inner = Inner(cuda=True)
    script(inner, [frame_of(shard(r)) for r in range(2)])
    inner.backend._start_coalescing()
    thread = threading.Thread(target=gather, args=(inner,))
    thread.start()
    thread.join()
    assert [c.name for c in inner.take_calls()["zip"]] == ["recv", "send"] * 2
    gather(inner)
    assert "zip" not in inner.take_calls()
    inner.backend._end_coalescing()


# ---- silent peers ----------------------------------------------------------------------------------------------


def test_wait_gives_up_after_its_timeout_and_may_be_called_again():
    inner = Inner(size=3)
    inner.zip.hold(True)
    out = torch.empty(3 * COUNT, dtype=torch.bfloat16)
    work = inner.backend._allgather_base(out, shard(0))
    with pytest.raises(RuntimeError, match="timed out after 50 ms"):
        work.wait(datetime.timedelta(milliseconds=50))
    assert not work.is_completed()
    inner.zip.hold(False)
    assert work.wait() and work.is_completed() and work.is_success()
    assert same_bits(out, shard(0).repeat(3))


def test_a_new_timeout_counts_behind_a_call_that_has_a_longer_one():
    """wait() gives up; the calls themselves stay in their order, as the other ranks have them."""
    inner = Inner(size=3)
    inner.zip.hold(True)
    outs = [torch.empty(3 * COUNT, dtype=torch.bfloat16) for _ in range(3)]
    works = [inner.backend._allgather_base(outs[0], shard(0))]
    inner.backend.set_timeout(datetime.timedelta(milliseconds=300))
    works += [inner.backend._allgather_base(out, shard(0)) for out in outs[1:]]
    for work in works[1:]:
        with pytest.raises(zipccl.Error, match=r"all_gather \(rank 0 of 3.*timed out behind earlier calls .* 300 ms"):
            work.wait()
    inner.zip.hold(False)
    assert all(work.wait() for work in works)
    assert all(same_bits(out, shard(0).repeat(3)) for out in outs)


def test_calls_behind_a_silent_one_end_with_shutdown():
    inner = Inner(size=3)
    inner.zip.hold(True)
    outs = [torch.empty(3 * COUNT, dtype=torch.bfloat16) for _ in range(3)]
    works = [inner.backend._allgather_base(out, shard(0)) for out in outs]
    stopper = threading.Thread(target=inner.backend.shutdown)
    stopper.start()
    for work in works[1:]:  # never begun
        with pytest.raises(RuntimeError, match="shut down before this call ran"):
            work.wait()
    inner.zip.hold(False)
    stopper.join()
    assert works[0].wait()
    with pytest.raises(RuntimeError, match="shut down"):
        gather(inner, world=3)


def test_dropping_the_last_reference_lets_python_run():
    """The destructor waits for the call in flight, which may need the GIL to complete."""
    inner = Inner(size=3)
    inner.zip.hold(True)
    log = []
    out = torch.empty(3 * COUNT, dtype=torch.bfloat16)
    inner.backend._allgather_base(out, shard(0)).get_future().then(lambda f: log.append("callback"))

    def release():
        log.append("release")
        inner.zip.hold(False)

    while not inner.zip.take_calls():  # a call that has not begun would be cancelled instead
        time.sleep(0.001)
    threading.Timer(0.1, release).start()
    inner.backend = None
    log.append("gone")
    assert log == ["release", "callback", "gone"]


def test_a_finished_work_has_a_finished_future():
    inner = Inner()
    out = torch.empty(2 * 16, dtype=torch.bfloat16)
    for _ in range(500):
        work = inner.backend._allgather_base(out, shard(0, 16))
        future = work.get_future()
        work.wait()
        assert future.done()


def test_a_callback_may_wait_for_other_calls():
    """As PowerSGD's hook does: callbacks that make a call and wait for it, and that wait for a later call."""
    inner = Inner(size=3)
    inner.zip.hold(True)
    outs = [torch.empty(3 * COUNT, dtype=torch.bfloat16) for _ in range(4)]
    later = []

    def call(out):
        return inner.backend._allgather_base(out, shard(0))

    def callback(future):
        later[0].wait()
        call(outs[2]).wait()
        call(outs[3]).get_future().wait()
        return "done"

    chained = call(outs[0]).get_future().then(callback)
    later.append(call(outs[1]))
    inner.zip.hold(False)
    assert chained.wait() == "done"
    assert all(same_bits(out, shard(0).repeat(3)) for out in outs)


# ---- decisions are the same on every rank ----------------------------------------------------------------------


def measured(inner: Inner, alpha: float, per_byte: float) -> None:
    """Scripts the all-reduced measurement: the large all-gather takes long enough against the small one; then alpha,
    s/B of the link, fixed cost, s/B of encoder and decoder, and how long sizes take."""
    for values in ([9.0, 1.0], [alpha, per_byte, alpha, 1e-6, 1e-12, 1e-12, 1.0, 1.0, 1.0]):
        inner.zip.reply("allreduce", [torch.tensor(values, dtype=torch.float64)])


def first_after_measuring(inner: Inner) -> str:
    names = [c.name for c in inner.take_calls()["zip"]]
    return names[len(names) - names[::-1].index("allreduce")]


def uneven(inner: Inner, counts: list[int], rank: int) -> list[torch.Tensor]:
    outs = [torch.empty(n, dtype=torch.bfloat16) for n in counts]
    inner.backend.allgather([outs], [shard(rank, counts[rank])]).wait()
    return outs


def test_auto_measures_once_and_goes_by_it():
    for per_byte, choice in [(1e-6, "recv"), (1e-15, "allgather")]:
        inner = Inner(all_gather="auto", min_bytes=0)
        measured(inner, 1e-6, per_byte)
        uneven(inner, [COUNT, COUNT], 0)
        assert first_after_measuring(inner) == choice
        uneven(inner, [COUNT, COUNT], 0)
        assert "allreduce" not in [c.name for c in inner.take_calls()["zip"]]
        assert inner.backend.explain("all_gather", torch.device("cpu"), 2 * COUNT).choice == (
            "raw" if choice == "allgather" else "zip"
        )


@pytest.mark.parametrize("agreement_fails", [False, True])
def test_a_damaged_frame_does_not_keep_a_rank_from_agreeing(agreement_fails):
    """The peers, whose frames were sound, agree after the last call of the trial; the frame stays what is reported."""
    inner = Inner(all_gather="auto", min_bytes=0)
    measured(inner, 1e-3, 1e-15)  # raw looks better, so that the odd calls of the trial are the zipped ones
    for _ in range(zipccl._C.trial_calls - 1):
        gather(inner)
    inner.take_calls()
    script(inner, [frame_of(shard(0)), damaged("header")])
    if agreement_fails:
        inner.zip.fail_next("allreduce", "gone")
    with pytest.raises(zipccl.FrameError, match="frame from rank 1: .*header is corrupt"):
        gather(inner)
    assert [c.name for c in inner.take_calls()["zip"]][-1] == "allreduce"


def test_uneven_shards_are_decided_alike():
    """The small rank alone would go raw, the large one alone zipped: they must go the same way."""
    counts = [1 << 19, 1 << 21]
    firsts = []
    for rank in range(2):
        inner = Inner(rank=rank, all_gather="auto", min_bytes=0)
        measured(inner, 1.0, 1 / (0.29 * (2 << 20)))
        outs = [torch.empty(n, dtype=torch.bfloat16) for n in counts]
        work = inner.backend.allgather([outs], [shard(rank, counts[rank])])
        try:
            work.wait()
        except zipccl.Error:
            pass  # the recorder echoes this rank's size for the other, which is not what this is about
        firsts.append(first_after_measuring(inner))
    assert firsts[0] == firsts[1]


def test_what_is_learnt_from_uneven_shards_is_the_same_on_every_rank():
    counts = [1000, 200000]
    reasons = []
    for rank in range(2):
        inner = Inner(rank=rank, all_gather="auto", min_bytes=0)
        measured(inner, 1e-9, 1e-3)
        inner.backend.explain("all_gather", torch.device("cpu"), 1 << 20)  # measures
        opening(inner)  # of the comparison before the first decision for calls of this size
        script(inner, [frame_of(shard(r, n)) for r, n in enumerate(counts)], rank=rank)
        outs = uneven(inner, counts, rank)
        assert all(same_bits(out, shard(r, counts[r])) for r, out in enumerate(outs))
        assert inner.backend.stats()["all_gather"]["zipped_calls"] == 1
        reasons.append(inner.backend.explain("all_gather", torch.device("cpu"), 1 << 20).reason)
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize("per_byte", [1e-6, 1e-15], ids=["zip", "raw"])
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_the_callers_autograd_modes_hold_on_the_worker(per_byte, strided):
    """Outputs that may only be written under no_grad, or in inference mode, by the caller's word."""
    for mode, needs_grad in [(torch.no_grad(), True), (torch.inference_mode(), False)]:
        inner = Inner(all_gather="auto", min_bytes=0)
        measured(inner, 1e-6, per_byte)
        with mode:
            whole = torch.zeros(2, COUNT * 2, dtype=torch.bfloat16)
            out = whole[:, ::2] if strided else torch.zeros(2 * COUNT, dtype=torch.bfloat16)
            out.requires_grad_(needs_grad)
            inner.backend._allgather_base(out, shard(0)).wait()
        assert same_bits(out.reshape(-1), shard(0).repeat(2))
