"""Activations that are computed again: the same bits as those that are kept, in less memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn.module import leaves
from tests.helpers.nn_cases import CASES, gradients
from tests.helpers.raises import raises

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def bytes_in(ctx: nn.Context, layer: nn.Module) -> int:
    """Bytes of all arrays that a context keeps, each memory once, but for the layer's own."""
    own = {id(array) for one in leaves(layer) for array in arrays_in(vars(one))}
    found: dict[int, int] = {}
    for array in arrays_in(ctx):
        if id(array) not in own:
            while isinstance(array.base, np.ndarray):
                array = array.base
            found[id(array)] = array.nbytes
    return sum(found.values())


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from arrays_in(one)
    elif isinstance(value, dict):
        yield from arrays_in(tuple(value.values()))
    elif isinstance(value, nn.Context):
        for records in value._records.values():
            yield from arrays_in((records.saved, *records.deferred))


@EVERY
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_all_bits_are_those_without(case, dtype):
    """Output, gradients, and both halves, with a second microbatch in flight."""
    plain, wrapped = case.layer(dtype), nn.Checkpoint(case.layer(dtype))
    found = []
    for layer in (plain, wrapped):
        got: list[Any] = []
        contexts = [nn.Context(step=2, first_row=4 * at) for at in range(3)]
        inputs = [case.x(4, dtype, seed=at) for at in range(3)]
        outputs = [layer(x, ctx) for x, ctx in zip(inputs, contexts, strict=True)]
        weights = [np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype) for y in outputs]
        got += [layer.backward_input(weights[at], contexts[at]) for at in (1, 0)]
        got.append(layer.backward(weights[2], contexts[2]))
        for at in (0, 1):
            layer.backward_weight(contexts[at])
        assert all(ctx.is_empty for ctx in contexts)
        found.append((outputs, got, gradients(layer)))
    np.testing.assert_equal(found[1], found[0])


@EVERY
def test_forward_keeps_its_input_and_nothing_else(case):
    layer, x = nn.Checkpoint(case.layer()), case.x(3)
    ctx = nn.Context(**case.context)
    y = layer(x, ctx)
    assert bytes_in(ctx, layer) == x.nbytes
    layer.backward_input(np.ones_like(y), ctx)
    plain, other = case.layer(), nn.Context(**case.context)
    plain.backward_input(np.ones_like(plain(x, other)), other)
    assert bytes_in(ctx, layer) == bytes_in(other, plain)  # between the halves what is kept without
    layer.backward_weight(ctx)
    assert bytes_in(ctx, layer) == 0


def test_between_forward_and_backward_it_takes_less_memory():
    kept = {}
    for wrap in (lambda layer: layer, nn.Checkpoint):
        made = [wrap(nn.GptBlock(16, 2)) for _ in range(4)]
        model = nn.Sequential(nn.Embedding(9, 16), *made)
        model.materialize(seed=0)
        ctx = nn.Context()
        model(np.zeros((4, 8), np.int64), ctx)
        kept[wrap] = bytes_in(ctx, model)
    activations = 4 * 8 * 16 * 4
    assert kept[nn.Checkpoint] <= 4 * 8 * 8 + 4 * activations
    assert min(kept.values()) * 5 < max(kept.values())


