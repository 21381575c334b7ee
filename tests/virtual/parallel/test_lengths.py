"""Batches that are given as microbatches of any shapes, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MismatchError, ModuleError, ScheduleError, ShapeError, StageError
from mpimesh.parallel import DataParallel, PipelineStage
from tests.helpers.depth import examples
from tests.helpers.parallel_lengths import (
    LOSS,
    assert_bits_of_one_process,
    length_batch,
    length_stages,
    lengths_alone,
    make_lengths,
    on_one,
)
from tests.helpers.parallel_models import on_ranks
from tests.helpers.parallel_schedules import all_on_one
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of
from tests.helpers.parallel_values import Rows, TreeLoss, make, mixed_stages, random_tree
from tests.helpers.raises import names

SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6)


def only_needed(pipe, x, target, extra):
    """The parts of a batch that a rank needs: the rest is None."""
    numbers = [stage.stage_id for stage in pipe.local_stages]
    return (
        x if 0 in numbers else None,
        target if pipe.num_stages - 1 in numbers else None,
        {"extra": extra} if any(stage.inputs for stage in pipe.local_stages) else None,
    )


@given(
    SIZES,
    st.sampled_from([(1, "gpipe"), (4, "1f1b"), (4, "zb1p"), (2, "interleaved"), (2, "zbv")]),
)
@settings(max_examples=examples(30))
def test_any_shapes_give_the_bits_of_one_process(sizes, schedule):
    batch = length_batch(sizes)
    expected = lengths_alone(*batch)
    num_ranks, name = schedule

    def body(mesh):
        pipe = make_lengths(mesh, 6, schedule=all_on_one if num_ranks == 1 else name)
        for mine in ((*batch[:2], {"extra": batch[2]}), only_needed(pipe, *batch)):
            assert_bits_of_one_process(pipe, mine, expected)
        assert_nothing_left(mesh)

    on_ranks(f"pp={num_ranks}", body, rendezvous=True)


@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2", "dp=2,pp=4"])
@pytest.mark.parametrize("count", [7, 2, 1])
def test_microbatches_are_dealt_to_replicas(dims, count):
    """Also where some replicas get none."""
    batch = length_batch([(2 + i % 3, 1 + i) for i in range(count)])
    loss, gradients, outputs = lengths_alone(*batch)

    def body(mesh):
        whole = not mesh.contains_dim("pp")
        stages = on_one() if whole else length_stages()
        schedule = "interleaved" if not whole and mesh.dim_size("pp") == 2 else "1f1b"
        pipe = make_lengths(mesh, stages=stages, schedule=schedule)
        x, target, inputs = only_needed(pipe, *batch)
        got = pipe.train_step(x, target, loss=LOSS, inputs=inputs)
        assert got == pytest.approx(loss, rel=1e-12)
        for name, parameter in pipe.named_parameters():
            expected = gradients[name.removeprefix("0.layers.")]
            np.testing.assert_allclose(parameter.grad, expected, rtol=1e-9, atol=1e-14)
        y = pipe.forward(x, inputs=inputs)
        assert (y is not None) == (target is not None)
        y = pipe.forward(x, inputs=inputs, everywhere=True)
        for one, other in zip(y, outputs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-14)

    on_ranks(dims, body, rendezvous=True)


def test_both_ways_take_turns():
    """A batch given whole keeps its interfaces, whatever microbatches came between."""
    sizes = [(2, 3), (1, 5), (3, 1)]
    batch = length_batch(sizes)
    loss, _, _ = lengths_alone(*batch)
    even = [np.concatenate([one[:1, :1] for one in values]) for values in batch]

    def body(mesh):
        pipe = make_lengths(mesh, schedule="1f1b")
        losses = []
        for _ in range(2):
            for x, target, extra in (batch, even):
                pipe.step = 0
                losses.append(pipe.train_step(x, target, loss=LOSS, inputs={"extra": extra}))
        assert losses[0] == loss
        assert losses[2:] == losses[:2]

    on_ranks("pp=4", body)


def test_trees_and_long_interfaces_as_microbatches():
    """Trees of other structures in each microbatch: only the stages need to know them."""
    many = {f"{'a long name' * 5} {place}": Rows(floating=place % 2 == 0) for place in range(80)}
    specs = [Rows(2), many, (Rows(3), Rows(2, floating=False)), Rows(1)]
    rows = [3, 1, 4]
    xs = [random_tree(specs[0], count) for count in rows]
    goals = [random_tree(specs[-1], count, seed=1) for count in rows]
    model = nn.Sequential([layer for stage in mixed_stages(specs) for layer in stage.layers])
    model.materialize(seed=5, dtype=np.float64)
    loss = 0.0
    for x, goal in zip(xs, goals, strict=True):
        context = nn.Context()
        y = model.forward(x, context)
        value, dy = TreeLoss().value_and_grad(y, goal, denominator=8)
        loss += value
        model.backward(dy, context)
    gradients = {name: p.grad for name, p in model.named_parameters()}

    def body(mesh):
        pipe = make(mesh, mixed_stages(specs), 3)
        batch = mm.Microbatches(xs), mm.Microbatches(goals)
        for _ in range(2):
            pipe.zero_grad()
            assert pipe.train_step(*batch, loss=TreeLoss()) == loss
            for name, parameter in pipe.named_parameters():
                np.testing.assert_array_equal(parameter.grad, gradients[name])
        assert_nothing_left(mesh)

    on_ranks("pp=3", body, rendezvous=True)


def test_replicas_of_a_model_take_microbatches():
    x = mm.Microbatches([np.ones((2, 5, 3)), np.ones((1, 2, 3)), np.ones((4, 1, 3))])

    def body(mesh):
        y = DataParallel(nn.Linear(3, 2), mesh, num_microbatches=2, dtype="float64").forward(x)
        return [one.shape for one in y]

    assert on_ranks("dp=2", body) == [[(2, 5, 2), (1, 2, 2), (4, 1, 2)]] * 2


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("microbatch", [0, 2])
def test_a_stage_that_raises(kind, stage, microbatch):
    batch = length_batch([(2, 3), (1, 5), (3, 1), (2, 2)])
    loss, _, _ = lengths_alone(*batch)

    def body(mesh):
        stages, trap = length_stages(), Trap()
        stages[stage].add_layer(trap)
        pipe = make_lengths(mesh, stages=stages)
        x, target, inputs = only_needed(pipe, *batch)
        trap.arm(kind, microbatch)
        error = error_of(partial(pipe.train_step, x, target, loss=LOSS, inputs=inputs))
        assert type(error) is StageError
        action = f"{stage}{kind}{microbatch}"
        names(str(error), f"stage {stage}", f"microbatch {microbatch}", action, "ValueError")
        assert_nothing_left(mesh)
        trap.disarm()
        assert pipe.train_step(x, target, loss=LOSS, inputs=inputs) == loss

    on_ranks("pp=4", body, rendezvous=microbatch > 0)


X, TARGET, EXTRA = length_batch([(2, 3), (1, 5), (3, 1)])


@pytest.mark.parametrize(
    ("x", "target", "extra", "error", "values"),
    [
        (X, TARGET[0], EXTRA, ShapeError, ("x", "Microbatches", "target")),
        (X[0], TARGET[0], EXTRA, ShapeError, ("inputs['extra']", "Microbatches", "x")),
        (
            X,
            mm.Microbatches(TARGET[:2]),
            EXTRA,
            ShapeError,
            ("microbatches", "x", 3, "target", 2),
        ),
        (
            X,
            mm.Microbatches(TARGET[::-1]),
            EXTRA,
            ShapeError,
            ("rows", "x", 2, "target", 3, "microbatch 0"),
        ),
        ((X, X), TARGET, EXTRA, ModuleError, ("x[0]", "Microbatches")),
        (
            mm.Microbatches([*X] * 3),
            mm.Microbatches([*TARGET] * 3),
            mm.Microbatches([*EXTRA] * 3),
            ScheduleError,
            ("9 microbatches", "1 replicas", 4, "num_microbatches=9"),
        ),
    ],
)
def test_microbatches_that_do_not_fit_are_told_on_all_ranks(x, target, extra, error, values):
    def body(mesh):
        pipe = make_lengths(mesh)
        mine: tuple[Any, Any, Any] = (x, target, {"extra": extra})
        if mesh.rank == 1:
            mine = (None, None, None)
        call = partial(pipe.train_step, *mine[:2], loss=LOSS, inputs=mine[2])
        raised = error_of(call)
        assert type(raised) is error
        text = str(raised).replace("rank 2", "rank 0").replace("rank 3", "rank 0")
        names(text, "rank 0", *values)
        assert_nothing_left(mesh)
        pipe.train_step(X, TARGET, loss=LOSS, inputs={"extra": EXTRA})

    on_ranks("pp=4", body)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (lambda one: mm.Microbatches(one[::-1]), ["microbatches"]),
        (lambda one: np.concatenate([part[:, :1] for part in one]), ["microbatches", "whole"]),
        (lambda one: mm.Microbatches(one[:2]), ["rows"]),
        (lambda one: mm.Microbatches([part + 0.0 for part in one]), ["x", "rows", "float64"]),
        (lambda one: mm.Microbatches([part % 3 for part in one]), ["x", "CRC-32"]),
    ],
)
def test_replicas_that_are_given_different_microbatches(change, values, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def body(mesh):
        pipe = make_lengths(mesh)
        mine = X if mesh.rank != 4 else change(X)
        x, target, inputs = only_needed(pipe, mine, TARGET, EXTRA)
        error = error_of(partial(pipe.train_step, x, target, loss=LOSS, inputs=inputs))
        assert type(error) is MismatchError
        names(str(error), 4, *values)
        assert_nothing_left(mesh)
        x, target, inputs = only_needed(pipe, X, TARGET, EXTRA)
        pipe.train_step(x, target, loss=LOSS, inputs=inputs)

    on_ranks("dp=2,pp=4", body)


def test_a_gradient_must_match_its_own_microbatch():
    class Swapped(nn.Module):
        """Gives the gradient of the largest shape to every microbatch."""

        def forward(self, x, ctx=None):
            return x

        def backward(self, dy, ctx):
            return np.zeros((9, 9))

    stages = [
        PipelineStage(0).add_layer(nn.Linear(3, 2)),
        PipelineStage(1).add_layer(Swapped()),
    ]

    def body(mesh):
        x = mm.Microbatches([np.ones((2, 3)), np.ones((9, 3))])
        goal = mm.Microbatches([np.ones((2, 2)), np.ones((9, 2))])
        error = error_of(partial(make(mesh, stages).train_step, x, goal, loss=nn.mse_loss))
        sentence = str(error).splitlines()[0]
        names(sentence, "1B0", "microbatch 0", "gradient", (9, 9), "stage 0", (2, 2))

    on_ranks("pp=2", body)
