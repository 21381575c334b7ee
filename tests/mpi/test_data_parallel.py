"""Data parallelism and gradient buckets over real MPI."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MismatchError, ShapeError, StageError
from mpimesh.nn import Constant, Parameter
from mpimesh.parallel import DataParallel, GradientBuckets
from tests.helpers.depth import deep
from tests.helpers.parallel_models import (
    SEED,
    batch,
    check_replicas_train_like_one,
    layers,
    make_replicas,
    train_alone,
)
from tests.helpers.parallel_traps import Trap, error_of
from tests.helpers.raises import names, raises


@pytest.mark.parametrize("rows", [13, 2])
def test_it_trains_like_one(comm, rows):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        check_replicas_train_like_one(make_replicas(mesh, bucket_bytes=300), rows)


@pytest.mark.parametrize("kind", ["local", "split"])
def test_each_rank_gives_its_own_rows(comm, kind):
    """The first rank one, the last the rest, those between none."""
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model = make_replicas(mesh)
        last = mesh.rank == mesh.size - 1
        mine = slice(0 if mesh.size == 1 else min(mesh.rank, 1), 13 if last else 1)

        def step(*whole):
            parts = [part[mine] for part in whole]
            if kind == "local":
                return model.train_step(*parts, rows="local")
            blocks = [mm.DTensor.from_local(part.copy(), mesh, "dp=S0") for part in parts]
            return model.train_step(*blocks)

        check_replicas_train_like_one(model, 13, step)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 22])
def test_buckets_sum_over_the_ranks(comm, dtype, bucket_bytes):
    shapes = [(3, 5), (), (100,), (7, 2, 2), (0,)]
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        parameters = [Parameter(f"p{i}", shape, Constant(0.0)) for i, shape in enumerate(shapes)]
        for parameter in parameters:
            parameter.materialize(seed=0, dtype=dtype)
        group = mesh.group("dp")
        buckets = GradientBuckets(parameters, group, mesh=mesh, bucket_bytes=bucket_bytes)
        for cycle in range(3):
            buckets.zero_grad()
            rng = np.random.default_rng([cycle, mesh.rank])
            for number in rng.permutation(len(shapes)):
                value = np.full(shapes[number], number + mesh.rank + cycle, dtype)
                parameters[number].accumulate(value)
            buckets.synchronize()
            for number, parameter in enumerate(parameters):
                total = sum(number + rank + cycle for rank in range(comm.size))
                assert np.all(parameter.grad == total)


@pytest.mark.nprocs(2, 3, 4, 8)
def test_ranks_that_differ_are_told_where(comm):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        parameter = Parameter("weight", (2 + (mesh.rank == 1),), Constant(0.0))
        parameter.materialize(seed=0)
        with raises(MismatchError, "'dp'", "rank 0: weight (2,)", "rank 1: weight (3,)"):
            GradientBuckets([parameter], mesh.group("dp"), mesh=mesh)


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_replica_that_fails_ends_the_step_on_all(comm, kind):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        trap = Trap()
        model = DataParallel(
            nn.Sequential([*layers(), trap]),
            mesh,
            loss=nn.cross_entropy,
            seed=SEED,
            dtype="float64",
            bucket_bytes=100,
        )
        for _ in range(3):
            model.step = 0
            loss = model.train_step(*batch(0, 13))
            assert loss == pytest.approx(train_alone(1, 13).losses[0], rel=1e-12)
            if mesh.rank == 1:
                trap.arm(kind, 0)
            error = error_of(partial(model.train_step, *batch(0, 13)))
            assert type(error) is StageError
            names(str(error), "rank 1")
            trap.disarm()


@pytest.mark.nprocs(2, 3, 4)
@pytest.mark.parametrize("checks", ["0", *deep("1")])
@pytest.mark.parametrize("odd", ["forward", "no_sync", "no batch"])
def test_a_replica_in_another_step_is_told_on_all(comm, odd, checks, monkeypatch):
    """Its status must not meet the others' sums of gradients, which go among the same ranks."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model = DataParallel(
            nn.Sequential(layers()), mesh, loss=nn.cross_entropy, dtype="float64", bucket_bytes=300
        )
        x, target = batch(0, 16)
        # The first step learns when a gradient is complete: sums start during later backwards.
        losses = [model.train_step(x, target) for _ in range(2)]
        step = partial(model.train_step, x, target)
        if mesh.rank == comm.size - 1:
            step = {
                "forward": partial(model.forward, x),
                "no_sync": partial(without_sync, model, step),
                "no batch": partial(model.train_step, None, target),
            }[odd]
        error = error_of(step)
        assert type(error) is (ShapeError if odd == "no batch" else MismatchError)
        model.step = 1
        assert model.train_step(x, target) == losses[1]


def without_sync(model, step):
    with model.no_sync():
        step()
