"""Methods of split arrays are NumPy's functions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DTypeError, LayoutError, NoRuleError, ShapeError
from tests.helpers.depth import deep
from tests.helpers.dtensor_check import agree, numbers, on, placements_of, raises_alike, same, split
from tests.helpers.rule_fuzz import check

CALLS: list[Any] = [
    lambda x: x.reshape(4, 3),
    lambda x: x.reshape((2, -1), order="F"),
    lambda x: x.ravel(),
    lambda x: x.flatten(),
    lambda x: x.flatten("F"),
    lambda x: x.T,
    lambda x: x.mT,
    lambda x: x.transpose(),
    lambda x: x.transpose(1, 0),
    lambda x: x.transpose((0, 1)),
    lambda x: x.swapaxes(0, 1),
    lambda x: x[:, :1].squeeze(),
    lambda x: x[:, :1].squeeze(1),
    lambda x: x.cumsum(),
    lambda x: x.cumprod(0),
    lambda x: x.argsort(0, kind="stable"),
    lambda x: x.take([1, 0], axis=1),
    lambda x: x.repeat(2, 0),
    lambda x: x.compress([True, False, True], 0),
    lambda x: x.diagonal(1),
    lambda x: x.nonzero(),
    lambda x: x.astype(float),
    lambda x: x.astype("c16").real,
    lambda x: x.astype("c16").imag,
    lambda x: x.copy(),
]


@pytest.mark.parametrize("dims", [*deep("a=1", "a=2"), "a=3", *deep("a=2,b=2")])
def test_methods(dims):
    x = numbers((3, 4))
    cases: list[Any] = [
        (f, [x], [p]) for f in CALLS for p in placements_of(2, dims.count("="))[::2]
    ]
    agree(dims, cases)


def test_in_place():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            for place in ("S0", "S1", "R", "P"):
                x = split(numbers((3, 4)), mesh, place)
                x.sort(0)
                same(x, np.sort(numbers((3, 4)), 0))
                x.fill(7)
                same(x, np.full((3, 4), 7))
                assert x.layout.text == f"a={place}"

    mm.run_virtual(2, main)


RESULTS: list[Any] = [
    lambda x, **how: np.cumsum(x, 1, **how),
    lambda x, **how: np.cumprod(x, 0, None, *how.values()),
    lambda x, **how: np.nancumsum(x, axis=0, **how),
    lambda x, **how: np.cumulative_sum(x, axis=1, **how),
    lambda x, **how: np.take(x, [3, 0, 1, 2], axis=0, **how),
    lambda x, **how: np.compress([True] * 4, x, 0, **how),
    lambda x, **how: np.concatenate([x[:1], x[1:]], **how),
    lambda x, **how: np.stack([x[0], x[1], x[2], x[3]], **how),
    lambda x, **how: np.fft.ifft(x, **how).real if not how else np.fft.ifft(x, **how),
    lambda x, **how: np.round(x, 0, *how.values()),
    lambda x, **how: np.median(x[None], 0, **how),
]


@pytest.mark.parametrize("function", RESULTS)
def test_results_go_into_out_in_its_layout(function):
    numbers = np.arange(12.0).reshape(4, 3)
    expected = function(numbers)

    def main(mesh):
        x = mm.distribute(numbers, mesh, "S0")
        kind = complex if function is RESULTS[8] else float
        out = mm.zeros((4, 3), mesh, "S1", dtype=kind)
        assert function(x, out=out) is out
        assert out.layout.text == "a=S1"
        np.testing.assert_allclose(out.full().real, expected, atol=1e-12)

    on("a=2", main)


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda x: np.unique(x, axis=0), "axis"),
        (lambda x: np.diff(x, prepend=1.0), "prepend"),
        (lambda x: np.sort(x, order="a"), "order"),
        (lambda x: np.searchsorted(x[:, 0], 1.0, "left", [0, 1, 2, 3]), "sorter"),
        (lambda x: np.linspace(x, x, retstep=True), "retstep"),
    ],
)
def test_options_without_a_rule_are_refused_by_name(call, option):
    def main(mesh):
        with pytest.raises(NoRuleError, match=rf"numpy\.\w+ of split arrays takes no {option}"):
            call(mm.zeros((4, 3), mesh, "S0"))

    on("a=2", main)


def test_facts_and_numbers():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = split(numbers((3, 4)), mesh, "S1")
            assert (np.ndim(x), np.shape(x), np.size(x), np.size(x, 1)) == (2, (3, 4), 12, 4)
            assert np.result_type(x, np.float32) == np.float64
            assert np.isrealobj(x)
            assert not np.iscomplexobj(x)
            assert np.can_cast(x.dtype, float)
            assert x[1, 2].item() == numbers((3, 4))[1, 2]
            assert x.tolist() == numbers((3, 4)).tolist()
            flat = x.flatten()
            flat.fill(0)
            same(x, numbers((3, 4)))

    mm.run_virtual(2, main)


def test_wrong_arguments():
    x = numbers((3, 4))
    raises_alike("a=2", DTypeError, [(lambda x: x.astype("i1", casting="safe"), x, "S0")])
    raises_alike("a=2", ShapeError, [(lambda x: x.item(), x, "S0")])


def test_what_an_array_is_cannot_be_assigned():
    def main(mesh):
        x = mm.zeros((6, 2), mesh, "S0")
        for name, value in (("shape", (2, 6)), ("dtype", np.int8), ("layout", None)):
            with pytest.raises(AttributeError):
                setattr(x, name, value)

    on("a=2", main)


def test_copied_shown_and_formatted():
    def main(mesh):
        x = mm.arange(4, mesh=mesh, placements="S0")
        y = copy.deepcopy(x)
        y.local[...] = -1
        assert x.full().tolist() == [0, 1, 2, 3]
        with pytest.raises(TypeError, match=r"x\.full\(\)"):
            pickle.dumps(x)
        assert f"{x.sum():.2f}" == "6.00"
        assert str(x) == f"{x!r}, the block of rank {mesh.rank}:\n{x.local}"
        assert f"{x}" == str(x)
        assert "RedistributionPlan of shape (4,)" in repr(x.plan("R"))
        with pytest.raises(ShapeError, match=r"\b4 elements"):
            f"{x:.2f}"
        assert mm.Random(1).normal(5, mesh, "S0").shape == (5,)

    on("a=2", main)


def test_a_sum_that_waits_says_so():
    def main(mesh):
        x = mm.distribute(np.arange(4.0), mesh, "a=S0")
        assert "x.full() is the result" in str(x.sum())
        assert "the block of rank" in str(x)
        whole = mm.distribute(np.arange(4.0), mesh, "a=R")
        for call in (np.asarray, list):
            with pytest.raises(LayoutError, match=r"x\.local"):
                call(whole)
            with pytest.raises(LayoutError, match=r"x\.full\(\)"):
                call(x)

    on("a=2", main)


@pytest.mark.parametrize("place", ["R", "S0", "P"])
def test_one_element_as_a_number(place):
    """By an index for each axis, or by one that counts along the row of all elements."""
    x = (place, (2, 3), "int64", 1)
    for index in ("3", "-1", "1, 2", "(0, 1)", "6", "-7", "1, 2, 0", "", "2, 0"):
        check("a=3", f"x0.item({index})", [x])
    for index in ("0", "-1", "1", "0, 0", "()", ""):
        check("a=3", f"x0.item({index})", [("R", (), "int64", 1)])


def test_real_numbers_are_their_own_conjugates():
    for dtype in ("bool", "int8", "complex64"):
        check("a=2", "[x0.conj(), x0.conjugate()]", [("S0", (3,), dtype, 1)])
