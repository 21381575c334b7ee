"""Linear layers split over ranks, against the unsplit layers in one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import LayoutError, ModuleError, UnknownNameError
from mpimesh.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceSplit,
)
from mpimesh.parallel.split_layers import TensorModel
from tests.helpers.depth import examples
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises
from tests.helpers.wrong_arguments import outcomes

SEED = 5


def unsplit(sizes, bias):
    layers: list[nn.Module] = [nn.LayerNorm(sizes[0])]
    for number, (into, out) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(into, out, bias=bias)] + ([] if number % 2 else [nn.GELU()])
    return layers


def split(sizes, bias, group, sequence=None):
    """The same layers: the first of each two linear ones by columns, the second by rows."""
    norm = nn.LayerNorm(sizes[0])
    layers: list[nn.Module] = [norm if sequence is None else norm.set_sequence(sequence)]
    for number, (into, out) in enumerate(pairwise(sizes)):
        if number % 2:
            layers += [RowParallelLinear(into, out, group=group, bias=bias, sequence=sequence)]
        else:
            made = ColumnParallelLinear(into, out, group=group, bias=bias, sequence=sequence)
            layers += [made, nn.GELU()]
    return layers


def alone(sizes, bias, x, dy):
    model = nn.Sequential(unsplit(sizes, bias))
    model.materialize(seed=SEED, dtype=np.float64)
    ctx = nn.Context()
    y = model(x, ctx)
    return y, model.backward(dy, ctx), {n: p.grad for n, p in model.named_parameters()}


def assert_close(got: Any, expected: Any, name: str = "") -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12, err_msg=name)


def whole_gradients(model, stages, group):
    """The gradients of the whole model, on every rank."""
    mm.parallel.sum_shared_gradients(model.parameters(), group)
    tensor = TensorModel(stages)
    found = {}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.grad
        found[name] = tensor.whole(parameter)
    return found


@settings(max_examples=examples(40))
@given(
    size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=2),
    features=st.integers(1, 6),
    bias=st.booleans(),
    length=st.integers(1, 6),
    sequence=st.booleans(),
    halves=st.booleans(),
    data=st.integers(0, 100),
)
def test_pairs_of_layers_are_the_unsplit_ones(
    size, sizes, features, bias, length, sequence, halves, data
):
    """Outputs, gradients of inputs and of all parameters; uneven parts, and none at all."""
    rng = np.random.default_rng(data)
    widths = [features]
    for width in sizes:
        widths += [width, features]
    x, dy = rng.normal(size=(2, 3, length, features))
    y, dx, gradients = alone(widths, bias, x, dy)

    def body(mesh):
        group = mesh.group("tp")
        cut = SequenceSplit(group, length=length) if sequence else None
        stage = mm.PipelineStage(0)
        for layer in split(widths, bias, group, cut):
            stage.add_layer(layer)
        stage.materialize(seed=SEED, dtype=np.float64)
        here = (slice(None),) if cut is None else cut.here(x)
        ctx = nn.Context()
        assert_close(stage(np.ascontiguousarray(x[here])), y[here])
        assert_close(stage(x[here], ctx), y[here])
        if halves:
            got = stage.backward_input(dy[here], ctx)
            stage.backward_weight(ctx)
        else:
            got = stage.backward(dy[here], ctx)
        assert ctx.is_empty
        assert_close(got, dx[here])
        found = whole_gradients(stage, [stage], group)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert_close(found[name], gradient, name)

    on_ranks(f"tp={size}", body)


ROWS, LENGTH, WIDTHS = 6, 6, [5, 7, 5, 9, 5]


def batch(step):
    rng = np.random.default_rng([step, 9])
    return rng.normal(size=(2, ROWS, LENGTH, WIDTHS[0]))


def trained_alone(steps):
    model = nn.Sequential(unsplit(WIDTHS, True))
    model.materialize(seed=SEED, dtype=np.float64)
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(steps):
        x, target = batch(step)
        model.zero_grad()
        ctx = nn.Context(step=step)
        loss, dy = nn.mse_loss.value_and_grad(model(x, ctx), target, denominator=ROWS)
        model.backward(dy, ctx)
        losses.append(loss)
        norms.append(optim.clip_grad_norm(model.parameters(), 0.05))
        optimizer.step()
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("dims", ["tp=2", "tp=3", "dp=2,tp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2"])
def test_training_steps_are_those_of_the_unsplit_model(dims):
    losses, norms, state = trained_alone(3)

    def body(mesh):
        group = mesh.group("tp")
        layers = split(WIDTHS, True, group)
        pp = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = [mm.PipelineStage(number) for number in range(pp)]
        for number, layer in enumerate(layers):
            stages[number * pp // len(layers)].add_layer(layer)
        model = mm.PipelineParallel(stages, 3, mesh=mesh, seed=SEED, dtype=np.float64)
        optimizer = optim.Adam(model.parameters(), lr=0.02)
        for step in range(3):
            loss = model.train_step(*batch(step), loss=nn.mse_loss)
            assert loss == pytest.approx(losses[step], rel=1e-11)
            assert model.clip_grad_norm(0.05) == pytest.approx(norms[step], rel=1e-11)
            optimizer.step()
        model.check_replicas()
        got = model.full_state_dict()
        assert got.keys() == state.keys()
        for name, values in state.items():
            np.testing.assert_allclose(got[name], values, rtol=1e-9, atol=1e-11, err_msg=name)
        model.load_state_dict({name: values + 1 for name, values in got.items()})
        again = model.full_state_dict()
        for name, values in got.items():
            assert np.array_equal(again[name], values + 1), name

    on_ranks(dims, body, rendezvous=True)


@settings(max_examples=examples(20))
@given(
    size=st.integers(1, 4),
    named=st.booleans(),
    sequence=st.booleans(),
    gather=st.booleans(),
    data=st.data(),
)
def test_a_linear_layer_with_a_layout_of_any_sizes(size, named, sequence, gather, data):
    """What a layer gives does not depend on who has how much of the weight."""
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
    hidden, length = sum(sizes), 3
    text = ",".join(map(str, sizes))
    begin = "tp=" if named else ""
    widths = [4, hidden, 4]
    x, dy = np.random.default_rng(hidden).normal(size=(2, 2, length, 4))
    y, dx, gradients = alone(widths, True, x, dy)

    def body(mesh):
        group = mesh.group("tp")
        cut = SequenceSplit(group, length=length) if sequence else None
        options: dict[str, Any] = {"group": group, "sequence": cut}
        into = nn.Linear(4, hidden, weight=f"{begin}S0({text})", **options)
        out = nn.Linear(hidden, 4, weight=f"{begin}S1({text})", **options)
        assert into.weight.shape == (sizes[mesh.rank], 4)
        assert out.weight.shape == (4, sizes[mesh.rank])
        norm = nn.LayerNorm(4)
        stage = mm.PipelineStage(0)
        for layer in (norm if cut is None else norm.set_sequence(cut), into, nn.GELU(), out):
            stage.add_layer(layer)
        stage.materialize(seed=SEED, dtype=np.float64)
        here = (slice(None),) if cut is None else cut.here(x)
        ctx = nn.Context()
        assert_close(stage(x[here], ctx), y[here])
        assert_close(stage.backward(dy[here], ctx), dx[here])
        for name, gradient in whole_gradients(stage, [stage], group).items():
            assert_close(gradient, gradients[name], name)
        if gather:
            every = nn.Linear(4, hidden, weight=f"S0({text})", group=group, gather_output=True)
            every.materialize(seed=SEED, dtype=np.float64)
            whole = nn.Linear(4, hidden)
            whole.materialize(seed=SEED, dtype=np.float64)
            ctx, beside = nn.Context(), nn.Context()
            found, expected = every(x, ctx), whole(x, beside)
            assert_close(found, expected)
            assert_close(every.backward(found, ctx), whole.backward(expected, beside))

    on_ranks(f"tp={size}", body)


def test_layouts_that_a_linear_layer_cannot_have():
    def body(mesh):
        tp = mesh.group("tp")
        for weight in ("R", "P", "S2", None):
            with raises(ModuleError, "weight", "'S0'", "'S1'", weight):
                nn.Linear(4, 4, weight=weight, group=tp)
        with raises(UnknownNameError, "'dp'", "tp"):
            nn.Linear(4, 4, weight="dp=S0", group=tp)
        with raises(LayoutError, "weight", 3, 2):
            nn.Linear(4, 4, weight="S0(2,1,1)", group=tp)
        with raises(LayoutError, (4, 4)):
            nn.Linear(4, 4, weight="S0(2,1)", group=tp)
        with raises(ModuleError, "weight", "group="):
            nn.Linear(4, 4, weight="S0")
        with raises(ModuleError, "gather_output"):
            nn.Linear(4, 4, weight="S1", group=tp, gather_output=True)
        taken = nn.Linear(4, 4, weight="S1", group=tp)
        with raises(ModuleError, "FeedForward", taken):
            layer = nn.FeedForward(4, 4)
            layer.up = taken
            mm.tensor_parallel(layer, tp)
        options = {"weight": "S0", "group": tp, "sequence": None, "gather_output": True}
        case = nn.Linear, {"in_features": 4, "out_features": 2, "bias": True, **options}
        also = {"weight": "placement", "in_features": "shape", "out_features": "shape"}
        assert list(outcomes(lambda: case, also=also)) == []

    on_ranks("tp=2", body)
