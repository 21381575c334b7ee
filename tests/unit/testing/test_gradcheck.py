"""The check of gradients finds each way to have them wrong, and names where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError
from tests.helpers.raises import raises

X = np.array([[0.5, -1.0, 2.0], [0.25, 1.5, -0.75]])


class Scale(nn.Module):
    """``x**2 * scale``: the gradients are ``2 * x * scale * dy`` and ``x**2 * dy``."""

    input_factor = 2.0
    weight_factor = 1.0

    def __init__(self) -> None:
        self.scale = nn.Parameter("scale", (3,), nn.Constant(0.5))
        self.materialize(seed=0, dtype="float64")

    def forward(self, x: Any, ctx: Any = None) -> Any:
        if ctx is not None:
            ctx.save(self, x)
        return x**2 * self.scale.value()

    def backward_input(self, dy: Any, ctx: Any) -> Any:
        (x,) = ctx.take(self)
        ctx.defer(self, x, dy)
        return self.input_factor * x * self.scale.value() * dy

    def backward_weight(self, ctx: Any) -> None:
        x, dy = ctx.take_deferred(self)
        if self.scale.requires_grad:
            self.scale.accumulate((self.weight_factor * x**2 * dy).sum(axis=0))


def test_a_right_layer_passes_and_stays_as_it_is():
    layer, x = Scale(), X.copy()
    values = layer.scale.data.copy()
    mm.testing.gradcheck(layer, x)
    mm.testing.gradcheck(layer, x, X[:1], np.zeros((0, 3)), rtol=1e-8, atol=1e-9)
    layer.freeze()
    mm.testing.gradcheck(layer, x)
    np.testing.assert_array_equal(layer.scale.data, values)
    np.testing.assert_array_equal(x, X)
    assert layer.scale.grad is None


def test_a_wrong_gradient_of_a_parameter_is_named_with_both_numbers():
    layer = Scale()
    layer.weight_factor = 3.0
    seen: list[float] = []
    layer.scale.on_ready = lambda parameter: seen.append(float(parameter.grad[0]))
    with raises(ModuleError, "'scale'", "(0,)", "step 1e-05") as info:
        mm.testing.gradcheck(layer, X)
    found, quotient = numbers_in(str(info.value))
    assert found == seen[0]
    assert found == pytest.approx(3 * quotient, rel=1e-7)


def numbers_in(text: str) -> tuple[float, float]:
    words = text.replace(",", " ").split()
    return float(words[words.index("gives") + 1]), float(words[words.index("is") + 1])


def test_a_wrong_gradient_of_an_input_is_named_with_both_numbers():
    layer = Scale()
    layer.input_factor = 1.0
    with raises(ModuleError, "inputs[1]", "(0, 1)") as info:
        mm.testing.gradcheck(layer, np.zeros((1, 3)), np.array([[0.0, 2.0, 1.0]]))
    found, quotient = numbers_in(str(info.value))
    assert 2 * found == pytest.approx(quotient, rel=1e-7)


def test_one_wrong_element_among_many_is_found():
    class Off(Scale):
        def backward_weight(self, ctx: Any) -> None:
            super().backward_weight(ctx)
            self.scale.grad[2] += 1e-5

    with raises(ModuleError, "'scale'", "(2,)"):
        mm.testing.gradcheck(Off(), X)
    mm.testing.gradcheck(Off(), X, atol=1e-4)


class WritesInput(Scale):
    def forward(self, x: Any, ctx: Any = None) -> Any:
        y = super().forward(x.copy(), ctx)
        if ctx is not None and ctx.first_row == 0:
            x[0, 0] += 1.0
        return y


class WritesGradient(Scale):
    def backward_input(self, dy: Any, ctx: Any) -> Any:
        dx = super().backward_input(dy.copy(), ctx)
        dy *= 2
        return dx


class LeavesSomething(Scale):
    def forward(self, x: Any, ctx: Any = None) -> Any:
        if ctx is not None:
            ctx.save(self, 0)
        return super().forward(x, ctx)


class OneMicrobatch(Scale):
    """Keeps the input in the layer, so that a second microbatch overwrites it."""

    def forward(self, x: Any, ctx: Any = None) -> Any:
        self.x = x
        return x**2 * self.scale.value()

    def backward_input(self, dy: Any, ctx: Any) -> Any:
        ctx.defer(self, self.x, dy)
        return 2 * self.x * self.scale.value() * dy


class OtherHalves(Scale):
    def backward(self, dy: Any, ctx: Any) -> Any:
        dx = super().backward(dy, ctx)
        self.scale.grad[1] *= 1 + 1e-15
        return dx


class WeightsTwice(Scale):
    def backward_input(self, dy: Any, ctx: Any) -> Any:
        (x,) = ctx.peek(self)
        dx = super().backward_input(dy, ctx)
        self.scale.accumulate((x**2 * dy).sum(axis=0))
        return dx


class TrainsFrozen(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.freeze()

    def backward_weight(self, ctx: Any) -> None:
        x, dy = ctx.take_deferred(self)
        self.scale.accumulate((x**2 * dy).sum(axis=0))


class GivesNone(Scale):
    def backward_input(self, dy: Any, ctx: Any) -> Any:
        super().backward_input(dy, ctx)


class GivesAnotherShape(Scale):
    def backward_input(self, dy: Any, ctx: Any) -> Any:
        return super().backward_input(dy, ctx)[:1]


class GivesATuple(Scale):
    def backward_input(self, dy: Any, ctx: Any) -> Any:
        return (super().backward_input(dy, ctx),)


class ForgetsWeights(Scale):
    def backward_weight(self, ctx: Any) -> None:
        ctx.take_deferred(self)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (WritesInput, ("inputs[0]",)),
        (WritesGradient, ("dy",)),
        (LeavesSomething, ("ctx.take",)),
        (OneMicrobatch, ("inputs[0]",)),
        (OtherHalves, ("'scale'", "(1,)", "halves")),
        (WeightsTwice, ("'scale'", "quotient")),
        (TrainsFrozen, ("'scale'", "frozen")),
        (GivesNone, ("inputs[0]", "quotient")),
        (GivesAnotherShape, ("inputs[0]", "(2, 3)", "(1, 3)")),
        (GivesATuple, ("inputs[0]", "array", "tuple")),
        (ForgetsWeights, ("'scale'", "(0,)", "0.0")),
    ],
)
def test_each_way_to_be_wrong_is_found(kind, values):
    with raises(ModuleError, *values):
        mm.testing.gradcheck(kind(), X.copy(), 2 * X)


def test_a_layer_that_spares_the_gradient_of_its_input_passes():
    layer = GivesNone()
    layer.input_grad = False
    mm.testing.gradcheck(layer, X)


class Pair(nn.Module):
    """Takes a dict with a tuple and integers, gives a tuple."""

    wrong = 1.0

    def forward(self, x: Any, ctx: Any = None) -> Any:
        (a, b), places = x["pair"], x["places"]
        if ctx is not None:
            ctx.save(self, a, b, places)
        return a * b, {"picked": a[places], "places": places}

    def backward_input(self, dy: Any, ctx: Any) -> Any:
        a, b, places = ctx.take(self)
        product, rest = dy
        assert rest["places"] is None
        da, db = product * b, self.wrong * product * a
        np.add.at(da, places, rest["picked"])
        return {"pair": (da, db), "places": None}


def test_tuples_and_dicts():
    x = {"pair": (X.copy(), X[::-1] * 2), "places": np.array([1, 1])}
    layer = Pair()
    mm.testing.gradcheck(layer, x, x)
    layer.wrong = 2.0
    with raises(ModuleError, "inputs[0]['pair'][1]", "(0, 0)"):
        mm.testing.gradcheck(layer, x)


class Own:
    """No Module, and a backward in one piece."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong = wrong
        self.weight = nn.Parameter("weight", (3,), nn.Constant(2.0))
        self.weight.materialize(seed=0, dtype="float64")

    def forward(self, x: Any, ctx: Any = None) -> Any:
        if ctx is not None:
            ctx.save(self, x)
        return np.sin(x * self.weight.value())

    def backward(self, dy: Any, ctx: Any) -> Any:
        (x,) = ctx.take(self)
        inner = np.cos(x * self.weight.value()) * dy
        self.weight.accumulate(self.wrong * (inner * x).sum(axis=0))
        return inner * self.weight.value()

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight]


