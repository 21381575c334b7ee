"""A batch, or a replica's part of one, of padding alone: nothing to learn from, and no error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim

PAD = -1
LOSS = nn.CrossEntropy(ignore_index=PAD)
X = np.random.default_rng(0).normal(size=(8, 5))
TARGET = np.arange(8) % 3


def made(mesh: mm.DeviceMesh, kind: str) -> Any:
    layers = [nn.Linear(5, 4), nn.Linear(4, 3)]
    options: dict[str, Any] = {"loss": LOSS, "dtype": "float64", "seed": 1}
    if kind == "pp":
        stages = [mm.PipelineStage(n).add_layer(layer) for n, layer in enumerate(layers)]
        return mm.PipelineParallel(stages, 2, mesh=mesh, **options)
    if kind == "sharded":
        return mm.fully_shard(nn.Sequential(*layers), mesh, **options)
    return mm.DataParallel(nn.Sequential(*layers), mesh, num_microbatches=2, **options)


@pytest.mark.parametrize("rows", ["whole", "local"])
@pytest.mark.parametrize(("dims", "kind"), [("dp=2", "dp"), ("dp=2", "sharded"), ("pp=2", "pp")])
def test_padding_alone_changes_nothing(dims, kind, rows):
    def program():
        with mm.DeviceMesh(dims) as mesh:
            model = made(mesh, kind)
            optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
            optimizer = mm.ParallelOptimizer(optimizer, model)
            before = model.full_state_dict()
            nothing = np.full(8, PAD)
            losses = [
                model.evaluate(X, nothing, rows=rows),
                model.train_step(X, nothing, optimizer=optimizer, rows=rows),
            ]
            after = model.full_state_dict()
            return losses, before, after, model.train_step(X, TARGET, rows=rows)

    for losses, before, after, later in mm.run_virtual(2, program):
        assert losses == [0.0, 0.0]
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)
        assert later > 0


def test_a_replica_with_padding_alone_adds_nothing():
    """The loss and the step are those of the other replica's rows, as of one process."""

    def program(targets):
        with mm.DeviceMesh("dp=-1") as mesh:
            model = made(mesh, "dp")
            sgd = optim.SGD(model.parameters(), lr=0.1)
            rows = slice(4 * mesh.rank, 4 * mesh.rank + 4) if mesh.size > 1 else slice(0, 4)
            loss = model.train_step(X[rows], targets[rows], optimizer=sgd, rows="local")
            return loss, model.full_state_dict()

    targets = np.concatenate([TARGET[:4], np.full(4, PAD)])
    ((loss, state),) = mm.run_virtual(1, program, targets)
    for found, there in mm.run_virtual(2, program, targets):
        np.testing.assert_allclose(found, loss, rtol=1e-13)
        for name, value in state.items():
            np.testing.assert_allclose(there[name], value, rtol=1e-12)
