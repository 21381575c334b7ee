"""The loss of a batch without training: that of the unsplit model, and no outputs are sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MismatchError, ModuleError, ShapeError
from tests.helpers import tensor_models
from tests.helpers.depth import examples
from tests.helpers.parallel_models import SEED, assert_equal, batch, layers, make_pipeline, on_ranks
from tests.helpers.raises import raises


def loss_alone(x, target, loss=nn.cross_entropy):
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    return loss(model.forward(x), target)  # without a context: dropout is the identity


@given(
    dims=st.sampled_from(["dp=1", "dp=3", "pp=2", "dp=2,pp=2", "dp=2,pp=2,other=2"]),
    rows=st.integers(1, 9),
    parts=st.integers(1, 3),
    ignored=st.booleans(),
)
@settings(max_examples=examples(12))
def test_it_is_that_of_the_unsplit_model(dims, rows, parts, ignored):
    """Whole, and added up over parts; what is left of a replica's rows may be none."""
    x, target = batch(0, rows)
    target[1:] = np.where(target[1:] == 0, -1, target[1:]) if ignored else target[1:]
    target[0] = 1  # one counts at least
    loss = nn.CrossEntropy(ignore_index=-1)
    expected = loss_alone(x, target, loss)

    def body(mesh):
        pipe = make_pipeline(mesh)
        whole = pipe.evaluate(x, target, loss=loss)
        some = min(parts, rows)
        cut = zip(np.array_split(x, some), np.array_split(target, some), strict=True)
        count = loss.count(target)
        return whole, sum(pipe.evaluate(*one, loss=loss, denominator=count) for one in cut)

    for found in on_ranks(dims, body):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("dims", ["tp=2", "dp=2,tp=2", "pp=2,tp=3"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_layers_gather_no_logits(dims, sequence_parallel):
    """Nothing larger than the numbers of a loss moves, beside what passes between the layers."""
    x, target = tensor_models.batch(0)
    model = nn.Sequential(tensor_models.layers("plain"))
    model.materialize(seed=SEED, dtype=np.float64)
    expected = nn.cross_entropy(model(x), target)

    def body(mesh):
        tp = mesh.group("tp")
        options = {"tp": tp, "sequence_parallel": sequence_parallel}
        count = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        made = tensor_models.layers("plain", **options)
        stages = [mm.PipelineStage(number) for number in range(count)]
        for number, layer in enumerate(made):
            stages[number * count // len(made)].add_layer(layer)
        pipe = mm.PipelineParallel(stages, 2, mesh=mesh, seed=SEED, dtype=np.float64)
        loss = mm.parallel.VocabParallelCrossEntropy(tensor_models.VOCAB, group=tp)
        before = mesh.traffic().snapshot()
        found = pipe.evaluate(x, target, loss=loss)
        moved = mesh.traffic() - before
        if not sequence_parallel:
            assert not moved.calls.get("all_gather")
            assert not moved.calls.get("broadcast")
        return found

    np.testing.assert_allclose(on_ranks(dims, body), expected, rtol=1e-12)


def test_the_outputs_stay_where_they_are():
    x, target = batch(0, 8)

    def body(mesh):
        pipe = make_pipeline(mesh)
        before = mesh.traffic().snapshot()
        pipe.evaluate(x, target, loss=nn.cross_entropy)
        return (mesh.traffic() - before).calls

    for calls in on_ranks("dp=2,pp=2", body):
        assert {kind for kind, count in calls.items() if count} <= {
            "all_reduce",
            "pipeline send",
            "pipeline recv",
        }
        assert calls["all_reduce"] == 2  # the header, and the status with the loss


@pytest.mark.parametrize("dims", ["dp=1", "dp=2,pp=2"])
def test_training_goes_on_as_if_there_had_been_none(dims):
    """Also between two steps whose gradients are added up, and after choosing either mode."""

    def body(mesh):
        gradients = []
        for evaluates in (False, True):
            pipe = make_pipeline(mesh)
            with pipe.no_sync():
                pipe.train_step(*batch(0, 8), loss=nn.cross_entropy, denominator=16)
                if evaluates:
                    modes = [
                        chosen().evaluate(*batch(2, 5), loss=nn.cross_entropy)
                        for chosen in (pipe.eval, pipe.train)
                    ]
                    assert modes == [pytest.approx(loss_alone(*batch(2, 5)), rel=1e-12)] * 2
            pipe.train_step(*batch(1, 8), loss=nn.cross_entropy, denominator=16)
            assert pipe.step == 2
            gradients.append({name: p.grad.copy() for name, p in pipe.named_parameters()})
        assert_equal(*gradients)

    on_ranks(dims, body)


def test_replicas_of_one_model():
    x, target = batch(0, 7)

    def body(mesh):
        model = mm.DataParallel(
            nn.Sequential(layers()), mesh, loss=nn.cross_entropy, seed=SEED, dtype=np.float64
        )
        return model.evaluate(x, target)

    np.testing.assert_allclose(on_ranks("dp=3", body), loss_alone(x, target), rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "values"),
    [
        ({"target": None}, ShapeError, ("rank 1", "target", None)),
        ({"loss": None}, ModuleError, ("rank 1", "loss=", None)),
        ({"target": np.zeros(4, np.int64)}, ShapeError, ("rank 0", "x", 8, "target", 4)),
        ({"x": np.zeros((0, 6)), "target": np.zeros(0, np.int64)}, ShapeError, ("mean", "no rows")),
        ({"denominator": "many"}, ModuleError, ("denominator", 0, "'many'")),
    ],
)
def test_what_is_missing_is_told_on_all_ranks(change, error, values):
    """And the next step works."""
    x, target = batch(0, 8)

    def body(mesh):
        pipe = make_pipeline(mesh)
        with raises(error, *values):
            pipe.evaluate(**{"x": x, "target": target, "loss": nn.cross_entropy, **change})
        return pipe.evaluate(x, target, loss=nn.cross_entropy)

    np.testing.assert_allclose(on_ranks("pp=2", body), loss_alone(x, target), rtol=1e-12)


def test_one_rank_trains_while_the_other_evaluates():
    x, target = batch(0, 8)

    def body(mesh):
        pipe = make_pipeline(mesh)
        take = pipe.evaluate if mesh.rank else pipe.train_step
        with raises(MismatchError, 0, "train_step", 1, "evaluate", 4):
            take(x, target, loss=nn.cross_entropy)

    on_ranks("dp=2", body)