@pytest.mark.parametrize("outer", [nn.Sequential, nn.Checkpoint])
def test_names_states_numbers_and_first_values_are_those_without(outer):
    def make(wrap):
        inner = [nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 2)]
        layers = [wrap(nn.Sequential(*inner[:3])), wrap(inner[3])]
        model = nn.Sequential(layers) if outer is nn.Sequential else nn.Checkpoint(layers[0])
        model.materialize(seed=4, dtype="float64", index=3)
        return model

    plain, wrapped = make(lambda layer: layer), make(nn.Checkpoint)
    assert wrapped.num_layers == plain.num_layers
    assert [name for name, _ in wrapped.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    np.testing.assert_equal(wrapped.state_dict(), plain.state_dict())
    wrapped.load_state_dict({name: 2 * array for name, array in plain.state_dict().items()})
    np.testing.assert_array_equal(wrapped.parameters()[0].data, 2 * plain.parameters()[0].data)
    assert wrapped.eval().is_training() is False
    x = np.ones((5, 3))
    plain.load_state_dict(wrapped.state_dict())
    np.testing.assert_array_equal(wrapped(x, nn.Context()), plain.eval()(x, nn.Context()))


def test_frozen_layers_pass_the_gradient_on_and_get_none():
    case = CASES["gpt block"]
    plain, wrapped = case.layer().freeze(), nn.Checkpoint(case.layer()).freeze()
    x = case.x(2)
    found = []
    for layer in (plain, wrapped):
        ctx = nn.Context()
        found.append(layer.backward(np.ones_like(layer(x, ctx)), ctx))
        assert all(parameter.grad is None for parameter in layer.parameters())
    np.testing.assert_array_equal(found[0], found[1])


def test_layers_that_stand_several_times_get_the_gradients_of_all_places():
    """In a Checkpoint twice, in two of them, and outside; also with delayed weights."""
    found = []
    for wrap in (lambda layer: layer, nn.Checkpoint):
        for halves in (False, True):
            one: Any = nn.Linear(3, 3)
            both = wrap(nn.Sequential(one, nn.GELU(), one))
            model = nn.Sequential(both, wrap(one), one, both)
            model.materialize(seed=0, dtype="float64")
            ctx = nn.Context()
            y = model(np.linspace(-1, 1, 12).reshape(4, 3), ctx)
            if halves:
                dx = model.backward_input(np.cos(y), ctx)
                assert one.weight.grad is None
                model.backward_weight(ctx)
            else:
                dx = model.backward(np.cos(y), ctx)
            assert ctx.is_empty
            found.append((dx, one.weight.grad, one.bias.grad))
    for other in found[1:]:
        np.testing.assert_equal(other, found[0])


def test_a_tied_parameter_trains_as_without():
    found = []
    for wrap in (lambda layer: layer, nn.Checkpoint):
        embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(wrap(embedding), wrap(nn.GptBlock(4, 2, dropout=0.3)), wrap(head))
        model.materialize(seed=0, dtype="float64")
        adam = optim.Adam(model.parameters(), lr=0.1)
        ids = np.array([[0, 3, 6], [1, 1, 2]])
        for step in range(3):
            model.zero_grad()
            ctx = nn.Context(step=step)
            _, dy = nn.cross_entropy.value_and_grad(model(ids, ctx), ids, denominator=2)
            model.backward(dy, ctx)
            adam.step()
        found.append(model.state_dict())
    np.testing.assert_equal(found[1], found[0])


def test_tuples_go_in_and_out():
    class Both(nn.Module):
        def forward(self, x, ctx=None):
            a, b = x
            if ctx is not None:
                ctx.save(self, a, b)
            return {"product": a * b, "sum": a + b}

        def backward_input(self, dy, ctx):
            a, b = ctx.take(self)
            return dy["product"] * b + dy["sum"], dy["product"] * a + dy["sum"]

    x = (np.array([1.0, 2.0]), np.array([3.0, -1.0]))
    mm.testing.gradcheck(nn.Checkpoint(Both()), x, x)


def test_a_first_layer_spares_the_gradient_of_its_input():
    layer = nn.Checkpoint(nn.Linear(3, 2))
    layer.materialize(seed=0)
    nn.Sequential(layer).input_grad = False
    assert layer.layer.input_grad is False  # type: ignore[attr-defined]
    ctx = nn.Context()
    assert layer.backward(np.ones_like(layer(np.ones((2, 3), np.float32), ctx)), ctx) is None
    assert layer.layer.weight.grad is not None  # type: ignore[attr-defined]


def test_nested_ones_forward_runs_once_more_for_each():
    runs = []

    class Counted(nn.ReLU):
        def forward(self, x, ctx=None):
            runs.append(ctx is not None)
            return super().forward(x, ctx)

    layer, ctx = nn.Checkpoint(nn.Checkpoint(Counted())), nn.Context()
    y = layer(np.ones((2, 2)), ctx)
    assert len(runs) == 1
    layer.backward(y, ctx)
    assert len(runs) == 3
    layer(np.ones((2, 2)))
    assert runs == [True, True, True, False]


def test_what_is_wrong_is_told_and_nothing_is_lost():
    with raises(ModuleError, "forward, backward and parameters", 3):
        nn.Checkpoint(3)  # type: ignore[arg-type]
    layer = nn.Checkpoint(nn.Linear(3, 2))
    layer.materialize(seed=0)
    x, ctx = np.ones((2, 3), np.float32), nn.Context()
    y = layer(x, ctx)
    with raises(ModuleStateError, "Checkpoint(Linear(3, 2))", "backward_input"):
        layer.backward_weight(ctx)
    with pytest.raises(mm.errors.ShapeError):
        layer.backward_input(y[:1], ctx)
    layer.backward(y, ctx)
    with raises(ModuleStateError, "Checkpoint(Linear(3, 2))", "already"):
        layer.backward(y, ctx)
