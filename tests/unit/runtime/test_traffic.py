"""The rules by which the traffic of a rank is counted."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.runtime.traffic import (
    Members,
    Tally,
    Traffic,
    all_reduced,
    from_others,
    per_rank,
    sparse,
    uniform,
)

sizes = st.integers(1, 9)
amounts = st.integers(0, 200)


def of_all_ranks(size, rule, amount):
    """Bytes and messages: [receiver, bytes or messages, sender]."""
    ranks = range(size)
    return np.stack([from_others(rule, Members(ranks, place), amount) for place in ranks])


@given(sizes, amounts)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size, nbytes):
    counts = of_all_ranks(size, all_reduced, nbytes)
    assert counts[:, 0].sum() == 2 * (size - 1) * nbytes
    # What one rank has from another, that one has from it: a part for its block, and its block.
    np.testing.assert_array_equal(counts, counts.transpose(2, 1, 0))
    full = min(size, nbytes)  # blocks that are not empty
    assert counts[:, 1].sum() == 2 * full * (size - 1)
    if nbytes % size == 0:
        assert (counts[:, 0].sum(axis=1) * size == 2 * (size - 1) * nbytes).all()


@given(sizes, st.integers(0, 200))
def test_an_all_reduce_moves_the_blocks_that_an_array_split_has(size, nbytes):
    blocks = [len(part) for part in np.array_split(np.arange(nbytes), size)]
    for receiver, counts in enumerate(of_all_ranks(size, all_reduced, nbytes)):
        for sender in set(range(size)) - {receiver}:
            parts = [blocks[receiver], blocks[sender]]
            assert counts[0, sender] == sum(parts)
            assert counts[1, sender] == sum(part > 0 for part in parts)


@given(sizes, amounts)
def test_each_other_rank_gives_the_same(size, nbytes):
    counts = of_all_ranks(size, uniform, nbytes)
    others = 1 - np.eye(size, dtype=int)
    np.testing.assert_array_equal(counts[:, 0], others * nbytes)
    np.testing.assert_array_equal(counts[:, 1], others * (nbytes > 0))


@given(st.lists(amounts, min_size=1, max_size=9))
def test_blocks_that_are_listed(blocks):
    size = len(blocks)
    counts = of_all_ranks(size, per_rank, tuple(blocks))
    others = 1 - np.eye(size, dtype=int)
    np.testing.assert_array_equal(counts[:, 0], others * blocks)
    np.testing.assert_array_equal(counts[:, 1], others * (np.array(blocks) > 0))


@given(sizes, st.lists(st.tuples(st.integers(0, 8), amounts, st.integers(0, 3)), max_size=5))
def test_parts_of_a_few_ranks_are_added_up(size, given_parts):
    some = [(source % size, nbytes, messages) for source, nbytes, messages in given_parts]
    counts = of_all_ranks(size, sparse, tuple(number for part in some for number in part))
    expected = np.zeros_like(counts)
    for source, nbytes, messages in some:
        expected[:, :, source] += nbytes, messages
    expected[range(size), :, range(size)] = 0
    np.testing.assert_array_equal(counts, expected)


entries = st.tuples(
    st.sampled_from(["all_reduce", "reduce"]),
    st.sampled_from([all_reduced, uniform]),
    st.integers(0, 2),
    st.integers(0, 3000),
)


@given(st.lists(entries, max_size=30), st.integers(1, 60))
def test_a_counter_adds_up_whatever_it_has_worked_out_before(added, repeats):
    groups = [Members((4,), 0), Members((7, 3, 5), 1), Members((0, 7), 1)]
    traffic = Traffic()
    expected: dict[tuple[str, int], tuple[int, int]] = {}
    for repeat in range(repeats):
        for name, rule, group, nbytes in added:
            members, amount = groups[group], nbytes + repeat  # more than it keeps pending
            traffic.count_received(name, rule, members, amount)
            counts = from_others(rule, members, amount)
            for peer, (received, messages) in zip(members.ranks, counts.T.tolist(), strict=True):
                if messages:
                    had = expected.get((name, peer), (0, 0))
                    expected[name, peer] = (had[0] + received, had[1] + messages)
    assert traffic.received == expected
    assert traffic.received == expected  # asking changes nothing


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_tally_counts_no_more_at_the_end_of_python(monkeypatch, at_the_end):
    """Of many plans that were let go then, one imported a part of NumPy, which was refused."""
    traffic = Traffic()
    tally = Tally(traffic, "all_reduce", 8, (uniform, 8), Members(range(3), 0))
    tally.started = 2
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: at_the_end)
        del tally
    assert traffic.calls == ({} if at_the_end else {"all_reduce": 2})
