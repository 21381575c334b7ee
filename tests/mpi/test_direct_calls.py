"""Calls like earlier ones, which compiled code starts: what they must not lose on their way."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ClosedError, MismatchError, OutOfMemoryError, ShapeError
from mpimesh.runtime.group_core import GroupCore
from tests.helpers.raises import raises


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")


def test_a_closed_group_starts_nothing_though_its_ranks_have_another(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.add_group("same", range(comm.size))
        for _ in range(3):
            assert group.all_reduce(np.ones(3)).resolve()[0] == comm.size
        group.close()
        with raises(ClosedError, "same", "closed"):
            group.all_reduce(np.ones(3))
        assert mesh.group("dp").all_reduce(np.ones(3)).resolve()[0] == comm.size
    with raises(ClosedError, "closed"):
        mesh.group("dp").all_reduce(np.ones(3))


def test_memory_that_is_lacking_is_told_as_in_the_first_call(comm, monkeypatch):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group("dp")
        x = np.ones(5000)  # less comes from NumPy
        for _ in range(2):
            group.all_reduce(x).resolve()

        def lacking(core, *arguments):
            raise MemoryError("none is left")

        monkeypatch.setattr(GroupCore, "empty", lacking)
        with raises(OutOfMemoryError, "all_reduce", "none is left"):
            group.all_reduce(x)
        monkeypatch.undo()
        assert group.all_reduce(x).resolve()[0] == comm.size


@pytest.mark.nprocs(2, 3, 4)
def test_a_mismatch_of_calls_like_earlier_ones_is_raised_by_every_rank(comm):
    mesh = mm.DeviceMesh("dp=-1", comm)
    group = mesh.group("dp")
    for size in (3, 4, 3, 4):
        group.all_reduce(np.ones(size)).resolve()
    comm.Barrier()
    handle = group.all_reduce(np.ones(3 if mesh.rank else 4))
    with raises(MismatchError, "different"):
        handle.resolve()
    assert handle.done()
    mesh.close()


def test_results_overlap_nothing_and_arrays_are_let_go(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group("dp")
        memory = np.arange(20.0)
        for _ in range(3):
            before = memory[:10].copy()
            group.all_reduce(memory[:10], out=memory[5:15]).resolve()
            assert np.array_equal(memory[5:15], before * comm.size)
        for size in (10, 40_000, 400_000):
            for _ in range(3):
                x = np.ones(size)
                alive = weakref.ref(x)
                group.all_reduce(x).resolve()
                del x
                gc.collect()
                assert alive() is None, size


def test_handles_of_direct_calls_warn_when_dropped_and_are_listed(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group("dp")
        for _ in range(3):
            group.all_reduce(np.ones(3)).resolve()
        call = r"all_reduce\(shape \(3,\), float64, sum\)"
        with pytest.warns(mm.errors.UnresolvedWarning, match=call):
            group.all_reduce(np.ones(3))
        with raises(mm.errors.UnresolvedError, "all_reduce", "test_direct_calls.py"):
            mesh.close()
        for work in mesh._core.context.open_work.all():
            assert work.resolve()[0] == comm.size
        assert len(mesh._core.context.open_work) == 0


@pytest.mark.parametrize("name", ["reduce", "gather"])
def test_an_array_that_cannot_be_written_is_refused_also_where_no_result_comes(comm, name):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group, root = mesh.group("dp"), comm.size - 1
        start = getattr(group, name)
        for _ in range(2):
            start(np.ones(3), root=root).resolve()
        shape = (3,) if name == "reduce" else (3 * comm.size,)
        for out in (np.broadcast_to(np.ones(1), shape), np.zeros(shape)):
            out.flags.writeable = False
            with raises(ShapeError, "out is read-only"):
                start(np.ones(3), root=root, out=out)
        together = np.lib.stride_tricks.as_strided(np.zeros(shape), shape, [0])
        with raises(ShapeError, "share memory"):
            start(np.ones(3), root=root, out=together)
        start(np.ones(3), root=root, out=np.zeros(shape)).resolve()
