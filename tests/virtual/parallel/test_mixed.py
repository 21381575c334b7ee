"""Scaled losses, and steps that all ranks leave out together."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError
from tests.helpers.parallel_models import (
    CLASSES,
    FEATURES,
    assert_equal,
    batch,
    cut,
    make_pipeline,
    on_ranks,
    state_of,
)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dims", ["dp=1", "dp=3", "dp=2,pp=2"])
def test_a_power_of_two_changes_nothing_at_all(dims, zero):
    """Scaling by it rounds nothing, so losses, norms and parameters are the same bit for bit."""

    def train(mesh, scaler):
        pipe = make_pipeline(mesh)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer = mm.ParallelOptimizer(adam, pipe, zero=zero, scaler=scaler)
        seen = []
        for step in range(4):
            with pipe.no_sync():
                seen.append(pipe.train_step(*batch(9, 4), loss=nn.cross_entropy, denominator=17))
            seen.append(pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, denominator=17))
            seen.append(pipe.clip_grad_norm(0.3))
            optimizer.step()
        return seen, state_of(pipe)

    def body(mesh):
        scaler = optim.LossScaler(2.0**20, growth_interval=2)
        one, other = train(mesh, None), train(mesh, scaler)
        assert one[0] == other[0]
        assert_equal(one[1], other[1])
        assert scaler.scale == 2.0**22

    on_ranks(dims, body)


class Poison(nn.Module):
    """The identity, whose gradient is infinite when told so."""

    def __init__(self):
        self.on = False

    def forward(self, x, ctx=None):
        return x

    def backward_input(self, dy, ctx):
        return dy * np.inf if self.on else dy


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("rank", [0, 3])
def test_all_ranks_leave_out_the_step_of_one(zero, rank):
    """Stages hold different parameters: only one stage overflows, and every rank must know."""

    def body(mesh):
        poisons = [Poison(), Poison()]
        stages = [
            mm.PipelineStage(0).add_layer(nn.Linear(FEATURES, 8)).add_layer(poisons[0]),
            mm.PipelineStage(1).add_layer(nn.Linear(8, CLASSES)).add_layer(poisons[1]),
        ]
        pipe = make_pipeline(mesh, stages=stages)
        scaler = optim.LossScaler(4.0)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer = mm.ParallelOptimizer(adam, pipe, zero=zero, scaler=scaler)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        scales = []
        for step in range(6):
            before = state_of(pipe)
            poisons[mesh.coord("pp")].on = mesh.rank == rank and 1 <= step <= 4
            assert np.isfinite(train(*batch(step, 16)))
            scales.append(scaler.scale)
            changed = any((before[name] != values).any() for name, values in state_of(pipe).items())
            assert changed == (step in (0, 5))
        assert scales == [4, 2, 1, 1, 1, 1]
        assert optimizer.skipped_steps == 4
        assert {state["steps"] for state in optimizer.state_dict()["params"]} == {2}
        pipe.check_replicas()
        return scales

    scales = on_ranks("dp=2,pp=2", body)
    assert all(one == scales[0] for one in scales)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dims", ["dp=1", "dp=2", "dp=2,pp=2"])
def test_gradients_that_float16_cannot_hold_count_if_scaled(dims, zero):
    """Each row's gradient of the output is about 1e-8, which is 0; float64 tells what is right."""

    def train(mesh, dtype, scale):
        num_stages = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = cut(num_stages, [nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)])
        pipe = make_pipeline(mesh, stages=stages, dtype=dtype)
        biases = [one for one in pipe.parameters() if one.name == "bias"]
        for bias in biases:
            bias.data[...] = 0  # so that changes of any size show in float32
        sgd = optim.SGD(pipe.parameters(), lr=0.5, momentum=0.5)
        scaler = None if scale is None else optim.LossScaler(scale)
        optimizer = mm.ParallelOptimizer(sgd, pipe, zero=zero, scaler=scaler)
        x, classes = batch(0, 512)
        x, target = 1e-2 * x, np.full((512, CLASSES), 1e-4 * classes[:, None])
        for _ in range(4):
            pipe.train_step(x.astype(dtype), target.astype(dtype), loss=TINY, optimizer=optimizer)
        if dtype == "float64":
            return [bias.data for bias in biases]
        states = zip(pipe.parameters(), optimizer.state_dict()["params"], strict=True)
        return [state["master"] for parameter, state in states if parameter.name == "bias"]

    def body(mesh):
        right = train(mesh, "float64", None)
        scaled = train(mesh, "float16", 2.0**20)
        for one, other in zip(scaled, right, strict=True):
            assert np.any(other)
            assert np.abs(one - other).max() < 0.03 * np.abs(other).max()
        assert not any(map(np.any, train(mesh, "float16", None)))

    on_ranks(dims, body)


class Tiny:
    """Mean squares, a thousandth of them."""

    def __call__(self, y, target):
        return nn.mse_loss(y, target) / 1000

    def value_and_grad(self, y, target, *, denominator):
        return nn.mse_loss.value_and_grad(y, target, denominator=1000 * denominator)


TINY = Tiny()


def test_a_state_of_float16_goes_to_other_replicas_with_its_master_values():
    def start(mesh):
        pipe, optimizer = make(mesh)
        for step in range(3):
            train(pipe, optimizer, step)
        return pipe.full_state_dict(), optimizer.state_dict(), optimizer.scaler.state_dict()

    def go_on(mesh):
        pipe, optimizer = make(mesh)
        pipe.load_state_dict(values)
        optimizer.load_state_dict(state)
        optimizer.scaler.load_state_dict(scale)
        return optimizer.state_dict(), state_of(pipe), optimizer.loss_scale

    def make(mesh):
        pipe = make_pipeline(mesh, dtype="float16")
        scaler = optim.LossScaler(2.0, growth_interval=2)
        adam = optim.AdamW(pipe.parameters(), lr=1e-4)
        return pipe, mm.ParallelOptimizer(adam, pipe, scaler=scaler)

    def train(pipe, optimizer, step):
        x, target = batch(step, 12)
        pipe.train_step(x.astype("float16"), target, loss=nn.cross_entropy, optimizer=optimizer)

    values, state, scale = on_ranks("dp=3", start)[0]
    for got, parameters, loss_scale in on_ranks("dp=2", go_on):
        assert loss_scale == 4.0
        for one, other in zip(got["params"], state["params"], strict=True):
            assert_equal(
                {name: np.asarray(one[name]) for name in one},
                {name: np.asarray(other[name]) for name in other},
            )
            assert one["master"].dtype == "float32"
        masters = [one["master"].astype("float16") for one in state["params"]]
        for master, parameter in zip(masters, parameters.values(), strict=True):
            np.testing.assert_array_equal(master, parameter)


def test_scales_that_differ_are_told_before_anything_is_summed():
    def body(mesh):
        pipe = make_pipeline(mesh)
        scaler = optim.LossScaler(8.0)
        mm.ParallelOptimizer(optim.SGD(pipe.parameters(), lr=0.1), pipe, scaler=scaler)
        if mesh.rank == 1:
            scaler.scale = 4.0
        with pytest.raises(MismatchError, match="losses times 4"):
            pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        with pytest.raises(MismatchError):
            mm.ParallelOptimizer(
                optim.SGD([], lr=0.1),
                make_pipeline(mesh),
                scaler=optim.LossScaler() if mesh.rank else None,
            )

    on_ranks("dp=2", body)
