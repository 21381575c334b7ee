"""Pipelines whose stages pass several arrays, over real MPI."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import StageShapeError
from tests.pure.parallel_traps import Reshaped, assert_nothing_left, error_of
from tests.pure.parallel_values import (
    Rows,
    TreeLoss,
    alone,
    assert_same_tree,
    make,
    mixed_stages,
    random_tree,
)

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
        assert "int32 in [1] for stage 1, which expects rows of shape () and dtype int64" in str(
            error
        )
        assert_nothing_left(mesh)
        odd.change = lambda y: y
        pipe.train_step(x, target, loss=TreeLoss())
