from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.testing import gradcheck
from tests.helpers.depth import examples
from tests.helpers.raises import raises

LOSSES = {
    "cross-entropy": nn.cross_entropy,
    "cross-entropy that ignores 1": nn.CrossEntropy(ignore_index=1),
    "cross-entropy that ignores -100": nn.CrossEntropy(ignore_index=-100),
    "mse": nn.mse_loss,
}
EVERY = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def data(loss, rows, inner=(), *, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(rows, *inner, 4)).astype(dtype)
    if loss is nn.mse_loss:
        return y, rng.normal(size=y.shape).astype(dtype)
    target = rng.integers(0, 4, y.shape[:-1])
    if loss is LOSSES["cross-entropy that ignores -100"]:
        target[rng.random(target.shape) < 0.4] = -100
    return y, target


class AsLayer(nn.Module):
    """The value of a loss, a number, for one target."""

    def __init__(self, loss, target):
        self.loss, self.target = loss, target

    def forward(self, y, ctx=None):
        value, grad = self.loss.value_and_grad(
            y, self.target, denominator=self.loss.count(self.target)
        )
        if ctx is not None:
            ctx.save(self, grad)
        return np.array(value)

    def backward_input(self, dy, ctx):
        (grad,) = ctx.take(self)
        return grad * dy


def reference(loss, y, target):
    """The mean as its definition says, value by value."""
    if loss is nn.mse_loss:
        return math.fsum((a - b) ** 2 for a, b in zip(y.flat, target.flat, strict=True)) / y.size
    terms = []
    for place in np.ndindex(target.shape):
        if target[place] != loss.ignore_index:
            total = math.fsum(math.exp(v) for v in y[place].tolist())
            terms.append(math.log(total) - float(y[place][target[place]]))
    return math.fsum(terms) / len(terms)


@EVERY
@settings(max_examples=examples(30))
@given(
    rows=st.integers(1, 6), inner=st.lists(st.integers(1, 3), max_size=2), seed=st.integers(0, 9)
)
def test_the_value_is_the_mean_and_the_gradient_its_derivative(loss, rows, inner, seed):
    y, target = data(loss, rows, inner, seed=seed)
    count = loss.count(target)
    if not count:
        return
    expected = reference(loss, y, target)
    assert loss(y, target) == pytest.approx(expected, rel=1e-12)
    value, grad = loss.value_and_grad(y, target, denominator=count)
    assert value == pytest.approx(expected, rel=1e-12)
    layer, ctx = AsLayer(loss, target), nn.Context()
    layer(y, ctx)
    np.testing.assert_array_equal(layer.backward(np.ones(()), ctx), grad)
    gradcheck(layer, y, rtol=1e-7, atol=1e-9)


@EVERY
@settings(max_examples=examples(30))
@given(cuts=st.lists(st.integers(0, 9), max_size=4), inner=st.sampled_from([(), (2,)]))
def test_parts_with_one_denominator_add_up_to_the_whole(loss, cuts, inner):
    y, target = data(loss, 9, inner)
    bounds = [0, *sorted(cuts), 9]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    count = sum(loss.count(target[part]) for part in parts)
    assert count == pytest.approx(loss.count(target), rel=1e-14)
    found = [loss.value_and_grad(y[part], target[part], denominator=count) for part in parts]
    assert math.fsum(value for value, _ in found) == pytest.approx(loss(y, target), rel=1e-12)
    _, grad = loss.value_and_grad(y, target, denominator=count)
    np.testing.assert_allclose(np.concatenate([g for _, g in found]), grad, rtol=1e-12)


@EVERY
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_gradient_has_the_dtype_of_the_prediction(loss, dtype):
    y, target = data(loss, 5, dtype=dtype)
    before = y.copy()
    value, grad = loss.value_and_grad(y, target, denominator=5)
    exact, exact_grad = loss.value_and_grad(y.astype("float64"), target, denominator=5)
    assert type(value) is float
    assert grad.dtype == dtype
    tolerance = {"float16": 1e-3, "float32": 1e-6}[dtype]
    assert value == pytest.approx(exact, rel=tolerance)
    np.testing.assert_allclose(grad, exact_grad, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(y, before)


def test_the_denominator_is_the_number_of_rows_unless_some_are_ignored():
    target = np.array([[0, 1], [1, 2], [3, 3]])
    assert nn.cross_entropy.count(target) == 3.0
    assert nn.CrossEntropy(ignore_index=1).count(target) == 2.0  # 4 of 6 places
    assert nn.mse_loss.count(np.zeros((3, 7))) == 3.0
    assert nn.CrossEntropy(ignore_index=1).count(target[:0]) == 0.0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_large_logits_do_not_overflow(dtype):
    y = np.array([[60000.0, -60000.0, 0.0]], dtype)
    value, grad = nn.cross_entropy.value_and_grad(y, np.array([0]), denominator=1)
    assert value == 0.0
    np.testing.assert_array_equal(grad, np.zeros((1, 3)))
    value, grad = nn.cross_entropy.value_and_grad(y, np.array([2]), denominator=1)
    assert value == pytest.approx(float(y[0, 0]), rel=1e-6)
    np.testing.assert_array_equal(grad, [[1.0, 0.0, -1.0]])


@EVERY
def test_no_rows_are_a_part_but_no_whole(loss):
    y, target = data(loss, 0)
    value, grad = loss.value_and_grad(y, target, denominator=8)
    assert value == 0.0
    assert grad.shape == y.shape
    with raises(ShapeError, "mean", y.shape, "value_and_grad", "denominator"):
        loss(y, target)


def test_a_batch_of_ignored_targets_has_no_mean():
    loss = nn.CrossEntropy(ignore_index=0)
    with raises(ShapeError, loss, "mean", (2, 3), "value_and_grad", "denominator"):
        loss(np.zeros((2, 3)), np.zeros(2, int))
    value, grad = loss.value_and_grad(np.ones((2, 3)), np.zeros(2, int), denominator=2)
    assert (value, grad.any()) == (0.0, False)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "uint64"])
