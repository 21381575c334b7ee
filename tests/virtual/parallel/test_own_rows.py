"""Batches of which each replica gives its own rows, against the whole batch."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, ShapeError, StageError
from tests.helpers import tensor_models
from tests.helpers.depth import deep
from tests.helpers.parallel_models import (
    CLASSES,
    SEED,
    assert_equal,
    assert_same,
    batch,
    layers,
    make_pipeline,
    on_ranks,
    state_of,
    train_alone,
    train_by,
)
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of
from tests.helpers.raises import names

KINDS = ["local", "split"]


def rows_of(mesh, counts):
    """The rows of this rank's replica, where replicas have that many."""
    place = mesh.coord("dp") if mesh.contains_dim("dp") else 0
    first = sum(counts[:place])
    return slice(first, first + counts[place])


def given(mesh, kind, counts, *arrays):
    """This rank's rows, in one of the two forms, and the option for it."""
    mine = [array[rows_of(mesh, counts)] for array in arrays]
    if kind == "local":
        return mine, {"rows": "local"}
    placements = {"dp": "S0"} if mesh.contains_dim("dp") else {}
    return [mm.DTensor.from_local(part.copy(), mesh, placements) for part in mine], {}


def dealt(rows, mesh):
    """Other numbers of rows than a whole batch would be dealt by."""
    size = mesh.dim_size("dp") if mesh.contains_dim("dp") else 1
    return [0] * (size - 1) + [rows] if rows % 2 else [rows] + [0] * (size - 1)


def make(mesh):
    model = nn.Sequential(layers())
    return mm.DataParallel(model, mesh, loss=nn.cross_entropy, seed=SEED, dtype="float64")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_microbatches", [*deep(1), 3])
@pytest.mark.parametrize(
    ("dims", "counts"),
    [
        ("dp=1", [13]),
        *deep(("dp=2", [7, 6]), ("dp=2", [2, 11])),
        ("dp=2", [13, 0]),
        ("dp=3", [0, 9, 4]),
        ("pp=2", [13]),
        ("dp=2,pp=2", [0, 13]),
        *deep(("dp=2,pp=2", [5, 8])),
        ("pp=2,dp=2", [12, 1]),
    ],
)
def test_it_trains_like_one(dims, counts, kind, num_microbatches):
    """Dropout, too: its masks go by the place of a row among those of all replicas."""
    expected = train_alone(3, 13)

    def body(mesh):
        pipe = make_pipeline(mesh, num_microbatches)

        def train_step(step):
            parts, options = given(mesh, kind, counts, *batch(step, 13))
            return pipe.train_step(*parts, loss=nn.cross_entropy, **options)

        def outputs(x):
            (part,), options = given(mesh, kind, dealt(7, mesh), x)
            y = pipe.forward(part, everywhere=True, **options)
            assert isinstance(y, mm.DTensor) == (kind == "split")
            mine = y.local if kind == "split" else y
            assert mine.shape == (len(x[rows_of(mesh, dealt(7, mesh))]), CLASSES)
            if kind == "local":
                y = mm.DTensor.from_local(y, mesh, {"dp": "S0"} if "dp" in dims else {})
            return y.full()

        trained = train_by(
            3,
            pipe.parameters(),
            train_step,
            clip=lambda: pipe.clip_grad_norm(0.5),
            state=lambda: {name: p.data for name, p in pipe.named_parameters()},
            outputs=outputs,
        )
        pipe.check_replicas()
        assert_same(trained, expected)
        assert_nothing_left(mesh)

    on_ranks(dims, body)


@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2"])
def test_rows_as_they_are_dealt_give_the_same_bits_as_the_whole_batch(dims):
    def body(mesh):
        replicas = mesh.dim_size("dp")
        counts = [len(part) for part in np.array_split(np.arange(13), replicas)]
        results = []
        for kind in ["whole", *KINDS]:
            pipe = make_pipeline(mesh, 2)
            adam = optim.Adam(pipe.parameters(), lr=0.01)
            losses = []
            for step in range(3):
                parts, options = batch(step, 13), {}
                if kind != "whole":
                    parts, options = given(mesh, kind, counts, *parts)
                losses.append(
                    pipe.train_step(*parts, loss=nn.cross_entropy, optimizer=adam, **options)
                )
                losses.append(pipe.evaluate(*parts, loss=nn.cross_entropy, **options))
            results.append((losses, state_of(pipe)))
        for losses, state in results[1:]:
            assert losses == results[0][0]
            assert_equal(state, results[0][1])

    on_ranks(dims, body)


