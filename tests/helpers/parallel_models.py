"""Models, batches, and what training them in one process gives: the oracle of this room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.parallel import DataParallel, PipelineParallel, PipelineStage

SEED = 3
FEATURES = 6
CLASSES = 5


def layers() -> list[nn.Module]:
    """A classifier whose layers can be cut anywhere; dropout tells whether rows are numbered."""
    return [
        nn.Linear(FEATURES, 8),
        nn.GELU(),
        nn.Dropout(0.25),
        nn.Linear(8, 7),
        nn.LayerNorm(7),
        nn.ReLU(),
        nn.Linear(7, 8),
        nn.Linear(8, CLASSES),
    ]


def batch(step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, 77])
    return rng.normal(size=(rows, FEATURES)), rng.integers(0, CLASSES, rows)


def cut(num_stages: int, made: Sequence[Any] | None = None) -> list[PipelineStage]:
    """Deal layers to stages in order, as evenly as goes."""
    source = list(made or layers())
    dealt = np.array_split(np.arange(len(source)), num_stages)
    stages = []
    for number, places in enumerate(dealt):
        stage = PipelineStage(number)
        for place in places:
            stage.add_layer(source[place])
        stages.append(stage)
    return stages


def make_pipeline(
    mesh: mm.DeviceMesh, num_microbatches: int = 4, **options: Any
) -> PipelineParallel:
    """The classifier over all ranks of a mesh with dims dp and pp, or one of them."""
    num_stages = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
    options = {"seed": SEED, "dtype": np.float64, "bucket_bytes": 300, **options}
    stages = options.pop("stages", None) or cut(num_stages)
    return PipelineParallel(stages, num_microbatches, mesh=mesh, **options)


def on_ranks(
    dims: str, body: Callable[[mm.DeviceMesh], Any], *, rendezvous: bool = False
) -> list[Any]:
    """Run `body(mesh)` on the virtual ranks of a mesh."""

    def main() -> Any:
        with mm.DeviceMesh(dims) as mesh:
            return body(mesh)

    size = math.prod(int(dim.split("=")[1]) for dim in dims.split(","))
    return mm.run_virtual(size, main, rendezvous=rendezvous)


@dataclass
class Trained:
    """The course of a training."""

    losses: list[float]
    norms: list[float]
    state: dict[str, np.ndarray]
    outputs: Any


@cache
def train_alone(steps: int, rows: int) -> Trained:
    """Train the unsplit model, in this process and on whole batches."""
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)

    def train_step(step: int) -> float:
        x, target = batch(step, rows)
        context = nn.Context(step=step)
        value, gradient = nn.cross_entropy.value_and_grad(
            model.forward(x, context), target, denominator=rows
        )
        model.backward(gradient, context)
        return value

    return train_by(
        steps,
        model.parameters(),
        train_step,
        clip=lambda: optim.clip_grad_norm(model.parameters(), 0.5),
        state=lambda: {name: p.data for name, p in model.named_parameters()},
        outputs=model.forward,
    )


def train_on(mesh: mm.DeviceMesh, steps: int, rows: int, **options: Any) -> Trained:
    """Train the same over the ranks of a mesh."""
    pipe = make_pipeline(mesh, **options)

    def train_step(step: int) -> float:
        return pipe.train_step(*batch(step, rows), loss=nn.cross_entropy)

    trained = train_by(
        steps,
        pipe.parameters(),
        train_step,
        clip=lambda: pipe.clip_grad_norm(0.5),
        state=lambda: {name: p.data for name, p in pipe.named_parameters()},
        outputs=lambda x: pipe.forward(x, everywhere=True),
    )
    pipe.check_replicas()
    return trained


def train_by(
    steps: int,
    parameters: list[nn.Parameter],
    train_step: Callable[[int], float],
    *,
    clip: Callable[[], float],
    state: Callable[[], dict[str, np.ndarray]],
    outputs: Callable[[np.ndarray], Any],
    optimizer: Any = None,
) -> Trained:
    optimizer = optimizer or optim.Adam(parameters, lr=0.01)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(train_step(step))
        norms.append(clip())
        optimizer.step()
    return Trained(losses, norms, state(), outputs(batch(1000, 7)[0]))


def check_replicas_train(model: mm.DataParallel, optimizer: Any) -> None:
    """Train replicas of `layers()` for some steps, and compare with the training of one process."""
    course = train_by(
        3,
        model.parameters(),
        lambda step: model.train_step(*batch(step, 13)),
        clip=lambda: model.clip_grad_norm(0.5),
        state=lambda: state_of(model),
        outputs=model.forward,
        optimizer=optimizer,
    )
    model.check_replicas()
    assert_same(course, train_alone(3, 13))


def assert_same(got: Trained, expected: Trained, *, rtol: float = 1e-12) -> None:
    """Compare a rank's part of a training with the whole of another."""
    np.testing.assert_allclose(got.losses, expected.losses, rtol=rtol, atol=0)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=10 * rtol, atol=0)
    for name, values in got.state.items():
        # Adam divides small gradients by their own size, which enlarges rounding.
        np.testing.assert_allclose(values, expected.state[name], rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(got.outputs, expected.outputs, rtol=1e-8, atol=1e-11)


def state_of(pipe: Any) -> dict[str, np.ndarray]:
    with pipe._engine.layer_values.whole():
        return {name: parameter.data.copy() for name, parameter in pipe.named_parameters()}


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name, strict=True)