def test_targets_of_any_integer_type(dtype):
    y, target = data(nn.cross_entropy, 5)
    assert nn.cross_entropy(y, target.astype(dtype)) == nn.cross_entropy(y, target)
    ignoring = nn.CrossEntropy(ignore_index=-100)
    assert ignoring(y, target.astype(dtype)) == nn.cross_entropy(y, target)


def test_mse_takes_targets_of_other_number_types():
    y = np.array([1.5, 2.0], "float32")
    value, grad = nn.mse_loss.value_and_grad(y, np.array([1, 4]), denominator=2)
    assert value == pytest.approx((0.25 + 4) / 2)
    assert grad.dtype == np.float32
    np.testing.assert_allclose(grad, [0.5, -2.0])


FLOATS, INTS = np.zeros((2, 3)), np.zeros(2, int)


@pytest.mark.parametrize(
    ("loss", "y", "target", "error", "values"),
    [
        (nn.cross_entropy, FLOATS, np.zeros(3, int), ShapeError, ((2, 3), (3,))),
        (
            nn.cross_entropy,
            FLOATS[0],
            np.array(0),
            ShapeError,
            ("target", "(rows, ...)", "()"),
        ),
        (nn.cross_entropy, np.zeros((2, 0)), INTS, ShapeError, ((2, 0), (2,))),
        (
            nn.cross_entropy,
            FLOATS,
            np.zeros(2),
            DTypeError,
            ("target", "float64"),
        ),
        (nn.cross_entropy, FLOATS.astype(int), INTS, DTypeError, ("y", "float16", "int64")),
        (nn.cross_entropy, FLOATS, np.array([1, 3]), ModuleError, ("[0, 3)", 3, (1,))),
        (nn.cross_entropy, FLOATS, np.array([-1, 0]), ModuleError, ("[0, 3)", -1, (0,))),
        (
            nn.CrossEntropy(ignore_index=7),
            FLOATS,
            np.array([7, 8]),
            ModuleError,
            (8, (1,)),
        ),
        (nn.mse_loss, FLOATS, np.zeros((2, 1)), ShapeError, ("target", (2, 3), (2, 1))),
        (
            nn.mse_loss,
            np.array(1.0),
            np.array(1.0),
            ShapeError,
            ("y", "(rows, ...)", "()"),
        ),
        (nn.mse_loss, FLOATS, FLOATS.astype(complex), DTypeError, ("target", "complex128")),
    ],
)
def test_what_does_not_fit_is_refused(loss, y, target, error, values):
    with raises(error, *values):
        loss(y, target)
    with raises(error, *values):
        loss.value_and_grad(y, target, denominator=1)


@pytest.mark.parametrize("denominator", [0, -1, math.nan, math.inf])
def test_denominators_out_of_range_are_refused(denominator):
    with raises(ModuleError, "denominator", denominator):
        nn.mse_loss.value_and_grad(FLOATS, FLOATS, denominator=denominator)


def test_numpy_scalars_do_not_widen():
    y, target = data(nn.mse_loss, 4, dtype="float32")
    _, grad = nn.mse_loss.value_and_grad(y, target, denominator=np.float64(4))
    assert grad.dtype == np.float32


def test_texts():
    assert [repr(loss) for loss in LOSSES.values()] == [
        "CrossEntropy()",
        "CrossEntropy(ignore_index=1)",
        "CrossEntropy(ignore_index=-100)",
        "MeanSquaredError()",
    ]


def test_targets_of_one_hot_rows_are_refused_with_the_cure():
    with pytest.raises(ShapeError, match=r"class numbers, as of target\.argmax\(axis=-1\)"):
        nn.cross_entropy(np.zeros((4, 3)), np.eye(4, 3))
