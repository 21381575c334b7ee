"""Two levels: inside a node in shared memory, between nodes by messages; nodes are made up."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

import mpimesh as mm
from tests.contract.shared_memory import MEMORIES, done, nodes_of, opened, put, reduced_in_order
from tests.helpers.depth import deep, deep_but

NODE_RANKS = [2, 3, 4]
SMALL = [1, 7, 64, 65, 200, 1000]

NODES = {
    "1 a node": lambda rank, ranks: rank,
    "2 a node": lambda rank, ranks: rank // 2,
    "3 a node": lambda rank, ranks: rank // 3,
    "in turn": lambda rank, ranks: rank % 2,
    "first and last together": lambda rank, ranks: int(0 < rank < ranks - 1),
    "one apart": lambda rank, ranks: int(rank != 1),
}
"""The node of each rank. With the last one, a single rank carries all for the others."""

PLACES = (*MEMORIES, "node by node")


def by_nodes(inputs, node_ranks):
    """The inputs of the nodes, each from left to right; of integers the order does not matter."""
    nodes = [inputs[at : at + node_ranks] for at in range(0, len(inputs), node_ranks)]
    return [reduced_in_order(node, "sum") for node in nodes]


@pytest.mark.nprocs(3, 4, 8)
@pytest.mark.parametrize("node_ranks", deep_but(NODE_RANKS, 3))
@pytest.mark.parametrize("limit", [0, 7])
def test_all_reduce(comm, node_ranks, limit):
    """Also where the last node has fewer ranks than the others."""
    with opened(comm, limit=limit, node_ranks=node_ranks) as ranks:
        me, n = ranks.rank, comm.size
        for size in SMALL if limit else [32769, 100_001]:
            for dtype in ("i8", "f8"):
                rng = np.random.default_rng(size)
                inputs = [(rng.standard_normal(size) * 1000).astype(dtype) for _ in range(n)]
                expected = reduced_in_order(by_nodes(inputs, node_ranks), "sum")
                results = []
                for memory in (*MEMORIES, "node by node"):
                    lies = ("ordinary", "shared")[me // node_ranks % 2]
                    memory = lies if memory == "node by node" else memory
                    x = put(inputs[me], memory, ranks)
                    done(ranks, ranks.all_reduce(None, x, "sum"))
                    y = put(np.zeros(size, dtype), memory, ranks)
                    done(ranks, ranks.all_reduce(put(inputs[me], memory, ranks), y, "sum"))
                    np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-9)
                    results += [x.tobytes(), y.tobytes()]
                # Wherever the arrays lie, and on every rank, it is the same to the last bit.
                assert set(results) == {comm.bcast(results[0], 0)}, (size, dtype)


@pytest.fixture(params=deep_but(NODES, "in turn", "one apart"))
def node_of_rank(request):
    return NODES[request.param]


def cases(comm, limit):
    """Yield sizes, dtypes, arrays of all ranks that fit exactly, and uneven blocks of them."""
    n = comm.size
    for seed, size in enumerate(
        [0, 1, 8, 65, 2500] if limit else [9, 40_000, 150_001][: 2 if n > 4 else 3]
    ):
        rng = np.random.default_rng([size, n])
        cuts = np.sort(rng.integers(0, size + 1, n - 1))
        counts = np.diff([0, *cuts, size]).tolist()
        dtype = ("i8", "f4", "D")[seed % 3]
        # Whole numbers: their sums are the same in every order.
        yield rng.integers(-99, 99, (n, size)).astype(dtype), counts, [0, *accumulate(counts)]


def memory_of(place, node):
    return ("ordinary", "shared")[node % 2] if place == "node by node" else place


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("limit", [*deep(0), 7])
def test_reduce_scatter(comm, node_of_rank, limit):
    node = node_of_rank(comm.rank, comm.size)
    with opened(comm, limit=limit, part=node) as ranks:
        me = ranks.rank
        for inputs, counts, starts in cases(comm, limit):
            expected = inputs.sum(0)[starts[me] : starts[me + 1]]
            for place in PLACES:
                x = put(inputs[me], memory_of(place, node), ranks)
                y = np.zeros_like(expected)
                done(ranks, ranks.reduce_scatter(x, y, counts, "sum"))
                np.testing.assert_array_equal(y, expected, f"{place} {counts}")
                np.testing.assert_array_equal(x, inputs[me])


@pytest.mark.nprocs(2, 3, 4, 8)
def test_reduce_scatter_is_the_same_to_the_last_bit(comm, node_of_rank):
    """Wherever the arrays lie, and whenever it is done."""
    node = node_of_rank(comm.rank, comm.size)
    rng = np.random.default_rng(comm.rank)
    mine = rng.standard_normal(30_000) * 10.0 ** rng.integers(-9, 9, 30_000)
    counts = [30_000 // comm.size] * comm.size
    counts[0] += 30_000 - sum(counts)
    with opened(comm, part=node) as ranks:
        results = set()
        for place in (*PLACES, *PLACES):
            y = np.zeros(counts[ranks.rank])
            x = put(mine, memory_of(place, node), ranks)
            done(ranks, ranks.reduce_scatter(x, y, counts, "sum"))
            results.add(y.tobytes())
        assert len(results) == 1


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("limit", [*deep(0), 7])
def test_all_gather(comm, node_of_rank, limit):
    node = node_of_rank(comm.rank, comm.size)
    with opened(comm, limit=limit, part=node) as ranks:
        me = ranks.rank
        for inputs, counts, starts in cases(comm, limit):
            for place in PLACES:
                memory = memory_of(place, node)
                x = put(inputs[0][starts[me] : starts[me + 1]], memory, ranks)
                for target in ("ordinary", memory, "shared"):
                    y = put(np.zeros_like(inputs[0]), target, ranks)
                    done(ranks, ranks.all_gather(x, y, counts))
                    np.testing.assert_array_equal(y, inputs[0], f"{place} {target} {counts}")


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("limit", [*deep(0), 7])
def test_broadcast(comm, node_of_rank, limit):
    node = node_of_rank(comm.rank, comm.size)
    with opened(comm, limit=limit, part=node) as ranks:
        for inputs, _, _ in cases(comm, limit):
            for place in PLACES:
                for root in range(comm.size):
                    x = put(inputs[ranks.rank], memory_of(place, node), ranks)
                    done(ranks, ranks.broadcast(x, root))
                    np.testing.assert_array_equal(x, inputs[root], f"{place} from {root}")


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("limit", [*deep(0), 7])
def test_all_to_all(comm, node_of_rank, limit):
    node = node_of_rank(comm.rank, comm.size)
    with opened(comm, limit=limit, part=node) as ranks:
        me, n = ranks.rank, comm.size
        for inputs, _, _ in cases(comm, limit):
            rng = np.random.default_rng([inputs.size, n])
            sent = rng.integers(0, inputs.shape[1] // n + 1, (n, n)) * rng.integers(0, 2, (n, n))
            blocks = [np.split(inputs[r], np.cumsum(sent[r]))[me] for r in range(n)]
            for place in PLACES:
                x = put(inputs[me][: sent[me].sum()], memory_of(place, node), ranks)
                y = np.zeros(sent[:, me].sum(), inputs.dtype)
                done(ranks, ranks.all_to_all(x, y, sent[me].tolist(), sent[:, me].tolist()))
                np.testing.assert_array_equal(y, np.concatenate(blocks), place)


@pytest.mark.nprocs(3, 4, 8)
def test_many_operations_in_flight(comm):
    with opened(comm, limit=7, node_ranks=2) as ranks:
        me, n = ranks.rank, comm.size
        parts = [ranks, ranks.split(0, -me), ranks.split(me % 2, me)]
        flying = []
        for number in range(10):
            for part in parts:
                full = np.arange(n)[:, None] * np.arange(100 * number + 5)
                memory = MEMORIES[number % 3]
                x = put(full[part.rank], memory, part)
                flying.append((part.all_reduce(None, x, "sum"), x, full[: part.size].sum(0)))
                root = number % part.size
                y = put(full[part.rank], memory, part)
                flying.append((part.broadcast(y, root), y, full[root]))
                each = np.full(7, part.rank)
                z = np.zeros(7 * part.size, int)
                counts = [7] * part.size
                expected = np.repeat(np.arange(part.size), 7)
                flying.append((part.all_gather(put(each, memory, part), z, counts), z, expected))
                x = put(expected, memory, part)
                w = np.zeros(7, int)
                total = part.size * each
                flying.append((part.reduce_scatter(x, w, counts, "sum"), w, total))
                y = np.zeros_like(expected)
                flying.append(
                    (part.all_to_all(x, y, counts, counts), y, np.repeat(part.rank, y.size))
                )
        for request, got, expected in flying[:: -1 if me % 2 else 1]:
            done(ranks, request)
            assert np.array_equal(got, expected)
        for part in parts[1:]:
            part.free()


@pytest.mark.nprocs(3, 4, 8)
@pytest.mark.parametrize("mode", ["always", "auto"])
def test_routes_name_both_levels(comm, mode):
    with opened(comm, mode, node_ranks=2) as ranks:
        routes = [route for route in ranks.algorithms() if route.algorithm == "two_levels"]
        assert {route.operation for route in routes} == {"all_reduce"}
        assert all("between them by MPI" in route.reason for route in routes)


@pytest.mark.nprocs(3, 4, 8)
def test_small_and_large_arrays_by_turns(comm):
    """As nothing is measured, small ones go by messages alone."""
    with opened(comm, "auto", node_ranks=2) as ranks:
        me, n = ranks.rank, comm.size
        for size in (1, 20_000, 3, 70_000):
            counts, total = [size] * n, n * (n + 1) // 2
            ones = np.full(size * n, me + 1)
            whole, own, other = np.zeros(size * n, int), np.zeros(size, int), ones.copy()
            requests = [
                ranks.all_gather(ones[:size], whole, counts),
                ranks.reduce_scatter(ones, own, counts, "sum"),
                ranks.broadcast(other, n - 1),
            ]
            done(ranks, *requests[::-1])
            assert np.array_equal(whole, np.repeat(np.arange(n) + 1, size))
            assert np.all(own == total)
            assert np.all(other == n)


@pytest.mark.nprocs(3, 4, 8)
def test_a_mesh_over_made_up_nodes(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    with nodes_of(2), mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group("dp")
        assert any("between them by MPI" in route.reason for route in group.algorithms())
        for size in (1, 1000, 70_000):
            x = mesh.shared_empty(size)
            x[...] = mesh.rank + 1
            mean = group.all_reduce(x, "mean").resolve()
            np.testing.assert_allclose(mean, (comm.size + 1) / 2, rtol=1e-12)
            group.all_reduce(x, out=x).resolve()
            assert np.all(x == comm.size * (comm.size + 1) / 2)
