"""Regions between the ranks of MPI: in shared memory, by messages, and both over several nodes."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from mpimesh.comm import region_messages
from mpimesh.comm.mpi import MPICommunicator
from mpimesh.errors import ClosedError, MismatchError
from mpimesh.layout import Part, Regions, Take
from tests.contract.regions import DTYPES, gives_of, make, ring, rows_to_columns
from tests.contract.shared_memory import MEMORIES, done, node_of, opened, put
from tests.helpers.depth import deep, deep_but
from tests.helpers.raises import raises

NODES = {
    "2 a node": lambda rank, ranks: rank // 2,
    "3 a node": lambda rank, ranks: rank // 3,
    "in turn": lambda rank, ranks: rank % 2,
    "one apart": lambda rank, ranks: int(rank != 1),
}


def start(ranks, source, target, regions, max_bytes=0):
    """Start an exchange; one by messages as the runtime does, in turn."""
    started = ranks.exchange_regions(source, target, regions, max_bytes=max_bytes)
    if hasattr(started, "test"):
        return started
    return ranks.engine.stage(ranks, started)


def lying(array, memory, ranks):
    """Return a copy that lies where `memory` says; of any shape."""
    if not array.nbytes:
        return array.copy()
    return put(array.reshape(-1).view("u1"), memory, ranks).view(array.dtype).reshape(array.shape)


def check(ranks, seed, dtype, memory, **options):
    me = ranks.rank
    max_bytes = options.pop("max_bytes", 0)
    case = make(seed, ranks.size, dtype, **options)
    source = lying(case.sources[me], memory, ranks)
    for _ in range(2):
        target = lying(case.before[me], memory, ranks)
        done(ranks, start(ranks, source, target, case.regions[me], max_bytes))
        assert target.tobytes() == case.after[me].tobytes(), (seed, dtype, memory)
        assert source.tobytes() == case.sources[me].tobytes(), (seed, dtype, memory)
        # Nobody reads it any more.
        source.reshape(-1).view("u1")[...] = 0
        source.reshape(-1).view("u1")[...] = case.sources[me].reshape(-1).view("u1")


@pytest.mark.parametrize("dtype", deep_but(DTYPES, "f2", "S3", "record"))
@pytest.mark.parametrize("mode", ["always", "auto", "never"])
def test_any_exchange(comm, mode, dtype):
    limit = 7 if mode == "auto" else 0
    with opened(comm, mode, limit=limit) as ranks:
        for seed in range(12 if comm.size < 4 else 4):
            for memory in MEMORIES:
                check(ranks, seed, dtype, memory, max_bytes=(0, 0, 100)[seed % 3])


@pytest.mark.nprocs(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["always", *deep("never")])
def test_large_ones(comm, mode):
    """Longer than a piece that is read at a time, and than one message may be."""
    with opened(comm, mode) as ranks:
        for seed, dtype in enumerate(["f8", "f2", "f4", "record"]):
            for memory in MEMORIES:
                for axes, side in ((1, 200_000), (2, 400), (3, 50)):
                    check(ranks, seed, dtype, memory, axes=axes, side=side)
                check(ranks, seed, dtype, memory, axes=2, side=120, max_bytes=10_000)


@pytest.mark.nprocs(3, 4, 8)
@pytest.mark.parametrize("limit", [*deep(0), 7])
@pytest.mark.parametrize("nodes", deep_but(NODES, "in turn", "one apart"))
def test_several_nodes(comm, nodes, limit):
    node = NODES[nodes](comm.rank, comm.size)
    with opened(comm, limit=limit, part=node) as ranks:
        for seed in range(4):
            for dtype in ("f8", "f2", "?", "record"):
                for place in (*MEMORIES, "node by node"):
                    memory = ("ordinary", "shared")[node % 2] if place == "node by node" else place
                    check(ranks, seed, dtype, memory, max_bytes=(0, 100)[seed % 2])
        for memory in MEMORIES:
            check(ranks, 1, "f8", memory, axes=2, side=300)


def refuse(*arguments):
    raise AssertionError("no message is needed")


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("memory", MEMORIES)
def test_on_one_node_no_message_is_sent(comm, monkeypatch, memory):
    with opened(comm) as ranks:
        monkeypatch.setattr(MPICommunicator, "isend", refuse)
        for seed in range(3):
            check(ranks, seed, "f8", memory)


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("columns", [*deep(3), 30, *deep(200)])
def test_runs_of_any_length(comm, memory, columns):
    """Short ones come packed, in many pieces, if their owners' memory is not shared."""
    with opened(comm) as ranks:
        me, n = ranks.rank, ranks.size
        rows = 700_000 // columns // 8 + 5
        plan = rows_to_columns(n, rows * n, columns * n)
        whole = np.arange(rows * columns * n * n, dtype=float).reshape(rows * n, columns * n)
        source = lying(whole[rows * me : rows * (me + 1)].copy(), memory, ranks)
        for _ in range(2):
            target = np.zeros((rows * n, columns))
            done(ranks, start(ranks, source, target, plan[me]))
            assert np.array_equal(target, whole[:, columns * me : columns * (me + 1)])


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", ["f8", *deep("f2", "c16", "i1")])
def test_sums_of_boxes_of_any_size(comm, memory, dtype):
    """Also where the parts come in pieces that begin and end elsewhere, and one rank's alone do."""
    n = comm.size
    with opened(comm) as ranks:
        for shape, box in (
            ((9, 7), ((1, 8), (2, 6))),
            ((5000, 40), ((3, 4999), (1, 38))),
            ((300_001,), ((1, 300_000),)),
            ((60, 50, 40), ((1, 60), (0, 50), (3, 37))),
        ):
            order = [*range(n - 1, -1, -1), 0]
            into = tuple((0, stop - start) for start, stop in box)
            first = Take(into, tuple(Part(r, shape, box) for r in order), "sum")
            takes = [[first] if r % 2 == 0 else [] for r in range(n)]
            gives = gives_of(takes)
            values = np.random.default_rng(5).integers(0, 9, (n, *shape)).astype(dtype)
            regions = Regions(tuple(takes[ranks.rank]), tuple(gives[ranks.rank]))
            source = lying(values[ranks.rank], memory, ranks)
            target = np.zeros([stop for _, stop in into], dtype)
            done(ranks, start(ranks, source, target, regions))
            if ranks.rank % 2 == 0:
                part = values[:, *[slice(*edges) for edges in box]]
                assert np.array_equal(target, part.sum(0, dtype) + part[0])


