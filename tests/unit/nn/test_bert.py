"""A whole small BERT with padding, from ids to unit vectors."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.testing import gradcheck
from tests.helpers.raises import raises


def model():
    layers = nn.Sequential(
        nn.BertEmbedding(7, 4, 4), nn.BertBlock(4, 2, hidden=3), nn.MeanPool(), nn.Normalize()
    )
    layers.materialize(seed=0, dtype="float64")
    rng = np.random.default_rng(1)
    for parameter in layers.parameters():
        parameter.data[...] += rng.normal(scale=0.3, size=parameter.shape)
    return layers


IDS = np.array([[1, 2, 3, 6], [4, 1, 0, 0], [0, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]) != 0
TYPES = np.array([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize("x", [(IDS, MASK), (IDS[:2], MASK[:2], TYPES[:2])], ids=["2", "3"])
def test_gradients_with_padding_are_central_differences(x):
    """Also of a row without any token, whose vector is 0."""
    layers, ctx = model(), nn.Context()
    y = layers(x, ctx)
    assert layers.backward(np.ones_like(y), ctx) is None
    assert ctx.is_empty
    np.testing.assert_allclose((y[:2] ** 2).sum(axis=1), 1.0)
    assert not y[2:].any()
    gradcheck(layers, x, rtol=1e-6, atol=1e-8)


def test_a_row_is_the_same_beside_padding_and_alone():
    layers = model()
    np.testing.assert_allclose(layers((IDS, MASK))[1], layers(IDS[1:2, :2])[0], rtol=1e-12)


def test_type_ids_are_zero_where_not_given():
    layers = model()
    np.testing.assert_array_equal(layers((IDS, MASK, np.zeros_like(IDS))), layers((IDS, MASK)))
    assert np.abs(layers((IDS, MASK, TYPES)) - layers((IDS, MASK)))[:2].max() > 1e-3


@pytest.mark.parametrize(
    ("x", "error", "values"),
    [
        (IDS[0], ShapeError, ("ids", "(batch, tokens)", (4,))),
        ((IDS, MASK[:2]), ShapeError, ("mask", (3, 4), (2, 4))),
        ((IDS, MASK * 1), DTypeError, ("mask", "int64", "mask != 0")),
        ((IDS, MASK, TYPES[:2]), ShapeError, ("type ids", (3, 4), (2, 4))),
        ((IDS, MASK, TYPES, TYPES), ModuleError, ("(array, mask)", 4)),
        ((np.zeros((1, 5), int), np.ones((1, 5), bool)), ShapeError, ("tokens", 4, (1, 5, 4))),
    ],
)
def test_a_wrong_input_is_refused(x, error, values):
    with raises(error, *values):
        model()(x)
