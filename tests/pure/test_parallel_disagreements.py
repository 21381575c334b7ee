"""Stages that do not fit each other, and ranks that are given different things."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import (
    MismatchError,
    ModuleError,
    ShapeError,
    StageError,
    StageShapeError,
)
from mpimesh.parallel import PipelineStage
from tests.pure.parallel_models import (
    FEATURES,
    batch,
    make_pipeline,
    on_ranks,
    train_alone,
)
from tests.pure.parallel_traps import Reshaped, assert_nothing_left, error_of


class Harder(type(nn.cross_entropy)):  # type: ignore[misc]
    """A loss of another class."""


# -- interfaces between stages --------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            lambda: Reshaped(lambda x: np.concatenate([x, x], 1), since=2),
            r"0F2 .*ShapeError: stage 0 made rows of shape \(8,\) and dtype float64 for stage 1, "
            r"which expects rows of shape \(4,\) and dtype float64",
        ),
        (
            lambda: Reshaped(lambda x: x.astype("float32"), since=5),
            r"0F1 .*stage 0 made .* dtype float32 for stage 1, which expects .* dtype float64",
        ),
        (
            lambda: Reshaped(lambda x: x[:-1]),
            r"0F0 .*ShapeError: stage 0 made an output of shape \(3, 4\) from an input of 4 rows",
        ),
    ],
)
def test_an_output_that_does_not_keep_to_the_interface(layer, message):
    def body(mesh):
        odd = layer()
        stages = [
            PipelineStage(0).add_layer(nn.Linear(FEATURES, 4)).add_layer(odd),
            PipelineStage(1).add_layer(nn.Linear(4, 5)),
        ]
        pipe = make_pipeline(mesh, stages=stages)

        def two_steps():
            for step in range(2):
                pipe.train_step(*batch(step, 16), loss=nn.cross_entropy)

        error = error_of(two_steps)
        assert isinstance(error, StageShapeError)
        assert isinstance(error, ShapeError)
        assert_nothing_left(mesh)
        odd.change = lambda x: x
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        return str(error)

    texts = on_ranks("pp=2", body, rendezvous=True)
    assert texts[0] == texts[1]
    assert re.search(message, texts[0]), texts[0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda dy: dy[:, :2],
            StageShapeError,
            "stage 1 made a gradient of shape (4, 2) and dtype",
        ),
        (lambda dy: dy.astype("float32"), StageShapeError, "dtype float32 for stage 0, whose"),
        (lambda dy: None, StageError, "stage 1 gives no gradient for what it gets from stage 0"),
    ],
)
def test_a_gradient_that_does_not_fit(change, error, message):
    def body(mesh):
        stages = [
            PipelineStage(0).add_layer(nn.Linear(FEATURES, 4)),
            PipelineStage(1).add_layer(Reshaped(change, backward=True)).add_layer(nn.Linear(4, 5)),
        ]
        pipe = make_pipeline(mesh, stages=stages)
        raised = error_of(lambda: pipe.train_step(*batch(0, 16), loss=nn.cross_entropy))
        assert type(raised) is error
        assert message in str(raised)
        assert "in 1B0" in str(raised)
        assert_nothing_left(mesh)

    on_ranks("pp=2", body)


# -- arguments that do not fit ---------------------------------------------------------------


@pytest.mark.parametrize("wrong_rank", [0, 1, 3])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("fewer rows", MismatchError, r"global batch.*ranks \[.*\]: 16.*ranks \[{}\]: 9|: 9.*: 16"),
        ("other features", MismatchError, r"ranks \[{}\]: \(3,\) float64"),
        ("other dtype", MismatchError, r"ranks \[{}\]: \(6,\) float32"),
        ("other values", MismatchError, r"batch in x, .*CRC-32.*ranks \[{}\]: [0-9a-f]{{8}}(\n|$)"),
        ("other targets", MismatchError, r"batch in target, .*ranks \[{}\]: [0-9a-f]{{8}}(\n|$)"),
        ("x and target differ", ShapeError, "on rank {} x has 16 and target 15"),
        ("ragged", StageError, "rank {}: ValueError: setting an array element"),
        ("0-d", ShapeError, "rank {}: ShapeError: x must have rows"),
        ("forward instead", MismatchError, r"same step .*ranks \[{}\]: forward of"),
        ("without sync", MismatchError, r"ranks \[{}\]: train_step 2 .* without reducing"),
    ],
)
def test_ranks_that_are_given_different_things(wrong, error, message, wrong_rank):
    def body(mesh):
        pipe = make_pipeline(mesh)
        for step in range(2):
            pipe.train_step(*batch(step, 16), loss=nn.cross_entropy)
        x, target = batch(2, 16)
        arguments = {
            "fewer rows": (x[:9], target[:9]),
            "other features": (np.zeros((16, 3)), target),
            "other dtype": (x.astype("float32"), target),
            "other values": (x[::-1], target),
            "other targets": (x, target[::-1]),
            "x and target differ": (x, target[:15]),
            "ragged": ([[1.0, 2.0], [3.0]], target),
            "0-d": (np.float64(1.0), target),
        }

        mine = mesh.rank == wrong_rank
        given = arguments.get(wrong, (x, target)) if mine else (x, target)
        call = partial(pipe.train_step, *given, loss=nn.cross_entropy)
        if mine and wrong == "forward instead":
            call = partial(pipe.forward, x)
        context = pipe.no_sync() if mine and wrong == "without sync" else nullcontext()
        with context:
            raised = error_of(call)
        assert type(raised) is error
        assert re.search(f"(?s){message.format(wrong_rank)}", str(raised)), raised
        assert_nothing_left(mesh)
        pipe.step = 0
        loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert loss == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)
        return str(raised)

    assert len(set(on_ranks("dp=2,pp=2", body))) == 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": False}, ShapeError, "rank 0 holds the first stage and needs x"),
        ({"target": False}, ShapeError, "rank 1 holds the last stage and needs target"),
        ({"loss": None}, ModuleError, "rank 1 holds the last stage and needs loss="),
    ],
)
def test_what_a_stage_lacks_is_said_on_all_ranks(given, error, message):
    def body(mesh):
        pipe = make_pipeline(mesh)
        x, target = batch(0, 16)
        raised = error_of(
            lambda: pipe.train_step(
                x if given.get("x", True) else None,
                target if given.get("target", True) else None,
                loss=given.get("loss", nn.cross_entropy),
            )
        )
        assert isinstance(raised, error)
        assert message in str(raised)
        return pipe.train_step(x, target, loss=nn.cross_entropy)

    losses = on_ranks("dp=2,pp=2", body)
    np.testing.assert_allclose(losses, train_alone(1, 16).losses * 4, rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "denominator", "told"),
    [
        (nn.cross_entropy, 4.0, "CrossEntropy divided by 4.0"),
        (nn.cross_entropy, 16, "CrossEntropy divided by 16.0"),
        (Harder(), None, "Harder divided by what the batch counts"),
    ],
)
def test_replicas_that_train_by_different_losses(loss, denominator, told):
    """Their gradients would be added up all the same."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        x, target = batch(0, 16)
        odd = mesh.coord("dp") == 1

        def step():
            if odd:
                pipe.train_step(x, target, loss=loss, denominator=denominator)
            else:
                pipe.train_step(x, target, loss=nn.cross_entropy)

        error = error_of(step)
        assert isinstance(error, MismatchError)
        assert_nothing_left(mesh)
        # Ranks without the last stage need not know.
        last = mesh.coord("pp") == 1
        options = {"loss": loss, "denominator": denominator} if last else {"loss": None}
        pipe.train_step(x, target, **options)
        return str(error)

    texts = on_ranks("dp=2,pp=2", body)
    assert len(set(texts)) == 1
    assert "of the last stage must train by the same loss and denominator" in texts[0]
    assert "ranks [1]: CrossEntropy divided by what the batch counts" in texts[0]
    assert f"ranks [3]: {told}" in texts[0]


