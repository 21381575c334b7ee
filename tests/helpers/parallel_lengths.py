"""A model of sequences whose lengths differ, over four stages; and one process as the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh import nn
from mpimesh.parallel import PipelineParallel, PipelineStage

SEED = 5
LOSS = nn.CrossEntropy(ignore_index=-1)


def length_layers() -> list[list[nn.Module]]:
    """The third takes a further input."""
    return [
        [nn.Embedding(9, 4), nn.GELU()],
        [nn.Linear(4, 4), nn.Dropout(0.25)],
        [nn.Concat(), nn.Linear(5, 4), nn.LayerNorm(4)],
        [nn.Linear(4, 3)],
    ]


def length_stages() -> list[PipelineStage]:
    stages = []
    for number, layers in enumerate(length_layers()):
        stage = PipelineStage(number, inputs=("extra",) if number == 2 else ())
        for layer in layers:
            stage.add_layer(layer)
        stages.append(stage)
    return stages


def on_one() -> list[PipelineStage]:
    """All in one stage."""
    stage = PipelineStage(0, inputs=("extra",))
    return [stage.add_layer(Whole())]


class Whole(nn.Module):
    """All layers, with the further input beside the tokens from the start."""

    def __init__(self) -> None:
        self.layers = [layer for layers in length_layers() for layer in layers]

    def forward(self, x, ctx=None):
        value, extra = x
        for layer in self.layers:
            value = layer.forward((value, extra) if isinstance(layer, nn.Concat) else value, ctx)
        return value

    def backward(self, dy, ctx):
        for layer in reversed(self.layers):
            dy = layer.backward(dy, ctx)
            dy = dy[0] if isinstance(layer, nn.Concat) else dy
        return dy


def length_batch(sizes: list[tuple[int, int]], seed: int = 0) -> tuple[Any, Any, Any]:
    """x, target and the further input of microbatches of these rows and lengths."""
    rng = np.random.default_rng([seed, 9])
    x = [rng.integers(0, 9, size) for size in sizes]
    target = [rng.integers(-1, 3, size) for size in sizes]
    target[0][:] = 0
    extra = [rng.normal(size=(*size, 1)) for size in sizes]
    return mm.Microbatches(x), mm.Microbatches(target), mm.Microbatches(extra)


def lengths_alone(x, target, extra) -> tuple[float, dict[str, np.ndarray], list[np.ndarray]]:
    """Loss, gradients by name and outputs of one process, microbatch after microbatch."""
    model = Whole()
    model.materialize(seed=SEED, dtype=np.float64)
    denominator = sum(LOSS.count(one) for one in target)
    loss, row, outputs = 0.0, 0, []
    for one, goal, more in zip(x, target, extra, strict=True):
        context = nn.Context(first_row=row)
        y = model.forward((one, more), context)
        value, dy = LOSS.value_and_grad(y, goal, denominator=denominator)
        loss += float(value)
        model.backward(dy, context)
        outputs.append(model.forward((one, more)))
        row += len(one)
    names = {name.removeprefix("layers."): p.grad for name, p in model.named_parameters()}
    return loss, names, outputs


def make_lengths(mesh, num_microbatches=4, *, stages=None, **options) -> PipelineParallel:
    return PipelineParallel(
        length_stages() if stages is None else stages,
        num_microbatches,
        mesh=mesh,
        **{"seed": SEED, "dtype": np.float64, **options},
    )


def assert_bits_of_one_process(pipe: PipelineParallel, given: Any, expected: Any) -> None:
    """Do a step and a forward; compare with what :func:`lengths_alone` returned.

    Args:
        pipe: The model.
        given: What this rank is given of x, target and inputs.
        expected: Loss, gradients and outputs.
    """
    x, target, inputs = given
    loss, gradients, outputs = expected
    pipe.step = 0
    pipe.zero_grad()
    assert pipe.train_step(x, target, loss=LOSS, inputs=inputs) == loss
    for name, parameter in pipe.named_parameters():
        np.testing.assert_array_equal(parameter.grad, gradients[name], strict=True)
    y = pipe.forward(x, inputs=inputs, everywhere=True)
    assert isinstance(y, mm.Microbatches)
    for one, other in zip(y, outputs, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
