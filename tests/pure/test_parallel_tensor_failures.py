"""A rank that fails within split layers ends the step on all ranks, and leaves nothing."""

from __future__ import annotations

import time
from functools import partial

import pytest

from mpimesh.errors import BudgetError, StageError
from tests.pure.parallel_models import on_ranks
from tests.pure.parallel_traps import assert_nothing_left, error_of
from tests.pure.tensor_models import batch, trained_alone, trapped


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dims", ["tp=3", "pp=2,tp=2", "dp=2,tp=2"])
def test_wherever_it_fails(dims, sequence_parallel):
    expected = trained_alone("plain")[0][0]

    def body(mesh):
        model, traps, loss = trapped(mesh, sequence_parallel)
        failing = mesh.coord("tp") == 1 and not (mesh.contains_dim("dp") and mesh.coord("dp"))
        step = partial(model.train_step, *batch(0), loss=loss)
        for block in (0, 1):
            for place in ("inside", "outside"):
                for kind, microbatch in (("F", 0), ("F", 1), ("B", 0), ("B", 2)):
                    if failing:
                        traps[block][place].arm(kind, microbatch)
                    start_s = time.perf_counter()
                    error = error_of(step)
                    assert time.perf_counter() - start_s < 10
                    assert type(error) is StageError
                    assert "ValueError: boom" in str(error)
                    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
                    assert_nothing_left(mesh)
                    traps[block][place].disarm()
        loss.armed = True
        assert "boom in the loss" in str(error_of(step))
        loss.armed = False
        return step()

    for loss in on_ranks(dims, body):
        assert loss == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_a_step_over_its_budget_ends_alike_on_all_ranks(checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def body(mesh):
        model, _, loss = trapped(mesh, sequence_parallel=False)
        with mesh.budget(bytes=1000 if mesh.rank == 1 else None):
            error = error_of(partial(model.train_step, *batch(0), loss=loss))
        assert type(error) is BudgetError
        return model.train_step(*batch(0), loss=loss)

    for loss in on_ranks("tp=3", body):
        assert loss == pytest.approx(trained_alone("plain")[0][0], rel=1e-11)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_ranks_given_different_batches_are_told(checks, monkeypatch):
    """Before they meet in layers, where arrays of different sizes would be added."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def body(mesh):
        model, _, loss = trapped(mesh, sequence_parallel=False)
        x, target = batch(0)
        rows = 5 if mesh.rank else 6
        text = str(error_of(partial(model.train_step, x[:rows], target[:rows], loss=loss)))
        assert "rows" in text
        other = partial(model.train_step, x, target, loss=loss)
        error_of(partial(model.forward, x) if mesh.rank == 2 else other)
        return text, model.train_step(x, target, loss=loss)

    results = on_ranks("tp=3", body)
    assert len(set(results)) == 1
