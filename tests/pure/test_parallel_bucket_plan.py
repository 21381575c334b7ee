"""The laws of a plan of buckets."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpimesh.errors import ModuleError
from mpimesh.parallel.bucket_plan import merge_buckets, plan_buckets, reduced_s

SIZES = st.lists(st.integers(0, 50), max_size=40)


@given(SIZES, st.data(), st.integers(1, 60))
def test_a_plan_keeps_its_laws(sizes, data, bucket_bytes):
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    plan = plan_buckets(sizes, kinds, bucket_bytes)
    assert sorted(n for members in plan for n in members) == list(range(len(sizes)))
    for members in plan:
        assert list(members) == sorted(members, reverse=True)
        assert len({kinds[n] for n in members}) == 1
        assert sum(sizes[n] for n in members) <= bucket_bytes or len(members) == 1
    # Reduced in the order in which the last gradients come, backward going from the end.
    assert list(plan) == sorted(plan, key=lambda members: -members[-1])
    for kind in "ab":
        of_kind = [members for members in plan if kinds[members[0]] == kind]
        for one, after in pairwise(of_kind):
            assert sum(sizes[n] for n in (*one, after[0])) > bucket_bytes


def test_an_example():
    assert plan_buckets([4, 4, 4, 100, 4], ["f"] * 5, 8) == ((4,), (3,), (2, 1), (0,))


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_has_room(bucket_bytes):
    with pytest.raises(ModuleError, match="at least 1"):
        plan_buckets([1], ["f"], bucket_bytes)


def cuts_of(order, kinds):
    """Yield every way to cut `order` into buckets of one kind."""
    for borders in product([False, True], repeat=max(0, len(order) - 1)):
        plan = [[order[0]]] if order else []
        for number, border in zip(order[1:], borders, strict=True):
            if border or kinds[number] != kinds[plan[-1][-1]]:
                plan.append([])
            plan[-1].append(number)
        yield plan


def end_of(plan, ready, sizes, latency, rate):
    """When all is reduced, by a clock that runs: nothing of the planner's own arithmetic."""
    clock = 0.0
    for members in plan:
        clock = max([clock, *(ready[number] for number in members)]) + latency
        clock += sum(sizes[number] / rate for number in members)
    return clock


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20), st.sampled_from("aab")), max_size=8),
    st.integers(0, 8),
    st.sampled_from([0.25, 1.0, 4.0]),
)
@settings(max_examples=120, deadline=None)
def test_the_merge_is_the_best_of_all_cuts(parameters, latency, rate):
    ready, sizes, kinds = ([one[i] for one in parameters] for i in range(3))
    plan = merge_buckets(ready, sizes, kinds, latency_s=latency, bytes_per_s=rate)
    order = [number for members in plan for number in members]
    assert sorted(order) == list(range(len(parameters)))
    assert [ready[number] for number in order] == sorted(ready)
    assert all(len({kinds[number] for number in members}) == 1 for members in plan)
    best = min(
        (end_of(cut, ready, sizes, latency, rate) for cut in cuts_of(order, kinds)), default=0.0
    )
    end = reduced_s(plan, ready, sizes, latency_s=latency, bytes_per_s=rate)
    if parameters:
        assert end == end_of(plan, ready, sizes, latency, rate) == best


def test_latency_merges_and_waiting_splits():
    ready, sizes, kinds = [3.0, 2.0, 1.0], [1, 1, 1], ["f"] * 3
    every = merge_buckets(ready, sizes, kinds, latency_s=0.0, bytes_per_s=1e9)
    assert every == ((2,), (1,), (0,))
    one = merge_buckets(ready, sizes, kinds, latency_s=10.0, bytes_per_s=1e9)
    assert one == ((2, 1, 0),)
    # The first is reduced while the others are computed; those come too close together.
    some = merge_buckets([3.0, 2.9, 1.0], sizes, kinds, latency_s=0.5, bytes_per_s=10)
    assert some == ((2,), (1, 0))
    assert merge_buckets([], [], [], latency_s=1.0, bytes_per_s=1.0) == ()
    assert reduced_s((), [], [], latency_s=1.0, bytes_per_s=1.0) == 0.0
