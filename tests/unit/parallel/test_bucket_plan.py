"""The laws of a plan of buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ModuleError
from mpimesh.parallel.bucket_plan import plan_buckets
from tests.helpers.raises import raises

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
    with raises(ModuleError, 1):
        plan_buckets([1], ["f"], bucket_bytes)
