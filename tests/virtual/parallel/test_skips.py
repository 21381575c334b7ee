"""Skips: outputs that go further than to the next stage, against one process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MismatchError, ScheduleError, StageError, StageShapeError
from mpimesh.parallel import PipelineStage
from mpimesh.parallel.microbatch import microbatch_rows
from mpimesh.schedule import Action, ActionKind
from tests.helpers.depth import deep, examples
from tests.helpers.parallel_models import on_ranks
from tests.helpers.parallel_schedules import all_on_one
from tests.helpers.parallel_skips import check_like_one_process, skip_stages, skips_alone
from tests.helpers.parallel_traps import Reshaped, Trap, assert_nothing_left, error_of, message_tag
from tests.helpers.parallel_values import (
    Rows,
    TreeLoss,
    assert_same_tree,
    make,
    of_rows,
    random_tree,
)
from tests.helpers.raises import names, raises

SPECS = [
    Rows(3),
    {"h": Rows(2), "ids": Rows(floating=False)},
    (Rows(2, 2), {"z": Rows(), "a": Rows(1)}),
    Rows(4),
    (Rows(1), Rows(2, floating=False)),
    Rows(3),
    Rows(2),
]
"""Of six stages."""

POSSIBLE = [(source, to) for to in range(6) for source in range(to - 1)]
PLACES = [
    (1, all_on_one),
    (6, "1f1b"),
    (6, "zb1p"),
    (3, "interleaved"),
    (2, "looped_bfs"),
    (3, "zbv"),
    (3, "dualpipev"),
]


def nothing_left(mesh, pipe):
    assert_nothing_left(mesh)
    edges = pipe._engine.plans.edges
    communicator = mesh.group("pp").communicator
    for source, to in edges.skips:
        for action in (
            Action(source, ActionKind.SEND_F, 0, to),
            Action(to, ActionKind.SEND_B, 0, source),
        ):
            assert not communicator.probe(message_tag(action, edges))
    mesh.barrier()


@given(
    st.lists(st.sampled_from(POSSIBLE), unique=True, max_size=5),
    st.sets(st.integers(0, 5), max_size=2),
    st.sampled_from(PLACES),
    st.integers(1, 9),
    st.booleans(),
)
@example([(0, 2), (0, 3), (1, 3), (0, 4)], set(), (3, "interleaved"), 3, True)
@settings(max_examples=examples(50))
def test_any_skips_give_the_bits_of_one_process(skips, takers, place, rows, cut):
    num_ranks, schedule = place

    def body(mesh):
        pipe = check_like_one_process(mesh, SPECS, skips, sorted(takers), rows, schedule, cut=cut)
        nothing_left(mesh, pipe)

    on_ranks(f"pp={num_ranks}", body, rendezvous=True)


SKIPS = [(0, 2), (0, 5), (1, 3), (3, 5)]


@pytest.mark.parametrize("rows", [13, 1])
def test_replicas(rows):
    x, target = random_tree(SPECS[0], rows), random_tree(SPECS[-1], rows)
    loss, gradients, (y,) = skips_alone(SPECS, SKIPS, [(x, target, None)])

    def body(mesh):
        pipe = make(mesh, skip_stages(SPECS, SKIPS), schedule="interleaved")
        assert pipe.train_step(x, target, loss=TreeLoss()) == pytest.approx(loss, rel=1e-12)
        for stage in pipe.local_stages:
            expected = gradients[stage.stage_id]
            np.testing.assert_allclose(stage.parameters()[0].grad, expected, rtol=1e-9, atol=1e-14)
        assert_same_tree(pipe.forward(x, everywhere=True), y, exact=False)

    on_ranks("dp=2,pp=3", body)


@pytest.mark.parametrize("frozen", [1, 2, 4])
def test_no_gradient_goes_to_frozen_stages(frozen):
    """Also where a skip jumps from before the first trained stage to behind it."""
    x, target = random_tree(SPECS[0], 9), random_tree(SPECS[-1], 9)
    spans = microbatch_rows(9, 4)
    parts = [(of_rows(x, s), of_rows(target, s), None) for s in spans]
    loss, gradients, _ = skips_alone(SPECS, SKIPS, parts)

    def body(mesh):
        stages = skip_stages(SPECS, SKIPS)
        for stage in stages[:frozen]:
            stage.freeze()
        pipe = make(mesh, stages)
        assert pipe.train_step(x, target, loss=TreeLoss()) == loss
        (stage,) = pipe.local_stages
        if stage.stage_id >= frozen:
            expected = gradients[stage.stage_id]
            np.testing.assert_array_equal(stage.parameters()[0].grad, expected)
        nothing_left(mesh, pipe)

    on_ranks("pp=6", body, rendezvous=True)


def test_a_residual_over_stages():
    """The sum of a stage's input and its output, with the layers that there are."""

    def made():
        return [
            PipelineStage(0).add_layer(nn.Linear(3, 4)),
            PipelineStage(1).add_layer(nn.GELU()).add_layer(nn.Linear(4, 4)),
            PipelineStage(2, skips=(0,)).add_layer(nn.Add()).add_layer(nn.Linear(4, 2)),
        ]

    x, target = random_tree(Rows(3), 8), random_tree(Rows(2), 8)
    first, second, third = made()
    for stage, index in ((first, 0), (second, 1), (third, 3)):
        stage.materialize(seed=5, dtype=np.float64, index=index)
    context = nn.Context()
    h = first.forward(x, context)
    y = third.forward((second.forward(h, context), h), context)
    loss, dy = nn.mse_loss.value_and_grad(y, target, denominator=8)
    dz, dh = third.backward(dy, context)
    first.backward(second.backward(dz, context) + dh, context)
    expected = [p.grad for stage in (first, second, third) for p in stage.parameters()]

    def body(mesh):
        pipe = make(mesh, made(), 2)
        assert pipe.train_step(x, target, loss=nn.mse_loss) == pytest.approx(loss, rel=1e-12)
        mine = expected[2 * mesh.rank : 2 * mesh.rank + 2]
        for parameter, gradient in zip(pipe.parameters(), mine, strict=True):
            np.testing.assert_allclose(parameter.grad, gradient, rtol=1e-10, atol=1e-14)

    on_ranks("pp=3", body)


