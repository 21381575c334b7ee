"""Split arrays carried between nodes, which are made up: what comes out, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import mpimesh as mm
from mpimesh.layout import LinkCost, LinkCosts
from tests.contract.shared_memory import nodes_of
from tests.helpers.depth import deep
from tests.helpers.dtensor_oracle import placements, split

RANKS = MPI.COMM_WORLD.size
SLOW_BETWEEN = LinkCosts(LinkCost(1e-9, 1e12), LinkCost(1e-9, 1e3))
LATE_BETWEEN = LinkCosts(LinkCost(1e-9, 1e12), LinkCost(1.0, 1e12))

pytestmark = pytest.mark.skipif(RANKS < 3, reason="takes a node of two ranks and another one")


@pytest.mark.parametrize("dims", [f"a={RANKS}", *([f"a=2,b={RANKS // 2}"] * (RANKS % 2 == 0))])
@pytest.mark.parametrize("node_ranks", [2, *deep(3)])
def test_on_two_levels(dims, node_ranks):
    if node_ranks >= RANKS:
        pytest.skip("takes more than one node")
    x = np.arange(90 * 14.0).reshape(90, 14)
    levels = set()
    with nodes_of(node_ranks), mm.DeviceMesh(dims) as mesh:
        mesh._core.context.links = SLOW_BETWEEN
        rows = placements(mesh.ndim)
        pairs = [(a, row) for a in [split(x, mesh, row) for row in rows] for row in rows]
        for number, (a, row) in enumerate(pairs[:: 1 if mesh.ndim == 1 else 11]):
            plan = a.plan(row)
            levels.add(len(plan.phases))
            max_bytes = number % 3 // 2 * 1000
            before = mesh.traffic().snapshot()
            b = a.redistribute(row, max_bytes=max_bytes)
            moved = mesh.traffic() - before
            if moved.calls.get("redistribute"):
                assert moved.received_bytes == plan.received_bytes(mesh.rank), (a, row)
            assert np.array_equal(b.full(), x), (a, row, max_bytes)
    # The last of unequal nodes may lack so much that nothing is gained for it.
    assert len(levels) > 1 or RANKS % node_ranks


@pytest.mark.parametrize("axis", [0, 1])
def test_by_a_collective_of_the_group(axis):
    """Each rank is a node of its own, where a message takes long."""
    x = np.arange(13 * 11.0).reshape(13, 11)
    with nodes_of(1), mm.DeviceMesh("a=-1") as mesh:
        mesh._core.context.links = LATE_BETWEEN
        cut, summands = mm.distribute(x, mesh, f"S{axis}"), split(x, mesh, ("P",))
        for a, row, kind in (
            (cut, "R", "all_gather"),
            (summands, f"S{axis}", "reduce_scatter"),
            (cut, f"S{1 - axis}", "all_to_all"),
        ):
            plan = a.plan(row)
            assert str(plan.collective) == f"by {kind} over a"
            before = mesh.traffic().snapshot()
            b = a.redistribute(row)
            moved = mesh.traffic() - before
            assert moved.received_bytes == plan.received_bytes(mesh.rank)
            assert kind in moved.calls
            assert np.array_equal(b.full(), x)


@pytest.mark.parametrize("node_ranks", [0, 1, 2])
def test_links_are_measured_alike_on_all_ranks(node_ranks):
    half = mm.Mesh("a=2", ids=[0, RANKS - 1])
    with nodes_of(node_ranks), mm.DeviceMesh(half) as mesh:
        assert not mesh.links.measured
        links = mesh.measure_links()
        assert links == mesh.links
        assert links.measured
        assert set(MPI.COMM_WORLD.allgather(links)) == {links}
        for link, is_measured in (
            (links.intra_node, node_ranks != 1),
            (links.inter_node, node_ranks != 0),
        ):
            assert (link == LinkCost()) != is_measured
            assert link.measured == is_measured
            assert 1e-8 < link.latency_s < 1
            assert 1e6 < link.bytes_per_s < 1e13
