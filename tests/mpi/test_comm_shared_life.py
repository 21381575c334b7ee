"""Shared memory among many operations and communicators, and where ranks differ or go."""

from __future__ import annotations

import gc
import random
import time

import numpy as np
import pytest

from mpimesh.comm.arena import Node
from mpimesh.errors import ClosedError, MismatchError, TransportError
from tests.contract.shared_memory import MEMORIES, done, node_of, opened, put
from tests.helpers.depth import deep
from tests.helpers.raises import raises


def why_not(communicator):
    """Why all goes by messages, as the only route says."""
    (route,) = communicator.algorithms()
    assert (route.operation, route.algorithm) == ("*", "mpi")
    return route.reason


# -- many at once ----------------------------------------------------------------------------


def parts_of(ranks):
    """Communicators of halves, pairs that overlap, all ranks in reverse: those of this rank."""
    n, me = ranks.size, ranks.rank
    pairs = [ranks.split(0 if me in (first, (first + 1) % n) else None, me) for first in range(n)]
    everyone = [ranks.split(0, -me), ranks.split(me % 2, me), *pairs]
    return [part for part in everyone if part is not None]


def start(part, number, seed):
    """Start one collective of a kind that all members draw; return (request, got, expected)."""
    rng = np.random.default_rng([seed, number])
    n, me, size = part.size, part.rank, int(rng.integers(1, 300))
    memory = ("ordinary", "shared", "mixed")[int(rng.integers(3))]
    kind = int(rng.integers(9))
    full = rng.integers(0, 100, (n, size))
    mine = put(full[me], memory, part)
    out = np.zeros_like(mine)
    counts = [size // n] * n
    cut = slice(me * counts[0], (me + 1) * counts[0])
    whole = n * counts[0]
    if kind <= 1:
        return part.all_reduce(mine, out, "sum"), out, full.sum(0)
    if kind == 2:
        own = out[: counts[0]]
        return part.reduce_scatter(mine[:whole], own, counts, "sum"), own, full.sum(0)[cut]
    if kind == 3:
        one = mine[: counts[0]]
        expected = full[:, : counts[0]].ravel()
        return part.all_gather(one, out[:whole], counts), out[:whole], expected
    if kind == 4:
        root = number % n
        return part.broadcast(mine, root), mine, full[root]
    if kind == 5:
        expected = full[:, cut].ravel()
        return part.all_to_all(mine[:whole], out[:whole], counts, counts), out[:whole], expected
    if kind == 6:
        return part.barrier(), out, np.zeros_like(out)
    root = number % n
    if kind == 7:
        request = part.reduce(mine, out if me == root else None, "max", root)
        return request, out, full.max(0) if me == root else np.zeros_like(out)
    got = np.zeros(n * size, int)
    request = part.gather(mine, got if me == root else None, [size] * n, root)
    return request, got, full.ravel() if me == root else np.zeros_like(got)


@pytest.mark.parametrize("seed", [0, *deep(1, 2)])
def test_many_operations_on_many_communicators(comm, seed):
    """Of shared memory and of MPI, taken in another order on each rank."""
    with opened(comm, limit=7 * (seed % 2)) as ranks:
        parts = parts_of(ranks)
        flying = [
            (*start(part, number, seed), number) for number in range(12) for part in [ranks, *parts]
        ]
        random.Random(ranks.rank + seed).shuffle(flying)
        for request, got, expected, number in flying:
            done(ranks, request)
            assert np.array_equal(got, expected), number
        for part in parts:
            part.free()


def test_results_may_be_used_again_at_once(comm):
    """A rank that is ahead writes its arrays anew while others may still be at the last ones."""
    n = comm.size
    with opened(comm, limit=7) as ranks:
        me = ranks.rank
        for memory in MEMORIES:
            x, y = (put(np.zeros(500, np.int64), memory, ranks) for _ in range(2))
            for number in range(80 // n):
                x[...] = me + number
                done(ranks, ranks.all_reduce(x, y, "sum"))
                assert np.all(y == n * (n - 1) // 2 + n * number)
                x[...] = -1
                y[...] = me * (number + 1)
                done(ranks, ranks.broadcast(y, number % n))
                assert np.all(y == number % n * (number + 1))
                y[...] = -1


@pytest.mark.nprocs(2, 3, 4)
@pytest.mark.parametrize("ahead", ["ordinary", "shared"])
def test_a_rank_may_be_any_number_of_operations_ahead(comm, ahead):
    """Further than a board has slots. What it posts must stand until the others have read it."""
    with opened(comm) as ranks:
        me, n = ranks.rank, ranks.size
        size = 33_000  # larger than the stage, so that ordinary arrays go by messages
        other = "shared" if ahead == "ordinary" else "ordinary"
        arrays = [
            put(np.full(size, me + number), ahead if me == 0 else other, ranks)
            if number % 3
            # Each third on all ranks in shared memory.
            else put(np.full(size, me + number), "shared", ranks)
            for number in range(140)
        ]
        if me:
            time.sleep(0.2)
        requests = [ranks.all_reduce(None, x, "sum") for x in arrays]
        for number, (request, x) in enumerate(zip(requests, arrays, strict=True)):
            done(ranks, request)
            assert np.all(x == n * (n - 1) // 2 + n * number), number


# -- ranks that differ -----------------------------------------------------------------------


def calls(ranks, x, y):
    """Collectives of which no two agree."""
    n = ranks.size
    even, odd = [4] * n, [8] * n
    return {
        "sum": lambda: ranks.all_reduce(x[:32], y[:32], "sum"),
        "max": lambda: ranks.all_reduce(x[:32], y[:32], "max"),
        "shorter": lambda: ranks.all_reduce(x[:31], y[:31], "sum"),
        "longer": lambda: ranks.all_reduce(x, y, "sum"),
        "dtype": lambda: ranks.all_reduce(x[:32].view("i8"), y[:32].view("i8"), "sum"),
        "scatter": lambda: ranks.reduce_scatter(x[: 4 * n], y[:4], even, "sum"),
        "gather": lambda: ranks.all_gather(x[:4], y[: 4 * n], even),
        "more": lambda: ranks.all_gather(x[:8], y[: 8 * n], odd),
        "first root": lambda: ranks.broadcast(y[:32], 0),
        "last root": lambda: ranks.broadcast(y[:32], n - 1),
        "all to all": lambda: ranks.all_to_all(x[: 4 * n], y[: 4 * n], even, even),
    }


@pytest.mark.nprocs(2, 3, 4)
@pytest.mark.parametrize("memory", ["ordinary", *deep("shared", "mixed")])
def test_ranks_in_different_collectives_learn_of_it(comm, memory):
    """All of them; what came before it ends well, and nothing goes on after it."""
    n = comm.size
    names = list(calls(comm, np.zeros(5000), np.zeros(5000)))
    for number, name in enumerate(names):
        odd = names[(number + 1 + number % 3) % len(names)]
        with opened(comm) as ranks:
            me = ranks.rank
            x, y, total = (put(np.full(5000, me + 1.0), memory, ranks) for _ in range(3))
            before = ranks.all_reduce(None, total, "sum")
            wrong = calls(ranks, x, y)[odd if me == n - 1 else name]()
            after = ranks.barrier()
            mine = odd if me == n - 1 else name
            # Who broadcasts needs nobody, and who receives the root alone.
            root = {"first root": 0, "last root": n - 1}.get(mine)
            is_right = root is not None and (root == n - 1) == (me == n - 1)
            for request in (after, *([] if is_right else [wrong, wrong])):
                with raises(MismatchError, "different collectives"):
                    done(ranks, request)
            done(ranks, before)
            assert np.all(total == n * (n + 1) / 2), (name, odd)


# -- ranks that cannot, or will not --------------------------------------------------------------


@pytest.mark.nprocs(2, 3, 4, 8)
def test_a_rank_that_cannot_open_memory_sends_all_to_messages(comm, monkeypatch):
    if comm.rank == comm.size - 1:

        def fail(self, address):
            raise TransportError("no entry")

        monkeypatch.setattr(Node, "open", fail)
    with opened(comm) as ranks:
        last = comm.rank == comm.size - 1
        assert why_not(ranks) == (
            "no entry" if last else "another rank cannot open its neighbours' memory"
        )
        x = put(np.arange(50_000.0), "shared", ranks)
        done(ranks, ranks.all_reduce(None, x, "sum"))
        assert np.array_equal(x, np.arange(50_000.0) * comm.size)


@pytest.mark.nprocs(2, 3, 4, 8)
def test_a_rank_without_memory_sends_all_to_messages(comm, monkeypatch):
    if comm.rank == 0:
        node = node_of(0)
        monkeypatch.setattr(node, "arena", None)
        monkeypatch.setattr(node, "why_not", "nothing left")
    with opened(comm) as ranks:
        no_memory = "process 0 has no memory for others"
        assert why_not(ranks) == ("nothing left" if comm.rank == 0 else no_memory)


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize(
    ("odd", "rest", "why"),
    [
        ("never", "always", "switched off by MPIMESH_NODE_SHARED=never"),
        ("never", "never", "switched off by MPIMESH_NODE_SHARED=never"),
        ("auto", "always", "the ranks have different settings of MPIMESH_NODE_SHARED"),
    ],
)
def test_all_ranks_have_to_want_it(comm, odd, rest, why):
    mode = odd if comm.rank == comm.size - 1 else rest
    with opened(comm, mode) as ranks:
        assert why_not(ranks) == why


@pytest.mark.nprocs(2)
def test_ranks_alone_on_their_nodes_send_messages(comm):
    with opened(comm, node_ranks=1) as ranks:
        assert why_not(ranks) == "each rank is alone on its node"


def test_algorithms_name_what_is_shared(comm):
    with opened(comm) as ranks:
        if comm.size == 1:
            assert why_not(ranks) == "a rank alone"
            return
        assert [row.algorithm for row in ranks.algorithms()] == ["node"]


# -- the end ------------------------------------------------------------------------------------


@pytest.mark.nprocs(2, 3, 4, 8)
def test_what_is_unfinished_when_a_communicator_ends_is_given_up(comm):
    """Rank 0 never comes; the others have started, and must not go on in memory used again."""
    for memory in MEMORIES:
        with opened(comm) as ranks:
            requests = []
            x = put(np.ones(50_000), memory, ranks)
            if comm.rank > 0:
                requests += [ranks.all_reduce(None, x[:9], "sum"), ranks.all_reduce(None, x, "sum")]
                requests += [
                    ranks.all_gather(x, np.empty(50_000 * comm.size), [50_000] * comm.size)
                ]
                assert not any(request.test() for request in requests)
        for request in requests:
            with raises(ClosedError, "given up"):
                done(ranks, request)
        assert np.all(x == 1)


@pytest.mark.nprocs(3)
def test_a_rank_may_free_long_before_the_others(comm):
    """It waits for them for a while, then goes; what they may still read is not used again."""
    gc.collect()
    before = node_of(0).arena.used_bytes
    start_s = time.monotonic()
    with opened(comm) as ranks:
        x = np.ones(100)
        done(ranks, ranks.all_reduce(None, x, "sum"))
        if comm.rank:
            request = ranks.all_reduce(None, x, "sum")
            while time.monotonic() - start_s < 2.5:
                assert not request.test()
                time.sleep(0.05)
    assert (node_of(0).arena.used_bytes > before) == (comm.rank == 0)
    comm.Barrier()


@pytest.mark.nprocs(1, 2, 4, 8)
def test_communicators_give_their_memory_back(comm):
    with opened(comm) as ranks:
        gc.collect()
        before = node_of(0).arena.used_bytes
        for number in range(400 // comm.size**2 + 10):
            part = ranks.split(0, 0)
            x = np.full(100, number)
            done(part, part.all_reduce(None, x, "sum"))
            assert x[0] == number * comm.size
            part.free()
            part.free()
            del part
        gc.collect()
        assert node_of(0).arena.used_bytes == before


@pytest.mark.nprocs(2, 4)
def test_the_rings_of_messages_are_made_at_the_first_and_go_with_the_communicator(comm):
    """Also where its mail is kept longer, as a group or a handle does."""
    arena, near = node_of(0).arena, {(comm.rank + step) % comm.size for step in (1, -1)}
    gc.collect()
    before = arena.used_bytes
    with opened(comm) as ranks:
        without = arena.used_bytes
        for used in (len(near), len(near), comm.size - 1):
            peers = near if used == len(near) else {*range(comm.size)} - {comm.rank}
            rows = [np.zeros(3) for _ in peers]
            receives = [ranks.irecv(row, peer, 1) for row, peer in zip(rows, peers, strict=True)]
            sends = [ranks.isend(np.full(3, float(comm.rank)), peer, 1) for peer in peers]
            done(ranks, *sends, *receives)
            assert [row[0] for row in rows] == [*peers]
            assert arena.used_bytes - without == used * 68 * 1024
        mail = ranks.node_mail
    assert arena.used_bytes == before
    with pytest.raises(ClosedError):
        mail.send(np.zeros(1), comm.rank, 1)


@pytest.mark.nprocs(2, 3)
def test_a_communicator_that_is_dropped_keeps_the_memory_that_others_write(comm):
    """Its window goes on: who waits in it for a rank that never comes asks that one to ring."""
    gc.collect()
    arena = node_of(0).arena
    before = arena.used_bytes
    ranks = opened(comm).__enter__()
    requests = [ranks.all_reduce(None, np.ones(100), "sum")] if comm.rank else []
    comm.Barrier()
    del ranks, requests
    gc.collect()
    assert arena.used_bytes > before
    comm.Barrier()
