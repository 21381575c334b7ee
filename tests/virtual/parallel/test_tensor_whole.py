"""Split arrays put together: what several ranks have is sent by one."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.nn import Constant
from mpimesh.parallel.tensor.model import whole_array
from mpimesh.parallel.tensor.parameter import Runs, TensorParameter
from tests.helpers.parallel_models import on_ranks

ALL: Runs = ((0, 6),)


@pytest.mark.parametrize(
    ("parts", "most_bytes"),
    [
        ([ALL] * 4, 0),
        ([((0, 2),), ((0, 2),), ((2, 6),), ((2, 6),)], 6 * 3 * 8),
        ([((0, 1), (4, 6)), ((1, 4),), ((0, 1), (4, 6)), ()], 6 * 3 * 8),
        ([(), ((0, 3),), ((3, 6),), ()], 6 * 3 * 8),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_no_part_travels_twice(parts, most_bytes, axis):
    whole = np.arange(18.0).reshape((6, 3) if axis == 0 else (3, 6))

    def body(mesh):
        parameter = TensorParameter(
            "weight", whole.shape, Constant(0.0), axis=axis, parts=parts, rank=mesh.rank
        )
        runs = parts[mesh.rank]
        mine = [np.take(whole, range(start, stop), axis) for start, stop in runs]
        part = np.concatenate(mine, axis) if mine else np.take(whole, [], axis)
        with mesh.budget(bytes=most_bytes) as moved:
            found = whole_array(parameter, part, mesh.group())
        assert found is not part
        np.testing.assert_array_equal(found, whole, strict=True)
        return moved.used_bytes

    # Each rank receives what it has not sent.
    assert sum(on_ranks("tp=4", body)) == (3 * most_bytes)
