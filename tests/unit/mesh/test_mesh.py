from __future__ import annotations

import copy
import pickle
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import MeshError, RankError, UnknownNameError
from mpimesh.mesh import Mesh, MeshDimension
from tests.helpers.mesh_strategies import meshes, meshes_and_dims
from tests.helpers.raises import raises


def test_tensorflows_three_by_two_example():
    mesh = Mesh("x=3,y=2")
    assert (mesh.dim_names, mesh.shape, mesh.size, mesh.ndim) == (["x", "y"], (3, 2), 6, 2)
    assert mesh.strides == [2, 1]
    assert [mesh.coords_of(k) for k in range(6)] == [*np.ndindex(3, 2)]
    # "Reducing over x" reduces columns, over y rows.
    assert [list(ranks) for ranks in mesh.groups("x")] == [[0, 2, 4], [1, 3, 5]]
    assert [list(ranks) for ranks in mesh.groups("y")] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("dims", "strides"),
    [
        ("a=3,b=2", [2, 1]),
        ("a=2,b=4,c=2", [8, 2, 1]),
        ("a=8,b=16,c=2,d=4", [128, 8, 4, 1]),
        ("a=8", [1]),
    ],
)
def test_strides_are_row_major_in_elements(dims, strides):
    assert Mesh(dims).strides == strides


@given(meshes())
def test_every_way_to_a_place_agrees_with_the_array(drawn):
    mesh, grid = drawn
    assert (mesh.ids.dtype, mesh.ids.shape) == (np.int64, (mesh.size,))
    assert np.array_equal(mesh.ids.reshape(mesh.shape), grid)
    for offset, place in enumerate(np.ndindex(grid.shape)):
        rank = int(grid[place])
        assert mesh.coords_of(rank) == place
        assert mesh.offset_of(rank) == offset
        assert mesh.rank_of(offset) == rank == mesh.rank_at(*place)
        by_name = dict(zip(mesh.dim_names, place, strict=True))
        assert mesh.rank_at(**by_name) == rank
        assert all(mesh.coord_of(rank, name) == k for name, k in by_name.items())
    outside = set(range(-1, int(grid.max()) + 2)) - set(grid.reshape(-1).tolist())
    for rank in outside:
        assert not mesh.contains_rank(rank)
        with raises(RankError, f"rank {rank}"):
            mesh.coords_of(rank)


@given(meshes_and_dims())
def test_groups_partition_the_ranks(drawn):
    mesh, grid, dims = drawn
    groups = mesh.groups(dims)
    assert not groups.flags.writeable
    axes = [mesh.dim_names.index(name) for name in dims]
    others = [k for k in range(mesh.ndim) if k not in axes]
    rows = grid.transpose(others + axes).reshape(-1, prod(grid.shape[k] for k in axes))
    assert np.array_equal(groups, rows)
    assert len(groups) == mesh.num_groups(dims)
    for index, row in enumerate(rows.tolist()):
        for place, rank in enumerate(row):
            assert mesh.group_index(rank, dims) == index
            assert mesh.place_in_group(rank, dims) == place
            assert list(mesh.group_ranks(rank, dims)) == row


@given(meshes(), st.integers(-5, 5), st.data())
def test_neighbour_moves_along_one_dim(drawn, offset, data):
    mesh, grid = drawn
    dim = data.draw(st.integers(0, mesh.ndim - 1))
    name = mesh.dim_names[dim]
    rolled = np.roll(grid, -offset, axis=dim)
    for place in np.ndindex(grid.shape):
        rank = int(grid[place])
        assert mesh.neighbour(rank, name, offset, wrap=True) == rolled[place]
        inside = 0 <= place[dim] + offset < grid.shape[dim]
        assert mesh.neighbour(rank, name, offset) == (rolled[place] if inside else None)


def test_group_ranks_are_ranges_where_equally_spaced():
    mesh = Mesh("dp=2,pp=2,tp=2")
    assert mesh.group_ranks(5, "tp") == range(4, 6)
    assert mesh.group_ranks(5, "dp") == range(1, 9, 4)
    assert mesh.group_ranks(5, "pp,tp") == range(4, 8)
    assert list(mesh.group_ranks(5, ("dp", "tp"))) == [0, 1, 4, 5]
    assert list(mesh.group_ranks(5, ("tp", "dp"))) == [0, 4, 1, 5]
    assert mesh.group_ranks(5, ()) == range(5, 6)


def test_dims_by_name():
    mesh = Mesh("dp=4,tp=2")
    assert mesh["tp"] == MeshDimension("tp", 2) == ("tp", 2)
    assert str(mesh["tp"]) == "tp=2"
    assert mesh.dim_size("dp") == 4
    assert mesh.contains_dim("dp")
    assert "tp" in mesh
    assert "x" not in mesh
    assert list(mesh) == ["dp", "tp"]
    for ask in (mesh.dim_size, mesh.__getitem__, mesh.groups, lambda d: mesh.coord_of(0, d)):
        with raises(UnknownNameError, "z", "dp, tp"):
            ask("z")
    assert issubclass(UnknownNameError, KeyError)
    assert issubclass(UnknownNameError, ValueError)


