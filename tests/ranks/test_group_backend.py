"""A group whose bytes have to go one way: it does, or it is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import GroupError
from mpimesh.mesh import GroupBackend


def ways(group):
    return {route.transport for route in group.routes() if route.memory == "host"}


@pytest.mark.parametrize("backend", ["mpi", "node_shared"])
def test_all_goes_the_way_that_is_asked_for(comm, backend):
    if comm.size == 1:
        return
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.add_group("forced", range(comm.size), backend=backend)
        assert str(group.backend) == backend
        for size in (3, 100_000):
            x = np.arange(float(size)) + mesh.rank
            expected = np.arange(float(size)) + (comm.size - 1) / 2
            assert np.allclose(group.all_reduce(x, "mean").resolve(), expected)
        assert ways(group) == ({"mpi"} if backend == "mpi" else {"mpi", "node_shared"})
        assert all(
            route.reason == "asked for" for route in group.routes() if route.transport == backend
        )
        # The same ranks under another name are not bound by it.
        assert mesh.group("dp").routes() != group.routes()
        with mesh.copy() as other:
            assert ways(other.group("forced")) == ways(group)
            assert str(other.group("forced").backend) == backend


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
        with pytest.raises(GroupError, match=r"node_shared: rank 0 says: memory cannot be opened"):
            mesh.add_group("forced", range(comm.size), backend="node_shared")
        monkeypatch.undo()
        assert "forced" not in mesh.group_names
        again = mesh.add_group("forced", range(comm.size), backend="mpi")
        assert again.all_reduce(np.ones(1)).resolve()[0] == comm.size


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("gloo", "'gloo', but .* on this mesh is mpi, node_shared, nccl; leave"),
        ("virtual", "'virtual', but .* on this mesh is mpi, node_shared, nccl; leave"),
        ("x", "'x', but .* on this mesh is mpi, node_shared, nccl; leave"),
        (GroupBackend.GLOO, "'gloo', but .* on this mesh is mpi, node_shared, nccl; leave"),
        (7, "'7', but .* on this mesh is mpi, node_shared, nccl; leave"),
        ("nccl", "CuPy is not imported"),
    ],
)
def test_ways_that_are_not_there(comm, backend, text):
    with mm.DeviceMesh("dp=-1", comm) as mesh, pytest.raises(GroupError, match=text):
        mesh.add_group("forced", range(comm.size), backend=backend)
