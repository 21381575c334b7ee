from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.errors import ModuleError
from mpimesh.nn import Constant, Parameter
from mpimesh.optim import clip_grad_norm
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def with_gradient(g):
    parameter = Parameter("p", np.shape(g), Constant(0.0))
    parameter.materialize(seed=0, dtype=g.dtype)
    parameter.grad = g
    return parameter


def gradients(sizes, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return [with_gradient(rng.normal(size=size).astype(dtype)) for size in sizes]


def end_to_end(params):
    return np.concatenate([p.grad.reshape(-1).astype("float64") for p in params])


@settings(max_examples=examples(40))
@given(sizes=st.lists(st.integers(0, 50_000), min_size=1, max_size=3), max_norm=st.floats(0.1, 300))
def test_the_norm_is_that_of_all_gradients_together(sizes, max_norm):
    params = gradients(sizes)
    before = end_to_end(params)
    norm = clip_grad_norm(params, max_norm)
    assert norm == pytest.approx(np.linalg.norm(before), rel=1e-12)
    expected = before * min(1.0, max_norm / norm) if norm else before
    np.testing.assert_allclose(end_to_end(params), expected, rtol=1e-12)
    assert np.linalg.norm(end_to_end(params)) <= max_norm * (1 + 1e-12)


def test_gradients_within_the_limit_keep_their_bits():
    params = gradients([5, 7])
    before = end_to_end(params)
    clip_grad_norm(params, float(np.linalg.norm(before)) * (1 + 1e-9))
    np.testing.assert_array_equal(end_to_end(params), before)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("float32", 1e-6)])
def test_low_precision_is_measured_in_double_and_stays(dtype, tolerance):
    params = [with_gradient(np.full(1000, 200.0, dtype))]  # the sum of squares overflows float16
    norm = clip_grad_norm(params, 1.0)
    assert norm == pytest.approx(200 * math.sqrt(1000), rel=1e-12)
    assert params[0].grad.dtype == dtype
    np.testing.assert_allclose(params[0].grad, 1 / math.sqrt(1000), rtol=tolerance)


def test_ranks_add_their_squares():
    """Two stages with different parameters clip as one model."""
    together = gradients([5, 7])
    expected = clip_grad_norm(together, 0.5)
    first, second = ([parameter] for parameter in gradients([5, 7]))
    squares = [float(np.square(end_to_end(stage)).sum()) for stage in (first, second)]
    for stage, own, others in ((first, squares[0], squares[1]), (second, squares[1], squares[0])):
        given_to_sum: list[float] = []

        def all_sum(value, others=others, seen=given_to_sum):
            seen.append(value)
            return value + others

        norm = clip_grad_norm(stage, 0.5, all_sum=all_sum)
        assert norm == pytest.approx(expected, rel=1e-12)
        assert given_to_sum == [pytest.approx(own, rel=1e-12)]
    np.testing.assert_allclose(end_to_end(first + second), end_to_end(together), rtol=1e-12)


def test_a_copy_that_another_rank_counts_is_only_scaled():
    """Two stages that share a parameter clip as one model."""
    together = gradients([5, 7])
    expected = clip_grad_norm(together, 0.5)
    first = gradients([5, 7])
    (copy, _) = gradients([5, 7])
    second = [copy]
    given_to_sum: list[float] = []

    def all_sum(value):
        given_to_sum.append(value)
        return float(np.square(end_to_end(gradients([5, 7]))).sum())

    for stage, copies in ((first, ()), (second, (copy,))):
        norm = clip_grad_norm(stage, 0.5, all_sum=all_sum, copies=copies)
        assert norm == pytest.approx(expected, rel=1e-12)
    assert given_to_sum == [pytest.approx(expected**2, rel=1e-12), 0]
    np.testing.assert_allclose(end_to_end(first), end_to_end(together), rtol=1e-12)
    np.testing.assert_array_equal(copy.grad, first[0].grad)


def test_a_rank_without_gradients_takes_part():
    calls = []

    def all_sum(value):
        calls.append(value)
        return 9.0

    assert clip_grad_norm([], 1.0, all_sum=all_sum) == 3.0
    assert calls == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_stay_as_they_are(bad):
    params = [with_gradient(np.array([3.0, bad])), with_gradient(np.array([4.0]))]
    norm = clip_grad_norm(params, 1.0)
    assert not math.isfinite(norm)
    assert math.isnan(norm) == math.isnan(bad)
    np.testing.assert_array_equal(end_to_end(params), [3.0, bad, 4.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_another_ranks_gradients_that_are_not_finite_stop_the_clipping_here(bad):
    params = gradients([4])
    before = end_to_end(params)
    assert not math.isfinite(clip_grad_norm(params, 1e-3, all_sum=lambda value: value + bad))
    np.testing.assert_array_equal(end_to_end(params), before)


def test_frozen_absent_and_repeated_gradients():
    one, frozen, absent = gradients([4, 4, 4])
    frozen.requires_grad = False
    absent.grad = None
    expected = np.linalg.norm(one.grad)
    assert clip_grad_norm([one, frozen, absent, one], math.inf) == pytest.approx(expected)
    clip_grad_norm(iter([one, one, frozen]), 0.5)
    assert np.linalg.norm(one.grad) == pytest.approx(0.5)
    np.testing.assert_array_equal(frozen.grad, gradients([4, 4])[1].grad)


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_limits_that_are_not_above_zero_are_refused(max_norm):
    with raises(ModuleError, "max_norm", 0):
        clip_grad_norm([], max_norm)
