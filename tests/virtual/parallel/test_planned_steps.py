"""Steps with a batch like one before go by what was planned then, and differ in nothing else."""

from __future__ import annotations

import pytest

from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError
from tests.helpers.parallel_models import assert_equal, batch, make_pipeline, on_ranks, state_of
from tests.helpers.parallel_traps import assert_nothing_left, error_of
from tests.helpers.raises import names

ROWS = [16, 9, 16, 3, 9, 16, 16]


@pytest.mark.parametrize("dims", ["pp=1", "pp=2", "dp=2", "dp=2,pp=2", "pp=3"])
def test_batches_of_several_sizes_in_turn(dims):
    def body(mesh, *, forgets):
        pipe = make_pipeline(mesh)
        optimizer = optim.AdamW(pipe.parameters(), lr=0.01)
        told = []
        for step, rows in enumerate(ROWS):
            if forgets:
                pipe._engine.tasks.clear()
            x, target = batch(step, rows)
            optimizer.lr = 0.01 / (1 + step)
            told.append(pipe.train_step(x, target, loss=nn.cross_entropy, optimizer=optimizer))
            told.append(pipe.evaluate(x, target, loss=nn.cross_entropy))
            told.append(pipe.forward(x, everywhere=True).tolist())
        planned = len(pipe._engine.tasks)
        assert forgets or planned < 3 * len(ROWS)
        return told, state_of(pipe)

    planned = on_ranks(dims, lambda mesh: body(mesh, forgets=False))
    anew = on_ranks(dims, lambda mesh: body(mesh, forgets=True))
    for (told, state), (expected, expected_state) in zip(planned, anew, strict=True):
        assert told == expected
        assert_equal(state, expected_state)


@pytest.mark.parametrize(
    ("change", "error", "values"),
    [
        ("rate", MismatchError, ("optimizer", "lr=0.01", "lr=0.5")),
        ("step", MismatchError, ("train_step 4", "train_step 7")),
        ("rows", MismatchError, ("batch", 16, 15)),
        ("loss", ModuleError, ("value_and_grad",)),
        ("optimizer", MismatchError, ("AdamW.step", "object.step")),
        ("mode", MismatchError, ("in evaluation mode",)),
    ],
)
@pytest.mark.parametrize("wrong_rank", [0, 3])
def test_what_differs_once_steps_are_planned_is_told(change, error, values, wrong_rank):
    def body(mesh):
        pipe = make_pipeline(mesh)
        optimizer = optim.AdamW(pipe.parameters(), lr=0.01)

        def step(number, loss=nn.cross_entropy, rows=16, by=optimizer):
            x, target = batch(number, 16)
            return pipe.train_step(x[:rows], target[:rows], loss=loss, optimizer=by)

        for number in range(4):
            step(number)
        options = {}
        if mesh.rank == wrong_rank:
            if change == "rate":
                optimizer.lr = 0.5
            elif change == "step":
                pipe.step = 7
            elif change == "mode":
                pipe.eval()
            else:
                wrong = {"rows": 15, "loss": object(), "optimizer": object()}
                options["by" if change == "optimizer" else change] = wrong[change]
        raised = error_of(lambda: step(4, **options))
        assert type(raised) is error
        names(str(raised), *values)
        assert_nothing_left(mesh)
        optimizer.lr, pipe.step = 0.01, 4
        pipe.train()
        return step(4), str(raised)

    results = on_ranks("dp=2,pp=2", body)
    assert len(set(results)) == 1
