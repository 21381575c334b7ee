from __future__ import annotations

import math

import numpy as np
import pytest

from mpimesh.nn.activations import erf


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


def test_special_values():
    found = erf(np.array([0.0, -0.0, math.inf, -math.inf, math.nan]))
    np.testing.assert_array_equal(found, [0.0, -0.0, 1.0, -1.0, math.nan])
    assert np.signbit(found[:2]).tolist() == [False, True]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3), (32769,), (3, 32768)])
def test_any_shape_and_memory_layout(shape):
    x = np.random.default_rng(0).normal(size=shape)
    expected = np.vectorize(math.erf, otypes=[float])(x)
    np.testing.assert_allclose(erf(x), expected, rtol=1e-15)
    np.testing.assert_allclose(erf(np.asfortranarray(x)), expected, rtol=1e-15)
    np.testing.assert_allclose(erf(x.T), expected.T, rtol=1e-15)
    np.testing.assert_allclose(erf(np.flip(x)), np.flip(expected), rtol=1e-15)
