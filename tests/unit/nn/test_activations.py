from __future__ import annotations

import math

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import ModuleError
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
