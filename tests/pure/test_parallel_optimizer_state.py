"""A state by names fits any mesh: what goes in on one comes out on another, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import DTypeError, MismatchError, ModuleError, ShapeError
from tests.pure.parallel_models import assert_equal, make_pipeline, on_ranks
from tests.pure.tensor_models import ROWS, SEED, TOKENS, VOCAB, batch, layers


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
    loss = nn.cross_entropy if tp is None else mm.VocabParallelCrossEntropy(VOCAB, group=tp)

    def train(step):
        return model.train_step(
            *batch(step), loss=loss, denominator=ROWS * TOKENS, optimizer=optimizer
        )

    return model, optimizer, train


def as_list(state):
    return state if isinstance(state, list) else [state]


def assert_same(one, other, *, rtol=0.0):
    for mine, theirs in zip(as_list(one), as_list(other), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["lr"] == theirs["lr"]
        assert mine["params"].keys() == theirs["params"].keys()
        for name, arrays in mine["params"].items():
            assert arrays.keys() == theirs["params"][name].keys()
            for key, values in arrays.items():
                # What is 0 but for rounding, as the gradients of keys' biases, is not compared.
                scale = np.abs(values).max(initial=1e-6)
                np.testing.assert_allclose(
                    values, theirs["params"][name][key], rtol=rtol, atol=rtol * scale, err_msg=name
                )


@pytest.mark.parametrize(
    ("kind", "before", "after", "lists"),
    [
        ("plain", "dp=2,tp=2", "pp=2", False),
        ("plain", "pp=2,tp=2", "dp=3", True),
        ("llama", "dp=2,tp=4", "pp=2", True),
        ("llama", "dp=2,pp=2", "tp=4", False),
        ("llama", "tp=2", "dp=2,tp=2", False),
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
    for one in as_list(state):
        for name, arrays in one["params"].items():
            assert arrays["steps"] == 2
            assert {array.shape for key, array in arrays.items() if key != "steps"} == {whole[name]}

    def second(mesh):
        model, optimizer, train = start(mesh, kind, zero=int(not lists), lists=lists)
        model.load_state_dict(values)
        model.step = 2
        optimizer.load_state_dict(state)
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
        params = state["params"]
        name = pipe.named_parameters()[0][0]

        def refused(params, error, text):
            with pytest.raises(error, match=text):
                optimizer.load_state_dict({**state, "params": params})
            assert_same(optimizer.full_state_dict(), state)

        others = {key: value for key, value in params.items() if key != name}
        refused(others, ModuleError, f"missing: .'{name}'")
        refused({**params, "9.weight": {"steps": 0}}, ModuleError, "not in the model: .'9.weight'")
        wrong = {**params[name], "mean": np.zeros(3)}
        refused({**params, name: wrong}, ShapeError, "full_state_dict")
        for bad, error, text in (
            ({"steps": -1}, ModuleError, f"'steps' in the state of parameter '{name}' .* got -1"),
            ({"mean": None}, ModuleError, f"'mean' of parameter '{name}' .* got NoneType"),
            ({"mean": np.zeros(3, complex)}, DTypeError, f"'{name}' .* got complex128"),
        ):
            refused({**params, name: {**params[name], **bad}}, error, text)
        lacking = {key: value for key, value in params[name].items() if key != "mean"}
        refused({**params, name: lacking}, ModuleError, r"\('weight'\) lacks \['mean'\]")
        refused({**params, name: None}, ModuleError, f"'{name}' is a dict")
        refused(None, ModuleError, "got NoneType")
        # One that was never stepped has no arrays.
        optimizer.load_state_dict({**state, "params": {**params, name: {"steps": 0}}})
        assert optimizer.full_state_dict()["params"][name] == {"steps": 0}

    on_ranks("dp=2", body)


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
        key = name if full else 0
        params = state["params"]
        own = params[key]

        def with_one(changed):
            if full:
                return {**state, "params": {**params, key: changed}}
            return {**state, "params": [changed, *params[1:]]}

        others = {
            "lr 9.0 of optimizer 0": {**state, "lr": 9.0},
            "9 steps of": with_one({**own, "steps": 9}),
            "mean of .* with values": with_one({**own, "mean": own["mean"] + 1}),
        }
        last = mesh.rank == mesh.size - 1
        for text, other in others.items():
            with pytest.raises(MismatchError, match=f"(?s)nothing is changed.*{text}"):
                optimizer.load_state_dict(other if last else state)
            assert_same(optimizer.full_state_dict(), saved)
        # What one rank alone refuses changes nothing anywhere.
        with pytest.raises(ModuleError, match="lr must be a finite number"):
            optimizer.load_state_dict({**state, "lr": -1.0} if last else state)
        assert_same(optimizer.full_state_dict(), saved)
        optimizer.load_state_dict(state)
        assert_same(optimizer.full_state_dict(), saved)

    on_ranks(dims, body)


def test_ranks_that_split_layers_change_them_by_the_same_rule():
    def body(mesh):
        net = nn.Sequential(*layers("plain", tp=mesh.group("tp")))
        loss = mm.VocabParallelCrossEntropy(VOCAB, group=mesh.group("tp"))
        model = mm.DataParallel(net, mesh, loss=loss, seed=SEED)
        adam = optim.Adam(model.parameters(), lr=0.1 if mesh.coord("tp") else 0.2)
        with pytest.raises(MismatchError, match=r"(?s)group 'tp'.*lr=0.2.*lr=0.1"):
            mm.ParallelOptimizer(adam, model)

    on_ranks("dp=1,tp=2", body)
