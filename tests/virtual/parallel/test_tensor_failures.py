"""A rank that fails within split layers ends the step on all ranks, and leaves nothing."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import BudgetError, ModuleError, ShapeError, StageError
from tests.helpers.depth import deep
from tests.helpers.parallel_models import on_ranks
from tests.helpers.parallel_traps import assert_nothing_left, error_of
from tests.helpers.raises import raises
from tests.helpers.tensor_models import batch, trained_alone, trapped


@pytest.mark.parametrize("sequence_parallel", [*deep(False), True])
@pytest.mark.parametrize("dims", [*deep("tp=3"), "pp=2,tp=2", *deep("dp=2,tp=2")])
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


def test_what_is_frozen_stays_frozen():
    """Split embeddings and norms on a split sequence were trained again."""

    def body(mesh):
        tp = mesh.group("tp")
        layers = [nn.Embedding(8, 4).freeze(), nn.LayerNorm(4).freeze(), nn.Linear(4, 8)]
        model = mm.tensor_parallel(
            nn.Sequential(*layers), tp, sequence=mm.parallel.SequenceSplit(tp, length=4)
        )
        return {name: one.requires_grad for name, one in model.named_parameters()}

    for found in on_ranks("tp=2", body):
        assert not any(flag for name, flag in found.items() if name.startswith(("0.", "1.")))
        assert all(flag for name, flag in found.items() if name.startswith("2."))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_ids_of_small_dtypes(dtype):
    """The first id of a later rank did not fit into them, so that rank failed alone."""
    ids = np.array([[0, 5, 100, 127]], dtype)

    def body(mesh):
        tp = mesh.group("tp")
        table = mm.parallel.VocabParallelEmbedding(100_000, 2, group=tp)
        table.materialize(seed=0, dtype=np.float64)
        scores = np.zeros((1, 4, 25_000))
        loss = mm.parallel.VocabParallelCrossEntropy(100_000, group=tp)(scores, ids)
        return table(ids), loss

    whole = nn.Embedding(100_000, 2)
    whole.materialize(seed=0, dtype=np.float64)
    for rows, loss in on_ranks("tp=4", body):
        np.testing.assert_array_equal(rows, whole(ids))
        np.testing.assert_allclose(loss, np.log(100_000))


def test_a_loss_over_another_group_is_refused():
    """It was summed over the layers' group with the parts of another, and gave another number."""

    def body(mesh):
        layers = mm.parallel.gpt_layers(6, 4, 1, 2, max_tokens=4, tp=mesh.group("tp"))
        loss = mm.parallel.VocabParallelCrossEntropy(6, group=mesh.group("dp"))
        model = mm.DataParallel(nn.Sequential(*layers), mesh, loss=loss)
        x = np.zeros((4, 4), np.int64)
        with raises(ModuleError, "loss", "group 'dp'", "'tp'") as caught:
            model.train_step(x, x)
        return caught.value

    for error in on_ranks("dp=2,tp=2", body):
        assert isinstance(error, ModuleError) or "ModuleError" in str(error)


def test_dropout_that_is_off_stays_off():
    def body(mesh):
        tp = mesh.group("tp")
        layer: Any = nn.Dropout(0.5)
        layer.set_training(False)
        layer.set_sequence(mm.parallel.SequenceSplit(tp, length=4))
        return layer(np.ones((1, 2, 3)))

    for y in on_ranks("tp=2", body):
        np.testing.assert_array_equal(y, np.ones((1, 2, 3)))


def test_a_layer_that_stands_twice_stands_twice_when_it_is_split():
    """Its second place had parameters of its own."""

    def body(mesh):
        block = nn.GptBlock(4, 2)
        model = mm.tensor_parallel(
            nn.Sequential(nn.Embedding(8, 4), block, block), mesh.group("tp")
        )
        layers = model.layers
        return layers[1] is layers[2], [name for name, _ in model.named_parameters()]

    (twice, names), _ = on_ranks("tp=2", body)
    assert twice
    assert not any(name.startswith("2.") for name in names)


def test_weights_that_are_split_in_one_place_only_are_refused():
    """The layers were untied without a word."""

    def body(mesh):
        embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        head.weight = embedding.weight
        with raises(ModuleError, "'weight'", (8, 4), "gpt_layers(tied=True)"):
            mm.tensor_parallel(nn.Sequential(embedding, head), mesh.group("tp"))

    on_ranks("tp=2", body)


