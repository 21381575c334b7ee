"""Rules of operations that move elements around: values and arithmetic, no ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import IndexOutOfRangeError, NoRuleError, ShapeError
from mpimesh.layout import Layout, Operand, Placement
from mpimesh.layout.axis_rules import (
    AxisGroup,
    as_indices,
    as_picks,
    axis_groups,
    counts_between,
    full_shape,
    has_unit_runs,
    interval_numbers,
    join_rules,
    lines_placement,
    met,
    overlaps,
    pick_count,
    picked_placement,
    renumbered,
    reshaped_placement,
    row_dim,
    rows_placement,
    stays,
    unit_runs,
    unsplit,
)
from mpimesh.layout.keys import read_key
from mpimesh.mesh import Mesh
from tests.helpers.raises import raises

TEXT = Placement.from_text


@given(st.data())
def test_picks_are_found(data):
    """Of ranges and of arrays alike, what a loop finds."""
    length = data.draw(st.integers(1, 12))
    one = range(length)[data.draw(st.slices(length))]
    picks = one if data.draw(st.booleans()) else np.array(one, np.int64)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(one))] * 2)))
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2)))
    new, old, count = met(picks, start, stop, low, high)
    expected = [(at, i - low) for at, i in enumerate(one[start:stop]) if low <= i < high]
    assert count == len(expected)
    assert np.arange(stop - start)[new].tolist() == [at for at, _ in expected]
    assert np.arange(max(high - low, 0))[old].tolist() == [i for _, i in expected]


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_picks_are_counted(picks, new, old):
    bounds, source = np.linspace(0, len(picks), new + 1).astype(int), np.arange(old + 1) * 10 // old
    found = counts_between(np.array(picks, np.int64), bounds, source)
    for row in range(new):
        for column in range(old):
            part = picks[bounds[row] : bounds[row + 1]]
            assert found[row, column] == sum(source[column] <= i < source[column + 1] for i in part)


def _edges(data, length, parts):
    """Draw where intervals of an axis begin and end; some have nothing."""
    inner = data.draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1))
    return np.array([0, *sorted(inner), length], np.int64)


@given(st.data())
def test_rows_of_indices_do_as_one_array_of_them_does(data):
    length = data.draw(st.integers(1, 9))
    slices = data.draw(st.lists(st.slices(length), max_size=4))
    rows = tuple(range(length)[one] for one in slices)
    array = as_indices(rows) if rows else np.zeros(0, np.int64)
    assert array.tolist() == [i for row in rows for i in row]
    assert pick_count(rows) == len(array)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(array))] * 2)))
    found = [(at + n, i) for at, row in unit_runs(rows, start, stop) for n, i in enumerate(row)]
    assert found == list(enumerate(array[start:stop].tolist()))
    parts = data.draw(st.integers(1, 4))
    new, old = _edges(data, len(array), parts), _edges(data, length, parts)
    assert np.array_equal(counts_between(rows, new, old), counts_between(array, new, old))
    mesh, placement = Mesh(f"a={parts}"), TEXT("S0")
    picked = [picked_placement(mesh, placement, (length,), (one,)) for one in (rows, array)]
    assert picked[0] == picked[1]
    same = all(old[k] <= i < old[k + 1] for k in range(parts) for i in array[new[k] : new[k + 1]])
    assert stays(rows, new, old) == stays(array, new, old) == same


def test_many_rows_of_indices_become_one_array():
    rows = (range(3),) * 65
    assert as_picks(rows[:64]) == rows[:64]
    assert np.array_equal(as_picks(rows), np.tile(np.arange(3), 65))
    assert has_unit_runs(range(2, 3, 5))
    assert not has_unit_runs(range(0, 4, 2))


@given(st.data())
def test_tiles_of_indices_are_numbered(data):
    """Of few tiles and of many, more than small integers can count, too."""
    shape = data.draw(st.tuples(*[st.integers(1, 40)] * data.draw(st.integers(1, 2))))
    bounds = [_edges(data, n, data.draw(st.sampled_from([1, 2, 5, 16, 17, 40]))) for n in shape]
    count = data.draw(st.integers(0, 9))
    rows = [
        np.array(
            data.draw(st.lists(st.integers(0, n - 1), min_size=count, max_size=count)), np.int64
        )
        for n in shape
    ]
    found = interval_numbers(rows, bounds).tolist()
    for number, *index in zip(found, *rows, strict=True):
        places = np.unravel_index(number, [len(edges) - 1 for edges in bounds])
        for i, edges, place in zip(index, bounds, places, strict=True):
            assert edges[place] <= i < edges[place + 1]


@pytest.mark.parametrize(
    ("placement", "pick", "expected"),
    [
        ("S0", range(2, 7), "S[0](1,3,1)"),
        ("S0", range(9), "S[0]"),
        ("S0(2,3,4)", range(9), "S[0](2,3,4)"),
        ("S0(2,3,4)", range(8, -1, -1), "S[0](2,3,4)"),
        ("S0", range(8, 1, -1), "S[0]"),
        ("S0", np.array([0, 0, 8, 8]), "S[0](2,0,2)"),
        ("S0", np.array([8, 0]), "S[0]"),
        ("R", range(2, 3), "R"),
        ("P", range(2, 3), "P"),
    ],
)
def test_where_picked_elements_lie(placement, pick, expected):
    assert str(picked_placement(Mesh("a=3"), TEXT(placement), (9,), (pick,))) == expected


@pytest.mark.parametrize(
    ("old", "new", "before", "after", "moves"),
    [
        ((4, 6), (24,), "S0", "S[0]", False),
        ((4, 6), (24,), "S1", "S[0]", True),
        ((4, 6), (4, 2, 3), "S1", "S[1]", False),
        ((24,), (4, 6), "S0", "S[0]", False),
        ((24,), (4, 6), "S0(6,18)", "S[0](1,3)", False),
        ((24,), (4, 6), "S0(7,17)", "S[0]", True),
        ((4, 1, 6), (4, 6), "S1", "R", True),
        ((4, 6), (4, 1, 6), "P", "P", False),
        ((0, 6), (3, 0), "S0", "R", False),
    ],
)
def test_splits_that_outlive_a_reshape(old, new, before, after, moves):
    placement, found = reshaped_placement(Mesh("a=2"), TEXT(before), old, new)
    assert (str(placement), found) == (after, moves)


def test_two_dims_of_one_axis_get_two():
    placement, moves = reshaped_placement(Mesh("a=2,b=3"), TEXT("S0, S0"), (12, 5), (2, 6, 5))
    assert (str(placement), moves) == ("S[0], S[1]", False)


def test_axes_become_axes():
    assert axis_groups((4, 1, 6, 5), (2, 2, 30, 1)) == [
        AxisGroup((0,), (0, 1)),
        AxisGroup((2, 3), (2,)),
    ]
    assert full_shape((4, 6), (3, -1)) == (3, 8)
    for new in [(5, -1), (-1, -1), (23,), (0, -1), (-2, -12)]:
        with raises(ShapeError, (4, 6), 24, new):
            full_shape((4, 6), new)


def test_axes_are_renumbered():
    assert str(renumbered(TEXT("S0, S1(2,1), P"), {1: 3})) == "R, S[3](2,1), P"
    assert str(unsplit(TEXT("S0, S1, S0"), {0})) == "R, S[1], R"


def test_joined_where_most_is():
    mesh = Mesh("a=2")
    operands = [Operand((3, 4), TEXT("S0")), Operand((5, 4), TEXT("S1"))]
    first, second = join_rules(mesh, operands, 0)
    assert [str(one) for one in first.inputs] == ["S[0](3,0)", "S[0](1,4)"]
    assert str(first.output) == "S[0]"
    assert str(second.output) == "S[1]"
    assert overlaps([3, 0, 5], 3) == [(3, 0, 0), (0, 0, 0), (0, 3, 2)]


def test_lines_and_rows():
    mesh = Mesh("a=2,b=2")
    assert str(lines_placement(mesh, TEXT("S0, S1"), (8, 8), 0)) == "S[1], S[1]"
    assert lines_placement(mesh, TEXT("S0, S0"), (8, 3), 0) is None
    assert str(rows_placement(TEXT("S1, S0"), (4, 4), 2)) == "R, S[0]"
    assert str(rows_placement(TEXT("S1, S2"), (4, 4, 4), 2)) == "S[0], S[2]"
    assert str(rows_placement(TEXT("S0(1,3), S2"), (4, 4, 4), 2, only=True)) == "S[0](1,3), R"
    assert row_dim(TEXT("S1, S0")) == 1
    assert row_dim(TEXT("S1, R")) is None


KEYS = [1, slice(1, None), (None, 2, ...), (..., [1, 0]), ([0, 1], slice(None), [1, 2])]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_shapes_of_keys(key):
    assert read_key(key, (4, 3, 5)).shape == np.empty((4, 3, 5))[key].shape


@pytest.mark.parametrize(
    ("key", "error"),
    [(True, NoRuleError), (np.array(True), NoRuleError), (1.5, IndexOutOfRangeError)],
)
def test_keys_that_are_none(key, error):
    with pytest.raises(error):
        read_key(key, (4, 3))


def test_uneven_blocks_are_a_layout():
    mesh = Mesh("a=3")
    placement = picked_placement(mesh, TEXT("S0"), (9,), (range(2, 7),))
    assert Layout(mesh, placement).local_shape((5,), 1) == (3,)