# -- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("stage", [*deep(0), 2, *deep(5)])
@pytest.mark.parametrize("cut", [False, True])
def test_a_stage_that_raises(kind, stage, cut):
    x, target = random_tree(SPECS[0], 8), random_tree(SPECS[-1], 8)
    spans = microbatch_rows(8, 4)
    parts = [(of_rows(x, s), of_rows(target, s), None) for s in spans]
    loss, _, _ = skips_alone(SPECS, SKIPS, parts)

    def body(mesh):
        stages, trap = skip_stages(SPECS, SKIPS), Trap()
        stages[stage].add_layer(trap)
        pipe = make(mesh, stages)
        given = [mm.Microbatches(one) for one in zip(*parts, strict=True)] if cut else [x, target]
        for microbatch in (0, 2):
            trap.arm(kind, microbatch)
            error = error_of(partial(pipe.train_step, *given[:2], loss=TreeLoss()))
            assert type(error) is StageError
            action = f"{stage}{kind}{microbatch}"
            names(str(error), f"stage {stage}", f"microbatch {microbatch}", action, "ValueError")
            nothing_left(mesh, pipe)
            trap.disarm()
        assert pipe.train_step(*given[:2], loss=TreeLoss()) == loss

    on_ranks("pp=6", body, rendezvous=cut)


@pytest.mark.parametrize(
    ("change", "error", "values"),
    [
        (lambda dx: dx[0], StageShapeError, ([1, 0], "tuple of 2", "ndarray")),
        (lambda dx: (dx[0],), StageShapeError, ([1, 0], "tuple of 2", "tuple of 1")),
        (lambda dx: (dx[0], None), StageError, ("gradient", "stage 0")),
        (lambda dx: None, StageError, ("gradient", "stage 1")),
        (
            lambda dx: (dx[0], dx[1][:, :1]),
            StageShapeError,
            ("gradient", (2, 1), "stage 0", (2, 2), "float64"),
        ),
    ],
)
def test_gradients_that_do_not_fit(change, error, values):
    specs = [Rows(3), Rows(2), Rows(2), Rows(1)]

    def body(mesh):
        stages = skip_stages(specs, [(0, 2)])
        odd = PipelineStage(2, skips=(0,)).add_layer(Reshaped(change, backward=True))
        stages[2] = odd.add_layer(stages[2].layers[0])
        pipe = make(mesh, stages)
        x, target = random_tree(specs[0], 8), random_tree(specs[-1], 8)
        raised = error_of(partial(pipe.train_step, x, target, loss=TreeLoss()))
        assert type(raised) is error
        names(str(raised).splitlines()[0], "rank 2", "2B0", "stage 2", *values)
        nothing_left(mesh, pipe)

    on_ranks("pp=3", body)


@pytest.mark.parametrize("skips", [(1,), (2,), (-1,), (0, 0), (0.0,), ("0",)])
def test_skips_come_from_stages_before_the_last_one(skips):
    with raises(ScheduleError, "skips", "stage_id 2", "stage 1", skips):
        PipelineStage(2, skips=skips)


def test_skips_are_compared_and_shown():
    assert repr(PipelineStage(3, skips=(1, 0))) == "PipelineStage(3, skips=(0, 1))"

    def body(mesh):
        stages = [*map(PipelineStage, range(2)), PipelineStage(2, skips=(0,) if mesh.rank else ())]
        with pytest.raises(MismatchError, match=r"skips \[\(0, 2\)\]"):
            make(mesh, stages)

    on_ranks("pp=3", body)