@pytest.mark.parametrize(
    ("coords", "by_dim"), [((0,), {}), ((0, 0, 0), {}), ((0,), {"y": 1}), ((), {"x": 1})]
)
def test_rank_at_wants_every_coordinate_once(coords, by_dim):
    with raises(MeshError, "rank_at", "x=3,y=2"):
        Mesh("x=3,y=2").rank_at(*coords, **by_dim)


def test_rank_at_checks_its_values():
    with raises(MeshError, "coordinate x=3"):
        Mesh("x=3,y=2").rank_at(3, 0)
    with pytest.raises(UnknownNameError):
        Mesh("x=3,y=2").rank_at(x=0, z=0)


# -- slices --------------------------------------------------------------------


@given(meshes())
def test_equality_hash_repr_pickle_and_copy(drawn):
    mesh, grid = drawn
    dims = list(zip(mesh.dim_names, grid.shape, strict=True))
    listed = Mesh(dims, grid.reshape(-1).tolist())
    assert mesh == listed
    assert hash(mesh) == hash(listed)
    if mesh.size <= 32:
        assert eval(repr(mesh)) == mesh  # the repr is the constructor call
    for other in (pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh), copy.copy(listed)):
        assert other == mesh
        assert hash(other) == hash(mesh)
    assert mesh != Mesh([*dims, ("z", 1)], mesh.ids)


def test_every_field_counts_in_equality():
    mesh = Mesh("x=2", name="a")
    assert mesh != Mesh("x=2")
    assert mesh != Mesh("y=2", name="a")
    assert mesh != Mesh("x=2", [1, 0], name="a")
    others: list[object] = ["x=2", 3, None]
    for other in others:
        assert mesh != other


def test_a_mesh_cannot_be_changed():
    mesh = Mesh("x=2,y=2", [3, 1, 0, 2])
    for field in ("name", "dims", "ids"):
        with pytest.raises(AttributeError):
            setattr(mesh, field, None)
    mesh.strides[0] = 9
    ids = np.array([3, 1, 0, 2])
    for each in (mesh, Mesh("x=2,y=2", ids), pickle.loads(pickle.dumps(mesh))):
        with raises(ValueError, "read-only"):
            each.ids[0] = 9
    ids[0] = 9  # the caller's own
    assert mesh == Mesh("x=2,y=2", [3, 1, 0, 2])


def test_repr_is_short_for_many_ranks():
    assert repr(Mesh("dp=2,pp=2")) == "Mesh('dp=2,pp=2')"
    assert (
        repr(Mesh("dp=2", range(4, 8, 2), name="m")) == "Mesh('dp=2', ids=range(4, 8, 2), name='m')"
    )
    large = Mesh("dp=1000,tp=100").flatten("tp,dp", "x")
    assert len(repr(large)) < 200
    listed = [Mesh("x=100", [*range(1, 98), *last]) for last in ([98, 99, 0], [99, 98, 0])]
    assert all("<100 ids, crc32 " in repr(mesh) for mesh in listed)
    assert repr(listed[0]) != repr(listed[1])


# -- from shape and ids ----------------------------------------------------------


def test_from_ids_takes_any_distinct_ranks():
    mesh = Mesh.from_ids((2, 2), [7, 3, 5, 0])
    assert mesh.dim_names == ["d0", "d1"]
    assert mesh.coords_of(5) == (1, 0)
    assert list(mesh.group_ranks(7, "d0")) == [7, 5]
    assert Mesh.from_ids((2, 2), range(4)) == Mesh("d0=2,d1=2")
    assert Mesh.from_ids((4,), np.arange(4, dtype=np.uint8), dim_names=["x"]) == Mesh("x=4")
    assert Mesh("dp=-1,tp=2", range(8)).shape == (4, 2)
    assert Mesh((), [5]).coords_of(5) == ()
    assert Mesh.from_ids((3,), range(9, 3, -2)).ids[2] == 5


@pytest.mark.parametrize(
    ("shape", "ids", "values"),
    [
        ((2, 2), [0, 1, 2], ("ids", 3, 4)),
        ((2, 2), [0, 1, 2, 2], ("id 2", "twice")),
        ((2,), [0, -1], ("ids", -1)),
        ((2,), range(-1, 1), ("ids", -1, 0)),
        ((2,), [0, 2**31], ("ids", 2**31)),
        ((2,), [0, 1.0], ("id", 1.0)),
        ((2,), [0, True], ("id", True)),
        ((2,), np.zeros(2), ("ids", "float64")),
        ((2, 0), [], ("size", "'d1'", 0)),
        ((2, -3), [0] * 6, ("'d1'", -3)),
    ],
)
def test_from_ids_refuses(shape, ids, values):
    with raises(MeshError, *values):
        Mesh.from_ids(shape, ids)


def test_from_ids_wants_a_name_for_each_dim():
    with raises(MeshError, (2, 2), ("x",)):
        Mesh.from_ids((2, 2), range(4), dim_names=["x"])


@pytest.mark.parametrize("name", ["a|b", 3])
def test_names_that_break_a_rule(name):
    with raises(MeshError, "name", repr(name)):
        Mesh("x=4", name=name)


@pytest.mark.parametrize("offset", [-1, 6])
def test_offsets_are_in_range(offset):
    with raises(RankError, f"offset {offset}", "x=3,y=2"):
        Mesh("x=3,y=2").rank_of(offset)
