from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def materialized(dtype="float64"):
    layer = nn.Embedding(5, 3)
    layer.materialize(seed=0, dtype=dtype)
    return layer


@settings(max_examples=examples(60))
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(["uint8", "int8", "int32", "uint64", "int64"]),
    seed=st.integers(0, 99),
)
def test_equal_ids_add_up(shape, dtype, seed):
    layer = materialized()
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 5, shape).astype(dtype)
    expected = np.zeros((5, 3))
    for _ in range(2):  # the second time adds to the first
        ctx = nn.Context()
        y = layer(x, ctx)
        assert y.shape == (*shape, 3)
        np.testing.assert_array_equal(y, layer.weight.data[x.astype(int)])
        dy = rng.normal(size=y.shape)
        assert layer.backward(dy, ctx) is None
        np.add.at(expected, x.astype(int), dy)
    np.testing.assert_allclose(layer.weight.grad, expected, rtol=1e-12, atol=1e-13)


def test_the_bits_of_a_gradient_do_not_depend_on_other_ids():
    """Rows of one id are added in the order in which they come."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, 3000)
    dy = rng.normal(size=(3000, 3)).astype("float32")
    together, alone = materialized("float32"), materialized("float32")
    for layer, chosen in ((together, x >= 0), (alone, x == 2)):
        ctx = nn.Context()
        layer(x[chosen], ctx)
        layer.backward(dy[chosen], ctx)
    np.testing.assert_array_equal(together.weight.grad[2], alone.weight.grad[2])


def test_the_output_is_a_copy_of_the_weight():
    layer = materialized()
    layer(np.array(2))[...] = 99.0
    assert layer.weight.data.max() < 99


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ([[0, 4], [5, 1]], ("ids", 0, 5, "(1, 0)")),
        ([0, -1, 7], (-1, "(1,)")),
        (7, (7,)),
    ],
)
def test_ids_out_of_range_are_named(x, text):
    with raises(ModuleError, *text):
        materialized()(np.array(x))


@pytest.mark.parametrize(
    ("x", "kind"), [(np.ones(2), "float64"), (np.array([True]), "bool"), ([1, 2], "list")]
)
def test_ids_that_are_no_integers_are_refused(x, kind):
    with raises(DTypeError, "Embedding(5, 3)", "x", kind):
        materialized()(x)


def test_float16_gradients_are_added_up_in_float32():
    layer = materialized("float16")
    ctx = nn.Context()
    x = np.zeros(4096, int)
    dy = np.full((4096, 3), 0.1, "float16")
    layer(x, ctx)
    layer.backward(dy, ctx)
    # One by one in float16 the sum would stay at 256.
    np.testing.assert_allclose(layer.weight.grad[0], 4096 * float(dy[0, 0]), rtol=1e-3)


def test_first_values_have_the_deviation_asked_for():
    layer = nn.Embedding(300, 100, std=0.02)
    layer.materialize(seed=0, dtype="float64")
    values = layer.weight.data / 0.02
    assert abs(values.mean()) < 6 / np.sqrt(values.size)
    assert abs(values.var() - 1) < 6 * np.sqrt(2 / values.size)


@pytest.mark.parametrize("std", [-1, float("nan")])
def test_std_out_of_range_is_refused(std):
    with raises(ModuleError, "std"):
        nn.Embedding(5, 3, std=std)
