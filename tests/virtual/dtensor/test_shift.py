"""Shifted arrays against numpy.roll and against slices of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mpimesh as mm
from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout import Layout
from mpimesh.layout.reads import shift_reads

MESHES = ["x=1", "x=2", "x=4", "x=2,y=2", "x=3,y=2", "x=1,y=2"]


@given(st.data())
def test_any_shift(data):
    value = mm.Mesh(data.draw(st.sampled_from(MESHES)))
    ndim = data.draw(st.integers(1, 3))
    axes = [f"S{axis}" for axis in range(ndim)]
    specs = [data.draw(st.sampled_from(["R", *axes])) for _ in value.dims]
    shape = tuple(data.draw(st.integers(0, 7)) for _ in range(ndim))
    wrap = data.draw(st.booleans())
    axis = tuple(data.draw(st.lists(st.integers(-ndim, ndim - 1), min_size=1, max_size=3)))
    steps = tuple(data.draw(st.integers(-9, 9)) for _ in axis)
    whole = np.arange(1, 1 + math.prod(shape)).reshape(shape)
    totals = [0] * ndim
    for count, one in zip(steps, axis, strict=True):
        totals[one] += count
    expected = np.roll(whole, totals, tuple(range(ndim))) if wrap else moved(whole, totals, -1)

    def main():
        with mm.DeviceMesh(value) as mesh:
            x = mm.distribute(whole, mesh, specs)
            y = mm.shift(x, steps, axis, wrap=wrap, fill=-1)
            assert y.layout == x.layout
            return y.full()

    for got in mm.run_virtual(value.size, main):
        assert np.array_equal(got, expected)


def moved(whole, steps, fill):
    target = np.full_like(whole, fill)
    into = tuple(
        slice(max(step, 0), max(size + min(step, 0), 0))
        for step, size in zip(steps, whole.shape, strict=True)
    )
    taken = tuple(
        slice(max(-step, 0), max(size - max(step, 0), 0))
        for step, size in zip(steps, whole.shape, strict=True)
    )
    target[into] = whole[taken]
    return target


def test_a_rank_gets_as_many_elements_as_there_are_steps():
    layout = Layout(mm.Mesh("x=2,y=2"), "x=S0, y=S1")
    for steps, elements in [((3, 0), 3 * 50), ((0, -2), 2 * 50), ((0, 0), 0), ((50, 0), 2500)]:
        reads = shift_reads(layout, (100, 100), steps, wrap=True)
        assert [reads.received(rank)[0] for rank in range(4)] == [elements] * 4
        assert reads.moves == (elements > 0)


def test_summands_wrap_and_are_shifted_no_other_way():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            mine = np.arange(3.0) + mesh.rank
            x = mm.DTensor.from_local(mine, mesh, "x=P", shape=(3,))
            with pytest.raises(LayoutError):
                mm.shift(x, 1, 0, wrap=False)
            return mm.shift(x, 1, 0).full()

    for got in mm.run_virtual(2, main):
        assert got.tolist() == [5.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("steps", "axis", "text"),
    [
        (1, 2, "does not exist"),
        ((1, 2), 0, "one step for each axis"),
        ((1.5,), (0,), "whole numbers"),
        (1.5, 0, "whole numbers"),
    ],
)
def test_what_is_refused(steps, axis, text):
    def main():
        with mm.DeviceMesh("x=1") as mesh:
            x = mm.zeros((2, 2), mesh, "x=S0")
            with pytest.raises(ShapeError, match=text):
                mm.shift(x, steps, axis)

    mm.run_virtual(1, main)


def test_a_rank_outside_the_mesh_takes_no_part():
    def main():
        with mm.DeviceMesh(mm.Mesh("x=2", [2, 0])) as mesh:
            x = mm.distribute(np.arange(5), mesh, "x=S0")
            y = mm.shift(x, 2, 0)
            return y.full()

    results = mm.run_virtual(3, main)
    assert results[1] is None
    assert results[0].tolist() == results[2].tolist() == [3, 4, 0, 1, 2]
