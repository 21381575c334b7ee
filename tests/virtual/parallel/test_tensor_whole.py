"""Split arrays put together: what several ranks have is sent by one."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.layout import layout_of_runs
from mpimesh.layout.boxes import slices
from mpimesh.nn import Constant, Parameter
from mpimesh.parallel.split_layers import whole_array
from tests.helpers.parallel_models import on_ranks

ALL = (0, 6)


@pytest.mark.parametrize(
    ("runs", "most_bytes"),
    [
        ([ALL] * 4, 0),
        ([(0, 2), (0, 2), (2, 6), (2, 6)], 6 * 3 * 8),
        ([(4, 6), (0, 4), (4, 6), (4, 4)], 6 * 3 * 8),
        ([(0, 0), (0, 3), (3, 6), (6, 6)], 6 * 3 * 8),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_no_part_travels_twice(runs, most_bytes, axis):
    whole = np.arange(18.0).reshape((6, 3) if axis == 0 else (3, 6))

    def body(mesh):
        parameter = Parameter("weight", whole.shape, Constant(0.0))
        parameter.set_layout(layout_of_runs(whole.shape, axis, runs), mesh.rank)
        part = whole[slices(parameter.box)]
        with mesh.budget(bytes=most_bytes) as moved:
            found = whole_array(parameter, part, mesh.group())
        assert found is not part
        np.testing.assert_array_equal(found, whole, strict=True)
        return moved.used_bytes

    # Each rank receives what it has not sent.
    assert sum(on_ranks("tp=4", body)) == (3 * most_bytes)
