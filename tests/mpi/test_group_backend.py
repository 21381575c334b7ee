"""A group whose bytes have to go one way: it does, or it is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import GroupError
from tests.helpers.raises import raises


def ways(group):
    return {route.algorithm for route in group.algorithms() if route.memory == "host"}


@pytest.mark.parametrize("backend", ["mpi", "node_shared"])
def test_all_goes_the_way_that_is_asked_for(comm, backend):
    if comm.size == 1:
        return
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.add_group("forced", range(comm.size), backend=backend)
        assert group.backend == backend
        for size in (3, 100_000):
            x = np.arange(float(size)) + mesh.rank
            expected = np.arange(float(size)) + (comm.size - 1) / 2
            assert np.allclose(group.all_reduce(x, "mean").resolve(), expected)
        assert ways(group) == ({"mpi"} if backend == "mpi" else {"node"})
        assert all(row.reason == "asked for" for row in group.algorithms() if row.operation != "*")
        # The same ranks under another name are not bound by it.
        assert mesh.group("dp").algorithms() != group.algorithms()
        with mesh.copy() as other:
            assert ways(other.group("forced")) == ways(group)
            assert other.group("forced").backend == backend


def test_a_way_along_dims(comm):
    if comm.size % 2:
        return
    with mm.DeviceMesh("dp=2,pp=-1", comm) as mesh:
        group = mesh.add_group("rows", dims="pp", backend="mpi")
        assert group.all_reduce(np.ones(3)).resolve().tolist() == [group.size] * 3


def test_ranks_on_several_nodes_share_no_memory(comm, monkeypatch):
    if comm.size == 1:
        return
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        found = mesh.group().communicator
        monkeypatch.setattr(found, "force", None)  # the group gets a communicator of its own
        cls = type(found)
        monkeypatch.setattr(cls, "force", lambda self, way: "memory cannot be opened here")
        with raises(
            GroupError, "'forced'", "node_shared", "rank 0", "memory cannot be opened here"
        ):
            mesh.add_group("forced", range(comm.size), backend="node_shared")
        monkeypatch.undo()
        assert "forced" not in mesh.group_names
        again = mesh.add_group("forced", range(comm.size), backend="mpi")
        assert again.all_reduce(np.ones(1)).resolve()[0] == comm.size


@pytest.mark.parametrize(
    ("backend", "values"),
    [
        ("gloo", ("'gloo'", "mpi, node_shared, nccl")),
        ("virtual", ("'virtual'", "mpi, node_shared, nccl")),
        ("x", ("'x'", "mpi, node_shared, nccl")),
        (7, ("7", "mpi, node_shared, nccl")),
        ("nccl", ("nccl", "CuPy")),
    ],
)
def test_ways_that_are_not_there(comm, backend, values):
    with mm.DeviceMesh("dp=-1", comm) as mesh, raises(GroupError, *values):
        mesh.add_group("forced", range(comm.size), backend=backend)
