"""Split models with divided optimizers: the losses and norms of one process."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from tests.helpers.depth import deep
from tests.helpers.parallel_models import on_ranks, zero_optimizer
from tests.helpers.tensor_models import ROWS, SEED, VOCAB, batch, layers

pytestmark = pytest.mark.usefixtures("stage")

STEPS = 3


def alone(kind):
    model = nn.Sequential(layers(kind))
    model.materialize(seed=SEED, dtype=np.float64)
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(STEPS):
        x, target = batch(step)
        model.zero_grad()
        ctx = nn.Context(step=step)
        loss, dy = nn.cross_entropy.value_and_grad(model(x, ctx), target, denominator=ROWS)
        model.backward(dy, ctx)
        losses.append(loss)
        norms.append(optim.clip_grad_norm(model.parameters(), math.inf))
        optimizer.step()
    return losses, norms


@pytest.mark.parametrize("kind", ["plain", "llama"])
@pytest.mark.parametrize("dims", ["dp=2,tp=2", *deep("tp=4", "dp=2,pp=2,tp=2")])
def test_it_is_trained_as_in_one_process(kind, dims):
    """Ranks of a split model divide what they share, and each part counts once in a norm."""

    def body(mesh):
        tp = mesh.group("tp")
        made = layers(kind, tp=tp, sequence_parallel=True)
        count = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = [mm.PipelineStage(number) for number in range(count)]
        for number, layer in enumerate(made):
            stages[number * count // len(made)].add_layer(layer)
        model = mm.PipelineParallel(
            stages, 2, mesh=mesh, seed=SEED, dtype=np.float64, bucket_bytes=2000
        )
        optimizer = zero_optimizer(optim.Adam(model.parameters(), lr=0.02), model)
        loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(model.train_step(*batch(step), loss=loss))
            norms.append(model.clip_grad_norm(math.inf))
            optimizer.step()
        model.check_replicas()
        return losses, norms

    expected = alone(kind)
    for losses, norms in on_ranks(dims, body):
        np.testing.assert_allclose(losses, expected[0], rtol=1e-11)
        np.testing.assert_allclose(norms, expected[1], rtol=1e-10)
