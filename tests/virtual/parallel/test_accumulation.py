"""Several steps that make one of the optimizer, and gradients by name, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, ModuleStateError, StageError
from mpimesh.parallel import Accumulation, reduce_gradients
from tests.helpers.parallel_models import SEED, batch, cut, layers, make_pipeline, on_ranks
from tests.helpers.parallel_traps import Trap, error_of
from tests.helpers.raises import raises

STEPS, BATCHES = 3, 8


def rows_of(step):
    return 5 + step % 3


def trained_alone(max_norm=None):
    """Mean losses, and the state, of groups of 3, 3 and 2 steps with batches of other rows."""
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    adam = optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for steps in np.array_split(np.arange(BATCHES), [3, 6]):
        adam.zero_grad()
        total = 0.0
        for step in steps.tolist():
            x, target = batch(step, rows_of(step))
            value, gradient = nn.cross_entropy.value_and_grad(
                model.forward(x, nn.Context(step=step)), target, denominator=len(x) * len(steps)
            )
            context = nn.Context(step=step)
            model.forward(x, context)
            model.backward(gradient, context)
            total += value
        if max_norm is not None:
            optim.clip_grad_norm(model.parameters(), max_norm)
        adam.step()
        losses.append(total)
    return losses, model.state_dict()


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("dims", ["dp=1", "dp=3", "pp=2", "dp=2,pp=2"])
def test_a_mean_of_losses_and_a_remainder(dims, zero, max_norm):
    losses, state = trained_alone(max_norm)

    def body(mesh):
        pipe = make_pipeline(mesh, 2)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer = adam if zero is None else mm.ParallelOptimizer(adam, pipe, zero=zero)
        accumulation = Accumulation(pipe, STEPS, optimizer=optimizer, max_norm=max_norm)
        got: list[float | None] = []
        for step in range(BATCHES):
            loss = accumulation.train_step(*batch(step, rows_of(step)), loss=nn.cross_entropy)
            assert (loss is None) == ((step + 1) % STEPS > 0)
            assert accumulation.pending == (step + 1) % STEPS
            got += [] if loss is None else [loss]
        got.append(accumulation.flush())
        assert accumulation.flush() is None
        assert got == pytest.approx(losses, rel=1e-9)
        for name, values in pipe.full_state_dict().items():
            np.testing.assert_allclose(values, state[name], rtol=1e-7, atol=1e-10, err_msg=name)
        pipe.check_replicas()

    on_ranks(dims, body)


def test_gradients_are_reduced_once():
    def body(mesh):
        model = make_pipeline(mesh, 1, bucket_bytes=1 << 20)
        sgd = optim.SGD(model.parameters(), lr=0.1)
        accumulation = Accumulation(model, 4, optimizer=sgd)
        moved = []
        for step in range(6):
            before = mesh.traffic().bytes["all_reduce"] if step else 0
            accumulation.train_step(*batch(step, 8), loss=nn.cross_entropy)
            moved.append(mesh.traffic().bytes["all_reduce"] - before)
        before = mesh.traffic().bytes["all_reduce"]
        accumulation.flush()
        nbytes = sum(parameter.value().nbytes for parameter in model.parameters())
        assert max(moved[1:3]) < 500
        assert moved[3] > nbytes / 2
        assert mesh.traffic().bytes["all_reduce"] - before > nbytes / 2

    on_ranks("dp=2", body)


def test_a_step_that_fails_drops_what_was_added_up():
    def body(mesh):
        trap = Trap()
        stages = cut(1, [*layers(), trap])
        model = make_pipeline(mesh, 1, stages=stages)
        sgd = optim.SGD(model.parameters(), lr=0.0)
        accumulation = Accumulation(model, 2, optimizer=sgd)
        options = {"loss": nn.cross_entropy}
        means = []
        for fails in (False, True, False):
            model.step = 0
            assert accumulation.train_step(*batch(0, 8), **options) is None
            if fails and mesh.rank:
                trap.arm("B", 0)
            if fails:
                error = error_of(lambda: accumulation.train_step(*batch(1, 8), **options))
                assert type(error) is StageError
                trap.disarm()
                assert accumulation.pending == 0
                assert accumulation.flush() is None
            else:
                means.append(accumulation.train_step(*batch(1, 8), **options))
        assert means[0] == means[1]

    on_ranks("dp=2", body)


def test_wrong_use():
    def body(mesh):
        model = make_pipeline(mesh, 1)
        sgd = optim.SGD(model.parameters(), lr=0.1)
        for steps in (0, 1.5, True):
            with raises(ModuleError, "steps", steps):
                Accumulation(model, steps, optimizer=sgd)  # type: ignore[arg-type]
        with raises(ModuleError, "optimizer=", None):
            Accumulation(model, 2, optimizer=None)  # type: ignore[arg-type]
        with raises(ModuleError, "model"):
            Accumulation(nn.ReLU(), 2, optimizer=sgd)  # type: ignore[arg-type]
        accumulation = Accumulation(model, 2, optimizer=sgd)
        with model.no_sync(), raises(ModuleStateError, f"rank {mesh.rank}", "no_sync()"):
            accumulation.train_step(*batch(0, 8), loss=nn.cross_entropy)
        assert accumulation.train_step(*batch(0, 8), loss=nn.cross_entropy) is None
        if mesh.rank:
            model.zero_grad()
        with raises(MismatchError, "flush", "0 of 2", "1 of 2"):
            accumulation.flush()
        model.zero_grad()
        other = Accumulation(model, 2 + mesh.rank, optimizer=sgd)
        with raises(MismatchError, 0.5, 0.333333):
            other.train_step(*batch(0, 8), loss=nn.cross_entropy)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("dims", ["dp=1", "dp=2", "pp=2"])
@pytest.mark.parametrize("zero", [None, 1, 3])
def test_steps_of_others_do_not_come_among_those_that_wait(dims, zero):
    """All ranks refuse the first such step; then what is taken anew is right."""

    def body(mesh):
        model = make_pipeline(mesh, 1)
        optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
        if zero is not None:
            optimizer = mm.ParallelOptimizer(optimizer, model, zero=zero)
        options: dict[str, Any] = {"loss": nn.cross_entropy}
        mine = Accumulation(model, 3, optimizer=optimizer)
        twin = Accumulation(model, 3, optimizer=optimizer)

        def plain():
            model.train_step(*batch(1, 8), **options, optimizer=optimizer)

        def plain_under_no_sync():
            with model.no_sync():
                model.train_step(*batch(1, 8), **options)

        def of(accumulation):
            return partial(accumulation.train_step, *batch(0, 8), **options)

        for first, second, *values in (
            (of(mine), plain, "an Accumulation", "the model", "flush()"),
            (of(mine), plain_under_no_sync, "an Accumulation", "no_sync()"),
            (of(mine), of(twin), "an Accumulation", "zero_grad()"),
            (plain_under_no_sync, of(mine), "the model under no_sync()", "an Accumulation"),
        ):
            first()
            assert mine.pending == (first is not plain_under_no_sync)
            assert twin.pending == 0
            with raises(ModuleStateError, 1, *values) as caught:
                second()
            assert caught.value.agreed
            assert mine.pending == model.buckets.begun == 0
        before = model.step
        assert [of(mine)() is None for _ in range(3)] == [True, True, False]
        plain()
        assert of(twin)() is None
        assert mine.flush() is None
        assert twin.flush() is not None
        assert model.step == before + 5

    on_ranks(dims, body)


# -- by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", [None, 1, 2.5])
@pytest.mark.parametrize("size", [1, 3])
def test_gradients_by_name(size, divisor):
    """A rank without one takes part with zeros, and counts."""

    def gradients(rank):
        rng = np.random.default_rng(rank)
        return {
            "head": rng.normal(size=(2, 3)) if rank != 1 else None,
            "bias": rng.normal(size=()),
            **({"only.last": rng.normal(size=4).astype("float32")} if rank == size - 1 else {}),
            "nobody": None,
        }

    def body(mesh):
        mine = gradients(mesh.rank)
        before = {name: None if one is None else one.copy() for name, one in mine.items()}
        got = reduce_gradients(mine, mesh.group("dp"), divisor=divisor)
        assert list(got) == ["bias", "head", "only.last"]
        for name, values in got.items():
            parts = [one for r in range(size) if (one := gradients(r).get(name)) is not None]
            assert values.dtype == parts[0].dtype
            assert values.shape == parts[0].shape
            by = size if divisor is None else divisor
            np.testing.assert_allclose(values, sum(parts) / by, rtol=1e-6, atol=1e-12)
        for name, one in mine.items():
            kept = before[name]
            assert one is kept is None or np.array_equal(np.asarray(one), np.asarray(kept))
        assert reduce_gradients({}, mesh.group("dp")) == {}

    on_ranks(f"dp={size}", body)


@pytest.mark.parametrize(
    ("mine", "options", "error", "values"),
    [
        ({"w": np.zeros(3)}, {}, MismatchError, ("'w'", "(3,)", "(2,)")),
        ({"w": np.zeros(2, "float32")}, {}, MismatchError, ("'w'", "float32", "float64")),
        ({"w": 1.0}, {}, ModuleError, ("'w'", "1.0")),
        ([np.zeros(2)], {}, ModuleError, ("gradients",)),
        ({"w": np.zeros(2)}, {"divisor": 0}, ModuleError, ("divisor", 0)),
        ({"w": np.zeros(2)}, {"divisor": "two"}, ModuleError, ("divisor", "'two'")),
        ({"w": np.zeros(2)}, {"divisor": 3}, MismatchError, ("divisor", 3.0, 2.0)),
    ],
)
def test_gradients_that_do_not_fit(mine, options, error, values):
    def body(mesh):
        given, more = (mine, options) if mesh.rank else ({"w": np.zeros(2)}, {})
        with raises(error, *values) as caught:
            reduce_gradients(given, mesh.group("dp"), **more)
        assert caught.value.agreed
        assert np.array_equal(reduce_gradients({"w": np.ones(2)}, mesh.group())["w"], np.ones(2))

    on_ranks("dp=2", body)