def test_layers_of_other_classes_also_within_others():
    mm.testing.gradcheck(Own(), X, X[:1])
    layers = nn.Sequential(nn.Linear(3, 3), Own(), nn.Dropout(0.5), nn.GELU())
    layers.materialize(seed=1, dtype="float64")
    mm.testing.gradcheck(layers, X, X[:1], training_step=3)
    with raises(ModuleError, "'param_0'", "(0,)"):
        mm.testing.gradcheck(Own(wrong=1.01), X)
    broken = nn.Sequential(nn.Linear(3, 3), Own(wrong=1.01))
    broken.materialize(seed=1, dtype="float64")
    with raises(ModuleError, "'1.param_0'", "(0,)"):
        mm.testing.gradcheck(broken, X)


def materialized(dtype: Any) -> nn.Linear:
    layer = nn.Linear(3, 2)
    layer.materialize(seed=0, dtype=dtype)
    return layer


@pytest.mark.parametrize(
    ("call", "error", "values"),
    [
        (lambda: mm.testing.gradcheck(3, X), ModuleError, ("layer", 3)),  # type: ignore[arg-type]
        (lambda: mm.testing.gradcheck(Scale()), ModuleError, ("input",)),
        (lambda: mm.testing.gradcheck(Scale(), [1.0]), ModuleError, ("inputs[0]", "list")),
        (lambda: mm.testing.gradcheck(Scale(), X, step=0), ModuleError, ("step", 0)),
        (lambda: mm.testing.gradcheck(Scale(), X, rtol=-1), ModuleError, ("rtol", -1)),
        (lambda: mm.testing.gradcheck(Scale(), X, atol="a"), ModuleError, ("atol", "a")),  # type: ignore[arg-type]
        (lambda: mm.testing.gradcheck(Scale(), X, seed=-1), ModuleError, ("seed", -1)),
        (
            lambda: mm.testing.gradcheck(Scale(), X, training_step=-1),
            ModuleError,
            ("training_step", -1),
        ),
        (
            lambda: mm.testing.gradcheck(Scale(), X.astype("float32")),
            DTypeError,
            ("inputs[0]", "float32"),
        ),
        (
            lambda: mm.testing.gradcheck(materialized("float32"), X),
            DTypeError,
            ("'weight'", "float32"),
        ),
        (lambda: mm.testing.gradcheck(nn.Linear(3, 2), X), ModuleStateError, ("materialize",)),
    ],
)
def test_wrong_arguments(call, error, values):
    with raises(error, *values):
        call()
