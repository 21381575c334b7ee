"""Skips over real MPI, against one process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import StageError
from mpimesh.parallel.microbatch import microbatch_rows
from tests.helpers.parallel_schedules import all_on_one
from tests.helpers.parallel_skips import EXTRA, skip_stages, skips_alone
from tests.helpers.parallel_traps import Trap, error_of
from tests.helpers.parallel_values import (
    Rows,
    TreeLoss,
    assert_same_tree,
    make,
    of_rows,
    random_tree,
)
from tests.helpers.raises import names

# The output of stage 1 is large enough to be read in place on the same node.
SPECS = [
    Rows(3),
    {"h": Rows(2), "ids": Rows(floating=False)},
    (Rows(2, 2000), {"z": Rows()}),
    Rows(4),
    Rows(2),
]
SKIPS = [(0, 2), (0, 3), (1, 3)]
ROWS = 9


def batch():
    x, target = random_tree(SPECS[0], ROWS), random_tree(SPECS[-1], ROWS, seed=1)
    extra = random_tree(EXTRA, ROWS, seed=2)
    spans = microbatch_rows(ROWS, 4)
    parts = [(of_rows(x, s), of_rows(target, s), of_rows(extra, s)) for s in spans]
    return (x, target, extra), spans, parts


@pytest.mark.nprocs(1, 2, 4)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_skips_give_the_bits_of_one_process(comm, cut, second):
    schedule = {
        1: (all_on_one, "looped_bfs"),
        2: ("interleaved", "zbv"),
        4: ("1f1b", "zb1p"),
    }[comm.size][second]
    whole, spans, parts = batch()
    loss, gradients, outputs = skips_alone(SPECS, SKIPS, parts, [2])
    given = [mm.Microbatches(one) for one in zip(*parts, strict=True)] if cut else whole
    x, target, extra = given
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        pipe = make(mesh, skip_stages(SPECS, SKIPS, [2]), 4, schedule=schedule)
        for _ in range(2):
            pipe.zero_grad()
            assert pipe.train_step(x, target, loss=TreeLoss(), inputs={"extra": extra}) == loss
            for stage in pipe.local_stages:
                np.testing.assert_array_equal(
                    stage.parameters()[0].grad, gradients[stage.stage_id], strict=True
                )
            y = pipe.forward(x, inputs={"extra": extra}, everywhere=True)
            for one, other in zip(
                y if cut else [of_rows(y, span) for span in spans], outputs, strict=True
            ):
                assert_same_tree(one, other)


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_stage_that_raises(comm, kind):
    (x, target, _), _, parts = batch()
    loss, _, _ = skips_alone(SPECS, SKIPS, parts)
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        for stage in range(4):
            stages, trap = skip_stages(SPECS, SKIPS), Trap()
            stages[stage].add_layer(trap)
            pipe = make(mesh, stages, 4, schedule="1f1b" if comm.size == 4 else "interleaved")
            trap.arm(kind, 1)
            error = error_of(partial(pipe.train_step, x, target, loss=TreeLoss()))
            assert type(error) is StageError
            names(str(error), f"{stage}{kind}1", "microbatch 1", "ValueError", "boom")
            trap.disarm()
            assert pipe.train_step(x, target, loss=TreeLoss()) == loss
