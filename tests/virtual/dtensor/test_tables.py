"""Tables, grids, neighbours, sets and covariances of split arrays: what NumPy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DTypeError, IndexOutOfRangeError, NoRuleError, ShapeError
from tests.helpers.dtensor_check import agree, numbers, on, placements_of, raises_alike
from tests.helpers.rule_fuzz import check

NP: Any = np
EDGES = np.array([-5.0, 0.0, 2.0, 7.0])
PLACES = np.array([0.0, 1.0, 3.0, 3.5, 7.0, 8.0, 12.0])

EXACT: list[Any] = [
    lambda x: NP.digitize(x, EDGES, right=True),
    lambda x: NP.isin(x, [1, 2, -3]),
    lambda x: NP.isin(x, x[:2], invert=True),
    lambda x: NP.isin(np.arange(9), x),
    lambda x: NP.digitize([1.0, 3.0], NP.sort(NP.ravel(x))),
    lambda x: NP.unravel_index(abs(x), (3, 4)),
    lambda x: NP.ravel_multi_index((abs(x) % 3, abs(x) % 4), (3, 4)),
    lambda x: NP.select([x > 3, x > 0], [x, 10 * x], default=-1),
    lambda x: NP.choose(abs(x) % 2, [x, 7]),
    lambda x: NP.choose(x, [x, x + 1, 9], mode="wrap"),
    lambda x: NP.piecewise(x, [x < 0, x > 2], [lambda v: -v, lambda v: v * v, 5]),
    lambda x: NP.piecewise(x[:, 0], np.arange(7) > 2, [-1]),
    lambda x: NP.polyval([1, 2, 3], x),
    lambda x: NP.real_if_close(x + 0j),
    lambda x: NP.real_if_close(x + 1j),
    lambda x: NP.gradient(x, axis=0),
    lambda x: NP.gradient(x, PLACES, axis=0, edge_order=2),
    lambda x: NP.gradient(x, 2, 3, edge_order=2),
    lambda x: NP.convolve(NP.ravel(x), [1, 2, 3]),
    lambda x: NP.convolve(NP.ravel(x), [1, 2, 3, 4], "same"),
    lambda x: NP.convolve([1, 2, 3], NP.ravel(x), "valid"),
    lambda x: NP.correlate(NP.ravel(x), [1, 2, 3, 4], "same"),
    lambda x: NP.correlate([2, 3, 4], x[:, 0]),
    lambda x: NP.correlate([2, 3], x[:, 0], "full"),
    lambda x: NP.ediff1d(x, to_begin=3, to_end=[4, 5]),
    lambda x: NP.trapezoid(x, axis=0),
    lambda x: NP.trapezoid(x, PLACES[:4]),
    lambda x: NP.unwrap(x, axis=0, period=5),
    lambda x: NP.meshgrid(x[0], x[:, 0], [1, 2]),
    lambda x: NP.meshgrid(x[0], x[:, 0], sparse=True, indexing="ij", copy=False),
    lambda x: NP.ix_(x[0], x[:, 0] > 1),
    lambda x: NP.block([[x, x], [x + 1, NP.zeros_like(x)]]),
    lambda x: NP.block([x, np.ones((7, 1), int)]),
    lambda x: NP.block(x),
    lambda x: NP.kron(x, np.array([[1, 2], [3, 4], [5, 6]])),
    lambda x: NP.kron([1, 2], x),
    lambda x: NP.diagflat(x[:2], 1),
    lambda x: NP.resize(x, (5, 9)),
    lambda x: NP.resize(x[:0], (2, 2)),
    lambda x: NP.trim_zeros(x[:, 1] * (x[:, 0] > 0)),
    lambda x: NP.apply_over_axes(np.sum, x, [0, -1]),
    lambda x: NP.sort_complex(x),
    lambda x: NP.vander(x[:, 0], 3),
    lambda x: NP.lexsort((x[:, 0], x[:, 1])),
    lambda x: NP.lexsort(x, axis=0),
    lambda x: NP.lexsort(NP.stack([x, x % 3]), axis=0),
    lambda x: NP.packbits(x > 0, axis=0),
    lambda x: NP.unpackbits(x.astype(np.uint8), axis=1, count=5),
    lambda x: NP.packbits(x > 0),
    lambda x: NP.nanargmin(x, axis=0),
    lambda x: NP.nanargmax(NP.where(x > 5, np.nan, x), axis=1),
    lambda x: NP.union1d(x, [100, 3]),
    lambda x: NP.intersect1d(x, np.arange(4)),
    lambda x: NP.intersect1d(x, NP.ravel(x) + 1, return_indices=True),
    lambda x: NP.setdiff1d(x, [1, 2]),
    lambda x: NP.setdiff1d(x, [1, 2], assume_unique=True),
    lambda x: NP.setxor1d(np.arange(5), x),
    lambda x: NP.histogramdd(x.astype(float), 3, [(-9, 9)] * 4)[0],
    lambda x: NP.histogramdd(x[:, :2], (2, EDGES), weights=x[:, 2])[0],
    lambda x: NP.histogram2d(x[:, 0], x[:, 1], 4, density=True)[0],
    lambda x: NP.insert(x, 1, 99, axis=0),
    lambda x: NP.insert(x, [3, 1, 1], x[:, :3], axis=1),
    lambda x: NP.insert(x, 2, [1, 2, 3, 4], axis=0),
    lambda x: NP.insert(x, [2], [[1], [2], [3], [4], [5], [6], [7]], axis=1),
    lambda x: NP.insert(x, slice(0, 4, 2), 7),
    lambda x: NP.insert(x[:0], 0, 5, axis=0),
    lambda x: NP.insert(x, -1, 5.5, axis=1),
]
CLOSE: list[Any] = [
    lambda x: NP.interp(x, EDGES, [1.0, 2.0, 0.0, 3.0], left=-1),
    lambda x: NP.interp(x, NP.arange(4.0), x[:4, 0]),
    lambda x: NP.linspace(x, 1, 3),
    lambda x: NP.linspace(0, x, 4, axis=1),
    lambda x: NP.logspace(0, x / 9, 3),
    lambda x: NP.geomspace(abs(x) + 1.0, 100.0, 3, axis=-1),
    lambda x: NP.unwrap(x / 2),
    lambda x: NP.cov(x),
    lambda x: NP.cov(x, rowvar=False, bias=True),
    lambda x: NP.cov(x[0], x[1]),
    lambda x: NP.cov(x[0]),
    lambda x: NP.cov(x, fweights=[1, 2, 0, 4], aweights=[0.5, 1.0, 2.0, 1.0]),
    lambda x: NP.cov(x + 1j * x[::-1], ddof=0),
    lambda x: NP.corrcoef(x, rowvar=False),
    lambda x: NP.corrcoef(x[:2] + 1j * x[2:4]),
    lambda x: NP.corrcoef(x[0]),
]


@pytest.mark.parametrize("dims", ["a=1", "a=3", "a=2,b=2"])
def test_functions(dims):
    x = numbers((7, 4))
    every = placements_of(2, dims.count("="))
    step = {"a=1": 4, "a=3": 2}.get(dims, len(every))
    for functions, atol in ((EXACT, 0.0), (CLOSE, 1e-9)):
        cases: list[Any] = []
        for number, function in enumerate(functions):
            cases += [(function, [x], [p]) for p in every[number % step :: step]]
        agree(dims, cases, atol)


# -- functions that write --------------------------------------------------------------------


def written(function):
    """The array after a function has written into a copy of it."""

    def do(x):
        y = x.copy()
        function(y)
        return y

    return do


WRITES: list[Any] = [
    lambda x: NP.put(x, [0, -1, 5, 5], [1, 2, 3, 4]),
    lambda x: NP.put(x, [30, 2], 9, mode="wrap"),
    lambda x: NP.put(x, [30, -2], 9.0, mode="clip"),
    lambda x: NP.putmask(x, x > 0, x * 2),
    lambda x: NP.putmask(x, x > 0, [7, 8, 9]),
    lambda x: NP.fill_diagonal(x, 9),
    lambda x: NP.fill_diagonal(x, [1, 2, 3], wrap=True),
    lambda x: NP.put_along_axis(x, NP.argsort(x, 0, kind="stable")[:2], 50, 0),
    lambda x: NP.put_along_axis(x, abs(x) % 4, x, 1),
    lambda x: NP.put_along_axis(x, np.array([3, 1, 3]), [5, 6, 7], None),
    lambda x: NP.put_along_axis(x, np.array([[1, -1]]), [[5, 6]], 1),
]


@pytest.mark.parametrize("dims", ["a=1", "a=3", "a=2,b=2"])
def test_writes(dims):
    x = numbers((7, 4))
    every = [p for p in placements_of(2, dims.count("=")) if "P" not in p]
    step = 1 if "," not in dims else 4
    agree(
        dims,
        [(written(f), [x], [p]) for n, f in enumerate(WRITES) for p in every[n % step :: step]],
    )


# -- what is refused -------------------------------------------------------------------------


ERRORS: list[Any] = [
    (lambda x: NP.unravel_index(x, (2, 2)), ValueError),
    (lambda x: NP.ravel_multi_index((x, x), (3, 3)), ValueError),
    (lambda x: NP.choose(x, [x, 1]), ValueError),
    (lambda x: NP.digitize(x, [1, 3, 2]), ValueError),
    (lambda x: NP.select([x > 1], []), ShapeError),
    (lambda x: NP.vander(x), ShapeError),
    (lambda x: NP.gradient(x, 1, 2, 3), TypeError),
    (lambda x: NP.gradient(x[:1], axis=0), ShapeError),
    (lambda x: NP.gradient(x, [1.0, 2.0], axis=0), ShapeError),
    (lambda x: NP.convolve(x, x), ShapeError),
    (lambda x: NP.convolve(x[0], x[0], "half"), ShapeError),
    (lambda x: NP.meshgrid(x[0], indexing="yx"), ShapeError),
    (lambda x: NP.ix_(x), ShapeError),
    (lambda x: NP.block([[x], x]), ShapeError),
    (lambda x: NP.lexsort((x, x[0])), ShapeError),
    (lambda x: NP.trim_zeros(x, "q"), ShapeError),
    (lambda x: NP.resize(x, -1), ShapeError),
    (lambda x: NP.nanargmin(NP.where(x[:, 0] > -50, np.nan, x[:, 0])), ValueError),
    (lambda x: NP.histogramdd(x, [1, 2]), ShapeError),
    (lambda x: NP.cov(x, fweights=[1, 2]), ShapeError),
    (lambda x: NP.insert(x, 99, 1, axis=0), IndexOutOfRangeError),
    (lambda x: NP.put(x, [99], 1), IndexOutOfRangeError),
    (lambda x: NP.putmask(x, x[0] > 1, 1), ShapeError),
    (lambda x: NP.fill_diagonal(x[0], 1), ShapeError),
    (lambda x: NP.put_along_axis(x, x + 50, 1, 0), IndexOutOfRangeError),
    (lambda x: NP.put(np.zeros(3), x[0], 1), DTypeError),
    (lambda x: NP.save("x.npy", x), NoRuleError),
    (lambda x: NP.polyfit(x, x, 1), NoRuleError),
]


@pytest.mark.parametrize("place", ["S0", "S1"])
def test_errors_on_all_ranks(place):
    x = numbers((7, 4))
    for function, error in ERRORS:
        raises_alike("a=2", error, [(function, x, place)])


def test_what_moves_is_what_a_rank_lacks():
    def received(mesh, function):
        before = mesh.traffic().snapshot()
        found = function()
        return found, (mesh.traffic() - before).received_bytes

    def main():
        with mm.DeviceMesh("a=4") as mesh:
            x: Any = mm.distribute(numbers((64, 6), float), mesh, "S0")
            for function, placement in [
                (lambda: NP.gradient(x, axis=1), "S0"),
                (lambda: NP.interp(x, [0, 1], [0, 1]), "S0"),
                (lambda: NP.isin(x, [1, 2]), "S0"),
                (lambda: NP.select([x > 1], [x]), "S0"),
                (lambda: NP.kron(x, np.ones((2, 2))), "S0"),
                (lambda: NP.vander(x[:, 0].redistribute("S0"), 3), "S0"),
                (lambda: NP.cov(x, rowvar=False), "P"),
            ]:
                found, nbytes = received(mesh, function)
                assert found.placement == mm.Layout(mesh, placement).placement
                assert nbytes <= (6 * 8 + 512 if placement == "P" else 512)
            found, nbytes = received(mesh, lambda: NP.gradient(x, axis=0))
            assert found.placement == x.placement
            first, second, _ = NP.meshgrid(x[:, 0], x[0], [1, 2], indexing="ij")
            assert first.layout.text.startswith("a=S0")
            assert second.layout.is_replicated

    mm.run_virtual(4, main)


def test_edges_of_histograms_are_as_numpy_has_them():
    """A list, of float64 for a number of bins, whatever the points are."""

    def main(mesh):
        for dtype in ("float16", "float64", "int8"):
            points = numbers((5, 2)).astype(dtype)
            x: Any = mm.distribute(points, mesh, "S0")
            for bins, limits in ((3, None), ([2, EDGES], [(0, 3), None]), (2, [(0, 3), None])):
                found, want = (NP.histogramdd(one, bins, limits)[1] for one in (x, points))
                assert isinstance(found, list)
                assert [one.dtype for one in found] == [one.dtype for one in want]
                for one, other in zip(found, want, strict=True):
                    np.testing.assert_array_equal(one, other)

    on("a=3", main)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("np.correlate(x0, x1, 'same')", [(4,), (5,)]),
        ("np.correlate(x0, x1, 'full')", [(2,), (5,)]),
        ("np.histogram2d(x0, x1, [[0, 1, 2], 2], range=[(0, 3), None])", [(5,), (5,)]),
        ("np.histogram(x0, 3, weights=x1 > 1)[0]", [(5,), (5,)]),
        ("np.histogram(x0, 3, weights=x1 > 1, density=True)[0]", [(5,), (5,)]),
        ("np.histogram(x0, [0, 1, 2], weights=x1 > 1)[0]", [(1,), (1,)]),
        ("np.linalg.multi_dot([x0, x1])", [(2, 2, 3), (3, 2)]),
        ("np.linalg.multi_dot([x0, x1])", [(4,), (4, 2)]),
        ("np.linalg.multi_dot([x0, x1, x1])", [(2, 2, 3), (3, 3)]),
        ("np.linalg.multi_dot([x1, x0, x1])", [(3,), (3, 3)]),
        ("np.linalg.multi_dot([x0, x1, x1])", [(3, 3), (2, 3)]),
        ("np.linalg.multi_dot([x0, x1, x0[0]])", [(3, 4), (4, 2)]),
        ("np.bincount(abs(x0), x1, -1)", [(4,), (4,)]),
        ("np.ediff1d(x0, to_end=1.5)", [(4,)]),
        ("np.ediff1d(x0 > 0)", [(4,)]),
        ("np.choose(x0 % 2, [x1.astype('i2'), 3])", [(4,), (4,)]),
        ("np.select([x0 > 1], [x1.astype('f2')])", [(4,), (4,)]),
        ("np.linspace(x0.astype('f2'), 3, 2)", [(4,)]),
        ("np.geomspace(np.cumsum(x0 * 0 + 1) - 1, 3.0, 2)", [(7,)]),
        ("np.geomspace(abs(x0) + 1, 3.0, 2)", [(7,)]),
        ("np.corrcoef(x0[:0])", [(3, 4)]),
        ("np.min_scalar_type(x0)", [()]),
        ("np.apply_over_axes(np.sum, x0, 0)", [()]),
        ("np.arctan2.outer(x0.astype('f2'), 2)", [(2,)]),
        ("np.linalg.outer(2, x0)", [(3,)]),
        ("np.pad(x0, 1.5)", [(3,)]),
        ("np.vsplit(x0, [1])", [(3,)]),
        ("np.squeeze(x0, 0)", [()]),
        ("np.where(x0)", [(4, 3)]),
        ("np.union1d(x0.astype('u2'), 4)", [(4,)]),
        ("np.sum(x0, initial=None)", [(0,)]),
        ("np.sum(x0, initial=None, where=x0 > 4)", [(3,)]),
        ("np.bincount(x0, x1, 3)", [(0,), (0,)]),
        ("np.linalg.norm(x0, axis=(0, 1, 2))", [(2, 2, 2)]),
        ("np.cov(x0, x1, rowvar=False)", [(1, 3), (1, 3)]),
        ("np.fft.fftn(x0, axes=(1, 1))", [(3, 2)]),
    ],
)
def test_dtypes_and_errors(text, shapes):
    """NumPy's answers to numbers beside arrays, a longer row, no rows, and no axes."""
    rows = [("S0" if shape else "R", shape, "int64", 3 + n) for n, shape in enumerate(shapes)]
    check("a=3", text, rows, exact=False)


@pytest.mark.parametrize("call", ["unique_counts", "unique_inverse", "unique_all"])
def test_no_nan_is_like_another(call):
    for dtype in ("float64", "float32"):
        for place in ("S0", "S1", "R"):
            check("a=3", f"np.{call}(x0)", [(place, (3, 4), dtype, 3, "nan")])
            line = "np.unique(x0, return_inverse=True, equal_nan=False)"
            check("a=3", line, [(place, (3, 4), dtype, 4, "nan")])
