"""DynamiQState by itself: its arguments, copies, pickles, and life without a process group."""

import copy
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
import zipccl
from ranks import same_bits

OPTIONS = {"bits": 3.0, "topology": "direct", "error_feedback": True}


@pytest.mark.parametrize(
    "name, value",
    [
        ("bits", "5"),
        ("bits", None),
        ("bits", True),
        ("bits", float("nan")),
        ("seed", None),
        ("seed", True),
        ("node_size", "2"),
        ("warmup_steps", None),
        ("warmup_steps", 1.5),
        ("exempt_below", "x"),
        ("exempt_1d", "no"),
        ("error_feedback", 1),
        ("correlated", "no"),
        ("block_bytes", "8M"),
        ("block_bytes", 1.5e6),
        ("block_bytes", 2**70),
    ],
)
def test_arguments_of_other_types_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must "):
        zipccl.DynamiQState(**{name: value})


def test_it_shows_what_it_does():
    state = zipccl.DynamiQState(bits=4, topology="ring", seed=3)
    assert repr(state) == "<DynamiQState bits=4.0, topology='ring', widths='fine', seed=3: 0 calls, 0 steps>"


def test_other_things_than_groups_and_states_are_named():
    with pytest.raises(TypeError, match="^group must be a process group or None, not 5.0"):
        zipccl.DynamiQState(5.0)
    zipccl.DynamiQState(dist.GroupMember.NON_GROUP_MEMBER)  # of ranks outside of a new group
    x = torch.ones(4)
    for call in (
        lambda: zipccl.dynamiq.all_reduce(x, 5.0),
        lambda: zipccl.dynamiq.reduce_scatter(x, x, 5.0),
        lambda: zipccl.dynamiq_hook(5.0, None),
    ):
        with pytest.raises(TypeError, match=r"^a zipccl.DynamiQState is wanted, as in .*\(.*, not 5.0$"):
            call()


def test_incomplete_state_dicts_are_named():
    state = zipccl.DynamiQState(seed=3)
    with pytest.raises(ValueError, match="version, seed, calls, steps, rank, residuals missing"):
        state.load_state_dict({})
    partly = {name: value for name, value in zipccl.DynamiQState().state_dict().items() if name != "calls"}
    with pytest.raises(ValueError, match=": calls missing"):
        state.load_state_dict(partly)
    assert (state.seed, state.calls) == (3, 0)


def ones(state):
    return zipccl.dynamiq.all_reduce(torch.ones(9000), state)[0].item()


def copies(rank):
    ranks.init("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = zipccl.DynamiQState(group=pairs[rank // 2], topology="direct", bits=8.0)
    copied = [copy.deepcopy(state), copy.copy(state), copy.deepcopy({"of a trainer": state})["of a trainer"]]
    assert all(c.group is state.group for c in copied)
    assert [round(ones(c)) for c in copied] == [2, 2, 2]
    assert [c.calls for c in copied] == [1, 1, 1] and state.calls == 0

    for lost in (pickle.loads(pickle.dumps(state)), copy.deepcopy(pickle.loads(pickle.dumps(state)))):
        lost = pickle.loads(pickle.dumps(lost))  # once more: it does not come to mean the default group
        for use in (ones, lambda state: state.stats(), lambda state: state.explain(torch.ones(9000))):
            with pytest.raises(ValueError, match=r"lost its group: set \.group"):
                use(lost)
        assert lost.state_dict()["calls"] == 0
        lost.group = state.group
        assert round(ones(lost)) == 2
    everybody = pickle.loads(pickle.dumps(zipccl.DynamiQState(topology="direct", bits=8.0)))
    assert round(ones(everybody)) == 4  # the default group, as before


def test_copies_keep_their_group_and_pickles_do_not_guess():
    ranks.run(copies, 4)


def goes_on(rank):
    """A state saved, pickled and copied when its group is gone, against one that went on."""
    rows = [torch.randn(9000, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(2)]
    ranks.init("gloo")
    state, other = zipccl.DynamiQState(**OPTIONS), zipccl.DynamiQState(**OPTIONS)
    for s in (state, other):
        zipccl.dynamiq.all_reduce(rows[0].clone(), s)
    expected = zipccl.dynamiq.all_reduce(rows[1].clone(), other)
    dist.destroy_process_group()
    saved, pickled, copied = state.state_dict(), pickle.dumps(state), copy.deepcopy(state)
    assert saved["rank"] == rank and saved["residuals"]["calls"].any()
    loaded = zipccl.DynamiQState(**OPTIONS)
    loaded.load_state_dict(saved)
    ranks.init("gloo")
    for s in (loaded, pickle.loads(pickled), copied, state):
        assert same_bits(zipccl.dynamiq.all_reduce(rows[1].clone(), s), expected)
    elsewhere = zipccl.DynamiQState(**OPTIONS)
    elsewhere.load_state_dict(saved | {"rank": 1 - rank})  # another rank's: dropped
    zipccl.dynamiq.all_reduce(rows[1].clone(), elsewhere)
    dropped = zipccl.DynamiQState(**OPTIONS)
    dropped.calls = 1
    zipccl.dynamiq.all_reduce(rows[1].clone(), dropped)
    assert same_bits(elsewhere.state_dict()["residuals"]["calls"], dropped.state_dict()["residuals"]["calls"])
    assert elsewhere.state_dict()["rank"] == rank


def test_states_outlive_their_group():
    ranks.run(goes_on, 2)


def use_after_destruction(rank):
    ranks.init("gloo")
    state = zipccl.DynamiQState(group=dist.new_group([0, 1]), topology="direct")
    ones(state)
    dist.destroy_process_group(state.group)
    with pytest.raises(ValueError, match="process group of this DynamiQState was destroyed"):
        ones(state)
    state.group = None
    return ones(state)


def test_a_destroyed_group_is_named():
    assert ranks.run(use_after_destruction, 2) == [2.0, 2.0]
