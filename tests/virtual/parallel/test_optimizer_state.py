"""A state by names fits any mesh: what goes in on one comes out on another, bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import (
    DTypeError,
    MismatchError,
    ModuleError,
    ModuleStateError,
    ShapeError,
)
from tests.helpers.depth import deep
from tests.helpers.parallel_models import assert_equal, batch as rows, make_pipeline, on_ranks
from tests.helpers.raises import raises
from tests.helpers.tensor_models import ROWS, SEED, TOKENS, VOCAB, batch, layers

NUMBERS = {*optim.AdamW.numbers, *optim.SGD.numbers}


def start(mesh, kind, *, zero, lists=False):
    """A GPT over the dims of a mesh that it has, and its optimizer."""
    tp = mesh.group("tp") if mesh.contains_dim("tp") else None
    count = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
    made = layers(kind, tp=tp)
    stages = [mm.PipelineStage(number) for number in range(count)]
    for number, layer in enumerate(made):
        stages[number * count // len(made)].add_layer(layer)
    model = mm.PipelineParallel(
        stages, 2, mesh=mesh, seed=SEED, dtype=np.float64, bucket_bytes=4000
    )
    matrices = [one for one in model.parameters() if len(one.shape) > 1]
    rest = [one for one in model.parameters() if len(one.shape) < 2]
    given: Any = optim.AdamW(model.parameters(), lr=0.02)
    if lists:
        given = [optim.AdamW(matrices, lr=0.02), optim.SGD(rest, lr=0.1, momentum=0.5)]
    optimizer = mm.ParallelOptimizer(given, model, zero=zero)
    loss = (
        nn.cross_entropy if tp is None else mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp)
    )

    def train(step):
        return model.train_step(
            *batch(step), loss=loss, denominator=ROWS * TOKENS, optimizer=optimizer
        )

    return model, optimizer, train


def assert_same(one, other, *, rtol=0.0):
    assert one.keys() == other.keys()
    for key, values in one.items():
        if not isinstance(values, np.ndarray):
            assert type(values) is type(other[key])
            assert values == other[key], key
            continue
        # What is 0 but for rounding, as the gradients of keys' biases, is not compared.
        scale = np.abs(values).max(initial=1e-6)
        np.testing.assert_allclose(values, other[key], rtol=rtol, atol=rtol * scale, err_msg=key)


def filed(state):
    """A state that has been in a file, which was read without pickle."""
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    with np.load(file, allow_pickle=False) as found:
        return dict(found)


@pytest.mark.parametrize(
    ("kind", "before", "after", "lists"),
    [
        *deep(("plain", "dp=2,tp=2", "pp=2", False)),
        ("plain", "pp=2,tp=2", "dp=3", True),
        *deep(("llama", "dp=2,tp=4", "pp=2", True)),
        ("llama", "dp=2,pp=2", "tp=4", False),
        *deep(("llama", "tp=2", "dp=2,tp=2", False)),
    ],
)
def test_any_mesh_to_any_other(kind, before, after, lists):
    def first(mesh):
        model, optimizer, train = start(mesh, kind, zero=1, lists=lists)
        for step in range(2):
            train(step)
        return model.full_state_dict(), optimizer.full_state_dict()

    found = on_ranks(before, first)
    values, state = found[0]
    for other_values, other in found[1:]:
        assert_equal(values, other_values)
        assert_same(state, other)
    whole = {name: one.shape for name, one in values.items()}
    assert state["step"] == 2
    seen = set()
    for key, value in state.items():
        prefix, found, rest = key.partition("params/")
        assert found or prefix.split("/")[-1] in ("step", "optimizer", *NUMBERS)
        if found:
            name, _, what = rest.rpartition("/")
            seen.add(name)
            assert value == 2 if what == "steps" else value.shape == whole[name]
    assert seen == set(whole)

    def second(mesh):
        model, optimizer, train = start(mesh, kind, zero=int(not lists), lists=lists)
        model.load_state_dict(filed(values))
        optimizer.load_state_dict(filed(state))
        assert model.step == 2
        assert_same(optimizer.full_state_dict(), state)
        return train(2), model.full_state_dict(), optimizer.full_state_dict()

    def unsplit(mesh):
        model, optimizer, train = start(mesh, kind, zero=0, lists=lists)
        for step in range(2):
            train(step)
        assert_same(optimizer.full_state_dict(), state, rtol=1e-9)
        loss = train(2)
        return loss, model.full_state_dict(), optimizer.full_state_dict()

    right = on_ranks("dp=1", unsplit)[0]
    loss, parameters, reached = on_ranks(after, second)[-1]
    assert loss == pytest.approx(right[0], rel=1e-9)
    assert_same(reached, right[2], rtol=1e-8)
    for name, expected in right[1].items():
        np.testing.assert_allclose(parameters[name], expected, rtol=1e-7, atol=1e-9)


def test_states_that_do_not_fit_change_nothing():
    def body(mesh):
        pipe = make_pipeline(mesh)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer = mm.ParallelOptimizer(adam, pipe)
        x, target = np.ones((4, 6)), np.zeros(4, int)
        pipe.train_step(x, target, loss=nn.cross_entropy, optimizer=optimizer)
        state = optimizer.full_state_dict()
        name = pipe.named_parameters()[0][0]
        own = f"params/{name}/"

        def refused(other, error, *values):
            with raises(error, *values):
                optimizer.load_state_dict(other)
            assert_same(optimizer.full_state_dict(), state)
            assert pipe.step == 1

        def without(*keys):
            return {key: value for key, value in state.items() if key not in keys}

        refused({k: v for k, v in state.items() if not k.startswith(own)}, ModuleError, name)
        refused({**state, "params/9.weight/steps": 0}, ModuleError, "9.weight")
        refused({**state, f"{own}mean": np.zeros(3)}, ShapeError, "weight", "mean", (3,))
        refused({**state, f"{own}steps": -1}, ModuleError, name, "steps", -1)
        refused({**state, f"{own}mean": None}, ModuleError, name, "mean", "NoneType")
        wrong = np.zeros(3, complex)
        refused({**state, f"{own}mean": wrong}, DTypeError, name, "mean", "complex128")
        refused(without(f"{own}mean"), ModuleError, "weight", "mean")
        refused(without(f"{own}steps"), ModuleError, name, "steps")
        refused(without("lr"), ModuleError, "lr")
        refused({**state, "step": -1}, ModuleError, "step", -1)
        refused({**state, "step": 1.5}, ModuleError, "step", 1.5)
        refused(None, ModuleError, "state", None)
        refused([state], ModuleError)
        refused([], ModuleError, 0, 1)
        with raises(ModuleError, "ParallelOptimizer", "Adam"):
            optim.Adam([]).load_state_dict(state)
        # One that was never stepped has no arrays.
        never = {k: v for k, v in state.items() if not k.startswith(own)} | {f"{own}steps": 0}
        optimizer.load_state_dict(never)
        assert_same(optimizer.full_state_dict(), never)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("dims", ["dp=2", "pp=2"])
@pytest.mark.parametrize("full", [False, True])
def test_a_resumed_training_draws_the_masks_that_follow(dims, full):
    """The model drops a quarter of its features, by the number of the step."""

    def go_on(mesh, pipe, optimizer):
        return [
            pipe.train_step(*rows(step, 8), loss=nn.cross_entropy, optimizer=optimizer)
            for step in range(3, 5)
        ]

    def first(mesh):
        pipe = make_pipeline(mesh)
        optimizer = mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe)
        for step in range(3):
            pipe.train_step(*rows(step, 8), loss=nn.cross_entropy, optimizer=optimizer)
        state = optimizer.full_state_dict() if full else copy.deepcopy(optimizer.state_dict())
        return pipe.full_state_dict(), state, go_on(mesh, pipe, optimizer)

    found = on_ranks(dims, first)

    def second(mesh):
        values, state, losses = found[mesh.rank]
        pipe = make_pipeline(mesh)
        optimizer = mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.5), pipe)
        pipe.load_state_dict(filed(values))
        optimizer.load_state_dict(filed(state) if full else state)
        if not full:
            with raises(ModuleStateError, "model.step = 3"):
                go_on(mesh, pipe, optimizer)
            pipe.step = 3
        assert pipe.step == 3
        assert go_on(mesh, pipe, optimizer) == losses

    on_ranks(dims, second)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_training_that_forgets_its_step_is_told(wrapped):
    def body(mesh):
        first = make_pipeline(mesh)
        adam = optim.Adam(first.parameters(), lr=0.01)
        for step in range(2):
            first.train_step(*rows(step, 8), loss=nn.cross_entropy, optimizer=adam)
        values, state = first.full_state_dict(), adam.state_dict()

        def resumed():
            pipe = make_pipeline(mesh)
            adam = optim.Adam(pipe.parameters(), lr=0.01)
            pipe.load_state_dict(values)
            adam.load_state_dict(state)
            return pipe, mm.ParallelOptimizer(adam, pipe) if wrapped else adam

        def train(pipe, optimizer):
            return pipe.train_step(*rows(2, 8), loss=nn.cross_entropy, optimizer=optimizer)

        pipe, optimizer = resumed()
        with raises(ModuleStateError, "model.step = 2"):
            train(pipe, optimizer)
        pipe.step = 2
        loss = train(pipe, optimizer)
        assert loss == train(first, adam)
        again, optimizer = resumed()
        again.step = 0
        assert train(again, optimizer) != loss
        assert train(*resumed_at_once(resumed)) == loss

    def resumed_at_once(resumed):
        pipe, optimizer = resumed()
        pipe.step = np.int64(2)
        return pipe, optimizer

    on_ranks("dp=2", body)


def test_a_step_is_a_whole_number():
    def body(mesh):
        pipe = make_pipeline(mesh)
        wrong: Any
        for wrong in (-1, 1.5, None, "x", True):
            with raises(ModuleError, "step", wrong):
                pipe.step = wrong
        assert pipe.step == 0

    on_ranks("dp=1", body)


@pytest.mark.parametrize(
    ("dims", "zero", "full"),
    [("dp=2", 0, True), ("dp=2", 1, False), ("dp=2,pp=2", 1, True)],
)
def test_replicas_that_load_different_states_are_refused(dims, zero, full):
    def body(mesh):
        model, optimizer, train = start(mesh, "plain", zero=zero)
        train(0)
        saved = optimizer.full_state_dict()
        state = optimizer.full_state_dict() if full else optimizer.state_dict()
        name = model.named_parameters()[0][0]

        def with_one(key, value):
            if full:
                return {**state, f"params/{name}/{key}": value}
            first, *others = state["params"]
            return {**state, "params": [{**first, key: value}, *others]}

        mean = state[f"params/{name}/mean"] if full else state["params"][0]["mean"]
        others = [
            (("lr", 9.0), {**state, "lr": 9.0}),
            (("steps", 9, name), with_one("steps", 9)),
            (("mean", name), with_one("mean", mean + 1)),
            (("step", 7), {**state, "step": 7}),
        ]
        last = mesh.rank == mesh.size - 1
        for values, other in others:
            with raises(MismatchError, *values):
                optimizer.load_state_dict(other if last else state)
            assert_same(optimizer.full_state_dict(), saved)
        # What one rank alone refuses changes nothing anywhere.
        with raises(ModuleError, "lr", -1.0):
            optimizer.load_state_dict({**state, "lr": -1.0} if last else state)
        assert_same(optimizer.full_state_dict(), saved)
        optimizer.load_state_dict(state)
        assert_same(optimizer.full_state_dict(), saved)

    on_ranks(dims, body)


def test_ranks_that_split_layers_change_them_by_the_same_rule():
    def body(mesh):
        net = nn.Sequential(*layers("plain", tp=mesh.group("tp")))
        loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=mesh.group("tp"))
        model = mm.DataParallel(net, mesh, loss=loss, seed=SEED)
        adam = optim.Adam(model.parameters(), lr=0.1 if mesh.coord("tp") else 0.2)
        with raises(MismatchError, "'tp'", "lr=0.2", "lr=0.1"):
            mm.ParallelOptimizer(adam, model)

    on_ranks("dp=1,tp=2", body)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_a_state_that_was_taken_stays_as_it_is(zero, size):
    """On any number of replicas: it is a copy, which the next step leaves alone."""

    def main():
        with mm.DeviceMesh(f"dp={size}") as mesh:
            model = mm.DataParallel(nn.Linear(3, 2), mesh, loss=nn.mse_loss)
            optimizer = mm.ParallelOptimizer(optim.Adam(model.parameters()), model, zero=zero)
            x, y = np.ones((4, 3), "f4"), np.zeros((4, 2), "f4")
            model.train_step(x, y, optimizer=optimizer)
            state = optimizer.state_dict()
            before = copy.deepcopy(state)
            model.train_step(x, y, optimizer=optimizer)
            for one, other in zip(state["params"], before["params"], strict=True):
                assert_same(one, other)
            now = optimizer.state_dict()
            assert not np.array_equal(now["params"][0]["mean"], state["params"][0]["mean"])
            optimizer.load_state_dict(state)
            assert_same(optimizer.state_dict()["params"][0], state["params"][0])

    mm.run_virtual(size, main)
