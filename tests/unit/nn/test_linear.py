from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import ModuleError, ShapeError
from tests.helpers.depth import examples
from tests.helpers.raises import raises


@settings(max_examples=examples(40))
@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    extents=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    bias=st.booleans(),
    fortran=st.booleans(),
)
def test_linear_is_its_formula_on_any_leading_axes(leading, extents, bias, fortran):
    inner, outer = extents
    layer: Any = nn.Linear(inner, outer, bias=bias)
    layer.materialize(seed=1, dtype="float64")
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(*leading, inner)), rng.normal(size=(*leading, outer))
    if fortran:
        x, dy = np.asfortranarray(x), np.asfortranarray(dy)
    weight = layer.weight.data
    ctx = nn.Context()
    expected = np.einsum("...i,oi->...o", x, weight) + (layer.bias.data if bias else 0)
    np.testing.assert_allclose(layer(x, ctx), expected, rtol=1e-12, atol=1e-13)
    dx = layer.backward(dy, ctx)
    np.testing.assert_allclose(dx, np.einsum("...o,oi->...i", dy, weight), rtol=1e-12, atol=1e-13)
    outer_products = sum(
        (np.outer(dy[place], x[place]) for place in np.ndindex(*leading)), np.zeros((outer, inner))
    )
    np.testing.assert_allclose(layer.weight.grad, outer_products, rtol=1e-12, atol=1e-13)
    if bias:
        axes = tuple(range(len(leading)))
        np.testing.assert_allclose(layer.bias.grad, dy.sum(axis=axes), rtol=1e-12, atol=1e-13)


def test_first_values_are_uniform_within_the_root_of_the_inputs():
    layer: Any = nn.Linear(400, 300)
    layer.materialize(seed=0, dtype="float64")
    for parameter in (layer.weight, layer.bias):
        values = parameter.data.reshape(-1) / 0.05
        assert np.abs(values).max() <= 1
        # Of a uniform distribution on [-1, 1]; six deviations of the estimate.
        assert abs(values.mean()) < 6 * np.sqrt(1 / 3 / values.size)
        assert abs(np.square(values).mean() - 1 / 3) < 6 * np.sqrt(4 / 45 / values.size)


@pytest.mark.parametrize("extents", [(0, 3), (3, -1), (2.5, 3), ("3", 3)])
def test_extents_that_are_no_positive_whole_numbers_are_refused(extents):
    with raises(ModuleError, 1):
        nn.Linear(*extents)


def test_text():
    assert repr(nn.Linear(4, 3)) == "Linear(4, 3)"
    assert repr(nn.Linear(4, 3, bias=False)) == "Linear(4, 3, bias=False)"


def test_a_weight_of_another_layer_must_fit():
    layer, other = nn.Linear(6, 10), nn.Embedding(11, 6)
    layer.weight = other.weight
    nn.Sequential(other, layer).materialize(seed=0)
    with raises(ShapeError, "(10, 6)", "(11, 6)"):
        layer.forward(np.zeros((2, 6), np.float32))
