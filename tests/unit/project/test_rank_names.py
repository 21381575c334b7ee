"""Ranks as text: runs, strides, their order, and how many are shown."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mpimesh.arguments import rank_names, ranks_of, ranks_text


@given(st.lists(st.integers(0, 40), unique=True) | st.builds(range, *[st.integers(0, 99)] * 2))
def test_ranks_as_text(ranks):
    assert ranks_of(ranks_text(ranks)) == [*ranks]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 9))
def test_ranks_at_one_distance_as_text(first, step, count):
    ranks = range(first, first + step * count, step)
    assert ranks_of(ranks_text(ranks)) == [*ranks]


def test_ranks_with_one_stride_are_short():
    assert ranks_text(range(0, 4096, 8)) == "0-4088:8"
    assert ranks_text([3, 0, 1, 2, 8]) == "3,0-2,8"
    assert ranks_of("0-12:4,20,30-31") == [0, 4, 8, 12, 20, 30, 31]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([], "ranks none"),
        ([2], "rank 2"),
        ([3, 1, 0, 2], "ranks 0-3"),
        ({0, 1, 3}, "ranks 0-1, 3"),
        ([0, 2], "ranks 0, 2"),
        ([4, 2, 0], "ranks 0, 2, 4"),
        ([6, 4, 2, 0], "ranks 0-6:2"),
    ],
)
def test_rank_names(ranks, name):
    assert rank_names(ranks) == name


def test_of_many_ranks_some_are_named():
    squares = [n * n for n in range(40)]
    assert rank_names(squares).endswith(", 225, 256 and 23 more")
    assert rank_names(squares, 2) == "ranks 0-1, 4 and 37 more"
