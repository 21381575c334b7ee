"""Functions that work on the arrays of any library."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from mpimesh.arrays.namespace import zeros_where_not
from tests.helpers.depth import examples

DTYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "i8", "bool"]


@settings(max_examples=examples(60))
@given(data=st.data(), dtype=st.sampled_from(DTYPES), swapped=st.booleans())
def test_zeros_where_not_is_where(data, dtype, swapped):
    """To the bit, also of NaN, infinity and -0.0, and of arrays of any order of axes."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
    x = data.draw(hnp.arrays(dtype, shape))
    mask = data.draw(hnp.arrays(bool, shape))
    if swapped:
        x, mask = x.T, np.asfortranarray(mask.T)
    expected = np.where(mask, x, np.zeros((), dtype))
    found = zeros_where_not(mask, x)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()
    assert not np.shares_memory(found, x)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_zeros_where_not_of_half_types(dtype):
    x = np.array([np.nan, np.inf, -0.0, 3.5], dtype)
    mask = np.array([False, False, True, True])
    np.testing.assert_array_equal(zeros_where_not(mask, x), np.array([0, 0, -0.0, 3.5], dtype))
    assert zeros_where_not(~mask, x).tobytes() == np.array([np.nan, np.inf, 0, 0], dtype).tobytes()
