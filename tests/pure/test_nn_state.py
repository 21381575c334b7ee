from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import DTypeError, ShapeError


def model():
    made = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    made.materialize(seed=0, dtype=np.float64)
    return made


def copied(module):
    return {name: array.copy() for name, array in module.state_dict().items()}


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (
            lambda array: array.astype("U9").reshape(array.shape) + "x",
            DTypeError,
            "must be numbers",
        ),
        (lambda array: np.append(array, 0.0), ShapeError, "must have its shape"),
        (lambda array: None, ShapeError, "must have its shape"),
    ],
)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_state_with_one_wrong_array_changes_nothing(spoil, error, text, parallel):
    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            module = mm.DataParallel(model(), mesh) if parallel else model()
            before = copied(module.inner if parallel else module)
            state = {name: array + 1 for name, array in before.items()}
            last = list(state)[-1]
            state[last] = spoil(state[last])
            with pytest.raises(error, match=text):
                module.load_state_dict(state)
            return before, copied(module.inner if parallel else module)

    ((before, after),) = mm.run_virtual(1, main)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_lists_and_other_dtypes_are_rounded_into_place():
    module = model()
    state = {name: (array * 2).tolist() for name, array in copied(module).items()}
    module.load_state_dict(state)
    assert all(np.array_equal(array, state[name]) for name, array in module.state_dict().items())
