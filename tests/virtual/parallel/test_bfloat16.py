"""Models of bfloat16 with float32 masters: against NumPy in float32, rounded where they round."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import DTypeError
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises

BF = np.dtype(ml_dtypes.bfloat16)
SINGLE = np.float32


def rounded(x):
    return np.asarray(x, SINGLE).astype(BF)


def test_a_linear_layer_is_products_in_float32_that_are_rounded():
    layer: Any = nn.Linear(5, 3)
    layer.materialize(seed=0, dtype="bfloat16")
    layer.bias.data[...] = [0.5, -1.25, 3.0]
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape).astype(BF) for shape in ((4, 5), (4, 3)))
    x32, dy32, weight, bias = (
        one.astype(SINGLE) for one in (x, dy, layer.weight.data, layer.bias.data)
    )
    ctx = nn.Context()
    y = layer(x, ctx)
    expected = rounded(rounded(x32 @ weight.T).astype(SINGLE) + bias)
    np.testing.assert_array_equal(y, expected, strict=True)
    dx = layer.backward(dy, ctx)
    np.testing.assert_array_equal(dx, rounded(dy32 @ weight), strict=True)
    np.testing.assert_array_equal(layer.weight.grad, rounded(dy32.T @ x32), strict=True)
    np.testing.assert_array_equal(layer.bias.grad, rounded(dy32.sum(axis=0)), strict=True)


def test_first_values_are_those_of_float64_rounded():
    found = []
    for dtype in ("bfloat16", BF, ml_dtypes.bfloat16, "float64"):
        layer = nn.GptBlock(8, 2)
        layer.materialize(seed=3, dtype=dtype)
        found.append([one.data for one in layer.parameters()])
    for one, other, third, double in zip(*found, strict=True):
        assert one.dtype == other.dtype == third.dtype == BF
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
        np.testing.assert_array_equal(one, double.astype(BF))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_steps_are_those_of_float32_masters(kind):
    """Each step changes a value by less than bfloat16 can show; together they show."""
    parameter = nn.Parameter("w", (300,), nn.Uniform(1.0))
    parameter.materialize(seed=0, dtype="bfloat16")
    master = parameter.data.astype(SINGLE)
    first = parameter.data.copy()
    mean, square = np.zeros_like(master), np.zeros_like(master)
    lr = SINGLE(1e-4)
    if kind == "sgd":
        optimizer: optim.Optimizer = optim.SGD([parameter], lr=1e-4)
    else:
        optimizer = optim.AdamW([parameter], lr=1e-4, weight_decay=0.1)
    rng = np.random.default_rng(1)
    for step in range(1, 101):
        parameter.grad = (0.5 + rng.random(300)).astype(BF)
        g = parameter.grad.astype(SINGLE)
        if kind == "sgd":
            master -= lr * g
        else:
            master *= SINGLE(1 - 1e-5)
            mean = SINGLE(0.9) * mean + SINGLE(0.1) * g
            square = SINGLE(0.999) * square + SINGLE(1 - 0.999) * g * g
            root = np.sqrt(square / SINGLE(1 - 0.999**step)) + SINGLE(1e-8)
            master -= lr / SINGLE(1 - 0.9**step) * mean / root
        optimizer.step()
        if step == 1:
            assert (parameter.data == first).mean() > 0.8
    state = optimizer.state_dict()["params"][0]
    assert state["master"].dtype == SINGLE
    np.testing.assert_allclose(state["master"], master, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(parameter.data, state["master"].astype(BF), strict=True)
    assert (parameter.data < first).mean() > 0.95


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_of_replicas_are_added_up_in_float32(zero):
    """1 and three times 1/512: in bfloat16 each sum would round down to 1."""

    def body(mesh):
        layer = nn.Linear(1, 1, bias=False)
        model = mm.DataParallel(layer, mesh, loss=nn.mse_loss, dtype="bfloat16", seed=0)
        layer.weight.data[...] = 0
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=1.0), model, zero=zero)
        # The gradient of a row is -2 / 4 * x * target.
        x = np.array([[1.0], [1 / 512], [1 / 512], [1 / 512]]).astype(BF)
        model.train_step(x, np.full((4, 1), 2.0).astype(BF), optimizer=optimizer)
        return float(layer.weight.data[0, 0])

    found = on_ranks("dp=4", body)
    assert found == [float(rounded(1 + 3 / 512))] * 4
    assert found[0] > 1.0


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data / 16, data.target


def mlp():
    return [
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    ]


def trained(mesh, dtype, epochs):
    """Loss and accuracy of a test after some epochs of digits."""
    x, target = digits()
    x = x.astype(dtype)
    layers = mlp()
    stages = [mm.PipelineStage(0), mm.PipelineStage(1)] if mesh.contains_dim("pp") else None
    if stages is None:
        stages = [mm.PipelineStage(0)]
    for place, layer in enumerate(layers):
        stages[place * len(stages) // len(layers)].add_layer(layer)
    pipe = mm.PipelineParallel(stages, 4, mesh=mesh, seed=0, dtype=dtype)
    optimizer = mm.ParallelOptimizer(optim.AdamW(pipe.parameters(), lr=5e-3), pipe)
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(1437), 12):
            pipe.train_step(x[rows], target[rows], loss=nn.cross_entropy, optimizer=optimizer)
    pipe.check_replicas()
    y = pipe.forward(x[1437:], everywhere=True).astype("float64")
    return nn.cross_entropy(y, target[1437:]), float((y.argmax(axis=1) == target[1437:]).mean())


@pytest.mark.parametrize("dims", ["dp=1", "dp=2,pp=2"])
def test_digits_are_learned_as_in_float32(dims):
    """Test loss within 0.02, accuracy within one percent."""
    epochs = 8
    single = on_ranks(dims, lambda mesh: trained(mesh, "float32", epochs))[0]
    half = on_ranks(dims, lambda mesh: trained(mesh, "bfloat16", epochs))[0]
    assert single[1] > 0.9
    assert half[0] == pytest.approx(single[0], abs=0.02)
    assert half[1] == pytest.approx(single[1], abs=0.01)


@pytest.mark.parametrize("dims", ["dp=2,tp=2", "pp=2,tp=2", "dp=2,pp=2"])
def test_a_gpt_on_a_mesh_is_near_one_process_and_states_go_on(dims):
    rows = [np.sort(np.random.default_rng(s).integers(0, 16, (8, 9)), axis=1) for s in range(6)]

    def make(mesh):
        tp = mesh.group("tp") if mesh.contains_dim("tp") else None
        layers = mm.parallel.gpt_layers(16, 24, 2, 4, max_tokens=8, tp=tp, dropout=0.1)
        count = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = [mm.PipelineStage(number) for number in range(count)]
        for place, layer in enumerate(layers):
            stages[place * count // len(layers)].add_layer(layer)
        pipe = mm.PipelineParallel(stages, 2, mesh=mesh, seed=0, dtype="bfloat16")
        adam = optim.AdamW(pipe.parameters(), lr=0.01)
        loss = (
            nn.cross_entropy if tp is None else mm.parallel.VocabParallelCrossEntropy(16, group=tp)
        )
        return pipe, mm.ParallelOptimizer(adam, pipe), loss

    def train(made, steps):
        pipe, optimizer, loss = made
        return [
            pipe.train_step(rows[s][:, :-1], rows[s][:, 1:], loss=loss, optimizer=optimizer)
            for s in steps
        ]

    def alone(mesh):
        return train(make(mesh), range(6))

    def body(mesh):
        made = make(mesh)
        losses = train(made, range(3))
        pipe, optimizer, _ = made
        state, rest = pipe.full_state_dict(), optimizer.full_state_dict()
        assert {one.dtype for one in state.values()} == {BF}
        other = make(mesh)
        # Files of NumPy do not know bfloat16; float32 has all its values.
        other[0].load_state_dict({name: one.astype(SINGLE) for name, one in state.items()})
        other[1].load_state_dict(rest)
        again = train(other, range(3, 6))
        assert again == train(made, range(3, 6))
        return losses + again

    (expected,) = on_ranks("dp=1", alone)
    for found in on_ranks(dims, body):
        np.testing.assert_allclose(found, expected, atol=0.02)


def test_what_cannot_be_is_told(monkeypatch):
    device = type(sys)("cupy")
    device.asarray = np.asarray  # type: ignore[attr-defined]
    for layer in (
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Parameter("w", (2,), nn.Constant(0.0)),
    ):
        with raises(DTypeError, "bfloat16", "NumPy", "float16"):
            layer.materialize(seed=0, dtype="bfloat16", xp=device)
    with raises(DTypeError, "bfloat16", "float8_e5m2"):
        nn.Linear(2, 2).materialize(seed=0, dtype=ml_dtypes.float8_e5m2)
    layer = nn.Linear(2, 2)
    layer.materialize(seed=0, dtype="bfloat16")
    with raises(DTypeError, "bfloat16", "float32"):
        layer(np.ones((1, 2), "float32"))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with raises(DTypeError, "ml_dtypes", "pip install"):
        nn.Linear(2, 2).materialize(seed=0, dtype="bfloat16")
