"""Concat and Add: several arrays become one, and its gradient theirs."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.testing import gradcheck
from tests.helpers.raises import raises


def arrays(*shapes, dtype="float64"):
    rng = np.random.default_rng(2)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


CASES = [
    (nn.Concat(), arrays((4, 3), (4, 1), (4, 2))),
    (nn.Concat(), arrays((4, 3))),
    (nn.Concat(axis=1), arrays((2, 3, 2), (2, 1, 2))),
    (nn.Concat(axis=-2), arrays((2, 3, 2), (2, 0, 2), (2, 1, 2))),
    (nn.Add(), arrays((4, 3), (4, 3), (4, 3))),
    (nn.Add(), arrays((4,))),
]


@pytest.mark.parametrize(("layer", "x"), CASES)
def test_gradients_are_those_of_finite_differences(layer, x):
    gradcheck(layer, x, rtol=1e-7, atol=1e-9)
    ctx = nn.Context()
    assert isinstance(layer.backward(np.ones_like(layer(x, ctx)), ctx), tuple)


@pytest.mark.parametrize(("layer", "x"), CASES)
def test_values_are_numpys(layer, x):
    if isinstance(layer, nn.Concat):
        np.testing.assert_array_equal(layer(x), np.concatenate(x, axis=layer.axis))
    else:
        np.testing.assert_array_equal(layer(x), sum(x))


@pytest.mark.parametrize("layer", [nn.Concat(), nn.Add()])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_not_floating_takes_the_dtype_and_has_no_gradient(layer, dtype):
    x = (np.array([[1], [2]]), np.array([[0.5], [1.5]], dtype), np.array([[True], [False]]))
    ctx = nn.Context()
    y = layer(x, ctx)
    assert y.dtype == dtype
    expected = [[1, 0.5, 1], [2, 1.5, 0]] if isinstance(layer, nn.Concat) else [[2.5], [3.5]]
    np.testing.assert_array_equal(y, expected)
    first, second, third = layer.backward(np.ones_like(y), ctx)
    assert first is None
    assert third is None
    np.testing.assert_array_equal(second, np.ones((2, 1), dtype), strict=True)


def test_inputs_stay_as_they_are():
    x = arrays((4, 3), (4, 3))
    kept = [one.copy() for one in x]
    ctx = nn.Context()
    nn.Add().forward(x)
    y = nn.Add()(x, ctx)
    assert not any(np.shares_memory(y, one) for one in x)
    for one, other in zip(x, kept, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("layer", "x", "error", "values"),
    [
        (nn.Concat(), np.ones((2, 2)), ModuleError, ("x", "ndarray")),
        (nn.Concat(), (), ModuleError, ("x", "()")),
        (nn.Add(), (np.ones(2), (np.ones(2),)), ModuleError, ("x", "(ndarray, tuple)")),
        (nn.Add(), (np.ones(2), np.ones(3)), ShapeError, ([(2,), (3,)],)),
        (nn.Concat(), (np.ones((2, 2)), np.ones((3, 2))), ShapeError, ([(2, 2), (3, 2)],)),
        (nn.Concat(), (np.ones((2, 2)), np.ones((2, 2, 2))), ShapeError, ([(2, 2), (2, 2, 2)],)),
        (nn.Concat(), (np.ones(2), np.ones(2)), ShapeError, ([(2,), (2,)],)),
        (nn.Concat(axis=2), (np.ones((2, 2)),), ShapeError, ([(2, 2)],)),
        (nn.Concat(axis=-2), (np.ones((2, 2)),), ShapeError, ([(2, 2)],)),
        (nn.Add(), (np.ones(2), np.ones(2, "f4")), DTypeError, ("float64", "float32")),
        (nn.Add(), (np.ones(2, int),), DTypeError, ("int64",)),
    ],
)
def test_what_does_not_fit_is_refused(layer, x, error, values):
    with raises(error, layer, *values):
        layer(x)


@pytest.mark.parametrize("axis", [0, 1.0, None])
def test_an_axis_is_not_that_of_the_rows(axis):
    with raises(ModuleError, "axis", 0, repr(axis)):
        nn.Concat(axis)


def test_wrong_gradients_are_refused():
    layer, x, ctx = nn.Concat(), arrays((2, 3), (2, 1)), nn.Context()
    with pytest.raises(ModuleStateError):
        layer.backward(np.ones((2, 4)), ctx)
    layer(x, ctx)
    with pytest.raises(ShapeError):
        layer.backward(np.ones((2, 3)), ctx)
    with pytest.raises(DTypeError):
        layer.backward(np.ones((2, 4), "float32"), ctx)
    layer.backward(np.ones((2, 4)), ctx)


def test_in_a_model():
    """A tuple at its beginning; the layers behind are trained."""
    model = nn.Sequential(nn.Concat(), nn.Linear(4, 2))
    model.materialize(seed=0, dtype=np.float64)
    x, ctx = arrays((5, 3), (5, 1)), nn.Context()
    dx = model.backward(np.ones_like(model(x, ctx)), ctx)
    assert isinstance(dx, tuple)
    assert [one.shape for one in dx] == [(5, 3), (5, 1)]
    expected = np.ones((2, 5)) @ np.concatenate(x, axis=1)
    np.testing.assert_allclose(model.parameters()[0].grad, expected)


def test_text():
    assert repr(nn.Concat()) == "Concat(axis=-1)"
    assert repr(nn.Add()) == "Add()"
