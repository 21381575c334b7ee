"""`AxisLayout`: what TensorFlow's Layout answers, and what it should have refused."""

from __future__ import annotations

import json
import pickle
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpimesh as mm
from mpimesh.errors import LayoutError, MeshError
from mpimesh.layout import MATCH, UNSHARDED, AxisLayout, Layout
from mpimesh.mesh import Mesh, create_mesh
from tests.helpers.layout_oracle import cut, small_meshes
from tests.helpers.raises import raises

MESH = Mesh("x=3,y=2")
ROWS = AxisLayout(["x", UNSHARDED], MESH)
DEVICE = "/job:localhost/replica:0/task:0/device:CPU:"


@st.composite
def axis_layouts(draw, specs=(UNSHARDED,)):
    """Any layout: each dim on one axis at most, `specs` on the others."""
    mesh = draw(small_meshes())
    rank = draw(st.integers(0, 4))
    used = draw(st.permutations(mesh.dim_names))[: draw(st.integers(0, min(rank, mesh.ndim)))]
    rest = draw(st.lists(st.sampled_from(specs), min_size=rank, max_size=rank))
    return AxisLayout(draw(st.permutations([*used, *rest[len(used) :]])), mesh)


# -- making one ---------------------------------------------------------------------------


def test_constructors():
    assert AxisLayout.replicated(MESH, 2).sharding_specs == [UNSHARDED, UNSHARDED]
    assert AxisLayout.replicated(MESH, 0).sharding_specs == []
    assert AxisLayout.batch_sharded(MESH, "x", 2) == ROWS
    assert AxisLayout.batch_sharded(MESH, "y", 3, axis=1).specs == (UNSHARDED, "y", UNSHARDED)
    assert AxisLayout.inner_sharded(MESH, "y", 3).specs == (UNSHARDED, UNSHARDED, "y")
    assert AxisLayout.inner_sharded(MESH, "x", 1).specs == ("x",)
    assert AxisLayout(["x", "unsharded", "y"], MESH).delete([1]).specs == ("x", "y")
    assert AxisLayout(["x", "unsharded", "y"], MESH).delete([2, 0]).specs == (UNSHARDED,)
    assert ROWS.delete([]) == ROWS


def test_layouts_of_a_single_device():
    layout = AxisLayout.from_device(f"{DEVICE}1", rank=2)
    assert layout == AxisLayout.from_single_device_mesh(Mesh.from_device(f"{DEVICE}1"), 2)
    assert layout.is_single_device()
    assert layout.type == "SINGLE_DEVICE"
    assert layout.sharding_specs == [UNSHARDED, UNSHARDED]
    assert layout.local_shape_from_global_shape((5, 4)) == (5, 4)
    assert layout.layout == Layout(layout.mesh, "")
    assert AxisLayout.from_device(f"{DEVICE}1").to_string() == f"sharding_specs: mesh:{DEVICE}1"
    with raises(LayoutError, "x=3,y=2", "single device"):
        AxisLayout.from_single_device_mesh(MESH)


