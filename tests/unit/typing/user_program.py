"""A program as users write it, for type checkers: `test_typing.py` runs them over it."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpimesh as mm
from mpimesh import nn, optim

Floats = npt.NDArray[np.float64]


def collectives(mesh: mm.DeviceMesh, x: Floats) -> None:
    group = mesh.group("dp")
    assert_type(group.all_reduce(x), mm.CollectiveTensor[Floats])
    assert_type(group.all_reduce(x, "mean").resolve(), Floats)
    assert_type(group.all_reduce(x, mm.ReduceOp.MAX).wait(), Floats)
    assert_type(group.all_gather(x, axis=1).assume_resolved(), Floats)
    assert_type(group.all_reduce(x).map(len).resolve(), int)
    assert_type(group.all_reduce_init(x).start().resolve(), Floats)
    group.all_reduce(x, "avg")
    group.all_reduce(x, MPI.SUM)
    group.reduce_scatter(x, op=MPI.MAX)
    group.all_reduce(x, algorithm="ring")
    group.reduce(x, "min", root=1)
    group.all_reduce(x, "maen")  # expect error
    group.reduce(x, op="median")  # expect error
    group.reduce_scatter(x, op=np.add)  # expect error
    group.all_reduce(x, algorithm="rign")  # expect error
    group.all_reduce(x).resolve().nothing  # expect error
    group.allreduce(x)  # expect error


def split_arrays(mesh: mm.DeviceMesh, x: Floats) -> None:
    a = mm.distribute(x, mesh, "dp=S0")
    assert_type(a, mm.DTensor)
    assert_type(a @ a.T, mm.DTensor)
    assert_type(2 * a - a, mm.DTensor)
    assert_type(a.sum(axis=0).redistribute("dp=R"), mm.DTensor)
    assert_type(a.full(), npt.NDArray[Any])
    assert_type(a.full_tensor(), npt.NDArray[Any])
    assert_type(a.local, npt.NDArray[Any])
    assert_type(a.to_local(), npt.NDArray[Any])
    assert_type(a.start_redistribute("S1").resolve(), mm.DTensor)
    mm.zeros(4, mesh, "dp=S0", dtype=np.float32)
    mm.zeros(4, mesh, "dp=S0", dtype="float32")
    mm.zeros(4, mesh, "dp=S0", dtype="double")
    mm.zeros(4, mesh, "dp=S0", dtype=np.dtype(">f4"))
    mm.zeros(4, mesh, "dp=S0", dtype="flaot32")  # expect error
    mesh.shared_empty(4, "doulbe")  # expect error
    mm.Partial("avg")
    mm.Partial("any")  # expect error
    mm.distribute(x, mesh.mesh, "dp=S0")  # expect error


def training(mesh: mm.DeviceMesh, x: Floats, target: Floats) -> None:
    stages = [mm.PipelineStage(0).add_layer(nn.Linear(784, 10))]
    pipe = mm.PipelineParallel(stages, 8, mesh=mesh, schedule="zb1p", dtype="bfloat16")
    optimizer = mm.ParallelOptimizer(optim.AdamW(pipe.parameters(), lr=0.01), pipe)
    pipe.train_step(x, target, loss=nn.cross_entropy)
    optimizer.step()
    mm.schedule.make_schedule("1f1b", 4, 8)
    mm.PipelineParallel(stages, 8, mesh=mesh, schedule="1f2b")  # expect error
    mm.PipelineParallel(stages, 8, mesh=mesh, dtype="float31")  # expect error
    mm.DataParallel(nn.Linear(2, 2), mesh=mesh, grad_dtype="f32")  # expect error
    mm.schedule.make_schedule("zbw", 4, 8)  # expect error
    mm.Launch.detect()  # expect error
