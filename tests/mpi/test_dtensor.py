"""Split arrays on the ranks of MPI: made, carried from layout to layout and mesh to mesh.

The same at any number of ranks, in shared memory and by messages.
"""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import mpimesh as mm
from tests.contract.shared_memory import nodes_of
from tests.helpers.dtensor_oracle import placements, split

RANKS = MPI.COMM_WORLD.size


@pytest.fixture(params=["auto", "never"])
def way(request, monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", request.param)
    return request.param


def grids():
    """Meshes of all ranks: in a row, and in two dims where that can be."""
    pairs = [(a, RANKS // a) for a in range(2, RANKS) if RANKS % a == 0]
    return [f"a={RANKS}", *(f"a={a},b={b}" for a, b in pairs[:1])]


@pytest.mark.parametrize("dims", grids())
def test_any_layout_to_any_layout(dims, way):
    x = np.arange(63.0).reshape(9, 7)
    with mm.DeviceMesh(dims) as mesh:
        rows = placements(mesh.ndim)
        pairs = [(a, row) for a in [split(x, mesh, row) for row in rows] for row in rows]
        # Many ranks share few cores; what they do is seen at 4 ranks and on virtual ones.
        for a, row in pairs[:: 1 if RANKS <= 4 else 7]:
            assert np.array_equal(a.redistribute(row).full(), x), (a, row)


def test_large_blocks(way):
    """Of more than one chunk of everything; in pieces of at most 64 KiB as well."""
    x = np.arange(600 * 700.0).reshape(600, 700)
    with mm.DeviceMesh("a=-1") as mesh:
        a = mm.distribute(x, mesh, "S0")
        for max_bytes in (0, 1 << 16):
            b = a.redistribute("S1", max_bytes=max_bytes)
            c = b.redistribute("S0", max_bytes=max_bytes)
            assert np.array_equal(c.local, a.local)
            assert np.array_equal(b.full(), x)
        summands = mm.DTensor.from_local(x * (mesh.rank + 1), mesh, "P", shape=x.shape)
        total = RANKS * (RANKS + 1) // 2
        assert np.array_equal(summands.redistribute("R").local, x * total)
        halves = mm.DTensor.from_local(np.ones(x.shape, "f2"), mesh, "P", shape=x.shape)
        assert (halves.redistribute("S1").local == RANKS).all()


def test_to_another_mesh_and_back(way):
    """Two meshes over the same world, disjoint where there are two ranks and more."""
    x = np.arange(77).reshape(7, 11)
    half = max(1, RANKS // 2)
    first = mm.Mesh(f"p={half}", ids=range(half))
    second = mm.Mesh(f"q={max(1, RANKS - half)}", ids=range(RANKS - 1, half - 1, -1) or [0])
    with mm.DeviceMesh(first) as here, mm.DeviceMesh(second) as there:
        a = mm.distribute(x, here, "S0")
        b = a.redistribute("S1", mesh=there)
        c = b.start_redistribute("R", mesh=here).resolve()
        for t in (b, c):
            whole = t.full()
            assert whole is None or np.array_equal(whole, x)
        assert c.is_member == (here.rank < half)


def test_blocks_come_from_one_rank_and_return(way):
    x = np.arange(35.0).reshape(5, 7)
    root = RANKS - 1
    with mm.DeviceMesh("a=-1") as mesh:
        t = mm.distribute(x if mesh.rank == root else None, mesh, "S1", root=root)
        assert np.array_equal(t.full(), x)
        found = t.full(root=root)
        assert (found is None) == (mesh.rank != root)
        own = mm.DTensor.from_local(np.full((mesh.rank, 2), mesh.rank), mesh, "S0")
        assert own.shape == (RANKS * (RANKS - 1) // 2, 2)
        assert own.full()[:, 0].tolist() == [r for r in range(RANKS) for _ in range(r)]


def test_what_is_not_written_until_it_is_read(way):
    """A rank may write into its block as soon as its redistribution is resolved."""
    with mm.DeviceMesh("a=-1") as mesh:
        x = mm.full((64, 64 * RANKS), 0.0, mesh, "S0")
        for number in range(50):
            x.local[...] = number
            assert (x.redistribute("S1").local == number).all()


@pytest.mark.skipif(RANKS < 4, reason="takes two nodes of two ranks")
def test_copies_on_the_same_node_come_first():
    """Nodes of two ranks: rows are held by ranks 0 and 2, and by 1 and 3; each node has all."""
    x = np.arange(32.0).reshape(4, 8)
    copies, rows = mm.Mesh("copy=2,row=2", ids=range(4)), mm.Mesh("row=2,copy=2", ids=[1, 3, 0, 2])
    with nodes_of(2), mm.DeviceMesh(copies) as here, mm.DeviceMesh(rows) as there:
        a = mm.distribute(x, here, "row=S0")
        b = a.redistribute("row=R", mesh=there)
        assert not b.is_member or np.array_equal(b.local, x)
        peers = here.traffic().by_peer("redistribute")
        assert all(peer // 2 == here.rank // 2 for peer in peers), peers
        assert bool(peers) == b.is_member
