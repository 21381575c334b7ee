"""Learning rates that depend on the step, on meshes: as one process trains."""

from __future__ import annotations

import json

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from tests.helpers.parallel_models import (
    SEED,
    batch,
    layers,
    make_pipeline,
    on_ranks,
    state_of,
)

ROWS, STEPS = 16, 6
SCHEDULE = optim.WarmupLR(2, optim.CosineLR(4, 0.1), start=0.5)


def written_down(step: int) -> float:
    """Return the share of the rate by the formula."""
    if step < 2:
        return 0.5 + 0.5 * step / 2
    return 0.1 + 0.9 * (1 + float(np.cos(np.pi * (step - 2) / 4))) / 2


def train_alone() -> dict[str, np.ndarray]:
    """Train in this process; the rate comes from the formula and not from a schedule."""
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    adam = optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model.zero_grad()
        x, target = batch(step, ROWS)
        ctx = nn.Context(step=step)
        _, dy = nn.cross_entropy.value_and_grad(model.forward(x, ctx), target, denominator=ROWS)
        model.backward(dy, ctx)
        adam.lr = 0.01 * written_down(step)
        adam.step()
    return model.state_dict()


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dims", ["dp=1,pp=1", "dp=4,pp=1", "dp=2,pp=2"])
def test_a_run_that_is_stopped_and_goes_on_is_one_process_training(dims, zero):
    expected = train_alone()

    def body(mesh):
        def start():
            pipe = make_pipeline(mesh)
            adam = optim.AdamW(pipe.parameters(), lr=0.01)
            optimizer = mm.ParallelOptimizer(adam, pipe, zero=zero)
            return pipe, optimizer, optim.LRScheduler(optimizer, SCHEDULE)

        def train(pipe, optimizer, scheduler, steps):
            for step in steps:
                assert optimizer.lr == pytest.approx(0.01 * written_down(step), rel=1e-14)
                pipe.train_step(*batch(step, ROWS), loss=nn.cross_entropy, optimizer=optimizer)
                scheduler.step()

        pipe, optimizer, scheduler = start()
        train(pipe, optimizer, scheduler, range(3))
        saved = pipe.full_state_dict(), optimizer.full_state_dict()
        saved_rates = json.dumps(scheduler.state_dict())
        other, optimizer, scheduler = start()
        other.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        scheduler.load_state_dict(json.loads(saved_rates))
        train(other, optimizer, scheduler, range(3, STEPS))
        other.check_replicas()
        return other.full_state_dict()

    for state in on_ranks(dims, body):
        assert state.keys() == expected.keys()
        for name, values in state.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-9, atol=1e-12)


def test_two_optimizers_of_one_model():
    def body(mesh):
        pipe = make_pipeline(mesh)
        matrices = [one for one in pipe.parameters() if len(one.shape) > 1]
        rest = [one for one in pipe.parameters() if len(one.shape) == 1]
        both = [optim.SGD(matrices, lr=0.1), optim.SGD(rest, lr=0.4)]
        optimizer = mm.ParallelOptimizer(both, pipe)
        scheduler = optim.LRScheduler(optimizer, optim.LinearLR(2, end=0.5))
        scheduler.step()
        assert [one.lr for one in both] == scheduler.lrs == [0.1 * 0.75, 0.4 * 0.75]
        before = state_of(pipe)
        pipe.train_step(*batch(0, ROWS), loss=nn.cross_entropy, optimizer=optimizer)
        scheduler.step()
        assert any(np.any(values != before[name]) for name, values in state_of(pipe).items())
        pipe.check_replicas()
        return scheduler.state_dict()

    states = on_ranks("dp=2,pp=2", body)
    assert all(state == states[0] for state in states)
    assert states[0]["base_lrs"] == [0.1, 0.4]