@pytest.mark.parametrize("kind", KINDS)
def test_data_parallel_takes_them(kind):
    expected = train_alone(3, 13)

    def body(mesh):
        model = make(mesh)
        adam = optim.Adam(model.parameters(), lr=0.01)
        for step in range(3):
            parts, options = given(mesh, kind, [4, 0, 9], *batch(step, 13))
            assert model.evaluate(*parts, **options) > 0
            loss = model.train_step(*parts, **options)
            assert loss == pytest.approx(expected.losses[step], rel=1e-12)
            model.clip_grad_norm(0.5)
            adam.step()
        x = batch(1000, 7)[0]
        (part,), options = given(mesh, kind, [0, 6, 1], x)
        y = model.forward(part, **options)
        mine = y.local if kind == "split" else y
        np.testing.assert_allclose(
            mine, expected.outputs[rows_of(mesh, [0, 6, 1])], rtol=1e-8, atol=1e-11
        )

    on_ranks("dp=3", body)


@pytest.mark.parametrize("denominator", [None, 5.0])
def test_ignored_targets_are_counted_over_all_replicas(denominator):
    """A mean of the replicas' means would weigh them alike."""
    x, target = batch(0, 12)
    target = np.where(np.arange(12) < 7, -1, target)
    loss = nn.CrossEntropy(ignore_index=-1)
    alone = nn.Sequential(layers())
    alone.materialize(seed=SEED, dtype=np.float64)
    whole, _ = loss.value_and_grad(
        alone.forward(x, nn.Context(step=0)), target, denominator=denominator or 5
    )

    def body(mesh):
        pipe = make_pipeline(mesh, 2)
        (mine, goal), options = given(mesh, "local", [8, 4], x, target)
        return pipe.train_step(mine, goal, loss=loss, denominator=denominator, **options)

    for dims in ("dp=2", "dp=2,pp=2"):
        np.testing.assert_allclose(on_ranks(dims, body), whole, rtol=1e-12)


def test_trees_and_named_inputs_are_taken():
    """Each stage gets its replica's rows of what enters there."""

    def body(mesh, kind):
        stages = [
            mm.PipelineStage(0).add_layer(nn.Linear(4, 3)),
            mm.PipelineStage(1, inputs=("more",)).add_layer(Joined()),
        ]
        pipe = mm.PipelineParallel(stages, 2, mesh=mesh, seed=SEED, dtype="float64")
        x, more, target = (np.random.default_rng(i).normal(size=(9, 4 - i)) for i in (0, 1, 1))
        if kind == "whole":
            return pipe.train_step(x, target, inputs={"more": more}, loss=nn.mse_loss)
        (x, more, target), options = given(mesh, kind, [2, 7], x, more, target)
        return pipe.train_step(x, target, inputs={"more": more}, loss=nn.mse_loss, **options)

    losses = [on_ranks("dp=2,pp=2", partial(body, kind=kind)) for kind in ["whole", *KINDS]]
    np.testing.assert_allclose(losses, losses[0][0], rtol=1e-12)


class Joined(nn.Module):
    """The sum of its two inputs."""

    def forward(self, x, ctx=None):
        return x[0] + x[1]

    def backward_input(self, dy, ctx):
        return dy, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", ["dp=2,tp=2", "dp=2,pp=2,tp=2"])
