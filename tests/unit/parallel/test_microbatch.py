"""Parts of batches, against NumPy's own splitting and shrew's examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mpimesh as mm
from mpimesh.errors import ModuleError, RankError, ScheduleError, ShapeError
from mpimesh.parallel.microbatch import (
    microbatch_rows,
    replica_rows,
    replica_sizes,
    split_microbatches,
)
from tests.helpers.raises import raises

ROWS = st.integers(0, 200)
PARTS = st.integers(1, 60)


@pytest.mark.parametrize(
    ("rows", "count", "sizes"),
    [
        (10, 4, [3, 3, 3, 1]),
        (9, 4, [3, 3, 3]),
        (5, 4, [2, 2, 1]),
        (6, 4, [2, 2, 2]),
        (3, 8, [1, 1, 1]),
        (7, 1, [7]),
        (0, 4, [0]),
        (1, 4, [1]),
    ],
)
def test_microbatches_by_shrews_examples(rows, count, sizes):
    assert [len(part) for part in split_microbatches(np.zeros((rows, 2)), count)] == sizes


@given(ROWS, PARTS)
def test_microbatches_are_the_rows_in_order(rows, count):
    x = np.arange(rows)
    parts = split_microbatches(x, count)
    assert np.array_equal(np.concatenate(parts), x)
    assert 1 <= len(parts) <= min(count, max(rows, 1))
    # All but the last are of one size, and no smaller size would do with as many parts.
    size = -(-rows // min(count, max(rows, 1)))
    assert all(len(part) == size for part in parts[:-1])
    assert 0 < len(parts[-1]) <= size or rows == 0


def test_microbatches_are_views():
    x = np.zeros((6, 2))
    assert all(np.shares_memory(part, x) for part in split_microbatches(x, 3))


@given(ROWS, PARTS)
def test_replicas_take_what_array_split_gives(rows, parts):
    x = np.arange(rows)
    mine = [x[replica_rows(rows, parts, part)] for part in range(parts)]
    for got, expected in zip(mine, np.array_split(x, parts), strict=True):
        assert np.array_equal(got, expected)
    assert replica_sizes(rows, parts) == [len(one) for one in mine]


@pytest.mark.parametrize("count", [0, -1, 1.5, None, "4"])
def test_a_count_that_is_none_is_refused(count):
    with raises(ScheduleError, 1):
        microbatch_rows(8, count)


def test_bad_numbers_are_refused():
    with raises(ShapeError, "x", "(rows, ...)"):
        split_microbatches(np.float64(3.0), 2)
    with raises(ShapeError, -1):
        microbatch_rows(-1, 2)
    with raises(ShapeError, -1):
        replica_rows(-1, 2, 0)
    with raises(RankError, 0, 2, 3):
        replica_rows(5, 3, 3)


def test_microbatches_that_are_given():
    parts = [np.zeros((4, 10)), np.zeros((3, 17)), {"a": np.zeros(2)}]
    given = mm.Microbatches(parts)
    assert len(given) == 3
    assert given[1] is parts[1]
    assert list(given) == parts
    assert repr(given) == "Microbatches([(4, 10), (3, 17), dict])"
    with raises(ModuleError, "Microbatches", "none"):
        mm.Microbatches([])
