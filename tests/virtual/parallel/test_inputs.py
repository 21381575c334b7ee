"""Inputs that enter at stages of their own, against the same model in one process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import (
    MismatchError,
    ModuleError,
    ScheduleError,
    ShapeError,
    StageShapeError,
    UnknownNameError,
)
from mpimesh.parallel import DataParallel, PipelineStage
from mpimesh.parallel.microbatch import LEAF, Structure, flatten, microbatch_rows
from mpimesh.parallel.task import first_gradient
from tests.helpers.depth import examples
from tests.helpers.parallel_models import on_ranks
from tests.helpers.parallel_schedules import all_on_one
from tests.helpers.parallel_traps import Reshaped, assert_nothing_left, error_of
from tests.helpers.parallel_values import (
    SEED,
    Mixed,
    Rows,
    TreeLoss,
    assert_same_tree,
    make,
    of_rows,
    random_tree,
)
from tests.helpers.raises import names, raises

NAMED = {"mask": Rows(2, floating=False), "bias": Rows(), "pair": (Rows(1), {"a": Rows(2)})}
X, MIDDLE, Y = Rows(3), (Rows(2), {"h": Rows()}), Rows(2)


class FirstOnly(nn.Module):
    """Gives back the gradient of the first thing it got only."""

    def __init__(self, inner):
        self.inner = inner

    def named_children(self):
        return self.inner.named_children()

    def _own_parameters(self):
        return self.inner._own_parameters()

    def forward(self, x, ctx=None):
        return self.inner.forward(x, ctx)

    def backward_input(self, dy, ctx):
        return self.inner.backward_input(dy, ctx)[0]

    def backward_weight(self, ctx):
        self.inner.backward_weight(ctx)


def stages_with(taken, *, first_only=False):
    """Four stages; stage s takes the inputs ``taken[s]``."""
    specs = [X, MIDDLE, MIDDLE, MIDDLE, Y]
    stages = []
    for number, wanted in enumerate(taken):
        given = specs[number]
        if wanted:
            given = (given, *(NAMED[name] for name in wanted))
        layer = Mixed(given, specs[number + 1])
        stage = PipelineStage(number, inputs=wanted)
        stages.append(stage.add_layer(FirstOnly(layer) if first_only and wanted else layer))
    return stages


def alone(taken, x, inputs, target, rows, count):
    """One process: what each stage makes, by hand; loss, gradients and outputs."""
    stages = stages_with(taken)
    for number, stage in enumerate(stages):
        stage.materialize(seed=SEED, dtype=np.float64, index=number)
    loss, outputs = 0.0, []
    for part in microbatch_rows(rows, count):
        context, value = nn.Context(first_row=part.start), of_rows(x, part)
        for stage in stages:
            named = tuple(of_rows(inputs[name], part) for name in stage.inputs)
            value = stage.forward((value, *named) if named else value, context)
        outputs.append(value)
        step_loss, dy = TreeLoss().value_and_grad(value, of_rows(target, part), denominator=rows)
        loss += float(step_loss)
        for stage in reversed(stages):
            dy = stage.backward(dy, context)
            dy = dy[0] if stage.inputs else dy
    gradients = [stage.parameters()[0].grad for stage in stages]
    leaves = zip(*(flatten(y)[0] for y in outputs), strict=True)
    return loss, gradients, flatten(outputs[0])[1].unflatten([np.concatenate(a) for a in leaves])


TAKEN = st.lists(
    st.lists(st.sampled_from(sorted(NAMED)), unique=True, max_size=3).map(tuple),
    min_size=4,
    max_size=4,
)


@given(
    TAKEN,
    st.sampled_from([(1, "gpipe"), (4, "1f1b"), (4, "zb1p"), (2, "interleaved"), (2, "zbv")]),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=examples(30))
def test_inputs_at_any_stage_give_the_bits_of_one_process(taken, schedule, rows, first_only):
    x, target = random_tree(X, rows), random_tree(Y, rows, seed=1)
    inputs = {name: random_tree(spec, rows, seed=2) for name, spec in NAMED.items()}
    loss, gradients, y = alone(taken, x, inputs, target, rows, 3)
    used = {name for names in taken for name in names}
    num_ranks, name = schedule

    def body(mesh):
        how = all_on_one if num_ranks == 1 else name
        pipe = make(mesh, stages_with(taken, first_only=first_only), 3, schedule=how)
        here = {name: inputs[name] for stage in pipe.local_stages for name in stage.inputs}
        everything = {name: inputs[name] for name in used}
        for given_here in (here, everything, {**dict.fromkeys(used), **here}):
            pipe.zero_grad()
            assert pipe.train_step(x, target, loss=TreeLoss(), inputs=given_here) == loss
            for stage in pipe.local_stages:
                np.testing.assert_array_equal(
                    stage.parameters()[0].grad, gradients[stage.stage_id], strict=True
                )
            assert_same_tree(pipe.forward(x, inputs=given_here, everywhere=True), y)

    on_ranks(f"pp={num_ranks}", body, rendezvous=True)


@pytest.mark.parametrize("rows", [13, 1])
def test_replicas_take_their_rows(rows):
    taken = [("bias",), (), ("mask", "bias"), ()]
    x, target = random_tree(X, rows), random_tree(Y, rows)
    inputs = {name: random_tree(NAMED[name], rows) for name in ("bias", "mask")}
    loss, gradients, y = alone(taken, x, inputs, target, rows, 1)

    def body(mesh):
        pipe = make(mesh, stages_with(taken), schedule="interleaved")
        got = pipe.train_step(x, target, loss=TreeLoss(), inputs=inputs)
        assert got == pytest.approx(loss, rel=1e-12)
        for stage in pipe.local_stages:
            expected = gradients[stage.stage_id]
            np.testing.assert_allclose(stage.parameters()[0].grad, expected, rtol=1e-9, atol=1e-14)
        assert_same_tree(pipe.forward(x, inputs=inputs, everywhere=True), y, exact=False)

    on_ranks("dp=3,pp=2", body)


def test_inputs_of_other_shapes_are_another_kind():
    """Interfaces depend on all inputs, also on ranks that are not given them."""

    def made():
        return [
            PipelineStage(0).add_layer(nn.Linear(2, 2)),
            PipelineStage(1, inputs=("more",)).add_layer(nn.Concat()),
            PipelineStage(2),
        ]

    def body(mesh):
        pipe = make(mesh, made())
        x = np.ones((4, 2))
        for width in (3, 1, 3, 2):
            more = np.full((4, width), 7.0)
            inputs = {"more": more} if mesh.rank == 1 else None
            y = pipe.forward(x if mesh.rank == 0 else None, inputs=inputs, everywhere=True)
            np.testing.assert_array_equal(y[:, 2:], more)

    on_ranks("pp=3", body, rendezvous=True)


def test_an_identity_stage_puts_an_input_beside_what_it_gets():
    def made():
        return [
            PipelineStage(0).add_layer(nn.Linear(2, 3)),
            PipelineStage(1, inputs=("more",)),
            PipelineStage(2).add_layer(nn.Add()),
        ]

    def body(mesh):
        pipe = make(mesh, made())
        x, more = np.ones((4, 2)), np.full((4, 3), 7.0)
        target = np.zeros((4, 3))
        pipe.train_step(x, target, loss=nn.mse_loss, inputs={"more": more})
        y = pipe.forward(x, inputs={"more": more}, everywhere=True)
        z = pipe.forward(x, inputs={"more": 0 * more}, everywhere=True)
        np.testing.assert_allclose(y - z, more)
        if mesh.rank == 0:
            expected = np.outer(2 * y.mean(axis=0) / 3, [1.0, 1.0])
            np.testing.assert_allclose(pipe.parameters()[0].grad, expected)

    on_ranks("pp=3", body)


# -- whose gradient is it? ------------------------------------------------------------------------

PAIR = Structure((LEAF, LEAF))


@pytest.mark.parametrize(
    ("dx", "structure", "entries", "expected"),
    [
        ("dx", LEAF, 2, "dx"),
        (("dx", "dm"), LEAF, 2, "dx"),
        (("dx", None), LEAF, 2, "dx"),
        (None, LEAF, 2, None),
        (("da", "db"), PAIR, 2, ("da", "db")),
        ((("da", "db"), None), PAIR, 2, ("da", "db")),
        ((("da", "db"), None, None), PAIR, 3, ("da", "db")),
        (("da", "db"), PAIR, 1, ("da", "db")),
        (("dx",), LEAF, 1, ("dx",)),
    ],
)
def test_the_first_of_a_tuple_of_gradients(dx, structure, entries, expected):
    assert first_gradient(dx, structure, entries) == expected


# -- wrong use ------------------------------------------------------------------------------------

TAKES = [(), ("mask",), (), ()]


@pytest.mark.parametrize(
    ("inputs", "error", "values"),
    [
        (None, ShapeError, ("stage 1", "inputs={'mask': ...}", None)),
        ({"mask": None}, ShapeError, ("stage 1", "inputs={'mask': ...}")),
        ({"msk": 1}, UnknownNameError, ("'msk'", "'mask'", "inputs=('msk',)")),
        ({"mask": np.ones((7, 2))}, ShapeError, ("x", 8, "inputs['mask']", 7)),
        ([np.ones(8)], ModuleError, ("inputs", "dict", [np.ones(8)])),
        ({"mask": (np.ones(8), np.ones(7))}, ShapeError, (8, "inputs['mask'][1]", 7)),
    ],
)
def test_inputs_that_do_not_fit_are_told_on_all_ranks(inputs, error, values):
    x, target, mask = random_tree(X, 8), random_tree(Y, 8), random_tree(NAMED["mask"], 8)

    def body(mesh):
        pipe = make(mesh, stages_with(TAKES))
        mine = inputs if mesh.rank == 1 else {"mask": mask}
        raised = error_of(partial(pipe.train_step, x, target, loss=TreeLoss(), inputs=mine))
        assert type(raised) is error
        names(str(raised), "rank 1", *values)
        raised = error_of(partial(pipe.forward, x, inputs=mine))
        names(str(raised), "rank 1", *values)
        assert_nothing_left(mesh)
        pipe.train_step(x, target, loss=TreeLoss(), inputs={"mask": mask})

    on_ranks("pp=4", body)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda m: m.astype("int32"), "int32"),
        (lambda m: m[:, :1], "(1,) int64"),
        (lambda m: m + 1, "CRC-32"),
    ],
)
def test_replicas_that_are_given_different_inputs(change, value, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    x, target, mask = random_tree(X, 8), random_tree(Y, 8), random_tree(NAMED["mask"], 8)

    def body(mesh):
        pipe = make(mesh, stages_with(TAKES), schedule="interleaved")
        mine = change(mask) if mesh.rank == 3 else mask
        error = error_of(
            partial(pipe.train_step, x, target, loss=TreeLoss(), inputs={"mask": mine})
        )
        assert type(error) is MismatchError
        names(str(error), "inputs['mask']", 3, value)
        assert_nothing_left(mesh)

    on_ranks("dp=2,pp=2", body)


def test_a_gradient_that_does_not_fit_what_came_in():
    stages = [
        PipelineStage(0).add_layer(nn.Linear(2, 3)),
        PipelineStage(1, inputs=("more",))
        .add_layer(Reshaped(lambda dx: dx[::-1], backward=True))
        .add_layer(nn.Concat()),
    ]

    def body(mesh):
        pipe = make(mesh, stages)
        more = {"more": np.ones((4, 2))}
        call = partial(
            pipe.train_step, np.ones((4, 2)), np.ones((4, 5)), loss=nn.mse_loss, inputs=more
        )
        error = error_of(call)
        assert type(error) is StageShapeError
        sentence = str(error).splitlines()[0]
        names(sentence, "stage 1", "gradient", (1, 2), "stage 0", (1, 3))

    on_ranks("pp=2", body)


@pytest.mark.parametrize("inputs", ["mask", ("a", "a"), ("",), (1,)])
def test_inputs_have_names(inputs):
    with raises(ScheduleError, "inputs=('mask',)", repr(inputs)):
        PipelineStage(1, inputs=inputs)


def test_stages_that_take_other_inputs_on_other_ranks():
    def body(mesh):
        stages = [PipelineStage(0), PipelineStage(1, inputs=("a",) if mesh.rank else ("b",))]
        with pytest.raises(MismatchError, match="'b'"):
            make(mesh, stages)

    on_ranks("pp=2", body)


def test_replicas_of_a_model_take_no_named_inputs():
    def body(mesh):
        with pytest.raises(TypeError):
            DataParallel(nn.Linear(2, 2), mesh).forward(np.ones((2, 2)), inputs={})  # type: ignore[call-arg]

    on_ranks("dp=1", body)
