"""Batches that each rank reads its own rows of, against indices drawn in one process."""

from __future__ import annotations

import json
import threading
import time
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.data import Batches, shuffled
from mpimesh.errors import (
    ClosedError,
    MeshError,
    MismatchError,
    ModuleError,
    ShapeError,
    StageError,
    UnknownNameError,
)
from tests.helpers.depth import deep
from tests.helpers.parallel_models import SEED, layers, make_pipeline, on_ranks
from tests.helpers.raises import raises

ROWS = 23
X = np.random.default_rng(0).normal(size=(ROWS, 6))
Y = np.random.default_rng(1).integers(0, 5, ROWS)


# -- the order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 31, 1000, 65537])
def test_an_order_has_each_row_once(rows):
    for epoch in range(3):
        order = shuffled(np.arange(rows), rows, (7, epoch))
        assert np.array_equal(np.sort(order), np.arange(rows))
        part = shuffled(np.arange(rows)[rows // 3 :], rows, (7, epoch))
        assert np.array_equal(part, order[rows // 3 :])
    if rows > 8:
        assert not np.array_equal(order, shuffled(np.arange(rows), rows, (7, 1)))
        assert not np.array_equal(order, shuffled(np.arange(rows), rows, (8, 2)))


def test_an_order_of_very_many_rows_takes_no_memory():
    rows = 10**15 + 37
    places = np.array([[0, 1, 2], [rows - 3, rows - 2, rows - 1]])
    numbers = shuffled(places, rows, (0, 0))
    assert numbers.shape == places.shape
    assert len(set(numbers.flat)) == 6
    assert ((numbers >= 0) & (numbers < rows)).all()


@pytest.mark.parametrize("rows", [3, 4])
def test_all_orders_of_a_few_rows_are_alike_frequent(rows):
    orders = list(permutations(range(rows)))
    counts = dict.fromkeys(orders, 0)
    tries = 100 * len(orders)
    for seed in range(tries):
        counts[tuple(shuffled(np.arange(rows), rows, (seed, 0)).tolist())] += 1
    chi = sum((count - 100) ** 2 / 100 for count in counts.values())
    # Above the 99.99th percentile of the distribution that fair orders have.
    assert chi < {3: 25.7, 4: 57.1}[rows]


def test_neighbours_in_an_order_have_nothing_in_common():
    rows = 100_000
    order = shuffled(np.arange(rows), rows, (3, 1)) / rows
    for other in (np.roll(order, 1), np.roll(order, 2), np.arange(rows) / rows):
        assert abs(np.corrcoef(order, other)[0, 1]) < 5 / rows**0.5


# -- batches ---------------------------------------------------------------------------------------


def drawn(batch_size, *, epochs, seed=0, shuffle=True, drop_last=False, rows=ROWS):
    """The rows of each batch, by one process."""
    batches = []
    for epoch in range(epochs):
        order = shuffled(np.arange(rows), rows, (seed, epoch)) if shuffle else np.arange(rows)
        for first in range(0, rows, batch_size):
            batches.append(order[first : first + batch_size])
            if drop_last and len(batches[-1]) < batch_size:
                batches.pop()
    return batches


def sources(tmp_path):
    path = tmp_path / "x.bin"
    X.tofile(path)
    mapped = np.memmap(path, X.dtype, "r", shape=X.shape)
    return {
        "array": X,
        "file": mapped,
        "tuple": (mapped, Y),
        "dict": {"x": X, "nested": (Y, X)},
        "function": lambda rows: (X[rows], Y[rows]),
        "read-only": lambda rows: np.broadcast_to(X[0], (len(rows), 6)),
    }


def expected_of(name, rows):
    x, y = X[rows], Y[rows]
    return {
        "tuple": (x, y),
        "dict": {"x": x, "nested": (y, x)},
        "function": (x, y),
        "read-only": np.broadcast_to(X[0], (len(rows), 6)),
    }.get(name, x)


def same(got, expected, mesh):
    """Compare a batch with the whole one, and the place of this rank's rows in it."""
    if isinstance(expected, tuple):
        assert isinstance(got, tuple)
        for one, other in zip(got, expected, strict=True):
            same(one, other, mesh)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, other in expected.items():
            same(got[key], other, mesh)
    else:
        assert got.dtype == expected.dtype
        assert type(got.local) is np.ndarray
        np.testing.assert_array_equal(got.full(), expected)
        if mesh.contains_dim("dp"):
            parts = np.array_split(expected, mesh.dim_size("dp"))
            np.testing.assert_array_equal(got.local, parts[mesh.coord("dp")])
        got.local[...] = 0


@pytest.mark.parametrize("name", ["array", "file", "tuple", "dict", "function", "read-only"])
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ("dp=1", {}),
        ("dp=3", {"shuffle": False}),
        ("dp=2,pp=2", {"drop_last": True, "seed": 4}),
        ("tp=2", {"prefetch": 0}),
        ("dp=4", {"prefetch": 3}),
    ],
)
def test_every_mesh_reads_the_same_batches(dims, options, name, tmp_path):
    """The last of an epoch has 3 of 5 rows, so that a rank of dp=4 has none."""
    settings = {key: value for key, value in options.items() if key != "prefetch"}
    expected = drawn(5, epochs=2, **settings)
    given = sources(tmp_path)

    def body(mesh):
        source = given[name]
        rows = ROWS if callable(source) else None
        with Batches(source, mesh, 5, rows=rows, **options) as b:
            assert len(b) == len(expected) / 2
            got = 0
            for epoch in range(2):
                assert b.epoch == epoch
                for batch in b:
                    same(batch, expected_of(name, expected[got]), mesh)
                    got += 1
            assert b.position == got == len(expected)
            same(b.next(), expected_of(name, drawn(5, epochs=3, **settings)[got]), mesh)

    on_ranks(dims, body)
    np.testing.assert_array_equal(X, np.random.default_rng(0).normal(size=(ROWS, 6)))


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_batch_in_parts_is_the_batch(parts):
    """The last one of 3 rows has parts without any."""
    expected = [part for whole in drawn(5, epochs=2) for part in np.array_split(whole, parts)]

    def body(mesh):
        with Batches(X, mesh, 5, parts=parts) as batches:
            assert len(batches) == 5 * parts
            got = [batch.full() for _ in range(2) for batch in batches]
            with raises(ModuleError, "parts", 1):
                batches.load_state_dict({**batches.state_dict(), "parts": 1})
        for one, rows in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, X[rows])

    on_ranks("dp=2", body)


def test_each_rank_reads_its_own_rows_only():
    def body(mesh):
        read = []

        def source(rows):
            read.extend(rows.tolist())
            return X[rows]

        with Batches(source, mesh, 8, rows=ROWS, seed=2, prefetch=0) as batches:
            list(batches)
        return read

    read = on_ranks("dp=2,pp=2", body)
    assert read[0] == read[1]
    assert read[2] == read[3]
    assert sorted(read[0] + read[2]) == list(range(ROWS))


def test_a_step_takes_them():
    """On any mesh the training of one rank, dropout and the last batch of 3 rows included."""

    def body(mesh):
        pipe = make_pipeline(mesh, 2)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        losses = []
        with Batches((X, Y), mesh, 5, seed=3) as batches:
            for _ in range(2):
                for x, target in batches:
                    losses.append(pipe.train_step(x, target, loss=nn.cross_entropy, optimizer=adam))
        return losses

    alone = nn.Sequential(layers())
    alone.materialize(seed=SEED, dtype=np.float64)
    adam = optim.Adam(alone.parameters(), lr=0.01)
    expected = []
    for step, rows in enumerate(drawn(5, epochs=2, seed=3)):
        context = nn.Context(step=step)
        adam.zero_grad()
        value, gradient = nn.cross_entropy.value_and_grad(
            alone.forward(X[rows], context), Y[rows], denominator=len(rows)
        )
        alone.backward(gradient, context)
        adam.step()
        expected.append(value)
    for dims in ("dp=1", "dp=4", "dp=2,pp=2"):
        for losses in on_ranks(dims, body):
            np.testing.assert_allclose(losses, expected, rtol=1e-10)


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("at", [0, 3, 5, 7])
def test_a_training_goes_on_elsewhere(at, as_file, tmp_path):
    """Also in the middle of an epoch, with batches read ahead on both sides."""
    path = tmp_path / "batches.npz"

    def first(mesh):
        with Batches(X, mesh, 5, seed=1) as batches:
            for _ in range(at):
                batches.next()
            state = batches.state_dict()
        assert all(type(value) is int for value in state.values())
        if as_file and mesh.rank == 0:
            arrays: dict[str, Any] = dict(state)
            np.savez(path, **arrays)
        return json.dumps(state)

    (state,) = set(on_ranks("dp=3", first))
    expected = drawn(5, epochs=3, seed=1)

    def second(mesh):
        with Batches(X, mesh, 5, seed=1) as batches:
            batches.next()
            batches.load_state_dict(np.load(path) if as_file else json.loads(state))
            assert batches.position == at
            rest = [batch.full() for batch in batches]
            assert len(rest) == 5 - at % 5
            for number, got in enumerate([*rest, batches.next().full()], at):
                np.testing.assert_array_equal(got, X[expected[number]])

    on_ranks("dp=2,pp=1", second)


def test_the_next_batch_is_read_while_this_one_trains():
    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            read = threading.Semaphore(0)
            threads = set()

            def source(rows):
                threads.add(threading.current_thread())
                read.release()
                return X[rows]

            with Batches(source, mesh, 5, rows=ROWS) as batches:
                assert not threads  # nothing is read before somebody asks
                batches.next()
                for _ in range(2):
                    assert read.acquire(timeout=10)
                assert not read.acquire(timeout=0.1)
                batches.next()
                assert read.acquire(timeout=10)
            assert len(threads) == 1
            assert threading.current_thread() not in threads
            (thread,) = threads
            thread.join(10)
            assert not thread.is_alive()

    mm.run_virtual(1, main)


@pytest.mark.parametrize("prefetch", [0, *deep(1), 3])
@pytest.mark.parametrize("broken_at", [*deep(0), 1, 4])
@pytest.mark.parametrize("dims", [*deep("dp=1"), "dp=2", "dp=2,pp=2", *deep("pp=3")])
def test_an_error_of_one_rank_s_reading_is_raised_on_all(dims, broken_at, prefetch):
    """By the first batch, or by the step that takes a later one; and it is not for ever."""

    def body(mesh):
        disk = {"broken": mesh.rank == 0}

        def source(rows):
            if disk["broken"] and number[0] >= broken_at:
                raise OSError("the disk is gone")
            number[0] += 1
            return X[rows], Y[rows]

        number = [0]
        model = make_pipeline(mesh, 1)
        expected = drawn(5, epochs=1)
        with Batches(source, mesh, 5, rows=ROWS) as batches:
            for _ in range(broken_at):
                x, target = batches.next()
                model.train_step(x, target, loss=nn.cross_entropy)
            assert batches.position == broken_at
            for _ in range(2):
                if broken_at == 0:
                    with pytest.raises(OSError, match="the disk is gone"):
                        batches.next()
                    continue
                x, target = batches.next()
                assert batches.position == broken_at + 1
                with raises(StageError, "rank 0", "OSError", "the disk is gone") as caught:
                    model.train_step(x, target, loss=nn.cross_entropy)
                assert caught.value.agreed
                with raises(StageError, "rank 0", "OSError"):
                    model.evaluate(x, target, loss=nn.cross_entropy)
                with raises(StageError, "rank 0", "OSError"):
                    model.forward(x)
                batches.load_state_dict({**batches.state_dict(), "position": broken_at})
            assert batches.position == broken_at
            disk["broken"] = False
            x, target = batches.next()
            np.testing.assert_array_equal(x.full(), X[expected[broken_at]])
            model.train_step(x, target, loss=nn.cross_entropy)

    on_ranks(dims, body)


@pytest.mark.parametrize(
    "wrong", [lambda rows: X[rows], lambda rows: {"x": X[rows]}, lambda rows: [X[rows], Y[rows]]]
)
def test_rows_that_are_built_differently_later_are_raised_on_all(wrong):
    def body(mesh):
        calls = []

        def source(rows):
            calls.append(len(rows))
            return wrong(rows) if mesh.rank == 1 and len(calls) == 3 else (X[rows], Y[rows])

        model = make_pipeline(mesh, 1)
        with Batches(source, mesh, 5, rows=ROWS, prefetch=0) as batches:
            for number in range(5):
                x, target = batches.next()
                if number == 2:
                    with raises(ModuleError, "rank 1", "rows"):
                        model.train_step(x, target, loss=nn.cross_entropy)
                else:
                    model.train_step(x, target, loss=nn.cross_entropy)

    on_ranks("dp=2", body)


def test_rows_that_could_not_be_read_say_so_to_who_looks_at_them():
    def body(mesh):
        def source(rows):
            if len(calls) == 1:
                raise OSError("the disk is gone")
            calls.append(rows)
            return {"x": X[rows]}

        calls = []
        with Batches(source, mesh, 5, rows=ROWS) as batches:
            batches.next()
            x = batches.next()["x"]
        for look in (lambda: x.local, lambda: x[0], lambda: np.asarray(x), lambda: len(x)):
            with pytest.raises(OSError, match="the disk is gone"):
                look()
        assert "the disk is gone" in repr(x)

    on_ranks("dp=1", body)


def test_ranks_whose_functions_build_batches_differently():
    def body(mesh):
        def source(rows):
            return X[rows] if mesh.rank == 1 else (X[rows], Y[rows])

        with Batches(source, mesh, 6, rows=ROWS) as batches:
            for _ in range(2):
                with raises(MismatchError, "rank 1", "array", "rank 0", "(array, array)") as caught:
                    batches.next()
                assert caught.value.agreed
                assert batches.position == 0

    on_ranks("dp=2", body)


# -- for a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["arrays", *deep("function", "dict of arrays"), "dict of a function"]
)
@pytest.mark.parametrize("dims", [*deep("dp=2", "pp=2"), "pp=4", "dp=2,pp=3"])
def test_ranks_read_what_their_stages_take(dims, form):
    """The training is that with batches of which all ranks read all."""

    def body(mesh):
        seen = []

        class Counted(np.ndarray):
            title: str

            def __getitem__(self, rows):
                seen.append((self.title, len(rows)))
                return np.asarray(super().__getitem__(rows))

        def counted(title, array):
            view = array.view(Counted)
            view.title = title
            return view

        def read(rows):
            seen.append(("both", len(rows)))
            return (X[rows], Y[rows]) if "dict" not in form else {"x": X[rows], "target": Y[rows]}

        x, y = counted("x", X), counted("target", Y)
        arrays = (x, y) if "dict" not in form else {"x": x, "target": y}
        source, rows = (read, ROWS) if "function" in form else (arrays, None)
        pipe = make_pipeline(mesh, 2)
        losses, expected = [], []
        num_stages = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stage = mesh.coord("pp") if num_stages > 1 else 0
        is_first, is_last = stage == 0, stage == num_stages - 1
        with Batches(source, mesh, 5, model=pipe, seed=3, rows=rows) as batches:
            for batch in batches:
                x, target = batch if isinstance(batch, tuple) else (batch["x"], batch["target"])
                assert (x is not None) == is_first
                assert (target is not None) == is_last
                losses.append(pipe.train_step(x, target, loss=nn.cross_entropy))
        titles = {title for title, _ in seen}
        if "function" in form:
            assert titles == ({"both"} if is_first or is_last else set())
        else:
            assert titles == ({"x"} if is_first else set()) | ({"target"} if is_last else set())
        if not (is_first or is_last):
            assert not seen
        pipe = make_pipeline(mesh, 2)
        with Batches((X, Y), mesh, 5, seed=3) as batches:
            for x, target in batches:
                expected.append(pipe.train_step(x, target, loss=nn.cross_entropy))
        assert losses == expected

    on_ranks(dims, body)


