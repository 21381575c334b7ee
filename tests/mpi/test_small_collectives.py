"""Small collectives of plain arrays give what those of any others do, and leave nothing behind."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ShapeError
from tests.helpers.raises import raises

WAYS = {
    "all_reduce": lambda g, x, **o: g.all_reduce(x, **o),
    "reduce_scatter": lambda g, x, **o: g.reduce_scatter(x, **o),
    "all_gather": lambda g, x, **o: g.all_gather(x, **o),
    "all_to_all": lambda g, x, **o: g.all_to_all(x, **o),
    "broadcast": lambda g, x, **o: g.broadcast(x, root=g.size - 1, **o),
}


def expected(name, inputs, rank):
    size = len(inputs)
    return {
        "all_reduce": lambda: sum(inputs),
        "reduce_scatter": lambda: np.split(sum(inputs), size)[rank],
        "all_gather": lambda: np.concatenate(inputs),
        "all_to_all": lambda: np.concatenate([np.split(x, size)[rank] for x in inputs]),
        "broadcast": lambda: inputs[size - 1],
    }[name]()


def input_of(rank, size, columns, dtype, seed):
    return (
        (np.arange(12 * size * columns) % 97 + 100 * rank + seed).astype(dtype).reshape(-1, columns)
    )


@pytest.fixture
def mesh(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        yield mesh


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("memory", ["shared", "ordinary"])
def test_arrays_that_come_back_in_other_hands(mesh, name, memory):
    """The same memory with another shape, dtype and content each time: nothing old is used."""
    group = mesh.group()
    for turn, (columns, dtype) in enumerate(
        [(1, "f8"), (2, "f4"), (1, "f8"), (2, "i4"), (300, "f8")]
    ):
        for again in range(3):
            inputs = [input_of(r, group.size, columns, dtype, turn + again) for r in group.ranks]
            mine = inputs[group.rank]
            right = expected(name, inputs, group.rank)
            if memory == "shared":
                x, out = mesh.shared_empty(mine.shape, dtype), mesh.shared_empty(right.shape, dtype)
                x[...] = mine
            else:
                x, out = mine.copy(), np.empty_like(right)
            options = {} if name in ("broadcast", "all_reduce") else {"out": out}
            if name == "broadcast":
                options = {"out": x}
            got = WAYS[name](group, x, **options).resolve()
            np.testing.assert_array_equal(got, right)
            assert got.dtype == right.dtype
            if "out" in options:
                assert got is options["out"]
            # Others may still read what lay in shared memory no more: it goes back here.
            del x, out, got


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_unfinished_after_it(mesh, name):
    group = mesh.group()
    x = mesh.shared_empty((4 * group.size, 700))
    x[...] = 1
    for _ in range(3):
        WAYS[name](group, x).resolve()
        assert not group._core.progress.pending


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_a_result_over_the_input(mesh, name):
    """`out` that shares memory with the input: as if it did not."""
    group = mesh.group()
    size, me = group.size, group.rank
    memory = np.zeros(4 * size * size)
    inputs = [np.arange(2.0 * size) + 10 * r for r in range(size)]
    right = expected(name, inputs, me)
    x = memory[1 : 1 + 2 * size]
    x[...] = inputs[me]
    out = memory[2 : 2 + right.size]
    got = WAYS[name](group, x, out=out).resolve()
    np.testing.assert_array_equal(got, right)


def test_unusual_axes_and_roots(mesh):
    group = mesh.group()
    x = np.arange(2.0 * group.size)
    whole = np.concatenate([x] * group.size)
    for axis in (np.int64(0), -1, False):
        np.testing.assert_array_equal(group.all_gather(x, axis=axis).resolve(), whole)
    for wrong in (1, 0.5, None, np.zeros(2), "0"):
        for name in ("all_gather", "reduce_scatter"):
            with raises(ShapeError, "axis", repr(wrong)):
                getattr(group, name)(x, axis=wrong)
        with raises(ShapeError, "split_axis", repr(wrong)):
            group.all_to_all(x, split_axis=wrong)
    np.testing.assert_array_equal(group.broadcast(x, root=np.int64(0)).resolve(), x)
    fixed = x.copy()
    fixed.flags.writeable = False
    with raises(ShapeError, "out", "read-only"):
        group.broadcast(fixed, out=fixed)


def test_sums_overflow_in_silence_and_no_others(mesh):
    group = mesh.group()
    if group.size == 1:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (8, 5000, 200_000):
            for x in (np.full(size, 1e308), mesh.shared_empty(size)):
                x[...] = 1e308
                assert np.isinf(group.all_reduce(x, out=x).resolve()).all()
                assert np.geterr()["over"] == "warn"
        with raises(RuntimeWarning, "overflow"):
            np.add(np.float64(1e308), np.full(1, 1e308))


def test_a_rank_knows_whether_it_has_a_core(mesh, comm):
    cores = set().union(*comm.allgather(os.sched_getaffinity(0)))
    if comm.size > 1:
        assert mesh.group()._core.progress.has_core == (comm.size <= len(cores))
