"""Waits of ranks for each other, and cycles of them."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from mpimesh.runtime.deadlock import (
    Waiting,
    blocked_by,
    deadlock_text,
    find_cycle,
    find_deadlock,
    ranks_reaching,
)
from tests.helpers.depth import examples


def in_collective(among, number, takes, started):
    return Waiting(f"{among} {number}", among, number, takes, started=started)


def in_message(name, peer, tag, count, **done):
    return Waiting(f"{name} {tag}", "world", 0, [peer], (name, tag, count), **done)


def test_a_rank_that_has_done_its_part_blocks_nobody():
    states = {
        0: in_collective("world", 3, [0, 1], {"world": 3}),
        1: in_collective("other", 1, [1, 2], {"world": 3, "other": 1}),
    }
    assert blocked_by(0, states) == []
    assert find_deadlock(states, [0]) == []


def test_ranks_that_do_not_wait_block_nobody():
    states = {0: in_collective("world", 3, [0, 1, 2], {"world": 3})}
    assert blocked_by(0, states) == []


def test_three_groups_in_a_ring():
    states = {
        2: in_collective("ca", 1, [2, 0], {"ca": 1}),
        0: in_collective("ab", 1, [0, 1], {"ab": 1}),
        1: in_collective("bc", 1, [1, 2], {"bc": 1}),
        3: in_collective("world", 1, [0, 1, 2, 3], {"world": 1}),
    }
    for start in states:
        assert find_deadlock(states, [start]) == [0, 1, 2]
    assert ranks_reaching(states, [0, 1, 2]) == [0, 1, 2, 3]
    text = deadlock_text(states, [0, 1, 2])
    assert "rank 2 waits for rank 0, in ca 1" in text
    assert "rank 3 waits for these" in text


def test_messages_are_counted_by_tag():
    states = {
        0: in_message("recv", 1, 4, 2, received={"world|1|4": 2}),
        1: in_message("recv", 0, 7, 1, sent={"world|0|4": 1, "world|0|5": 3}),
    }
    assert find_deadlock(states, [1]) == [0, 1]
    sent = {"world|0|4": 2}
    states[1] = in_message("recv", 0, 7, 1, sent=sent)
    assert blocked_by(0, states) == []


def test_a_send_waits_for_its_receive():
    states = {
        0: in_message("send", 1, 0, 1, sent={"world|1|0": 1}),
        1: in_message("send", 0, 0, 1, sent={"world|0|0": 1}),
    }
    assert find_deadlock(states, [0]) == [0, 1]
    states[1] = in_message("send", 0, 0, 1, received={"world|0|0": 1})
    assert find_deadlock(states, [0]) == []


def test_a_wait_that_nobody_counts_ends_a_chain():
    states = {0: Waiting("a message of a pipeline", "dp", 0, [1]), 1: Waiting("sleep", takes=[0])}
    assert find_deadlock(states, [0]) == []


@settings(max_examples=examples(200))
@given(st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 7), max_size=3), max_size=8))
def test_a_circle_is_one_and_is_found_if_there_is_one(waits):
    found = find_cycle(lambda rank: waits.get(rank, ()), waits)
    for rank, peer in zip(found, found[1:] + found[:1], strict=True):
        assert peer in waits[rank]
    reached = {rank: set(peers) for rank, peers in waits.items()}
    for _ in range(8):
        for peers in reached.values():
            peers |= {far for peer in peers for far in reached.get(peer, ())}
    assert bool(found) == any(rank in peers for rank, peers in reached.items())


def test_a_long_chain_of_ranks():
    """Deeper than Python calls itself."""
    size = 5000
    assert find_cycle(lambda rank: [rank + 1] if rank < size else [], range(size)) == []
    assert find_cycle(lambda rank: [(rank + 1) % size], [7]) == [*range(size)]
