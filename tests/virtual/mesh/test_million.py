"""A mesh of a million ranks is an array of 8 MB, and its groups are views and copies of it."""

from __future__ import annotations

import pickle
import tracemalloc
from time import perf_counter

import numpy as np
import pytest

from mpimesh.mesh import DataParallelTopology, Mesh, MeshTopology

RANKS = 1_000_000
RANK = 654_321
SHAPE = (1000, 25, 40)


@pytest.fixture
def frugal():
    """Fail a test that holds more than a few arrays of the ranks at any time, or takes seconds."""
    tracemalloc.start()
    start = perf_counter()
    yield
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 * 8 * RANKS
    assert perf_counter() - start < 5


@pytest.mark.usefixtures("frugal")
def test_places_and_groups():
    mesh = Mesh("dp=-1,pp=25,tp=40", world_size=RANKS)
    place = np.unravel_index(RANK, SHAPE)
    assert mesh.size == RANKS
    assert mesh.coords_of(RANK) == place
    assert mesh.rank_at(*map(int, place)) == RANK == mesh.rank_of(RANK)
    assert mesh.contains_rank(RANKS - 1)
    assert not mesh.contains_rank(RANKS)
    d, p, t = map(int, place)
    assert mesh.group_ranks(RANK, "tp") == range(RANK - t, RANK - t + 40)
    assert mesh.group_ranks(RANK, "dp") == range(p * 40 + t, RANKS + p * 40 + t, 1000)
    assert mesh.group_ranks(RANK, "dp,pp,tp") == range(RANKS)
    spread = mesh.group_ranks(RANK, "tp,dp")
    assert len(spread) == 40_000
    assert spread[t * 1000 + d] == RANK
    assert spread.index(RANK) == t * 1000 + d == mesh.place_in_group(RANK, "tp,dp")
    assert mesh.num_groups("pp") == 40_000
    assert mesh.group_index(RANK, "pp") == d * 40 + t
    assert [*mesh.groups("pp")[d * 40 + t]] == [*mesh.group_ranks(RANK, "pp")]
    assert mesh.neighbour(RANK, "dp", -1) == RANK - 1000
    mesh.check_world(RANKS)


@pytest.mark.usefixtures("frugal")
def test_slices_and_views():
    mesh = Mesh.from_ids(SHAPE, range(5, RANKS + 5), dim_names=("dp", "pp", "tp"))
    assert mesh.submesh("tp,dp", pp=3).rank_at(7, 9) == 5 + 9 * 1000 + 3 * 40 + 7
    flat = mesh.flatten("tp,dp", "model")
    assert flat.rank_at(7 * 1000 + 9, 3) == 5 + 9 * 1000 + 3 * 40 + 7
    assert flat.unflatten("model", "tp=40,dp=-1").submesh("dp,pp,tp") == mesh
    assert pickle.loads(pickle.dumps(flat)) == flat
    assert hash(flat) != hash(mesh)
    assert len(repr(flat)) < 200
    assert len(pickle.dumps(mesh)) < 300


@pytest.mark.usefixtures("frugal")
def test_the_groups_of_a_topology():
    mesh = MeshTopology.mixed(tp=40, pp=25, dp=1000).to_mesh(RANKS)
    assert mesh == Mesh("dp=1000,pp=25,tp=40")
    ((_, everyone),) = DataParallelTopology().group_plan(RANKS)
    assert everyone[RANK] == RANK


def test_a_permutation_of_a_million_ranks_is_one_table():
    order = np.random.default_rng(0).permutation(RANKS)
    mesh = Mesh.from_ids(SHAPE, order)
    place = tuple(int(k) for k in np.unravel_index(RANK, SHAPE))
    rank = int(order[RANK])
    assert mesh.coords_of(rank) == place
    assert list(mesh.group_ranks(rank, "d2")) == order.reshape(SHAPE)[place[0], place[1]].tolist()