@pytest.mark.parametrize(
    ("specs", "values"),
    [
        (["x", "x"], ("dimension x", ["x", "x"])),
        (["z"], ("x=3,y=2", "axis 0", ["z"])),
        ([UNSHARDED, None], ("x=3,y=2", "axis 1", None)),
        ([["x"]], ("x=3,y=2", "axis 0", ["x"])),
        ([0], ("x=3,y=2", "axis 0", [0], 0)),
        ([""], ("x=3,y=2", "axis 0", [""])),
        ("x", ("specs", "'x'")),
        (None, ("specs", None)),
    ],
)
def test_specs_that_are_refused(specs, values):
    for make in (AxisLayout, Layout.from_specs):
        with raises(LayoutError, *values):
            make(specs, MESH)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: AxisLayout(["x"], cast(Any, "x=3")), ("Mesh", "'x=3'")),
        (lambda: AxisLayout.batch_sharded(MESH, "x", 0), ("axis 0", "0 axes")),
        (lambda: AxisLayout.inner_sharded(MESH, "x", 0), ("axis 0", "0 axes")),
        (lambda: AxisLayout.batch_sharded(MESH, "x", 2, axis=2), ("axis 2", "2 axes")),
        (lambda: AxisLayout.batch_sharded(MESH, "x", 2, axis=-1), ("axis", -1)),
        (lambda: AxisLayout.batch_sharded(MESH, "z", 2), ("'z'", "x=3,y=2")),
        (lambda: AxisLayout.replicated(MESH, -1), ("number of axes", -1)),
        (
            lambda: AxisLayout.inner_sharded(MESH, "x", cast(Any, 1.5)),
            ("number of axes", 1.5),
        ),
        (lambda: ROWS.delete([2]), ("axis 2", "2 axes")),
        (lambda: ROWS.num_shards(2), ("axis 2", "2 axes")),
        (lambda: ROWS.num_shards(-1), ("axis", -1)),
        (lambda: ROWS.to_parted(), (ROWS, "parted")),
    ],
)
def test_calls_that_are_refused(make, values):
    with raises(LayoutError, *values):
        make()


def live_layout():
    with mm.DeviceMesh("x=2") as mesh:
        return AxisLayout(["x"], mesh)


def test_layouts_on_a_live_mesh_are_equal_on_all_ranks():
    first, second = mm.run_virtual(2, live_layout)
    assert first == second
    assert first.shape == [2]


# -- what it says -------------------------------------------------------------------------


def test_what_a_layout_says():
    assert (ROWS.rank, ROWS.mesh, ROWS.shape) == (2, MESH, [3, 1])
    assert ROWS.sharding_specs == ["x", "unsharded"]
    assert (ROWS.num_shards(0), ROWS.num_shards(1)) == (3, 1)
    assert ROWS.type == "STATIC"
    assert not ROWS.is_single_device()
    assert AxisLayout([UNSHARDED] * 2, MESH).is_fully_replicated()
    assert AxisLayout([], MESH).is_fully_replicated()
    assert AxisLayout(["one"], Mesh("one=1,x=2")).is_fully_replicated()
    assert not ROWS.is_fully_replicated()
    assert ROWS.is_batch_parallel()
    assert AxisLayout([], MESH).is_batch_parallel()
    assert not AxisLayout([UNSHARDED, "y"], MESH).is_batch_parallel()


def test_golden_shards():
    assert ROWS.offset_to_shard() == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    both = AxisLayout(["y", "x"], MESH)
    assert both.offset_to_shard() == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [both.offset_tuple_to_global_index(k) for k in both.offset_to_shard()] == [
        *(0, 3, 1, 4, 2, 5),
    ]
    assert ROWS.global_shape_from_local_shape([2, 4]) == (6, 4)
    assert ROWS.local_shape_from_global_shape([6, 4]) == (2, 4)


@given(axis_layouts(), st.data())
def test_shards_are_the_blocks_of_the_layout(layout, data):
    lengths = st.tuples(*[st.integers(0, 3)] * layout.rank)
    local = data.draw(lengths)
    shape = layout.global_shape_from_local_shape(local)
    assert layout.local_shape_from_global_shape(shape) == local
    array = np.arange(int(np.prod(shape)) if shape else 1).reshape(shape)
    blocks = []
    for rank, shard in zip(layout.mesh.ids, layout.offset_to_shard(), strict=True):
        box = layout.layout.box(shape, rank)
        assert [start for start, _ in box] == [k * n for k, n in zip(shard, local, strict=True)]
        number = layout.offset_tuple_to_global_index(shard)
        assert number == (np.ravel_multi_index(shard, layout.shape) if shard else 0)
        blocks.append(cut(array, box))
    shards = layout.unravel(blocks)
    assert shards.shape == tuple(layout.shape)
    whole = np.block(shards.tolist()) if layout.rank else shards.item()
    assert np.array_equal(whole, array)


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ((7, 4), (["x", "unsharded"], "dimension 0", "3 shards", "dim x", (7, 4))),
        ((6,), (["x", "unsharded"], "2 axes", (6,))),
        ((6, 4, 2), (["x", "unsharded"], "2 axes", (6, 4, 2))),
        ((-6, 4), ((-6, 4), -6)),
        (6, ("shape", 6)),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(shape, values):
    with raises(LayoutError, *values):
        ROWS.local_shape_from_global_shape(shape)
    if shape != (7, 4):
        with raises(LayoutError, *values):
            ROWS.global_shape_from_local_shape(shape)


