from __future__ import annotations

import math

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import ModuleError
from mpimesh.nn.activations import erf
from tests.helpers.raises import raises


def test_relu_passes_gradients_where_the_output_is_positive():
    layer, ctx = nn.ReLU(), nn.Context()
    x = np.array([-2.0, -0.0, 0.0, 3.0])
    np.testing.assert_array_equal(layer(x, ctx), [0.0, 0.0, 0.0, 3.0])
    np.testing.assert_array_equal(layer.backward(np.ones(4), ctx), [0.0, 0.0, 0.0, 1.0])


def test_relu_keeps_nan_and_does_not_make_it_of_infinite_gradients():
    layer, ctx = nn.ReLU(), nn.Context()
    y = layer(np.array([math.nan, -1.0]), ctx)
    assert math.isnan(y[0])
    np.testing.assert_array_equal(layer.backward(np.array([0.0, math.inf]), ctx), [0.0, 0.0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_is_x_times_the_normal_distribution_function(dtype):
    x = np.linspace(-6, 6, 1001).astype(dtype)
    expected = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    tolerance = 8 * np.finfo(dtype).eps
    np.testing.assert_allclose(nn.GELU()(x), expected, rtol=tolerance, atol=tolerance)


def test_gelu_by_tanh_is_its_formula():
    x = np.linspace(-6, 6, 1001)
    expected = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        for v in x.tolist()
    ]
    np.testing.assert_allclose(nn.GELU(approximate="tanh")(x), expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(nn.GELU()(x), expected, atol=5e-4)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_has_its_limits_far_out(approximate):
    layer, ctx = nn.GELU(approximate=approximate), nn.Context()
    x = np.array([-60.0, 60.0], "float32")
    np.testing.assert_array_equal(layer(x, ctx), [0.0, 60.0])
    np.testing.assert_array_equal(layer.backward(np.ones(2, "float32"), ctx), [0.0, 1.0])


def test_gelu_refuses_other_approximations():
    with raises(ModuleError, "'none'", "'tanh'", "'sigmoid'"):
        nn.GELU(approximate="sigmoid")  # type: ignore[arg-type]


def test_texts():
    assert [repr(nn.ReLU()), repr(nn.GELU())] == ["ReLU()", "GELU(approximate='none')"]


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (7, 3), (32769,), (300, 400)])
def test_silu_and_its_derivative_of_any_size(shape):
    """Large arrays are computed in blocks."""
    layer, ctx = nn.SiLU(), nn.Context()
    x = np.random.default_rng(0).normal(size=shape) * 5
    share = 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(layer(x, ctx), x * share, rtol=1e-13)
    expected = share * (1 + x * (1 - share))
    dx = layer.backward(np.ones_like(x), ctx)
    assert dx is not None
    np.testing.assert_allclose(dx, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "most_ulp"), [("float64", 2.0), ("float32", 2.0)])
def test_erf_is_right_to_two_units_in_the_last_place(dtype, most_ulp):
    fine = np.linspace(-7, 7, 20011)
    around_the_cuts = np.concatenate([c + np.linspace(-1e-3, 1e-3, 501) for c in (0.84375, 6.0)])
    tiny = np.logspace(-290 if dtype == "float64" else -37, 1, 2001)
    x = np.concatenate([fine, around_the_cuts, -around_the_cuts, tiny, -tiny]).astype(dtype)
    expected = np.array([math.erf(value) for value in x.tolist()])
    unit = np.spacing(np.abs(expected).astype(dtype)).astype("float64")
    found = erf(x)
    assert found.dtype == dtype
    assert np.max(np.abs(found.astype("float64") - expected) / unit) <= most_ulp


def test_erf_of_special_values():
    found = erf(np.array([0.0, -0.0, math.inf, -math.inf, math.nan]))
    np.testing.assert_array_equal(found, [0.0, -0.0, 1.0, -1.0, math.nan])
    assert np.signbit(found[:2]).tolist() == [False, True]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3), (32769,), (3, 32768)])
def test_erf_of_any_shape_and_memory_layout(shape):
    x = np.random.default_rng(0).normal(size=shape)
    expected = np.vectorize(math.erf, otypes=[float])(x)
    np.testing.assert_allclose(erf(x), expected, rtol=1e-15)
    np.testing.assert_allclose(erf(np.asfortranarray(x)), expected, rtol=1e-15)
    np.testing.assert_allclose(erf(x.T), expected.T, rtol=1e-15)
    np.testing.assert_allclose(erf(np.flip(x)), np.flip(expected), rtol=1e-15)
