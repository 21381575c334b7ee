"""Pipelines whose stages pass tuples and dicts, against the same model in one process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh import nn
from mpimesh.errors import MismatchError, ModuleError, ShapeError, StageShapeError
from mpimesh.parallel import DataParallel, PipelineStage
from tests.helpers.depth import examples
from tests.helpers.parallel_models import on_ranks
from tests.helpers.parallel_schedules import all_on_one
from tests.helpers.parallel_traps import Reshaped, assert_nothing_left, error_of
from tests.helpers.parallel_values import (
    Mixed,
    Rows,
    TreeLoss,
    alone,
    assert_same_tree,
    make,
    mixed_stages,
    random_tree,
)
from tests.helpers.raises import names

LEAVES = st.builds(
    lambda shape, floating: Rows(*shape, floating=floating),
    st.lists(st.integers(1, 3), max_size=2),
    st.booleans(),
)
SPECS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("cab"), inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)
WITH_GRADIENT = SPECS.map(lambda spec: (Rows(2), spec))


@given(
    SPECS,
    st.lists(WITH_GRADIENT, min_size=4, max_size=4),
    st.sampled_from([(1, "gpipe"), (4, "1f1b"), (4, "zb1p"), (2, "interleaved"), (2, "zbv")]),
    st.integers(1, 9),
    st.integers(1, 4),
)
@settings(max_examples=examples(30))
def test_any_structure_gives_the_bits_of_one_process(first, others, schedule, rows, count):
    specs = [first, *others]
    x, target = random_tree(first, rows), random_tree(others[-1], rows, seed=1)
    num_ranks, name = schedule
    loss, gradients, y = alone(specs, x, target, rows, count)

    def body(mesh):
        how = all_on_one if num_ranks == 1 else name
        pipe = make(mesh, mixed_stages(specs), count, schedule=how)
        for _ in range(2):
            pipe.zero_grad()
            assert pipe.train_step(x, target, loss=TreeLoss()) == loss
            for key, parameter in pipe.named_parameters():
                np.testing.assert_array_equal(parameter.grad, gradients[key], strict=True)
            assert_same_tree(pipe.forward(x, everywhere=True), y)

    on_ranks(f"pp={num_ranks}", body, rendezvous=True)


SPEC = [
    {"h": Rows(3), "ids": Rows(2, floating=False)},
    ({"z": Rows(2, 2), "a": Rows()}, Rows(floating=False)),
    (Rows(4), {"keep": Rows(1)}),
    Rows(2),
]


@pytest.mark.parametrize("dims", ["dp=1", "dp=3", "pp=3", "dp=2,pp=3"])
@pytest.mark.parametrize("rows", [13, 2, 1])
def test_every_mesh_trains_the_same(dims, rows):
    x, target = random_tree(SPEC[0], rows), random_tree(SPEC[-1], rows)
    loss, gradients, y = alone(SPEC, x, target, rows, 1)

    def body(mesh):
        stages = mixed_stages(SPEC)
        if not mesh.contains_dim("pp"):
            stages = [PipelineStage(0)]
            for stage in mixed_stages(SPEC):
                stages[0].add_layer(stage.layers[0])
        pipe = make(mesh, stages)
        first = not mesh.contains_dim("pp") or mesh.coord("pp") == 0
        last = not mesh.contains_dim("pp") or mesh.coord("pp") == 2
        given = x if first else None, target if last else None
        assert pipe.train_step(*given, loss=TreeLoss()) == pytest.approx(loss, rel=1e-12)
        for name, parameter in pipe.named_parameters():
            np.testing.assert_allclose(parameter.grad, gradients[name], rtol=1e-9, atol=1e-14)
        assert_same_tree(pipe.forward(given[0], everywhere=True), y, exact=False)

    on_ranks(dims, body, rendezvous=True)


def test_outputs_may_be_trees_and_some_replicas_have_none():
    spec = [Rows(3), {"y": Rows(2), "best": Rows(floating=False)}]
    for rows in (0, 1, 5):
        x = random_tree(spec[0], rows)
        model = mixed_stages(spec)[0]
        model.materialize(seed=5, dtype=np.float64)
        expected = model.forward(x)

        def body(mesh, x=x, expected=expected):
            y = make(mesh, mixed_stages(spec)).forward(x)
            assert_same_tree(y, expected, exact=False)

        on_ranks("dp=3", body)


def test_replicas_of_a_model_take_trees():
    rows, spec = 7, SPEC[:1] + SPEC[-1:]
    x, target = random_tree(spec[0], rows), random_tree(spec[1], rows)
    loss, gradients, y = alone(spec, x, target, rows, 1)

    def body(mesh):
        model = DataParallel(
            Mixed(*spec), mesh, loss=TreeLoss(), seed=5, dtype="float64", num_microbatches=2
        )
        assert model.train_step(x, target) == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(model.parameters()[0].grad, gradients["0.weight"], rtol=1e-9)
        assert_same_tree(model.forward(x), y, exact=False)

    on_ranks("dp=2", body)


def test_an_interface_of_any_length():
    """A few hundred arrays with long names: longer than the room for an announcement."""
    many = {f"{'a long name' * 5} {place}": Rows(floating=place % 2 == 0) for place in range(150)}
    specs = [Rows(2), many, Rows(1)]
    x, target = random_tree(specs[0], 5), random_tree(specs[-1], 5)
    loss, gradients, _ = alone(specs, x, target, 5, 3)

    def body(mesh):
        pipe = make(mesh, mixed_stages(specs), 3)
        assert pipe.train_step(x, target, loss=TreeLoss()) == loss
        for name, parameter in pipe.named_parameters():
            np.testing.assert_array_equal(parameter.grad, gradients[name])
        assert_nothing_left(mesh)
        sent = mesh.traffic().calls.get("pipeline send", 0)
        pipe.train_step(x, target, loss=TreeLoss())
        return mesh.traffic().calls["pipeline send"] - sent

    assert on_ranks("pp=2", body, rendezvous=True) == [3, 3]


def test_integers_are_sent_forward_only():
    specs = [Rows(2), (Rows(4), Rows(1000, floating=False)), Rows(1)]

    def body(mesh):
        pipe = make(mesh, mixed_stages(specs), 1)
        pipe.train_step(random_tree(specs[0], 5), random_tree(specs[-1], 5), loss=TreeLoss())
        return mesh.traffic().bytes["pipeline send"]

    assert on_ranks("pp=2", body) == [5 * 1004 * 8, 5 * 4 * 8]


# -- wrong use ----------------------------------------------------------------------------------


def tuples(change, since=0):
    """The first stage gives two arrays, changed from a call on; the second puts them together."""
    return [
        PipelineStage(0)
        .add_layer(Mixed(Rows(2), (Rows(3), Rows(floating=False))))
        .add_layer(Reshaped(change, since=since)),
        PipelineStage(1).add_layer(Mixed((Rows(3), Rows(floating=False)), Rows(1))),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda y: (y[0], y[1].astype("int32")),
            "0F2 .*stage 0 made rows of shape () and dtype int32 in [1] for stage 1, which expects "
            "rows of shape () and dtype int64 in [1] as before",
        ),
        (lambda y: (y[0], y[1][:-1]), "made an output of shape (1,) in [1] from an input of 2"),
        (lambda y: y[0], "stage 0 made array, rows of shape (3,)"),
    ],
)
def test_an_output_that_does_not_keep_to_the_interface(change, message):
    def body(mesh):
        stages = tuples(change, since=2)
        pipe = make(mesh, stages)
        x, target = random_tree(Rows(2), 8), random_tree(Rows(1), 8)
        error = error_of(partial(pipe.train_step, x, target, loss=TreeLoss()))
        assert isinstance(error, StageShapeError)
        for part in message.split(" .*"):
            assert part in str(error)
        assert_nothing_left(mesh)
        stages[0].layers[1].change = lambda y: y
        pipe.train_step(x, target, loss=TreeLoss())
        return str(error)

    texts = on_ranks("pp=2", body, rendezvous=True)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("x", "error", "values"),
    [
        ((np.ones((4, 2)), np.ones((3, 2))), ShapeError, ("x[0]", 4, "x[1]", 3)),
        ({"a": np.ones((4, 2)), "b": np.float64(1)}, ShapeError, ("x['b']", "np.float64(1.0)")),
        ((np.ones((4, 2)), None), ShapeError, ("x[1]", None)),
        ((), ModuleError, ("x", "tuple")),
        ((np.ones((5, 2)),), ShapeError, ("x", 5, "target", 4)),
    ],
)
def test_a_batch_that_does_not_fit_is_told_on_all_ranks(x, error, values):
    def body(mesh):
        pipe = make(mesh, tuples(lambda y: y))
        raised = error_of(partial(pipe.train_step, x, np.ones((4, 1)), loss=TreeLoss()))
        assert type(raised) is error
        names(str(raised), "rank 0", *values)
        assert_nothing_left(mesh)

    on_ranks("pp=2", body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: (x[0], x[1].astype("int32")), "ranks [3]: [0] (3,) float64, [1] () int32"),
        (lambda x: {"a": x[0], "b": x[1]}, "ranks [3]: ['a'] (3,) float64, ['b'] () int64"),
        (lambda x: (x[0], x[1][::-1]), "CRC-32"),
    ],
)
def test_ranks_that_are_given_different_trees(change, message, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    specs = [(Rows(3), Rows(floating=False)), Rows(2), Rows(1)]
    x, target = random_tree(specs[0], 8), random_tree(specs[-1], 8)

    def body(mesh):
        pipe = make(mesh, mixed_stages(specs))
        mine = change(x) if mesh.rank == 3 else x
        error = error_of(partial(pipe.train_step, mine, target, loss=TreeLoss()))
        assert type(error) is MismatchError
        assert message in str(error)
        assert_nothing_left(mesh)

    on_ranks("dp=2,pp=2", body)


def test_a_list_of_numbers_is_an_array():
    def body(mesh):
        stages = [PipelineStage(0).add_layer(nn.Linear(2, 3)), PipelineStage(1)]
        y = make(mesh, stages).forward([[1.0, 2.0], [3.0, 4.0]], everywhere=True)
        assert y.shape == (2, 3)

    on_ranks("pp=2", body)
