"""`Layout`: blocks by the rule of NumPy's array_split, refusals, and the two spellings."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mpimesh as mm
from mpimesh.errors import LayoutError, RankError, UnknownNameError
from mpimesh.layout import Layout, Partial, Shard
from mpimesh.mesh import Mesh
from tests.helpers.layout_oracle import array_shapes, layouts, oracle_box, small_meshes
from tests.helpers.raises import raises


@st.composite
def layouts_and_shapes(draw):
    shape = draw(array_shapes)
    return draw(layouts(draw(small_meshes()), shape)), shape


@given(layouts_and_shapes())
def test_blocks_are_those_of_array_split(drawn):
    layout, shape = drawn
    for rank in layout.mesh.ids:
        box = oracle_box(layout, shape, rank)
        assert layout.box(shape, rank) == box
        assert layout.local_shape(list(shape), rank) == tuple(stop - start for start, stop in box)
        assert layout.global_offset(np.array(shape, int), rank) == tuple(start for start, _ in box)


@given(layouts_and_shapes())
def test_a_layout_is_a_value(drawn):
    layout, _ = drawn
    again = Layout(layout.mesh, layout.text)
    assert again == layout
    assert hash(again) == hash(layout)
    assert pickle.loads(pickle.dumps(layout)) == layout
    if layout.mesh == Mesh(layout.mesh.dims):
        assert eval(repr(layout)) == layout
    assert Layout(layout.mesh, str(layout.placement)) == layout


def test_texts():
    layout = Layout(Mesh("dp=2,tp=2"), "tp=S1")
    assert str(layout) == "dp=R, tp=S1 on dp=2,tp=2"
    assert repr(layout) == "Layout(Mesh('dp=2,tp=2'), 'dp=R, tp=S1')"
    assert str(Layout(Mesh(()), "")) == "R on ()"


def test_what_a_layout_says():
    layout = Layout(Mesh("a=2,b=3,c=2,d=2"), "S1, P(max), S1, P(max)")
    assert layout.sharding_dims(1) == ("a", "c")
    assert layout.sharding_dims(0) == ()
    assert layout.partial_op == "max"
    assert not layout.is_replicated
    whole = Layout.replicated(Mesh("a=2,b=3"))
    assert whole == Layout(whole.mesh, {}) == Layout(whole.mesh, "R R")
    assert whole.is_replicated
    assert whole.partial_op == ""


def test_the_first_dim_cuts_first():
    mesh = Mesh("a=2,b=3")
    sizes = [Layout(mesh, "S0,S0").local_shape((8,), rank) for rank in mesh.ids]
    assert sizes == [(2,), (1,), (1,), (2,), (1,), (1,)]
    starts = [Layout(mesh, "S0,S0").global_offset((8,), rank) for rank in mesh.ids]
    assert starts == [(0,), (2,), (3,), (4,), (6,), (7,)]


def test_more_ranks_than_elements():
    mesh = Mesh("a=4")
    assert [Layout(mesh, "S0").box((2,), rank) for rank in range(4)] == [
        ((0, 1),),
        ((1, 2),),
        ((2, 2),),
        ((2, 2),),
    ]


def test_sizes_of_a_later_dim_split_each_block():
    layout = Layout(Mesh("a=2,b=2"), [Shard(0), Shard(0, sizes=(3, 1))])
    assert [layout.box((8,), rank)[0] for rank in range(4)] == [(0, 3), (3, 4), (4, 7), (7, 8)]
    with raises(LayoutError, "axis 0", (9,), (3, 1), 5):
        layout.box((9,), 0)


@pytest.mark.parametrize(
    ("placements", "error", "values"),
    [
        ("P, P(max)", LayoutError, ("P, P(max)", "max and sum")),
        ([Partial("mean"), Partial()], LayoutError, ("P(mean), P", "mean and sum")),
        ("S0(1,2), R", LayoutError, ("2 sizes", "a=3")),
        ("R, S0(1,2,3)", LayoutError, ("3 sizes", "b=2")),
        ("R", LayoutError, ("'R'", 1, 2, "a, b")),
        ("c=R", UnknownNameError, ("'c'", "a, b")),
        (5, LayoutError, ("placements", 5)),
    ],
)
def test_placements_that_do_not_fit_the_mesh(placements, error, values):
    with raises(error, *values):
        Layout(Mesh("a=3,b=2"), placements)


@pytest.mark.parametrize("wrong", [None, "a=2", 4, SimpleNamespace(mesh=Mesh("a=2"))])
def test_what_is_no_mesh(wrong):
    with raises(LayoutError, "Mesh", repr(wrong)):
        Layout(wrong, "R")


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ((4,), ("Shard(1)", "b=2", (4,))),
        ((), ("Shard(0, sizes=(1, 2, 3))", "a=3", ())),
        ((4, 5), ("axis 0", (4, 5), (1, 2, 3), 6)),
        ((6, -1), ((6, -1), -1)),
        ((6, 2.0), ((6, 2.0), 2.0)),
        ((6, True), ((6, True), True)),
        (6, ("shape", 6)),
        ("66", ("shape", "'66'")),
        (None, ("shape", None)),
    ],
)
def test_shapes_that_do_not_fit(shape, values):
    layout = Layout(Mesh("a=3,b=2"), [Shard(0, sizes=(1, 2, 3)), Shard(1)])
    for ask in (layout.box, layout.local_shape, layout.global_offset):
        with raises(LayoutError, *values):
            ask(shape, 0)
    with raises(LayoutError, *values):
        layout.tiling(shape)


def test_a_rank_that_is_not_in_the_mesh():
    with raises(RankError, "rank 2", "0..1"):
        Layout(Mesh("a=2"), "S0").box((4,), 2)


def live_layout():
    with mm.DeviceMesh("a=2") as mesh:
        return Layout(mesh, "S0"), Layout(mesh, ["S0"])


def test_layouts_on_a_live_mesh_are_equal_on_all_ranks():
    results = [layout for pair in mm.run_virtual(2, live_layout) for layout in pair]
    assert len(set(results)) == 1
    assert results[0].placement == Layout(Mesh("a=2"), "S0").placement
