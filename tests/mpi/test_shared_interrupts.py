"""Signals in the middle of an operation in shared memory, and what people do after an error."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.comm import shared_collectives
from mpimesh.comm.shared_work import do_at_once, reduce_into
from mpimesh.errors import DTypeError, MismatchError
from tests.helpers.depth import deep, deep_but
from tests.helpers.raises import raises

SIZE = 200_000


@pytest.fixture(autouse=True)
def _shared(monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    monkeypatch.setenv("MPIMESH_CHECKS", "0")


@pytest.mark.parametrize("after", [*deep(False), True], ids=["before the work", "after the work"])
@pytest.mark.parametrize("number", deep_but(range(1, 6), 1, 4))
@pytest.mark.parametrize("kind", ["shared", "ordinary"])
def test_an_interrupted_test_goes_on_where_it_was(comm, monkeypatch, kind, number, after):
    """As Ctrl-C or a handler's exception does, but at a place that is the same in each run."""
    if comm.size == 1:
        return
    calls = 0

    def interrupted(work):
        def instead(*arguments):
            nonlocal calls
            calls += 1
            if calls == number and not after:
                raise KeyboardInterrupt
            work(*arguments)
            if calls == number:
                raise KeyboardInterrupt

        return instead

    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        size = SIZE if kind == "shared" else 4000
        x = mesh.shared_empty(size) if kind == "shared" else np.empty(size)
        x[...] = mesh.rank + 1
        mesh.barrier()
        if mesh.rank == 0:
            monkeypatch.setattr(shared_collectives, "reduce_into", interrupted(reduce_into))
            monkeypatch.setattr(shared_collectives, "do_at_once", interrupted(do_at_once))
        handle = None
        try:
            handle = group.all_reduce(x, out=x)
            handle.resolve()
        except KeyboardInterrupt:
            pass
        if handle is not None:
            assert handle.resolve() is x
        monkeypatch.undo()
        # An interrupted start gives no handle, but the operation goes on: the next one is in step.
        y = mesh.shared_empty(SIZE)
        y[...] = 1
        group.all_reduce(y, out=y).resolve()
        assert (y == comm.size).all()
        assert (x == sum(range(1, comm.size + 1))).all()


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
