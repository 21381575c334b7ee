"""Stages that get outputs of earlier ones along skips, and one process as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh import nn
from mpimesh.parallel import PipelineParallel, PipelineStage
from mpimesh.parallel.microbatch import flatten, microbatch_rows
from mpimesh.parallel.task import check_output
from tests.helpers.parallel_values import (
    SEED,
    Mixed,
    Rows,
    Spec,
    TreeLoss,
    assert_same_tree,
    make,
    of_rows,
    random_tree,
)

Skips = Sequence[tuple[int, int]]

EXTRA = Rows(2, floating=False)


def skip_stages(specs: list[Spec], skips: Skips, takers: Sequence[int] = ()) -> list[PipelineStage]:
    """A stage from each spec to the next; `takers` also take the named input ``extra``."""
    stages = []
    for number, (one, other) in enumerate(pairwise(specs)):
        sources = sorted(source for source, to in skips if to == number)
        named = ("extra",) if number in takers else ()
        given = (one, *(specs[source + 1] for source in sources), *[EXTRA] * len(named))
        layer = Mixed(given if len(given) > 1 else one, other)
        stages.append(PipelineStage(number, inputs=named, skips=sources[::-1]).add_layer(layer))
    return stages


def skips_alone(
    specs: list[Spec],
    skips: Skips,
    parts: list[tuple[Any, Any, Any]],
    takers: Sequence[int] = (),
) -> tuple[float, list[np.ndarray], list[Any]]:
    """Loss, gradients by stage and outputs of one process, from (x, target, extra) of microbatches.

    Gradients of one output are added up as documented: the next stage's first, then rising.
    """
    stages = skip_stages(specs, skips, takers)
    for number, stage in enumerate(stages):
        stage.materialize(seed=SEED, dtype=np.float64, index=number)
    denominator = sum(len(flatten(target)[0][0]) for _, target, _ in parts)
    loss, outputs = 0.0, []
    for x, target, extra in parts:
        context = nn.Context()
        made = [x]
        for stage in stages:
            given = [made[-1], *(made[source + 1] for source in stage.skips)]
            given += [extra] * len(stage.inputs)
            made.append(stage.forward(tuple(given) if len(given) > 1 else given[0], context))
        outputs.append(made[-1])
        value, dy = TreeLoss().value_and_grad(made[-1], target, denominator=denominator)
        loss += float(value)
        waiting: dict[int, list[Any]] = {len(stages) - 1: [dy]}
        back: dict[tuple[int, int], Any] = {}
        for stage in reversed(stages):
            number = stage.stage_id
            if number == len(stages) - 1:
                (gradient,) = waiting[number]
            else:
                rows = len(flatten(made[number + 1])[0][0])
                _, interface = check_output(made[number + 1], stage=0, rows=rows, interface=None)
                to = [number + 1, *sorted(to for source, to in skips if source == number)]
                total = [g for g in leaves_with_none(back[to[0], number]) if g is not None]
                for one in to[1:]:
                    more = [g for g in leaves_with_none(back[one, number]) if g is not None]
                    total = [a + b for a, b in zip(total, more, strict=True)]
                gradient = interface.gradient_tree(total)
            dx: Any = stage.backward(gradient, context)
            if not stage.skips and not stage.inputs:
                dx = (dx,)
            for source, one in zip((number - 1, *stage.skips), dx, strict=False):
                back[number, source] = one
    return loss, [stage.parameters()[0].grad for stage in stages], outputs


def check_like_one_process(
    mesh: mm.DeviceMesh,
    specs: list[Spec],
    skips: Skips,
    takers: Sequence[int],
    rows: int,
    schedule: Any,
    *,
    cut: bool,
) -> PipelineParallel:
    """Compare two steps and outputs of a pipeline with one process, to the bit; return it.

    Args:
        mesh: The mesh, of one dim.
        specs: As of :func:`skip_stages`, and so `skips` and `takers`.
        rows: Rows of a batch.
        schedule: The schedule.
        cut: Whether batches come as microbatches.
    """
    x, target = random_tree(specs[0], rows), random_tree(specs[-1], rows, seed=1)
    extra = random_tree(EXTRA, rows, seed=2)
    spans = microbatch_rows(rows, 4)
    parts = [(of_rows(x, s), of_rows(target, s), of_rows(extra, s)) for s in spans]
    loss, gradients, outputs = skips_alone(specs, skips, parts, takers)
    pipe = make(mesh, skip_stages(specs, skips, takers), 4, schedule=schedule)
    batch = [mm.Microbatches(one) for one in zip(*parts, strict=True)]
    given: list[Any] = batch if cut else [x, target, extra]
    inputs = {"extra": given[2]} if takers else None
    for _ in range(2):
        pipe.zero_grad()
        assert pipe.train_step(*given[:2], loss=TreeLoss(), inputs=inputs) == loss
        for stage in pipe.local_stages:
            np.testing.assert_array_equal(
                stage.parameters()[0].grad, gradients[stage.stage_id], strict=True
            )
        y = pipe.forward(given[0], inputs=inputs, everywhere=True)
        found = y if cut else [of_rows(y, span) for span in spans]
        for one, other in zip(found, outputs, strict=True):
            assert_same_tree(one, other)
    return pipe


def leaves_with_none(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves_with_none(part)]
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves_with_none(tree[key])]
    return [tree]