def train_both_ways(mesh: mm.DeviceMesh, rows: int, **options: Any) -> None:
    """Three steps with the optimizer inside, and three with it after, from the same values."""
    trained = []
    num_stages = options.pop("num_stages", None)
    for inside in (True, False):
        stages = None if num_stages is None else cut(num_stages)
        pipe = make_pipeline(mesh, stages=stages, **options)
        optimizer = optim.Adam(pipe.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            before = state_of(pipe)
            given = optimizer if inside else None
            losses.append(
                pipe.train_step(*batch(step, rows), loss=nn.cross_entropy, optimizer=given)
            )
            if not inside:
                assert_equal(state_of(pipe), before)
                optimizer.step()
        gradients = {name: p.grad.copy() for name, p in pipe.named_parameters()}
        trained.append((losses, state_of(pipe), gradients))
        pipe.check_replicas()
    assert trained[0][0] == trained[1][0]
    assert_equal(trained[0][1], trained[1][1])
    assert_equal(trained[0][2], trained[1][2])


class Total:
    """The sum of all outputs: the gradient of each is 1."""

    def __call__(self, y, target):
        return float(y.sum())

    def value_and_grad(self, y, target, *, denominator):
        return float(y.sum()), np.ones_like(y)


STAGE = [1]
"""The stage of :func:`zero_optimizer`, which a fixture sets for all virtual ranks of a test."""


def zero_optimizer(optimizer, model, **options):
    """Let the replicas divide what the stage of the test says."""
    return mm.ParallelOptimizer(optimizer, model, zero=STAGE[0], **options)


def make_replicas(mesh: Any, **options: Any) -> DataParallel:
    """Return the classifier on replicas, in float64 and with its loss unless options say else."""
    options = {"loss": nn.cross_entropy, "seed": SEED, "dtype": "float64", **options}
    return DataParallel(nn.Sequential(layers()), mesh, **options)


def check_replicas_train_like_one(
    model: Any, rows: int, step_of: Callable[[Any, Any], float] | None = None
) -> None:
    """Compare three steps of a model on replicas, and its outputs, with one process.

    Args:
        model: A data-parallel model of :func:`layers`, in float64 with `SEED`.
        rows: Rows of a batch.
        step_of: Takes a step with a batch's x and target; `train_step` of all rows if None.
    """
    expected = train_alone(3, rows)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        loss = (step_of or model.train_step)(*batch(step, rows))
        assert loss == pytest.approx(expected.losses[step], rel=1e-12)
        model.clip_grad_norm(0.5)
        optimizer.step()
    model.check_replicas()
    y = model(batch(1000, 7)[0])
    np.testing.assert_allclose(y, expected.outputs, rtol=1e-8, atol=1e-11)
