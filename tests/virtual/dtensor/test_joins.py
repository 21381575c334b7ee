"""Arrays joined, cut, turned, repeated and padded: what NumPy gives, from every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.errors import AxisError, ShapeError
from tests.helpers.depth import deep_but, examples
from tests.helpers.dtensor_check import SIZES, agree, layouts, numbers, placements_of, raises_alike

JOINS: list[Any] = [
    *(lambda *xs, axis=axis: np.concatenate(xs, axis) for axis in (0, 1, -1, None)),
    *(lambda *xs, axis=axis: np.stack(xs, axis) for axis in (0, 1, -1)),
    lambda *xs: np.vstack(xs),
    lambda *xs: np.hstack(xs),
    lambda *xs: np.dstack(xs),
    lambda *xs: np.column_stack(xs),
    lambda x, y: np.append(x, y),
]
PICKS: list[Any] = [
    np.flip,
    lambda x: np.flip(x, 0),
    np.fliplr,
    np.flipud,
    *(lambda x, k=k: np.rot90(x, k) for k in (0, 1, 2, 3, -1)),
    lambda x: np.rot90(x, 1, (1, 0)),
    lambda x: np.roll(x, 2),
    lambda x: np.roll(x, -3, 0),
    lambda x: np.roll(x, (1, -2), (0, 1)),
    lambda x: np.roll(x, 1, (0, 1)),
    lambda x: np.repeat(x, 2),
    lambda x: np.repeat(x, 3, 1),
    lambda x: np.repeat(x, [0, 2, 1, 0, 4], 0),
    lambda x: np.delete(x, [1, 3], 0),
    lambda x: np.delete(x, np.s_[::2]),
    lambda x: np.tile(x, 2),
    lambda x: np.tile(x, (2, 1, 3)),
    lambda x: np.tile(x, (3, 0)),
    lambda x: np.pad(x, 1),
    lambda x: np.pad(x, ((1, 2), (3, 0)), constant_values=((1, 2), (3, 4))),
    lambda x: np.pad(x, (2, 1), mode="edge"),
    lambda x: np.pad(x, {0: 7}, mode="wrap"),
    lambda x: np.pad(x, 2, mode="reflect"),
    lambda x: np.pad(x, 3, mode="symmetric"),
    np.tril,
    np.triu,
    lambda x: np.tril(x, -1),
    lambda x: np.triu(x, 2),
    lambda x: np.array_split(x, 3),
    lambda x: np.array_split(x, [1, 1, 4, 9], 1),
    lambda x: np.split(x, 5),
    lambda x: np.hsplit(x, 2),
    lambda x: np.unstack(x, axis=1),
]


@pytest.mark.parametrize("size", deep_but(SIZES, 3))
def test_joins(size):
    x, y = numbers((4, 3)), numbers((4, 3), seed=1)
    places = placements_of(2)
    pairs = [(p, q) for p in places for q in places]
    agree(
        f"a={size}",
        [
            (f, [x, y], pair)
            for number, f in enumerate(JOINS)
            for pair in pairs[(number + size) % 3 :: 3]
        ],
    )


@pytest.mark.parametrize("size", deep_but(SIZES, 3))
def test_picks(size):
    x = numbers((5, 4))
    places = ["S0(" + ",".join(["0"] * (size - 1) + ["5"]) + ")", *placements_of(2)]
    agree(
        f"a={size}",
        [(f, [x], [p]) for number, f in enumerate(PICKS) for p in places[(number + size) % 2 :: 2]],
    )


def test_on_two_dims():
    x, y = numbers((5, 4)), numbers((5, 4), seed=1)
    places = placements_of(2, 2)
    cases: list[Any] = [
        (f, [x], [p]) for n, f in enumerate(PICKS) for p in [*places[n % 5 :: 5], "S0, S0"]
    ]
    cases += [(f, [x, y], [places[n], places[-n]]) for n, f in enumerate(JOINS)]
    agree("a=2,b=2", cases)


@settings(max_examples=examples(10))
@given(st.data())
def test_joins_of_any_lengths(data):
    size = data.draw(st.integers(1, 4))
    cases: list[Any] = []
    for _ in range(4):
        lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
        arrays = [
            numbers((n, 2), dtype)
            for n, dtype in zip(lengths, ["i8", "f8", "i2", "c8"], strict=False)
        ]
        places = [data.draw(layouts(x.shape, size)) for x in arrays]
        cases.append((lambda *xs: np.concatenate(xs), arrays, places))
    agree(f"a={size}", cases)


def test_plain_arrays_are_joined_with_split_ones():
    x, plain = numbers((4, 3)), numbers((2, 3), float)
    agree("a=3", [(lambda x: np.concatenate([plain, x, plain]), [x], [p]) for p in ["S0", "S1"]])


def test_no_copies_of_no_elements():
    """NumPy takes counts below 0 there."""
    cases = [(lambda x: np.tile(x, (-1, 2)), [numbers((0, 3))], [p]) for p in ["S0", "S1", "R"]]
    agree("a=2", cases)


def test_wrong_arguments():
    x = numbers((4, 3))
    cases: list[Any] = [
        (lambda x: np.concatenate([x, x[:, :2]]), x, "S0"),
        (lambda x: np.stack([x, x[:2]]), x, "S0"),
        (lambda x: np.split(x, 3), x, "S0"),
        (lambda x: np.repeat(x, [1, 2], 0), x, "S0"),
        (lambda x: np.pad(x, -1), x, "S0"),
        (lambda x: np.tile(x, (-1, 1)), x, "S0"),
    ]
    raises_alike("a=2", ShapeError, cases)
    cases = [
        (lambda x: np.concatenate([x, x], 2), x, "S0"),
        (lambda x: np.flip(x, 2), x, "S1"),
        (lambda x: np.roll(x, 1, -3), x, "S1"),
    ]
    raises_alike("a=2", AxisError, cases)
