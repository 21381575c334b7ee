"""Operations on split arrays where rules, dtypes or errors once differed from NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from tests.contract.split_arrays import distribute, on_every_layout, quiet, same, values


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 1, 4), (1, 3)])
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


@pytest.mark.parametrize("ranks", [1, 3])
def test_negative_powers_of_integers_are_refused_on_all_ranks(ranks):
    """Also on ranks whose blocks are empty, or have no such power."""

    def main():
        with mm.DeviceMesh(f"x={ranks}") as mesh:
            x = distribute(np.array([2, 3]), mesh, "S0")
            powers = distribute(np.array([1, -1]), mesh, "S0")
            for power in (-1, np.array([-1]), np.array([-1, 1]), powers):
                with pytest.raises(ValueError, match="negative integer powers"):
                    x**power
            with pytest.raises(ValueError, match="negative integer powers"):
                np.power.outer(x, powers)
            mesh.barrier()
            # As NumPy's, it looks where it computes only.
            where, out = distribute(np.array([True, False]), mesh, "S0"), x.copy()
            same(np.power(x, powers, where=where, out=out), np.array([2, 3]))
            same(x ** distribute(np.array([1, 2]), mesh, "S0"), np.array([2, 9]))
            same(x**-1.0, np.array([2, 3]) ** -1.0)
            same(distribute(np.zeros(0, int), mesh, "S0") ** -1, np.zeros(0, int))

    mm.run_virtual(ranks, main)


def test_a_read_only_block_is_copied_and_can_be_written():
    def main():
        with mm.DeviceMesh("x=3") as mesh:
            block = np.array([1.0 + mesh.rank])
            block.flags.writeable = mesh.rank != 1
            x: Any = mm.DTensor.from_local(block, mesh, "S0")
            assert (x.local is block) == (mesh.rank != 1)
            x += 1
            np.add(x, 1, out=x)
            same(x, np.array([3.0, 4.0, 5.0]))
            y: Any = mm.DTensor.from_local(block, mesh, "S0", shape=(3,))
            np.copyto(y, 7)
            same(y, np.full(3, 7.0))

            def constant(part):
                return np.broadcast_to(part[:1] if mesh.rank else part[:1].copy(), part.shape)

            z = mm.local_map(constant, out_placements="S0")(y)
            z *= 2
            same(z, np.full(3, 14.0))

    mm.run_virtual(3, main)


def agrees(function, *arrays, ranks=2):
    """Check that a function gives what NumPy's gives: value, dtype, or kind of error."""
    try:
        want, error = quiet(function, *arrays), None
    except Exception as found:
        want, error = None, found

    def check(mesh, tensors, what):
        if error is None:
            same(quiet(function, *tensors), want, what)
            return
        kinds = [one for one in type(error).__mro__ if one.__module__ == "builtins"]
        with pytest.raises(kinds[0]):
            quiet(function, *tensors)

    on_every_layout(ranks, check, list(arrays))


@pytest.mark.parametrize("kind", ["i4", "i8", "f4", "c16", None])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i2", "c16", "bool"])
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


@pytest.mark.parametrize("function", [np.inner, np.dot])
def test_products_with_a_number(function):
    """It has the dtype that an array of it would have."""
    for dtype in ("f4", "i1", "bool"):
        for number in (2, 2.5, 2j, True, np.float32(2), np.array(2)):
            a = values((4, 3), dtype)
            agrees(lambda x, number=number: function(x, number), a)
            agrees(lambda x, number=number: function(number, x), a)
    times = values((4,)).astype("m8[s]")
    agrees(lambda x: function(x, np.uint8(2)), times)


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


def test_what_numpy_does_is_done():
    a = np.array([1, 5, 250], "u1")
    for low in (None, -2, 0, 3, 300, 2.5, np.int64(-2)):
        for high in (None, -2, 4, 255, 300, 5.5):
            agrees(lambda x, low=low, high=high: np.clip(x, low, high), a)
    days, numbers, words = np.ones(4, "M8[s]"), np.arange(4), np.array(["a", "b", "c", "d"])
    for other in (numbers, words, days):
        agrees(np.array_equal, days, other)
        agrees(np.array_equiv, days, other)
    true = np.array([True, False, True])
    agrees(np.histogram, true)
    agrees(lambda x: np.histogram(x, 3, (0, 1)), true)
    agrees(lambda x: np.histogram(x, [0, 1, 2], weights=x), true)
    agrees(np.histogram, np.zeros(0, bool))


def test_a_source_may_have_more_axes_of_one():
    def copied(into, source, **options):
        found = into.copy()
        np.copyto(found, source, **options)
        return found

    agrees(copied, np.ones(()), np.full((1, 1), 3.0))
    agrees(copied, np.ones(3), np.full((1, 1, 3), 3.0))
    agrees(copied, np.ones(3), np.full((2, 3), 3.0))
    agrees(copied, np.ones((3, 2)), np.full((1, 1, 2), 3.0))
    agrees(lambda x: copied(x, np.full((1, 1, 3), 3.0)), np.ones(3))
    agrees(lambda x: copied(x, 2, where=np.ones((1, 3), bool)), np.ones(3))


@pytest.mark.parametrize("dtype", ["f8", "i4", "bool", "M8[s]", "c16", "U3"])
def test_comparing_with_what_has_another_kind_of_dtype(dtype):
    """Nothing is equal then, and what is no question of equality is refused."""
    a = np.array(["a", "b"]) if dtype == "U3" else np.ones(2, dtype)
    for other in ("a", np.array(["a", "b"]), np.array(["a", "b", "c"]), np.datetime64(3, "s"), 1):
        agrees(lambda x, other=other: x == other, a)
        agrees(lambda x, other=other: x != other, a)
    agrees(lambda x: x < "a", a)
    agrees(lambda x: np.equal(x, "a"), a)
    agrees(lambda x, y: x == y, a, np.array(["a", "b"]))
    agrees(lambda x, y: x != y, a, np.array([["a"], ["b"]]))


def test_arrays_like_summands_of_a_dtype_that_cannot_be_summands():
    for dtype in ("bool", "f4"):
        agrees(lambda x, dtype=dtype: np.ones_like(x, dtype=dtype), values((4, 3)))
        agrees(lambda x, dtype=dtype: np.zeros_like(x, dtype=dtype, shape=5), values((4, 3)))


def test_texts_that_are_no_numbers_are_refused_on_all_ranks():
    def main():
        with mm.DeviceMesh("x=3") as mesh:
            x = distribute(np.array(["1", "2", "?"]), mesh, "S0")
            for convert in (np.astype, mm.DTensor.astype):
                with pytest.raises(ValueError, match=r"\?"):
                    convert(x, np.float64)
            mesh.barrier()
            same(np.astype(x[:2], np.float64), np.array([1.0, 2.0]))

    mm.run_virtual(3, main)
