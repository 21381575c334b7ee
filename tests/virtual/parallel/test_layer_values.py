"""Values of parameters that are on a rank only while their layer runs, over nodes."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, ModuleStateError, StageError
from tests.helpers.depth import deep, examples
from tests.helpers.parallel_models import (
    assert_equal,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    state_of,
)
from tests.helpers.parallel_tied import tied_batch, tied_pipeline
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of, trapped_stages
from tests.helpers.raises import raises

pytestmark = pytest.mark.usefixtures("nodes_apart")


def course(mesh, stage, *, hybrid=False, give=lambda step: (batch(step, 13), {}), **options):
    """Train a few steps; return losses, values, state and outputs."""
    pipe = make_pipeline(mesh, **options)
    mm.fully_shard(pipe, mesh, stage=stage, hybrid=hybrid)
    optimizer = mm.ParallelOptimizer(optim.AdamW(pipe.parameters(), lr=0.01), pipe)
    losses = []
    for step in range(3):
        (x, target), rows = give(step)
        losses.append(
            pipe.train_step(x, target, loss=nn.cross_entropy, optimizer=optimizer, **rows)
        )
        losses.append(pipe.evaluate(x, target, loss=nn.cross_entropy, **rows))
    outputs = pipe.forward(x, everywhere=True, **rows)
    pipe.check_replicas()
    by_layer = [
        bucket.shard is not None and bucket.shard.values is None for bucket in pipe.buckets.buckets
    ]
    return losses, state_of(pipe), optimizer.full_state_dict(), outputs, by_layer


def same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert_equal(one[1], other[1])
    for name, values in one[2].items():
        np.testing.assert_array_equal(values, other[2][name], err_msg=name)
    if isinstance(one[3], mm.parallel.Microbatches):
        assert len(one[3]) == len(other[3])
        for mine, theirs in zip(one[3], other[3], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    else:
        np.testing.assert_array_equal(one[3], other[3])


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb1p", 1), ("interleaved", 2), ("zbv", 2)]


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dims=st.sampled_from(["dp=2", "dp=3", "dp=2,pp=2", "dp=3,pp=2"]),
    schedule=st.sampled_from(SCHEDULES),
    rows=st.integers(1, 13),
    num_microbatches=st.integers(2, 5),
    bucket_bytes=st.sampled_from([1, 300, 10**6]),
    data=st.data(),
)
def test_any_rows_and_schedule_give_the_bits_of_values_that_stay(
    dims, schedule, rows, num_microbatches, bucket_bytes, data
):
    """Also where replicas have fewer microbatches than others, or none."""
    name, chunks = schedule if "pp" in dims else ("1f1b", 1)
    replicas = int(dims[3])
    own = data.draw(st.none() | st.lists(st.integers(0, 7), min_size=replicas, max_size=replicas))

    def body(mesh, stage, hybrid=False):
        def give(step):
            x, target = batch(step, rows)
            if own is None or not sum(own):
                return (x, target), {}
            x, target = batch(step, sum(own))
            start = sum(own[: mesh.coord("dp")])
            mine = slice(start, start + own[mesh.coord("dp")])
            return (x[mine], target[mine]), {"rows": "local"}

        return course(
            mesh,
            stage,
            hybrid=hybrid,
            give=give,
            num_microbatches=num_microbatches,
            schedule=name,
            stages=cut(chunks * (2 if "pp" in dims else 1)),
            bucket_bytes=bucket_bytes,
        )

    wanted, found, hybrid = (
        on_ranks(dims, partial(body, stage=stage, hybrid=alike))
        for stage, alike in ((0, False), (3, False), (3, True))
    )
    for one, other, third in zip(wanted, found, hybrid, strict=True):
        same(one, other)
        same(one, third)
        assert all(other[4])
        assert not any(third[4])


@pytest.mark.parametrize("counts", [[3, 5, 2, 4, 1], [4], [2, 2, 2, 2]])
def test_microbatches_of_any_lengths(counts):
    def body(mesh, stage):
        def give(step):
            x, target = batch(step, sum(counts))
            ends = np.cumsum(counts)[:-1]
            return tuple(mm.parallel.Microbatches(np.split(one, ends)) for one in (x, target)), {}

        return course(mesh, stage, give=give)

    for one, other in zip(
        *(on_ranks("dp=3", partial(body, stage=stage)) for stage in (0, 3)), strict=True
    ):
        same(one, other)
        assert len(other[3]) == len(counts)


@pytest.mark.parametrize("dims", ["dp=2,pp=4", *deep("dp=2,pp=2", "dp=3,pp=2")])
def test_what_several_stages_share_stays(dims):
    """And what only one has is gathered for its layer."""

    def body(mesh, stage):
        pipe = tied_pipeline(mesh)
        mm.fully_shard(pipe, mesh, stage=stage)
        optimizer = mm.ParallelOptimizer(optim.AdamW(pipe.parameters(), lr=0.01), pipe)
        losses = [
            pipe.train_step(*tied_batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
            for step in range(3)
        ]
        pipe.check_replicas()
        kinds = {bucket.shard.values is None for bucket in pipe.buckets.buckets if bucket.shard}
        return losses, state_of(pipe), kinds

    kinds = set()
    for one, other in zip(
        *(on_ranks(dims, partial(body, stage=stage)) for stage in (0, 3)), strict=True
    ):
        assert one[0] == other[0]
        assert_equal(one[1], other[1])
        kinds |= other[2]
    assert kinds == {True, False}


@pytest.mark.parametrize("bucket_bytes", [1, 3000])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_rank_has_its_part_and_the_buckets_of_two_layers(bucket_bytes, num_microbatches):
    """At every moment of a step, forward and backward, by the parameters that have values."""
    depth, width = 12, 16

    def body(mesh):
        here: list[int] = []

        class Looks(nn.Linear):
            def forward(self, x, ctx=None):
                look()
                return super().forward(x, ctx)

            def backward_input(self, dy, ctx):
                look()
                return super().backward_input(dy, ctx)

        model = mm.fully_shard(
            nn.Sequential([Looks(width, width, bias=False) for _ in range(depth)]),
            mesh,
            loss=nn.mse_loss,
            dtype="float64",
            bucket_bytes=bucket_bytes,
            num_microbatches=num_microbatches,
        )

        def look():
            here.append(sum(one.data is not None for one in model.parameters()))

        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=1e-3), model)
        x = np.ones((6, width))
        for _ in range(2):
            model.train_step(x, x, optimizer=optimizer)
            assert not any(one.data is not None for one in model.parameters())
        buckets = model.buckets.buckets
        most = max(len(bucket.parameters) for bucket in buckets)
        assert len(here) == 2 * 2 * depth * num_microbatches
        assert max(here) <= 2 * most
        own = [bucket.shard.own.size for bucket in buckets if bucket.shard is not None]
        assert sum(own) <= depth * width**2 / 2
        values = model._engine.layer_values
        assert values.nbytes <= 3 * most * width**2 * 8 * 1.25
        return True

    assert all(on_ranks("dp=2", body))


@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("failing", range(4))
def test_a_rank_that_fails_in_a_layer_keeps_nobody_waiting(kind, failing):
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        mm.fully_shard(pipe, mesh)
        optimizer = mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.1), pipe)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        before = state_of(pipe)
        for call in range(4):
            if mesh.rank == failing:
                traps[mesh.coord("pp")].arm(kind, call)
            assert type(error_of(partial(train, *batch(1, 16)))) is StageError
            assert_equal(state_of(pipe), before)
            assert_nothing_left(mesh)
            for trap in traps:
                trap.disarm()
        assert not any(one.data is not None for one in pipe.parameters())
        train(*batch(1, 16))
        pipe.check_replicas()
        return pipe.full_state_dict()

    one, *others = on_ranks("dp=2,pp=2", body, rendezvous=True)
    for other in others:
        assert_equal(one, other)


def test_many_buckets_that_are_under_way_when_a_rank_fails_are_finished():
    """Two blocks of a dozen buckets each: the gathers of both have begun on the other rank."""

    def body(mesh):
        trap = Trap()
        blocks = [nn.GptBlock(8, 2) for _ in range(3)]
        model = mm.fully_shard(
            nn.Sequential(trap, *blocks), mesh, loss=nn.mse_loss, dtype="float64", bucket_bytes=1
        )
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
        x = np.random.default_rng(0).normal(size=(4, 3, 8))
        model.train_step(x, x, optimizer=optimizer)
        before = model.full_state_dict()
        if mesh.rank == 1:
            trap.arm("F", 0)
        train = partial(model.train_step, x, x, optimizer=optimizer)
        assert type(error_of(train)) is StageError
        trap.disarm()
        assert_equal(model.full_state_dict(), before)
        train()
        model.check_replicas()
        return len(model.buckets.buckets)

    assert on_ranks("dp=2", body)[0] > 2 * 16


def test_values_are_loaded_rebuilt_and_given_back():
    def body(mesh):
        model = mm.fully_shard(
            nn.Sequential(layers()), mesh, loss=nn.cross_entropy, dtype="float64", bucket_bytes=300
        )
        optimizer = mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=0.01), model)
        model.train_step(*batch(0, 9), optimizer=optimizer)
        before = model.full_state_dict()
        model.load_state_dict({name: values * 0.5 for name, values in before.items()})
        half = model.full_state_dict()
        assert all((half[name] == values * 0.5).all() for name, values in before.items())
        model.load_state_dict(before)
        model.parameters()[0].requires_grad = False
        model.rebuild_buckets()
        assert_equal(model.full_state_dict(), before)
        model.train_step(*batch(1, 9), optimizer=optimizer)
        after = model.full_state_dict()
        names = list(before)
        assert (after[names[0]] == before[names[0]]).all()
        assert (after[names[1]] != before[names[1]]).any()
        model.tune_buckets()
        assert_equal(model.full_state_dict(), after)
        expected = model.forward(batch(2, 5)[0])
        inner = model.into_inner()
        assert isinstance(inner, nn.Sequential)
        inner.set_training(False)
        assert_equal({name: one.data for name, one in inner.named_parameters()}, after)
        np.testing.assert_allclose(inner.forward(batch(2, 5)[0]), expected, rtol=1e-12)
        return True

    assert all(on_ranks("dp=3", body))


def test_a_layer_outside_of_a_step_tells_what_to_call():
    def body(mesh):
        net = nn.Sequential(layers())
        model = mm.fully_shard(net, mesh, loss=nn.cross_entropy, dtype="float64")
        with raises(ModuleStateError, "'weight'", "step", "into_inner()", "forward()"):
            net.layers[0].forward(batch(0, 3)[0])
        with raises(ModuleStateError, "'weight'", "full_state_dict()", "load_state_dict()"):
            model.parameters()[0].value()
        assert model.parameters()[0].dtype == np.float64
        for take in (copy.deepcopy, pickle.dumps, partial(mm.DataParallel, mesh=mesh)):
            with raises(ModuleStateError, "into_inner()"):
                take(net)
        with raises(ModuleStateError, "'weight'", "into_inner()"):
            net.materialize(seed=1)
        inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        mm.fully_shard(inner, mesh, loss=nn.mse_loss, dtype="float64")
        with raises(ModuleStateError, "Linear(4, 4)", "step", "into_inner()", "forward()"):
            inner.forward(np.ones((3, 4)))
        return mesh.rank

    assert on_ranks("dp=2", body) == [0, 1]


def test_a_model_whose_mesh_is_closed_cannot_be_given_back():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            model = mm.fully_shard(nn.Sequential(layers()), mesh, loss=nn.cross_entropy)
        with raises(ModuleStateError, "into_inner()", "closed"):
            model.into_inner()
        return True

    assert mm.run_virtual(2, main) == [True, True]


def test_a_copy_of_layers_asks_nobody():
    def body(mesh):
        layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
        model = mm.fully_shard(layers, mesh, loss=nn.mse_loss, dtype="float64")
        x = np.ones((3, 4))
        expected = model.forward(x)
        with model.gathered():
            twin = copy.deepcopy(layers)
        np.testing.assert_allclose(twin.forward(x), expected, rtol=1e-12)
        return True

    assert all(on_ranks("dp=2", body))


def test_values_are_read_and_written_where_all_are_gathered():
    def body(mesh):
        model = mm.fully_shard(
            nn.Sequential(layers()), mesh, loss=nn.cross_entropy, dtype="float64", bucket_bytes=300
        )
        before = model.full_state_dict()
        with model.gathered():
            assert_equal(model.state_dict(), before)
            assert_equal(model.full_state_dict(), before)
            model.load_state_dict(before)
            model.check_replicas()
            assert all(one.data is not None for one in model.parameters())
            model.parameters()[0].data[...] = 3  # and is forgotten
            with raises(StageError, "gathered(write=True)"):
                model.evaluate(*batch(0, 8))
        with raises(ModuleError, "write"):
            model.gathered(write="yes")  # type: ignore[arg-type]
        assert_equal(model.full_state_dict(), before)
        with model.gathered(write=True):
            model.parameters()[0].data[...] = 3
        after = model.full_state_dict()
        assert (after.pop(next(iter(before))) == 3).all()
        assert_equal(after, {name: before[name] for name in after})
        model.train_step(
            *batch(0, 8),
            optimizer=mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model),
        )
        weight = model.parameters()[0]
        weight.data = np.zeros(weight.shape)
        with raises(StageError, "gathered(write=True)", "load_state_dict()", "lost"):
            model.evaluate(*batch(0, 8))
        return True

    assert all(on_ranks("dp=2", body))


@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
@pytest.mark.parametrize("frozen", [[0], [3], [0, 3], [2, 3], [1, 2, 3]])
def test_layers_that_are_frozen_between_steps(frozen, bucket_bytes):
    """The first and the last ones, whose neighbours needed them before."""

    def body(mesh, stage):
        made = [nn.Linear(4, 4) for _ in range(4)]
        model = mm.fully_shard(
            nn.Sequential(made),
            mesh,
            stage=stage,
            loss=nn.mse_loss,
            dtype="float64",
            bucket_bytes=bucket_bytes,
        )
        optimizer = mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=0.01), model)
        x = np.random.default_rng(0).normal(size=(6, 4))
        losses = [model.train_step(x, x, optimizer=optimizer)]
        for number in frozen:
            made[number].freeze()
        model.rebuild_buckets()
        for _ in range(3):
            losses.append(model.train_step(x, x, optimizer=optimizer))
            losses.append(model.evaluate(x, x))
        return losses, model.full_state_dict()

    wanted, found = (on_ranks("dp=2", partial(body, stage=stage)) for stage in (0, 3))
    for one, other in zip(wanted, found, strict=True):
        assert one[0] == other[0]
        assert_equal(one[1], other[1])


class Twice(nn.Module):
    """A layer that runs a Sequential, which may stand elsewhere, too, and then one of its own."""

    def __init__(self, inner, own):
        self.inner, self.own = inner, own

    def named_children(self):
        return [("inner", self.inner), ("own", self.own)]

    def forward(self, x, ctx=None):
        return self.own.forward(self.inner.forward(x, ctx), ctx)

    def backward(self, dy, ctx):
        return self.inner.backward(self.own.backward(dy, ctx), ctx)


class Residual(nn.Sequential):
    def forward(self, x, ctx=None):
        return x + super().forward(x, ctx)

    def backward(self, dy, ctx):
        return dy + super().backward(dy, ctx)


class Backwards(nn.Sequential):
    def backward(self, dy, ctx):
        for layer in reversed(self.layers):
            dy = layer.backward(dy, ctx)
        return dy


def linear():
    return nn.Linear(4, 4)


def shared_in_a_layer():
    inner = nn.Sequential(linear(), nn.GELU(), linear())
    return nn.Sequential(inner, Twice(inner, linear()), linear())


def shared_in_a_checkpoint():
    inner = nn.Sequential(linear(), nn.GELU())
    return nn.Sequential(nn.Checkpoint(nn.Sequential(inner, linear())), inner, linear())


def nested_deeply():
    inner = nn.Sequential(linear(), nn.Sequential(linear(), nn.ReLU()), linear())
    return nn.Sequential(nn.Sequential(inner, linear()), inner, Residual(linear(), linear()))


MODELS = {
    "shared in a layer": shared_in_a_layer,
    "shared in a checkpoint": shared_in_a_checkpoint,
    "nested deeply": nested_deeply,
    "own forward on top": lambda: Residual(linear(), linear()),
    "own backward inside": lambda: nn.Sequential(linear(), Backwards(linear(), linear()), linear()),
}


@pytest.mark.parametrize("bucket_bytes", [1, 300])
@pytest.mark.parametrize("make", [pytest.param(one, id=name) for name, one in MODELS.items()])
def test_layers_that_run_layers(make, bucket_bytes):
    def body(mesh, stage):
        net = make()
        model = mm.fully_shard(
            net, mesh, stage=stage, loss=nn.mse_loss, dtype="float64", bucket_bytes=bucket_bytes
        )
        optimizer = mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=0.01), model)
        x = np.random.default_rng(0).normal(size=(6, 4))
        with model.gathered():
            context = nn.Context(training=False)
            expected = copy.deepcopy(net).forward(x, context)
        outputs = model.forward(x)
        np.testing.assert_allclose(outputs, expected, rtol=1e-12)
        losses = [model.train_step(x, x, optimizer=optimizer) for _ in range(3)]
        return losses, model.full_state_dict()

    wanted, found = (on_ranks("dp=2", partial(body, stage=stage)) for stage in (0, 3))
    for one, other in zip(wanted, found, strict=True):
        assert one[0] == other[0]
        assert_equal(one[1], other[1])


def test_a_stage_with_a_forward_of_its_own_keeps_its_values():
    class Own(mm.PipelineStage):
        def forward(self, x, ctx=None):
            for layer in self.layers:
                x = layer.forward(x, ctx)
            return x

    def body(mesh, stage):
        pipe = mm.PipelineParallel(
            [Own(0).add_layer(linear()).add_layer(linear())], 2, mesh=mesh, dtype="float64"
        )
        mm.fully_shard(pipe, mesh, stage=stage)
        optimizer = mm.ParallelOptimizer(optim.SGD(pipe.parameters(), lr=0.1), pipe)
        x = np.random.default_rng(0).normal(size=(6, 4))
        return [pipe.train_step(x, x, loss=nn.mse_loss, optimizer=optimizer) for _ in range(3)]

    assert on_ranks("dp=2", partial(body, stage=0)) == on_ranks("dp=2", partial(body, stage=3))


def test_states_that_differ_are_not_loaded():
    def body(mesh):
        model = mm.fully_shard(
            nn.Sequential(layers()), mesh, loss=nn.cross_entropy, dtype="float64", bucket_bytes=300
        )
        before = model.full_state_dict()
        with raises(MismatchError, "load_state_dict", "values"):
            model.load_state_dict({name: one + mesh.rank for name, one in before.items()})
        assert_equal(model.full_state_dict(), before)
        return True

    assert all(on_ranks("dp=2", body))


def test_a_layer_that_cannot_take_no_rows_is_told_why_it_gets_them():
    class Largest(nn.Module):
        def forward(self, x, ctx=None):
            return x / abs(x).max()

    def body(mesh):
        model = mm.fully_shard(
            nn.Sequential(linear(), Largest()), mesh, loss=nn.mse_loss, dtype="float64"
        )
        with raises(StageError, "rank 1", "no rows", "hybrid=True"):
            model.forward(np.ones((1, 4)))
        return model.forward(np.ones((2, 4))).shape

    assert on_ranks("dp=2", body) == [(2, 4), (2, 4)]
