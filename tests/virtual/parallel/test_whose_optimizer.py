"""Optimizers of another model, or of nothing, are refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import ModuleError
from tests.helpers.parallel_models import batch, on_ranks
from tests.helpers.raises import names, raises


@pytest.mark.parametrize("dims", ["dp=1", "dp=2", "pp=2"])
def test_an_optimizer_that_would_change_nothing_is_refused_on_all_ranks(dims):
    def make(mesh):
        stages = [mm.PipelineStage(0).add_layer(nn.ReLU()), mm.PipelineStage(1)]
        stages[1].add_layer(nn.Linear(6, 5)).add_layer(nn.Linear(5, 5).freeze())
        if "pp" in dims:
            return mm.PipelineParallel(stages, 1, mesh=mesh, dtype="float64")
        return mm.DataParallel(nn.Sequential(*stages), mesh, dtype="float64")

    def body(mesh):
        model, other = make(mesh), make(mesh)
        x, target = batch(0, 8)
        before = model.full_state_dict()
        for wrong in (optim.SGD(other.parameters(), lr=0.1), optim.SGD([], lr=0.1)):
            with raises(ModuleError, "model.parameters()"):
                model.train_step(x, target, loss=nn.cross_entropy, optimizer=wrong)
        np.testing.assert_equal(model.full_state_dict(), before)
        right = optim.SGD(model.parameters(), lr=0.1)  # none on a stage that has none
        model.train_step(x, target, loss=nn.cross_entropy, optimizer=right)
        return True

    assert all(on_ranks(dims, body))


def test_parameters_that_an_optimizer_leaves_out_are_told_once():
    def body(mesh):
        layers = nn.Linear(6, 7), nn.Linear(7, 5)
        options: Any = {"loss": nn.cross_entropy, "dtype": "float64"}
        model = mm.DataParallel(nn.Sequential(*layers), mesh, **options)
        optimizer = optim.SGD(layers[1].parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                model.train_step(*batch(0, 8), optimizer=optimizer)
        (warning,) = told
        names(str(warning.message), "2 of the 4", "weight", "freeze()")
        layers = nn.Linear(6, 7).freeze(), nn.Linear(7, 5)
        again = mm.DataParallel(nn.Sequential(*layers), mesh, **options)
        again.train_step(*batch(0, 8), optimizer=optim.SGD(layers[1].parameters(), lr=0.1))
        return True

    assert all(on_ranks("dp=1", body))
