"""Stages that do not fit each other, and ranks that are given different things."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import (
    MismatchError,
    ModuleError,
    ModuleStateError,
    ShapeError,
    StageError,
    StageShapeError,
)
from mpimesh.parallel import PipelineStage
from tests.helpers import tensor_models
from tests.helpers.depth import deep
from tests.helpers.parallel_models import (
    FEATURES,
    assert_equal,
    batch,
    make_pipeline,
    on_ranks,
    train_alone,
)
from tests.helpers.parallel_traps import Reshaped, assert_nothing_left, error_of
from tests.helpers.raises import names, raises


class Harder(type(nn.cross_entropy)):  # type: ignore[misc]
    """A loss of another class."""


# -- interfaces between stages --------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "values"),
    [
        (
            lambda: Reshaped(lambda x: np.concatenate([x, x], 1), since=2),
            ("0F2", "ShapeError", "stage 1", (8,), (4,), "float64"),
        ),
        (
            lambda: Reshaped(lambda x: x.astype("float32"), since=5),
            ("0F1", "ShapeError", "stage 1", "float32", "float64"),
        ),
        (lambda: Reshaped(lambda x: x[:-1]), ("0F0", "ShapeError", (3, 4), "4 rows")),
    ],
)
def test_an_output_that_does_not_keep_to_the_interface(layer, values):
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
    names(texts[0].splitlines()[0], "rank 0", "stage 0", *values)  # a traceback follows


@pytest.mark.parametrize(
    ("change", "error", "values"),
    [
        (lambda dy: dy[:, :2], StageShapeError, ("gradient", (4, 2), (4, 4), "float64")),
        (lambda dy: dy.astype("float32"), StageShapeError, ("gradient", "float32", "float64")),
        (lambda dy: None, StageError, ("ModuleStateError", "gradient")),
    ],
)
def test_a_gradient_that_does_not_fit(change, error, values):
    def body(mesh):
        stages = [
            PipelineStage(0).add_layer(nn.Linear(FEATURES, 4)),
            PipelineStage(1).add_layer(Reshaped(change, backward=True)).add_layer(nn.Linear(4, 5)),
        ]
        pipe = make_pipeline(mesh, stages=stages)
        raised = error_of(lambda: pipe.train_step(*batch(0, 16), loss=nn.cross_entropy))
        assert type(raised) is error
        sentence = str(raised).splitlines()[0]
        names(sentence, "rank 1", "1B0", "stage 1", "stage 0", *values)
        assert_nothing_left(mesh)

    on_ranks("pp=2", body)


# -- arguments that do not fit ---------------------------------------------------------------


@pytest.mark.parametrize("wrong_rank", [*deep(0), 1, *deep(3)])
@pytest.mark.parametrize(
    ("wrong", "error", "values", "row"),
    [
        ("fewer rows", MismatchError, ("batch", "x", "target", 16), "9"),
        ("other features", MismatchError, ("x", "(6,) float64"), r"\(3,\) float64"),
        ("other dtype", MismatchError, ("x", "(6,) float64"), r"\(6,\) float32"),
        ("other values", MismatchError, ("batch", "x", "CRC-32"), "[0-9a-f]{8}"),
        ("other targets", MismatchError, ("batch", "target", "CRC-32"), "[0-9a-f]{8}"),
        ("x and target differ", ShapeError, ("x", "target", 16, 15), None),
        ("ragged", StageError, ("ValueError",), None),
        ("0-d", ShapeError, ("x", "np.float64(1.0)"), None),
        ("forward instead", MismatchError, ("train_step 2",), r"forward\b.*"),
        ("without sync", MismatchError, ("train_step 2",), r"train_step 2\b.* without reducing.*"),
    ],
)
def test_ranks_that_are_given_different_things(wrong, error, values, row, wrong_rank, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

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
        names(str(raised), *values)
        who = f"rank {wrong_rank}:" if row is None else rf"\n +ranks? \[?{wrong_rank}\]?: {row}\n"
        assert re.search(who, f"{raised}\n"), raised
        assert_nothing_left(mesh)
        pipe.step = 0
        loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert loss == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)
        return str(raised)

    assert len(set(on_ranks("dp=2,pp=2", body))) == 1


@pytest.mark.parametrize(
    ("given", "error", "values"),
    [
        ({"x": False}, ShapeError, ("rank 0", "stage", "x")),
        ({"target": False}, ShapeError, ("rank 1", "stage", "target")),
        ({"loss": None}, ModuleError, ("rank 1", "stage", "loss=")),
    ],
)
def test_what_a_stage_lacks_is_said_on_all_ranks(given, error, values):
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
        names(str(raised), *values)
        return pipe.train_step(x, target, loss=nn.cross_entropy)

    losses = on_ranks("dp=2,pp=2", body)
    np.testing.assert_allclose(losses, train_alone(1, 16).losses * 4, rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "denominator", "told"),
    [
        (nn.cross_entropy, 4.0, ("CrossEntropy", 4.0)),
        (nn.cross_entropy, 16, ("CrossEntropy", 16.0)),
        (Harder(), None, ("Harder",)),
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
    rule, first, second = texts[0].splitlines()
    names(rule, "loss", "denominator")
    names(first, 1, "CrossEntropy")
    names(second, 3, *told)


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
        names(str(error), "denominator", 0, "'rows'")
        assert_nothing_left(mesh)

    on_ranks("pp=2", body)


def test_without_checks_only_shapes_are_compared_after_the_first_step(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def body(mesh):
        x, target = batch(0, 16)
        other = x + (mesh.rank == 3)
        pipe = make_pipeline(mesh)
        pipe.train_step(x, target, loss=nn.cross_entropy)
        pipe.train_step(other, target, loss=nn.cross_entropy)

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


def make(mesh, *, zero=None):
    """A small GPT, split where the mesh has a dim for it, and what trains it."""
    tp = mesh.group("tp") if "tp" in mesh.dim_names else None
    stages = [mm.PipelineStage(0)]
    for layer in tensor_models.layers("plain", tp=tp):
        stages[0].add_layer(layer)
    model = mm.PipelineParallel(stages, 2, mesh=mesh, seed=3, dtype="float64")
    inner = optim.SGD(model.parameters(), lr=0.1)
    optimizer = None if zero is None else mm.ParallelOptimizer(inner, model, zero=zero)
    loss: nn.Loss = nn.cross_entropy
    if tp is not None:
        loss = mm.parallel.VocabParallelCrossEntropy(tensor_models.VOCAB, group=tp)
    return model, optimizer, lambda: model.train_step(*tensor_models.batch(0), loss=loss)


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_values_of_one_rank_that_differ_are_told_to_all(odd):
    """Only the replicas of the rank raised, and the others went on to their split group."""

    def body(mesh):
        model, _, train = make(mesh)
        name, one = next(found for found in model.named_parameters() if "mlp" in found[0])
        if mesh.rank == odd:
            one.value()[...] += 1
        with pytest.raises(MismatchError, match=re.escape(name)) as caught:
            model.check_replicas()
        assert caught.value.agreed
        if mesh.rank == odd:
            one.value()[...] -= 1
        model.load_state_dict(model.full_state_dict())
        model.check_replicas()
        assert_nothing_left(mesh)
        return str(caught.value), train()

    assert len(set(on_ranks("dp=2,tp=2", body))) == 1


BAD_NORMS = [-1.0, "1", None, float("nan")]


@pytest.mark.parametrize("zero", [None, 0, 1])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,tp=2"])
def test_a_norm_that_one_rank_got_wrong_is_refused_by_all(dims, zero):
    """That rank raised before it had met the others, and they waited for it."""

    def body(mesh):
        model, optimizer, train = make(mesh, zero=zero)
        train()
        for bad in BAD_NORMS:
            with raises(ModuleError, "rank 1", "max_norm", repr(bad)) as caught:
                model.clip_grad_norm(bad if mesh.rank == 1 else 1.0)
            assert caught.value.agreed
        norm = model.clip_grad_norm(1.0)
        if optimizer is not None:
            optimizer.step()
        model.check_replicas()
        return norm

    assert len(set(on_ranks(dims, body))) == 1


@pytest.mark.parametrize("zero", [None, 0, 1])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,tp=2"])
def test_gradients_that_one_rank_has_forgotten(dims, zero):
    """Without `zero` the other replicas stepped, and were others from then on."""

    def body(mesh):
        model, optimizer, train = make(mesh, zero=zero)
        train()
        before = model.full_state_dict()
        if mesh.rank == 1:
            model.zero_grad()
        cure = "zero_grad()" if zero is None else "clip_grad_norm()"
        with raises(ModuleStateError, "rank 1", cure):
            model.clip_grad_norm(1.0)
        if optimizer is not None:
            with raises(ModuleStateError, "rank 1", "train_step()", "step()", "no_sync()"):
                optimizer.step()
        assert_equal(model.full_state_dict(), before)
        train()
        model.clip_grad_norm(1.0)
        if optimizer is not None:
            optimizer.step()
        model.check_replicas()

    on_ranks(dims, body)


def test_a_refusal_of_all_ranks_is_told_once():
    def body(mesh):
        _, optimizer, _ = make(mesh, zero=0)
        with raises(ModuleStateError, 0, 1, "train_step()", "step()", "no_sync()") as caught:
            optimizer.step()
        assert str(caught.value).count("train_step()") == 1

    on_ranks("dp=2", body)


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,tp=2"])
def test_a_mode_of_one_rank_is_refused(dims):
    """Its dropout was the identity, and the loss one of two models."""

    def body(mesh):
        model, _, train = make(mesh)
        loss = train()
        model.step = 0
        model.set_training(mesh.rank != 1)
        with pytest.raises(MismatchError, match=r"\n +ranks? \[?1\]?: .*\bevaluation\b"):
            train()
        model.train()
        assert train() == loss
        model.eval()
        model.step = 0
        assert train() != loss

    on_ranks(dims, body)


def test_gradients_that_one_rank_has_forgotten_between_steps():
    """The outcome was the gradient of no batch."""

    def body(mesh):
        model, _, train = make(mesh)
        with model.no_sync():
            train()
        if mesh.rank == 1:
            model.zero_grad()
        with pytest.raises(MismatchError, match=r"\n +ranks? \[?0\]?: .*\bgradients of 1\b"):
            train()
        norms = []
        for _ in range(2):
            model.step = 0
            with model.no_sync():
                train()
                train()
            train()
            norms.append(model.clip_grad_norm(1e9))
        return norms

    for norms in on_ranks("dp=2", body):
        assert norms[0] == norms[1]


@pytest.mark.parametrize("call", ["rebuild_buckets", "tune_buckets"])
def test_new_buckets_do_not_drop_gradients_that_are_kept(call):
    """The step after them reduced its own gradients only."""

    def body(mesh):
        model, _, train = make(mesh)
        norms = []
        for refused in (False, True):
            model.step = 0
            with model.no_sync():
                train()
                if refused:
                    with raises(ModuleStateError, 0, 1, "no_sync()", "zero_grad()"):
                        getattr(model, call)()
            train()
            norms.append(model.clip_grad_norm(1e9))
        if mesh.rank == 1:
            with model.no_sync():
                model.buckets.begin()
        with raises(ModuleStateError, "rank 1", "no_sync()", "zero_grad()"):
            getattr(model, call)()
        model.zero_grad()
        getattr(model, call)()
        train()
        model.check_replicas()
        return norms

    for norms in on_ranks("dp=2", body):
        assert norms[0] == norms[1]


@pytest.mark.parametrize("call", ["rebuild_buckets", "tune_buckets"])
def test_new_buckets_are_made_outside_of_no_sync(call):
    """The steps after them, under no_sync, reduced gradients."""

    def body(mesh):
        model, _, train = make(mesh)
        train()
        with model.no_sync():
            with raises(ModuleStateError, "no_sync()", "leave it"):
                getattr(model, call)()
            train()
            assert model.buckets.begun == 1
        train()
        getattr(model, call)()
        train()
        model.check_replicas()

    on_ranks("dp=2", body)


def test_no_sync_is_for_the_buckets_there_are_when_it_is_entered():
    def body(mesh):
        model, _, train = make(mesh)
        without_sync = model.no_sync()
        model.rebuild_buckets()
        with without_sync:
            train()
            assert model.buckets.begun == 1
        train()
        model.check_replicas()

    on_ranks("dp=2", body)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_refused_optimizer_leaves_the_model_as_it_was(zero):
    """Plain steps of it were refused afterwards, as those of a model that replicas divide."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        with pipe.no_sync():
            pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        with raises(ModuleStateError, f"rank {mesh.rank}", "no_sync()"):
            mm.ParallelOptimizer(adam, pipe, zero=zero)
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        adam.step()
        pipe.check_replicas()

    on_ranks("dp=2", body)


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,tp=2"])
def test_sequences_of_no_tokens(dims):
    """The backward of learned positions asked NumPy to divide 0 elements by 0."""

    def body(mesh):
        model, _, _ = make(mesh)
        loss: nn.Loss = nn.cross_entropy
        if "tp" in mesh.dim_names:
            loss = mm.parallel.VocabParallelCrossEntropy(
                tensor_models.VOCAB, group=mesh.group("tp")
            )
        nothing = tensor_models.batch(0, 0)
        assert model.train_step(*nothing, loss=loss) == 0
        assert model.clip_grad_norm(1.0) == 0
        return model.evaluate(*nothing, loss=loss)

    assert set(on_ranks(dims, body)) == {0.0}


@pytest.mark.parametrize("dims", ["dp=2", "dp=1,pp=2"])
def test_a_loss_that_no_rank_was_given(dims):
    """It was a TypeError of the method, where DataParallel has a sentence."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        for call in (pipe.evaluate, pipe.train_step):
            with pytest.raises(ModuleError, match=r"rank \d\b.*\bloss=, got None"):
                call(*batch(0, 8))
        return pipe.evaluate(*batch(0, 8), loss=nn.cross_entropy if mesh.rank or not pp else None)

    pp = "pp" in dims
    assert len(set(on_ranks(dims, body))) == 1
