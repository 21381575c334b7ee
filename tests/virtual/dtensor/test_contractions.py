"""Products of split arrays against NumPy's, from every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import DTypeError, NoRuleError, ShapeError
from tests.contract.split_arrays import (
    agrees,
    distribute,
    on_every_layout,
    placements,
    same,
    split,
    values,
    zeros,
)
from tests.helpers.depth import deep, examples
from tests.helpers.rule_fuzz import check


@pytest.mark.parametrize("ranks", [*deep(1, 2), 3, *deep(4)])
def test_matrix_products(ranks):
    a, b = values((4, 5)), values((5, 3), seed=1)

    def check(mesh, tensors, what):
        x, y = tensors
        same(x @ y, a @ b, what)
        same(np.einsum("ij,jk->ki", x, y), (a @ b).T, what)
        same(np.dot(x, y), a @ b, what)
        same(x @ b, a @ b, what)
        same(a @ y, a @ b, what)

    on_every_layout(ranks, check, [a, b])


@pytest.mark.parametrize("dtype", ["i1", "f4", "c16", "bool"])
def test_dtypes(dtype):
    a, b = values((4, 5), dtype), values((5, 3), dtype, seed=1)

    def check(mesh, tensors, what):
        x, y = tensors
        same(x @ y, a @ b, what)
        same(np.tensordot(x, y, 1), np.tensordot(a, b, 1), what)
        same(np.einsum("ij,jk", x, y), np.einsum("ij,jk", a, b), what)

    on_every_layout(3, check, [a, b], pick=2)


@pytest.mark.parametrize(
    ("first", "second"),
    [((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 3)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5))],
)
def test_all_shapes_of_matmul(first, second):
    a, b = values(first), values(second, seed=1)

    def check(mesh, tensors, what):
        same(tensors[0] @ tensors[1], a @ b, what)
        same(np.dot(*tensors), np.dot(a, b), what)

    on_every_layout(2, check, [a, b])


def test_dot_into_another_dtype_is_refused():
    """As by NumPy, which casts no result of this function."""

    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x = mm.distribute(np.ones((4, 4)), mesh, "S0")
            out: Any = mm.zeros((4, 4), mesh, "S0", dtype="f4")
            with pytest.raises(DTypeError, match="float64"):
                np.dot(x, x, out=out)
            out = mm.zeros((4, 4), mesh, "S1")
            assert np.dot(x, x, out=out).full()[0, 0] == 4

    mm.run_virtual(2, main)


def test_batches_broadcast():
    a, b = values((2, 1, 3, 4)), values((5, 4, 2), seed=1)

    def check(mesh, tensors, what):
        same(tensors[0] @ tensors[1], a @ b, what)

    on_every_layout(3, check, [a, b])


def test_two_mesh_dims():
    a, b = values((4, 6)), values((6, 4), seed=1)

    def check(mesh, tensors, what):
        x, y = tensors
        same(x @ y, a @ b, what)
        same(np.trace(x), np.trace(a), what)

    on_every_layout(4, check, [a, b], "x=2,y=2", pick=17)


def test_products_in_other_words():
    a, b = values((4, 3)), values((4, 3), seed=1)
    u, v = values((4,), "c16", 2), values((4,), "c16", 3)
    t = values((3, 4, 2), seed=4)

    def check(mesh, tensors, what):
        x, y, z, w, k = tensors
        same(np.tensordot(x, k, axes=([0, 1], [1, 0])), np.tensordot(a, t, ([0, 1], [1, 0])), what)
        same(np.tensordot(x, y, 0), np.tensordot(a, b, 0), what)
        same(np.inner(x, y), np.inner(a, b), what)
        same(np.vdot(z, w), np.vdot(u, v), what)
        same(np.vdot(x, y), np.vdot(a, b), what)
        same(np.outer(z, w), np.outer(u, v), what)
        same(np.dot(z, k), np.dot(u, t), what)
        same(np.dot(x, 3), np.dot(a, 3), what)
        same(np.vecdot(z, w), np.vecdot(u, v), what)
        same(np.vecdot(x, y), np.vecdot(a, b), what)
        if hasattr(np, "matvec"):
            same(np.matvec(x, b[0]), np.matvec(a, b[0]), what)
            same(np.vecmat(w, x), np.vecmat(v, a), what)

    on_every_layout(2, check, [a, b, u, v, t], pick=17)


@pytest.mark.parametrize(
    "subscripts",
    ["ij->ji", "ij->", "ij->j", "ii->i", "ii", "...i->...", "i...->...i", "ij,ij->i", "ij,kj->ik",
     "ij,ij,ij->ij", "ij,jk,kl->il", "ij,kl", "i...,i...->...", "ii,ij->j", "ij, jk -> ik"],
)  # fmt: skip
def test_einsum(subscripts):
    count = subscripts.count(",") + 1
    arrays = [values((3, 3), seed=seed) for seed in range(count)]

    def check(mesh, tensors, what):
        same(np.einsum(subscripts, *tensors), np.einsum(subscripts, *arrays), what)

    on_every_layout(2, check, arrays, pick=1 if count < 3 else 5)


def test_traces_and_norms():
    a = values((4, 5))
    t = values((3, 4, 3), "c16", 1)

    def check(mesh, tensors, what):
        x, k = tensors
        for offset in (-2, 0, 1):
            same(np.trace(x, offset), np.trace(a, offset), what)
            same(np.trace(k, offset, 2, 0), np.trace(t, offset, 2, 0), what)
        for order in (None, "fro", 1, -1, np.inf, -np.inf, 2, "nuc"):
            want = np.linalg.norm(a, order)
            same(np.linalg.norm(x, order), want, (order, what))
        for order in (None, 0, 1, 2, 3, np.inf, -np.inf):
            want = np.linalg.norm(t, order, axis=1, keepdims=True)
            same(np.linalg.norm(k, order, axis=1, keepdims=True), want, (order, what))
        same(np.linalg.norm(k), np.linalg.norm(t), what)
        want = np.linalg.norm(t, 1, axis=(2, 0))
        same(np.linalg.norm(k, 1, axis=(2, 0)), want, what)
        same(np.linalg.norm(x > 0), np.linalg.norm(a > 0), what)

    on_every_layout(3, check, [a, t], pick=3)


def test_least_bytes_choose_the_layout():
    def main():
        with mm.DeviceMesh("x=2") as mesh:

            def text(first, a, second, b):
                x = zeros(a, mesh, first)
                y = zeros(b, mesh, second)
                return (x @ y).layout.text

            square = (64, 64)
            assert text("S0", square, "R", square) == "x=S0"
            assert text("R", square, "S1", square) == "x=S1"
            assert text("S1", square, "S0", square) == "x=P"
            assert text("R", square, "R", square) == "x=R"
            assert text("S0", square, "S0", square) == "x=S0"
            # A long sum of a small result: its halves are cheaper than the operands.
            assert text("S1", (4, 4096), "S0", (4096, 4)) == "x=P"
            assert text("S0", (4, 4096), "S0", (4096, 4)) == "x=P"
            # A small matrix goes to the large one.
            assert text("S1", (4096, 64), "S1", (64, 64)) == "x=S0"
            assert text("S0(3,61)", square, "R", square) == "x=S0(3,61)"
            # Summed first: infinities times summands would not be NumPy's.
            assert text("P", square, "R", square) == "x=S0"

        with mm.DeviceMesh("x=1,y=2") as mesh:
            x, y = zeros((8, 8), mesh, "S0,R"), zeros((8, 8), mesh, "R,S1")
            assert (x @ y).layout.text == "x=S0, y=S1"

    mm.run_virtual(2, main)


def test_a_result_goes_where_it_is_told():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            a, b = values((4, 4)), values((4, 4), seed=1)
            for text in ("R", "S0", "S1", "P"):
                x, y = distribute(a, mesh, "S0"), distribute(b, mesh, "S0")
                out = zeros((4, 4), mesh, text)
                block = out.local
                assert np.matmul(x, y, out=out) is out
                assert out.local is block
                same(out, a @ b, text)
                x @= y
                same(x, a @ b, text)
                assert np.einsum("ij,jk->ik", y, y, out=out) is out
                same(out, b @ b, text)
                np.einsum("ij,jk->ik", y, y, out=y)
                same(y, b @ b, text)

    mm.run_virtual(2, main)


@settings(max_examples=examples(30))
@given(st.data())
def test_any_contraction(data):
    letters = "abcd"
    lengths = {letter: data.draw(st.integers(0, 4)) for letter in letters}
    terms = [
        "".join(data.draw(st.lists(st.sampled_from(letters), max_size=3, unique=True)))
        for _ in range(2)
    ]
    known = sorted(set("".join(terms)))
    result = "".join(data.draw(st.lists(st.sampled_from(known), unique=True)) if known else [])
    subscripts = f"{','.join(terms)}->{result}"
    arrays = [
        values([lengths[one] for one in term], data.draw(st.sampled_from(["f8", "i4"])), seed)
        for seed, term in enumerate(terms)
    ]
    dims = data.draw(st.sampled_from(["x=1", "x=2", "x=3", "x=4", "x=2,y=2", "x=2,y=1,z=2"]))
    ranks = int(np.prod([int(one[2:]) for one in dims.split(",")]))
    some = [placements(array) for array in arrays]
    chosen = [
        ", ".join(data.draw(st.sampled_from(row)) for _ in range(dims.count("="))) for row in some
    ]

    def main():
        with mm.DeviceMesh(dims) as mesh:
            tensors = [split(mesh, a, p) for a, p in zip(arrays, chosen, strict=True)]
            same(np.einsum(subscripts, *tensors), np.einsum(subscripts, *arrays), subscripts)

    mm.run_virtual(ranks, main)


def test_what_is_refused():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            x, y = zeros((4, 3), mesh, "S0"), zeros((4, 3), mesh, "S1")
            with pytest.raises(ShapeError, match=r"\b3\b.*axis 0\b"):
                x @ y
            with pytest.raises(ShapeError):
                np.matmul(x, 2.0)
            with pytest.raises(ValueError, match="3 and 4"):
                np.einsum("ij,jk", x, y)
            with pytest.raises(ShapeError, match=r"\b2 axes"):
                np.einsum("ijk->i", x)
            with pytest.raises(ShapeError, match=r"\b2\b.*\b1\b"):
                np.einsum("ij,jk", x)
            with pytest.raises(ShapeError):
                np.einsum("i1->i", x)
            with pytest.raises(ShapeError):
                np.einsum("ij->ik", x)
            with pytest.raises(NoRuleError):
                np.einsum(x, [0, 1])
            with pytest.raises(ShapeError):
                np.tensordot(x, y, 1)
            with pytest.raises(ShapeError):
                np.vdot(x, zeros(5, mesh, "R"))
            with pytest.raises(ShapeError, match="out="):
                np.matmul(x, np.zeros((3, 3)), out=zeros((3, 3), mesh, "R"))
            with pytest.raises(ShapeError, match=r"\b7\b"):
                np.linalg.norm(x, 7)

    mm.run_virtual(2, main)


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


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        ("vecdot(x0, x1, axis=0)", [(3, 2), (3, 2)]),
        ("vecdot(x0, x1, axis=-1, dtype='c16')", [(2, 3), (2, 3)]),
        ("vecdot(x0, x1, axes=[0, 1])", [(3, 2), (2, 3)]),
        ("vecdot(x0, x1, axes=[(0,), (1,), ()])", [(3, 2), (2, 3)]),
        ("vecdot(x0, x1, axis=2)", [(3, 2), (3, 2)]),
        ("matvec(x0, x1, dtype='f4')", [(2, 4, 3), (3,)]),
        ("matvec(x0, x1, axes=[(0, 1), 0, 1])", [(4, 3, 2), (3, 2)]),
        ("matvec(x0, x1, axes=[(0, 1), 0])", [(4, 3, 2), (3, 2)]),
        ("matvec(x0, x1, dtype='i4')", [(4, 3), (3,)]),
        ("vecmat(x0, x1, axes=[0, (2, 0), -1])", [(3,), (4, 2, 3)]),
        ("vecmat(x0, x1, axes='ab')", [(3,), (3, 4)]),
        ("matmul(x0, x1, axes=[(0, 1), (0, 1), (0, 1)])", [(4, 3, 2), (3, 5, 2)]),
        ("matmul(x0, x1, axes=[(1, 0), (-1, -2), (1, 0)])", [(3, 4), (5, 3)]),
        ("matmul(x0, x1, axes=[(0, 1), 0, 0])", [(4, 3), (3,)]),
        ("matmul(x0, x1, axes=[(0, 7), (0, 1), (0, 1)])", [(4, 3), (3, 5)]),
    ],
)
@pytest.mark.parametrize("place", ["S0", "R", "P"])
def test_products_along_axes_that_are_named(call, shapes, place):
    rows = [(place, shape, "float64", seed) for seed, shape in enumerate(shapes)]
    check("a=3", f"np.{call}", rows, exact=False)
