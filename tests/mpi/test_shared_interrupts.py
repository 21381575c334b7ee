"""Signals in the middle of an operation in shared memory, and what people do after an error."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DTypeError, MismatchError
from tests.helpers.depth import deep
from tests.helpers.raises import raises

SIZE = 200_000


@pytest.fixture(autouse=True)
def _shared(monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    monkeypatch.setenv("MPIMESH_CHECKS", "0")


@pytest.mark.parametrize("kind", ["shared", "ordinary"])
def test_an_interrupted_wait_goes_on_where_it_was(comm, kind):
    """A handler's exception may come anywhere in the waits of one rank."""
    if comm.size == 1:
        return
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        size = SIZE if kind == "shared" else 4000
        x = mesh.shared_empty(size) if kind == "shared" else np.empty(size)
        rng = np.random.default_rng(7)
        for _ in range(20):
            x[...] = mesh.rank + 1
            group.barrier()
            delay_s, late_s = rng.uniform(2e-5, 3e-3, 2)
            if mesh.rank:
                time.sleep(late_s)
                group.all_reduce(x, out=x).resolve()
            else:
                assert interrupted_all_reduce(group, x, delay_s) is x
            # An interrupted start gives no handle, but the next one is in step all the same.
            y = mesh.shared_empty(SIZE)
            y[...] = 1
            group.all_reduce(y, out=y).resolve()
            assert (y == comm.size).all()
            assert (x == sum(range(1, comm.size + 1))).all()


class Bang(Exception):
    """What the handler raises; one class, for Python code that collects classes would drop it."""


def interrupted_all_reduce(group, x, delay_s):
    """Reduce `x` in place while a signal's handler raises after a while; return the result."""

    def handle(number, frame):
        raise Bang

    before = signal.signal(signal.SIGALRM, handle)
    handle_of_x = group.all_reduce(x, out=x)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        handle_of_x.resolve()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Bang:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return handle_of_x.resolve()


def test_a_mesh_closes_after_a_mismatch_that_was_caught(comm):
    if comm.size == 1:
        return
    for size in (1000, 300_000):
        mesh = mm.DeviceMesh("dp=-1", comm)
        # Of three ranks and more it names those that have started when it is found.
        own = f"rank {mesh.rank}: all_reduce(shape ({size + mesh.rank},)"
        both = (f"rank {k}: all_reduce(shape ({size + k},)" for k in range(2))
        with raises(MismatchError, *(both if comm.size == 2 else [own])):
            mesh.group().all_reduce(np.ones(size + mesh.rank)).resolve()
        mesh.close()


@pytest.mark.parametrize("order", [*deep("<"), ">"])
@pytest.mark.parametrize("size", [4, 3000, 300_000])
def test_a_mean_of_either_byte_order(comm, order, size):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        x = np.arange(float(size)).astype(f"{order}f8") + mesh.rank
        x = x.astype(f"{order}f8")
        expected = np.arange(float(size)) + (comm.size - 1) / 2
        for given in (x, x[::-1][::-1]):
            result = group.all_reduce(given, "mean").resolve()
            assert result.dtype == x.dtype
            assert np.allclose(result, expected)
        mixed = np.ones(size, "f8" if mesh.rank % 2 else f"{order}f8")
        assert (group.all_reduce(mixed, "mean").resolve() == 1).all()
        assert (group.all_reduce(np.ones(size)).resolve() == comm.size).all()


def test_an_array_of_a_closed_mesh_keeps_its_values(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        table, writes = mesh.group().empty_once(1 << 16)
        if writes:
            table[...] = 7
        mesh.barrier()
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        other = mesh.shared_empty(1 << 16)
        other[...] = 1
        mesh.barrier()
        assert (table == 7).all()
        assert (other == 1).all()
        mesh.barrier()


def test_elements_without_bytes(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        dtypes: Any = ("S0", "U0", "V0")
        for dtype in dtypes:
            with raises(DTypeError, np.dtype(dtype), "no bytes"):
                mesh.shared_empty(3, dtype)
            with raises(DTypeError, np.dtype(dtype), "no bytes"):
                mesh.group().empty_once(3, dtype)
        with raises(MemoryError, (1 << 20, 1 << 24), "float64", "131072.0 GiB"):
            mesh.shared_empty((1 << 20, 1 << 24))


def test_a_rank_far_ahead_keeps_what_the_others_have_not_read(comm, monkeypatch):
    """More operations at once than a board has notes, of which one rank has no part."""
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "auto")
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group, last = mesh.group(), comm.size - 1
        x = mesh.shared_empty(1 << 19 if comm.rank == last and last else 0)
        x[...] = 7
        sizes = [0] * last + [x.size]
        if comm.rank == last:
            time.sleep(0.3)
        handles = [group.all_to_all(x, sizes=sizes, recv_sizes=sizes) for _ in range(70)]
        for handle in handles:
            assert (handle.resolve() == 7).all()
