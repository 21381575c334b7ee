from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import DTypeError, ShapeError
from tests.helpers.raises import raises


def model():
    made = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    made.materialize(seed=0, dtype=np.float64)
    return made


def copied(module):
    return {name: array.copy() for name, array in module.state_dict().items()}


@pytest.mark.parametrize(
    ("spoil", "error", "values"),
    [
        (
            lambda array: array.astype("U9").reshape(array.shape) + "x",
            DTypeError,
            ("float64", "<U10"),
        ),
        (lambda array: np.append(array, 0.0), ShapeError, ((1,), (2,))),
        (lambda array: None, ShapeError, ((1,), ())),
    ],
)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_state_with_one_wrong_array_changes_nothing(spoil, error, values, parallel):
    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            module = mm.DataParallel(model(), mesh) if parallel else model()
            before = copied(module.inner if parallel else module)
            state = {name: array + 1 for name, array in before.items()}
            last = list(state)[-1]
            state[last] = spoil(state[last])
            with raises(error, "'1.bias'", *values):
                module.load_state_dict(state)
            return before, copied(module.inner if parallel else module)

    ((before, after),) = mm.run_virtual(1, main)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_lists_and_other_dtypes_are_rounded_into_place():
    module = model()
    state = {name: (array * 2).tolist() for name, array in copied(module).items()}
    module.load_state_dict(state)
    assert all(np.array_equal(array, state[name]) for name, array in module.state_dict().items())
