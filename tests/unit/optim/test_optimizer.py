"""Promises of every optimizer; what each computes is tested beside it."""

from __future__ import annotations

import copy
import math
import tracemalloc

import numpy as np
import pytest

from mpimesh import optim
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.nn import Parameter, Uniform
from tests.helpers.raises import raises

MAKE = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "sgd with all": lambda params: optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda params: optim.Adam(params, lr=0.01, weight_decay=0.1),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
}
EVERY = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


def parameter(shape=(3, 4), dtype="float64", *, seed=0):
    made = Parameter("weight", shape, Uniform(1.0))
    made.materialize(seed=seed, dtype=dtype)
    return made


def gradient(shape, step, dtype="float64"):
    return np.random.default_rng(step).normal(size=shape).astype(dtype)


def train(optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for one in optimizer.params:
            one.accumulate(gradient(one.shape, step, one.dtype))
        optimizer.step()


@EVERY
def test_blocks_do_not_show(make):
    """A parameter longer than a block gets what its pieces get as parameters of their own."""
    whole = parameter((3, 2**16))
    pieces = [parameter((2**12,)) for _ in range(48)]
    for piece, values in zip(pieces, whole.data.reshape(48, -1), strict=True):
        piece.data[...] = values
    together, apart = make([whole]), make(pieces)
    for step in range(3):
        g = gradient(whole.shape, step)
        whole.grad = g
        for piece, part in zip(pieces, g.reshape(48, -1), strict=True):
            piece.grad = part
        together.step()
        apart.step()
    np.testing.assert_array_equal(whole.data.reshape(48, -1), [piece.data for piece in pieces])


@EVERY
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_and_state_keep_their_place_and_dtype(make, dtype):
    one = parameter(dtype=dtype)
    memory = one.data
    optimizer = make([one])
    train(optimizer, 1)
    state = optimizer.live_state()["params"][0]
    arrays = {name: array for name, array in state.items() if name != "steps"}
    train(optimizer, 2, first=1)
    assert one.data is memory
    assert one.data.dtype == dtype
    for name, array in arrays.items():
        assert optimizer.live_state()["params"][0][name] is array
        assert array.dtype == ("float32" if dtype == "float16" else dtype)


@EVERY
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 3e-3), ("float32", 1e-5)])
def test_lower_precision_follows_double(make, dtype, tolerance):
    low, high = parameter(dtype=dtype), parameter()
    low_optimizer, high_optimizer = make([low]), make([high])
    train(low_optimizer, 5)
    train(high_optimizer, 5)
    np.testing.assert_allclose(low.data, high.data, rtol=tolerance, atol=tolerance)


@EVERY
def test_gradients_are_not_changed(make):
    one = parameter()
    optimizer = make([one])
    one.grad = gradient(one.shape, 0)
    for _ in range(2):
        optimizer.step()
    np.testing.assert_array_equal(one.grad, gradient(one.shape, 0))


@EVERY
def test_parameters_without_gradient_and_frozen_ones_are_skipped(make):
    trained, unused, frozen = (parameter(seed=seed) for seed in range(3))
    before = [one.data.copy() for one in (trained, unused, frozen)]
    optimizer = make([trained, unused, frozen])
    frozen.requires_grad = False
    frozen.grad = np.ones(frozen.shape)
    trained.grad = np.ones(trained.shape)
    optimizer.step()
    assert (trained.data != before[0]).all()
    np.testing.assert_array_equal(unused.data, before[1])
    np.testing.assert_array_equal(frozen.data, before[2])
    assert [state["steps"] for state in optimizer.state_dict()["params"]] == [1, 0, 0]


@EVERY
def test_attached_gradients_of_zero_count(make):
    one, other = parameter(), parameter()
    one.attach_grad(np.zeros(one.shape))
    other.grad = np.zeros(other.shape)
    for either in (one, other):
        make([either]).step()
    np.testing.assert_array_equal(one.data, other.data)


@EVERY
def test_training_goes_on_from_a_state(make):
    straight, first, second = (parameter() for _ in range(3))
    optimizer = make([straight])
    train(optimizer, 6)
    stopped = make([first])
    train(stopped, 3)
    second.data[...] = first.data
    resumed = make([second])
    resumed.load_state_dict(stopped.state_dict())
    train(stopped, 1)  # the state was copied: the old optimizer may go on
    train(resumed, 3, first=3)
    np.testing.assert_array_equal(second.data, straight.data)


def test_a_state_brings_its_numbers():
    source = optim.SGD([parameter()], lr=0.5, momentum=0.9, nesterov=True)
    train(source, 2)
    target = optim.SGD([parameter()], lr=0.1)
    target.load_state_dict(source.state_dict())
    assert (target.lr, target.momentum, target.nesterov) == (0.5, 0.9, True)
    train(target, 1)
    assert target.state_dict()["params"][0]["steps"] == 3


