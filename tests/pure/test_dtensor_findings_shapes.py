"""Shapes and axes at the edge: what NumPy takes is taken, and the rest refused on all ranks."""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import AxisError, DTypeError, IndexOutOfRangeError, ShapeError
from tests.pure.dtensor_check import agree, numbers, placements_of, raises_alike, same

WITHOUT_AXES: list[Any] = [
    lambda x: np.cumsum(x, 0),
    lambda x: np.cumprod(x, -1),
    lambda x: np.nancumsum(x, 0),
    lambda x: np.nancumprod(x, 0),
    lambda x: np.argsort(x, 0),
    lambda x: np.argsort(x, -1),
    lambda x: np.compress([True], x, 0),
    lambda x: np.compress([False], x, -1),
    lambda x: np.compress([True], x),
    lambda x: np.take(x, [0, 0], 0),
    lambda x: np.take(x, [[0], [-1]], -1),
    lambda x: np.ravel(np.take(x, 0, 0)),
    lambda x: np.roll(x, 1),
    lambda x: np.diff(x, 0),
    lambda x: np.diff(x, 0, cast(Any, None)),
    *(
        lambda x, function=function, axis=axis, first=first: function(
            x, axis=axis, include_initial=first
        )
        for function in (np.cumulative_sum, np.cumulative_prod)
        for axis in (None, 0, -1)
        for first in (False, True)
    ),
]


@pytest.mark.parametrize("dims", ["a=1", "a=3"])
def test_an_array_without_axes_is_a_row_of_one(dims):
    x = np.array(5)
    agree(dims, [(f, [x], [place]) for f in WITHOUT_AXES for place in ("R", "P")])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.cumsum(x, 1),
        lambda x: np.cumulative_sum(x, axis=1),
        lambda x: np.argsort(x, -2),
        lambda x: np.compress([True], x, 1),
        lambda x: np.take(x, 0, 1),
        lambda x: np.sort(x, 0),
        lambda x: np.take_along_axis(x, np.array([0]), 0),
        np.tril,
    ],
)
def test_an_axis_that_there_is_not(function):
    raises_alike("a=2", AxisError, [(function, np.array(5), "R")])


@pytest.mark.parametrize("dims", ["a=1", "a=3"])
def test_no_axes_to_roll(dims):
    x = numbers((3, 4))
    rolls: list[Any] = [
        lambda x: np.roll(x, 1, ()),
        lambda x: np.roll(x, (), ()),
        lambda x: np.roll(x, (), 0),
        lambda x: np.roll(x, (1, 2, 3), 1),
        lambda x: np.roll(x, 2, (0, 0, 1)),
    ]
    agree(dims, [(f, [x], [place]) for f in rolls for place in placements_of(2)])
    raises_alike("a=2", ShapeError, [(lambda x: np.roll(x, (1, 2), ()), x, "S0")])


@pytest.mark.parametrize("dims", ["a=1", "a=3"])
def test_triangles_of_a_row(dims):
    triangles: list[Any] = [
        lambda x, function=function, k=k: function(x, k)
        for function in (np.tril, np.triu)
        for k in (-1, 0, 1)
    ]
    cases = [(f, [numbers((n,))], [p]) for f in triangles for n in (4, 0) for p in placements_of(1)]
    agree(dims, cases)


@pytest.mark.parametrize("dims", ["a=1", "a=3"])
def test_nothing_to_put_in_order(dims):
    functions: list[Any] = [
        lambda x, function=function, kth=kth, axis=axis: function(x, kth, axis)
        for function in (np.partition, np.argpartition)
        for kth in (0, -1, [0, 7])
        for axis in (0, 1, None)
    ]
    agree(dims, [(f, [np.ones((0, 3))], [p]) for f in functions for p in placements_of(2)])


@pytest.mark.parametrize("dims", ["a=1", "a=3"])
def test_differences(dims):
    dates = np.array([3, 1, 8, 7], "M8[s]")
    cases = [
        (lambda x, n=n: np.diff(x, n), [x], [p])
        for x in (dates, dates[:1], dates[:0])
        for n in (0, 1, 2, 9)
        for p in ("R", "S0")
    ]
    agree(dims, [*cases, (lambda x: np.diff(x, 0, 5), [numbers((3, 4))], ["S0"])])
    pair = np.dtype([("a", "i4"), ("b", "f8")])
    for empty in (np.zeros((0, 3), pair), np.zeros(0, "U3"), np.zeros(1, pair)):
        raises_alike(dims, TypeError, [(np.diff, empty, "S0")])


@pytest.mark.parametrize("dims", ["a=1", "a=2", "a=6"])
def test_sums_of_durations(dims):
    spans = np.array([3, 1, 8, 7], "m8[s]")
    unknown = np.array([3, 1, "NaT", 7], "m8[s]")
    functions: list[Any] = [
        np.cumsum,
        np.nancumsum,
        lambda x: np.cumulative_sum(x, include_initial=True),
    ]
    agree(
        dims,
        [
            (f, [x], [p])
            for f in functions
            for x in (spans, unknown, spans[:0])
            for p in ("R", "S0")
        ],
    )
    raises_alike(dims, TypeError, [(np.cumprod, spans, "S0"), (np.nancumprod, spans[:1], "S0")])


NO_FLOATS: list[Any] = ["abc", ["1", "two", "3", "4"], np.array(["x"]), b"?"]


@pytest.mark.parametrize("value", NO_FLOATS, ids=repr)
@pytest.mark.parametrize("placement", ["R", "S0", "S1"])
def test_what_is_no_element_is_written_nowhere(value, placement):
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            whole = numbers((3, 4), float)
            x: Any = mm.distribute(whole, mesh, placement)
            keys: list[Any] = [0, [2, 0], x > 0] if np.ndim(value) == 0 else [0, [2, 0]]
            for key in keys:
                with pytest.raises(DTypeError, match="float64") as caught:
                    operator.setitem(x, key, value)
                assert caught.value.agreed
            same(x, whole)

    mm.run_virtual(2, main)


@pytest.mark.parametrize("placement", ["R", "S0"])
@pytest.mark.parametrize("key", [slice(None), [0, 1, 2, 3]], ids=str)
def test_one_bad_element_of_a_split_value_is_told_to_all(placement, key):
    good, bad = np.array(["1", "2", "3", "4.5"]), np.array(["1", "2", "3", "four"])

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x: Any = mm.zeros((4,), mesh, "S0")
            with pytest.raises(DTypeError, match="nothing was written"):
                x[key] = mm.distribute(bad, mesh, placement)
            assert not x.full().any()
            x[key] = mm.distribute(good, mesh, placement)
            return x.full().tolist()

    assert mm.run_virtual(2, main) == [[1, 2, 3, 4.5]] * 2


def test_a_text_that_is_a_number_is_written():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.zeros((2, 2), mesh, "S0")
            x[1] = "1.5"
            return x.full().tolist()

    assert mm.run_virtual(2, main) == [[[0, 0], [1.5, 1.5]]] * 2


def test_a_condition_that_is_too_long_for_no_axes():
    raises_alike(
        "a=2",
        (ShapeError, IndexOutOfRangeError),
        [
            (lambda x: np.compress([True, True], x, 0), np.array(5), "R"),
            (lambda x: np.take(x, [1], 0), np.array(5), "R"),
        ],
    )
