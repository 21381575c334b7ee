"""`DTensorType`: TVM's type of a distributed array, with its two ValueErrors and its text."""

from __future__ import annotations

import json
import pickle
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpimesh as mm
from mpimesh.errors import DTypeError, LayoutError, MeshError, RankError
from mpimesh.layout import DTensorType, Layout, Placement
from mpimesh.mesh import Mesh
from tests.helpers.layout_oracle import array_shapes, layouts, small_meshes
from tests.helpers.raises import raises

SQUARE = Mesh.from_ids((2, 2), range(4))
FIRST = DTensorType((4, 4), "float32", SQUARE, "S[0], R")
DTYPES = ["float32", "float64", "int8", "uint64", "bool", "complex64", "bfloat16", "float8_e5m2"]


@st.composite
def types(draw):
    shape = draw(array_shapes)
    layout = draw(layouts(draw(small_meshes()), shape))
    return DTensorType(shape, draw(st.sampled_from(DTYPES)), layout.mesh, layout.placement)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (FIRST, 'R.DTensor((4, 4), "float32", R.device_mesh((2, 2), R.Range(0, 4)), "S[0], R")'),
        (
            DTensorType([4], np.float64, Mesh.from_ids((2,), [3, 1]), ["S0"]),
            'R.DTensor((4,), "float64", R.device_mesh((2,), [3, 1]), "S[0]")',
        ),
        (
            DTensorType((4,), "int8", Mesh("a=3", [2, 4, 6]), "S0(1,2,1)"),
            'R.DTensor((4,), "int8", R.device_mesh((3,), [2, 4, 6]), "S[0](1,2,1)")',
        ),
        (
            DTensorType((4,), "int8", Mesh("a=1", [5]), "R"),
            'R.DTensor((4,), "int8", R.device_mesh((1,), R.Range(5, 6)), "R")',
        ),
        (
            DTensorType((), "bool", Mesh(()), ""),
            'R.DTensor((), "bool", R.device_mesh((), R.Range(0, 1)), "")',
        ),
    ],
)
def test_golden_texts(made, text):
    assert str(made) == text


def test_what_a_type_holds():
    assert (FIRST.shape, FIRST.dtype, FIRST.ndim, FIRST.mesh) == ((4, 4), "float32", 2, SQUARE)
    assert FIRST.placement == Placement.from_text("S[0], R")
    assert FIRST.layout == Layout(SQUARE, "S0, R")
    assert [FIRST.local_shape(rank) for rank in range(4)] == [(2, 4)] * 4
    assert repr(FIRST) == "DTensorType((4, 4), 'float32', Mesh('d0=2,d1=2'), 'S[0], R')"
    with raises(RankError, "rank 4", "0..3"):
        FIRST.local_shape(4)


def test_equality_is_of_all_fields():
    again = DTensorType([4, 4], np.dtype("f4"), Mesh("d0=2,d1=2"), {"d0": "S0"})
    assert again == FIRST
    assert hash(again) == hash(FIRST)
    others = {
        DTensorType((4, 8), "float32", SQUARE, "S[0], R"),
        DTensorType((4, 4), "float16", SQUARE, "S[0], R"),
        DTensorType((4, 4), "float32", Mesh("a=2,b=2"), "S[0], R"),
        DTensorType((4, 4), "float32", SQUARE, "R, S[0]"),
    }
    assert len(others | {FIRST, again}) == 5
    assert FIRST not in cast(Any, [str(FIRST), None])


@given(types())
def test_record_pickle_and_repr_come_back(made):
    again = DTensorType.from_proto(json.loads(json.dumps(made.as_proto())))
    assert again == made
    assert str(again) == str(made)
    assert hash(again) == hash(made)
    assert pickle.loads(pickle.dumps(made)) == made
    if made.mesh == Mesh(made.mesh.dims):
        assert eval(repr(made)) == made


