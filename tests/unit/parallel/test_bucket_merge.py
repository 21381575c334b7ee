"""The merge of gradients into buckets, against all cuts that there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.parallel.bucket_plan import Reduction, merge_buckets, reduced_s
from tests.helpers.depth import examples


def cuts_of(order, kinds):
    """Yield every way to cut `order` into buckets of one kind."""
    for borders in product([False, True], repeat=max(0, len(order) - 1)):
        plan = [[order[0]]] if order else []
        for number, border in zip(order[1:], borders, strict=True):
            if border or kinds[number] != kinds[plan[-1][-1]]:
                plan.append([])
            plan[-1].append(number)
        yield plan


def end_of(plan, ready, sizes, latency, rate, busy):
    """When all is summed: written down a second time, with every gradient's own delay."""
    delayed = list(ready)
    clock = 0.0
    for members in plan:
        clock = max([clock, *(delayed[number] for number in members)])
        takes = latency + sum(sizes[number] / rate for number in members)
        clock += takes
        delayed = [one + busy * takes for one in delayed]
    return clock


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 20), st.sampled_from("aab")),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 8),
    st.sampled_from([0.25, 1.0, 4.0]),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
@settings(max_examples=examples(150))
def test_the_merge_is_the_best_of_all_cuts(parameters, latency, rate, busy):
    ready, sizes, kinds = ([one[i] for one in parameters] for i in range(3))
    reduction = Reduction(latency, rate, busy)
    plan = merge_buckets(ready, sizes, kinds, reduction)
    order = [number for members in plan for number in members]
    assert sorted(order) == list(range(len(parameters)))
    assert [ready[number] for number in order] == sorted(ready)
    assert all(len({kinds[number] for number in members}) == 1 for members in plan)
    times = ready, sizes, latency, rate, busy
    ends = [(end_of(cut, *times), len(cut)) for cut in cuts_of(order, kinds)]
    end = reduced_s(plan, ready, sizes, reduction)
    assert end == end_of(plan, *times) == min(ends)[0]
    assert len(plan) == min(ends)[1]


def test_latency_merges_and_waiting_splits():
    ready, sizes, kinds = [3.0, 2.0, 1.0], [1, 1, 1], ["f"] * 3
    assert merge_buckets(ready, sizes, kinds, Reduction(0.0, 1e9)) == ((2, 1), (0,))
    assert merge_buckets(ready, sizes, kinds, Reduction(10.0, 1e9)) == ((2, 1, 0),)
    # The first is summed while the others are computed; those come too close together.
    assert merge_buckets([3.0, 2.9, 1.0], sizes, kinds, Reduction(0.5, 10)) == ((2,), (1, 0))
    assert merge_buckets(ready, sizes, kinds, Reduction(0.5, 10, busy=1.0)) == ((2, 1, 0),)
    assert merge_buckets([], [], [], Reduction(1.0, 1.0)) == ()
    assert reduced_s((), [], [], Reduction(1.0, 1.0)) == 0.0


@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_thousands_of_parameters_are_planned_at_once(busy):
    rng = np.random.default_rng(0)
    ready = np.cumsum(rng.random(5000)).tolist()
    sizes = rng.integers(0, 100_000, 5000).tolist()
    reduction = Reduction(3.0, 1e6, busy)
    plan = merge_buckets(ready, sizes, ["f"] * 5000, reduction)
    assert sorted(number for members in plan for number in members) == list(range(5000))
    halves = [[*range(2500)], [*range(2500, 5000)]]
    assert 2 < len(plan) <= 64
    assert reduced_s(plan, ready, sizes, reduction) < reduced_s(halves, ready, sizes, reduction)


def test_more_kinds_in_turn_than_buckets_are_usual():
    count = 150
    plan = merge_buckets(
        [*range(count)], [1] * count, [i % 2 for i in range(count)], Reduction(1, 1)
    )
    assert plan == tuple((number,) for number in range(count))
