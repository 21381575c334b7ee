"""Halos of random arrays on random meshes, against numpy.pad of the whole array."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpimesh as mm
from mpimesh.errors import LayoutError, RankError
from mpimesh.layout import Layout, plan_halo

MODES = {"periodic": "wrap", "edge": "edge", "reflect": "reflect", "symmetric": "symmetric"}
MESHES = ["x=1", "x=2", "x=3", "x=5", "x=2,y=2", "x=3,y=2", "x=1,y=2", "x=2,y=1,z=3"]


@st.composite
def cases(draw):
    """A mesh, placements, a shape, a width and a boundary for each axis."""
    mesh = mm.Mesh(draw(st.sampled_from(MESHES)))
    ndim = draw(st.integers(1, 3))
    specs = [draw(st.sampled_from(["R", *(f"S{axis}" for axis in range(ndim))])) for _ in mesh.dims]
    width = {axis: draw(st.tuples(st.integers(0, 4), st.integers(0, 4))) for axis in range(ndim)}
    ends = st.one_of(st.sampled_from(list(MODES)), st.integers(-9, 9).map(float))
    boundary = {axis: draw(ends) for axis in range(ndim)}
    least = [0 if not isinstance(boundary[axis], str) else 1 for axis in range(ndim)]
    shape = tuple(draw(st.integers(least[axis], 7)) for axis in range(ndim))
    return mesh, specs, shape, width, boundary


def whole_padded(whole, width, boundary):
    """Pad axis by axis; fixed values last, for they count where several axes end."""
    order = sorted(range(whole.ndim), key=lambda axis: not isinstance(boundary[axis], str))
    for axis in order:
        pairs = [width[axis] if one == axis else (0, 0) for one in range(whole.ndim)]
        end = boundary[axis]
        if isinstance(end, str):
            whole = np.pad(whole, pairs, mode=MODES[end])
        else:
            whole = np.pad(whole, pairs, constant_values=end)
    return whole


def cut(padded, box, width):
    return padded[
        tuple(
            slice(start, stop + before + after)
            for (start, stop), (before, after) in zip(box, width.values(), strict=True)
        )
    ]


@given(cases())
def test_any_halo(case):
    value, specs, shape, width, boundary = case
    whole = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    expected = whole_padded(whole, width, boundary)

    def main():
        with mm.DeviceMesh(value) as mesh:
            x = mm.distribute(whole, mesh, specs)
            halo = mm.Halo(x, width, boundary)
            field = halo.field(x)
            started = halo.start(field)
            got = started.resolve()
            assert got is field.padded
            assert np.array_equal(field.local, x.local)
            again = halo.exchange(field)
            assert again is got
            return got.copy(), x.layout.box(shape, mesh.rank)

    for got, box in mm.run_virtual(value.size, main):
        assert np.array_equal(got, cut(expected, box, width))


@given(cases())
def test_what_is_read_is_given(case):
    mesh, specs, shape, width, boundary = case
    plan = plan_halo(Layout(mesh, specs), shape, width, boundary)
    read: dict[tuple[int, int], list[object]] = {}
    for rank in range(mesh.size):
        for one in plan.reads.takes(rank):
            if one.rank != rank:
                read.setdefault((one.rank, rank), []).append(one.box)
    given_boxes: dict[tuple[int, int], list[object]] = {}
    for rank in range(mesh.size):
        for who, box in plan.reads.gives(rank):
            given_boxes.setdefault((rank, who), []).append(box)
    assert read == given_boxes
    assert plan.reads.moves or not read
