"""In an exchange of regions a rank waits for those whose blocks it reads, and for no others."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from mpimesh.comm import routed
from mpimesh.layout import Part, Regions, Take
from tests.contract.regions import gives_of, ring
from tests.contract.shared_memory import done, opened, put

AHEAD = 4
"""Exchanges by which a rank may be ahead of any other."""

SIZES = {"packed": 50, "a piece": 3000, "in place": 20_000}
"""What is given is copied first, or read where it lies."""


@pytest.fixture
def ranks(comm):
    with opened(comm) as ranks:
        yield ranks


def chain(ranks, size):
    """Return the exchange in which each rank takes the block of the one before it."""
    box = ((0, size),)
    takes = [[Take(box, (Part(r - 1, (size,), box),))] if r else [] for r in range(ranks)]
    return [Regions(tuple(t), tuple(g)) for t, g in zip(takes, gives_of(takes), strict=True)]


def pairs(ranks, size):
    """Return the exchange in which ranks 0 and 1, 2 and 3, and so on swap their blocks."""
    box = ((0, size),)
    takes = [
        [Take(box, (Part(r ^ 1, (size,), box),))] if r ^ 1 < ranks else [] for r in range(ranks)
    ]
    return [Regions(tuple(t), tuple(g)) for t, g in zip(takes, gives_of(takes), strict=True)]


@pytest.mark.nprocs(3, 4, 8)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_late_rank_that_is_no_neighbour_delays_nobody(comm, ranks, size):
    me = ranks.rank
    regions = pairs(ranks.size, size)[me]
    source = put(np.full(size, float(me)), "shared", ranks)
    target = put(np.zeros(size), "shared", ranks)
    if me == 2:
        # So late that it comes when the first pair is done, or never.
        for first in (0, 1):
            comm.recv(source=first)
    for number in range(AHEAD):
        source[...] = 100 * number + me
        done(ranks, ranks.exchange_regions(source, target, regions))
        if me ^ 1 < ranks.size:
            assert np.all(target == 100 * number + (me ^ 1))
    if me < 2:
        comm.send("done", 2)


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("memory", ["ordinary", "shared"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_block_is_written_again_when_its_readers_are_through(comm, ranks, size, memory):
    """And no earlier: the ranks dawdle anywhere."""
    slow = random.Random(comm.rank)
    me, n = ranks.rank, ranks.size
    regions = ring(n, 3, size)[me]
    array = put(np.zeros(5 * size), memory, ranks).reshape(5, size)
    for step in range(1, 100):
        array[1:-1] = 100 * step + 10 * me + np.arange(1, 4)[:, None]
        if slow.random() < 0.1:
            time.sleep(slow.random() * 2e-3)
        request = ranks.exchange_regions(array, array, regions)
        if slow.random() < 0.1:
            time.sleep(slow.random() * 2e-3)
        done(ranks, request)
        array[1:-1] = -1
        assert (array[0] == 100 * step + 10 * ((me - 1) % n) + 3).all()
        assert (array[4] == 100 * step + 10 * ((me + 1) % n) + 1).all()


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_rank_that_reads_nobody_runs_ahead_and_not_too_far(comm, ranks, size):
    """Its words and copies stay until the slowest has read them."""
    me, n = ranks.rank, ranks.size
    regions = chain(n, size)[me]
    source = put(np.zeros(size), "shared", ranks)
    target = put(np.zeros(size), "shared", ranks)
    for step in range(100):
        source[...] = 10 * step + me
        request = ranks.exchange_regions(source, target, regions)
        if me == n - 1 and step % 30 == 0:
            time.sleep(0.02)
        done(ranks, request)
        source[...] = -1
        if me:
            assert (target == 10 * step + me - 1).all()
    total = put(np.ones(100_000), "shared", ranks)
    done(ranks, ranks.all_reduce(None, total, "sum"))
    assert (total == n).all()


@pytest.mark.nprocs(2, 3)
def test_a_copy_outlives_the_communicator_of_its_rank(comm, monkeypatch):
    """A rank has left, and uses its memory again, when another one reads what it has given."""
    monkeypatch.setattr(routed, "_LEAVE_TOGETHER_S", 0.01)
    size = 5000
    with opened(comm) as ranks:
        me, n = ranks.rank, ranks.size
        regions = chain(n, size)[me]
        source = put(np.full(size, me + 1.0), "shared", ranks)
        target = put(np.zeros(size), "shared", ranks)
        if me:
            comm.recv(source=me - 1)
        done(ranks, ranks.exchange_regions(source, target, regions))
        arena = ranks._node.arena
        if me:
            assert (target == me).all()
    if me + 1 < n:
        others = [arena.empty(source.nbytes) for _ in range(20)]
        for other in others:
            other[...] = 255
        comm.send("I have left", me + 1)
