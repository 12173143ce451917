"""The demo as a user runs it, and the promises of its helpers: deaths are reported, links leave nothing behind."""

import argparse
import copy
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import corpus  # noqa: E402
import dump  # noqa: E402
import launch  # noqa: E402
import netns  # noqa: E402
import report  # noqa: E402
from gpt import GPT  # noqa: E402


def run_demo(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


# ---- The demo -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    done = run_demo("--steps", "6", "--json", str(directory / "demo.json"), "--dump", str(directory / "dump"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((directory / "demo.json").read_text()), directory / "dump"


def test_losses_and_weights_are_bit_identical(demo):
    _, facts, _ = demo
    gloo, zipped = facts["runs"]["gloo"], facts["runs"]["zipccl"]
    assert sorted(gloo) == sorted(zipped) == ["0", "1"]
    for rank in gloo:
        assert gloo[rank]["loss_bits"] == zipped[rank]["loss_bits"]
        assert gloo[rank]["weights_sha256"] == zipped[rank]["weights_sha256"]
        losses = zipped[rank]["losses"]
        assert len(losses) == 6 and all(map(math.isfinite, losses))
        assert min(losses) < losses[0] - 0.5 and losses[0] < 6.0  # log(256) is 5.5
    assert gloo["0"]["loss_bits"] != gloo["1"]["loss_bits"], "every rank must train on text of its own"
    assert gloo["0"]["weights_sha256"] != gloo["1"]["weights_sha256"], "every rank holds a shard of its own"


def test_every_all_gather_was_zipped(demo):
    _, facts, _ = demo
    for rank in facts["runs"]["zipccl"].values():
        moved = rank["all_gather"]
        assert moved["calls"] == moved["zipped_calls"] > 0
        # Each step gathers at least every bf16 parameter once, half of them from the other rank.
        assert moved["raw_bytes"] >= 6 * rank["parameters"]
        assert 0.6 < moved["wire_bytes"] / moved["raw_bytes"] < 0.75
        assert moved["auto"] in ("zip", "raw") and moved["auto_reason"]


def test_the_output_says_what_happened(demo):
    output, facts, _ = demo
    assert "All 12 losses (6 steps x 2 ranks) are bit-identical in both runs." in output
    assert "step 6/6" in output
    assert f"{facts['runs']['zipccl']['0']['losses'][-1]:.6f}" in output
    assert "mean loss, steps 1 to 6 " in output
    assert "too few steps to tell" in output and all(len(r["0"]["ms_by_turn"]) == 1 for r in facts["runs"].values())
    assert facts["runs"]["zipccl"]["0"]["all_gather"]["auto_reason"].count("(timed)") > 0
    assert {"date", "command", "device", "zipccl", "torch", "python", "ranks", "seed"} <= facts.keys()


def test_the_mean_is_of_the_steps_it_names(demo):
    _, facts, _ = demo
    run = facts["runs"]["zipccl"]["0"]
    for steps, first in ((1, 1), (10, 1), (25, 16)):
        losses = [float(step) for step in range(1, steps + 1)]
        (row,) = [line for line in report.table({"zipccl": run | {"losses": losses}}, steps) if "mean loss" in line]
        assert row.startswith(f"mean loss, steps {first} to {steps} ")
        assert float(row.split()[-1]) == (first + steps) / 2


@pytest.mark.parametrize(
    "zip_turns, verdict",
    [
        ([90.0, 91, 92, 80, 99, 91], "faster"),
        ([110.0, 111, 90, 120, 112, 111], "slower"),
        ([80.0, 120, 81, 119, 82, 118], "level"),  # the turns disagree
        ([99.0, 98, 98.5, 99, 97.5, 98], "level"),  # all agree, on next to nothing
        ([50.0, 50, 50], "unknown"),
    ],
)
def test_times_and_auto_never_contradict_each_other_without_a_word(zip_turns, verdict):
    seen = report.Times(100.0, statistics.median(zip_turns), [100.0] * len(zip_turns), zip_turns)
    assert seen.verdict == verdict
    where = argparse.Namespace(link="1gbit", device="cpu")
    said = report.time_sentence(seen, where, "gloo")
    assert said.startswith(f"{seen.change:+.1f} % per step against plain gloo; ")
    assert ("no difference" in said) == (verdict == "level") and ("too few" in said) == (verdict == "unknown")
    for auto, how in (("zip", " compressed:"), ("raw", " uncompressed:")):
        said = report.auto_sentence({"auto": auto, "auto_reason": "because"}, seen)
        assert how in said and "because" in said
        assert ("all the same" in said) == ((auto, verdict) in (("zip", "slower"), ("raw", "faster")))
        assert "all the same" not in report.auto_sentence({"auto": auto, "auto_reason": "because"}, None)


def test_the_middle_half_of_the_turns():
    seen = report.Times(100.0, 100.0, [100.0] * 5, [101.0, 102, 103, 104, 110])
    assert (round(seen.low, 6), round(seen.high, 6)) == (2, 4)


def test_dump_holds_training_tensors(demo):
    _, facts, directory = demo
    parameters = facts["runs"]["zipccl"]["0"]["parameters"]
    read = {
        path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.bfloat16)
        for path in directory.glob("*.bin")
    }
    before, after = read.pop("weights_before_bf16.bin"), read.pop("weights_after_bf16.bin")
    gradients, activations = read.pop("grads_2workers_bf16.bin"), read.pop("activations_bf16.bin")
    assert not read
    assert len(before) == len(after) == parameters and len(gradients) == 2 * parameters
    assert not torch.equal(before, after)
    assert (before - after).abs().max() < 0.01, "one step at a rate of 1e-3 moves no weight far"
    assert not torch.equal(gradients[:parameters], gradients[parameters:])
    for tensor in (before, after, gradients, activations):
        assert tensor.isfinite().all() and tensor.count_nonzero() > 0.3 * len(tensor)


