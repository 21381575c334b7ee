"""One parameter in several stages, over real MPI."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MismatchError, StageError
from mpimesh.parallel import PipelineParallel
from tests.helpers.depth import deep
from tests.helpers.parallel_models import SEED, assert_same, cut
from tests.helpers.parallel_tied import (
    add_gradients,
    tied_alone,
    tied_batch,
    tied_layers,
    tied_pipeline,
    train_tied_alone,
    train_tied_on,
)
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of
from tests.helpers.raises import names

MESHES = {2: ["pp=2", "dp=2,pp=1"], 4: ["pp=4", "dp=2,pp=2"], 8: ["dp=2,pp=4"]}

pytestmark = pytest.mark.nprocs(2, 4, 8)


@pytest.mark.parametrize("overlap", [True, *deep(False)])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), *deep(("zb1p", 1), ("interleaved", 2)), ("zbv", 2)]
)
def test_it_trains_like_the_unsplit_model(comm, schedule, chunks, overlap):
    for dims in MESHES[comm.size]:
        with mm.DeviceMesh(dims, comm) as mesh:
            for rows in (13, 1):
                trained = train_tied_on(
                    mesh, 3, rows, schedule=schedule, chunks=chunks, overlap=overlap
                )
                assert_same(trained, train_tied_alone(3, rows))


def test_states_steps_without_sync_and_freezing(comm):
    rows = [8, 5, 3]
    model = tied_alone()
    for step, count in enumerate(rows):
        add_gradients(model, step, count, 16)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for dims in MESHES[comm.size]:
        with mm.DeviceMesh(dims, comm) as mesh:
            layers = tied_layers()
            pipe = tied_pipeline(mesh, layers=layers)
            for frozen in ((), ("0.weight",), ()):
                layers[0].weight.requires_grad = not frozen
                pipe.rebuild_buckets()
                pipe.step = 0
                for step, count in enumerate(rows):
                    with pipe.no_sync() if step < 2 else nullcontext():
                        pipe.train_step(
                            *tied_batch(step, count), loss=nn.cross_entropy, denominator=16
                        )
                for name, parameter in pipe.named_parameters():
                    if name not in frozen:
                        np.testing.assert_allclose(
                            parameter.grad, expected[name], rtol=1e-9, atol=1e-14
                        )
            state = {name: values + 1 for name, values in pipe.full_state_dict().items()}
            assert list(state) == list(expected)
            pipe.load_state_dict(state)
            for name, values in pipe.full_state_dict().items():
                np.testing.assert_array_equal(values, state[name])
            pipe.check_replicas()


def test_copies_that_differ(comm):
    with mm.DeviceMesh(MESHES[comm.size][0], comm) as mesh:
        layers = tied_layers()
        layers[0].weight.materialize(seed=mesh.coord("pp"), dtype=np.float64)
        error = error_of(partial(tied_pipeline, mesh, layers=layers))
        assert type(error) is MismatchError
        names(str(error), "tied", "'0.weight'")


@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_step_that_fails_leaves_nothing(comm, kind):
    for dims in MESHES[comm.size]:
        with mm.DeviceMesh(dims, comm) as mesh:
            num_stages = mesh.dim_size("pp")
            trap = Trap()
            stages = cut(num_stages, [*tied_layers(), trap])
            pipe = PipelineParallel(
                stages, 4, mesh=mesh, seed=SEED, dtype=np.float64, bucket_bytes=300
            )
            for attempt in range(3):
                if mesh.rank == mesh.size - 1:
                    trap.arm(kind, attempt)
                call = partial(pipe.train_step, *tied_batch(0, 16), loss=nn.cross_entropy)
                assert type(error_of(call)) is StageError
                trap.disarm()
                assert_nothing_left(mesh)
                pipe.step = 0
                loss = pipe.train_step(*tied_batch(0, 16), loss=nn.cross_entropy)
                assert loss == pytest.approx(train_tied_alone(1, 16).losses[0], rel=1e-12)
            pipe.check_replicas()


@pytest.mark.parametrize("wrong", ["forward", "without sync"])
def test_ranks_that_do_different_things(comm, wrong):
    with mm.DeviceMesh(MESHES[comm.size][0], comm) as mesh:
        pipe = tied_pipeline(mesh)
        x, target = tied_batch(0, 16)
        odd = mesh.rank == 1
        call = partial(pipe.train_step, x, target, loss=nn.cross_entropy)
        if odd and wrong == "forward":
            call = partial(pipe.forward, x)
        with pipe.no_sync() if odd and wrong == "without sync" else nullcontext():
            assert type(error_of(call)) is MismatchError
        assert_nothing_left(mesh)
        loss = pipe.train_step(x, target, loss=nn.cross_entropy)
        assert loss == pytest.approx(train_tied_alone(1, 16).losses[0], rel=1e-12)
