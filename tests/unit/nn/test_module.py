from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from tests.helpers.raises import raises


class Residual(nn.Module):
    """A composite with a parameter of its own, children by name, and backward in one piece."""

    def __init__(self, features):
        self.inner = nn.Linear(features, features)
        self.others = [nn.LayerNorm(features), nn.ReLU()]
        self.gain = nn.Parameter("gain", (), nn.Constant(0.5))

    def forward(self, x, ctx=None):
        y = self.inner(x, ctx)
        for layer in self.others:
            y = layer(y, ctx)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, y)
        return x + self.gain.value() * y

    def backward(self, dy, ctx):
        (y,) = self._take(dy, ctx)
        self.gain.accumulate(np.asarray((dy * y).sum()))
        dx = dy * self.gain.value()
        for layer in (*reversed(self.others), self.inner):
            dx = layer.backward(dx, ctx)
        return dy + dx


class Scale:
    """The least a layer is: not a Module, one microbatch's state in the context."""

    def __init__(self, factor=2.0):
        self.factor = nn.Parameter("factor", (), nn.Constant(factor))
        self.factor.materialize(seed=0, dtype="float64")

    def forward(self, x, ctx=None):
        if ctx is not None:
            ctx.save(self, x)
        return x * self.factor.value()

    def backward(self, dy, ctx):
        (x,) = ctx.take(self)
        self.factor.accumulate(np.asarray((dy * x).sum()))
        return dy * self.factor.value()

    def parameters(self):
        return [self.factor]


def materialized(module, **options):
    module.materialize(seed=0, dtype="float64", **options)
    return module


def test_parameters_have_names_and_a_fixed_order():
    named = Residual(3).named_parameters()
    assert [name for name, _ in named] == [
        "gain",
        "inner.weight",
        "inner.bias",
        "others.0.weight",
        "others.0.bias",
    ]
    nested = nn.Sequential(Residual(3), Scale(), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    assert [name for name, _ in nested.named_parameters()][-3:] == [
        "1.param_0",
        "2.1.weight",
        "2.1.bias",
    ]


def test_a_shared_parameter_stands_once():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]


def test_two_parameters_of_one_name_are_refused():
    layer: Any = nn.Linear(2, 2)
    layer.other = nn.Parameter("bias", (1,), nn.Constant(0.0))
    with raises(ModuleError, "Linear", ["weight", "bias", "bias"]):
        layer.named_parameters()


def test_counts_and_freezing():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert model.num_parameters() == model.trainable_params_count() == 16 + 10
    assert model.frozen_parameters() == []
    assert model[0].freeze() is model[0]
    assert model.trainable_params_count() == 10
    assert model.frozen_parameters() == model[0].parameters()
    assert model.unfreeze().trainable_params_count() == 26


def test_modes_reach_all_layers():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.ReLU()), Scale())
    assert model.is_training()
    assert model.eval() is model
    assert not any(m.is_training() for m in (model, model[0], model[1], model[1][0]))
    assert model.train() is model
    assert all(m.is_training() for m in (model, model[0], model[1], model[1][0]))
    model.set_training(False)
    assert not model[1][0].is_training()


def test_state_goes_from_one_model_to_another():
    first = materialized(Residual(3))
    second = Residual(3)
    second.materialize(seed=9, dtype="float32")
    memory = [parameter.data for parameter in second.parameters()]
    second.load_state_dict(first.state_dict())
    for old, parameter, given in zip(
        memory, second.parameters(), first.state_dict().values(), strict=True
    ):
        assert parameter.data is old
        np.testing.assert_array_equal(parameter.data, given.astype("float32"))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda s: s.pop("bias"), ModuleError, ("'bias'",)),
        (lambda s: s.update(x=s["bias"]), ModuleError, ("'x'",)),
        (
            lambda s: s.update(bias=np.ones(9)),
            ShapeError,
            ("'bias'", "(2,)", "(9,)"),
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, error, text):
    layer = materialized(nn.Linear(3, 2))
    before = {name: array.copy() for name, array in layer.state_dict().items()}
    state = {name: np.zeros_like(array) for name, array in before.items()}
    change(state)
    with raises(error, *text):
        layer.load_state_dict(state)
    np.testing.assert_equal(layer.state_dict(), before)


