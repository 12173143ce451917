"""The steps of the topologies, followed on paper: every contribution reaches every sum, once."""

import pytest
import torch.distributed as dist
import zipccl
from zipccl import _C

TOPOLOGIES = ["direct", "ring", "butterfly"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 16, 33])
def test_every_contribution_arrives_once(topology, n):
    plans = [_C.hop_steps(topology, n, me) for me in range(n)]
    assert len({len(reduce) for reduce, _ in plans}) == 1
    holds = [[{me} for _ in range(n)] for me in range(n)]  # [rank][chunk]: whose values are in its partial sum
    sent = [[0] * n for _ in range(n)]
    for s in range(len(plans[0][0])):
        on_the_way = []
        for me in range(n):
            sends, receives = plans[me][0][s]
            for peer, chunks in sends:
                assert (me, list(chunks)) in [(p, list(c)) for p, c in plans[peer][0][s][1]]
                on_the_way += [(peer, c, set(holds[me][c])) for c in chunks]
                for c in chunks:
                    sent[me][c] += 1
            assert len(receives) == len(sends)
        for peer, c, values in on_the_way:
            assert not holds[peer][c] & values
            holds[peer][c] |= values
    for me in range(n):
        assert holds[me][me] == set(range(n))
        assert sent[me] == [0 if c == me else 1 for c in range(n)]  # packs each chunk once: n compressions in all
    have = [{me} for me in range(n)]
    for s in range(len(plans[0][1])):
        before = [set(h) for h in have]
        for me in range(n):
            for peer, chunks in plans[me][1][s][0]:
                assert set(chunks) <= before[me]
                assert not set(chunks) & have[peer]
                have[peer] |= set(chunks)
    assert all(h == set(range(n)) for h in have)


def test_number_of_steps():
    cases = [("direct", 8), ("ring", 8), ("butterfly", 8), ("butterfly", 5)]
    assert [len(_C.hop_steps(*case, 0)[0]) for case in cases] == [1, 7, 3, 3]


LINK = (1e-5, 1e-6, 1e9, 1e9)  # alpha, message, bytes/s to all, bytes/s to one


def best(n, raw_bytes, packed_bytes, every=LINK, inside=LINK, between=LINK, node=1):
    return _C.best_topology(n, node, raw_bytes, packed_bytes, every, inside, between)


def test_large_tensors_go_direct():
    assert best(8, 4e8, 6e7)[:2] == ("direct", False)


def test_many_small_messages_go_by_butterfly():
    slow_messages = (1e-5, 1e-5, 1e9, 1e9)
    assert best(64, 4e4, 6e3, slow_messages)[:2] == ("butterfly", False)


def test_ring_where_many_senders_at_once_are_slow():
    congested = (1e-5, 1e-6, 1e8, 1e9)
    assert best(8, 4e8, 6e7, congested)[0] in ("butterfly", "ring")


def test_long_rings_are_not_taken():
    congested = (1e-5, 1e-6, 1e8, 1e9)
    assert best(64, 4e8, 6e7, congested)[0] == "butterfly"


def test_long_rings_of_few_bits_are_refused():
    group = dist.ProcessGroup(0, 64)
    for topology, bits in (("ring", 4.0), ("butterfly", 3.0)):
        zipccl.DynamiQState(group, bits=bits, topology=topology, node_size=1)._options()
    with pytest.raises(ValueError, match="ring of 64 ranks"):
        zipccl.DynamiQState(group, bits=3.0, topology="ring", node_size=1)._options()


def test_nodes_pay_where_the_network_is_slow():
    fast = (5e-6, 1e-6, 2e11, 2e11)
    slow = (2e-5, 1e-6, 1.25e8, 1.25e8)
    assert best(16, 4e8, 6e7, slow, fast, slow, node=8)[1]
    assert not best(16, 4e8, 6e7, fast, fast, fast, node=8)[1]
