"""Element by element: every operation against NumPy's, from every layout."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import DTypeError, LayoutError, NoRuleError, ShapeError
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

astype: Any = np.astype
BINARY: list[Any] = [
    np.add,
    np.subtract,
    np.multiply,
    np.divide,
    np.maximum,
    np.minimum,
    np.power,
    np.less,
]
BINARY += [np.floor_divide, np.divmod, np.hypot, np.logical_and, np.equal, np.arctan2]
UNARY: list[Any] = [
    np.negative,
    np.positive,
    np.conjugate,
    np.sin,
    np.sqrt,
    np.abs,
    np.modf,
    np.frexp,
]
UNARY += [np.logical_not, np.square, np.exp, np.real, np.imag, np.angle, np.nan_to_num, np.copy]
UNARY += [np.isnan, np.sign, np.rint, np.isreal, np.sinc, np.i0]


@pytest.mark.parametrize("ranks", [*deep(1, 2), 3, *deep(4)])
@pytest.mark.parametrize("shapes", [((4, 3), (4, 3)), ((5, 3), (3,)), ((3, 1), (1, 4))])
def test_two_operands(ranks, shapes):
    a, b = (values(shape, seed=seed) for seed, shape in enumerate(shapes))

    def check(mesh, tensors, what):
        x, y = tensors
        first = zlib.crc32(what.encode()) % len(BINARY)
        for ufunc in {np.add, np.multiply, *(BINARY * 2)[first : first + 3]}:
            same(quiet(ufunc, x, y), quiet(ufunc, a, b), (ufunc, what))

    on_every_layout(ranks, check, [a, b])


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_operand(ranks):
    for dtype in ("f8", "i4"):
        a = values((3, 5), dtype)

        def check(mesh, tensors, what, a=a):
            for function in UNARY:
                same(quiet(function, tensors[0]), quiet(function, a), (function, what))

        on_every_layout(ranks, check, [a])


@pytest.mark.parametrize("dims", ["x=2,y=2"])
def test_two_mesh_dims(dims):
    a, b = values((4, 3)), values((3,), seed=1)

    def check(mesh, tensors, what):
        x, y = tensors
        same(x + y, a + b, what)
        same(x * y, a * b, what)
        same(np.maximum(x, y), np.maximum(a, b), what)
        same(np.where(y > 0, x, y), np.where(b > 0, a, b), what)

    on_every_layout(4, check, [a, b], dims, pick=13)


def test_numbers_and_whole_arrays_are_operands():
    a = values((4, 3), "f4")
    row = values((3,), "f8", 1)

    def check(mesh, tensors, what):
        (x,) = tensors
        for other in (2, 2.5, True, np.float64(2), row, row.tolist(), np.array(3.0), 0, np.inf):
            for ufunc in (np.add, np.subtract, np.multiply, np.divide, np.greater):
                same(quiet(ufunc, x, other), quiet(ufunc, a, other), (ufunc, other, what))
                same(quiet(ufunc, other, x), quiet(ufunc, other, a), (ufunc, other, what))
        same(-x + 1, -a + 1, what)
        same(2 - abs(x) ** 2, 2 - abs(a) ** 2, what)

    on_every_layout(3, check, [a])


def test_linear_operations_leave_summands_alone():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = split(mesh, values((4, 3)), "P")
            whole = distribute(values((3,)), mesh, "R")
            most = distribute(values((4, 3)), mesh, "P(max)")
            texts = [x + x, -x, x * 2, x / 4, 3 * x, x - 1, x + whole, x.copy()]
            texts += [np.where(whole > 0, x, x), np.astype(x, "c16"), np.real(x)]
            assert {one.layout.text for one in texts} == {"x=P"}
            assert (x * whole).layout.text == "x=S0"  # summed first: `whole` may be infinite
            assert np.maximum(most, 3).layout.text == "x=P(max)"
            with np.errstate(all="ignore"):
                others = [np.sin(x), x * x, x / whole, 2 / x, x > 0, x * np.inf, x / 0, x**1]
                assert not any(one.layout.partial_op for one in others)
            assert (x + split(mesh, values((4, 3)), "S1")).layout.text == "x=S1"

    mm.run_virtual(2, main)


def test_integer_summands_are_summed_before_they_are_widened():
    """200 + 100 is 44 in uint8, and stays so in float64."""

    def main():
        with mm.DeviceMesh("x=2") as mesh:
            block = np.array([200 if mesh.rank == 0 else 100], "u1")
            x = mm.DTensor.from_local(block, mesh, "P")
            same(x * 1.5, np.array([66.0]))
            same(astype(x, "i8"), np.array([44]))
            same(x + x, np.array([88], "u1"))
            same(np.sum(x), np.uint64(44))

    mm.run_virtual(2, main)


def test_least_bytes_choose_the_layout():
    def main():
        with mm.DeviceMesh("x=4") as mesh:
            small, large = values((1, 8)), values((64, 8))
            x, y = distribute(large, mesh, "S0"), distribute(small, mesh, "S1")
            assert (x + y).layout.text == "x=S0"
            assert (y + x).layout.text == "x=S0"
            uneven = distribute(large, mesh, "S0(1,50,0,13)")
            assert (uneven * y).layout.text == "x=S0(1,50,0,13)"
            same(uneven * y, large * small)
            same(uneven + x, large + large)
            thin = distribute(large[:1], mesh, "S0")
            same(thin + large, large[:1] + large)
            assert (thin + 1).layout.text == "x=S0"

    mm.run_virtual(4, main)


def test_results_go_where_they_are_told():
    a, b = values((4, 3)), values((3,), seed=1)

    def check(mesh, tensors, what):
        x, y, out = tensors
        block, layout = out.local, out.layout
        assert np.add(x, y, out=out) is out
        same(out, a + b, what)
        assert out.local is block
        assert out.layout == layout, what
        np.multiply(x, 2, out, where=b > 0)
        same(out, np.where(b > 0, 2 * a, a + b), what)
        before = x
        x += y
        assert x is before
        same(x, a + b, what)
        x -= y
        np.copyto(out, y)
        same(out, np.broadcast_to(b, (4, 3)), what)
        np.copyto(out, x, where=y > 0)
        same(out, np.where(b > 0, a, b), what)
        np.clip(x, -1, 2, out=out)
        same(out, a.clip(-1, 2), what)
        np.divmod(x, 3, out=(out, None))  # type: ignore[arg-type]
        same(out, a // 3, what)
        np.round(x / 3, 1, out=out)
        same(out, np.round(a / 3, 1), what)

    on_every_layout(2, check, [a, b, values((4, 3), seed=2)], pick=3)
    on_every_layout(3, check, [a, b, values((4, 3), seed=2)], pick=11)


def test_functions_that_are_no_ufuncs():
    a, b = values((4, 3)), values((4, 1), seed=1)

    def check(mesh, tensors, what):
        x, y = tensors
        same(np.where(x > 0, y, x), np.where(a > 0, b, a), what)
        same(np.where(x > 0, 1, y), np.where(a > 0, 1, b), what)
        same(np.clip(x, y, 3), np.clip(a, b, 3), what)
        same(np.clip(x, None, y), np.clip(a, None, b), what)
        same(np.isclose(x, y, atol=1), np.isclose(a, b, atol=1), what)
        assert np.allclose(x, a) is True
        assert np.allclose(x, a + y * y + 1) is False
        assert np.array_equal(x, a) is True
        assert np.array_equal(x, y) is False
        assert np.array_equal(x, x + 1) is False
        assert np.array_equiv(y, b) is True
        assert np.array_equiv(x, np.ones(7)) is False
        same(np.zeros_like(x), np.zeros_like(a), what)
        same(np.ones_like(x, dtype="i4"), np.ones_like(a, dtype="i4"), what)
        same(np.full_like(x, y), np.full_like(a, b), what)
        same(np.zeros_like(x, shape=(2, 5)), np.zeros((2, 5)), what)
        assert np.empty_like(x).layout == x.layout
        assert np.ones_like(x).layout == x.layout
        same(np.astype(x, "f4"), a.astype("f4"), what)
        same(np.astype(x, "i4"), a.astype("i4"), what)
        same(np.add.outer(x, y), np.add.outer(a, b), what)
        same(np.multiply.outer(x, y), np.multiply.outer(a, b), what)
        same(np.add(x, y, dtype="f4"), np.add(a, b, dtype="f4"), what)

    on_every_layout(2, check, [a, b], pick=2)


def test_nan_is_equal_where_asked():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            a = np.array([1.0, np.nan, np.inf])
            x = distribute(a, mesh, "S0")
            assert not np.array_equal(x, a)
            assert np.array_equal(x, a, equal_nan=True)
            assert not np.allclose(x, a)
            assert np.allclose(a, x, equal_nan=True)
            same(np.nan_to_num(x, nan=7.0), np.nan_to_num(a, nan=7.0))
            same(np.nan_to_num(x, copy=False), np.nan_to_num(a))
            assert np.isfinite(x.local).all()

    mm.run_virtual(2, main)


def test_blocks_without_elements_are_cut_out_of_others():
    """Nothing moves from (1, 0) to (0, 1), though neither is a part of the other."""
    one = values((1, 1))

    def check(mesh, tensors, what):
        same(tensors[0] + tensors[1], one + one, what)

    on_every_layout(3, check, [one, one])


LENGTHS = st.integers(0, 5)


@settings(max_examples=examples(30))
@given(st.data())
def test_any_shapes_broadcast(data):
    whole = data.draw(st.lists(LENGTHS, max_size=3))
    arrays = []
    for seed in range(2):
        first = data.draw(st.integers(0, len(whole)))
        shape = [n if data.draw(st.booleans()) else 1 for n in whole[first:]]
        dtype = data.draw(st.sampled_from(["f8", "i4", "f4", "c16", "bool"]))
        arrays.append(values(shape, dtype, seed))
    dims = data.draw(st.sampled_from(["x=1", "x=2", "x=3", "x=4", "x=2,y=2"]))
    ranks = int(np.prod([int(one[2:]) for one in dims.split(",")]))
    chosen = [data.draw(st.sampled_from(placements(array, dims.count("=")))) for array in arrays]
    a, b = arrays

    def main():
        with mm.DeviceMesh(dims) as mesh:
            x, y = (split(mesh, one, p) for one, p in zip(arrays, chosen, strict=True))
            for ufunc in (np.add, np.multiply, np.not_equal, np.logical_or):
                same(ufunc(x, y), ufunc(a, b), ufunc, rtol=1e-6)

    mm.run_virtual(ranks, main)


def test_what_is_refused_is_refused_before_anything_moves():
    def main():
        with mm.DeviceMesh("x=2") as mesh, mm.DeviceMesh("x=2") as other:
            x, y = distribute(values((4, 3)), mesh, "S0"), zeros((2, 3), mesh, "S1")
            with pytest.raises(ShapeError, match=r"\(4, 3\), \(2, 3\)"):
                x + y
            with pytest.raises(ValueError, match="broadcast"):
                np.where(x, y, 1)
            with pytest.raises(LayoutError):
                x + zeros((4, 3), other, "S0")
            with pytest.raises(TypeError, match="bitwise_and"):
                x & x
            with pytest.raises(TypeError):
                np.add(x, 1.5, out=zeros((4, 3), mesh, "R", dtype="i4"))
            with pytest.raises(OverflowError):
                zeros(3, mesh, "R", dtype="u1") + 300
            with pytest.raises(DTypeError, match="ndarray"):
                np.add(x, 1, out=np.zeros((4, 3)))
            with pytest.raises(ShapeError, match=r"out=.*\(2, 3\)"):
                np.add(x, 1, out=y)
            with pytest.raises(ShapeError):
                np.where(x, x)
            with pytest.raises(NoRuleError, match="reduceat"):
                np.add.reduceat(x, [0])
            with pytest.raises(TypeError):
                np.copyto(zeros((4, 3), mesh, "R", dtype="i4"), x)
            with pytest.raises(DTypeError):
                x + np.array([None])

    mm.run_virtual(2, main)


@pytest.mark.parametrize("ranks", [1, 3])
def test_negative_powers_of_integers_are_refused_on_all_ranks(ranks):
    """Also on ranks whose blocks are empty, or have no such power."""

    def main():
        with mm.DeviceMesh(f"x={ranks}") as mesh:
            x = distribute(np.array([2, 3]), mesh, "S0")
            powers = distribute(np.array([1, -1]), mesh, "S0")
            for power in (-1, np.array([-1]), np.array([-1, 1]), powers):
                with pytest.raises(ValueError, match="negative"):
                    x**power
            with pytest.raises(ValueError, match="negative"):
                np.power.outer(x, powers)
            mesh.barrier()
            # As NumPy's, it looks where it computes only.
            where, out = distribute(np.array([True, False]), mesh, "S0"), x.copy()
            same(np.power(x, powers, where=where, out=out), np.array([2, 3]))
            same(x ** distribute(np.array([1, 2]), mesh, "S0"), np.array([2, 9]))
            same(x**-1.0, np.array([2, 3]) ** -1.0)
            same(distribute(np.zeros(0, int), mesh, "S0") ** -1, np.zeros(0, int))

    mm.run_virtual(ranks, main)


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


def test_nothing_is_none():
    def main(mesh):
        x: Any = mm.distribute(np.arange(6), mesh, "R").redistribute("P")
        assert (x == None).full().tolist() == [False] * 6  # noqa: E711
        assert (x != None).full().tolist() == [True] * 6  # noqa: E711

    on("a=2", main)
