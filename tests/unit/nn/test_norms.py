from __future__ import annotations

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import ModuleError
from tests.helpers.raises import raises


def materialized(features, dtype="float64", **options):
    layer = nn.LayerNorm(features, **options)
    layer.materialize(seed=0, dtype=dtype)
    return layer


def test_layernorm_is_its_formula():
    layer = materialized(6, eps=1e-3)
    rng = np.random.default_rng(0)
    layer.weight.data[...], layer.bias.data[...] = rng.normal(size=(2, 6))
    x = rng.normal(size=(2, 3, 6))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    expected = expected * layer.weight.data + layer.bias.data
    np.testing.assert_allclose(layer(x), expected, rtol=1e-12)


def test_first_values_are_one_and_zero():
    layer = materialized(4, "float32")
    np.testing.assert_array_equal(layer.weight.data, np.ones(4))
    np.testing.assert_array_equal(layer.bias.data, np.zeros(4))


def test_a_large_mean_costs_no_digits():
    layer = materialized(8, "float32")
    x = np.arange(8, dtype="float32") * 0.5
    np.testing.assert_allclose(layer(x + 2.0**16), layer(x), rtol=1e-4, atol=1e-5)


def test_float16_does_not_overflow_inside():
    layer = materialized(2048, "float16")
    x = np.tile(np.array([-3000.0, 3000.0], "float16"), 1024)[None]
    ctx = nn.Context()
    np.testing.assert_allclose(layer(x, ctx), np.sign(x), rtol=1e-3)
    dx = layer.backward(np.ones_like(x), ctx)
    assert np.isfinite(dx).all()
    assert layer.bias.grad.dtype == np.float16


def test_a_row_of_equal_values_gives_the_bias():
    np.testing.assert_array_equal(materialized(3)(np.full((2, 3), 7.0)), np.zeros((2, 3)))


@pytest.mark.parametrize("eps", [0, -1, float("nan"), float("inf")])
def test_eps_out_of_range_is_refused(eps):
    with raises(ModuleError, "eps", 0):
        nn.LayerNorm(3, eps=eps)


def test_text():
    assert repr(nn.LayerNorm(3)) == "LayerNorm(3, eps=1e-05)"
