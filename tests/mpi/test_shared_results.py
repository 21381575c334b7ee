"""Results of operands in shared memory lie there, too, and go as soon as nobody has them."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.runtime.world import current_world

SIZE = 24_000


@pytest.fixture(autouse=True)
def _shared(monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    monkeypatch.setenv("MPIMESH_CHECKS", "0")


def results(group, x, n):
    """Each collective that makes a new array of `x`, and what NumPy makes of all ranks' arrays."""
    part = x.size // n
    every = [np.arange(x.size) % 97 + r for r in range(n)]
    total = np.sum(every, axis=0)
    own = slice(group.rank * part, (group.rank + 1) * part)
    return {
        "all_reduce": (lambda: group.all_reduce(x), total),
        "mean": (lambda: group.all_reduce(x, "mean"), total / n),
        "max": (lambda: group.all_reduce(x, "max"), np.max(every, axis=0)),
        "reduce_scatter": (lambda: group.reduce_scatter(x), total[own]),
        "all_gather": (lambda: group.all_gather(x), np.concatenate(every)),
        "all_to_all": (lambda: group.all_to_all(x), np.concatenate([one[own] for one in every])),
    }


@pytest.mark.nprocs(2, 3, 4)
def test_what_shared_operands_make_is_shared(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group, n = mesh.group(), comm.size
        x = mesh.shared_empty(SIZE)
        x[...] = np.arange(SIZE) % 97 + mesh.rank
        for name, (start, expected) in results(group, x, n).items():
            result = start().resolve()
            assert np.array_equal(result, expected), name
            assert current_world().is_shared(result), name
        # Of an ordinary array an ordinary one, as is a small result; also where ranks mix both.
        ordinary = x.copy()
        assert not current_world().is_shared(group.all_reduce(ordinary).resolve())
        assert not current_world().is_shared(group.all_reduce(x[:10]).resolve())
        mixed = group.all_reduce(x if mesh.rank % 2 else ordinary).resolve()
        assert np.array_equal(mixed, results(group, x, n)["all_reduce"][1])


@pytest.mark.nprocs(2, 3, 4)
@pytest.mark.parametrize("way", ["plain", "out", "planned"])
def test_arrays_are_let_go_without_the_collector(comm, way):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group, node = mesh.group(), current_world().node
        assert node is not None
        assert node.arena is not None
        gc.collect()
        gc.disable()
        try:
            used = []
            for _ in range(12):
                x = mesh.shared_empty(SIZE)
                x[...] = 1
                if way == "planned":
                    planned = group.all_reduce_init(x, out=x)
                    for _ in range(3):
                        planned.start().resolve()
                    del planned
                else:
                    group.all_reduce(x, out=x if way == "out" else None).resolve()
                del x
                used.append(node.arena.used_bytes)
            assert used[2:] == used[2:3] * 10
        finally:
            gc.enable()


@pytest.mark.nprocs(2)
def test_a_long_wait_keeps_its_arrays_no_longer(comm):
    """The watchdog, a thread that looks at the wait now and then, does not hold on to it."""
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        gc.disable()
        try:
            for _ in range(3):
                x = np.ones(1000)
                alive = weakref.ref(x)
                if mesh.rank:
                    time.sleep(0.6)  # more than the watchdog's time between two looks
                group.all_reduce(x, out=x).resolve()
                del x
                until_s = time.monotonic() + 0.1  # it may be in the middle of a look
                while alive() is not None and time.monotonic() < until_s:
                    time.sleep(0.001)
                assert alive() is None
        finally:
            gc.enable()