@pytest.mark.parametrize("place", [(3, 0), (0, 1), (0,), (0, 0, 0), ()])
def test_shards_that_there_are_not(place):
    with raises(LayoutError, place, [3, 1]):
        ROWS.offset_tuple_to_global_index(place)


def test_unravel_wants_a_block_for_each_place():
    with raises(LayoutError, "unravel", 6, "x=3,y=2", 3):
        ROWS.unravel([0, 1, 2])


# -- match --------------------------------------------------------------------------------


def test_match_takes_the_split_of_another():
    asked = AxisLayout([MATCH, "y"], MESH)
    assert asked.shape == [-1, 2]
    assert asked.matching(ROWS) == AxisLayout(["x", "y"], MESH)
    assert asked.matching(Layout(MESH, "x=S0")) == AxisLayout(["x", "y"], MESH)
    assert AxisLayout([MATCH, MATCH], MESH).matching(ROWS) == ROWS
    assert ROWS.matching(AxisLayout(["y"], MESH)) == ROWS  # has nothing to match


@given(axis_layouts())
def test_match_on_all_axes_is_the_other(layout):
    assert AxisLayout([MATCH] * layout.rank, layout.mesh).matching(layout) == layout


@pytest.mark.parametrize(
    ("other", "values"),
    [
        (AxisLayout(["y", "x"], MESH), (["match", "y"], ["y", "x"], "dimension y")),
        (AxisLayout(["x"], MESH), (["match", "y"], "2 axes", ["x"])),
        (
            AxisLayout(["z", UNSHARDED], Mesh("z=6")),
            (["match", "y"], ["z", "unsharded"], "x=3,y=2"),
        ),
        (AxisLayout([MATCH, "x"], MESH), (["match", "x"], "matching(other)")),
        (Layout(MESH, "x=S0, y=S0"), ("axis 0", "x and y", "x=S0, y=S0")),
    ],
)
def test_layouts_that_cannot_be_matched(other, values):
    with raises(LayoutError, *values):
        AxisLayout([MATCH, "y"], MESH).matching(other)


def test_what_match_does_not_say():
    asked = AxisLayout([MATCH, "y"], MESH)
    for ask in (
        asked.offset_to_shard,
        asked.is_fully_replicated,
        asked.is_batch_parallel,
        lambda: asked.layout,
        lambda: asked.unravel([0] * 6),
        lambda: asked.offset_tuple_to_global_index((0, 0)),
        lambda: asked.local_shape_from_global_shape((6, 4)),
        lambda: asked.global_shape_from_local_shape((6, 4)),
    ):
        with raises(LayoutError, ["match", "y"], "matching(other)"):
            ask()


# -- texts --------------------------------------------------------------------------------


def test_golden_texts():
    devices = ",".join(f"{DEVICE}{k}" for k in range(6))
    mesh = create_mesh("x=3,y=2", mesh_name="M")
    text = f"sharding_specs:x,unsharded, mesh:M|x=3,y=2|0,1,2,3,4,5|0,1,2,3,4,5|{devices}"
    assert AxisLayout(["x", UNSHARDED], mesh).to_string() == text
    assert AxisLayout.from_string(text) == AxisLayout(["x", UNSHARDED], mesh)
    assert AxisLayout([], MESH).to_string() == "sharding_specs: mesh:|x=3,y=2|0,1,2,3,4,5||"
    assert repr(ROWS) == "AxisLayout(['x', 'unsharded'], Mesh('x=3,y=2'))"


