"""Reductions against NumPy's, from every layout."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import AxisError, NoRuleError, RankError, ShapeError
from mpimesh.mesh import Mesh
from tests.contract.split_arrays import (
    agrees,
    distribute,
    on_every_layout,
    placements,
    quiet,
    same,
    split,
    values,
    zeros,
)
from tests.helpers.depth import deep, examples
from tests.helpers.dtensor_check import on
from tests.helpers.rule_fuzz import check

EACH = [np.sum, np.prod, np.min, np.max, np.mean, np.any, np.all, np.count_nonzero, np.ptp]
EACH += [np.var, np.std, np.median, np.nansum, np.nanmean, np.nanmin, np.nanmax, np.nanvar]
EACH += [np.nanstd, np.nanprod, np.nanmedian]
AXES = [None, 0, -1, (0, 1)]


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        *deep((1, "f8"), (2, "f8"), (3, "f8"), (4, "i4"), (3, "i4")),
        (2, "f4"),
        (3, "c16"),
        (3, "bool"),
    ],
)
def test_every_reduction(ranks, dtype):
    a = values((4, 3), dtype)

    def check(mesh, tensors, what):
        (x,) = tensors
        for number, function in enumerate(EACH):
            if dtype in ("c16", "bool") and function in EACH[8:]:
                continue
            axis = AXES[(number + ranks + len(x.layout.text)) % len(AXES)]
            keepdims = (number + ranks) % 3 == 0
            want = quiet(function, a, axis=axis, keepdims=keepdims)
            got = quiet(function, x, axis=axis, keepdims=keepdims)
            same(got, want, (function, axis, keepdims, what))

    on_every_layout(ranks, check, [a])


@pytest.mark.parametrize("dims", ["x=2,y=2"])
def test_two_mesh_dims(dims):
    a = values((3, 4, 2))

    def check(mesh, tensors, what):
        (x,) = tensors
        for axis in (None, 1, (0, 2)):
            same(np.sum(x, axis), a.sum(axis), what)
            same(np.max(x, axis), a.max(axis), what)
            same(np.var(x, axis), a.var(axis), what)
        same(np.argmax(x), a.argmax(), what)
        same(np.argmin(x, axis=1), a.argmin(1), what)

    on_every_layout(4, check, [a], dims, pick=4)


def test_a_split_axis_waits_to_be_reduced():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = distribute(values((4, 3)), mesh, "S0")
            texts = [np.sum(x, 0), np.prod(x, 0), np.min(x), np.max(x), np.mean(x), np.any(x > 0)]
            texts += [np.sum(x, 1), np.count_nonzero(x)]
            assert [one.layout.text for one in texts] == [
                "x=P", "x=P(prod)", "x=P(min)", "x=P(max)", "x=P", "x=P(max)", "x=S0", "x=P",
            ]  # fmt: skip
            assert np.sum(split(mesh, values((4, 3)), "P"), 0).layout.text == "x=P"
            assert np.max(distribute(values((4, 3)), mesh, "P(max)")).layout.text == "x=P(max)"
            assert np.max(np.sum(x, 0)).dtype == np.float64

    mm.run_virtual(2, main)


def test_options_of_reductions():
    a = values((4, 3), "i4")
    mask = values((4, 1), "bool", 1)

    def check(mesh, tensors, what):
        x, m = tensors
        same(np.sum(x, axis=0, where=m, initial=5), a.sum(0, where=mask, initial=5), what)
        same(np.sum(x, dtype="f4"), a.sum(dtype="f4"), what)
        same(np.sum(x, dtype="i1"), a.sum(dtype="i1"), what)
        same(np.prod(x, axis=1, initial=2), a.prod(1, initial=2), what)
        same(np.max(x, axis=0, initial=1, where=m), a.max(0, initial=1, where=mask), what)
        same(np.min(x, initial=-9), a.min(initial=-9), what)
        same(np.mean(x, axis=0, where=m), np.mean(a, 0, where=mask), what)
        same(np.mean(x, dtype="f4"), a.mean(dtype="f4"), what)
        same(np.var(x, 0, ddof=1), a.var(0, ddof=1), what)
        same(np.std(x, where=m), a.std(where=mask), what)
        same(np.any(x, axis=1, where=m), a.any(1, where=mask), what)
        out = zeros((3,), mesh, "S0", dtype="i8")
        assert np.sum(x, axis=0, out=out) is out
        same(out, a.sum(0), what)
        same(np.add.reduce(x), np.add.reduce(a), what)
        same(np.multiply.reduce(x, axis=None), np.multiply.reduce(a, axis=None), what)
        same(np.logical_and.reduce(x, axis=1), np.logical_and.reduce(a, axis=1), what)
        same(np.bitwise_xor.reduce(x, axis=0), np.bitwise_xor.reduce(a, axis=0), what)
        same(np.subtract.reduce(x, axis=0), np.subtract.reduce(a, axis=0), what)
        same(np.logaddexp.reduce(x, axis=1), np.logaddexp.reduce(a, axis=1), what)
        same(np.sum(x, axis=()), a.sum(axis=()), what)

    on_every_layout(2, check, [a, mask])
    on_every_layout(3, check, [a, mask], pick=3)


def test_half_and_unusual_dtypes():
    half = values((4, 3), "f2") + np.float16(0.5)
    days = values((4, 3), "i8").astype("m8[D]")
    text = np.array([["b", "a", "c"], ["d", "aa", "z"]])

    def check(mesh, tensors, what):
        x, y, z = tensors
        same(np.mean(x, 0), half.mean(0), what)
        same(np.sum(x), half.sum(), what)
        same(np.var(x), half.var(), what)
        same(np.max(y, 0), days.max(0), what)
        same(np.sum(y, 1), days.sum(1), what)
        same(y * 2, days * 2, what)
        same(y + np.timedelta64(1, "D"), days + np.timedelta64(1, "D"), what)
        same(y * mm.zeros((3,), mesh, "R"), days * np.zeros(3), what)
        same(z == "a", text == "a", what)
        same(np.argmin(z), text.argmin(), what)

    on_every_layout(2, check, [half, days, text])


def test_where_the_best_stands():
    a = np.array([[1, 5, 5], [5, 1, 0], [0, 5, 1.0], [1, 1, 1]])
    b = np.array([[1, 2, np.nan], [np.nan, 1, 0], [-np.inf, 5, 1.0], [-np.inf, np.inf, 1]])
    for one in (a, b, a.astype("i4"), a > 0, a.astype("c16"), np.full((4, 3), -np.inf)):

        def check(mesh, tensors, what, one=one):
            (x,) = tensors
            for function in (np.argmin, np.argmax):
                for axis in (None, 0, 1):
                    want = function(one, axis=axis, keepdims=axis == 0)
                    same(function(x, axis=axis, keepdims=axis == 0), want, (axis, what))

        on_every_layout(3, check, [one])


def test_averages_and_quantiles():
    a = values((4, 3))
    w = values((4, 3), seed=1) ** 2 + 1
    row = w[:, 0].copy()

    def check(mesh, tensors, what):
        x, y, z = tensors
        same(np.average(x, weights=y), np.average(a, weights=w), what)
        same(np.average(x, axis=0), np.average(a, axis=0), what)
        same(
            np.average(x, axis=0, weights=z, returned=True),
            np.average(a, axis=0, weights=row, returned=True),
            what,
        )
        for q in (0.3, [0.1, 0.5, 1.0]):
            same(np.quantile(x, q, axis=1), np.quantile(a, q, axis=1), what)
            same(np.percentile(x, q, method="lower"), np.percentile(a, q, method="lower"), what)
        same(np.nanquantile(x, 0.5, axis=0), np.nanquantile(a, 0.5, axis=0), what)
        same(np.median(x, axis=0, keepdims=True), np.median(a, axis=0, keepdims=True), what)

    on_every_layout(2, check, [a, w, row], pick=3)


def test_nan_is_passed_over():
    a = values((4, 3)).astype("f8")
    a[:, 0] = np.nan
    a[1, 1] = np.nan

    def check(mesh, tensors, what):
        (x,) = tensors
        for function in (np.nansum, np.nanprod, np.nanmin, np.nanmax, np.nanmean, np.nanvar):
            for axis in (0, 1, None):
                same(quiet(function, x, axis), quiet(function, a, axis), (function, axis, what))
        same(np.max(x, axis=1), a.max(1), what)
        same(np.min(x), a.min(), what)
        same(np.any(x), a.any(), what)

    on_every_layout(3, check, [a])


def test_variance_of_what_is_far_from_zero():
    rng = np.random.default_rng(1)
    a = 1e9 + rng.random((64, 3))

    def check(mesh, tensors, what):
        same(np.var(tensors[0], axis=0), np.var(a, axis=0), what, rtol=1e-9)
        same(np.std(tensors[0].copy()), np.std(a), what, rtol=1e-9)

    def main():
        with mm.DeviceMesh("x=4") as mesh:
            for text in ("R", "S0", "S1", "S0(60,0,3,1)"):
                check(mesh, [distribute(a, mesh, text)], text)

    mm.run_virtual(4, main)


def test_counts_of_values():
    a = values((4, 3))
    w = values((4, 3), seed=1)
    n = values((7,), "i4") + 4
    m = values((7,), seed=2)

    def check(mesh, tensors, what):
        x, y, k, z = tensors
        same(np.histogram(x, 4, (-4, 4)), np.histogram(a, 4, (-4, 4)), what)
        same(np.histogram(x), np.histogram(a), what)
        same(
            np.histogram(x, [-4, 0, 1, 5], weights=y, density=True),
            np.histogram(a, [-4, 0, 1, 5], weights=w, density=True),
            what,
        )
        same(np.bincount(k), np.bincount(n), what)
        same(np.bincount(k, z, minlength=20), np.bincount(n, m, minlength=20), what)

    on_every_layout(2, check, [a, w, n, m], pick=7)


def test_numbers_out_of_arrays_of_one_element():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            for text in ("R", "S0", "P"):
                x = distribute(np.array([3.5]), mesh, text)
                assert (float(x), int(x), complex(x), bool(x), x.item()) == (3.5, 3, 3.5, True, 3.5)
            total = np.sum(distribute(np.arange(5), mesh, "S0"))
            assert type(total.item()) is int
            assert float(total) == 10
            assert [*range(12)][total] == 10
            assert not np.any(x < 0)
            assert total > 9
            for size in (0, 2):
                with pytest.raises(ShapeError, match=rf"\b{size} elements"):
                    bool(zeros(size, mesh, "S0"))
            with pytest.raises(ShapeError):
                float(zeros((2, 2), mesh, "S0"))
            with pytest.raises(TypeError):
                [0, 1][zeros((), mesh, "R")]

    mm.run_virtual(2, main)


def test_the_largest_of_no_elements():
    """Refused wherever NumPy does, also where the result has no elements either."""

    def main():
        with mm.DeviceMesh("x=2") as mesh:
            for shape in ((0, 0), (0, 3), (3, 0), (0,)):
                x = mm.zeros(shape, mesh, "S0")
                for axis in range(len(shape)):
                    try:
                        want = np.zeros(shape).max(axis=axis)
                    except ValueError:
                        with pytest.raises(ShapeError):
                            np.max(x, axis=axis)
                    else:
                        assert np.max(x, axis=axis).shape == want.shape

    mm.run_virtual(2, main)


@settings(max_examples=examples(30))
@given(st.data())
def test_any_shape_and_axes(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    a = values(shape, data.draw(st.sampled_from(["f8", "i4", "u1", "bool"])))
    some = st.sets(st.integers(0, max(len(shape) - 1, 0)), max_size=len(shape)).map(tuple)
    axis = data.draw(st.one_of(st.none(), some))
    keepdims = data.draw(st.booleans())
    dims = data.draw(st.sampled_from(["x=1", "x=2", "x=3", "x=4", "x=2,y=2"]))
    ranks = int(np.prod([int(one[2:]) for one in dims.split(",")]))
    placement = data.draw(st.sampled_from(placements(a, dims.count("="))))

    def main():
        with mm.DeviceMesh(dims) as mesh:
            x = split(mesh, a, placement)
            for function in (np.sum, np.prod, np.any, np.max, np.argmax, np.mean, np.var):
                options = {"axis": axis, "keepdims": keepdims}
                if function is np.argmax:
                    options["axis"] = None if axis is None or len(axis) != 1 else axis[0]
                try:
                    want = quiet(function, a, **options)
                except ValueError:
                    with pytest.raises(ShapeError):
                        function(x, **options)
                else:
                    same(quiet(function, x, **options), want, (function, options))

    mm.run_virtual(ranks, main)


def test_what_is_refused():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = zeros((4, 3), mesh, "S0")
            with pytest.raises(np.exceptions.AxisError, match="axis 2 does not exist") as missing:
                np.sum(x, axis=2)
            assert isinstance(missing.value, AxisError)
            with pytest.raises(AxisError, match=r"whole number, got 1\.5") as wrong:
                np.sum(x, axis=cast(Any, 1.5))
            assert isinstance(wrong.value, TypeError)
            with pytest.raises(ValueError, match="twice"):
                np.max(x, axis=(0, -2))
            with pytest.raises(ValueError, match="identity"):
                np.max(x, where=x > 0)
            with pytest.raises(ShapeError):
                np.sum(x, where=zeros((2, 4, 3), mesh, "R", dtype=bool))
            with pytest.raises(ShapeError, match="out="):
                np.sum(x, out=x)
            with pytest.raises(ZeroDivisionError):
                np.average(x, weights=x)
            with pytest.raises(ShapeError):
                np.average(x, weights=np.ones(4))
            with pytest.raises(ShapeError):
                np.bincount(mm.full(3, -1, mesh, "S0"))
            with pytest.raises(TypeError):
                np.bincount(zeros(3, mesh, "S0"))
            with pytest.raises(NoRuleError, match="auto"):
                np.histogram(x, "auto")

    mm.run_virtual(2, main)


def test_ranks_that_the_mesh_leaves_out_take_part_without_blocks():
    a = values((4, 3))

    def main():
        with mm.DeviceMesh(Mesh("x=2")) as mesh:
            x = distribute(a, mesh, "S0")
            found = [x + 1, np.where(x > 0, x, 0), np.sum(x, 0), np.argmax(x, 0), x @ a.T]
            found += [np.var(x, 0), np.mean(x), np.median(x, 1), np.trace(x), np.sin(np.sum(x, 0))]
            x += 1
            np.copyto(x, np.sum(x, 0))
            if mesh.rank == 2:
                assert not any(one.is_member for one in found)
                with pytest.raises(RankError, match=r"rank 2\b"):
                    float(np.sum(x))
            else:
                same(x, np.broadcast_to((a + 1).sum(0), a.shape))
            return [(one.shape, one.dtype, one.layout) for one in found]

    facts = mm.run_virtual(3, main)
    assert facts[0] == facts[1] == facts[2]


@pytest.mark.parametrize("shape", [*deep(((2, 1, 4),), ((1, 1, 4),)), (1, 3)])
@pytest.mark.parametrize("function", [np.argmin, np.argmax])
def test_places_of_axes_shorter_than_the_dim_that_splits_them(function, shape):
    a = values(shape)

    def check(mesh, tensors, what):
        (x,) = tensors
        for axis in (None, *range(len(shape))):
            for keepdims in (False, True):
                want = function(a, axis, keepdims=keepdims)
                same(function(x, axis, keepdims=keepdims), want, (axis, keepdims, what))

    on_every_layout(4, check, [a], "x=2,y=2")


@pytest.mark.parametrize("kind", [*deep("i4", "i8"), "f4", *deep("c16"), None])
@pytest.mark.parametrize("dtype", ["f2", *deep("f4", "f8"), "i2", "c16", *deep("bool")])
def test_variances_in_every_dtype(dtype, kind):
    """The distances from a mean are taken in the dtype that both give, and summed in `kind`."""
    a = values((4, 3), dtype)
    a[0, 0] = 3
    agrees(lambda x: np.var(x, dtype=kind), a)
    agrees(lambda x: np.nanvar(x, axis=0, dtype=kind), a)
    agrees(lambda x: np.var(x, mean=0.5, dtype=kind), a)
    agrees(lambda x: np.std(x, dtype=kind), a)
    agrees(lambda x: np.std(x, axis=0, dtype=kind), a)


@pytest.mark.parametrize("function", [np.percentile, np.quantile, np.nanpercentile])
def test_quantiles_of_half_precision(function):
    """A level that is a number of Python does not widen the result, an array of them does."""
    a = values((4, 3), "f2")
    for level in (0.3, 1, np.float64(0.3), [0.3, 0.5], np.array(0.3)):
        for axis in (None, 0):
            agrees(lambda x, axis=axis, level=level: function(x, level, axis=axis), a)
    agrees(np.median, a)
    agrees(lambda x: np.nanmedian(x, axis=1), a)


def test_what_numpy_refuses_is_refused():
    for shape, axis in [((0,), None), ((0, 3), 0), ((0, 3), 1), ((3, 0), 0), ((0, 0), 0)]:
        for dtype in ("f8", "i4"):
            for function in (np.nanmax, np.nanmin, np.average):
                a = np.ones(shape, dtype)
                agrees(lambda x, f=function, axis=axis: f(x, axis), a)
                agrees(lambda x, axis=axis: np.nanmax(x, axis, initial=3), a)
    one = np.asarray(5.0)
    which: Any
    for which in (0, -1, (), None):
        for middle in (np.median, np.nanmedian):
            agrees(lambda x, f=middle, axis=which: f(x, axis=axis), one)
        for quantile in (np.percentile, np.nanquantile):
            agrees(lambda x, f=quantile, axis=which: f(x, 0.3, axis=axis), one)
    times = np.ones(3, "m8[s]")
    for spread in (np.nanvar, np.nanstd, np.var, np.std, np.nanprod):
        agrees(spread, times)
    for product in (np.inner, np.dot):
        agrees(product, np.ones((), "u1"), times)
        agrees(product, times, np.ones((), "u1"))


def test_no_initial_value():
    """None was taken for NaN."""

    def main(mesh):
        numbers = np.arange(6.0).reshape(3, 2)
        x: Any = mm.distribute(numbers, mesh, "S0")
        functions: Any = (np.sum, np.prod, np.max, np.nansum, np.add.reduce)
        for function in functions:
            found = function(x, axis=0, initial=None)
            np.testing.assert_array_equal(found.full(), function(numbers, axis=0, initial=None))

    on("a=2", main)


@pytest.mark.parametrize(
    "call", ["median(x0", "nanmedian(x0", "quantile(x0, 0.5", "percentile(x0, 9"]
)
@pytest.mark.parametrize("axis", [(1, 2), (0, 1), (0, 2), None])
def test_quantiles_over_several_axes_where_a_block_is_empty(call, axis):
    """NumPy refuses to reduce no elements over two axes, which one rank alone has."""
    for place in ("S0", "S1", "S0(2,0,0)"):
        check("a=3", f"np.{call}, axis={axis})", [(place, (2, 3, 4), "float64", 1)], exact=False)


@pytest.mark.parametrize("axis", [0, 1, 2, (0, 2), None])
def test_weights_of_quantiles_are_split_as_the_values_are(axis):
    for place in ("S0", "S1", "R"):
        rows = [(place, (3, 4, 2), "float64", 1), ("S1", (3, 4, 2), "float32", 2, "positive")]
        for levels in ("0.5", "[0.1, 0.9]"):
            text = f"np.quantile(x0, {levels}, axis={axis}, weights=x1, method='inverted_cdf')"
            check("a=3", text, rows, exact=False)
    line = "np.quantile(x0, 0.5, axis=1, weights=x1, method='inverted_cdf')"
    check("a=2", line, [("S0", (3, 4), "f8", 1), ("S0", (4,), "f8", 2, "positive")], exact=False)
    check("a=2", line, [("S0", (3, 4), "f8", 1), ("S0", (5,), "f8", 2, "positive")], exact=False)


@pytest.mark.parametrize(
    "text",
    [
        "np.nanmin(x0, axis=None, keepdims=True)",
        "np.nanmax(x0, axis=0)",
        "np.nanmax(x0, axis=1, where=x0 == x0)",
        "np.nanstd(x0, axis=-1, ddof=5)",
        "np.nanvar(x0, axis=0, ddof=4)",
        "np.nanquantile(x0[:0].real, [], axis=-2)",
    ],
)
@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_what_passes_nan_over(text, dtype):
    """Complex numbers, fewer elements than a variance takes, and a mask without a first value."""
    check("a=3", text, [("S0(1,0,3)", (4, 3), dtype, 7, "nan")], exact=False)


@pytest.mark.parametrize("weights", [[0.0], [1.0], [1.0, -1.0]])
def test_weights_that_add_up_to_zero_for_no_elements(weights):
    def average(x):
        return np.average(x, axis=1, weights=np.array(weights), returned=True)

    agrees(average, np.ones((0, len(weights))), ranks=3)


def test_numbers_without_axes_have_no_axis_to_average():
    for function in ("mean", "var", "std", "average", "nanmean", "nanstd"):
        for dtype in ("int8", "float32"):
            for axis in (0, -1, None, ()):
                check("a=2", f"np.{function}(x0, axis={axis})", [("R", (), dtype, 1)], exact=False)
