"""Tests that torch ships for its own backends pass on zipccl: by default, and with everything compressed."""

import pytest
import torch_suite

EVERYTHING = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "reduce_scatter", "all_reduce")
MODES = {
    "default": {},
    "zip": {f"ZIPCCL_{name.upper()}": "zip" for name in EVERYTHING} | {"ZIPCCL_MIN_BYTES": "0", "ZIPCCL_CODE": "dense"},
}

# Regular expressions for the names of tests, behind "test_".
MOVES = "(all_gather|broadcast|gather|scatter)(?!.*cuda).*"
ALL_TO_ALL = "all_to_all(?!.*cuda).*"
SUMS = "(all_reduce|reduce|sparse)_(?!.*(cuda|full_group|coalesced)).*"
GROUPS = (
    "(new_subgroups(?!.*(size_exceeds|negative))|destroy|get_(?!data)|monitored_barrier_gloo|i?send|irecv|batch_).*"
)
TRAINING = (
    "(ddp_|DistributedDataParallelCPU|accumulate|grads|static_graph|output_unused|undefined_grad|different_graph).*"
)

LEFT_OUT = (
    "ddp_logging_data",  # torch calls the groups of every plug-in "custom" there
    "ddp_profiling",  # gloo ends some events after those who waited have gone on
    "ddp_.*(mixed_precision|apply_optim|uneven_inputs(_stop|$)|device$|inference|compile|shared_grad)",  # want a GPU
    "ddp_model_diff_shape",  # waits for timeouts
)

# Which tests, ranks, how many there are at least, and how they are run.
RUNS = [
    pytest.param("default", GROUPS, 3, 20, {}, id="default-groups"),
    pytest.param("default", TRAINING, 2, 35, {"gpu_tests": True}, id="default-training"),
    pytest.param("zip", MOVES, 3, 20, {}, id="zip-moves"),
    pytest.param("zip", SUMS, 3, 15, {}, id="zip-sums"),
    pytest.param("zip", ALL_TO_ALL, 3, 10, {"named": "mpi"}, id="zip-all-to-all"),
    pytest.param("zip", GROUPS, 3, 20, {}, id="zip-groups"),
    pytest.param("zip", TRAINING, 2, 35, {"gpu_tests": True}, id="zip-training"),
]


@pytest.mark.parametrize(("mode", "names", "world", "least", "how"), RUNS)
def test_torch_suite(mode, names, world, least, how):
    if lacks := torch_suite.missing():
        pytest.skip(f"this Python has no {lacks[0]}")
    outcomes = torch_suite.run(f"test_(?!{'|'.join(LEFT_OUT)}){names}", world, "zipccl", MODES[mode], **how)
    failed = {name: ranks for name, ranks in outcomes.items() if any(r.state == "failed" for r in ranks)}
    if failed:  # on gloo, too?
        gloo = torch_suite.run("|".join(failed), world, "gloo", {}, **how)
        failed = {name: r for name, r in failed.items() if all(on_gloo.state == "passed" for on_gloo in gloo[name])}
    assert not failed
    passed = [ranks for ranks in outcomes.values() if all(r.state == "passed" for r in ranks)]
    assert len(passed) >= least
    zipped = sum(r.zipped_calls for ranks in passed for r in ranks)
    assert zipped > 0 if mode == "zip" else zipped == 0
