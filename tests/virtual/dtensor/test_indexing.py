"""Parts of split arrays: what NumPy gives, read and written, from every layout."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import DTypeError, IndexOutOfRangeError, ShapeError
from tests.helpers.depth import deep, deep_but, examples
from tests.helpers.dtensor_check import (
    SIZES,
    agree,
    layouts,
    numbers,
    on,
    placements_of,
    raises_alike,
    same,
    split,
)
from tests.helpers.rule_fuzz import check

S = np.s_
SHAPE = (5, 4, 3)
KEYS: list[Any] = [
    S[0],
    S[-1, 2],
    S[4, 0, 2],
    S[1:4],
    S[::-1],
    S[4:0:-2, ::2],
    S[...],
    S[..., 1],
    S[1, ..., None],
    S[:, None, 2:],
    S[None, 3:3, None],
    S[:, 1:, -2],
    S[[3, 1, 1, -1]],
    S[[0, 2, 4]],
    S[:, [2, 0]],
    S[[[0, 1], [3, 2]]],
    S[[0, 3, 2], [1, 1, 0]],
    S[[0, 3, 2], :, [1, 1, 0]],
    S[:, [0, 3, 2], [1, 1, 0]],
    S[1, :, [2, 0]],
    S[None, 1, [2, 0], ::-1],
    S[:, [1, 2], None, [2, 0]],
    S[[], 1],
    S[[[1], [2]], 0:2, [[0, 2]]],
    S[np.array([True, False, True, True, False])],
    S[1:, np.array([True, False, True, True])],
    S[np.arange(20).reshape(5, 4) % 3 == 0],
    S[np.arange(60).reshape(5, 4, 3) % 7 == 0],
    S[..., [0, 0], 1],
]


def places(number, size):
    rows = [f"S0({'0,' * (size - 1)}5)", *placements_of(3)]
    return rows[(number + size) % 3 :: 3]


@pytest.mark.parametrize("size", deep_but(SIZES, 3))
def test_get(size):
    x = numbers(SHAPE)
    agree(
        f"a={size}",
        [(lambda x, k=k: x[k], [x], [p]) for n, k in enumerate(KEYS) for p in places(n, size)],
    )


def test_get_on_two_dims():
    x = numbers(SHAPE)
    two = placements_of(3, 2)
    agree(
        "a=2,b=2",
        [(lambda x, k=k: x[k], [x], [p]) for n, k in enumerate(KEYS) for p in two[n % 5 :: 5]],
    )


def written(key, value, dtype=int):
    def function(x, *values):
        y = x.copy()
        y[key] = values[0] if values else value
        return y

    return function


@pytest.mark.parametrize("dims", [*deep("a=1", "a=2"), "a=3", *deep("a=2,b=2")])
def test_set(dims):
    x = numbers(SHAPE)
    two = placements_of(3, dims.count("="))
    cases: list[Any] = []
    for n, key in enumerate(KEYS):
        shape = x[key].shape
        plain = numbers(shape, seed=2)
        narrow = plain[..., :1] if plain.ndim else plain
        for m, place in enumerate(two[n % 3 :: 3] if "," not in dims else two[n % 8 :: 8]):
            value = [7, plain, narrow][m % 3]
            if value is narrow and shape and shape[-1] == 0:
                value = 7
            cases.append((written(key, value), [x], [place]))
            axes = placements_of(plain.ndim, dims.count("="))
            cases.append((written(key, None), [x, plain], [place, axes[(n + m) % len(axes)]]))
    agree(dims, cases)


@settings(max_examples=examples(15))
@given(st.data())
def test_any_slices(data):
    size = data.draw(st.integers(1, 4))
    cases: list[Any] = []
    for _ in range(6):
        shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
        place = data.draw(layouts(shape, size))
        key = tuple(data.draw(st.slices(n)) for n in shape)
        cases.append((lambda x, k=key: x[k], [numbers(shape)], [place]))
        part = numbers(numbers(shape)[key].shape, seed=3)
        if part.size:
            other = data.draw(layouts(part.shape, size))
            cases.append((written(key, None), [numbers(shape), part], [place, other]))
    agree(f"a={size}", cases)


@pytest.mark.parametrize("dims", [*deep("a=1", "a=2"), "a=3", *deep("a=2,b=2")])
def test_masks(dims):
    x = numbers(SHAPE)
    masks = [x > 0, x[:, :, 0] > 0, x[:, 0, 0] > 0, x > 99]
    two = placements_of(3, dims.count("="))
    cases: list[Any] = []
    for n, mask in enumerate(masks):
        kinds = [p for p in placements_of(mask.ndim, dims.count("=")) if "P" not in p]
        for m, place in enumerate(two[n % 4 :: 4] if "," in dims else two):
            where = kinds[(n + m) % len(kinds)]
            cases.append((lambda x, mask: x[mask], [x, mask], [place, where]))
            cases.append((_set_masked, [x, mask], [place, where]))
    for place in two[:: 3 if "," in dims else 1]:
        cases += [(f, [x], [place]) for f in (np.nonzero, np.argwhere, np.flatnonzero)]
    flags = x[:, 0, 0] > 0
    copied = ", R" * dims.count(",")
    for p in two[::4]:
        cases.append((lambda x, c: np.compress(c, x, 0), [x, flags], [p, "R" + copied]))
        cases.append((lambda x: np.compress([True, False, True], x, 1), [x], [p]))
        cases.append((lambda x, c: np.extract(c, x), [x, x > 0], [p, "S0" + copied]))
    agree(dims, cases)


def _set_masked(x, mask):
    y = x.copy()
    y[mask] = -100
    return y


TAKES: list[Any] = [
    lambda x: np.take(x, 2),
    lambda x: np.take(x, [3, 0, 3, -1], axis=0),
    lambda x: np.take(x, [[1, 0], [2, 2]], axis=1),
    lambda x: np.take(x, [7, -9], axis=1, mode="wrap"),
    lambda x: np.take(x, [7, -9], axis=1, mode="clip"),
    np.diagonal,
    lambda x: np.diagonal(x, -1, 0, 2),
    lambda x: np.diagonal(x, 1, 2, 1),
    lambda x: np.linalg.diagonal(x, offset=1),
    lambda x: np.diag(x[:, 1, :]),
    lambda x: np.diag(x[0, :, 1]),
    lambda x: np.diag(x[:, 0, 1], -2),
    lambda x: np.diag(x[:, 0, 1], 1),
]


@pytest.mark.parametrize("size", deep_but(SIZES, 3))
def test_takes(size):
    x = numbers(SHAPE)
    agree(f"a={size}", [(f, [x], [p]) for n, f in enumerate(TAKES) for p in places(n, size)])


BY_INDICES: list[Any] = [
    lambda x, i: x[i],
    lambda x, i: np.take(x, i, 0),
    lambda x, i: x[i, np.flip(i)],
]


def test_indices_may_be_split():
    x, rows = numbers((5, 4)), np.array([3, 0, 0, 2])
    cases: list[Any] = [
        (f, [x, rows], [p, q])
        for f in (
            lambda x, i: x[i],
            lambda x, i: np.take(x, i, 1 - 1),
            lambda x, i: x[i, np.flip(i)],
        )
        for p in ("S0", "S1")
        for q in ("S0", "R")
    ]
    agree("a=3", cases)


def test_wrong_indices_of_one_rank_are_refused_by_all():
    rows = np.array([[3, 0, -1], [2, 2, 1]])
    wrong: list[Any] = [
        (lambda i: np.take(i, [0, 3], 1), rows, "S0"),
        (lambda i: np.take_along_axis(i, i, 1), rows, "S0"),
    ]
    raises_alike("a=2", IndexOutOfRangeError, wrong)


def test_slices_and_plain_writes_move_nothing():
    def main():
        with mm.DeviceMesh("a=3") as mesh:
            x = split(numbers((9, 4)), mesh, "S0")
            before = mesh.traffic().total_calls
            part = x[2:8]
            assert part.layout.text == "a=S0(1,3,2)"
            x[::2] = np.arange(4)
            np.repeat(np.transpose(x), 2, axis=0)
            np.reshape(x, (9, 2, 2))
            assert mesh.traffic().total_calls == before
            same(x[::2], np.broadcast_to(np.arange(4), (5, 4)))

    mm.run_virtual(3, main)


def test_wrong_keys_are_refused_alike():
    x = numbers((4, 3))
    keys = [S[4], S[-5], S[0, 0, 0], S[[0, 4]], S[:, [True, False]], S[..., ...], S["a"], S[0.5]]
    cases: list[Any] = [(lambda x, k=k: x[k], x, "S0") for k in keys]
    cases += [(lambda x, k=k: x.__setitem__(k, 0), x, "S0") for k in keys]
    raises_alike("a=2", IndexOutOfRangeError, cases)
    cases = [
        (lambda x: x.__setitem__(S[:2], np.zeros(4)), x, "S0"),
        (lambda x: x.__setitem__(S[:2], x), x, "S0"),
    ]
    raises_alike("a=2", ShapeError, cases)


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
            with pytest.raises(DTypeError):
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


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("i1", 300), ("u1", -1), ("i8", float("nan")), ("i8", float("inf")), ("f8", 5 + 3j)],
)
def test_numbers_that_do_not_fit_are_not_written(dtype, value):
    """They were cast, and stored as something else."""

    def main(mesh):
        x: Any = mm.zeros((4, 3), mesh, "S0", dtype=dtype)
        writes = [
            lambda: operator.setitem(x, 0, value),
            lambda: operator.setitem(x, (slice(None), 1), [value] * 4),
            lambda: np.put(x, [1], value),
            lambda: np.fill_diagonal(x, value),
        ]
        for write in writes:
            with pytest.raises(DTypeError):
                write()
        assert not x.full().any()

    on("a=2", main)


def test_values_along_an_axis_that_do_not_fit_are_refused_on_all_ranks():
    def main(mesh):
        x: Any = mm.zeros((4, 3), mesh, "S0")
        with pytest.raises(DTypeError):
            np.put_along_axis(x, np.zeros((4, 3), int), "q", 0)

    on("a=2", main)


@pytest.mark.parametrize(
    "text",
    [
        "np.delete(x0, x0 > 0)",
        "np.delete(x0, x1)",
        "np.repeat(x0, x1)",
        "np.repeat(x0, x1, axis=0)",
        "np.compress(x1, x0, axis=0)",
        "np.compress([True, False, True, False, True, False, False], x0)",
        "np.compress([True, False, True, False, True, False, True], x0)",
    ],
)
@pytest.mark.parametrize("place", ["S0", "R", "S0(0,5,0)"])
def test_split_indices_masks_and_counts(text, place):
    check("a=3", text, [(place, (5,), "int64", 3), (place, (5,), "int64", 4, "index:4")])


def test_writes_into_an_array_without_axes():
    for text in ("np.put(x0, [0, 0], [1, 2])", "np.putmask(x0, x0 < 9, [5, 6])"):
        check("a=2", f"then(x0, {text})", [("R", (), "float64", 3)])
