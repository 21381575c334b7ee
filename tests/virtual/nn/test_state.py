from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
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


class Mean(nn.Module):
    """The mean of the rows seen so far is taken off."""

    mean: Any
    rows: Any

    def __init__(self):
        self.scale = nn.Parameter("scale", (3,), nn.Constant(2.0))
        self.register_buffer("mean", np.zeros(3))
        self.register_buffer("rows", np.zeros((), np.int64))

    def forward(self, x, ctx=None):
        if ctx is not None:
            self.rows = self.rows + len(x)  # a number of NumPy from here on
            self.mean = self.mean + (x - self.mean).sum(axis=0) / self.rows
            ctx.save(self, x)
        return (x - self.mean) * self.scale.value()

    def backward(self, dy, ctx):
        (x,) = ctx.take(self)
        self.scale.accumulate((dy * (x - self.mean)).sum(axis=0))
        return dy * self.scale.value()


@pytest.mark.parametrize("dims", ["dp=2", "pp=2", "dp=2,pp=2"])
def test_buffers_of_a_layer_of_one_s_own_are_in_its_state(dims, tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 3))

    def make(mesh):
        stages = [mm.PipelineStage(0).add_layer(nn.Linear(3, 3)), mm.PipelineStage(1)]
        stages[1].add_layer(nn.Checkpoint(Mean()))
        if "pp" not in dims:
            return mm.DataParallel(nn.Sequential(*stages), mesh, dtype="float64")
        return mm.PipelineParallel(stages, 1, mesh=mesh, dtype="float64")

    def main():
        with mm.DeviceMesh(dims) as mesh:
            model = make(mesh)
            model.train_step(x, x, loss=nn.mse_loss)
            mm.save(tmp_path / "c", {"model": model})
            state, fresh = model.full_state_dict(), make(mesh)
            mm.load(tmp_path / "c", {"model": fresh})
            return state, fresh.full_state_dict()

    size = 4 if "," in dims else 2
    for state, again in mm.run_virtual(size, main):
        mine = [name for name in state if "mean" in name or "rows" in name]
        assert len(mine) == 2
        np.testing.assert_equal(again, state)
        rows = state[next(name for name in mine if "rows" in name)]
        assert rows == (8 if dims == "pp=2" else 4)


def test_what_is_no_buffer_is_refused():
    layer = Mean()
    with raises(ModuleError, "'mean'"):
        layer.register_buffer("mean", np.zeros(3))
    with raises(ModuleError, "'other'", "[1.0]"):
        layer.register_buffer("other", [1.0])
    layer.mean = "lost"
    with raises(ModuleStateError, "'mean'", "lost"):
        layer.named_buffers()[0][1].value()
