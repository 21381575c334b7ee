"""A model of tokens whose layers share parameters, and what training it in one process gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.parallel import PipelineParallel
from tests.helpers.parallel_models import SEED, Trained, cut, train_by

TOKENS = 11
FEATURES = 6
SHARED = ("0.weight", "1.weight")
"""The parameters that several layers share."""


def tied_layers() -> list[Any]:
    """Eight layers: the output has the weight of the embedding, three in between have another.

    In four stages these lie on ranks 0 and 3, and on 0, 2 and 3.
    """
    embedding, head = nn.Embedding(TOKENS, FEATURES), nn.Linear(FEATURES, TOKENS)
    first, second, third = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
    head.weight = embedding.weight
    second.weight = third.weight = first.weight
    return [embedding, first, nn.GELU(), nn.Dropout(0.25), second, nn.LayerNorm(6), third, head]


def tied_batch(step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, 78])
    return rng.integers(0, TOKENS, rows), rng.integers(0, TOKENS, rows)


def tied_alone() -> nn.Sequential:
    model = nn.Sequential(tied_layers())
    model.materialize(seed=SEED, dtype=np.float64)
    return model


def add_gradients(model: nn.Sequential, step: int, rows: int, denominator: float) -> float:
    """Run a batch through the unsplit model, and return its loss."""
    x, target = tied_batch(step, rows)
    context = nn.Context(step=step)
    value, dy = nn.cross_entropy.value_and_grad(
        model.forward(x, context), target, denominator=denominator
    )
    model.backward(dy, context)
    return float(value)


@cache
def train_tied_alone(steps: int, rows: int) -> Trained:
    """Train the unsplit model, in this process and on whole batches."""
    model = tied_alone()
    return train_by(
        steps,
        model.parameters(),
        lambda step: add_gradients(model, step, rows, rows),
        clip=lambda: optim.clip_grad_norm(model.parameters(), 0.5),
        state=lambda: {name: p.data for name, p in model.named_parameters()},
        outputs=lambda _: model.forward(tied_batch(1000, 7)[0]),
    )


def tied_pipeline(mesh: mm.DeviceMesh, num_microbatches: int = 4, **options: Any):
    """The same model over the ranks of a mesh, with `chunks` stages on each."""
    num_stages = options.pop("chunks", 1) * mesh.dim_size("pp")
    options = {"seed": SEED, "dtype": np.float64, "bucket_bytes": 300, **options}
    made = options.pop("layers", None) or tied_layers()
    return PipelineParallel(cut(num_stages, made), num_microbatches, mesh=mesh, **options)


def train_tied_on(mesh: mm.DeviceMesh, steps: int, rows: int, **options: Any) -> Trained:
    """Train it over the ranks of a mesh. The copies must stay equal."""
    pipe = tied_pipeline(mesh, **options)
    trained = train_by(
        steps,
        pipe.parameters(),
        lambda step: pipe.train_step(*tied_batch(step, rows), loss=nn.cross_entropy),
        clip=lambda: pipe.clip_grad_norm(0.5),
        state=lambda: {name: p.data for name, p in pipe.named_parameters()},
        outputs=lambda _: pipe.forward(tied_batch(1000, 7)[0], everywhere=True),
    )
    pipe.check_replicas()
    return trained


def gradients_of(*rows: int) -> dict[str, np.ndarray]:
    """The gradients of steps of that many rows together."""
    model = tied_alone()
    for step, count in enumerate(rows):
        add_gradients(model, step, count, sum(rows))
    return {name: p.grad for name, p in model.named_parameters()}


def assert_gradients(pipe: PipelineParallel, expected: dict[str, np.ndarray]) -> None:
    for name, parameter in pipe.named_parameters():
        np.testing.assert_allclose(
            parameter.grad, expected[name], rtol=1e-9, atol=1e-14, err_msg=name
        )


def assert_one_gradient(parts: list[dict[str, np.ndarray]]) -> None:
    """All ranks that hold a parameter have the same bits; some is held by several."""
    held = [[part[name] for part in parts if name in part] for name in SHARED]
    assert max(map(len, held)) > 1
    for first, *others in held:
        for other in others:
            np.testing.assert_array_equal(other, first, strict=True)
