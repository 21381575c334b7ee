from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from time import perf_counter

import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import MeshError, WorldSizeError
from mpimesh.mesh import Mesh, MeshDimension
from mpimesh.mesh.dims import shapes_that_fit
from tests.helpers.raises import raises


@pytest.mark.parametrize(
    ("text", "world", "values"),
    [
        ("dp=2,pp=2", 6, ("2 x 2 = 4", 6, "dp=2,pp=3", "dp=3,pp=2")),
        ("dp=-1,pp=3", 8, (3, 8, "dp=2,pp=4", "dp=4,pp=2", "dp=1,pp=8")),
        ("dp=2", 1, (2, 1, "dp=1")),
    ],
)
def test_the_error_is_one_line_with_all_numbers(text, world, values):
    makes: list[Callable[[], object]] = [lambda: Mesh(text, world_size=world)]
    if "-1" not in text:
        makes.append(lambda: Mesh(text).check_world(world))
    for make in makes:
        with raises(WorldSizeError, text, *values) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_the_error_tells_the_nodes_where_known():
    with raises(WorldSizeError, "dp=4", 6, "2 nodes x 3 ranks"):
        Mesh("dp=4", world_size=6, ranks_per_node=3)
    with raises(WorldSizeError, "dp=4", 7):
        Mesh("dp=4").check_world(7, ranks_per_node=3)


def test_one_dim_may_be_left_open():
    assert Mesh("dp=-1,pp=2", world_size=8) == Mesh("dp=4,pp=2")
    assert Mesh("dp=-1", world_size=1) == Mesh("dp=1")
    with raises(MeshError, "world_size", 0):
        Mesh("dp=-1", world_size=0)
    with raises(MeshError, "world_size", 2.0):
        Mesh("dp=-1", world_size=2.0)  # type: ignore[arg-type]


def test_a_mesh_without_dims_needs_one_rank():
    Mesh((), world_size=1)
    with raises(WorldSizeError, "mesh ()", 1, 2):
        Mesh((), world_size=2)


def test_meshes_of_some_ranks_must_lie_in_the_world():
    Mesh("dp=2", [3, 1], world_size=4)
    with raises(WorldSizeError, "dp=2", "rank 3", "0..2"):
        Mesh("dp=2", [3, 1], world_size=3)
    mesh = Mesh("dp=2", [3, 1])
    mesh.check_world(4, partial=True)
    with raises(WorldSizeError, "dp=2", 2, 4):
        mesh.check_world(4)
    with raises(WorldSizeError, "dp=2", 2, 1):
        mesh.check_world(1, partial=True)


@given(
    st.lists(st.one_of(st.integers(1, 6), st.just(-1)), min_size=1, max_size=3).filter(
        lambda sizes: sizes.count(-1) < 2
    ),
    st.integers(1, 48),
)
def test_no_mesh_that_fits_keeps_more_of_the_sizes(asked, world):
    dims = [MeshDimension(f"d{k}", size) for k, size in enumerate(asked)]
    found = shapes_that_fit(dims, world, most=1000)
    assert found
    assert len(set(found)) == len(found)

    def kept(shape):
        return sum(a == b for a, b in zip(asked, shape, strict=True))

    divisors = [n for n in range(1, world + 1) if world % n == 0]
    fitting = [s for s in product(divisors, repeat=len(asked)) if prod(s) == world]
    most = max(map(kept, fitting))
    assert {tuple(n for _, n in shape) for shape in found} == {
        shape for shape in fitting if kept(shape) == most
    }


def test_advice_for_many_dims_does_not_take_for_ever():
    dims = [MeshDimension(f"d{k}", 7) for k in range(12)]
    start = perf_counter()
    found = shapes_that_fit(dims, 2**6 * 5**6)
    assert perf_counter() - start < 20
    assert len(found) == 3
    assert all(prod(n for _, n in shape) == 2**6 * 5**6 for shape in found)
