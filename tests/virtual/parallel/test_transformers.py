"""Blocks of transformers as stages of a pipeline: masks pass from stage to stage."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn

ROWS, TOKENS = 6, 5


def bert():
    return [
        nn.BertEmbedding(9, 8, 4, dropout=0.2),
        nn.BertBlock(4, 2, hidden=6, dropout=0.2),
        nn.BertBlock(4, 2, hidden=6),
        nn.Sequential(nn.MeanPool(), nn.Linear(4, 3)),
    ]


def gpt():
    return [
        nn.Sequential(nn.Embedding(9, 4), nn.PositionalEmbedding(8, 4)),
        nn.GptBlock(4, 2, hidden=6, dropout=0.2),
        nn.GptBlock(
            4, 2, num_kv_heads=1, hidden=5, norm="rms", mlp="swiglu", rotary=True, bias=False
        ),
        nn.Sequential(nn.RMSNorm(4), nn.MeanPool(), nn.Linear(4, 3)),
    ]


def batch(masked):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 9, (ROWS, TOKENS))
    mask = np.arange(TOKENS) < rng.integers(1, TOKENS + 1, (ROWS, 1))
    return (ids, mask) if masked else ids, rng.integers(0, 3, ROWS)


def alone(make, x, target):
    """Return the loss, the gradients and the outputs of one process with the whole batch."""
    model = nn.Sequential(make())
    model.materialize(seed=3, dtype="float64")
    ctx = nn.Context()
    y = model(x, ctx)
    loss, dy = nn.cross_entropy.value_and_grad(y, target, denominator=ROWS)
    model.backward(dy, ctx)
    return loss, {name: p.grad for name, p in model.named_parameters()}, model(x)


@pytest.mark.parametrize(("make", "masked"), [(bert, True), (gpt, False)])
@pytest.mark.parametrize(
    ("dims", "schedule"), [("pp=2", "1f1b"), ("dp=2,pp=2", "zb1p"), ("pp=4", "gpipe")]
)
def test_pipelines_train_as_one_process_does(make, masked, dims, schedule):
    x, target = batch(masked)
    loss, gradients, y = alone(make, x, target)

    def main():
        with mm.DeviceMesh(dims) as mesh:
            count = mesh.dim_size("pp")
            stages = [mm.PipelineStage(number) for number in range(count)]
            for place, layer in enumerate(make()):
                stages[place * count // 4].add_layer(layer)
            pipe = mm.PipelineParallel(
                stages, 3, mesh=mesh, seed=3, dtype="float64", schedule=schedule
            )
            found = pipe.train_step(x, target, loss=nn.cross_entropy)
            grads = [parameter.grad.copy() for parameter in pipe.parameters()]
            names = [name for name, _ in pipe.named_parameters()]
            return found, dict(zip(names, grads, strict=True)), pipe.forward(x, everywhere=True)

    for found, mine, outputs in mm.run_virtual(mm.Mesh(dims).size, main):
        assert found == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(outputs, y, rtol=1e-10, atol=1e-12)
        assert mine
        for name, gradient in mine.items():
            np.testing.assert_allclose(
                gradient, gradients[name], rtol=1e-9, atol=1e-11, err_msg=name
            )
