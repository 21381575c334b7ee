"""The loss scale, against its rule written down a second time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import optim
from mpimesh.errors import ModuleError
from mpimesh.nn import Parameter, Uniform
from tests.helpers.depth import examples


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(0, 12))
@settings(max_examples=examples(60))
def test_the_scale_follows_its_rule(overflows, interval, most):
    scaler = optim.LossScaler(4.0, growth_interval=interval, max_scale=max(4.0, 2.0**most))
    resumed = optim.LossScaler(4.0, growth_interval=interval, max_scale=max(4.0, 2.0**most))
    exponent = 2
    since = 0  # the last change or overflow
    for overflowed in overflows:
        scaler.update(overflowed)
        resumed.load_state_dict(scaler.state_dict())
        since += 1
        if overflowed:
            exponent, since = max(0, exponent - 1), 0
        elif since % interval == 0:
            exponent = min(exponent + 1, max(2, most))
        assert scaler.scale == resumed.scale == 2.0**exponent
    assert scaler.skipped_steps == resumed.skipped_steps == sum(overflows)
    assert f"{sum(overflows)} steps skipped" in repr(scaler)


WRONG: list[dict[str, Any]] = [
    {"scale": 0.0},
    {"scale": math.nan},
    {"scale": 2.0**40},
    {"growth": 0.5},
    {"backoff": 0.0},
    {"backoff": 2.0},
    {"growth_interval": 0},
    {"growth_interval": 1.5},
    {"min_scale": 0.0},
    {"max_scale": 1.0},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_what_is_no_scale_is_refused(options):
    with pytest.raises(ModuleError):
        optim.LossScaler(**options)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": "much", "good_steps": 0, "skipped_steps": 0},
        {"scale": -1.0, "good_steps": 0, "skipped_steps": 0},
        {"scale": 1.0, "good_steps": -1, "skipped_steps": 0},
        {"scale": 2.0**40, "good_steps": 0, "skipped_steps": 0},
        {"scale": 0.5, "good_steps": 0, "skipped_steps": 0},
        {"scale": math.inf, "good_steps": 0, "skipped_steps": 0},
    ],
)
def test_a_state_that_is_none_changes_nothing(state):
    scaler = optim.LossScaler(8.0)
    with pytest.raises(ModuleError):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"scale": 8.0, "good_steps": 0, "skipped_steps": 0}


def half(values: list[float]) -> Parameter:
    made = Parameter("weight", (len(values),), Uniform(1.0))
    made.materialize(seed=0, dtype="float16")
    made.data[...] = values
    return made


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam], ids=lambda kind: kind.__name__)
def test_changes_too_small_for_the_dtype_add_up(make):
    """1 + 2**-12 is 1 in float16, but eight of them are not; float32 is the oracle."""
    one = half([1.0, 1.0])
    wide = Parameter("weight", (2,), Uniform(1.0))
    wide.materialize(seed=0, dtype="float32")
    wide.data[...] = 1.0
    optimizers = [make([parameter], lr=2.0**-12) for parameter in (one, wide)]
    for _ in range(8):
        for parameter in (one, wide):
            parameter.grad = np.full(2, -1.0, parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    assert (one.data > 1).all()
    np.testing.assert_array_equal(one.data, wide.data.astype("float16"))
    np.testing.assert_array_equal(optimizers[0].state_dict()["params"][0]["master"], wide.data)


def test_master_values_follow_what_others_write_and_only_that():
    one = half([1.0, 1.0, 65504.0])
    optimizer = optim.SGD([one], lr=2.0**-12)
    one.grad = np.array([-1, -1, 0], "float16")
    optimizer.step()
    one.data[0] = 3.0
    optimizer.step()
    master = optimizer.state_dict()["params"][0]["master"]
    np.testing.assert_array_equal(master, np.array([3 + 2.0**-12, 1 + 2.0**-11, 65504], "float32"))


def test_a_state_without_master_values_starts_from_the_parameter():
    one, other = half([1.0, 2.0]), half([1.0, 2.0])
    source, target = optim.Adam([one]), optim.Adam([other])
    one.grad = np.ones(2, "float16")
    source.step()
    state = source.state_dict()
    del state["params"][0]["master"]
    other.data[...] = one.data
    target.load_state_dict(state)
    np.testing.assert_array_equal(target.state_dict()["params"][0]["master"], one.data)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_factor_of_the_gradient_is_taken_before_anything_is_rounded(dtype):
    parameters = [Parameter("weight", (300,), Uniform(1.0)) for _ in range(2)]
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=300).astype(dtype)
    for parameter, scale in zip(parameters, (1, 2**8), strict=True):
        parameter.materialize(seed=0, dtype=dtype)
        parameter.grad = (gradient * scale).astype(dtype)
        before = parameter.grad.copy()
        optimizer = optim.Adam([parameter], lr=0.1)
        for _ in range(3):
            optimizer.step_at(0, grad_factor=1 / scale)
        np.testing.assert_array_equal(parameter.grad, before)
    np.testing.assert_array_equal(parameters[0].data, parameters[1].data)