def test_a_state_of_a_wrong_shape_is_loaded_on_no_rank():
    def body(mesh):
        tp = mesh.group("tp")
        layers = mm.parallel.gpt_layers(6, 4, 1, 2, max_tokens=4, tp=tp, tied=False)
        stages = [mm.PipelineStage(0), mm.PipelineStage(1)]
        for number, layer in enumerate(layers):
            stages[number * 2 // len(layers)].add_layer(layer)
        model = mm.PipelineParallel(stages, 1, mesh=mesh)
        before = model.full_state_dict()
        name = list(before)[-1]
        wrong = {key: one + 1 for key, one in before.items()} | {name: np.zeros((2, 2))}
        with pytest.raises(ShapeError, match=name):
            model.load_state_dict(wrong)
        after = model.full_state_dict()
        assert all(np.array_equal(before[key], after[key]) for key in before)

    on_ranks("pp=2,tp=2", body)


class _Parts:
    """A loss that keeps another where nobody looks for it."""

    def __init__(self, loss):
        self.parts = [loss]

    def __call__(self, y, target):
        return self.parts[0](y, target)

    def value_and_grad(self, y, target, *, denominator):
        return self.parts[0].value_and_grad(y, target, denominator=denominator)


class _Breaks(nn.Module):
    def __init__(self, rank):
        self.rank = rank

    def forward(self, x, ctx=None):
        if self.rank:
            raise ValueError("broken on purpose")
        if ctx is not None:
            ctx.save(self)
        return x

    def backward(self, dy, ctx):
        ctx.take(self)
        return dy


def test_a_loss_within_a_loss_is_watched():
    """The ranks that waited in it waited for ever when another one failed."""

    def body(mesh):
        tp = mesh.group("tp")
        layers = mm.parallel.gpt_layers(6, 4, 1, 2, max_tokens=4, tp=tp)
        loss = _Parts(mm.parallel.VocabParallelCrossEntropy(6, group=tp))
        model = mm.DataParallel(nn.Sequential(*layers, _Breaks(tp.rank)), mesh, loss=loss)
        x = np.zeros((4, 4), np.int64)
        with pytest.raises(StageError, match="broken on purpose"):
            model.train_step(x, x)

    on_ranks("dp=1,tp=2", body)


class _Foreign:
    """A layer that is no Module, with a parameter."""

    def __init__(self):
        self.weight = nn.Parameter("weight", (2,), nn.Constant(1.0))

    def forward(self, x, ctx=None):
        return x * self.weight.value()

    def backward(self, dy, ctx):
        return dy * self.weight.value()

    def parameters(self):
        return [self.weight]


def test_what_would_stay_whole_is_refused():
    """Both gave back the unsplit model without a word."""

    def body(mesh):
        tp: Any = mesh.group("tp")
        model: Any = mm.DataParallel(nn.GptBlock(4, 2), mesh)
        with raises(ModuleError, "tensor_parallel", "got DataParallel"):
            mm.tensor_parallel(model, tp)
        kind: Any = nn.GptBlock
        with raises(ModuleError, "tensor_parallel", "class GptBlock"):
            mm.tensor_parallel(kind, tp)
        whole: list[Any] = [
            nn.Linear(2, 2),
            nn.LayerNorm(2),
            _Foreign(),
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), _Foreign()),
        ]
        splittable = ("Attention", "FeedForward", "SwiGLU", "Embedding", "ColumnParallelLinear")
        for layer in whole:
            with raises(ModuleError, "group 'tp'", *splittable):
                mm.tensor_parallel(layer, tp)
        # Without parameters there is nothing that each rank would hold whole.
        dropout = nn.Dropout(0.5)
        assert mm.tensor_parallel(dropout, tp) is dropout
        # On a split sequence a norm has something to do.
        norm = mm.tensor_parallel(nn.LayerNorm(2), tp, sequence=mm.parallel.SequenceSplit(tp))
        norm.materialize(seed=0)

    on_ranks("dp=1,tp=2", body)
    on_ranks("dp=1,tp=1", body)


def test_all_logits_as_the_docstring_of_gpt_layers_gets_them():
    """It gave stages the name of a model, and did not say how to get what sampling needs."""
    ids = np.array([[1, 2, 3, 4], [6, 5, 0, 1]])
    whole = nn.Sequential(*mm.parallel.gpt_layers(7, 4, 2, 2, max_tokens=4))
    whole.materialize(seed=0, dtype=np.float64)
    expected = whole(ids)

    def body(mesh):
        tp = mesh.group("tp")
        layers = mm.parallel.gpt_layers(7, 4, 2, 2, max_tokens=4, tp=tp)
        stages = mm.PipelineParallel.partition(
            layers, mesh.dim_size("pp"), mesh=mesh, times=[1.0] * len(layers)
        )
        model = mm.PipelineParallel(stages, 2, mesh=mesh, dtype=np.float64)
        y = model.forward(ids, everywhere=True)[:, -1]
        sizes = [len(part) for part in np.array_split(np.arange(7), tp.size)]
        logits = tp.all_gather(y, axis=1, sizes=sizes).resolve()
        np.testing.assert_allclose(logits, expected[:, -1], rtol=1e-10, atol=1e-12)

    on_ranks("pp=2,tp=2", body)


def test_split_layers_tell_what_they_are():
    """Blocks and what is in them were shown by the names of unsplit ones."""

    def body(mesh):
        tp = mesh.group("tp")
        stage = mm.PipelineStage(0)
        for block in (nn.GptBlock(4, 2, mlp="swiglu"), nn.BertBlock(4, 2)):
            split = mm.tensor_parallel(block, tp)
            assert repr(split) == f"{type(block).__name__}(4, 2, hidden=16, group='tp')"
            for within in (split.attention, split.attention.query, split.mlp, split.mlp.down):
                assert repr(within).endswith("group='tp')")
            stage.add_layer(split)
        assert "GptBlock(4, 2, hidden=16, group='tp')" in repr(stage)

    on_ranks("tp=2", body)
    assert repr(nn.GptBlock(4, 2)) == "GptBlock(4, 2, hidden=16)"
