"""Functions of JAX trained over virtual ranks, against plain JAX in one process."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises

jax: Any = pytest.importorskip("jax")
mj: Any = pytest.importorskip("mpimesh.interop.jax")

FEATURES, WORDS = 5, 7


@pytest.fixture(autouse=True, scope="module")
def _in_float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def embed(params, words):
    return {"h": params["table"][words], "words": words}


def block(params, x):
    h = x["h"] + jax.numpy.tanh(x["h"] @ params["w"] + params["b"]) * params["scale"]
    return {"h": h, "words": x["words"]}


def head(params, x):
    return x["h"] @ params["table"].T + (x["words"] % 2)[..., None]


def cross_entropy(y, target):
    chosen = jax.numpy.take_along_axis(jax.nn.log_softmax(y), target[..., None], axis=-1)
    return -chosen.mean()


def values():
    rng = np.random.default_rng(3)
    return [
        {"table": rng.normal(size=(WORDS, FEATURES))},
        *(
            {"w": rng.normal(size=(FEATURES, FEATURES)), "b": np.zeros(FEATURES), "scale": 2}
            for _ in range(2)
        ),
    ]


def batch(step, rows=6):
    rng = np.random.default_rng([step, 80])
    words = rng.integers(0, WORDS, (rows, 3))
    return words, np.roll(words, -1, axis=1)


def layers():
    first, *blocks = values()
    bottom = mj.wrap(embed, first)
    # The head's table is the embedding's.
    return [
        bottom,
        *(mj.wrap(block, one) for one in blocks),
        mj.wrap(head, {"table": bottom.parameters()[0]}),
    ]


@cache
def train_alone(steps):
    """Plain JAX; the optimizer is the one that the ranks have, on plain parameters."""

    def loss(params, words, target):
        x = embed(params[0], words)
        for one in params[1:]:
            x = block(one, x)
        return cross_entropy(head(params[0], x), target)

    params = values()
    held = [(one, name) for one in params for name in one if name != "scale"]
    mine = []
    for number, (one, name) in enumerate(held):
        parameter = nn.Parameter(str(number), one[name].shape, nn.Constant(0.0))
        parameter.data = one[name]
        mine.append(parameter)
    optimizer = optim.Adam(mine, lr=0.05)
    losses = []
    # The scale has no gradient: it is a whole number.
    compute = jax.jit(jax.value_and_grad(loss, allow_int=True))
    for step in range(steps):
        value, gradients = compute(params, *batch(step))
        losses.append(float(value))
        flat = [
            gradient[name]
            for one, gradient in zip(params, gradients, strict=True)
            for name in one
            if name != "scale"
        ]
        for parameter, gradient in zip(mine, flat, strict=True):
            parameter.zero_grad()
            parameter.accumulate(np.asarray(gradient))
        optimizer.step()
    return losses, params


@pytest.mark.parametrize(
    ("dims", "schedule"), [("dp=1", "1f1b"), ("pp=2", "gpipe"), ("dp=2,pp=2", "1f1b")]
)
def test_it_trains_like_plain_jax(dims, schedule):
    losses, params = train_alone(3)

    def body(mesh):
        num_stages = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = [mm.PipelineStage(number) for number in range(num_stages)]
        every = layers()
        for place, layer in enumerate(every):
            stages[place * num_stages // len(every)].add_layer(layer)
        pipe = mm.PipelineParallel(stages, 3, mesh=mesh, schedule=schedule, bucket_bytes=300)
        optimizer = optim.Adam(pipe.parameters(), lr=0.05)
        loss = mj.wrap_loss(cross_entropy)
        for step in range(3):
            got = pipe.train_step(*batch(step), loss=loss, optimizer=optimizer)
            assert got == pytest.approx(losses[step], rel=1e-12)
        pipe.check_replicas()
        state = pipe.full_state_dict()
        assert list(state) == ["0.table", "1.b", "1.w", "2.b", "2.w"]
        np.testing.assert_allclose(state["0.table"], params[0]["table"], rtol=1e-8)
        np.testing.assert_allclose(state["2.w"], params[2]["w"], rtol=1e-8)
        if mesh.size == 1:
            np.testing.assert_array_equal(every[1].params["w"], state["1.w"])
            assert every[1].params["scale"] == 2
        pipe.load_state_dict(state)
        return pipe.forward(batch(9)[0], everywhere=True).shape

    assert set(on_ranks(dims, body)) == {(6, 3, WORDS)}


def test_first_values_by_a_function_and_keys_do_not_depend_on_the_mesh():
    def init(key):
        return {"w": jax.random.normal(key, (4, 4))}

    def noisy(params, x, key):
        noise = 0.0 if key is None else jax.random.normal(key, x.shape)
        return x @ params["w"] + noise

    def run(dims, seed=0):
        def body(mesh):
            num_stages = mesh.dim_size("pp")
            every = [mj.wrap(noisy, init, key=True) for _ in range(2)]
            stages = [mm.PipelineStage(number) for number in range(num_stages)]
            for place, layer in enumerate(every):
                stages[place * num_stages // 2].add_layer(layer)
            pipe = mm.PipelineParallel(
                stages, 4 // mesh.dim_size("dp"), mesh=mesh, seed=seed, dtype=np.float64
            )
            memory = sum(layer.parameters()[0].data is not None for layer in every)
            assert memory == 2 // num_stages
            x = np.ones((8, 4))
            losses = [pipe.train_step(x, x, loss=nn.mse_loss) for _ in range(2)]
            y = pipe.forward(x, everywhere=True)
            assert (y == y[0]).all()  # no noise
            state = pipe.full_state_dict()
            assert (state["0.w"] != state["1.w"]).all()
            return losses

        return on_ranks(dims, body)[0]

    one = run("dp=1,pp=1")
    assert one[0] != one[1]
    np.testing.assert_allclose(run("dp=2,pp=2"), one, rtol=1e-12)
    assert run("dp=1,pp=1", seed=1) != one


def test_code_is_compiled_once_for_a_shape_and_a_frozen_parameter_has_no_gradient():
    traced = []

    def double(params, x):
        traced.append(x.shape)
        return x * params["a"] * params["b"]

    layer = mj.wrap(double, {"a": np.array([2.0]), "b": np.array([3.0])})
    a, b = layer.parameters()
    x = np.ones((4, 1))

    def step():
        contexts = [nn.Context() for _ in range(3)]
        for context in contexts:
            layer(x, context)
        for context in contexts:
            dx = layer.backward(x, context)
        return dx

    np.testing.assert_array_equal(step(), 6 * x)
    step()
    assert traced == [(4, 1)]
    assert a.grad == 2 * 3 * 4 * 3
    b.requires_grad = False
    layer.input_grad = False
    assert step() is None
    assert b.grad == 2 * 3 * 4 * 2
    assert a.grad == 3 * 3 * 4 * 3
    twin = copy.deepcopy(layer)
    np.testing.assert_array_equal(twin(x), layer(x))
    assert not np.shares_memory(twin.params["a"], a.data)


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    w = np.eye(3).astype(ml_dtypes.bfloat16)

    def body(mesh):
        model = mm.DataParallel(mj.wrap(lambda p, x: x @ p, w), mesh)
        x = np.ones((4, 3), ml_dtypes.bfloat16)
        loss = mj.wrap_loss(lambda y, target: ((y - target) ** 2).mean())
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        losses = [model.train_step(x, 3 * x, loss=loss, optimizer=optimizer) for _ in range(9)]
        assert losses[0] == pytest.approx(4.0)
        assert losses[-1] < 0.1 * losses[0]
        assert model.named_parameters()[0][1].dtype == ml_dtypes.bfloat16

    on_ranks("dp=2", body)


def test_what_does_not_fit_is_refused():
    layer = mj.wrap(lambda p, x: x * p, np.ones(3))
    context = nn.Context()
    with raises(ModuleStateError, layer, context, "not"):
        layer.backward(np.ones((2, 3)), context)
    layer(np.ones((2, 3)), context)
    with raises(ShapeError, (2, 3), (1, 3)):
        layer.backward(np.ones((1, 3)), context)
    with raises(ModuleError, "wrap", repr(np.ones(3))):
        mj.wrap(np.ones(3), np.ones(3))
    with raises(ModuleError, "parameter", jax.numpy.arange(3).dtype):
        mj.wrap(lambda p, x: x, lambda key: jax.numpy.arange(3))
    with raises(ModuleError, "list", "tuple"):
        mj.wrap(lambda p, x: [x], np.ones(3))(np.ones((2, 3)))
    with raises(DTypeError, "'a'", "complex64"):
        mj.wrap(lambda p, x: x, {"a": np.ones(3, np.complex64)})
    whole = {"w": np.ones((2, 2), np.int32), "b": np.zeros(2, bool)}
    with raises(DTypeError, "'b' of bool", "'w' of int32", ".astype('float32')"):
        mj.wrap(lambda p, x: x @ p["w"] + p["b"], whole)
    assert mj.wrap(lambda p, x: x, {}).parameters() == []
    with raises(ModuleError, "'a'", "complex64"):
        mj.wrap(lambda p, x: x, lambda key: {"a": jax.numpy.ones(3, np.complex64)})
    unhashable = type("F", (), {"__call__": lambda self, p, x: x, "__hash__": None})()
    with raises(ModuleError, "hashed", "function"):
        mj.wrap(unhashable, np.ones(3))


def test_parameters_have_the_dtypes_that_jax_has_them_in():
    """In others each step would turn them into these, and the optimizer compute in those."""
    given: dict[str, Any] = {
        "a": np.ones(3),
        "b": np.ones(3, np.float32),
        "n": np.arange(3),
        "s": 2.0,
    }
    for wide, (real, whole) in ((True, ("float64", "int64")), (False, ("float32", "int32"))):
        jax.config.update("jax_enable_x64", wide)
        layer = mj.wrap(lambda p, x: x * p["a"], given)
        found = {name: one.dtype.name for name, one in layer.params.items()}
        assert found == {"a": real, "b": "float32", "n": whole, "s": real}
    jax.config.update("jax_enable_x64", True)
    assert given["a"].dtype == np.float64


def test_replicas_divide_the_state_of_the_optimizer():
    losses, params = train_alone(3)

    def body(mesh):
        stages = [mm.PipelineStage(number) for number in range(2)]
        for place, layer in enumerate(layers()):
            stages[place // 2].add_layer(layer)
        pipe = mm.PipelineParallel(stages, 3, mesh=mesh, bucket_bytes=300)
        adam = optim.Adam(pipe.parameters(), lr=0.05)
        optimizer = mm.ParallelOptimizer(adam, pipe, zero=1)
        loss = mj.wrap_loss(cross_entropy)
        found = [pipe.train_step(*batch(n), loss=loss, optimizer=optimizer) for n in range(3)]
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        state = pipe.full_state_dict()
        np.testing.assert_allclose(state["2.w"], params[2]["w"], rtol=1e-8)

    on_ranks("dp=2,pp=2", body)
