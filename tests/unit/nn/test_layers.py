"""Promises of every layer, whatever it computes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleStateError, ShapeError
from mpimesh.testing import gradcheck
from tests.helpers.depth import examples
from tests.helpers.nn_cases import CASES, gradients
from tests.helpers.raises import raises

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
WITH_RECORDS = [name for name in CASES if name != "empty sequential"]


def weights_of(y: np.ndarray, seed=11) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=y.shape).astype(y.dtype)


@EVERY
@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_are_those_of_finite_differences(case, rows):
    layer, x = case.layer(), case.x(rows)
    parts = [x] if rows == 1 else [x[:1], x[1:]]
    gradcheck(layer, *parts, rtol=1e-7, atol=1e-8, training_step=case.context.get("step", 0))
    if case.integers_below:
        ctx = nn.Context()
        assert layer.backward(weights_of(layer(x, ctx)), ctx) is None


@EVERY
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_halves_of_backward_give_the_bits_of_the_whole(case, dtype):
    whole, halves = case.layer(dtype), case.layer(dtype)
    x = case.x(5, dtype)
    first, second = nn.Context(**case.context), nn.Context(**case.context)
    dy = weights_of(whole(x, first))
    halves(x, second)

    dx_whole = whole.backward(dy, first)
    dx_half = halves.backward_input(dy, second)
    assert all(parameter.grad is None for parameter in halves.parameters())
    halves.backward_weight(second)

    np.testing.assert_equal(dx_half, dx_whole)
    np.testing.assert_equal(gradients(halves), gradients(whole))
    assert first.is_empty
    assert second.is_empty


@EVERY
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtype_and_shape_stay(case, dtype):
    layer, x = case.layer(dtype), case.x(3, dtype)
    ctx = nn.Context(**case.context)
    y = layer(x, ctx)
    dx = layer.backward(weights_of(y), ctx)
    assert y.dtype == dtype or layer.num_layers == 0
    assert layer(x).dtype == y.dtype
    assert all(parameter.grad.dtype == dtype for parameter in layer.parameters())
    assert all(parameter.grad.shape == parameter.shape for parameter in layer.parameters())
    if dx is not None:
        assert (dx.shape, dx.dtype) == (x.shape, x.dtype)


@EVERY
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("bfloat16", 6e-2)])
def test_half_precision_is_near_double(case, dtype, tolerance):
    half, double = case.layer(dtype), case.layer("float64")
    for low, high in zip(half.parameters(), double.parameters(), strict=True):
        high.data[...] = low.data
    x = case.x(4, dtype)
    exact = x if case.integers_below else x.astype("float64")
    np.testing.assert_allclose(
        half(x).astype("float64"), double(exact).astype("float64"), rtol=tolerance, atol=tolerance
    )


@EVERY
@settings(max_examples=examples(20))
@given(cuts=st.lists(st.integers(0, 7), max_size=4), order=st.randoms(use_true_random=False))
def test_microbatches_in_flight_finish_in_any_order(case, cuts, order):
    """Any cut of a batch, all forwards first, backwards in any order: those of the whole."""
    rows = 7
    layer, x = case.layer(), case.x(rows)
    whole = nn.Context(step=1)
    dy = weights_of(layer(x, whole))
    dx_whole = layer.backward(dy, whole)
    expected = gradients(layer)
    layer.zero_grad()

    bounds = [0, *sorted(cuts), rows]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    contexts = [nn.Context(step=1, first_row=part.start) for part in parts]
    for part, ctx in zip(parts, contexts, strict=True):
        layer(x[part], ctx)
    todo = list(zip(parts, contexts, strict=True))
    order.shuffle(todo)
    delayed = []
    for part, ctx in todo:
        dx = layer.backward_input(dy[part], ctx)
        if dx is not None:
            np.testing.assert_allclose(dx, dx_whole[part], rtol=1e-12, atol=1e-13)
        delayed.append(ctx)
    order.shuffle(delayed)
    for ctx in delayed:
        layer.backward_weight(ctx)
        assert ctx.is_empty
    for name, gradient in gradients(layer).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-11, atol=1e-12, err_msg=name)


@EVERY
def test_no_rows_give_gradients_of_zero(case):
    layer, x = case.layer(), case.x(0)
    ctx = nn.Context()
    y = layer(x, ctx)
    dx = layer.backward(np.zeros_like(y), ctx)
    assert y.shape[0] == 0
    assert dx is None or dx.shape == x.shape
    for parameter in layer.parameters():
        np.testing.assert_array_equal(parameter.grad, np.zeros(parameter.shape))


@EVERY
def test_each_parameter_reports_its_gradient_once_a_microbatch(case):
    layer, x = case.layer(), case.x(2)
    seen: list[str] = []
    for name, parameter in layer.named_parameters():
        parameter.on_ready = lambda _, name=name: seen.append(name)
    for microbatch in range(2):
        ctx = nn.Context()
        layer.backward(np.ones_like(layer(x, ctx)), ctx)
        names = [name for name, _ in layer.named_parameters()]
        assert sorted(seen) == sorted(names * (microbatch + 1))


@EVERY
def test_frozen_parameters_get_no_gradient_but_pass_it_on(case):
    layer, x = case.layer(), case.x(3)
    free = nn.Context(**case.context)
    dy = weights_of(layer(x, free))
    expected = layer.backward(dy, free)
    layer.zero_grad()
    layer.freeze()
    ctx = nn.Context(**case.context)
    layer(x, ctx)
    np.testing.assert_equal(layer.backward(dy, ctx), expected)
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert ctx.is_empty


@pytest.mark.parametrize("name", ["linear", "layernorm", "embedding"])
def test_frozen_parameters_keep_nothing_alive(name):
    case = CASES[name]
    layer, ctx = case.layer().freeze(), nn.Context()
    layer.backward_input(layer(case.x(2), ctx), ctx)
    assert set(ctx.take_deferred(layer)) == {None}


@EVERY
def test_inference_equals_evaluation_and_inputs_stay(case):
    layer, x = case.layer().eval(), case.x(3)
    before = x.copy()
    ctx = nn.Context(**case.context)
    y = layer(x, ctx)
    np.testing.assert_array_equal(layer(x), y)
    dy = weights_of(y)
    dy_before = dy.copy()
    layer.backward(dy, ctx)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(dy, dy_before)


@pytest.mark.parametrize("name", WITH_RECORDS)
def test_backward_without_forward_is_refused(name):
    case = CASES[name]
    layer, x = case.layer(), case.x(2)
    y = layer(x)
    with raises(ModuleStateError, "Context(step=4"):
        layer.backward(y, nn.Context(step=4))


@pytest.mark.parametrize("name", WITH_RECORDS)
def test_backward_twice_is_refused(name):
    case = CASES[name]
    layer, x = case.layer(), case.x(2)
    ctx = nn.Context()
    dy = np.ones_like(layer(x, ctx))
    layer.backward(dy, ctx)
    with raises(ModuleStateError, ctx, "already", "forward(x, ctx)"):
        layer.backward_input(dy, ctx)


@pytest.mark.parametrize("name", [name for name in WITH_RECORDS if CASES[name].make().parameters()])
def test_weights_half_needs_the_inputs_half_each_time(name):
    case = CASES[name]
    layer, x = case.layer(), case.x(2)
    ctx = nn.Context()
    dy = np.ones_like(layer(x, ctx))
    with raises(ModuleStateError, "backward_input"):
        layer.backward_weight(ctx)
    layer.backward_input(dy, ctx)
    layer.backward_weight(ctx)
    with raises(ModuleStateError, "backward_weight"):
        layer.backward_weight(ctx)


@pytest.mark.parametrize("name", WITH_RECORDS)
def test_a_wrong_gradient_is_refused_and_nothing_is_lost(name):
    case = CASES[name]
    layer, x = case.layer(), case.x(2)
    ctx = nn.Context()
    dy = np.ones_like(layer(x, ctx))
    with raises(ShapeError, "dy"):
        layer.backward(dy[:1], ctx)
    with raises(DTypeError, "dy", "float64", "float32"):
        layer.backward(dy.astype("float32"), ctx)
    layer.backward(dy, ctx)
    assert ctx.is_empty


@pytest.mark.parametrize("name", WITH_RECORDS)
def test_backward_without_context_is_refused(name):
    case = CASES[name]
    layer = case.layer()
    with raises(ModuleStateError, "Context", None):
        layer.backward(layer(case.x(2)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [name for name in WITH_RECORDS if CASES[name].make().parameters() or name == "dropout"]
)
def test_a_layer_without_memory_says_what_to_call(name):
    case = CASES[name]
    with raises(ModuleStateError, "materialize(seed="):
        case.make().forward(case.x(2), nn.Context())


@pytest.mark.parametrize("name", [name for name in WITH_RECORDS if not CASES[name].integers_below])
@pytest.mark.parametrize("x", [[1.0, 2.0], np.arange(3), np.ones(3, complex)], ids=repr)
def test_inputs_that_are_no_float_arrays_are_refused(name, x):
    with raises(DTypeError, "x"):
        CASES[name].layer()(x)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 2), lambda: nn.LayerNorm(4)])
def test_inputs_of_another_shape_or_dtype_are_refused(make):
    layer = make()
    layer.materialize(seed=0, dtype="float32")
    with raises(ShapeError, 4, "(2, 5)"):
        layer(np.ones((2, 5), "float32"))
    with raises(ShapeError, "()"):
        layer(np.float32(1.0).reshape(()))
    with raises(DTypeError, "x", "dtype=", "'float64'"):
        layer(np.ones((2, 4)))


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4)])
def test_a_first_layer_can_spare_the_gradient_of_its_input(make):
    spared, full = make(), make()
    x = np.random.default_rng(0).normal(size=(3, 4))
    found = []
    for layer in (spared, full):
        layer.materialize(seed=1, dtype="float64")
        layer.input_grad = layer is full
        ctx = nn.Context()
        layer(x, ctx)
        found.append(layer.backward(x, ctx))
        assert ctx.is_empty
    assert found[0] is None
    assert found[1].shape == x.shape
    np.testing.assert_equal(gradients(spared), gradients(full))