@given(axis_layouts((UNSHARDED, MATCH)), st.sampled_from(["", "M", " a mesh: of two "]))
def test_text_record_and_pickle_come_back(drawn, name):
    mesh = Mesh(drawn.mesh.dims, drawn.mesh.ids, name=name)
    layout = AxisLayout(drawn.sharding_specs, mesh)
    assert AxisLayout.from_string(layout.to_string()) == layout
    assert AxisLayout.from_proto(json.loads(json.dumps(layout.as_proto()))) == layout
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert hash(again) == hash(layout)


def test_equality_is_of_all_fields():
    assert AxisLayout(("x", "unsharded"), Mesh("x=3,y=2")) == ROWS
    assert AxisLayout(["y", UNSHARDED], MESH) != ROWS
    assert AxisLayout(["x", UNSHARDED], Mesh("x=3,y=2", name="M")) != ROWS
    assert AxisLayout([], MESH) != AxisLayout([UNSHARDED], MESH)
    assert ROWS not in cast(Any, ["x", ROWS.layout, None])


@given(axis_layouts())
def test_layouts_in_both_spellings_come_back(layout):
    assert AxisLayout.of(layout.layout, layout.rank) == layout
    assert Layout.from_specs(layout.sharding_specs, layout.mesh) == layout.layout


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "sharding_specs:x,", "mesh:|x=2|0,1||", "sharding_specs:x mesh:|x=2|0,1||"),
        *("sharding_specs:x,mesh:|x=2|0,1||", "sharding_specs:, mesh:|x=2|0,1||"),
        *("sharding_specs:x,  mesh:|x=2|0,1||", "sharding_specs: x, mesh:|x=2|0,1||"),
        *("specs:x, mesh:|x=2|0,1||", " sharding_specs:x, mesh:|x=2|0,1||"),
        3,
    ],
)
def test_texts_that_are_refused(text):
    with raises(LayoutError, "sharding_specs:x,unsharded, mesh:<mesh>", repr(text)):
        AxisLayout.from_string(text)


def test_texts_whose_parts_do_not_fit():
    with raises(LayoutError, ["z"], "x=2"):
        AxisLayout.from_string("sharding_specs:z, mesh:|x=2|0,1||")
    with raises(LayoutError, "dimension x", ["x", "x"]):
        AxisLayout.from_string("sharding_specs:x,x, mesh:|x=2|0,1||")
    with raises(MeshError, "5, 6, 7 or 3", 2):
        AxisLayout.from_string("sharding_specs:x, mesh:|x=2")


@pytest.mark.parametrize(
    ("changes", "error", "values"),
    [
        ({"sharding_specs": "x"}, LayoutError, ("sharding_specs", "'x'")),
        ({"sharding_specs": ["x"]}, LayoutError, ("sharding_specs", ["x"])),
        ({"sharding_specs": [{"spec": "x"}]}, LayoutError, ("sharding_specs", [{"spec": "x"}])),
        ({"sharding_specs": [{"sharding_spec": "z"}]}, LayoutError, (["z"], "x=3,y=2")),
        ({"mesh_config": None}, MeshError, ("mesh record", "NoneType")),
        ({"type": "PARTED"}, LayoutError, ("type", "STATIC", "'PARTED'")),
        ({"more": 1}, LayoutError, ("fields", "sharding_specs, mesh_config, type", "'more'")),
    ],
)
def test_records_that_are_refused(changes, error, values):
    with raises(error, *values):
        AxisLayout.from_proto({**ROWS.as_proto(), **changes})


def test_what_is_no_record():
    with raises(LayoutError, "fields", "sharding_specs, mesh_config, type", []):
        AxisLayout.from_proto([])  # type: ignore[arg-type]
