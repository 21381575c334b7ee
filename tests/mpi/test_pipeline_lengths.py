"""Batches given as microbatches of any shapes, over real MPI."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ScheduleError, StageError
from tests.helpers.parallel_lengths import (
    LOSS,
    assert_bits_of_one_process,
    length_batch,
    length_stages,
    lengths_alone,
    make_lengths,
)
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of
from tests.helpers.raises import names

# The second is long enough to be read in place by a rank of the same node.
SIZES = [(2, 3), (40, 60), (3, 1), (1, 7)]


def needed(pipe, x, target, extra):
    numbers = [stage.stage_id for stage in pipe.local_stages]
    return (
        x if 0 in numbers else None,
        target if 3 in numbers else None,
        {"extra": extra} if 2 in numbers else None,
    )


@pytest.mark.nprocs(1, 2, 4)
@pytest.mark.parametrize("order", [1, -1])
def test_any_shapes_give_the_bits_of_one_process(comm, order):
    schedule = {1: "looped_bfs", 2: "interleaved", 4: "zb1p"}[comm.size]
    batch = length_batch(SIZES[::order])
    expected = lengths_alone(*batch)
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        pipe = make_lengths(mesh, schedule=schedule)
        for _ in range(2):
            assert_bits_of_one_process(pipe, needed(pipe, *batch), expected)
        assert_nothing_left(mesh)


@pytest.mark.nprocs(4)
def test_they_are_dealt_to_replicas(comm):
    batch = length_batch(SIZES[:3])
    loss, gradients, outputs = lengths_alone(*batch)
    with mm.DeviceMesh("dp=2,pp=2", comm) as mesh:
        pipe = make_lengths(mesh, 2, schedule="interleaved")
        x, target, inputs = needed(pipe, *batch)
        got = pipe.train_step(x, target, loss=LOSS, inputs=inputs)
        assert got == pytest.approx(loss, rel=1e-12)
        for name, parameter in pipe.named_parameters():
            np.testing.assert_allclose(parameter.grad, gradients[name], rtol=1e-8, atol=1e-13)
        y = pipe.forward(x, inputs=inputs, everywhere=True)
        for one, other in zip(y, outputs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-13)
        many = length_batch([(1, 1)] * 5)
        x, target, inputs = needed(pipe, *many)
        error = error_of(partial(pipe.train_step, x, target, loss=LOSS, inputs=inputs))
        assert type(error) is ScheduleError
        names(str(error), "5 microbatches", "2 replicas", 2)


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_stage_that_raises(comm, kind):
    batch = length_batch(SIZES)
    loss, _, _ = lengths_alone(*batch)
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        for stage in range(4):
            stages, trap = length_stages(), Trap()
            stages[stage].add_layer(trap)
            schedule = "1f1b" if comm.size == 4 else "interleaved"
            pipe = make_lengths(mesh, stages=stages, schedule=schedule)
            x, target, inputs = needed(pipe, *batch)
            trap.arm(kind, 2)
            error = error_of(partial(pipe.train_step, x, target, loss=LOSS, inputs=inputs))
            assert type(error) is StageError
            names(str(error), f"{stage}{kind}2", "microbatch 2", "ValueError", "boom")
            assert_nothing_left(mesh)
            trap.disarm()
            assert pipe.train_step(x, target, loss=LOSS, inputs=inputs) == loss
