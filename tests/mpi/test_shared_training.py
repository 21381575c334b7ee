"""Training with gradients in shared memory: right, the same bits each time, and without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.nn import Constant, Parameter
from mpimesh.parallel import GradientBuckets
from mpimesh.runtime.world import current_world
from tests.contract.shared_memory import pieces_of
from tests.helpers.parallel_models import assert_same, train_alone, train_on

MESHES = {2: ["dp=2", "pp=2"], 4: ["dp=2,pp=2"], 8: ["dp=4,pp=2"]}


def bits(trained):
    arrays = [np.array(trained.losses), np.array(trained.norms), np.asarray(trained.outputs)]
    return [array.tobytes() for array in (*arrays, *trained.state.values())]


@pytest.mark.nprocs(2, 3, 4, 8)
def test_training_twice_gives_the_same_bits(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    for dims in MESHES.get(comm.size, [f"dp={comm.size}"]):
        with mm.DeviceMesh(dims, comm) as mesh:
            runs = [train_on(mesh, 3, 13) for _ in range(2)]
            assert_same(runs[0], train_alone(3, 13))
            assert bits(runs[0]) == bits(runs[1])
        with pieces_of(7), mm.DeviceMesh(dims, comm) as mesh:
            assert_same(train_on(mesh, 3, 13), train_alone(3, 13))


@pytest.mark.nprocs(2, 3, 4, 8)
def test_gradients_lie_in_shared_memory(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        parameter = Parameter("weight", (50, 40), Constant(0.0))
        parameter.materialize(seed=0, dtype="float64")
        buckets = GradientBuckets([parameter], mesh.group("dp"), mesh=mesh)
        buckets.zero_grad()
        parameter.accumulate(np.full((50, 40), mesh.rank + 1.0))
        buckets.synchronize()
        assert np.all(parameter.grad == comm.size * (comm.size + 1) / 2)
        node: Any = current_world().node
        assert node.arena.find(parameter.grad) > 0


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_arrays_are_reduced_wherever_they_lie(comm, op):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        expected = {"sum": comm.size * (comm.size + 1) / 2, "mean": (comm.size + 1) / 2}[op]
        mixed = np.empty if mesh.rank == 1 else mesh.shared_empty
        for make in (mesh.shared_empty, np.empty, mixed):
            x = make(100_000)
            x[...] = mesh.rank + 1
            assert group.all_reduce(x, op, out=x).resolve() is x
            assert np.all(x == expected)


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("checks", ["0", "1"])
def test_integers_of_one_size_are_of_one_type(comm, checks, monkeypatch):
    """NumPy has two types of 64 bits, which a program may mix without knowing."""
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "always")
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        for size in (10, 100_000):
            x = np.full(size, 1, "q" if mesh.rank == 0 else "l")
            total = mesh.group().all_reduce(x).resolve()
            assert np.all(total == comm.size)