def test_dump_holds_every_dtype(demo):
    directory = demo[2] / "dtypes"
    read = {}
    for path in directory.iterdir():
        kind, name = path.stem.split("_", 1)
        values = torch.frombuffer(bytearray(path.read_bytes()), dtype=getattr(torch, name.split("_of_")[0]))
        read[kind, name] = values.double()
        assert read[kind, name].isfinite().all() and read[kind, name].count_nonzero() > 0.3 * len(values)
    assert len(read) == 3 * 8 and len({len(values) for (kind, _), values in read.items() if kind != "activations"}) == 1
    for kind in ("weights", "gradients", "activations"):
        exact = read[kind, "float64"]
        assert not torch.equal(exact, exact.float().double()) or kind == "weights", "computed in double precision"
        for name in ("bfloat16", "float16"):
            assert torch.equal(read[kind, f"float32_of_{name}"], read[kind, name])
            scale = dump.LOSS_SCALE if (kind, name) == ("gradients", "float16") else 1
            assert (read[kind, name] - scale * exact).norm() < 0.1 * scale * exact.norm()
        assert (read[kind, "float32"] - exact).norm() < 1e-3 * exact.norm()
        for name, largest in (("float8_e4m3fn", 448), ("float8_e5m2", 57344)):
            assert read[kind, name].abs().max() == largest


def test_a_difference_of_one_bit_is_reported(demo):
    _, facts, _ = demo
    runs = {name: {int(rank): result for rank, result in ranks.items()} for name, ranks in facts["runs"].items()}
    assert report.compare(runs) == {"loss_bits": True, "weights_sha256": True}
    changed = copy.deepcopy(runs)
    changed["zipccl"][1]["loss_bits"][3] ^= 1
    comparison = report.compare(changed)
    assert comparison == {"loss_bits": False, "weights_sha256": True}
    assert "DIFFERENT" in "\n".join(report.identity_sentences(6, [0, 1], comparison))