def test_a_denominator_that_is_no_number():
    def body(mesh):
        pipe = make_pipeline(mesh)
        x, target = batch(0, 16)
        error = error_of(
            lambda: pipe.train_step(
                x,
                target,
                loss=nn.cross_entropy,
                denominator="rows",  # type: ignore[arg-type]
            )
        )
        assert isinstance(error, ModuleError)
        assert "denominator must be a number above 0, got 'rows'" in str(error)
        assert_nothing_left(mesh)

    on_ranks("pp=2", body)


def test_without_checks_only_shapes_are_compared(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def body(mesh):
        x, target = batch(0, 16)
        other = x + (mesh.rank == 3)
        make_pipeline(mesh).train_step(other, target, loss=nn.cross_entropy)

    on_ranks("dp=2,pp=2", body)


def test_a_batch_is_compared_by_its_values_only():
    """Not by its strides; ranks without first or last stage may be given None."""

    def body(mesh):
        x, target = batch(0, 16)
        if mesh.rank == 2:
            x = np.asfortranarray(x)
        elif mesh.rank == 3:
            target = np.stack([target, target], axis=1)[:, 0]
        first, last = mesh.coord("pp") == 0, mesh.coord("pp") == 1
        pipe = make_pipeline(mesh)
        given = (x if first else None, target if last else None)
        return pipe.train_step(*given, loss=nn.cross_entropy)

    losses = on_ranks("dp=2,pp=2", body)
    assert losses[0] == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)
