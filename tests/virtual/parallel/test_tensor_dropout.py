"""Dropout of what is split over ranks drops what it drops in one process, to the bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.layout.boxes import slices
from mpimesh.nn.protocol import FeaturePart
from tests.helpers.depth import examples
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises

SEED = 5


def whole_mask(p: float, shape: tuple[int, ...], index: int, **position: Any) -> np.ndarray:
    layer = nn.Dropout(p)
    layer.materialize(seed=SEED, index=index)
    found: np.ndarray = layer(np.ones(shape), nn.Context(**position)) > 0
    return found


@settings(max_examples=examples(60))
@given(
    rows=st.integers(0, 5),
    inner=st.lists(st.integers(1, 5), max_size=2),
    features=st.integers(1, 9),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    first_row=st.integers(0, 2**40),
    blocks=st.booleans(),
)
def test_a_part_of_the_features_has_its_part_of_the_mask(
    rows, inner, features, ends, first_row, blocks
):
    start, stop = sorted(min(end, features) for end in ends)
    shape = (rows, *inner, features)
    whole = whole_mask(0.5, shape, 3, step=2, first_row=first_row)
    layer = nn.Dropout(0.5)
    layer.materialize(seed=SEED, index=3)
    part = FeaturePart(start, stop, features)
    assert layer.set_part(part) == part
    with pytest.MonkeyPatch.context() as patch:
        if blocks:
            patch.setattr("mpimesh.nn.dropout._BLOCK_WORDS", 4)
        x = np.ones((*shape[:-1], stop - start))
        ctx = nn.Context(step=2, first_row=first_row)
        y = layer(x, ctx)
    np.testing.assert_array_equal(y > 0, whole[..., start:stop])
    np.testing.assert_array_equal(layer.backward(x, ctx), y)


def unsplit(features: int, hidden: int, p: float) -> list[nn.Module]:
    return [
        nn.LayerNorm(features),
        nn.Linear(features, hidden),
        nn.Sequential(nn.GELU(), nn.Dropout(p)),
        nn.Dropout(p),
        nn.Linear(hidden, features),
        nn.Dropout(p),
    ]


def by_hand(features: int, hidden: int, p: float, **options: Any) -> list[nn.Module]:
    """The linear layers are split, and all else is left for others to adapt."""
    layers = unsplit(features, hidden, p)
    layers[1] = mm.parallel.ColumnParallelLinear(features, hidden, **options)
    layers[4] = mm.parallel.RowParallelLinear(hidden, features, **options)
    return layers


@settings(max_examples=examples(20))
@given(
    size=st.integers(1, 4),
    features=st.integers(1, 4),
    hidden=st.integers(1, 9),
    length=st.integers(1, 5),
    sequence=st.booleans(),
    nested=st.booleans(),
    explicit=st.booleans(),
)
def test_between_split_layers(size, features, hidden, length, sequence, nested, explicit):
    rng = np.random.default_rng(length)
    x, dy = rng.normal(size=(2, 3, length, features))
    whole = nn.Sequential(unsplit(features, hidden, 0.4))
    whole.materialize(seed=SEED, dtype=np.float64)
    ctx = nn.Context(step=1, first_row=7)
    y = whole(x, ctx)
    dx: Any = whole.backward(dy, ctx)
    gradients = {name: one.grad for name, one in whole.named_parameters()}

    def body(mesh):
        group = mesh.group("tp")
        cut = mm.parallel.SequenceSplit(group, length=length) if sequence else None
        layers = by_hand(features, hidden, 0.4, group=group, sequence=cut)
        if explicit:
            layers[3] = mm.parallel.ParallelDropout(0.4, features=hidden, group=group)
        made = [nn.Sequential(layers[:4]), nn.Sequential(layers[4:])] if nested else layers
        model = mm.tensor_parallel(nn.Sequential(made), group, sequence=cut)
        model.materialize(seed=SEED, dtype=np.float64)
        here = (slice(None),) if cut is None else cut.here(x)
        ctx = nn.Context(step=1, first_row=7)
        np.testing.assert_allclose(model(x[here], ctx), y[here], rtol=1e-12, atol=1e-12)
        found: Any = model.backward(dy[here], ctx)
        np.testing.assert_allclose(found, dx[here], rtol=1e-12, atol=1e-12)
        mm.parallel.sum_shared_gradients(model.parameters(), group)
        for one, gradient in zip(model.parameters(), gradients.values(), strict=True):
            np.testing.assert_allclose(one.grad, gradient[slices(one.box)], rtol=1e-12, atol=1e-12)

    on_ranks(f"tp={size}", body)


@pytest.mark.parametrize("dims", ["tp=2", "dp=2,tp=2", "pp=2,tp=3", "pp=3,tp=2"])
def test_in_the_stages_of_a_model_by_hand(dims):
    """Nobody has called `tensor_parallel`, and a stage may end between the split layers."""
    x, target = np.random.default_rng(0).normal(size=(2, 6, 3))
    whole = nn.Sequential(unsplit(3, 7, 0.4))
    whole.materialize(seed=SEED, dtype=np.float64)
    expected, dy = nn.mse_loss.value_and_grad(whole(x, ctx := nn.Context()), target, denominator=6)
    whole.backward(dy, ctx)
    norm = math.sqrt(sum(float((one.grad**2).sum()) for one in whole.parameters()))

    def body(mesh):
        layers = by_hand(3, 7, 0.4, group=mesh.group("tp"))
        pp = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = [mm.PipelineStage(number) for number in range(pp)]
        for number, layer in enumerate(layers):
            stages[number * pp // len(layers)].add_layer(layer)
        model = mm.PipelineParallel(stages, 2, mesh=mesh, seed=SEED, dtype=np.float64)
        assert model.train_step(x, target, loss=nn.mse_loss) == pytest.approx(expected, rel=1e-12)
        assert model.clip_grad_norm(1e9) == pytest.approx(norm, rel=1e-12)

    on_ranks(dims, body)


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_of_attention_weights(size, sequence, kv):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, 6, 8))
    mask = np.arange(6) < np.array([[6], [4]])
    whole = nn.Attention(8, 4, num_kv_heads=kv, causal=True, dropout=0.4)
    whole.materialize(seed=SEED, dtype=np.float64, index=2)
    ctx = nn.Context(step=3, first_row=5)
    y = whole((x, mask), ctx)
    gradient: Any = whole.backward(dy, ctx)
    dx, _ = gradient
    off = nn.Context(training=False)
    assert not np.allclose(y, whole((x, mask), off))

    def body(mesh):
        group = mesh.group("tp")
        cut = mm.parallel.SequenceSplit(group) if sequence else None
        layer = mm.parallel.ParallelAttention(
            8, 4, num_kv_heads=kv, causal=True, dropout=0.4, group=group, sequence=cut
        )
        layer.materialize(seed=SEED, dtype=np.float64, index=2)
        here = (slice(None),) if cut is None else cut.here(x)
        ctx = nn.Context(step=3, first_row=5)
        np.testing.assert_allclose(layer((x[here], mask[here]), ctx), y[here], atol=1e-12)
        found, _ = layer.backward(dy[here], ctx)
        np.testing.assert_allclose(found, dx[here], atol=1e-12)

    on_ranks(f"tp={size}", body)


def test_what_needs_all_features_is_refused():
    def body(mesh):
        group = mesh.group("tp")
        tp: dict[str, Any] = {"group": group}

        def between(*layers: Any) -> nn.Sequential:
            return nn.Sequential(
                mm.parallel.ColumnParallelLinear(4, 6, **tp),
                *layers,
                mm.parallel.RowParallelLinear(6, 4, **tp),
            )

        for layer in (
            nn.LayerNorm(3),
            nn.RMSNorm(3),
            nn.Normalize(),
            nn.Sequential(nn.ReLU(), nn.LayerNorm(3)),
            nn.Linear(3, 3),
            mm.parallel.ColumnParallelLinear(3, 6, **tp),
            nn.Attention(3, 1),
            nn.FeedForward(3, 3),
            nn.GptBlock(3, 1),
        ):
            values = ("6 features", 3 * mesh.rank, 3 * mesh.rank + 3)
            with raises(ModuleError, *values):
                between(layer).materialize(seed=0)
            with raises(ModuleError, *values):
                mm.tensor_parallel(between(layer), group)
            with raises(ModuleError, *values):
                mm.DataParallel(between(layer), mesh, loss=nn.mse_loss)
        with raises(ModuleError, "RowParallelLinear(8, 4", "extent=8", "extent=6"):
            between(mm.parallel.RowParallelLinear(8, 4, **tp)).materialize(seed=0)
        with raises(ModuleError, "Dropout(0.5)", "extent=8", "extent=6"):
            between(mm.parallel.ParallelDropout(features=8, **tp)).materialize(seed=0)
        with raises(ModuleError, "LayerNorm(3", *values):
            mm.parallel.ParallelFeedForward(4, 6, activation=nn.LayerNorm(3), **tp)
        twice = nn.Dropout()
        with raises(ModuleError, twice, "features"):
            nn.Sequential(twice, *between(twice)).materialize(seed=0)

    on_ranks("dp=1,tp=2", body)


def test_a_layer_that_gives_other_features_can_say_so():
    class Half(nn.Module):
        def forward(self, x, ctx=None):
            return x[..., : x.shape[-1] // 2]

    class Told(Half):
        def set_part(self, part):
            return None

    def body(mesh):
        group = mesh.group("tp")
        column = mm.parallel.ColumnParallelLinear(4, 8, group=group)
        x = np.ones((2, 4), np.float32)
        silent = nn.Sequential(column, Half(), nn.Dropout())
        silent.materialize(seed=0)
        with raises(ShapeError, "Dropout(0.5)", "(rows, ..., 4)", (2, 2), "set_part"):
            silent(x, nn.Context())
        told = nn.Sequential(column, Told(), nn.Dropout())
        told.materialize(seed=0)
        assert told(x, nn.Context()).shape == (2, 2)

    on_ranks("tp=2", body)


def test_all_classes_of_logits_that_are_split_are_refused():
    def body(mesh):
        group = mesh.group("tp")
        x, target = np.ones((4, 3), np.float32), np.zeros(4, int)

        def step(loss: Any, **options: Any) -> float:
            layer = mm.parallel.ColumnParallelLinear(3, 6, group=group, **options)
            return mm.DataParallel(layer, mesh, loss=loss).train_step(x, target)

        with raises(ModuleError, "VocabParallelCrossEntropy(6, group=...)", "gather_output=True"):
            step(nn.cross_entropy)
        expected = step(nn.cross_entropy, gather_output=True)
        found = step(mm.parallel.VocabParallelCrossEntropy(6, group=group))
        assert found == pytest.approx(expected, rel=1e-6)

    on_ranks("dp=1,tp=2", body)


def test_a_layer_split_for_another_sequence_is_refused():
    def body(mesh):
        group = mesh.group("tp")
        cut = mm.parallel.SequenceSplit(group)
        column = mm.parallel.ColumnParallelLinear(4, 8, group=group)
        with raises(ModuleError, column, "sequence=None", "sequence=SequenceSplit('tp')"):
            mm.tensor_parallel(nn.Sequential(column), group, sequence=cut)

    on_ranks("tp=2", body)
