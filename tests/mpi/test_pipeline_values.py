"""Pipelines whose stages pass several arrays, over real MPI."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import StageShapeError
from mpimesh.parallel import PipelineStage
from tests.helpers.parallel_traps import Reshaped, assert_nothing_left, error_of
from tests.helpers.parallel_values import (
    SEED,
    Rows,
    TreeLoss,
    alone,
    assert_same_tree,
    make,
    mixed_stages,
    random_tree,
)
from tests.helpers.raises import names

FIRST = {"h": Rows(3), "ids": Rows(2, floating=False)}
LAST = {"y": Rows(2), "best": Rows(floating=False)}
BETWEEN = [
    ({"z": Rows(2, 2), "a": Rows()}, Rows(floating=False)),
    (Rows(20_000), {"keep": Rows(1)}, Rows(300, floating=False)),
    {"one": (Rows(5),)},
]


def specs(num_stages):
    return [FIRST, *[BETWEEN[i % 3] for i in range(num_stages - 1)], LAST]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb1p"])
def test_trees_pass_between_stages(comm, schedule):
    here = specs(comm.size)
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        pipe = make(mesh, mixed_stages(here), 4, schedule=schedule)
        for rows in (13, 13, 2):
            x, target = random_tree(FIRST, rows), random_tree(LAST, rows, seed=1)
            loss, gradients, y = alone(here, x, target, rows, 4)
            pipe.zero_grad()
            assert pipe.train_step(x, target, loss=TreeLoss()) == loss
            for name, parameter in pipe.named_parameters():
                np.testing.assert_array_equal(parameter.grad, gradients[name], strict=True)
            assert_same_tree(pipe.forward(x, everywhere=True), y)
        assert_nothing_left(mesh)


def test_a_long_interface(comm):
    many = {f"{'a long name' * 5} {place}": Rows(floating=place % 2 == 0) for place in range(150)}
    here = [Rows(2), *[many] * (comm.size - 1), Rows(1)]
    x, target = random_tree(here[0], 7), random_tree(here[-1], 7)
    loss, _, _ = alone(here, x, target, 7, 3)
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        pipe = make(mesh, mixed_stages(here), 3)
        for _ in range(2):
            assert pipe.train_step(x, target, loss=TreeLoss()) == loss
        assert_nothing_left(mesh)


@pytest.mark.nprocs(2, 4)
def test_a_tree_that_does_not_keep_to_its_interface(comm):
    here = specs(comm.size)
    x, target = random_tree(FIRST, 8), random_tree(LAST, 8)
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        stages = mixed_stages(here)
        odd = Reshaped(lambda y: (y[0], y[1].astype("int32")), since=2)
        stages[0].add_layer(odd)
        pipe = make(mesh, stages, 4)
        error = error_of(partial(pipe.train_step, x, target, loss=TreeLoss()))
        assert type(error) is StageShapeError
        names(str(error).splitlines()[0], "stage 1", "int32 in [1]", (), "int64")
        assert_nothing_left(mesh)
        odd.change = lambda y: y
        pipe.train_step(x, target, loss=TreeLoss())


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_inputs_enter_at_later_stages(comm, schedule):
    """The last stage adds a bias to what comes, the one before puts a mask beside it."""

    def made():
        stages = [PipelineStage(number) for number in range(comm.size - 1)]
        stages.append(PipelineStage(comm.size - 1, inputs=("bias", "mask")))
        for stage in stages[:-1]:
            stage.add_layer(nn.Linear(5, 5))
        stages[-1].add_layer(nn.Concat()).add_layer(nn.Linear(9, 3))
        return stages

    rows = 9
    x, target = random_tree(Rows(5), rows), random_tree(Rows(3), rows)
    inputs = {"bias": random_tree(Rows(1), rows), "mask": random_tree(Rows(3, floating=False), 9)}
    layers = [layer for stage in made()[:-1] for layer in stage.layers]
    front, back = nn.Sequential(layers), made()[-1]
    front.materialize(seed=SEED, dtype=np.float64)
    back.materialize(seed=SEED, dtype=np.float64, index=len(layers))
    context = nn.Context()
    y = back.forward((front.forward(x, context), inputs["bias"], inputs["mask"]), context)
    loss, dy = nn.mse_loss.value_and_grad(y, target, denominator=rows)
    front.backward(back.backward(dy, context)[0], context)
    gradients = [p.grad for p in (*front.parameters(), *back.parameters())]
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        pipe = make(mesh, made(), 3, schedule=schedule)
        last = mesh.rank == comm.size - 1
        paths = [name for name, _ in pipe._engine.named_parameters(everywhere=True)]
        for given in (inputs, inputs if last else None):
            pipe.zero_grad()
            got = pipe.train_step(x, target, loss=nn.mse_loss, inputs=given)
            assert got == pytest.approx(loss, rel=1e-12)
            for name, parameter in pipe.named_parameters():
                expected = gradients[paths.index(name)]
                np.testing.assert_allclose(parameter.grad, expected, rtol=1e-9, atol=1e-14)
            got = pipe.forward(x, inputs=given, everywhere=True)
            np.testing.assert_allclose(got, y, rtol=1e-9, atol=1e-14)
        error = error_of(
            partial(pipe.train_step, x, target, loss=nn.mse_loss, inputs={} if last else inputs)
        )
        names(str(error), f"stage {comm.size - 1}", "inputs", "'bias'")
        assert_nothing_left(mesh)
