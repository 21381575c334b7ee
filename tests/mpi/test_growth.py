"""A rank's memory and open files do not grow with the number of operations, handles and meshes."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm

pytestmark = [pytest.mark.deep, pytest.mark.nprocs(2)]

_MORE_BYTES = 6 << 20
"""What the allocator, MPI and the interpreter may take meanwhile."""


def used() -> tuple[int, int]:
    """Return the bytes of this process in memory, and how many files it has open."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), len([*Path("/proc/self/fd").iterdir()])


def grows_by(part: Callable[[], None], times: int) -> tuple[int, int]:
    """Return by how much both have grown from the fifth part of the times to the end."""
    for _ in range(times // 5):
        part()
    before = used()
    for _ in range(times - times // 5):
        part()
    after = used()
    return after[0] - before[0], after[1] - before[1]


def check(comm, growth: tuple[int, int]) -> None:
    for nbytes, files in comm.allgather(growth):
        assert nbytes < _MORE_BYTES
        assert files <= 0


@pytest.mark.parametrize("planned", [False, True])
def test_a_million_starts(comm, planned, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    with mm.DeviceMesh("a=-1", comm) as mesh:
        group, x = mesh.group(), np.ones(1)
        plan = group.all_reduce_init(x, "max", out=x)
        start = plan.start if planned else lambda: group.all_reduce(x, "max", out=x)

        def thousand() -> None:
            for _ in range(1000):
                start().resolve()

        growth = grows_by(thousand, 1000)
        assert x[0] == 1
    check(comm, growth)


def test_a_hundred_thousand_handles(comm, monkeypatch):
    """A thousand under way at a time, resolved last first, some of arrays that go in pieces."""
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    with mm.DeviceMesh("a=-1", comm) as mesh:
        group = mesh.group()
        arrays = [np.full(size, 2.0) for size in (1, 100, 2000)] * 333 + [np.full(40_000, 2.0)]

        def thousand() -> None:
            handles = [group.all_reduce(x) for x in arrays]
            for handle in reversed(handles):
                assert handle.resolve()[-1] == 2.0 * comm.size

        growth = grows_by(thousand, 100)
    check(comm, growth)


def test_two_thousand_meshes(comm):
    def mesh_and_use() -> None:
        with mm.DeviceMesh("a=1,b=-1", comm) as mesh:
            assert mesh.group("b").all_reduce(np.ones(2)).resolve()[0] == comm.size

    check(comm, grows_by(mesh_and_use, 2000))


def test_virtual_ranks(comm):
    """On the first rank alone; the other waits without looking, for they share the cores."""

    def main() -> None:
        with mm.DeviceMesh("a=-1") as mesh:
            group = mesh.group()
            for n in (1, 1000, 100_000):
                assert group.all_reduce(np.ones(n)).resolve()[0] == 3

    def teams() -> None:
        for _ in range(10):
            mm.run_virtual(3, main)

    def meshes() -> None:
        for _ in range(100):
            main()

    growths = []
    if comm.rank == 0:
        # The less of two: what the allocator takes once, for the threads of a part, is not growth.
        growths = [min(grows_by(teams, 20), grows_by(teams, 20))]
        growths += mm.run_virtual(3, lambda: min(grows_by(meshes, 5), grows_by(meshes, 5)))
    for nbytes, files in comm.bcast(growths):
        assert nbytes < 4 * _MORE_BYTES  # each thread has memory of its own from the allocator
        assert files <= 0
