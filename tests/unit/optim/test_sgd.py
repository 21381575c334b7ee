from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh import optim
from mpimesh.errors import ModuleError
from mpimesh.nn import Constant, Parameter
from tests.helpers.raises import raises

SHARES = st.floats(0, 0.99)


def scalar_sgd(p, grads, lr, momentum, nesterov, decay):
    """Sutskever's momentum as PyTorch words it, on one number."""
    b = None
    for g in grads:
        d = g + decay * p
        if momentum != 0:
            b = d if b is None else momentum * b + d
            d = d + momentum * b if nesterov else b
        p = p - lr * d
    return p


@given(
    start=st.floats(-3, 3),
    grads=st.lists(st.floats(-3, 3), min_size=1, max_size=6),
    lr=st.floats(0, 1),
    momentum=SHARES,
    nesterov=st.booleans(),
    decay=SHARES,
)
def test_sgd_follows_its_formula(start, grads, lr, momentum, nesterov, decay):
    nesterov = nesterov and momentum > 0
    parameter = Parameter("p", (), Constant(start))
    parameter.materialize(seed=0, dtype="float64")
    optimizer = optim.SGD(
        [parameter], lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=decay
    )
    for g in grads:
        parameter.grad = np.array(g)
        optimizer.step()
    expected = scalar_sgd(start, grads, lr, momentum, nesterov, decay)
    assert parameter.data.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": 1.0}, ("momentum", 1, "1.0")),
        ({"momentum": -0.1}, ("momentum",)),
        ({"weight_decay": -1}, ("weight_decay",)),
        ({"nesterov": True}, (0,)),
    ],
)
def test_numbers_out_of_range_are_refused(options, text):
    with raises(ModuleError, *text):
        optim.SGD([], lr=0.1, **options)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_that_of_pytorch(nesterov):
    torch = pytest.importorskip("torch")
    start = np.random.default_rng(0).normal(size=(5, 3))
    theirs = torch.nn.Parameter(torch.tensor(start))
    ours = Parameter("p", (5, 3), Constant(0.0))
    ours.materialize(seed=0, dtype="float64")
    ours.data[...] = start
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.02}
    pair = torch.optim.SGD([theirs], **options), optim.SGD([ours], **options)
    for step in range(5):
        ours.grad = np.random.default_rng(step + 1).normal(size=(5, 3))
        theirs.grad = torch.tensor(ours.grad)
        for optimizer in pair:
            optimizer.step()
    np.testing.assert_allclose(ours.data, theirs.detach().numpy(), rtol=1e-12)