@pytest.mark.parametrize(
    ("change", "error", "values"),
    [
        (lambda s: s.update(optimizer="SGD"), ModuleError, ("Adam of 1", "SGD of 1")),
        (lambda s: s.update(params=[]), ModuleError, ("Adam of 1", "Adam of 0")),
        (lambda s: s.pop("betas"), ModuleError, ("Adam", ["betas"])),
        (lambda s: s["params"][0].pop("mean"), ModuleError, ("0 ('weight')", ["mean"])),
        (lambda s: s["params"][0].pop("steps"), ModuleError, ("0 ('weight')", "'steps'")),
        *(
            (
                lambda s, steps=steps: s["params"][0].update(steps=steps),
                ModuleError,
                ("'steps'", "0 ('weight')", "got"),
            )
            for steps in (
                -1,
                -5,
                2.7,
                3.0,
                "3",
                None,
                float("nan"),
                True,
                np.array([1, 2]),
                10**400,
            )
        ),
        *(
            (
                lambda s, mean=mean: s["params"][0].update(mean=mean),
                ModuleError,
                ("'mean'", "0 ('weight')", type(mean).__name__),
            )
            for mean in ("text", [[0.0] * 4] * 3, None, 1.5)
        ),
        *(
            (
                lambda s, dtype=dtype: s["params"][0].update(mean=np.ones((3, 4), dtype)),
                DTypeError,
                ("'mean'", "0 ('weight')", np.dtype(dtype)),
            )
            for dtype in (complex, object, int)
        ),
        (lambda s: s.update(params=None), ModuleError, ("'params'", "Adam", "NoneType")),
        (lambda s: s.update(params="p"), ModuleError, ("'params'", "Adam", "str")),
        (lambda s: s.update(params=[None]), ModuleError, ("0 ('weight')", "'steps'", "NoneType")),
        (lambda s: s.update(params={"0.weight": {"steps": 0}}), ModuleError, ("model", "zero=0")),
        (lambda s: s.update(lr="x"), ModuleError, ("lr", 0, "'x'")),
        (lambda s: s.update(betas=(0.9, 1.5)), ModuleError, ("betas[1]", 1.5)),
        (lambda s: s.update(betas=None), ModuleError, ("betas", None)),
        (lambda s: s.update(eps=0), ModuleError, ("eps", 0)),
        (lambda s: s["params"][0].update(mean=np.ones(3)), ShapeError, ("'mean'", (3, 4), (3,))),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, error, values):
    optimizer = optim.Adam([parameter()], lr=0.1)
    train(optimizer, 1)
    state = optimizer.state_dict()
    state["lr"] = 0.7
    change(state)
    kept = optimizer.live_state()["params"][0]["square"]
    with raises(error, *values):
        optimizer.load_state_dict(state)
    assert optimizer.lr == 0.1
    assert optimizer.live_state()["params"][0]["square"] is kept


@EVERY
def test_a_step_allocates_nothing_of_a_parameters_size(make):
    one = parameter((1000, 1000))
    optimizer = make([one])
    one.grad = gradient(one.shape, 0)
    optimizer.step()
    tracemalloc.start()
    try:
        optimizer.step()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * 1024


@EVERY
def test_there_may_be_no_parameters(make):
    optimizer = make([])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["params"] == []


@EVERY
@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_any_shape(make, shape):
    one = parameter(shape)
    optimizer = make([one])
    before = one.data.copy()
    train(optimizer, 2)
    assert one.data.shape == shape
    assert one.data.size == 0 or (one.data != before).all()


def test_zero_grad_reaches_all():
    one, other = parameter(), parameter()
    optimizer = optim.SGD([one, other], lr=0.1)
    one.grad = other.grad = np.ones(one.shape)
    optimizer.zero_grad()
    assert (one.grad, other.grad) == (None, None)


def test_the_rate_may_change_between_steps_and_never_widens():
    one = parameter(dtype="float32")
    optimizer = optim.SGD([one], lr=0.0)
    before = one.data.copy()
    train(optimizer, 1)
    np.testing.assert_array_equal(one.data, before)
    optimizer.lr = np.float64(0.5)
    assert type(optimizer.lr) is float
    train(optimizer, 1)
    np.testing.assert_array_equal(
        one.data, before - np.float32(0.5) * gradient((3, 4), 0, "float32")
    )


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, "fast", None])
def test_rates_out_of_range_are_refused(lr):
    with raises(ModuleError, "lr"):
        optim.SGD([], lr=lr)
    optimizer = optim.Adam([])
    with raises(ModuleError, "lr"):
        optimizer.lr = lr


def test_parameters_that_are_none_or_stand_twice_are_refused():
    one = parameter()
    with raises(ModuleError, "SGD", "twice"):
        optim.SGD([one, one], lr=0.1)
    with raises(ModuleError, "params", "array"):
        optim.SGD([one.data], lr=0.1)


def test_parameters_without_usable_memory_are_refused():
    empty = Parameter("weight", (2,), Uniform(1.0))
    empty.grad = np.ones(2)
    with raises(ModuleStateError, "'weight'", (2,), "materialize(seed=..."):
        optim.SGD([empty], lr=0.1).step()
    strided = parameter()
    strided.data = strided.data.T
    strided.grad = np.ones((4, 3))
    with raises(ShapeError, strided, "C-contiguous"):
        optim.SGD([strided], lr=0.1).step()


def test_text():
    text = repr(optim.SGD([parameter()], lr=0.1))
    assert text == "SGD(1 parameters, lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)"


@EVERY
def test_a_copy_goes_on_by_itself(make):
    optimizer = make([parameter()])
    train(optimizer, 2)
    copied = copy.deepcopy(optimizer)
    before = optimizer.params[0].value().copy()
    train(copied, 2, first=2)
    np.testing.assert_array_equal(optimizer.params[0].value(), before)
    train(optimizer, 2, first=2)
    np.testing.assert_array_equal(optimizer.params[0].value(), copied.params[0].value())
    assert (copied.params[0].value() != before).all()
