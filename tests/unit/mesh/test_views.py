from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import MeshError, WorldSizeError
from mpimesh.mesh import Mesh
from tests.helpers.mesh_strategies import meshes_and_dims
from tests.helpers.raises import raises


def test_submesh_keeps_dims_at_fixed_coordinates():
    mesh = Mesh("dp=2,pp=2,tp=2")
    cut = mesh.submesh("tp,dp", pp=1)
    assert cut == Mesh("tp=2,dp=2", [2, 6, 3, 7])
    assert mesh.submesh_of(6, "tp,dp") == cut
    assert mesh.submesh((), dp=1, pp=0, tp=1).ids[0] == 5
    assert mesh.submesh("dp,pp,tp") == mesh


@pytest.mark.parametrize("fixed", [{}, {"pp": 0, "dp": 0}, {"z": 0}])
def test_submesh_wants_exactly_the_other_dims(fixed):
    with raises(MeshError, "dp=2,pp=2,tp=2", ["pp", "tp"], sorted(fixed)):
        Mesh("dp=2,pp=2,tp=2").submesh("dp", **fixed)


def test_submesh_refuses_a_coordinate_out_of_range():
    with raises(MeshError, "coordinate pp=2"):
        Mesh("dp=2,pp=2").submesh("dp", pp=2)


def test_a_dim_named_twice_is_refused():
    with raises(MeshError, ("dp", "dp")):
        Mesh("dp=2,pp=2").groups("dp,dp")


def test_flatten_joins_dims_that_are_not_neighbours():
    mesh = Mesh("dp=2,pp=2,tp=2")
    flat = mesh.flatten("dp,tp", "model")
    assert flat == Mesh("model=4,pp=2", [0, 2, 1, 3, 4, 6, 5, 7])
    assert flat.group_ranks(6, "pp") == range(4, 8, 2)
    assert mesh.flatten("pp,tp", "x") == Mesh("dp=2,x=4")
    with raises(MeshError, "repeated", "'pp'"):
        mesh.flatten("dp,tp", "pp")


@given(meshes_and_dims(), st.data())
def test_unflatten_undoes_flatten(drawn, data):
    mesh, _, dims = drawn
    if not dims:
        return
    joined = mesh.flatten(dims, "joined")
    parts = [(name, mesh.dim_size(name)) for name in dims]
    back = joined.unflatten("joined", parts)
    assert sorted(back.dim_names) == sorted(mesh.dim_names)
    assert back.submesh(mesh.dim_names) == mesh
    size = joined.dim_size("joined")
    first = data.draw(st.sampled_from([k for k in range(1, size + 1) if size % k == 0]))
    split = joined.unflatten("joined", f"u={first},v=-1")
    assert np.array_equal(split.ids, joined.ids)


def test_unflatten_says_which_sizes_fit():
    with raises(WorldSizeError, "a=2,b=3", "2 x 3 = 6", 8):
        Mesh("dp=8").unflatten("dp", "a=2,b=3")


# -- values --------------------------------------------------------------------
