"""Skips over real MPI, against one process."""

from __future__ import annotations

from functools import partial

import pytest

import mpimesh as mm
from mpimesh.errors import StageError
from mpimesh.parallel.microbatch import microbatch_rows
from tests.helpers.parallel_schedules import all_on_one
from tests.helpers.parallel_skips import check_like_one_process, skip_stages, skips_alone
from tests.helpers.parallel_traps import Trap, error_of
from tests.helpers.parallel_values import (
    Rows,
    TreeLoss,
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


@pytest.mark.nprocs(1, 2, 4)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_skips_give_the_bits_of_one_process(comm, cut, second):
    schedule = {
        1: (all_on_one, "looped_bfs"),
        2: ("interleaved", "zbv"),
        4: ("1f1b", "zb1p"),
    }[comm.size][second]
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        check_like_one_process(mesh, SPECS, SKIPS, [2], ROWS, schedule, cut=cut)


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_stage_that_raises(comm, kind):
    x, target = random_tree(SPECS[0], ROWS), random_tree(SPECS[-1], ROWS, seed=1)
    parts = [(of_rows(x, s), of_rows(target, s), None) for s in microbatch_rows(ROWS, 4)]
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