def test_named_inputs_of_a_model():
    """A stage in the middle takes its own input, and nothing else."""

    def body(mesh):
        stages = [mm.PipelineStage(0).add_layer(nn.Linear(6, 4))]
        stages += [mm.PipelineStage(1, inputs=("more",)).add_layer(nn.Concat())]
        stages += [mm.PipelineStage(2).add_layer(nn.Linear(7, 5))]
        pipe = mm.PipelineParallel(stages, 2, mesh=mesh, dtype="float64")
        more = np.random.default_rng(2).normal(size=(ROWS, 3))
        source = {"x": X, "target": Y, "more": more}
        with Batches(source, mesh, 5, model=pipe) as batches:
            for batch in batches:
                took = {name for name, one in batch.items() if one is not None}
                assert took == [{"x"}, {"more"}, {"target"}][mesh.rank]
                inputs = {"more": batch["more"]} if batch["more"] is not None else {}
                loss = pipe.train_step(
                    batch["x"], batch["target"], inputs=inputs, loss=nn.cross_entropy
                )
                whole = {
                    name: array[drawn(5, epochs=1)[batches.position - 1]]
                    for name, array in source.items()
                }
                assert loss == pytest.approx(
                    pipe.evaluate(
                        whole["x"],
                        whole["target"],
                        inputs={"more": whole["more"]},
                        loss=nn.cross_entropy,
                    )
                )

    on_ranks("pp=3", body)


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize(
    ("form", "values"),
    [
        (lambda rows: (X[rows], Y[rows], Y[rows]), ("(x, target)", "(array, array, array)")),
        (lambda rows: {"x": X[rows], "y": Y[rows]}, ("'target'", "'y'")),
    ],
)
def test_batches_that_do_not_say_what_is_for_which_stage(form, values, as_function):
    def body(mesh):
        pipe = make_pipeline(mesh, 1)
        with raises(ModuleError, *values) as caught:
            source, rows = (form, ROWS) if as_function else (form(slice(None)), None)
            Batches(source, mesh, 5, rows=rows, model=pipe).next()
        assert caught.value.agreed

    on_ranks("pp=3", body)


