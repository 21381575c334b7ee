"""Random stacks of layers, split over ranks, against the same stack in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, StageError
from mpimesh.layout.boxes import slices
from mpimesh.nn import SupportsLayer
from mpimesh.parallel import measure_layers
from tests.helpers.depth import examples
from tests.helpers.parallel_models import on_ranks
from tests.helpers.parallel_traps import Trap, assert_nothing_left
from tests.helpers.raises import names, raises
from tests.helpers.tensor_models import (
    ROWS,
    SEED,
    STEPS,
    VOCAB,
    assert_same,
    batch,
    layers,
    trained,
    trained_alone,
)

STACK_SEED, STACK_ROWS = 5, 3
SPLIT = {"pair", "gpt", "mlp", "bert"}

PIECE = st.one_of(
    st.tuples(
        st.just("pair"), st.integers(1, 9), st.lists(st.sampled_from(["gelu", "drop"]), max_size=3)
    ),
    st.tuples(st.just("gpt"), st.booleans(), st.booleans()),
    st.tuples(st.just("mlp"), st.integers(1, 9), st.booleans()),
    st.tuples(st.sampled_from(["norm", "rms", "drop", "silu", "bert"])),
)


def stack(
    pieces: list[Any],
    features: int,
    heads: int,
    group: mm.ProcessGroup | None = None,
    sequence: mm.parallel.SequenceSplit | None = None,
) -> nn.Sequential:
    """The layers; with a group their pairs of linear ones are split, and nothing else yet."""

    def inner(name: str) -> nn.Module:
        return nn.GELU() if name == "gelu" else nn.Dropout(0.3)

    def layer(kind: str, *given: Any) -> list[nn.Module]:
        if kind == "pair":
            hidden, between = given
            if group is None:
                ends: list[nn.Module] = [nn.Linear(features, hidden), nn.Linear(hidden, features)]
            else:
                options: Any = {"group": group, "sequence": sequence}
                ends = [
                    mm.parallel.ColumnParallelLinear(features, hidden, **options),
                    mm.parallel.RowParallelLinear(hidden, features, **options),
                ]
            return [ends[0], *map(inner, between), ends[1]]
        if kind == "gpt":
            grouped, llama = given
            return [
                nn.GptBlock(
                    features,
                    heads,
                    num_kv_heads=1 if grouped else None,
                    norm="rms" if llama else "layer",
                    mlp="swiglu" if llama else "gelu",
                    hidden=7,
                    dropout=0.2,
                    attention_dropout=0.3,
                )
            ]
        if kind == "mlp":
            hidden, dropped = given
            activation = nn.Sequential(nn.SiLU(), nn.Dropout(0.3)) if dropped else None
            return [nn.FeedForward(features, hidden, activation=activation)]
        return [
            {
                "norm": nn.LayerNorm(features),
                "rms": nn.RMSNorm(features),
                "drop": nn.Dropout(0.3),
                "silu": nn.SiLU(),
                "bert": nn.BertBlock(features, heads, hidden=5, attention_dropout=0.4),
            }[kind]
        ]

    return nn.Sequential([one for piece in pieces for one in layer(*piece)])


@settings(max_examples=examples(15))
@given(
    pieces=st.lists(PIECE, min_size=1, max_size=4),
    size=st.integers(1, 4),
    head_dim=st.integers(1, 2),
    more_heads=st.integers(0, 1),
    length=st.integers(1, 5),
    sequence=st.booleans(),
    first_row=st.integers(0, 3),
)
def test_any_stack_is_the_unsplit_one(
    pieces, size, head_dim, more_heads, length, sequence, first_row
):
    """Outputs, loss, and the gradients of the input and of all parameters, to 1e-10."""
    kinds = {piece[0] for piece in pieces}
    heads = size + more_heads
    features = heads * head_dim
    x, target = np.random.default_rng(length).normal(size=(2, STACK_ROWS, length, features))

    def run(model: nn.Sequential, here: tuple[slice, ...]) -> tuple[float, Any, Any]:
        model.materialize(seed=STACK_SEED, dtype=np.float64)
        ctx = nn.Context(step=1, first_row=first_row)
        y = model(x[here], ctx)
        # The share of this rank's places in the mean over all.
        share = STACK_ROWS * length / max(1, x[here].shape[1])
        loss, dy = nn.mse_loss.value_and_grad(y, target[here], denominator=share)
        dx = model.backward(dy, ctx)
        assert ctx.is_empty
        return loss, y, dx

    whole = stack(pieces, features, heads)
    loss, y, dx = run(whole, (slice(None),))
    gradients = dict(whole.named_parameters())

    def body(mesh):
        group = mesh.group("tp")
        cut = mm.parallel.SequenceSplit(group, length=length) if sequence else None
        made = stack(pieces, features, heads, group, cut)
        if gradients and cut is None and kinds.isdisjoint(SPLIT):
            with raises(ModuleError, "group 'tp'", "Attention", "ColumnParallelLinear"):
                mm.tensor_parallel(made, group)
            return
        model = mm.tensor_parallel(made, group, sequence=cut)
        here = (slice(None),) if cut is None else cut.here(x)
        found = run(model, here)
        total = found[0]
        if cut is not None:
            total = float(group.all_reduce(np.array(total)).resolve())
        assert total == pytest.approx(loss, rel=1e-10)
        np.testing.assert_allclose(found[1], y[here], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found[2], dx[here], rtol=1e-10, atol=1e-10)
        mm.parallel.sum_shared_gradients(model.parameters(), group)
        assert [name for name, _ in model.named_parameters()] == list(gradients)
        for name, one in model.named_parameters():
            part: Any = gradients[name].grad[slices(one.box)]
            np.testing.assert_allclose(one.grad, part, rtol=1e-10, atol=1e-10, err_msg=name)

    on_ranks(f"tp={size}", body)


@pytest.mark.parametrize("schedule", ["gpipe", "zb1p", "interleaved", "zbv"])
def test_any_schedule(schedule):
    """All ranks of a stage do the same actions, so their collectives stand in one order."""
    expected = trained_alone("plain")
    per_rank = 2 if schedule in ("interleaved", "zbv") else 1

    def body(mesh):
        assert_same(
            trained(mesh, "plain", sequence_parallel=True, schedule=schedule, per_rank=per_rank),
            expected,
        )

    on_ranks("pp=2,tp=2", body)


@pytest.mark.parametrize("dims", ["tp=3", "pp=2,tp=2"])
def test_sequences_of_any_length(dims):
    expected = trained_alone("plain", 7)

    def body(mesh):
        assert_same(trained(mesh, "plain", sequence_parallel=True, tokens=7, uneven=True), expected)

    on_ranks(dims, body)


def test_data_parallel_trains_a_split_model():
    """Over two dims; the steps are collective over the mesh, and the loss counts once."""
    expected = trained_alone("llama")

    def body(mesh):
        tp = mesh.group("tp")
        model = mm.DataParallel(
            nn.Sequential(layers("llama", tp=tp)),
            mesh,
            loss=mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp),
            seed=SEED,
            dtype=np.float64,
            num_microbatches=2,
        )
        optimizer = optim.Adam(model.parameters(), lr=0.02)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(model.train_step(*batch(step)))
            norms.append(model.clip_grad_norm(0.5))
            optimizer.step()
        assert_same((losses, norms, model.full_state_dict()), expected)
        mine = model(batch(0)[0])
        whole = tp.all_gather(mine, axis=2, sizes=[7, 6]).resolve()
        whole_model = nn.Sequential(layers("llama"))
        whole_model.materialize(seed=0, dtype=np.float64)
        whole_model.load_state_dict(model.full_state_dict())
        np.testing.assert_allclose(whole, whole_model(batch(0)[0]), rtol=1e-9, atol=1e-11)

    on_ranks("dp=2,tp=2", body)


def test_gradients_added_up_over_steps():
    """Gradients that the ranks share are summed once, in the step that ends the sum."""

    def body(mesh):
        tp = mesh.group("tp")
        loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp)
        x, target = batch(0)

        def model() -> mm.PipelineParallel:
            stage = mm.PipelineStage(0)
            for layer in layers("llama", tp=tp, sequence_parallel=True):
                stage.add_layer(layer)
            return mm.PipelineParallel([stage], 1, mesh=mesh, seed=SEED, dtype=np.float64)

        once, parts = model(), model()
        once.train_step(x, target, loss=loss)
        for rows in (slice(0, 2), slice(2, 5)):
            with parts.no_sync():
                parts.train_step(x[rows], target[rows], loss=loss, denominator=ROWS)
        parts.train_step(x[5:], target[5:], loss=loss, denominator=ROWS)
        for one, other in zip(once.parameters(), parts.parameters(), strict=True):
            np.testing.assert_allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)

    on_ranks("tp=4", body)


def test_frozen_layers_stay():
    """A frozen parameter has no gradient, and what others have is right nevertheless."""

    def frozen(made: list[nn.Module]) -> nn.Sequential:
        block: Any = made[3]
        block.attention.freeze()
        block.mlp.up.weight.requires_grad = False
        block.mlp_norm.freeze()
        return nn.Sequential(made)

    whole = frozen(layers("plain", dropout=0.0))
    whole.materialize(seed=SEED, dtype=np.float64)
    x, target = batch(0)
    ctx = nn.Context()
    _, dy = nn.cross_entropy.value_and_grad(whole(x, ctx), target, denominator=ROWS)
    whole.backward(dy, ctx)
    norm = optim.clip_grad_norm(whole.parameters(), 1.0)

    def body(mesh):
        tp = mesh.group("tp")
        split = frozen(layers("plain", dropout=0.0, tp=tp, sequence_parallel=True))
        stage = mm.PipelineStage(0)
        for layer in split:
            stage.add_layer(layer)
        model = mm.PipelineParallel([stage], 2, mesh=mesh, seed=SEED, dtype=np.float64)
        model.train_step(x, target, loss=mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp))
        untrained = [one.name for one in model.parameters() if one.grad is None]
        assert len(untrained) == sum(not one.requires_grad for one in whole.parameters())
        assert model.clip_grad_norm(1.0) == pytest.approx(norm, rel=1e-11)

    on_ranks("tp=2", body)


def test_what_is_repeated_is_compared():
    def body(mesh):
        tp = mesh.group("tp")
        stage = mm.PipelineStage(0)
        for layer in layers("plain", tp=tp, sequence_parallel=True):
            stage.add_layer(layer)
        model = mm.PipelineParallel([stage], 1, mesh=mesh, seed=SEED)
        model.check_replicas()
        name, norm = next(one for one in model.named_parameters() if "norm.weight" in one[0])
        if mesh.rank == 1:
            norm.data[0] += 1
        with pytest.raises(MismatchError, match=name):
            model.check_replicas()

    on_ranks("tp=2", body)


@pytest.mark.parametrize(("rank", "holders"), [(1, [0, 1]), (2, [2, 3])])
def test_key_heads_that_several_ranks_hold_are_compared(rank, holders):
    def body(mesh):
        stage = mm.PipelineStage(0)
        for layer in layers("llama", tp=mesh.group("tp")):
            stage.add_layer(layer)
        model = mm.PipelineParallel([stage], 1, mesh=mesh, seed=SEED)
        model.check_replicas()
        name, key = next(one for one in model.named_parameters() if "key.weight" in one[0])
        if mesh.rank == rank:
            key.data[0] += 1
        with pytest.raises(MismatchError, match=name) as caught:
            model.check_replicas()
        return str(caught.value)

    texts = on_ranks("tp=4", body)
    assert texts == texts[:1] * 4
    names(texts[0].splitlines()[0], *holders, "group 'tp'")


def test_what_is_shared_by_ranks_and_by_stages_is_refused():
    def body(mesh):
        sequence = mm.parallel.SequenceSplit(mesh.group("tp"))
        norms = [nn.LayerNorm(4).set_sequence(sequence) for _ in range(2)]
        norms[1].weight = norms[0].weight
        stages = [mm.PipelineStage(number).add_layer(norm) for number, norm in enumerate(norms)]
        with raises(ModuleError, ["weight"], "group 'tp'"):
            mm.PipelineParallel(stages, 1, mesh=mesh)

    on_ranks("pp=2,tp=2", body)


def test_more_ranks_than_there_is_to_share():
    """Ranks without any token, class or hidden value."""

    def model(**options: Any) -> list[nn.Module]:
        given = {"max_tokens": 4, "hidden": 2, **options}
        return mm.parallel.gpt_layers(3, 8, 1, 4, **given)

    ids = np.random.default_rng(0).integers(0, 3, (4, 5))
    whole = nn.Sequential(model())
    whole.materialize(seed=SEED, dtype=np.float64)
    expected = nn.cross_entropy(whole(ids[:, :-1]), ids[:, 1:])

    def body(mesh):
        tp = mesh.group("tp")
        made = nn.Sequential(model(tp=tp))
        loss = mm.parallel.VocabParallelCrossEntropy(3, group=tp)
        split = mm.DataParallel(made, mesh, loss=loss, seed=SEED, dtype=np.float64)
        return split.train_step(ids[:, :-1], ids[:, 1:])

    for loss in on_ranks("dp=2,tp=4", body):
        assert loss == pytest.approx(expected, rel=1e-12)


def test_a_weight_of_several_split_layers_stays_shared():
    """Each layer got a weight of its own, and they were no longer tied."""

    def model() -> nn.Sequential:
        made = nn.Sequential(nn.FeedForward(3, 5), nn.LayerNorm(3), nn.FeedForward(3, 5))
        made[2].up.weight = made[0].up.weight
        return made

    x = np.random.default_rng(0).normal(size=(4, 3))
    whole = model()
    whole.materialize(seed=SEED, dtype=np.float64)
    y = whole(x, ctx := nn.Context())
    whole.backward(y, ctx)
    gradients = {name: one.grad for name, one in whole.named_parameters()}

    def body(mesh):
        split = mm.tensor_parallel(model(), mesh.group("tp"))
        split.materialize(seed=SEED, dtype=np.float64)
        ctx = nn.Context()
        np.testing.assert_allclose(split(x, ctx), y, rtol=1e-12)
        split.backward(y, ctx)
        named = dict(split.named_parameters())
        assert named.keys() == gradients.keys()
        for name, one in named.items():
            part = gradients[name][slices(one.box)]
            np.testing.assert_allclose(one.grad, part, rtol=1e-11, err_msg=name)

    on_ranks("tp=2", body)


@pytest.mark.parametrize("masked", [False, True])
def test_a_bert_of_split_blocks(masked):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 11, (4, 6))
    mask = np.arange(6) < rng.integers(1, 7, 4)[:, None]
    x = (ids, mask) if masked else ids
    dy = rng.normal(size=(4, 6, 8))

    def model() -> nn.Sequential:
        return nn.Sequential(
            nn.BertEmbedding(11, 7, 8, dropout=0.3),
            nn.BertBlock(8, 4, hidden=9, dropout=0.3),
            nn.BertBlock(8, 4),
        )

    whole = model()
    whole.materialize(seed=SEED, dtype=np.float64)
    ctx = nn.Context()
    y = whole(x, ctx)
    whole.backward((dy, None) if masked else dy, ctx)
    gradients = {name: one.grad for name, one in whole.named_parameters()}

    def body(mesh):
        split = mm.tensor_parallel(model(), mesh.group("tp"))
        split.materialize(seed=SEED, dtype=np.float64)
        ctx = nn.Context()
        got = split(x, ctx)
        split.backward((dy, None) if masked else dy, ctx)
        got, expected = (got[0], y[0]) if masked else (got, y)
        assert np.allclose(got, expected, rtol=1e-10, atol=1e-12)
        for name, one in split.named_parameters():
            part = gradients[name][slices(one.box)]
            assert np.allclose(one.grad, part, rtol=1e-10, atol=1e-12), name

    on_ranks("tp=3", body)


def test_layers_are_measured_and_dealt_to_stages():
    def body(mesh):
        made = layers("llama", tp=mesh.group("tp"))
        x = batch(0)[0][:2]
        stages = mm.PipelineParallel.partition(made, 2, mesh=mesh, x=x, repeats=1)
        return [len(stage) for stage in stages]

    results = on_ranks("pp=2,tp=3", body)
    assert all(cut == results[0] for cut in results)
    assert sum(results[0]) == 6


@pytest.mark.parametrize("dims", ["pp=2,tp=2", "tp=3"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("when", ["F", "B"])
def test_a_split_layer_that_fails_while_it_is_measured_ends_it_on_all_ranks(dims, sequence, when):
    def body(mesh):
        trap = Trap()
        if mesh.rank == 1:
            trap.arm(when, 1)
        made = layers("plain", tp=mesh.group("tp"), sequence_parallel=sequence)
        block: Any = made[4]
        block.mlp.activation = nn.Sequential(block.mlp.activation, trap)
        x = batch(0)[0][:2]
        with raises(StageError, "rank 1", "ValueError", "layer 4", "GptBlock", "boom"):
            measure_layers(made, x, mesh=mesh, repeats=1, latency_s=0, bytes_per_s=1)
        assert_nothing_left(mesh)
        trap.disarm()
        measure_layers(made, x, mesh=mesh, repeats=1, latency_s=0, bytes_per_s=1)

    on_ranks(dims, body)


def sums_under_way(make: Callable[[mm.ProcessGroup], SupportsLayer]) -> list[str]:
    """Return which gradients of a layer are computed between the start of a sum and its end."""
    order: list[str] = []

    def body(mesh):
        stage = mm.PipelineStage(0).add_layer(make(mesh.group("tp")))
        stage.materialize(seed=0, dtype=np.float64)
        x = np.ones((2, 3, 8))
        ctx = nn.Context()
        y = stage(x, ctx)
        if mesh.rank == 0:
            for name, one in stage.named_parameters():
                one.on_ready = lambda _, name=name: order.append(f"{name} {len(mesh_open(mesh))}")
        stage.backward(y, ctx)

    def mesh_open(mesh: mm.DeviceMesh) -> Any:
        return mesh._core.context.open_work

    on_ranks("tp=2", body)
    return sorted(line.split()[0] for line in order if line.endswith(" 1"))


def test_weights_are_computed_while_gradients_are_summed():
    """Within blocks, too."""
    found = sums_under_way(lambda tp: mm.tensor_parallel(nn.GptBlock(8, 4), tp))
    assert found == sorted(
        f"0.{layer}.{part}"
        for layer in (
            "attention.query",
            "attention.key",
            "attention.value",
            "attention.output",
            "mlp.up",
            "mlp.down",
        )
        for part in ("weight", "bias")
    )


def test_weights_are_computed_while_gradients_are_summed_in_a_sequential():
    """A layer split by its outputs has its own work for the time of its sum."""

    def pair(tp: mm.ProcessGroup) -> nn.Sequential:
        return nn.Sequential(
            mm.parallel.ColumnParallelLinear(8, 6, group=tp),
            nn.GELU(),
            mm.parallel.RowParallelLinear(6, 8, group=tp),
        )

    assert sums_under_way(pair) == ["0.0.bias", "0.0.weight"]
