"""A training step of a small model: 40 lines of NumPy and mpi4py, and mpimesh's, on the same ranks.

The model is that of ``examples/train_digits.py``, a perceptron 64-256-256-256-10 with Adam, and a
step has so little to compute that what is not its maths shows. The program by hand holds weights,
gradients and state each in one flat array, sums gradients by one Allreduce in place, and changes
the weights by a few passes over the flat memory. The pictures are noise; their values do not
matter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks.measure import FULL, TINY, Effort, in_turns
from benchmarks.rows import make_rows
from mpimesh import nn, optim

__all__ = ["run"]

IMAGES = 1437
BATCHES = (128, 960)
MICROBATCHES = 8
_WIDTHS = (64, 256, 256, 256, 10)
_TURN_IMAGES = 3840
_BETA1, _BETA2, _EPS, _RATE = 0.9, 0.999, 1e-8, 1e-3

_Rows = Callable[[], Any]


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way and batch; images a second are those of all ranks together."""
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    n = mesh.world_size
    rng = np.random.default_rng(0)
    x = rng.random((IMAGES, _WIDTHS[0]), np.float32)
    target = rng.integers(0, _WIDTHS[-1], IMAGES)
    meshes = {f"dp={n}": 1} | ({"dp=2,pp=2": MICROBATCHES} if n == 4 else {})
    table = []
    for batch in BATCHES:
        with ExitStack() as stack:
            ways: dict[str, Callable[[], object]] = {
                "by hand": ByHand(comm, x, target, _batches(batch)).step
            }
            for dims, microbatches in meshes.items():
                opened = stack.enter_context(mm.DeviceMesh(dims, comm))
                ways[f"mpimesh, {dims}"] = _trained(opened, microbatches, x, target, batch)
            calls = min(effort.most_calls, _TURN_IMAGES // batch)
            timings = in_turns(comm, ways, calls=calls, rounds=effort.rounds)
        rows = make_rows(f"a step with {batch} images", timings)
        for row, timing in zip(rows, timings.values(), strict=True):
            row["per_s"] = batch / timing.median_s
        table += rows
        if effort is TINY:
            break
    return table


def _batches(batch: int) -> _Rows:
    """Return what gives the rows of the next batch, the same on every rank and in every way."""
    rng = np.random.default_rng(1)
    left = [np.arange(0)]

    def rows() -> Any:
        if len(left[0]) < batch:
            left[0] = rng.permutation(IMAGES)
        taken, left[0] = np.split(left[0], [batch])
        return taken

    return rows


class ByHand:
    """The training as one writes it for this model alone.

    Args:
        comm: The ranks, each of which takes its share of the rows.
        x: All images.
        target: Their digits.
        rows: Gives the rows of each batch.
    """

    def __init__(self, comm: MPI.Intracomm, x: Any, target: Any, rows: _Rows) -> None:
        self.comm, self.x, self.target, self.rows = comm, x, target, rows
        count = sum(a * b + b for a, b in pairwise(_WIDTHS))
        self.w, self.g = np.zeros((2, count), np.float32)
        self.m, self.v = np.zeros((2, count), np.float32)
        self.weights, self.grads = _layers(self.w), _layers(self.g)
        rng = np.random.default_rng(0)
        for weight, _ in self.weights:
            weight[:] = rng.normal(size=weight.shape) * np.sqrt(2 / len(weight))
        self.steps = 0

    def step(self) -> float:
        """Do one step, and return the loss over this rank's rows."""
        batch, comm = self.rows(), self.comm
        first, end = (len(batch) * place // comm.size for place in (comm.rank, comm.rank + 1))
        loss = self._gradients(self.x[batch[first:end]], self.target[batch[first:end]], len(batch))
        if comm.size > 1:
            comm.Allreduce(MPI.IN_PLACE, self.g)
        self._adam()
        return loss

    def _gradients(self, x: Any, target: Any, denominator: int) -> float:
        hidden = [x]
        for weight, bias in self.weights[:-1]:
            hidden.append(np.maximum(hidden[-1] @ weight + bias, 0))
        weight, bias = self.weights[-1]
        z = hidden[-1] @ weight + bias
        z -= z.max(1, keepdims=True)
        d = np.exp(z)
        d /= d.sum(1, keepdims=True)
        here = np.arange(len(target)), target
        loss = -np.log(d[here]).sum() / denominator
        d[here] -= 1
        d /= denominator
        for place in range(len(self.weights) - 1, -1, -1):
            np.matmul(hidden[place].T, d, out=self.grads[place][0])
            d.sum(0, out=self.grads[place][1])
            if place:
                d = (d @ self.weights[place][0].T) * (hidden[place] > 0)
        return float(loss)

    def _adam(self) -> None:
        self.steps += 1
        w, g, m, v = self.w, self.g, self.m, self.v
        np.multiply(m, _BETA1, out=m)
        np.add(m, (1 - _BETA1) * g, out=m)
        np.multiply(v, _BETA2, out=v)
        np.add(v, (1 - _BETA2) * g * g, out=v)
        m_scale, v_scale = 1 - _BETA1**self.steps, 1 - _BETA2**self.steps
        w -= _RATE * (m / m_scale) / (np.sqrt(v / v_scale) + _EPS)


def _layers(flat: Any) -> list[tuple[Any, Any]]:
    """Return weight and bias of each layer as views of a flat array."""
    views, start = [], 0
    for rows, columns in pairwise(_WIDTHS):
        middle, end = start + rows * columns, start + rows * columns + columns
        views.append((flat[start:middle].reshape(rows, columns), flat[middle:end]))
        start = end
    return views


def _trained(
    mesh: mm.DeviceMesh, microbatches: int, x: Any, target: Any, batch: int
) -> Callable[[], object]:
    """Return mpimesh's step: the one that ``examples/train_digits.py`` takes."""
    num_stages = mesh.dim_size("pp") if "pp" in mesh.dim_names else 1
    stages = [mm.PipelineStage(number) for number in range(num_stages)]
    layers = list(pairwise(_WIDTHS))
    for place, (rows, columns) in enumerate(layers):
        stage = stages[place * num_stages // len(layers)]
        stage.add_layer(nn.Linear(rows, columns))
        if place < len(layers) - 1:
            stage.add_layer(nn.ReLU())
    pipe = mm.PipelineParallel(stages, microbatches, mesh=mesh)
    optimizer = optim.AdamW(pipe.parameters(), lr=_RATE)
    take = _batches(batch)

    def step() -> None:
        rows = take()
        pipe.train_step(x[rows], target[rows], loss=nn.cross_entropy)
        optimizer.step()

    return step