def test_ranks_that_share_layers_give_the_same_rows(dims, kind):
    losses, _, _ = tensor_models.trained_alone("plain")

    def body(mesh):
        tp = mesh.group("tp")
        made = tensor_models.layers("plain", tp=tp)
        num_stages = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = mm.PipelineParallel.partition(made, num_stages, mesh=mesh, times=[1.0] * len(made))
        pipe = mm.PipelineParallel(stages, 2, mesh=mesh, seed=tensor_models.SEED, dtype="float64")
        x, target = tensor_models.batch(0)
        (mine, goal), options = given(mesh, kind, [len(x) - 1, 1], x, target)
        loss = mm.parallel.VocabParallelCrossEntropy(tensor_models.VOCAB, group=tp)
        return pipe.train_step(mine, goal, loss=loss, **options)

    np.testing.assert_allclose(on_ranks(dims, body), losses[0], rtol=1e-12)


# -- wrong use: told in the first step, alike on all ranks, and the next step works ----------------


@pytest.fixture(params=["0", "1"])
def checks(request, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", request.param)


def refused(dims, wrong, error, *values):
    """Run `wrong(mesh, pipe)` on all ranks, which all must raise the same; then a step."""

    def body(mesh):
        pipe = make_pipeline(mesh, 2)
        raised = error_of(lambda: wrong(mesh, pipe))
        assert type(raised) is error, raised
        assert raised.agreed
        names(str(raised), *values)
        assert_nothing_left(mesh)
        loss = pipe.train_step(*batch(0, 12), loss=nn.cross_entropy)
        assert loss == pytest.approx(train_alone(1, 12).losses[0], rel=1e-12)
        return str(raised)

    (text,) = set(on_ranks(dims, body))
    return text


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("call", ["train_step", "evaluate"])
@pytest.mark.parametrize("counts", [[6, 6], [5, 7]])
@pytest.mark.parametrize("dims", ["dp=2", "dp=2,pp=2"])
def test_own_rows_without_a_word(dims, counts, call):
    def wrong(mesh, pipe):
        parts, _ = given(mesh, "local", counts, *batch(0, 12))
        getattr(pipe, call)(*parts, loss=nn.cross_entropy)

    refused(dims, wrong, MismatchError, 'rows="local"', "DTensor.from_local")


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("dims", ["dp=2", "dp=2,pp=2"])
def test_whole_batches_beside_own_rows(dims):
    def wrong(mesh, pipe):
        parts, options = batch(0, 12), {}
        if mesh.coord("dp"):
            parts, options = given(mesh, "local", [6, 6], *parts)
        pipe.train_step(*parts, loss=nn.cross_entropy, **options)

    text = refused(dims, wrong, MismatchError, 'rows="local"', "whole", "own rows")
    assert text.count("\n") == 2


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("what", ["x", "target", "rows"])
@pytest.mark.parametrize("dims", ["dp=2,pp=2", "dp=2,x=2"])
def test_ranks_of_a_replica_that_give_different_rows(dims, what):
    """Such as by their rank in the mesh, where it is the place along dp that counts."""

    def wrong(mesh, pipe):
        (x, target), options = given(mesh, "local", [4, 8], *batch(0, 12))
        if mesh.rank == 3:
            x = x[::-1] if what == "x" else x[:5] if what == "rows" else x
            target = target[::-1] if what == "target" else target[:5] if what == "rows" else target
        pipe.train_step(x, target, loss=nn.cross_entropy, **options)

    text = refused(dims, wrong, MismatchError, "replica 1", "target" if what == "rows" else what)
    assert re.search(r"\n +ranks \[2\]: .*\n +ranks \[3\]: ", text)


@pytest.mark.parametrize(
    ("wrong", "error", "values"),
    [
        ("columns", ModuleError, ("x", "x.redistribute('dp=S0", "dp=S1")),
        ("copies", ModuleError, ("x", "x.redistribute('dp=S0", "dp=R")),
        ("another mesh", ModuleError, ("x", "q=2", "redistribute", "mesh=")),
        ("beside whole targets", ModuleError, ("x", "target", 'rows="local"', "x.full()")),
        ("mixed tree", ModuleError, ("x", "a DTensor")),
        ("cut", ModuleError, ("x", "Microbatches", 'rows="local"')),
        ("misspelt", ModuleError, ("rows=", "'own'", '"whole"', '"local"')),
        ("targets of other rows", ShapeError, ("x", "target", 6, 5)),
        ("nothing at all", ShapeError, ("mean", "rows")),
        ("other dtype", MismatchError, ("x", "float32", "float64")),
        ("a negative count", ModuleError, ("count", -1.0)),
    ],
)
def test_arguments_that_do_not_fit(wrong, error, values):
    class Negative(nn.CrossEntropy):
        def count(self, target):
            return -1.0

    def body(mesh, pipe):
        x, target = batch(0, 12)
        (mine, goal), rows = given(mesh, "local", [6, 6], x, target)
        split = mm.DTensor.from_local(mine.copy(), mesh, "dp=S0")
        loss = nn.cross_entropy
        if wrong == "columns":
            mine, rows = mm.distribute(x, mesh, "dp=S1"), {}
        elif wrong == "copies":
            mine, rows = mm.distribute(x, mesh, "dp=R"), {}
        elif wrong == "another mesh":
            with mm.DeviceMesh("q=2") as other:
                split = mm.DTensor.from_local(mine.copy(), other, "q=S0")
                pipe.train_step(split, goal, loss=loss)
        elif wrong == "beside whole targets":
            mine, goal, rows = split, target, {}
        elif wrong == "mixed tree":
            mine, rows = (split, mine), {}
        elif wrong == "cut":
            mine, goal = mm.Microbatches([mine]), mm.Microbatches([goal])
        elif wrong == "misspelt":
            rows = {"rows": "own"}
        elif wrong == "targets of other rows":
            goal = goal[:5]
        elif wrong == "nothing at all":
            mine, goal = mine[:0], goal[:0]
        elif wrong == "other dtype":
            mine = mine.astype("float32") if mesh.rank else mine
        else:
            loss = Negative()
        pipe.train_step(mine, goal, loss=loss, **rows)

    refused("dp=2", body, error, *values)


@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_that_fails_beside_ranks_that_differ(odd):
    """It comes to the exchange of rows once, at the end, and the others came to it before."""

    def wrong(mesh, pipe):
        (x, target), options = given(mesh, "local", [4, 8], *batch(0, 12))
        if mesh.rank == 2:
            x = x[::-1]
        loss = nn.cross_entropy if mesh.rank != odd else "no loss"
        pipe.train_step(x, target, loss=loss, **options)

    refused(
        "dp=2,x=2", wrong, MismatchError if odd == 0 else ModuleError, "x" if odd == 0 else "loss="
    )


@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2"])
def test_what_one_rank_lacks_is_said_on_all(dims):
    """The others know only that a replica's rows are missing."""

    def wrong(mesh, pipe):
        (x, target), options = given(mesh, "local", [4, 4, 4], *batch(0, 12))
        pipe.train_step(
            None if mesh.rank == 1 + mesh.contains_dim("pp") else x,
            target,
            loss=nn.cross_entropy,
            **options,
        )

    text = refused(dims, wrong, ShapeError, f"rank {1 + ('pp' in dims)}", "stage", "x")
    assert len(text.splitlines()) == 1


def test_a_replica_that_fails_ends_the_step_on_all():
    def body(mesh):
        trap = Trap()
        model = mm.DataParallel(
            nn.Sequential([*layers(), trap]),
            mesh,
            loss=nn.cross_entropy,
            seed=SEED,
            dtype="float64",
        )
        parts, options = given(mesh, "local", [1, 6, 2], *batch(0, 9))
        losses = []
        for step in range(2):
            if step and mesh.rank == 1:
                trap.arm("B", 0)
            if step:
                error = error_of(lambda: model.train_step(*parts, **options))
                assert type(error) is StageError
                assert "failed on rank 1" in str(error)
                trap.disarm()
            model.step = 0
            losses.append(model.train_step(*parts, **options))
        assert losses[0] == losses[1]

    on_ranks("dp=3", body)


def test_a_forward_of_no_rows_anywhere():
    def body(mesh):
        x = batch(0, 0)[0]
        return make_pipeline(mesh, 2).forward(x, rows="local", everywhere=True).shape

    assert set(on_ranks("dp=2,pp=2", body)) == {(0, CLASSES)}
