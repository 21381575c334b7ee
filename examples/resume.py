"""Save a training on one mesh, and go on with it on another: the losses are the same.

    mpiexec -n 4 python examples/resume.py
    python examples/resume.py                        one rank, without mpiexec

    steps 1-20, dp=4                         steps 21-40, dp=2,pp=2
    rank 0  all layers, a quarter of         rank 0  stage 0   rank 1  stage 1   half of the rows
    rank 1  the rows of a batch              rank 2  stage 0   rank 3  stage 1   the other half
    rank 2
    rank 3          ------------ out/resume/ ------------>

The checkpoint has each parameter, and what the optimizer keeps of it, once, by its name in the
whole model; which rank reads what follows from the new mesh. As a check all 40 steps are then done
without a stop. The program prints

    steps  1-20 on dp=4,pp=1: loss 2.3099 to 1.9660, saved in out/resume
    steps 21-40 on dp=2,pp=2: loss 1.8581 to 1.4265
    without a stop the losses differ by 1e-08 at most

and out/resume.svg shows both runs.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from typing import Any

import numpy as np
from common.figure import OUT, save_figure

import mpimesh as mm
from mpimesh import nn, optim

ROWS, FEATURES, CLASSES, STEPS = 256, 32, 10, 40


def make_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a step: a function of its number, so that nothing of it is saved."""
    weights = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
    x = np.random.default_rng([1, step]).normal(size=(ROWS, FEATURES)).astype(np.float32)
    return x, (x @ weights).argmax(axis=1)


def train(
    mesh: mm.DeviceMesh, steps: range, load: Path | None = None, save: Path | None = None
) -> list[float]:
    """Do some steps from the weights in `load`, or from the first ones; return their losses."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
    num_stages = mesh.group("pp").size
    stages = [mm.PipelineStage(i) for i in range(num_stages)]
    for place, layer in enumerate(layers):
        stages[place * num_stages // len(layers)].add_layer(layer)
    pipe = mm.PipelineParallel(stages, 4, mesh=mesh)
    state = {"model": pipe, "optimizer": optim.AdamW(pipe.parameters(), lr=0.003)}
    if load is not None:
        mm.load(load, state)
    losses = []
    for step in steps:
        x, target = make_batch(step)
        losses.append(pipe.train_step(x, target, loss=nn.cross_entropy))
        state["optimizer"].step()
    if save is not None:
        mm.save(save, state)
    return losses


def main(steps: int = STEPS, folder: Path = OUT / "resume") -> tuple[list[float], list[float]]:
    """Run on one rank of the world; return the losses with a stop, and those without one."""
    half = steps // 2
    with mm.DeviceMesh("dp=-1,pp=1") as first:
        before = train(first, range(half), save=folder)
        second_dims = "dp=-1,pp=2" if first.size % 2 == 0 else "dp=-1,pp=1"
        if first.rank == 0:
            show(1, before, first, f", saved in {folder}")
    with mm.DeviceMesh(second_dims) as second:
        after = train(second, range(half, steps), load=folder)
        if second.rank == 0:
            show(half + 1, after, second)
    with mm.DeviceMesh("dp=-1,pp=1") as mesh:
        whole = train(mesh, range(steps))
        if mesh.rank == 0:
            off = np.abs(np.subtract(before + after, whole)).max()
            print(f"without a stop the losses differ by {off:.0e} at most")
            save_figure("resume.svg", lambda axes: draw(axes, before, after, whole))
    return before + after, whole


def show(first: int, losses: list[float], mesh: mm.DeviceMesh, more: str = "") -> None:
    """Print the losses of some steps."""
    last = first + len(losses) - 1
    text = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    print(f"steps {first:2}-{last} on {mesh.dims_text}: {text}{more}")


def draw(axes: Any, before: list[float], after: list[float], whole: list[float]) -> None:
    """Draw the losses of both runs."""
    half, steps = len(before), len(whole)
    axes.plot(range(1, steps + 1), whole, color="0.8", linewidth=5, label="without a stop")
    axes.plot(range(1, half + 1), before, label="first mesh")
    axes.plot(range(half + 1, steps + 1), after, label="second mesh")
    axes.set(title="loss", xlabel="step")
    axes.legend()


if __name__ == "__main__":
    main()
