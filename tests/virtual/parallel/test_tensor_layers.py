"""Layers split over ranks, each against the unsplit layer, whatever the sizes and parts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import Mesh, nn
from mpimesh.errors import (
    DTypeError,
    GroupError,
    ModuleError,
    ModuleStateError,
    ShapeError,
)
from mpimesh.layout import Layout
from mpimesh.layout.boxes import slices
from mpimesh.nn import Parameter
from mpimesh.nn.attention import head_runs
from mpimesh.nn.initializers import first_values
from mpimesh.parallel.split_layers import TensorModel
from tests.helpers.depth import examples
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises

SEED = 5


def check(
    size: int,
    whole: nn.Module,
    split: Any,
    x: Any,
    *,
    sequence_length: int | None = None,
    mask: np.ndarray | None = None,
) -> None:
    """Compare forward, both ways of backward, and all gradients, on `size` virtual ranks.

    Args:
        size: Number of ranks.
        whole: The unsplit layer.
        split: Called with the group and the sequence: returns the layer of a rank.
        x: The input.
        sequence_length: That of x, if results are split along the sequence.
        mask: Goes with x.
    """

    def given_(x: np.ndarray, here: Any) -> Any:
        part = x[here] if x.dtype.kind == "f" else x
        return part if mask is None else (np.ascontiguousarray(part), mask[here].copy())

    everything = (slice(None),)
    whole.materialize(seed=SEED, dtype=np.float64, index=3)
    ctx = nn.Context(step=7, first_row=2)
    y = whole(given_(x, everything), ctx)
    dy = np.random.default_rng(1).normal(size=y.shape)
    dx: Any = whole.backward(dy, ctx)
    gradients = {name: one.grad for name, one in whole.named_parameters()}

    def body(mesh):
        group = mesh.group("tp")
        cut = (
            None
            if sequence_length is None
            else mm.parallel.SequenceSplit(group, length=sequence_length)
        )
        layer = split(group, cut)
        stage = mm.PipelineStage(0).add_layer(layer)
        here = everything if cut is None else cut.here(dy)
        for halves in (False, True):
            stage.materialize(seed=SEED, dtype=np.float64, index=3)
            ctx = nn.Context(step=7, first_row=2)
            close(stage(given_(x, here), ctx), y[here])
            if halves:
                got: Any = stage.backward_input(dy[here], ctx)
                stage.backward_weight(ctx)
            else:
                got = stage.backward(dy[here], ctx)
            assert ctx.is_empty
            if mask is not None:
                assert got[1] is None
                close(got[0], dx[0][here])
            elif dx is None:
                assert got is None
            else:
                close(got, dx[here])
            mm.parallel.sum_shared_gradients(layer.parameters(), group)
            tensor = TensorModel([stage])
            for name, one in layer.named_parameters():
                one.data = one.grad
                close(tensor.whole(one), gradients[name], name)
        assert f"{layer!r}"

    on_ranks(f"tp={size}", body)


def close(got: Any, expected: Any, name: str = "") -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12, err_msg=name)


@settings(max_examples=examples(30))
@given(
    size=st.integers(1, 4),
    vocab=st.integers(1, 9),
    length=st.integers(1, 5),
    sequence=st.booleans(),
)
def test_embedding(size, vocab, length, sequence):
    x = np.random.default_rng(vocab).integers(0, vocab, (3, length))
    check(
        size,
        nn.Embedding(vocab, 4),
        lambda group, cut: mm.parallel.VocabParallelEmbedding(vocab, 4, group=group, sequence=cut),
        x,
        sequence_length=length if sequence else None,
    )


@settings(max_examples=examples(40))
@given(
    size=st.integers(1, 4),
    kv=st.integers(1, 4),
    per_kv=st.integers(1, 4),
    length=st.integers(1, 5),
    sequence=st.booleans(),
    masked=st.booleans(),
    bias=st.booleans(),
    rotary=st.booleans(),
)
def test_attention(size, kv, per_kv, length, sequence, masked, bias, rotary):
    heads = kv * per_kv
    options: dict[str, Any] = {
        "num_kv_heads": kv,
        "head_dim": 2,
        "causal": masked,
        "bias": bias,
        "rotary": nn.RotaryEmbedding(2) if rotary else None,
    }
    rng = np.random.default_rng(heads)
    mask = rng.random((3, length)) < 0.7 if masked else None
    try:
        head_runs(heads, kv, 2, size)
    except ModuleError:
        return
    check(
        size,
        nn.Attention(5, heads, **options),
        lambda group, cut: mm.parallel.ParallelAttention(
            5, heads, group=group, sequence=cut, **options
        ),
        rng.normal(size=(3, length, 5)),
        sequence_length=length if sequence else None,
        mask=mask,
    )


@settings(max_examples=examples(30))
@given(
    size=st.integers(1, 4),
    hidden=st.integers(1, 9),
    length=st.integers(1, 5),
    sequence=st.booleans(),
    swiglu=st.booleans(),
    bias=st.booleans(),
)
def test_mlps(size, hidden, length, sequence, swiglu, bias):
    whole = nn.SwiGLU if swiglu else nn.FeedForward
    split = mm.parallel.ParallelSwiGLU if swiglu else mm.parallel.ParallelFeedForward
    check(
        size,
        whole(3, hidden, bias=bias),
        lambda group, cut: split(3, hidden, group=group, sequence=cut, bias=bias),
        np.random.default_rng(hidden).normal(size=(2, length, 3)),
        sequence_length=length if sequence else None,
    )


@settings(max_examples=examples(30))
@given(size=st.integers(1, 4), length=st.integers(1, 6), features=st.integers(1, 4))
def test_places_of_a_sequence(size, length, features):
    """Dropout, positions, norms and a linear layer depend on places, or share parameters."""

    def layers() -> nn.Sequential:
        return nn.Sequential(
            nn.PositionalEmbedding(length + 1, features),
            nn.Dropout(0.4),
            nn.LayerNorm(features),
            nn.Linear(features, features),
            nn.RMSNorm(features),
            nn.GELU(),
        )

    check(
        size,
        layers(),
        lambda group, cut: mm.tensor_parallel(layers(), group, sequence=cut),
        np.random.default_rng(length).normal(size=(3, length, features)),
        sequence_length=length,
    )


@settings(max_examples=examples(40))
@given(
    size=st.integers(1, 4),
    classes=st.integers(1, 9),
    ignored=st.booleans(),
    inner=st.integers(0, 2),
    rows=st.integers(1, 4),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    scale=st.sampled_from([1.0, 1000.0]),
)
def test_cross_entropy(size, classes, ignored, inner, rows, dtype, scale):
    rng = np.random.default_rng([classes, rows])
    shape = (rows, 3)[: 1 + (inner > 0)]
    y = (rng.normal(size=(*shape, classes)) * scale).astype(dtype)
    target = rng.integers(0, classes, shape)
    if ignored:
        target[rng.random(shape) < 0.3] = -1
    ignore = -1 if ignored else None
    value, grad = nn.CrossEntropy(ignore_index=ignore).value_and_grad(y, target, denominator=2.5)
    error = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-13}[dtype]

    def body(mesh):
        group = mesh.group("tp")
        loss = mm.parallel.VocabParallelCrossEntropy(classes, group=group, ignore_index=ignore)
        start, stop = loss.ranks.runs(classes)[mesh.rank]
        mine = np.ascontiguousarray(y[..., start:stop])
        got, part = loss.value_and_grad(mine, target, denominator=2.5)
        assert part.dtype == y.dtype
        np.testing.assert_allclose(part, grad[..., start:stop], rtol=error, atol=error)
        assert got == pytest.approx(value, rel=10 * error, abs=error)
        assert loss.count(target) == nn.CrossEntropy(ignore_index=ignore).count(target)
        return got

    assert len(set(on_ranks(f"tp={size}", body))) == 1


@settings(max_examples=examples(40))
@given(
    shape=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    size=st.integers(1, 4),
    kind=st.sampled_from([nn.Uniform(0.3), nn.Normal(2.0), nn.Constant(3.0)]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_first_values_are_those_of_the_whole_parameter(shape, axis, size, kind, dtype):
    """To the bit, also where much is skipped."""
    shape = tuple(shape[:2]) + tuple(shape[2:] and [min(shape[2], 9)])
    axis %= len(shape)
    whole = first_values(kind, shape, np.dtype(dtype), seed=3, index=2, name="w")
    layout = Layout(Mesh(f"tp={size}"), f"tp=S{axis}")
    made = np.full(shape, np.nan, dtype)
    for rank in range(size):
        one = Parameter("w", shape, kind)
        one.set_layout(layout, rank)
        one.materialize(seed=3, dtype=dtype, index=2)
        assert one.data.dtype == dtype
        assert one.global_shape == shape
        made[slices(one.box)] = one.data
        assert not one.is_shared
    assert np.array_equal(made, whole)


def test_an_initializer_of_ones_own_is_drawn_in_full():
    class Steps:
        """Takes two words for each value, so nothing can be skipped."""

        def draw(self, bits, count):
            return bits.random_raw(2 * count)[::2].astype(np.float64)

    shape = (3, 1 << 16)
    whole = first_values(Steps(), shape, np.dtype(np.float64), seed=3, index=2, name="w")
    one = Parameter("w", shape, Steps())
    one.set_layout(Layout(Mesh("tp=3"), "S0"), 2)
    one.materialize(seed=3, dtype=np.float64, index=2)
    assert np.array_equal(one.data, whole[2:])


@given(kv=st.integers(1, 6), per_kv=st.integers(1, 6), size=st.integers(1, 8))
def test_heads_of_ranks(kv, per_kv, size):
    """Each query head is on one rank, with the key head that it reads, and evenly so."""
    heads = kv * per_kv
    try:
        queries, keys = head_runs(heads, kv, 1, size)
    except ModuleError:
        assert size > heads
        return
    assert size <= heads
    dealt = []
    for (start, stop), (first, end) in zip(queries, keys, strict=True):
        mine = list(range(start, stop))
        assert [(head - start) // ((stop - start) // (end - first)) for head in mine] == [
            head // per_kv - first for head in mine
        ]
        dealt += mine
    assert dealt == list(range(heads))


def test_what_is_refused():
    def body(mesh):
        tp, dp = mesh.group("tp"), mesh.group("dp")
        with raises(GroupError, "mesh.group('tp')", "'tp'"):
            mm.parallel.ColumnParallelLinear(2, 2, group="tp")  # type: ignore[arg-type]
        first = mesh.add_group("first", [0])
        if mesh.rank:
            with raises(GroupError, "rank 1", "group 'first'", [0]):
                mm.parallel.RowParallelLinear(2, 2, group=first)
        with raises(ModuleError, tp, dp):
            mm.parallel.ColumnParallelLinear(2, 2, group=tp, sequence=mm.parallel.SequenceSplit(dp))
        with raises(ModuleError, "num_heads=1", "2 ranks", "1 rank"):
            mm.parallel.ParallelAttention(4, 1, group=tp)
        block = nn.GptBlock(4, 2)
        block.materialize(seed=0)
        with raises(ModuleStateError, "'weight'", (4, 4), "float32"):
            mm.tensor_parallel(block, tp)
        sequence = mm.parallel.SequenceSplit(tp)
        with raises(ModuleError, "Concat(axis=-1)", "sequence"):
            mm.tensor_parallel(nn.Sequential(nn.Concat()), tp, sequence=sequence)
        norm = nn.LayerNorm(2)
        norm.materialize(seed=0)
        with raises(ModuleError, norm, "'weight'", "set_sequence", "materialize"):
            norm.set_sequence(sequence)
        with raises(ShapeError, 3, 2, "SequenceSplit(group, length=3)"):
            sequence.sizes(3)
        with raises(ShapeError, "sequences", 4, 3):
            mm.parallel.SequenceSplit(tp, length=4).sizes(3)
        embedding = mm.parallel.VocabParallelEmbedding(4, 2, group=tp)
        embedding.materialize(seed=0)
        with raises(ModuleError, embedding, "ids", "[0, 4)", 4, (1,)):
            embedding(np.array([0, 4]))
        with raises(DTypeError, embedding, "x", "float64"):
            embedding(np.zeros(2))
        loss = mm.parallel.VocabParallelCrossEntropy(4, group=tp)
        with raises(ShapeError, loss, "(rows, ..., 2)", (2, 4), (2,)):
            loss(np.zeros((2, 4)), np.array([0, 3]))
        with raises(ModuleError, loss, "[0, 4)", 4, (1,)):
            loss(np.zeros((2, 2)), np.array([0, 4]))
        layers = [mm.parallel.ColumnParallelLinear(2, 2, group=group) for group in (tp, dp)]
        stage = mm.PipelineStage(0).add_layer(nn.Sequential(*layers))
        with raises(ModuleError, ["dp", "tp"]):
            TensorModel([stage])
        with raises(ModuleError, "sequence_parallel", "tp", None):
            mm.parallel.gpt_layers(4, 2, 1, 1, max_tokens=3, sequence_parallel=True)

    on_ranks("dp=1,tp=2", body)


def test_a_copy_of_a_layer_is_split_over_the_same_ranks():
    def body(mesh):
        layer = mm.parallel.ParallelFeedForward(3, 4, group=mesh.group("tp"))
        twin = copy.deepcopy(layer)
        for one in (layer, twin):
            one.materialize(seed=0, dtype=np.float64)
        assert twin.split is not layer.split
        x = np.arange(6.0).reshape(2, 3)
        assert np.array_equal(layer(x), twin(x))

    on_ranks("tp=2", body)


OPTIONS: dict[str, tuple[type[nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "attention": (nn.Attention, mm.parallel.ParallelAttention, (8, 4)),
    "feedforward": (nn.FeedForward, mm.parallel.ParallelFeedForward, (6, 5)),
    "swiglu": (nn.SwiGLU, mm.parallel.ParallelSwiGLU, (6, 5)),
    "embedding": (nn.Embedding, mm.parallel.VocabParallelEmbedding, (7, 3)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_with_a_group_is_the_parallel_one(name):
    plain, parallel, extents = OPTIONS[name]
    make: Any = plain
    make_parallel: Any = parallel

    def main(mesh: mm.DeviceMesh) -> None:
        tp = mesh.group("tp")
        sequence = mm.parallel.SequenceSplit(tp)
        layers = [one(*extents, group=tp, sequence=sequence) for one in (make, make_parallel)]
        for layer in layers:
            layer.materialize(seed=SEED, dtype=np.float64)
        one, other = (layer.state_dict() for layer in layers)
        assert [*one] == [*other] == [name for name, _ in make(*extents).named_parameters()]
        for key, values in one.items():
            np.testing.assert_array_equal(values, other[key])
        with raises(ModuleError, parallel.__name__, "group="):
            make_parallel(*extents)
        with raises(ModuleError, plain.__name__, "group="):
            make(*extents, sequence=sequence)

    on_ranks("tp=2", main)
