"""A pipeline of eight stages on four ranks without bubbles: the schedule zbv, and its picture.

    mpiexec -n 4 python examples/pipeline_zbv.py
    python examples/pipeline_zbv.py                  one rank, which has all stages

    rank 0: stages 0 and 7    |  ^      A microbatch goes down the ranks and up again, so that
    rank 1: stages 1 and 6    |  |      rank 0 also computes the loss. A backward is two halves:
    rank 2: stages 2 and 5    |  |      I for what the stage before waits for, W for the weights,
    rank 3: stages 3 and 4    v  |      which fills the gaps (Qi et al., "Zero Bubble", 2023).

It prints the loss of a few steps, and how long a step takes by the schedule, beside one of 1F1B, if
all actions take equally long and each rank has a core of its own:

    8 stages on 4 rank(s), 8 microbatches
    step 1: loss 2.3021
    ...
    by the schedule ranks compute 94% of a step, with 1F1B it would be 73%
    wrote out/schedule_zbv.svg: both, if all actions take equally long
    wrote out/pipeline_zbv.svg: the last step, as it was measured here

"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common.figure import OUT
from common.files import write_text

import mpimesh as mm
from mpimesh import nn, optim

STAGES_OF_RANK, MICROBATCHES, ROWS, FEATURES, CLASSES = 2, 8, 2048, 256, 10


def make_stages(count: int) -> list[mm.PipelineStage]:
    """Return the stages: each a linear layer and a ReLU, but the last one gives scores."""
    stages = [
        mm.PipelineStage(i).add_layer(nn.Linear(FEATURES, FEATURES)).add_layer(nn.ReLU())
        for i in range(count - 1)
    ]
    return [*stages, mm.PipelineStage(count - 1).add_layer(nn.Linear(FEATURES, CLASSES))]


def make_batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of numbers, and for each a class that follows from them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    return x, (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(axis=1)


def main(steps: int = 5, rows: int = ROWS) -> list[float]:
    """Run on one rank of the world; return the losses."""
    x, target = make_batch(rows)
    with mm.DeviceMesh("pp=-1") as mesh:
        stages = make_stages(STAGES_OF_RANK * mesh.size)
        pipe = mm.PipelineParallel(
            stages,
            MICROBATCHES,
            mesh=mesh,
            schedule="zbv",
            tracer=mm.Tracer(mesh.rank),
        )
        optimizer = optim.AdamW(pipe.parameters(), lr=0.001)
        if mesh.rank == 0:
            print(f"{len(stages)} stages on {mesh.size} rank(s), {MICROBATCHES} microbatches")
        losses = []
        for step in range(steps):
            losses.append(pipe.train_step(x, target, loss=nn.cross_entropy))
            optimizer.step()
            if mesh.rank == 0:
                print(f"step {step + 1}: loss {losses[-1]:.4f}")
        draw(pipe, mesh.size)
    return losses


def draw(pipe: mm.PipelineParallel, ranks: int) -> None:
    """Draw the last step as it was measured, and what the schedule promises. Collective."""
    report = pipe.step_report()
    if report is None:
        return  # not on this rank
    write_text(OUT / "pipeline_zbv.svg", report.to_svg())
    # A stage of 1F1B is two of zbv; times are those of one half of a backward of zbv.
    times = {
        name: mm.schedule.simulate(
            mm.schedule.make_schedule(name, count, MICROBATCHES),
            forward_s=work,
            backward_input_s=work,
            backward_weight_s=work,
        )
        for name, count, work in (("zbv", 2 * ranks, 1), ("1f1b", ranks, 2))
    }
    busy = {name: 1 - time.bubble_fraction for name, time in times.items()}
    print(
        f"by the schedule ranks compute {busy['zbv']:.0%} of a step, with 1F1B it would be "
        f"{busy['1f1b']:.0%}"
    )
    picture = OUT / "schedule_zbv.svg"
    write_text(picture, mm.schedule.schedule_svg(times))
    print(f"wrote {picture}: both, if all actions take equally long")
    print(f"wrote {OUT / 'pipeline_zbv.svg'}: the last step, as it was measured here")


if __name__ == "__main__":
    main()
