from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mpimesh import optim
from mpimesh.errors import ModuleError
from mpimesh.nn import Constant, Parameter
from tests.helpers.raises import raises


def scalar_adam(p, grads, lr, betas=(0.9, 0.999), eps=1e-8, decay=0.0, decoupled=False, befores=()):
    """Algorithm 1 of Kingma and Ba, and algorithm 2 of Loshchilov and Hutter, on one number.

    With `befores` each step begins where that says, not where the step before it has ended.
    """
    beta1, beta2 = betas
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        if befores:
            p = befores[t - 1]
        if decoupled:
            p = p - lr * decay * p
        else:
            g = g + decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        p = p - lr * m_hat / (math.sqrt(v_hat) + eps)
    return p


@pytest.mark.parametrize("decoupled", [False, True])
@given(
    start=st.floats(-3, 3),
    grads=st.lists(st.floats(-3, 3), min_size=1, max_size=6),
    lr=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.9999)),
    eps=st.floats(1e-10, 1e-3),
    decay=st.floats(0, 0.5),
)
@example(start=1.0, grads=[0.0, 0.0], lr=1.0, betas=(0.85546875, 0.0), eps=1e-10, decay=0.5)
def test_adam_follows_its_formula(decoupled, start, grads, lr, betas, eps, decay):
    parameter = Parameter("p", (), Constant(start))
    parameter.materialize(seed=0, dtype="float64")
    kind = optim.AdamW if decoupled else optim.Adam
    optimizer = kind([parameter], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    befores = [start]
    for t, g in enumerate(grads, start=1):
        parameter.grad = np.array(g)
        optimizer.step()
        # From where it was: a step to almost 0 leaves few digits, which the next may magnify.
        numbers = (lr, betas, eps, decay, decoupled)
        expected = scalar_adam(start, grads[:t], *numbers, befores=befores)
        assert parameter.data.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        befores.append(parameter.data.item())


def test_each_parameter_counts_its_own_steps():
    """A parameter that joins late is corrected for its first step, not for the others'."""
    early, late = (Parameter("p", (), Constant(1.0)) for _ in range(2))
    for parameter in (early, late):
        parameter.materialize(seed=0, dtype="float64")
    optimizer = optim.Adam([early, late], lr=0.1)
    early.grad = np.array(2.0)
    for _ in range(3):
        optimizer.step()
    late.grad = np.array(2.0)
    optimizer.step()
    assert late.data.item() == pytest.approx(scalar_adam(1.0, [2.0], 0.1))


def test_float16_survives_small_gradients():
    """Their squares are below float16's range: in float16 the quotient would be 0 / 0."""
    parameter = Parameter("p", (2,), Constant(1.0))
    parameter.materialize(seed=0, dtype="float16")
    optimizer = optim.Adam([parameter], lr=0.25)
    parameter.grad = np.array([1e-4, 0.0], "float16")
    optimizer.step()
    np.testing.assert_array_equal(parameter.data, np.array([0.75, 1.0], "float16"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"betas": (1.0, 0.9)}, ("[0]", 1)),
        ({"betas": (0.9, -0.1)}, ("[1]",)),
        ({"betas": (0.9,)}, ("betas",)),
        ({"eps": 0}, ("eps", 0)),
        ({"weight_decay": -1}, ("weight_decay",)),
    ],
)
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_numbers_out_of_range_are_refused(kind, options, text):
    with raises(ModuleError, *text):
        kind([], **options)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_is_that_of_pytorch(name):
    torch = pytest.importorskip("torch")
    start = np.random.default_rng(0).normal(size=(5, 3))
    theirs = torch.nn.Parameter(torch.tensor(start))
    ours = Parameter("p", (5, 3), Constant(0.0))
    ours.materialize(seed=0, dtype="float64")
    ours.data[...] = start
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.02}
    pair = getattr(torch.optim, name)([theirs], **options), getattr(optim, name)([ours], **options)
    for step in range(5):
        ours.grad = np.random.default_rng(step + 1).normal(size=(5, 3))
        theirs.grad = torch.tensor(ours.grad)
        for optimizer in pair:
            optimizer.step()
    np.testing.assert_allclose(ours.data, theirs.detach().numpy(), rtol=1e-11)


def test_the_usual_decay():
    for kind, decay in ((optim.Adam, 0.0), (optim.AdamW, 0.01)):
        assert kind([]).weight_decay == decay
        assert kind([], weight_decay=0.5).weight_decay == 0.5
