"""Sorted arrays and running sums: what NumPy gives, from every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.dtensor import sorting
from mpimesh.errors import AxisError, NoRuleError, ShapeError
from tests.helpers.depth import deep, deep_but, examples
from tests.helpers.dtensor_check import (
    SIZES,
    agree,
    layouts,
    numbers,
    placements_of,
    raises_alike,
    same,
    split,
)
from tests.helpers.ranks import on

SCANS: list[Any] = [
    np.cumsum,
    np.cumprod,
    *(lambda x, axis=axis: np.cumsum(x, axis) for axis in (0, 1, -1)),
    lambda x: np.cumprod(x, 0),
    lambda x: np.cumsum(x, 0, dtype=float),
    lambda x: np.nancumsum(x, 1),
    lambda x: np.nancumprod(x, 0),
    lambda x: np.cumulative_sum(x, axis=0, include_initial=True),
    lambda x: np.cumulative_prod(x, axis=1),
    lambda x: np.diff(x, axis=0),
    lambda x: np.diff(x, 2),
    lambda x: np.diff(x, 9, axis=0),
]
SORTS: list[Any] = [
    np.sort,
    lambda x: np.sort(x, 0),
    lambda x: np.sort(x, None),
    lambda x: np.argsort(x, 0, kind="stable"),
    lambda x: np.argsort(x, -1, stable=True),
    lambda x: np.argsort(x, None, kind="stable"),
    lambda x: np.take_along_axis(x, np.argsort(x, 0, kind="stable"), 0),
    lambda x: np.searchsorted(np.arange(-5, 5), x, "right"),
    lambda x: np.searchsorted(np.sort(x, None), [[0, 3], [1, -20]]),
    np.unique,
    lambda x: np.unique(x, True, True, True),
    lambda x: tuple(np.unique_counts(x)),
]


@pytest.mark.parametrize("dims", [*deep("a=1", "a=2"), "a=3", *deep("a=4"), "a=2,b=2"])
def test_scans_and_sorts(dims):
    x = numbers((5, 4))
    two = placements_of(2, dims.count("="))
    step = 5 if "," in dims else 2
    cases: list[Any] = [
        (f, [x], [p]) for n, f in enumerate(SCANS + SORTS) for p in two[n % step :: step]
    ]
    row = numbers((13,))
    for p in placements_of(1, dims.count("=")):
        cases += [(f, [row], [p]) for f in (np.sort, np.cumsum, np.diff, np.unique)]
        cases.append((lambda x: np.argsort(x, kind="stable"), [row], [p]))
    agree(dims, cases)


FLOAT_SCANS: list[Any] = [np.nancumsum, np.cumsum, np.nancumprod]
DTYPES = [int, bool, float, "f4", complex, "U3", "u1", "M8[s]"]


@settings(max_examples=examples(15))
@given(st.data())
def test_rows_of_any_dtype(data):
    size = data.draw(st.integers(1, 4))
    cases: list[Any] = []
    for dtype in data.draw(st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3)):
        n = data.draw(st.integers(0, 30))
        row = data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
        x = np.array(row, int).astype(dtype)
        if x.dtype.kind in "fc":
            x[x == 3] = np.nan
        place = data.draw(layouts(x.shape, size, partial=False))
        cases.append((np.sort, [x], [place]))
        cases.append((lambda x: np.argsort(x, kind="stable"), [x], [place]))
    agree(f"a={size}", cases)


def test_blocks_keep_their_lengths():
    def main():
        with mm.DeviceMesh("a=3") as mesh:
            x = split(numbers((11,)), mesh, "S0(2,8,1)")
            found: Any = np.sort(x)
            assert found.layout == x.layout
            x.sort()
            same(x, np.sort(numbers((11,))))

    mm.run_virtual(3, main)


@pytest.mark.parametrize("size", deep_but(SIZES, 3))
def test_running_sums_of_floats(size):
    def main():
        with mm.DeviceMesh(f"a={size}") as mesh:
            whole = np.random.default_rng(1).normal(size=(50, 2))
            whole[7] = np.nan
            x = split(whole, mesh, "S0")
            for f in FLOAT_SCANS:
                np.testing.assert_allclose(f(x, 0).full(), f(whole, 0), rtol=1e-12, atol=1e-13)

    mm.run_virtual(size, main)


def test_wrong_arguments():
    x = numbers((4, 3))
    raises_alike(
        "a=2",
        AxisError,
        [(lambda x, f=f: f(x, 2), x, "S0") for f in (np.sort, np.argsort, np.cumsum)],
    )
    raises_alike("a=2", ShapeError, [(lambda x: np.cumulative_sum(x), x, "S0")])
    raises_alike("a=2", NoRuleError, [(lambda x: np.unique(x, axis=0), x, "S0")])


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


@pytest.mark.parametrize("size", [2, *deep(3, 1, 4)])
def test_a_long_row_is_partitioned_without_sorting_it(size, monkeypatch):
    """By samples, also of equal elements, NaN and empty blocks; and as NumPy places the kth."""
    monkeypatch.setattr(sorting, "_FEW", 8)
    rng = np.random.default_rng(size)
    rows = [
        rng.integers(-3, 4, 100).astype("i2"),
        rng.random(300).astype("f4"),
        np.where(rng.random(200) < 0.3, np.nan, rng.integers(0, 50, 200)),
        np.full(90, np.nan),
        np.concatenate([np.full(100, -np.inf), np.arange(20.0), np.full(100, np.inf)]),
        rng.random(64) < 0.5,
        np.sort(rng.integers(0, 9, 150).astype("u8")),
    ]

    def main(mesh: mm.DeviceMesh) -> bool:
        for row in rows:
            n = len(row)
            sizes = [n - 2 * (size - 1), *[2] * (size - 1)]
            for placement in ("S0", f"S0({','.join(map(str, sizes))})"):
                x: Any = mm.distribute(row, mesh, placement)
                for k in (0, n // 3, n // 2, -1):
                    found: Any = np.partition(x, k)
                    order: Any = np.argpartition(x, k)
                    assert found.placement == x.placement
                    by_index = row[order.full()]
                    for one in (found.full(), by_index):
                        expected = np.sort(row)
                        np.testing.assert_array_equal(np.sort(one), expected)
                        np.testing.assert_array_equal(one[k], expected[k])
                        place = k % n
                        np.testing.assert_array_equal(np.sort(one[:place]), expected[:place])
        return True

    assert all(on(f"a={size}", main))
