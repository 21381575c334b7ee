"""Groups that come and go, by far more than an MPI has communicators."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm
from tests.contract.closing import messages_that_nobody_received

GROUPS = {2: 3000, 4: 2100}
"""More than the 2,046 communicators that MPICH has, by the number of ranks."""

MOST = 10_000


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_and_drop(mesh, number):
    """Make a group, of another kind each time, use it now and then, and drop it."""
    n = mesh.world_size
    kind = number % 4
    if kind == 0:
        group = mesh.add_group("turned", range(n)[::-1])
    elif kind == 1:
        group = mesh.add_group(f"apart {number}", range(n), apart=True)
    elif kind == 2:
        group = mesh.add_group("first two", [1, 0])
    else:
        group = mesh.add_group("first two again", [1, 0], apart=True)
    if number % 16 < 4 and group.rank is not None:
        total = group.all_reduce(np.array([1 << mesh.rank])).resolve()
        assert total.tolist() == [sum(1 << rank for rank in group.ranks)]
    if number % 8 < 4 or group.rank is not None:
        group.close()


def churn(comm, count):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        world = mesh._core.context.world
        before = set(world.progress.ledgers)
        for number in range(64):
            make_and_drop(mesh, number)
        gc.collect()
        arena = None if world.node is None else world.node.arena
        used, resident = 0 if arena is None else arena.used_bytes, rss_bytes()
        start_s = time.perf_counter()
        for number in range(count):
            make_and_drop(mesh, number)
        took_s = time.perf_counter() - start_s
        gc.collect()
        mesh.add_group("last", [0]).close()
        assert set(world.progress.ledgers) == before
        assert mesh._core.groups is not None
        assert mesh.group_names == ["world", "x"]
        assert len(mesh._core.groups._families) <= 2
        grown = rss_bytes() - resident
        assert grown < 64 << 20
        if arena is not None:
            assert arena.used_bytes <= used + (1 << 20)
        if comm.rank == 0:
            print(
                f"{count} groups in {took_s:.2f} s, {took_s / count * 1e6:.0f} us each, "
                f"{grown / 1024:.0f} KiB more"
            )


@pytest.mark.nprocs(2, 4)
@pytest.mark.limit(60)
def test_more_groups_than_there_are_communicators(comm):
    churn(comm, GROUPS[comm.size])


@pytest.mark.deep
@pytest.mark.nprocs(2)
@pytest.mark.limit(180)
def test_b16_ten_thousand_groups(comm):
    churn(comm, MOST)


@pytest.mark.nprocs(2, 3, 4)
@pytest.mark.parametrize("checks", ["0", "1"])
def test_messages_that_nobody_received(comm, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    messages_that_nobody_received(comm)
