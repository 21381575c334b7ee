"""Layers, losses and optimizers on arrays of a device: by its namespace, with NumPy's results."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mpimesh import nn, optim
from mpimesh.errors import ModuleError
from tests.helpers.fake_cupy import FakeArray, FakeCupy
from tests.helpers.nn_cases import CASES
from tests.helpers.raises import raises


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    # Its library of special functions is missing, unless a test brings it.
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", None)
    return fake


def pair(case, cupy, dtype):
    """Return the same layer on the host and on the device."""
    layers = []
    for xp in (np, cupy):
        layer = case.make()
        layer.materialize(seed=3, dtype=dtype, xp=xp)
        layers.append(layer)
    return layers


def assert_same(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    if found is not None:
        assert isinstance(found, FakeArray)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.on_host, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_layers_stay_on_the_device(case, cupy, dtype):
    on_host, on_device = pair(case, cupy, dtype)
    x = case.x(4, dtype)
    first, second = nn.Context(**case.context), nn.Context(**case.context)
    y = on_host(x, first)
    z = on_device(cupy.asarray(x), second)
    assert_same(z, y)
    assert_same(on_device.backward(z, second), on_host.backward(y, first))
    for one, other in zip(on_device.parameters(), on_host.parameters(), strict=True):
        assert_same(one.data, other.data)
        np.testing.assert_allclose(one.grad.on_host, other.grad, rtol=1e-12)


def test_erf_is_the_devices_own_where_it_has_one(cupy, monkeypatch):
    calls = []

    def erf(x):
        calls.append(x)
        return cupy.tanh(x)

    special: Any = ModuleType("cupyx.scipy.special")
    special.erf = erf
    monkeypatch.setitem(sys.modules, "cupyx", ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.scipy", ModuleType("cupyx.scipy"))
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", special)
    nn.GELU()(cupy.asarray(np.ones(3)))
    assert len(calls) == 1


def test_formulas_are_fused_and_kept(cupy, monkeypatch):
    made: list[str] = []

    def fuse(*, kernel_name):
        made.append(kernel_name)
        return lambda formula: formula

    monkeypatch.setattr(cupy, "fuse", fuse, raising=False)
    layers = nn.Sequential(
        nn.Attention(4, 2), nn.GELU(), nn.GELU(approximate="tanh"), nn.LayerNorm(4)
    )
    layers.materialize(seed=0, xp=cupy)
    x = cupy.asarray(np.ones((1, 2, 4), "float32"))
    optimizer = optim.AdamW(layers.parameters())
    for _ in range(2):
        layers(x)
        ctx = nn.Context()
        layers.backward(layers(x, ctx), ctx)
        optimizer.step()
    assert sorted(made) == [
        *("adam", "exp_less", "gelu", "gelu_slope", "gelu_tanh", "gelu_tanh_slope"),
        "scale_and_shift",
    ]


@pytest.mark.parametrize(
    "loss", [nn.cross_entropy, nn.CrossEntropy(ignore_index=1), nn.mse_loss], ids=repr
)
def test_losses_stay_on_the_device(loss, cupy):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(5, 3)).astype("float32")
    target = rng.normal(size=(5, 3)) if loss is nn.mse_loss else rng.integers(0, 3, 5)
    value, grad = loss.value_and_grad(cupy.asarray(y), cupy.asarray(target), denominator=5)
    expected, expected_grad = loss.value_and_grad(y, target, denominator=5)
    assert type(value) is float
    assert value == expected
    assert_same(grad, expected_grad)
    assert loss(cupy.asarray(y), cupy.asarray(target)) == loss(y, target)


def test_values_out_of_range_are_named(cupy):
    layer = nn.Embedding(3, 2)
    layer.materialize(seed=0, xp=cupy)
    with raises(ModuleError, 5, "(1, 0)"):
        layer(cupy.asarray([[0, 1], [5, 9]]))
    with raises(ModuleError, 4, "(1,)"):
        nn.cross_entropy(cupy.asarray(np.zeros((2, 3))), cupy.asarray([0, 4]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda params: optim.Adam(params, weight_decay=0.1),
        lambda params: optim.AdamW(params),
    ],
    ids=["SGD", "Adam", "AdamW"],
)
def test_optimizers_stay_on_the_device(make, cupy, dtype):
    case = CASES["sequential"]
    on_host, on_device = pair(case, cupy, dtype)
    first, second = make(on_host.parameters()), make(on_device.parameters())
    for step in range(3):
        for one, other in zip(on_host.parameters(), on_device.parameters(), strict=True):
            one.grad = np.random.default_rng(step).normal(size=one.shape).astype(dtype)
            other.grad = cupy.asarray(one.grad)
        norms = [optim.clip_grad_norm(layer.parameters(), 1.0) for layer in (on_host, on_device)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        first.step()
        second.step()
    for one, other in zip(on_host.parameters(), on_device.parameters(), strict=True):
        assert_same(other.data, one.data)
    # A state goes from the host to a device and back.
    second.load_state_dict(first.state_dict())
    first.load_state_dict(second.state_dict())
    assert isinstance(on_host.parameters()[0].data, np.ndarray)


def test_states_go_from_host_to_device_and_back(cupy):
    on_host, on_device = pair(CASES["layernorm"], cupy, "float32")
    on_host.weight.data[...] = np.arange(5)
    on_device.load_state_dict(on_host.state_dict())
    assert_same(on_device.weight.data, on_host.weight.data)
    on_host.weight.data[...] = 0
    on_host.load_state_dict(on_device.state_dict())
    np.testing.assert_array_equal(on_host.weight.data, np.arange(5))


def test_the_fake_refuses_what_cupy_refuses(cupy):
    x = cupy.asarray(np.ones(3))
    for wrong in (
        lambda: np.maximum(x, 0),
        lambda: np.asarray(x),
        lambda: x + np.ones(3),
        lambda: np.ones(3) * x,
        lambda: cupy.exp(np.ones(3)),
    ):
        with pytest.raises(TypeError):
            wrong()
