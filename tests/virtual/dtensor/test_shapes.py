"""Arrays whose axes and shapes change: what NumPy gives, from every layout."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import AxisError, ShapeError
from tests.helpers import warned
from tests.helpers.depth import deep_but, examples
from tests.helpers.dtensor_check import (
    SIZES,
    agree,
    layouts,
    numbers,
    on,
    placements_of,
    raises_alike,
)

AXES: list[Any] = [
    np.transpose,
    lambda x: np.transpose(x, (1, 2, 0)),
    lambda x: np.transpose(x, (-1, 0, 1)),
    np.matrix_transpose,
    lambda x: np.swapaxes(x, 0, -1),
    lambda x: np.moveaxis(x, 0, -1),
    lambda x: np.moveaxis(x, (0, 1), (2, 0)),
    lambda x: np.rollaxis(x, 2),
    lambda x: np.rollaxis(x, 0, 3),
    lambda x: np.expand_dims(x, 0),
    lambda x: np.expand_dims(x, (1, -1)),
    lambda x: np.squeeze(np.expand_dims(x, (0, 3))),
    lambda x: np.atleast_2d(x),
    lambda x: np.broadcast_to(x, (2, *x.shape)),
]
RESHAPES = [(-1,), (6, 4), (4, 6), (2, 12), (12, 2), (2, 2, 6), (2, 1, 3, 4), (24, 1), (3, 8)]


@pytest.mark.parametrize("size", deep_but(SIZES, 3))
def test_axes(size):
    x = numbers((2, 3, 4))
    agree(f"a={size}", [(f, [x], [p]) for f in AXES for p in placements_of(3)])


@pytest.mark.parametrize("size", deep_but(SIZES, 3))
def test_reshape(size):
    x = numbers((2, 3, 4))
    cases: list[Any] = [
        (lambda x, new=new, order=order: np.reshape(x, new, order=order), [x], [p])
        for new in RESHAPES
        for p in placements_of(3)
        for order in ("CF" if size == 3 else "C")
    ]
    agree(f"a={size}", cases)


def test_on_two_dims():
    x = numbers((4, 6, 2))
    places = placements_of(3, 2)
    cases: list[Any] = [(lambda x: np.transpose(x, (2, 0, 1)), [x], [p]) for p in places]
    for number, new in enumerate([(24, 2), (4, 12), (2, 2, 12), (48,), (8, 6)]):
        cases += [
            (lambda x, new=new: np.reshape(x, new), [x], [p]) for p in places[number % 2 :: 2]
        ]
    agree("a=2,b=2", cases)


@st.composite
def reshapes(draw, size):
    """A shape, another with as many elements, and a layout on so many ranks."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5, 0]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        order = draw(st.permutations(factors))
        cuts = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
        shape: list[int] = []
        for factor, cut in zip(order, cuts, strict=True):
            if cut or not shape:
                shape.append(factor)
            else:
                shape[-1] *= factor
        shapes.append(tuple(shape))
    return shapes, draw(layouts(shapes[0], size))


def rows_of(size):
    return st.lists(reshapes(size), min_size=8, max_size=8)


@settings(max_examples=examples(12))
@given(st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), rows_of(size))))
def test_any_reshape(drawn):
    size, rows = drawn
    cases: list[Any] = [
        (lambda x, new=new: np.reshape(x, new), [numbers(old)], [place])
        for (old, new), place in rows
    ]
    agree(f"a={size}", cases)


def test_wrong_arguments():
    x = numbers((4, 3))
    cases: list[Any] = [
        (lambda x: np.transpose(x, (0, 2)), x, "S0"),
        (lambda x: np.transpose(x, (0, 0)), x, "S0"),
        (lambda x: np.swapaxes(x, 0, 2), x, "S1"),
        (lambda x: np.expand_dims(x, 3), x, "P"),
        (lambda x: np.moveaxis(x, 2, 0), x, "S1"),
    ]
    raises_alike("a=2", AxisError, cases)
    cases = [
        (lambda x: np.reshape(x, (5, 2)), x, "S0"),
        (lambda x: np.reshape(x, (-1, 5)), x, "S0"),
        (lambda x: np.squeeze(x, 0), x, "S0"),
        (lambda x: np.broadcast_to(x, (4, 4)), x, "S0"),
    ]
    raises_alike("a=2", ShapeError, cases)


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


def test_the_first_block_of_a_scan_is_as_it_is():
    """Times 1 an infinite complex number would become NaN, and plus 0 a -0.0 would be 0.0."""
    infinite = np.array([2, complex(np.inf, 1), 1, 1, 1])

    def main(mesh):
        for place in ("S0", "S0(0,5,0)", "S0(4,0,1)"):
            sums: Any = np.cumsum(mm.distribute(np.full(5, -0.0), mesh, place))
            assert np.signbit(sums.full()[:2]).all()
            products: Any = np.cumprod(mm.distribute(infinite, mesh, place))
            found = products.full()
            np.testing.assert_array_equal(found[:2], np.cumprod(infinite)[:2])

    with warned.ignored:
        on("a=3", main)


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


def written(key, value):
    def function(x):
        y = x.copy()
        y[key] = value
        return y

    return function


OF_ANY: list[Any] = [
    np.ravel,
    lambda x: x[...],
    lambda x: x[None],
    np.atleast_3d,
    np.flip,
    lambda x: x.flatten(),
    lambda x: np.repeat(x, 3),
    lambda x: np.tile(x, (2, 2)),
    lambda x: np.sort(x, None),
    np.cumsum,
    np.unique,
    written(..., 5),
]


OF_AXES: list[Any] = [
    np.argwhere,
    lambda x: x[:0],
    lambda x: x[::-1],
    lambda x: x[[]],
    lambda x: np.sort(x, 0),
    lambda x: np.sort(x, -1),
    lambda x: np.argsort(x, 0, kind="stable"),
    lambda x: np.take_along_axis(x, np.argsort(x, 0, kind="stable"), 0),
    lambda x: np.cumsum(x, 0),
    lambda x: np.diff(x, axis=0),
    lambda x: np.pad(x, 1),
    lambda x: np.stack([x, x], 1),
    lambda x: np.concatenate([x, x], None),
    np.diagonal,
    lambda x: np.roll(x, 1),
    lambda x: np.array_split(x, 3),
    np.rot90,
    written(slice(0), 5),
    written([], 3),
]


@pytest.mark.parametrize("dims", ["a=1", "a=3"])
def test_small_arrays(dims):
    cases = []
    for shape in [(), (0, 3), (4, 0), (1, 1)]:
        x = numbers(shape)
        for place in placements_of(x.ndim):
            cases += [(f, [x], [place]) for f in (OF_ANY + OF_AXES if shape else OF_ANY)]
    agree(dims, cases)