@pytest.mark.parametrize("mode", ["always", "never"])
def test_many_under_way(comm, mode):
    """And a source that is written again as soon as its exchange is done."""
    with opened(comm, mode) as ranks:
        me, n = ranks.rank, ranks.size
        plan = rows_to_columns(n, 3 * n, 5 * n)
        numbers = np.arange(15 * n * n).reshape(3 * n, 5 * n)
        for memory in MEMORIES:
            source = lying(np.zeros((3, 5 * n), int), memory, ranks)
            for number in range(30):
                source[...] = numbers[3 * me : 3 * me + 3] + number
                targets = [np.zeros((3 * n, 5), int) for _ in range(3)]
                requests = [start(ranks, source, target, plan[me]) for target in targets]
                total = np.array([1])
                requests.append(ranks.all_reduce(None, total, "sum"))
                done(ranks, *requests[::-1])
                assert total[0] == n
                source[...] = -1
                for target in targets:
                    assert np.array_equal(target, numbers[:, 5 * me : 5 * me + 5] + number)


@pytest.mark.nprocs(2, 3, 4, 8)
def test_what_is_kept_does_not_keep_arrays(comm):
    with opened(comm) as ranks:
        me, n = ranks.rank, ranks.size
        plan = rows_to_columns(n, 40 * n, 40 * n)
        gc.collect()
        before = node_of(0).arena.used_bytes
        copies = 2 * 8 * 40 * 40 * n  # of small blocks: this one's, and the last one's
        for _ in range(3):
            source = lying(np.ones((40, 40 * n)), "shared", ranks)
            target = lying(np.zeros((40 * n, 40)), "shared", ranks)
            for _ in range(2):
                target[...] = 0
                request = start(ranks, source, target, plan[me])
                done(ranks, request)
                assert np.all(target == 1)
            del source, target  # the last request is still there
            gc.collect()
            assert node_of(0).arena.used_bytes <= before + copies


