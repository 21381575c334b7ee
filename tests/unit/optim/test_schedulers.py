"""Learning rates, against closed formulas and those of PyTorch, written down here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import optim
from mpimesh.errors import ModuleError
from mpimesh.nn import Constant, Parameter
from tests.helpers.depth import examples
from tests.helpers.raises import raises

LR = 0.3


def rates(schedule: Callable[[int], float], steps: int, lr: float = LR) -> list[float]:
    sgd = optim.SGD([], lr=lr)
    scheduler = optim.LRScheduler(sgd, schedule)
    found = []
    for _ in range(steps):
        found.append(sgd.lr)
        scheduler.step()
    return found


# PyTorch's own formulas, which go from one rate to the next, not from the step to the rate.


def torch_linear(start: float, end: float, total: int, steps: int) -> list[float]:
    lr, found = LR * start, []
    for step in range(1, steps + 1):
        found.append(lr)
        if step <= total:
            lr *= 1.0 + (end - start) / (total * start + (step - 1) * (end - start))
    return found


def torch_cosine(least: float, total: int, steps: int) -> list[float]:
    lr, found = LR, []
    for step in range(1, steps + 1):
        found.append(lr)
        over = 1 + math.cos(math.pi * step / total)
        lr = least + (lr - least) * over / (1 + math.cos(math.pi * (step - 1) / total))
    return found


def torch_one_cycle(
    total: int, pct_start: float = 0.3, div: float = 25.0, final_div: float = 1e4
) -> list[float]:
    initial = LR / div
    lowest = initial / final_div
    phases = [(float(pct_start * total) - 1, initial, LR), (total - 1, LR, lowest)]
    found = []
    for step in range(total):
        begin = 0.0
        for i, (end, first, last) in enumerate(phases):
            if step <= end or i == 1:
                done = (step - begin) / (end - begin)
                found.append(last + (first - last) / 2.0 * (1 + math.cos(math.pi * done)))
                break
            begin = end
    return found


def test_constant():
    assert rates(optim.ConstantLR(), 3) == [LR] * 3
    assert rates(optim.ConstantLR(0.5), 3) == [LR * 0.5] * 3


@given(st.integers(1, 30), st.floats(0.01, 2), st.floats(0, 2))
@settings(max_examples=examples(40))
def test_linear_is_that_of_pytorch(total, start, end):
    found = rates(optim.LinearLR(total, start, end), total + 5)
    np.testing.assert_allclose(found[:total], torch_linear(start, end, total, total), rtol=1e-9)
    assert found[total:] == [LR * (start + (end - start))] * 5


@given(st.integers(1, 30), st.floats(0, 0.9))
@settings(max_examples=examples(40))
def test_cosine_is_that_of_pytorch_until_its_end(total, end):
    found = rates(optim.CosineLR(total, end), total + 6)
    np.testing.assert_allclose(found[:total], torch_cosine(LR * end, total, total), rtol=1e-7)
    np.testing.assert_allclose(found[total:], [LR * end] * 6, rtol=1e-15)


@pytest.mark.parametrize(("total", "share"), [(10, 0.3), (7, 0.5), (100, 0.25), (40, 1 / 3)])
def test_one_cycle_is_that_of_pytorch(total, share):
    expected = torch_one_cycle(total, share)
    found = rates(optim.OneCycleLR(total, share), total + 3)
    np.testing.assert_allclose(found[:total], expected, rtol=1e-9)
    assert found[total:] == [LR * (1 / 250_000)] * 3
    other = rates(optim.OneCycleLR(total, share, start=0.1, end=0.1 / 50), total)
    np.testing.assert_allclose(other, torch_one_cycle(total, share, 10.0, 50.0), rtol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (optim.OneCycleLR(1), [1 / 250_000, 1 / 250_000]),
        (optim.OneCycleLR(3, 1.0, start=0.0, end=0.5), [0.0, 0.5, 1.0, 1.0]),
        (optim.OneCycleLR(4, 0.25, end=0.0), [1.0, 0.75, 0.25, 0.0, 0.0]),
        (optim.CosineLR(1), [1.0, 0.0, 0.0]),
        (optim.WarmupLR(0, optim.LinearLR(2)), [1.0, 0.5, 0.0]),
        (optim.WarmupLR(4), [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        (optim.WarmupLR(2, optim.ConstantLR(4.0), start=0.5), [2.0, 3.0, 4.0, 4.0]),
        (optim.WarmupLR(2, optim.WarmupLR(2, start=0.5)), [0.0, 0.25, 0.5, 0.75, 1.0]),
    ],
    ids=repr,
)
def test_corners(schedule, expected):
    found = [schedule(step) for step in range(len(expected))]
    np.testing.assert_allclose(found, expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    "then",
    [
        optim.ConstantLR(0.5),
        optim.LinearLR(5, 0.5),
        optim.CosineLR(4, 0.1),
        optim.OneCycleLR(6),
        optim.WarmupLR(2),
    ],
    ids=repr,
)
def test_a_warm_up_goes_before_any_other(then):
    found = rates(optim.WarmupLR(3, then, start=0.25), 12)
    first = LR * then(0)
    np.testing.assert_allclose(found[:3], [first * s for s in (0.25, 0.5, 0.75)], rtol=1e-15)
    assert found[3:] == rates(then, 9)


SCHEDULES = [
    optim.ConstantLR(0.5),
    optim.LinearLR(5, 0.25, 1.0),
    optim.CosineLR(steps=np.int64(4), end=np.float32(0.5)),  # type: ignore[arg-type]
    optim.WarmupLR(2, optim.CosineLR(9)),
    optim.OneCycleLR(8, 0.5),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_text_of_a_schedule_parses_back(schedule):
    again = eval(repr(schedule), vars(optim))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert [again(step) for step in range(12)] == [schedule(step) for step in range(12)]
    assert all(type(schedule(step)) is float for step in range(12))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("at", [0, 1, 3, 11])
def test_a_run_goes_on_with_the_rates_of_one_that_was_not_stopped(schedule, at):
    whole = rates(schedule, 15)
    adam = optim.AdamW([], lr=LR)
    scheduler = optim.LRScheduler(adam, schedule)
    for _ in range(at):
        scheduler.step()
    state = json.loads(json.dumps(scheduler.state_dict()))
    adam_state = adam.state_dict()
    other = optim.AdamW([], lr=99.0)
    other.load_state_dict(adam_state)  # with the rate of the last step, not its own
    resumed = optim.LRScheduler(other, schedule)
    resumed.load_state_dict(state)
    found = []
    for _ in range(15 - at):
        found.append(other.lr)
        resumed.step()
    assert found == whole[at:]
    assert resumed.state_dict() == {**state, "num_steps": 15}


def test_the_state_of_a_scheduler_passes_through_a_file_without_pickle(tmp_path):
    scheduler = optim.LRScheduler(optim.SGD([], lr=LR), optim.LinearLR(4))
    scheduler.step()
    np.savez(tmp_path / "s.npz", **scheduler.state_dict())
    again = optim.LRScheduler(optim.SGD([], lr=1.0), optim.LinearLR(4))
    with np.load(tmp_path / "s.npz") as state:
        again.load_state_dict(state)
    assert again.lrs == scheduler.lrs == [LR * 0.75]
    assert again.state_dict() == scheduler.state_dict()


def test_several_optimizers_keep_their_proportions():
    one, two, three = (optim.SGD([], lr=lr) for lr in (0.1, 0.2, 0.4))
    both = SimpleNamespace(optimizers=(two, three))  # as a ParallelOptimizer has them
    scheduler = optim.LRScheduler([one, both], optim.LinearLR(2))
    assert scheduler.lrs == [0.1, 0.2, 0.4]
    scheduler.step()
    assert [one.lr, two.lr, three.lr] == scheduler.lrs == [0.05, 0.1, 0.2]
    assert "step 1" in repr(scheduler)
    assert "LinearLR(steps=2" in repr(scheduler)
    assert optim.LRScheduler((), optim.ConstantLR()).lrs == []


def test_steps_of_sgd_go_by_the_rates():
    parameter = Parameter("w", (2,), Constant(1.0))
    parameter.materialize(seed=0, dtype="float64")
    sgd = optim.SGD([parameter], lr=0.5)
    scheduler = optim.LRScheduler(sgd, lambda step: 1 / (step + 1))
    for _ in range(4):
        parameter.grad = np.array([1.0, -2.0])
        sgd.step()
        scheduler.step()
    total = 0.5 * (1 + 1 / 2 + 1 / 3 + 1 / 4)
    np.testing.assert_allclose(parameter.data, [1 - total, 1 + 2 * total], rtol=1e-14)


SGD1 = optim.SGD([], lr=1)
WRONG: list[tuple[Callable[[], Any], tuple[Any, ...]]] = [
    (lambda: optim.LinearLR(0), ("steps", "LinearLR", 0)),
    (lambda: optim.LinearLR(2.5), ("steps", "2.5")),  # type: ignore[arg-type]
    (lambda: optim.CosineLR(3, -0.5), ("end", "CosineLR", -0.5)),
    (lambda: optim.CosineLR(3, math.nan), ("end", "nan")),
    (lambda: optim.ConstantLR("a"), ("share", "a")),  # type: ignore[arg-type]
    (lambda: optim.OneCycleLR(3, 1.5), ("warmup", 1.5)),
    (lambda: optim.WarmupLR(-1), ("steps", -1)),
    (lambda: optim.WarmupLR(1, optim.CosineLR), ("then", "optim.CosineLR")),  # type: ignore[arg-type]
    (lambda: optim.LRScheduler(3, optim.ConstantLR()), ("ParallelOptimizer", 3)),  # type: ignore[arg-type]
    (lambda: optim.LRScheduler("ab", optim.ConstantLR()), ("ab",)),  # type: ignore[arg-type]
    (lambda: optim.LRScheduler([optim.SGD([], lr=1), 4], optim.ConstantLR()), (4,)),  # type: ignore[list-item]
    (lambda: optim.LRScheduler([], 0.5), ("schedule", 0.5)),  # type: ignore[arg-type]
    (lambda: optim.LRScheduler(optim.SGD([], lr=1), lambda step: -1.0), ("step 0", -1.0)),
    (lambda: optim.LRScheduler([SGD1, SGD1], optim.ConstantLR()), ("twice",)),
]


@pytest.mark.parametrize(("make", "values"), WRONG)
def test_wrong_arguments_are_named(make, values):
    with raises(ModuleError, *values):
        make()


WRONG_STATES: list[tuple[Any, tuple[Any, ...]]] = [
    (3, ("num_steps", "base_lrs", "schedule")),
    ({"num_steps": 1}, ("base_lrs",)),
    ({"num_steps": -1}, ("num_steps", -1)),
    ({"num_steps": 0.5}, ("num_steps", 0.5)),
    ({"base_lrs": [1.0, 2.0]}, ("base_lrs", 1)),
    ({"base_lrs": 3}, ("base_lrs",)),
    ({"base_lrs": [-1.0]}, ("base_lrs", -1.0)),
    ({"schedule": "CosineLR(steps=3, end=0.0)"}, ("CosineLR", "LinearLR")),
]


@pytest.mark.parametrize(("state", "values"), WRONG_STATES)
def test_a_wrong_state_changes_nothing(state, values):
    sgd = optim.SGD([], lr=LR)
    scheduler = optim.LRScheduler(sgd, optim.LinearLR(4))
    scheduler.step()
    before = scheduler.state_dict()
    if isinstance(state, dict) and state != {"num_steps": 1}:
        state = {**before, **state}
    with raises(ModuleError, *values):
        scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before
    assert sgd.lr == LR * 0.75


def test_a_schedule_that_fails_later_changes_nothing():
    sgd = optim.SGD([], lr=LR)
    scheduler = optim.LRScheduler(sgd, lambda step: 1.0 if step < 2 else math.inf)
    scheduler.step()
    with raises(ModuleError, "step 2", "inf"):
        scheduler.step()
    assert sgd.lr == LR
    assert scheduler.num_steps == 1


def test_a_run_that_trains_longer_goes_on_by_its_own_schedule():
    old = optim.SGD([], lr=0.5)
    before = optim.LRScheduler(old, optim.CosineLR(10))
    for _ in range(4):
        before.step()
    new = optim.SGD([], lr=0.1)
    state = before.state_dict()
    with raises(ModuleError, "CosineLR", 10, 40, "any_schedule=True"):
        optim.LRScheduler(new, optim.CosineLR(40)).load_state_dict(state)
    longer = optim.LRScheduler(new, optim.CosineLR(40), any_schedule=True)
    longer.load_state_dict(state)
    for step in range(4, 40):
        np.testing.assert_allclose(new.lr, 0.5 * (1 + np.cos(np.pi * step / 40)) / 2)
        longer.step()
    assert longer.state_dict()["schedule"] == repr(optim.CosineLR(40))