def test_states_need_memory():
    with raises(ModuleStateError, "'weight'", (2, 3), "materialize(seed=..."):
        nn.Linear(3, 2).state_dict()


def test_zero_grad_reaches_all_parameters():
    model = materialized(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for parameter in model.parameters():
        parameter.accumulate(np.ones(parameter.shape))
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_num_layers_counts_leaves_and_composites_with_parameters():
    assert [module.num_layers for module in (nn.Linear(2, 2), nn.ReLU(), nn.Sequential())] == [
        1,
        1,
        0,
    ]
    assert Residual(3).num_layers == 4
    assert (
        nn.Sequential(nn.Sequential(nn.ReLU(), Residual(2)), Scale(), nn.Dropout()).num_layers == 7
    )


def test_composites_number_their_layers_in_order():
    whole = materialized(nn.Sequential(nn.ReLU(), Residual(3), nn.Linear(3, 3)), index=4)
    alone = materialized(nn.Linear(3, 3), index=6)  # after ReLU at 4 and the gain at 5
    np.testing.assert_array_equal(whole[1].inner.weight.data, alone.weight.data)
    last = materialized(nn.Linear(3, 3), index=9)
    np.testing.assert_array_equal(whole[2].weight.data, last.weight.data)


@pytest.mark.parametrize("nested", [False, True])
def test_a_shared_parameter_has_the_values_of_its_first_place(nested):
    table = nn.Embedding(4, 3)
    head: Any = nn.Linear(3, 4)
    head.weight = table.weight
    last = nn.Sequential(nn.ReLU(), head) if nested else head
    model = materialized(nn.Sequential(nn.ReLU(), table, last), index=2)
    np.testing.assert_array_equal(
        head.weight.data, materialized(nn.Embedding(4, 3), index=3).weight.data
    )
    apart: Any = materialized(nn.Linear(3, 4), index=4 + nested)
    np.testing.assert_array_equal(head.bias.data, apart.bias.data)
    before = np.array(head.weight.data)
    model.materialize(seed=5, dtype="float64")  # anew, not the values that are there
    assert (before != head.weight.data).all()
    np.testing.assert_array_equal(head.weight.data, table.weight.data)


def test_a_parameter_of_a_layer_and_of_one_inside_has_the_values_of_the_outer():
    outer = Residual(3)
    outer.inner.bias = outer.gain
    outer.gain.name, outer.gain.initializer = "bias", nn.Normal(1.0)
    bits = nn.Parameter("bias", outer.gain.shape, outer.gain.initializer)
    bits.materialize(seed=0, dtype="float64", index=7)
    materialized(outer, index=7)
    np.testing.assert_array_equal(outer.gain.data, bits.data)


def test_a_layer_that_stands_twice_is_materialised_once():
    dropout, shared = nn.Dropout(0.5), nn.Linear(3, 3)
    x = np.ones((8, 3))
    materialized(nn.Sequential(dropout, shared, dropout, shared))
    np.testing.assert_array_equal(
        shared.weight.data, materialized(nn.Linear(3, 3), index=1).weight.data
    )
    alone = materialized(nn.Dropout(0.5), index=0)
    np.testing.assert_array_equal(dropout(x, nn.Context()), alone(x, nn.Context()))


def test_materialize_refuses_what_it_cannot_do():
    with raises(DTypeError, "float16", "float32", "float64"):
        nn.Sequential(nn.ReLU()).materialize(seed=0, dtype="int8")
    with raises(ModuleError, -1):
        nn.ReLU().materialize(seed=-1)


def test_backward_in_one_piece_serves_both_halves():
    whole, halves = materialized(Residual(3)), materialized(Residual(3))
    x = np.random.default_rng(0).normal(size=(4, 3))
    first, second = nn.Context(), nn.Context()
    dx = whole.backward(whole(x, first), first)
    found = halves.backward_input(halves(x, second), second)
    halves.backward_weight(second)
    np.testing.assert_array_equal(found, dx)
    for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
        np.testing.assert_array_equal(one.grad, other.grad)


def test_a_module_without_any_backward_is_refused():
    class Forward(nn.Module):
        def forward(self, x, ctx=None):
            return x

    with raises(ModuleStateError, "backward_input"):
        Forward().backward(np.ones(2), nn.Context())


@pytest.mark.parametrize("split", [False, True])
def test_a_layer_that_is_no_module_works_among_them(split):
    model = materialized(nn.Sequential(nn.Linear(3, 3), Scale(3.0), nn.Linear(3, 2)))
    ctx = nn.Context()
    x = np.random.default_rng(0).normal(size=(4, 3))
    y = model(x, ctx)
    dy = np.ones_like(y)
    if split:
        dx = model.backward_input(dy, ctx)
        model.backward_weight(ctx)
    else:
        dx = model.backward(dy, ctx)
    first, _, last = (layer.parameters() for layer in model)
    np.testing.assert_allclose(dx, dy @ last[0].data * 3.0 @ first[0].data)
    inner = x @ first[0].data.T + first[1].data
    np.testing.assert_allclose(model[1].factor.grad, (dy @ last[0].data * inner).sum())
    assert ctx.is_empty


def test_calling_is_forward():
    layer = materialized(nn.Linear(2, 2))
    x = np.ones((1, 2))
    np.testing.assert_array_equal(layer(x), layer.forward(x))
    assert repr(nn.Sequential(nn.ReLU(), Residual(2))) == "Sequential(ReLU(), Residual())"


def test_the_layer_of_the_docstring_is_one():
    names: dict[str, Any] = {"nn": nn}
    for example in doctest.DocTestParser().get_examples(nn.Module.__doc__ or ""):
        exec(example.source, names)
    layer: Any = names["Scale"](3)
    layer.materialize(seed=0, dtype="float64")
    layer.scale.data[...] = [2.0, 3.0, 5.0]
    x, dy = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    ctx = nn.Context()
    np.testing.assert_array_equal(layer(x, ctx), x * [2.0, 3.0, 5.0])
    np.testing.assert_array_equal(layer.backward(dy, ctx), [[2.0, 3.0, 5.0]] * 2)
    np.testing.assert_array_equal(layer.scale.grad, [3.0, 5.0, 7.0])
    assert ctx.is_empty


class Holder(nn.Module):
    """Has whatever it is given."""

    def __init__(self, **held):
        vars(self).update(held)

    def forward(self, x, ctx=None):
        return x


def test_attributes_that_meet_the_protocol_are_layers():
    scale, listed = Scale(), Scale()
    holder = Holder(scale=scale, rest=[listed, "text"], kind=Scale, number=3)
    assert dict(holder.named_children()) == {"scale": scale, "rest.0": listed}
    assert list(holder.state_dict()) == ["scale.param_0", "rest.0.param_0"]
    assert holder.num_layers == 2


@pytest.mark.parametrize("place", ["mlp", "attention"])
def test_layers_that_meet_only_the_protocol_are_trained_within_others(place):
    scale = Scale()
    block: Any
    if place == "mlp":
        block = nn.FeedForward(4, 6, activation=scale)
    else:
        block = nn.Attention(4, 2)
        block.value = scale
    block.materialize(seed=0, dtype="float64")
    assert scale.factor in block.parameters()
    x, dy = np.random.default_rng(0).normal(size=(2, 2, 3, 4))
    ctx = nn.Context()
    block(x, ctx)
    block.backward_input(dy, ctx)
    block.backward_weight(ctx)
    values = []
    for step in (1e-6, -1e-6):
        scale.factor.data += step
        values.append((block(x) * dy).sum())
        scale.factor.data -= step
    assert scale.factor.grad == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


def test_what_only_looks_like_a_layer_is_refused():
    class Lookalike(Scale):
        def parameters(self):
            return [np.ones(2)]

    with raises(ModuleError, "'param_0'", "nn.Parameter"):
        Holder(other=Lookalike()).parameters()
