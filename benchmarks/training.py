"""A step of training of a real model: one rank alone, stages, replicas.

The model is a perceptron for images of handwritten digits; what stands in the images does not
matter. All ways do the same sums. With as many cores as ranks, stages and replicas can be as many
times as fast as one rank at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks.measure import FULL, TINY, Effort, in_turns
from benchmarks.rows import make_rows
from mpimesh import nn, optim

__all__ = ["run"]

IMAGES = 512
MICROBATCHES = 8
_PIXELS, _CLASSES = 784, 10
_ROUNDS = 7


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way; images a second are the images over the time."""
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    width = 64 if effort is TINY else 1024
    rng = np.random.default_rng(0)
    x = rng.normal(size=(IMAGES, _PIXELS)).astype(np.float32)
    target = rng.integers(0, _CLASSES, IMAGES)
    n = mesh.world_size
    with mm.DeviceMesh({"pp": n}, comm) as pipes, mm.DeviceMesh({"dp": n}, comm) as replicas:
        ways = {
            "one rank": _alone(mesh, width, x, target),
            f"{n} stages": _staged(pipes, n, width, x, target),
            f"{n} replicas": _staged(replicas, 1, width, x, target),
        }
        timings = in_turns(comm, ways, calls=1, rounds=min(_ROUNDS, effort.rounds))
    return make_rows(f"a step with {IMAGES} images", timings)


def _layers(width: int) -> list[nn.Module]:
    """Return layers of which each pair takes about as long as any other."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    return [nn.Linear(_PIXELS, width), nn.ReLU(), *hidden, nn.Linear(width, _CLASSES)]


def _alone(mesh: mm.DeviceMesh, width: int, x: Any, target: Any) -> Callable[[], object]:
    """Return a step on rank 0, for whose end the others wait in their sleep."""
    model = nn.Sequential(_layers(width))
    model.materialize(seed=0, dtype=np.float32)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        if mesh.rank == 0:
            context = nn.Context()
            optimizer.zero_grad()
            y = model.forward(x, context)
            _, gradient = nn.cross_entropy.value_and_grad(y, target, denominator=IMAGES)
            model.backward(gradient, context)
            optimizer.step()
        mesh.barrier()

    return step


def _staged(
    mesh: mm.DeviceMesh, num_stages: int, width: int, x: Any, target: Any
) -> Callable[[], object]:
    stages = [mm.PipelineStage(number) for number in range(num_stages)]
    layers = _layers(width)
    for place, layer in enumerate(layers):
        stages[place * num_stages // len(layers)].add_layer(layer)
    pipe = mm.PipelineParallel(stages, MICROBATCHES if num_stages > 1 else 1, mesh=mesh)
    optimizer = optim.SGD(pipe.parameters(), lr=1e-3)

    def step() -> None:
        pipe.train_step(x, target, loss=nn.cross_entropy)
        optimizer.step()

    return step
