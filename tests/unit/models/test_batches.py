"""Sentences dealt to batches and replicas, and heads dealt to ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpimesh.errors import ModelError
from mpimesh.models import Batch, BertConfig, plan_batches
from mpimesh.models.batches import deal
from mpimesh.models.loading import check_ranks
from mpimesh.parallel.microbatch import replica_rows
from tests.helpers.depth import examples
from tests.helpers.raises import raises

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@settings(max_examples=examples(60))
@given(lengths=LENGTHS, batch_tokens=st.integers(1, 100), replicas=st.integers(1, 5))
def test_each_sentence_is_in_one_batch_of_its_size(lengths, batch_tokens, replicas):
    batches = plan_batches(lengths, batch_tokens=batch_tokens, replicas=replicas)
    rows = [row for one in batches for row in one.rows]
    assert sorted(rows) == list(range(len(lengths)))
    assert all(one.rows for one in batches)
    ordered = [lengths[row] for row in rows]
    assert ordered == sorted(ordered, reverse=True)
    for one in batches:
        assert one.length == max(lengths[row] for row in one.rows)
        assert len(one.rows) * one.length <= max(batch_tokens, max(lengths))


def test_batches_are_alike_and_as_many_for_each_replica():
    lengths = np.random.default_rng(0).integers(3, 30, 400).tolist()
    for replicas in (1, 2, 3, 8):
        batches = deal(plan_batches(lengths, batch_tokens=512, replicas=replicas), replicas)
        assert len(batches) % replicas == 0
        hands = [batches[replica_rows(len(batches), replicas, r)] for r in range(replicas)]
        work = [sum(len(one.rows) * one.length for one in hand) for hand in hands]
        assert max(work) < 1.1 * np.mean(work)
        # Sorted by length, little is padding.
        assert sum(work) < 1.1 * sum(lengths)


@settings(max_examples=examples(40))
@given(count=st.integers(0, 20), replicas=st.integers(1, 6))
def test_dealing_keeps_all_and_gives_the_dearest_out_first(count, replicas):
    batches = [Batch((number,), 100 - number) for number in range(count)]
    dealt = deal(batches, replicas)
    assert sorted(dealt, key=lambda one: one.rows) == batches
    hands = [dealt[replica_rows(count, replicas, r)] for r in range(replicas)]
    for turn in range(-(-count // replicas)):
        given_out = {hand[turn].rows[0] for hand in hands if len(hand) > turn}
        expected = range(turn * replicas, min((turn + 1) * replicas, count))
        assert given_out == set(expected)


def test_a_batch_is_padded_to_its_longest():
    ids = [np.array([5, 6]), np.array([7]), np.array([1, 2, 3])]
    table, mask = Batch((0, 1), 2).arrays(ids)
    np.testing.assert_array_equal(table, [[5, 6], [7, 0]])
    np.testing.assert_array_equal(mask, [[True, True], [True, False]])


def config(heads, hidden):
    return BertConfig(10, 4 * heads, 2, heads, hidden, 16, 2, 1e-12, 16)


@settings(max_examples=examples(40))
@given(heads=st.integers(1, 16), hidden=st.integers(1, 40), size=st.integers(1, 16))
def test_more_ranks_than_heads_or_columns_are_refused(heads, hidden, size):
    if size > min(heads, hidden):
        with raises(ModelError, f"{heads} heads", f"{hidden} columns", f"{size} ranks"):
            check_ranks(config(heads, hidden), size)
    else:
        check_ranks(config(heads, hidden), size)
