"""Operations on split arrays where rules, dtypes or errors once differed from NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from tests.contract.split_arrays import on_every_layout, same, values


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 1, 4), (1, 3)])
@pytest.mark.parametrize("function", [np.argmin, np.argmax])
def test_places_of_axes_shorter_than_the_dim_that_splits_them(function, shape):
    a = values(shape)

    def check(mesh, tensors, what):
        (x,) = tensors
        for axis in (None, *range(len(shape))):
            for keepdims in (False, True):
                want = function(a, axis, keepdims=keepdims)
                same(function(x, axis, keepdims=keepdims), want, (axis, keepdims, what))

    on_every_layout(4, check, [a], "x=2,y=2")
