"""Pipelines on virtual ranks, against the unsplit model in one process."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import ScheduleError
from mpimesh.parallel import PipelineParallel, PipelineStage
from mpimesh.schedule import make_schedule, validate
from tests.pure.parallel_models import (
    CLASSES,
    SEED,
    assert_same,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    train_alone,
    train_on,
)
from tests.pure.parallel_schedules import all_on_one, halves, looped

MESHES = ["dp=1", "pp=2", "pp=3", "pp=4", "dp=2", "dp=4", "dp=2,pp=2", "dp=2,pp=4", "dp=3,pp=2"]


# -- the same training on every mesh ------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("dims", MESHES)
# 32 divides by everything, 13 by nothing; 3 are fewer than microbatches, 1 than replicas.
@pytest.mark.parametrize("rows", [32, 13, 3, 1])
def test_every_mesh_trains_the_same(dims, schedule, rows):
    def body(mesh):
        return train_on(mesh, 3, rows, schedule=schedule)

    for trained in on_ranks(dims, body, rendezvous=True):
        assert_same(trained, train_alone(3, rows))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 32, 100])
def test_any_number_of_microbatches_trains_the_same(num_microbatches):
    def body(mesh):
        return train_on(mesh, 2, 13, num_microbatches=num_microbatches)

    for trained in on_ranks("dp=2,pp=3", body):
        assert_same(trained, train_alone(2, 13))


def test_other_dims_repeat_the_work():
    def body(mesh):
        return train_on(mesh, 2, 13)

    for trained in on_ranks("other=2,pp=2", body):
        assert_same(trained, train_alone(2, 13))


def test_names_of_dims_are_free():
    def body(mesh):
        pipe = PipelineParallel(
            cut(2), 4, mesh=mesh, dim="rows", data_dim="cols", seed=SEED, dtype="float64"
        )
        return pipe.train_step(*batch(0, 12), loss=nn.cross_entropy)

    losses = on_ranks("cols=2,rows=2", body)
    np.testing.assert_allclose(losses, train_alone(1, 12).losses * 4, rtol=1e-12)


# -- schedules of other shapes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "schedule", "num_stages"),
    [
        ("pp=2", looped, 4),
        ("dp=2,pp=2", looped, 5),
        ("dp=1", all_on_one, 3),
        ("dp=2", all_on_one, 4),
        ("pp=3", halves, 3),
        ("dp=2,pp=2", halves, 2),
    ],
)
@pytest.mark.parametrize("rows", [13, 2])
def test_a_schedule_is_data(dims, schedule, num_stages, rows):
    validate(schedule(num_stages, 4))

    def body(mesh):
        return train_on(mesh, 3, rows, schedule=schedule, stages=cut(num_stages))

    for trained in on_ranks(dims, body, rendezvous=True):
        assert_same(trained, train_alone(3, rows))


def test_a_schedule_for_one_number_of_microbatches():
    def body(mesh):
        pipe = make_pipeline(mesh, 4, schedule=make_schedule("gpipe", 2, 4))
        loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with pytest.raises(ScheduleError, match="for 4 microbatches, but this batch gives 3"):
            pipe.train_step(*batch(0, 3), loss=nn.cross_entropy)
        return loss

    losses = on_ranks("pp=2", body)
    np.testing.assert_allclose(losses, train_alone(1, 16).losses * 2, rtol=1e-12)


# -- who is given what ------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["pp=3", "dp=2,pp=2"])
def test_ranks_need_only_what_they_use(dims):
    def body(mesh):
        pipe = make_pipeline(mesh)
        stage, last = mesh.coord("pp"), mesh.dim_size("pp") - 1
        losses = []
        for step in range(3):
            x, target = batch(step, 13 + step)
            losses.append(
                pipe.train_step(
                    x if stage == 0 else None,
                    target if stage == last else None,
                    loss=nn.cross_entropy,
                )
            )
        y = pipe.forward(batch(9, 5)[0] if stage == 0 else None)
        assert (y is None) == (stage != last)
        return losses

    expected = []
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    for step in range(3):
        x, target = batch(step, 13 + step)
        expected.append(nn.cross_entropy(model.forward(x, nn.Context(step=step)), target))
    for losses in on_ranks(dims, body, rendezvous=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_only_the_own_stage_has_memory():
    def body(mesh):
        pipe = make_pipeline(mesh)
        for number in range(3):
            here = number == mesh.coord("pp")
            stage = pipe.stage(number)
            assert stage is not None
            assert stage.parameters()
            assert all((p.data is not None) == here for p in stage.parameters())
        assert pipe.local_stages == (pipe.stage(mesh.coord("pp")),)
        assert pipe.parameters() == pipe.local_stages[0].parameters()
        assert pipe.num_stages == 3
        assert pipe.stage(3) is None
        assert pipe.stage(-1) is None
        return [name for name, _ in pipe.named_parameters()]

    names = [name for part in on_ranks("pp=3", body) for name in part]
    assert names == [name for name, _ in nn.Sequential(layers()).named_parameters()]


# -- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["dp=1", "pp=3", "dp=3", "dp=2,pp=2"])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 24])
def test_forward_gives_the_rows_in_order(dims, rows):
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    x = batch(5, rows)[0]
    expected = model.forward(x)

    def body(mesh):
        pipe = make_pipeline(mesh)
        last = not mesh.contains_dim("pp") or mesh.coord("pp") == mesh.dim_size("pp") - 1
        for _ in range(2):
            y = pipe(x)
            assert (y is not None) == last
            if last:
                np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
            y = pipe.forward(x, everywhere=True)
            assert y.shape == (rows, CLASSES)
            np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)

    on_ranks(dims, body, rendezvous=True)


def test_inputs_of_another_shape_are_another_kind():
    """Rows may grow and shrink from batch to batch: sequences of other lengths."""

    def made():
        return [nn.Embedding(9, 4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)]

    model = nn.Sequential(made())
    model.materialize(seed=SEED, dtype=np.float64)

    def body(mesh):
        pipe = make_pipeline(mesh, stages=cut(2, made()))
        rng = np.random.default_rng(1)
        for length in (5, 3, 5, 8, 3):
            tokens = rng.integers(0, 9, (6, length))
            target = rng.integers(0, 3, (6, length))
            loss = pipe.train_step(tokens, target, loss=nn.cross_entropy)
            assert loss == pytest.approx(nn.cross_entropy(model.forward(tokens), target), rel=1e-12)
            y = pipe.forward(tokens, everywhere=True)
            np.testing.assert_allclose(y, model.forward(tokens), rtol=1e-12)

    on_ranks("pp=2", body)


def test_integers_pass_between_stages():
    """The first stage hands its tokens on: nothing there to train, so no gradient comes back."""
    stages = [
        lambda: PipelineStage(0),
        lambda: PipelineStage(1).add_layer(nn.Embedding(9, 4)).add_layer(nn.Linear(4, 3)),
    ]
    model = nn.Sequential(*stages[1]().layers)
    model.materialize(seed=0, dtype=np.float64)
    tokens = np.arange(9)

    def body(mesh):
        pipe = PipelineParallel([make() for make in stages], 4, mesh=mesh, dtype="float64")
        before = mesh.traffic().calls.get("pipeline send", 0)
        loss = pipe.train_step(tokens, tokens % 3, loss=nn.cross_entropy)
        assert loss == pytest.approx(nn.cross_entropy(model.forward(tokens), tokens % 3))
        return mesh.traffic().calls.get("pipeline send", 0) - before

    assert on_ranks("pp=2", body) == [3, 0]


@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_auto_trains_batches_of_any_size(rows):
    """Also those that give replicas other numbers of microbatches."""

    def body(mesh):
        return train_on(mesh, 2, rows, stages=cut(4), schedule="auto")

    for trained in on_ranks("dp=2,pp=2", body):
        assert_same(trained, train_alone(2, rows))