@pytest.mark.nprocs(2, 3, 4, 8)
def test_dtypes_and_blocks_that_differ(comm):
    with opened(comm) as ranks:
        me, n = ranks.rank, ranks.size
        plan = rows_to_columns(n, n, n)
        dtype = "f8" if me else "i8"
        wrong = start(ranks, np.ones((1, n), dtype), np.zeros((n, 1), dtype), plan[me])
        with raises(MismatchError, "rank 0: i8", f"rank {me or 1}: f8"):
            done(ranks, wrong)
        # Rank 0's block is larger than the others think; it knows how large they take it for.
        plan0 = Regions(plan[0].takes[1:], plan[0].gives)
        wrong = start(
            ranks, np.ones((2 - (me > 0), n)), np.zeros((n, 1)), plan[me] if me else plan0
        )
        if me:
            with raises(MismatchError, f"rank {me}", (1, n), "rank 0", 8 * n, 16 * n):
                done(ranks, wrong)
        else:
            done(ranks, wrong)
        target = np.zeros((n, 1))
        done(ranks, start(ranks, np.full((1, n), me + 0.5), target, plan[me]))
        assert target[:, 0].tolist() == [r + 0.5 for r in range(n)]


@pytest.mark.nprocs(2, 3, 4, 8)
def test_what_is_unfinished_when_a_communicator_ends_is_given_up(comm):
    with opened(comm) as ranks:
        me, n = ranks.rank, ranks.size
        plan = rows_to_columns(n, n, n)
        request = None
        if me:
            source = lying(np.ones((1, n)), "shared", ranks)
            request = start(ranks, source, np.zeros((n, 1)), plan[me])
            assert not request.test()
    if request is not None:
        with raises(ClosedError, "given up"):
            done(ranks, request)


@pytest.mark.nprocs(2, 3, 4, 8)
def test_messages_where_they_are_asked_for(comm, monkeypatch):
    with opened(comm) as ranks:
        assert ranks.force("mpi") == ""
        sent = []
        real = region_messages.MessageExchange._send

        def noted(*arguments):
            sent.append(arguments)
            return real(*arguments)

        monkeypatch.setattr(region_messages.MessageExchange, "_send", noted)
        for seed in range(3):
            check(ranks, seed, "f8", "shared")
        assert sent


def test_sums_have_the_same_bits_whichever_way(comm):
    """Whatever the order in which parts come."""
    n = comm.size
    box = ((0, 5000),)
    order = [*range(n - 1, -1, -1), 0]
    take = Take(box, tuple(Part(r, (5000,), box) for r in order), "sum")
    gives = gives_of([[take]] * n)
    values = np.random.default_rng(3).standard_normal((n, 5000))
    values *= 10.0 ** np.random.default_rng(4).integers(-6, 6, (n, 5000))
    total = values[order[0]].copy()
    for rank in order[1:]:
        total = total + values[rank]
    for mode in ("always", "never"):
        for node_ranks in (0, 2):
            with opened(comm, mode, node_ranks=node_ranks) as ranks:
                regions = Regions((take,), tuple(gives[ranks.rank]))
                for max_bytes in (0, 3000):
                    for memory in MEMORIES:
                        source = lying(values[ranks.rank], memory, ranks)
                        target = np.zeros(5000)
                        done(ranks, start(ranks, source, target, regions, max_bytes))
                        assert target.tobytes() == total.tobytes()


@pytest.mark.parametrize("nodes", deep_but([None, *NODES], None, "one apart"))
@pytest.mark.parametrize("memory", deep_but(MEMORIES, "mixed"))
def test_what_nobody_takes_of_may_be_taken_into(comm, memory, nodes):
    """One array is source and target, in shared memory and by messages, many times over."""
    n, me = comm.size, comm.rank
    regions = ring(n, 3, 50)[me]
    part = NODES[nodes](me, n) if nodes else 0
    for mode in ("always", "never"):
        with opened(comm, mode, part=part) as ranks:
            array = lying(np.zeros((5, 50)), memory, ranks)
            for step in range(1, 20):
                array[1:-1] = 100 * step + 10 * me + np.arange(1, 4)[:, None]
                done(ranks, start(ranks, array, array, regions, (0, 100)[step % 2]))
                assert (array[0] == 100 * step + 10 * ((me - 1) % n) + 3).all()
                assert (array[4] == 100 * step + 10 * ((me + 1) % n) + 1).all()
                assert (array[2] == 100 * step + 10 * me + 2).all()
