"""Arrays whose axes and shapes change: what NumPy gives, from every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpimesh.errors import AxisError, ShapeError
from tests.pure.dtensor_check import (
    SIZES,
    agree,
    layouts,
    numbers,
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


@pytest.mark.parametrize("size", SIZES)
def test_axes(size):
    x = numbers((2, 3, 4))
    agree(f"a={size}", [(f, [x], [p]) for f in AXES for p in placements_of(3)])


@pytest.mark.parametrize("size", SIZES)
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


@settings(max_examples=12)
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