def test_models_that_are_none():
    def body(mesh):
        pipe = make_pipeline(mesh, 1)
        with raises(ModuleError, "model", "Linear"):
            Batches(X, mesh, 5, model=nn.Linear(2, 2))  # type: ignore[arg-type]
        with raises(MismatchError, "PipelineParallel", "NoneType"):
            Batches(X, mesh, 5, model=pipe if mesh.rank else None)
        with mesh.copy() as other, raises(ModuleError, "another mesh"):
            Batches(X, other, 5, model=pipe)

    on_ranks("dp=2", body)


def test_closing():
    def body(mesh):
        started = time.perf_counter()

        def read(rows):
            time.sleep(0.05)
            return X[rows]

        slow = Batches(read, mesh, 5, rows=ROWS)
        slow.next()
        slow.close()
        slow.close()
        assert time.perf_counter() - started < 5
        for call in (slow.next, lambda: slow.load_state_dict({}), lambda: next(iter(slow))):
            with pytest.raises(ClosedError):
                call()
        assert slow.position == 1
        assert slow.state_dict()["position"] == 1
        assert "23 rows" in repr(slow)

    on_ranks("dp=2", body)


@pytest.mark.parametrize(
    ("source", "size", "options", "error", "values"),
    [
        ([1, 2], 2, {}, ModuleError, ("source", "list")),
        (X[0, 0], 2, {}, ModuleError, ("source",)),
        (np.array(1.0), 2, {}, ShapeError, ("source", "rows")),
        ((X, Y[:5]), 2, {}, ShapeError, ("source[0]", 23, "source[1]", 5)),
        (X, 0, {}, ModuleError, ("batch_size", 0)),
        (X, 2.5, {}, ModuleError, ("batch_size", 2.5)),
        (X, 24, {"drop_last": True}, ShapeError, (23, 24)),
        (X[:0], 2, {}, ShapeError, (0,)),
        (X, 2, {"rows": 4}, ModuleError, ("rows=", 4)),
        (X.take, 2, {}, ModuleError, ("function", "rows=")),
        (X, 2, {"parts": 3}, ModuleError, ("parts", 2, 3)),
        (X, 2, {"seed": -1}, ModuleError, ("seed", -1)),
        (X, 2, {"shuffle": "yes"}, ModuleError, ("shuffle", "'yes'")),
        (X, 2, {"prefetch": -1}, ModuleError, ("prefetch", -1)),
        (X, 2, {"dim": "pp"}, UnknownNameError, ("'pp'", "dim=")),
    ],
)
def test_arguments_that_are_refused(source, size, options, error, values):
    def body(mesh):
        with raises(error, *values) as caught:
            Batches(source, mesh, size, **options)
        assert caught.value.agreed
        assert len(Batches(X, mesh, 5)) == 5

    on_ranks("dp=2", body)