def test_arguments_that_cannot_work_are_refused():
    done = run_demo("--ranks", "1")
    assert done.returncode == 2 and "one rank alone" in done.stderr
    done = run_demo("--link", "fast")
    assert done.returncode == 1 and "not a rate" in done.stderr and "Traceback" not in done.stderr


def test_text_depends_on_seed_step_and_rank():
    text = corpus.load(1 << 20)
    assert len(text) == 1 << 20
    first = corpus.batch(text, 2, 64, seed=1, step=0, rank=0)
    assert first.shape == (2, 65) and first.dtype == torch.int64
    assert torch.equal(first, corpus.batch(text, 2, 64, seed=1, step=0, rank=0))
    for other in ({"seed": 2}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(first, corpus.batch(text, 2, 64, **({"seed": 1, "step": 0, "rank": 0} | other)))


def test_the_model_is_causal():
    torch.manual_seed(0)
    model = GPT(width=32, layers=2, heads=2, context=16)
    tokens = torch.randint(256, (1, 17))
    hidden = []
    model.norm.register_forward_hook(lambda module, args, output: hidden.append(output.detach()))
    model(tokens)
    tokens[0, 10] ^= 1
    model(tokens)
    assert torch.equal(hidden[0][:, :10], hidden[1][:, :10]) and not torch.equal(hidden[0][:, 10], hidden[1][:, 10])


# ---- Ranks as processes ---------------------------------------------------------------------------------------


def run_ranks(tmp_path: Path, body: str, programs=("only",), on_message=lambda program, rank, message: None):
    """Runs work() of `body` on two ranks of each program. Its globals: launch, os, time, program, rank."""
    script = tmp_path / "ranks.py"
    head = f"import os, sys, time\nsys.path.insert(0, {str(EXAMPLES)!r})\nimport launch\n"
    names = "program, rank = sys.argv[1], int(os.environ['RANK'])\n"
    script.write_text(head + names + textwrap.dedent(body) + "\nlaunch.rank_main(work)\n")
    cluster = launch.Cluster(world=2, device="cpu")
    return launch.run({program: [str(script), program] for program in programs}, cluster, on_message)


def test_results_and_messages_arrive(tmp_path):
    messages = []
    body = """
        def work():
            launch.tell({"hello": rank})
            return [rank, "x" * 200_000]
    """
    results = run_ranks(tmp_path, body, on_message=lambda program, rank, message: messages.append((rank, message)))
    assert results == {"only": {rank: [rank, "x" * 200_000] for rank in range(2)}}
    assert sorted(messages, key=lambda m: m[0]) == [(0, {"hello": 0}), (1, {"hello": 1})]


def test_an_exception_names_the_rank_and_stops_the_others(tmp_path):
    body = """
        def work():
            launch.tell({"pid": os.getpid()})
            if rank == 1:
                raise ValueError("out of luck")
            time.sleep(600)
    """
    pids = []
    with pytest.raises(launch.RankDied, match=r"(?s)^rank 1 .*exit code 1.*ValueError: out of luck"):
        run_ranks(tmp_path, body, on_message=lambda program, rank, message: pids.append(message["pid"]))
    assert not any(alive(pid) for pid in pids)


def test_a_killed_rank_is_named(tmp_path):
    body = """
        def work():
            if rank == 0:
                print("last words", flush=True)
                os.kill(os.getpid(), 9)
            time.sleep(600)
    """
    with pytest.raises(launch.RankDied, match=r"(?s)^rank 0 .*SIGKILL.*last words"):
        run_ranks(tmp_path, body)


def test_programs_take_turns(tmp_path):
    body = """
        def work():
            for i in range(3):
                launch.wait_for_turn()
                launch.tell({"turn": i})
                time.sleep(0.05)
                launch.tell({"turn": i})
    """
    turns = []
    run_ranks(tmp_path, body, ("a", "b"), lambda program, rank, message: turns.append((message["turn"], program)))
    assert turns == sorted(turns) and len(turns) == 24


def test_ranks_end_with_their_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, {str(EXAMPLES)!r})
        import launch
        def work():
            launch.tell({{"pid": os.getpid()}})
            time.sleep(600)
        if len(sys.argv) > 1:
            launch.rank_main(work)
        show = lambda program, rank, message: print(message["pid"], flush=True)
        launch.run({{"only": [__file__, "rank"]}}, launch.Cluster(world=2, device="cpu"), show)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone_soon(pids)


