from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import ModuleError, ModuleStateError
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def layers():
    return [nn.Linear(3, 8), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 2)]


def materialized(module, **options):
    module.materialize(seed=4, dtype="float64", **options)
    return module


@settings(max_examples=examples(30))
@given(cuts=st.lists(st.integers(0, 5), max_size=3))
def test_a_model_cut_into_stages_is_the_same_model(cuts):
    """Same weights, same dropout masks, same gradients, whatever the cuts; stages may be empty."""
    whole = materialized(nn.Sequential(layers()))
    bounds = [0, *sorted(cuts), 5]
    stages = [nn.Sequential(layers()[a:b]) for a, b in pairwise(bounds)]
    index = 0
    for stage in stages:
        materialized(stage, index=index)
        index += stage.num_layers
    assert index == whole.num_layers == 5

    x = np.random.default_rng(0).normal(size=(6, 3))
    ctx = nn.Context(step=3, first_row=2)
    y = whole(x, ctx)
    dx = whole.backward(y, ctx)
    contexts = [nn.Context(step=3, first_row=2) for _ in stages]
    z: Any = x
    for stage, of_stage in zip(stages, contexts, strict=True):
        z = stage(z, of_stage)
    np.testing.assert_array_equal(z, y)
    for stage, of_stage in zip(reversed(stages), reversed(contexts), strict=True):
        z = stage.backward(z, of_stage)
    np.testing.assert_array_equal(z, dx)
    cut_up = [parameter for stage in stages for parameter in stage.parameters()]
    for one, other in zip(whole.parameters(), cut_up, strict=True):
        np.testing.assert_array_equal(one.data, other.data)
        np.testing.assert_array_equal(one.grad, other.grad)


def test_the_same_weights_as_layers_alone():
    whole = materialized(nn.Sequential(layers()))
    for index, layer in enumerate(layers()):
        alone = materialized(layer, index=index)
        for one, other in zip(alone.parameters(), whole[index].parameters(), strict=True):
            np.testing.assert_array_equal(one.data, other.data)


def test_ways_to_build_it():
    a, b, c = nn.ReLU(), nn.GELU(), nn.ReLU()
    for model in (
        nn.Sequential(a, b, c),
        nn.Sequential([a, b, c]),
        nn.Sequential().append(a).append(b).append(c),
    ):
        assert list(model) == list(model.layers) == [a, b, c]
        assert (len(model), model[1]) == (3, b)


@pytest.mark.parametrize(
    ("layer", "shown"),
    [(3, 3), ("relu", "relu"), (nn.ReLU, "ReLU"), (None, None), (lambda x: x, "function")],
)
def test_what_is_no_layer_is_refused(layer, shown):
    with raises(ModuleError, "forward", "backward", "parameters", shown):
        nn.Sequential(layer)


def test_none_is_the_identity():
    model, ctx = nn.Sequential(), nn.Context()
    x = np.arange(3)
    assert model(x, ctx) is x
    assert model.backward(x, ctx) is x
    assert (model.parameters(), model.num_parameters(), model.input_grad) == ([], 0, True)


@pytest.mark.parametrize("split", [False, True])
def test_a_layer_that_stands_twice_gets_both_gradients(split):
    shared: Any = nn.Linear(3, 3)
    model = materialized(nn.Sequential(shared, nn.GELU(), shared))
    x = np.random.default_rng(0).normal(size=(4, 3))
    apart = materialized(nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)))
    first, _, second = apart
    for layer in (first, second):
        layer.load_state_dict(shared.state_dict())
    for net in (model, apart):
        ctx = nn.Context()
        dy = np.cos(net(x, ctx))
        if split and net is model:
            net.backward_input(dy, ctx)
            net.backward_weight(ctx)
        else:
            net.backward(dy, ctx)
        assert ctx.is_empty
    # Backward meets the last use first: in that order they are added.
    np.testing.assert_array_equal(shared.weight.grad, second.weight.grad + first.weight.grad)
    np.testing.assert_array_equal(shared.bias.grad, second.bias.grad + first.bias.grad)


def test_gradients_of_the_last_layer_are_ready_first():
    model = materialized(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    seen = []
    for name, parameter in model.named_parameters():
        parameter.on_ready = lambda _, name=name: seen.append(name[0])
    ctx = nn.Context()
    model.backward(model(np.ones((3, 2)), ctx), ctx)
    assert seen == ["2", "2", "0", "0"]


@pytest.mark.parametrize("backward", ["backward", "backward_input"])
def test_layers_before_one_without_input_gradient_are_freed_or_refused(backward):
    """Integers may be prepared before an embedding, but nothing there can be trained."""

    class Wrap(nn.Module):
        def forward(self, x, ctx=None):
            y = x % 4
            if ctx is not None:
                ctx.save(self, y.shape, y.dtype, x)
            return y

        def backward_input(self, dy, ctx):
            raise AssertionError("integers have no gradient")

    model = materialized(nn.Sequential(nn.Sequential(Wrap()), nn.Embedding(4, 3)))
    ctx = nn.Context()
    dy = np.ones_like(model(np.arange(9), ctx))
    assert getattr(model, backward)(dy, ctx) is None
    if backward == "backward_input":
        model.backward_weight(ctx)
    assert ctx.is_empty
    np.testing.assert_array_equal(model[1].weight.grad[:, 0], [3, 2, 2, 2])

    stuck = materialized(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    stuck[2].input_grad = False
    ctx = nn.Context()
    dy = stuck(np.ones((1, 2)), ctx)
    with raises(ModuleStateError, "Linear(2, 2)"):
        getattr(stuck, backward)(dy, ctx)


def test_input_grad_is_that_of_the_first_layer():
    model = materialized(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)))
    assert model.input_grad
    model.input_grad = False
    assert not model[0][0].input_grad
    assert model[1].input_grad
    ctx = nn.Context()
    y = model(np.ones((1, 2)), ctx)
    assert model.backward(y, ctx) is None
    assert all(parameter.grad is not None for parameter in model.parameters())