def test_what_ranks_give_differently_is_told_on_all():
    def body(mesh):
        odd = mesh.rank == 1
        for options in ({"seed": odd}, {"shuffle": odd}, {"drop_last": odd}):
            options = {key: int(v) if key == "seed" else v for key, v in options.items()}
            with raises(MismatchError, next(iter(options))):
                Batches(X, mesh, 5, **options)
        with raises(MismatchError, "batch_size"):
            Batches(X, mesh, 5 + odd)
        with raises(MismatchError, "float32"):
            Batches(X.astype("float32") if odd else X, mesh, 5)
        with raises(MismatchError, "22"):
            Batches(X[: ROWS - odd], mesh, 5)
        with pytest.raises(MeshError):
            Batches(X, mesh.mesh, 5)

    on_ranks("dp=3", body)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"seed": 9}, ("seed", 9, 0)),
        ({"rows": 22}, ("rows", 22, 23)),
        ({"position": -1}, ("position", -1)),
        ({"position": None}, ("position", None)),
        ({"more": 1}, ("position", "more")),
    ],
)
def test_a_state_of_another_order_is_refused(change, values):
    def body(mesh):
        with Batches(X, mesh, 5) as batches:
            batches.next()
            with raises(ModuleError, *values):
                batches.load_state_dict({**batches.state_dict(), **change})
            with raises(ModuleError, "position"):
                batches.load_state_dict(None)  # type: ignore[arg-type]
            assert batches.position == 1
            np.testing.assert_array_equal(batches.next().full(), X[drawn(5, epochs=1)[1]])

    on_ranks("dp=2", body)


@pytest.mark.parametrize(
    ("read", "error", "values"),
    [
        (lambda rows: X[rows[:-1]], ShapeError, (3, "(2, 6)")),
        (lambda rows: (X[rows], 1.0), ModuleError, ("rows[1]", "float")),
        (lambda rows: None, ModuleError, ("rows", "NoneType")),
    ],
)
def test_a_function_that_reads_something_else(read, error, values):
    def body(mesh):
        with Batches(read, mesh, 6, rows=ROWS) as batches, raises(error, *values):
            batches.next()

    on_ranks("dp=2", body)