def test_where_nccl_may_talk(monkeypatch):
    """One rank per GPU: as NCCL likes, over sockets of this machine, or through the shaped link and nothing else."""
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)

    def nccl(**where):
        cluster = launch.Cluster(world=2, device="cuda", **where)
        return [{k: v for k, v in cluster.environment(r, 1).items() if k.startswith("NCCL_")} for r in range(2)]

    assert nccl() == [{}, {}]
    sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    assert nccl(transport="sockets") == [sockets, sockets]
    first, second = nccl(link=netns.ShapedLink("10gbit"))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["NCCL_SOCKET_IFNAME"] == second["NCCL_SOCKET_IFNAME"] == netns.INTERFACE
    assert first["NCCL_NET"] == second["NCCL_NET"] == "Socket"
    gpus = [launch.Cluster(world=4, device="cuda", ranks_per_gpu=2).environment(r, 1)["LOCAL_GPU"] for r in range(4)]
    assert gpus == ["0", "0", "1", "1"]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a dead process may wait to be reaped


def gone_soon(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


# ---- The shaped link ------------------------------------------------------------------------------------------


def test_rates_are_read_as_tc_reads_them():
    assert netns.parse_rate("1gbit") == 1e9 and netns.parse_rate("2.5Gbit") == 2.5e9
    assert netns.parse_rate("500mbit") == 5e8 and netns.parse_rate("9600bit") == 9600
    for wrong in ("", "1", "1gb", "fast", "0gbit", "-1gbit", "1gbit; reboot"):
        with pytest.raises(netns.LinkError, match="not a rate"):
            netns.ShapedLink(wrong)


def test_without_root_or_tools_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(netns.shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    with pytest.raises(netns.LinkError, match="install the package iproute2"), netns.ShapedLink("1gbit"):
        pass
    monkeypatch.setattr(netns.shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(netns.LinkError, match="needs root"), netns.ShapedLink("1gbit"):
        pass


def test_a_refusal_of_the_kernel_is_told_and_leaves_nothing(monkeypatch, tmp_path):
    tool = tmp_path / "unshare"
    tool.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(netns, "check_possible", lambda: None)
    link = netns.ShapedLink("1gbit")
    with pytest.raises(netns.LinkError, match="refuses.*Operation not permitted"), link:
        pass
    assert link._keepers == []


@pytest.fixture
def needs_link():
    try:
        with netns.ShapedLink("1gbit"):
            pass
    except netns.LinkError as error:
        pytest.skip(str(error))


def test_link_is_shaped_on_both_sides(needs_link):
    with netns.ShapedLink("123mbit") as link:
        for side, address in enumerate(netns.ADDRESSES):
            shown = subprocess.run(
                [*link.enter(side), "sh", "-c", f"ip address show dev {link.interface}; tc qdisc show"],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert f"inet {address}/30" in shown and "tbf" in shown and "rate 123Mbit" in shown


def test_link_vanishes_when_its_owner_is_killed(needs_link):
    script = f"""if True:
        import sys, time
        sys.path.insert(0, {str(EXAMPLES)!r})
        import netns
        with netns.ShapedLink("1gbit") as link:
            print(*(keeper.pid for keeper in link._keepers), flush=True)
            time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    keepers = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(keepers) == 2 and all(alive(pid) for pid in keepers)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone_soon(keepers)


def test_demo_over_a_link(needs_link):
    done = run_demo("--steps", "2", "--link", "1gbit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "joined by a 1gbit link" in done.stdout
    assert "All 4 losses (2 steps x 2 ranks) are bit-identical in both runs." in done.stdout