@given(types())
def test_even_means_blocks_of_one_shape(made):
    shapes = {made.local_shape(rank) for rank in made.mesh.ids}
    assert made.is_even == (len(shapes) == 1)


def test_uneven_and_nested_splits_are_types_too():
    """TVM takes them without a word, and its lowering then computes something else."""
    uneven = DTensorType((5, 4), "float32", SQUARE, "S[0], R")
    assert not uneven.is_even
    assert uneven.local_shape(0) == (3, 4)
    nested = DTensorType((8, 4), "float32", SQUARE, "S[0], S[0]")
    assert nested.is_even
    assert [nested.local_shape(rank) for rank in range(4)] == [(2, 4)] * 4


@pytest.mark.parametrize(
    ("shape", "placement", "values"),
    [
        ((4, 4), "R", ("'R'", 1, 2, "d0, d1")),
        ((4, 4), "R, R, R", ("'R, R, R'", 3, 2, "d0, d1")),
        ((4, 4), "S[2], R", ("S[2]", "d0=2", (4, 4), "2 axes")),
        ((), "R, S[0]", ("S[0]", "d1=2", (), "0 axes")),
        ((4, 4), "S[-1], R", ("placement", "'S[-1], R'")),
        ((4, 4), "S[0](3,2), R", ("axis 0", (4, 4), (3, 2), 5)),
        ((4, -4), "R, R", ((4, -4), -4)),
        (4, "R, R", ("shape", 4)),
    ],
)  # fmt: skip
def test_types_that_are_refused(shape, placement, values):
    with raises(LayoutError, *values):
        DTensorType(shape, "float32", SQUARE, placement)


def test_what_is_no_mesh():
    with raises(LayoutError, "Mesh", "'d0=2'"):
        DTensorType((4,), "float32", "d0=2", "R")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype",
    ["nix", ">f4", object, "O", "S3", "U5", None, 3, "f4,f4", [("a", "f4")], "", ["float32"]],
)
def test_dtypes_that_are_refused(dtype):
    with raises(DTypeError, "dtype", "DTensorType", repr(dtype)):
        DTensorType((4, 4), dtype, SQUARE, "R, R")


def test_half_types_by_object_and_by_name():
    named = DTensorType((4, 4), "bfloat16", SQUARE, "R, R")
    assert named == DTensorType((4, 4), ml_dtypes.bfloat16, SQUARE, "R, R")
    assert named.dtype == "bfloat16"
    assert DTensorType((4, 4), np.float16, SQUARE, "R, R").dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "error", "values"),
    [
        ({"shape": 4}, LayoutError, ("shape", 4)),
        ({"shape": [4, "4"]}, LayoutError, ((4, "4"), "'4'")),
        ({"dtype": 4}, LayoutError, ("dtype", "name", 4)),
        ({"dtype": "nix"}, DTypeError, ("dtype", "'nix'")),
        ({"device_mesh": {}}, MeshError, ("fields", "mesh record")),
        ({"placement": "S[0]"}, LayoutError, ("'S[0]'", 1, 2, "d0, d1")),
        ({"placement": ["S[0]", "R"]}, LayoutError, ("text", ["S[0]", "R"])),
        ({"more": 1}, LayoutError, ("fields", "shape, dtype, device_mesh, placement", "'more'")),
    ],
)
def test_records_that_are_refused(changes, error, values):
    with raises(error, *values):
        DTensorType.from_proto({**FIRST.as_proto(), **changes})


def test_what_is_no_record():
    with raises(LayoutError, "fields", "shape, dtype, device_mesh, placement", "'R'"):
        DTensorType.from_proto("R")  # type: ignore[arg-type]


def live_type():
    with mm.DeviceMesh("a=2") as mesh:
        return DTensorType((4,), "float32", mesh, "a=S0")


def test_types_on_a_live_mesh_are_equal_on_all_ranks():
    first, second = mm.run_virtual(2, live_type)
    assert first == second
    assert second.local_shape(1) == (2,)
