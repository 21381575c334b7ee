"""Collectives in shared memory: what they move and add up, against one process."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from mpimesh.errors import TransportError
from tests.contract.communicators import CHECKS
from tests.contract.shared_memory import MEMORIES, done, opened, put, reduced_in_order
from tests.helpers.depth import deep

DTYPES = ["f4", "f8", "i4", "D"]
# The smallest stage has 64 bytes for each rank, an ordinary one 256 KiB; pieces are of 128 KiB.
SMALL = [0, 1, 7, 63, 64, 65, 200, 513]
LARGE = [16383, 16385, 32768, 32769, 70001]


def sizes_for(limit, ranks):
    """All sizes; on many ranks, which share few cores, every second one."""
    return (SMALL if limit else LARGE)[:: 1 if ranks <= 4 else 2]


def numbers(rank, size, dtype, seed=0):
    """Values whose sum depends on the order in which they are added."""
    rng = np.random.default_rng([rank, size, seed])
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(size)
    return (values * (100 if np.dtype(dtype).kind in "iu" else 1)).astype(dtype)


def same_bytes(got, expected, what):
    assert got.dtype == expected.dtype, what
    assert got.tobytes() == expected.tobytes(), what


def uneven(size, ranks, seed):
    """Counts that add up to `size`, some of them 0."""
    cuts = np.sort(np.random.default_rng([size, ranks, seed]).integers(0, size + 1, ranks - 1))
    return np.diff([0, *cuts, size]).tolist()


def cases(limit, comm):
    """Yield the seeds, sizes, dtypes and inputs of all ranks."""
    for seed, size in enumerate(sizes_for(limit, comm.size)):
        for dtype in DTYPES if limit else DTYPES[seed % 2 :: 2]:
            yield seed, size, dtype, [numbers(r, size, dtype) for r in range(comm.size)]


@pytest.mark.parametrize("limit", [0, 7])
def test_all_reduce(comm, limit):
    with opened(comm, limit=limit) as ranks:
        me = ranks.rank
        for _, size, dtype, inputs in cases(limit, comm):
            expected = reduced_in_order(inputs, "sum")
            for memory in MEMORIES:
                what = (size, dtype, memory)
                x = put(inputs[me], memory, ranks)
                done(ranks, ranks.all_reduce(None, x, "sum"))
                same_bytes(x, expected, what)
                for target in (memory, "ordinary", "shared"):
                    x = put(inputs[me], memory, ranks)
                    y = put(np.zeros_like(x), target, ranks)
                    done(ranks, ranks.all_reduce(x, y, "sum"))
                    same_bytes(y, expected, (*what, target))
                    same_bytes(x, inputs[me], what)


@pytest.mark.parametrize("op", ["mean", "prod", "min", "max"])
def test_other_reductions(comm, op):
    dtypes = {"mean": "fdFD", "prod": "fdil", "min": "fdbBil", "max": "fdHQil"}[op]
    with opened(comm, limit=7) as ranks:
        me = ranks.rank
        for dtype in dtypes:
            for size in (1, 64, 333):
                inputs = [numbers(r, size, dtype) for r in range(comm.size)]
                expected = reduced_in_order(inputs, op)
                counts = uneven(size, comm.size, 1)
                begin = sum(counts[:me])
                for memory in MEMORIES:
                    if op != "mean" or ranks.averages(size * expected.itemsize):
                        x = put(inputs[me], memory, ranks)
                        done(ranks, ranks.all_reduce(None, x, op))
                        same_bytes(x, expected, (op, size, dtype, memory))
                    if op != "mean":
                        y = np.zeros(counts[me], dtype)
                        x = put(inputs[me], memory, ranks)
                        done(ranks, ranks.reduce_scatter(x, y, counts, op))
                        same_bytes(y, expected[begin : begin + counts[me]], (op, size, dtype))


def test_products_of_complex_numbers_are_alike_on_all_ranks(comm):
    """NumPy rounds them differently in place, so those of one process are not the same bits."""
    with opened(comm, limit=7) as ranks:
        for dtype, size in (("F", 333), ("D", 1), ("D", 333)):
            inputs = [numbers(r, size, dtype) for r in range(comm.size)]
            for memory in MEMORIES:
                x = put(inputs[ranks.rank], memory, ranks)
                done(ranks, ranks.all_reduce(None, x, "prod"))
                np.testing.assert_allclose(x, reduced_in_order(inputs, "prod"), rtol=1e-5)
                same_bytes(x, comm.bcast(x, 0), (dtype, size, memory))


def test_numbers_that_are_none_pass_silently(comm):
    special = np.array([np.inf, -np.inf, np.nan, 3e38, -0.0, 1e-45], "f4")
    inputs = [np.resize(np.roll(special, r), 300) for r in range(comm.size)]
    with opened(comm, limit=7) as ranks, np.errstate(all="raise"):
        for memory in MEMORIES:
            x = put(inputs[ranks.rank], memory, ranks)
            done(ranks, ranks.all_reduce(None, x, "sum"))
            np.testing.assert_array_equal(x, reduced_in_order(inputs, "sum"), memory)


@pytest.mark.parametrize("limit", [0, 7])
def test_reduce_scatter(comm, limit):
    with opened(comm, limit=limit) as ranks:
        me = ranks.rank
        for seed, size, dtype, inputs in cases(limit, comm):
            counts = uneven(size, comm.size, seed)
            begin = sum(counts[:me])
            expected = reduced_in_order(inputs, "sum")[begin : begin + counts[me]]
            for memory in MEMORIES:
                what = (size, dtype, memory, counts)
                x = put(inputs[me], memory, ranks)
                y = np.zeros(counts[me], dtype)
                done(ranks, ranks.reduce_scatter(x, y, counts, "sum"))
                same_bytes(y, expected, what)
                same_bytes(x, inputs[me], what)


@pytest.mark.parametrize("limit", [0, 7])
def test_all_gather_and_broadcast(comm, limit):
    with opened(comm, limit=limit) as ranks:
        me = ranks.rank
        for seed, size, dtype, inputs in cases(limit, comm):
            counts = uneven(size, comm.size, seed)
            starts = [0, *accumulate(counts)]
            for root, memory in enumerate(MEMORIES):
                what = (size, dtype, memory, counts)
                x = put(inputs[0][starts[me] : starts[me + 1]], memory, ranks)
                y = np.zeros(size, dtype)
                done(ranks, ranks.all_gather(x, y, counts))
                same_bytes(y, inputs[0], what)
                x = put(inputs[me], memory, ranks)
                done(ranks, ranks.broadcast(x, root % comm.size))
                same_bytes(x, inputs[root % comm.size], what)


@pytest.mark.parametrize("limit", [0, 7])
def test_all_to_all(comm, limit):
    with opened(comm, limit=limit) as ranks:
        me, n = ranks.rank, comm.size
        for seed, size, dtype, _ in cases(limit, comm):
            rng = np.random.default_rng([size, n])
            sent = rng.integers(0, 2 * size // n + 1, (n, n)) * rng.integers(0, 2, (n, n))
            inputs = [numbers(r, int(sent[r].sum()), dtype, seed) for r in range(n)]
            begins = [int(sent[r][:me].sum()) for r in range(n)]
            blocks = [inputs[r][begins[r] : begins[r] + sent[r][me]] for r in range(n)]
            for memory in MEMORIES:
                x = put(inputs[me], memory, ranks)
                y = np.zeros(int(sent[:, me].sum()), dtype)
                row, column = sent[me].tolist(), sent[:, me].tolist()
                done(ranks, ranks.all_to_all(x, y, row, column))
                same_bytes(y, np.concatenate(blocks), (size, dtype, memory, sent))


@pytest.mark.parametrize("limit", [0, 7])
def test_many_under_way_are_resolved_last_first(comm, limit):
    with opened(comm, limit=limit) as ranks:
        me, n = ranks.rank, comm.size
        for size in (1, 33, 300) if limit else (1, 1000, 40_000):
            counts = uneven(size, n, 0)
            inputs = [np.arange(size) * (r + 1) for r in range(n)]
            total = np.sum(inputs, axis=0)
            begin = sum(counts[:me])
            block = slice(begin, begin + counts[me])
            for memory in ("mixed", "ordinary", "shared"):
                x, own = put(inputs[me], memory, ranks), np.zeros(counts[me], int)
                whole, square = np.zeros(size, int), np.zeros(n * (size // n), int)
                even = [size // n] * n
                one, other = put(inputs[me], memory, ranks), put(inputs[me], memory, ranks)
                requests = [
                    ranks.all_reduce(x, whole, "sum"),
                    ranks.reduce_scatter(x, own, counts, "sum"),
                    ranks.all_to_all(x[: square.size], square, even, even),
                    ranks.broadcast(one, n - 1),
                    ranks.all_reduce(None, other, "sum"),
                ]
                done(ranks, *requests[::-1])
                assert np.array_equal(whole, total), (size, memory)
                assert np.array_equal(other, total), (size, memory)
                assert np.array_equal(own, total[block])
                assert np.array_equal(one, inputs[n - 1])
                mine = slice(me * even[0], (me + 1) * even[0])
                assert np.array_equal(square, np.concatenate([one[mine] for one in inputs]))
                done(ranks, ranks.all_gather(put(total[block], memory, ranks), whole, counts))
                assert np.array_equal(whole, total)


@pytest.mark.nprocs(1, 2, 3, 4)
@pytest.mark.parametrize(("node_ranks", "limit"), [*deep((0, 0)), (2, 7)])
@pytest.mark.parametrize("name", CHECKS)
def test_contract(name, node_ranks, limit, comm):
    with opened(comm, limit=limit, node_ranks=node_ranks) as ranks:
        CHECKS[name](ranks)


def test_arrays_that_do_not_fit_are_refused_before_anything_starts(comm):
    """Of the right one nothing is lost: no memory beyond an array is read or written."""
    with opened(comm) as ranks:
        n, me, zeros = comm.size, ranks.rank, np.zeros
        if n == 1:
            return
        three, rest = [3] * n, zeros(3 * n)
        wrong = [
            lambda: ranks.all_reduce(zeros(3), zeros(4), "sum"),
            lambda: ranks.all_reduce(zeros(3), zeros(3), "xor"),
            lambda: ranks.all_gather(zeros(3), rest[1:], three),
            lambda: ranks.all_gather(zeros(2), rest, three),
            lambda: ranks.all_gather(zeros(3), rest, [*three, 3]),
            lambda: ranks.reduce_scatter(rest, zeros(2), three, "sum"),
            lambda: ranks.reduce_scatter(rest[1:], zeros(3), three, "sum"),
            lambda: ranks.scatter(None, zeros(3), three, me),
            lambda: ranks.gather(zeros(3), None, three, me),
            lambda: ranks.gather(zeros(3), zeros(3), three, me),
            lambda: ranks.all_to_all(zeros(2 * n), zeros(2 * n), [2] * n, three),
            lambda: ranks.broadcast(zeros(3), n),
            lambda: ranks.reduce(zeros(3), None, "sum", me),
            lambda: ranks.reduce(zeros(3), zeros(3, "f4"), "sum", me),
            lambda: ranks.all_reduce(None, zeros((3, 2)).T, "sum"),
        ]
        for call in wrong:
            with pytest.raises(TransportError):
                call()
        x = np.ones(3)
        done(ranks, ranks.all_reduce(None, x, "sum"))
        assert (x == n).all()
