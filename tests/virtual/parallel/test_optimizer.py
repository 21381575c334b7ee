"""A step of training with the optimizer in it: the same bits, and nothing if anything failed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, ModuleStateError, StageError
from mpimesh.schedule import ActionKind
from tests.helpers.parallel_models import (
    assert_equal,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    state_of,
    train_both_ways,
)
from tests.helpers.parallel_traps import assert_nothing_left, error_of, trapped_stages
from tests.helpers.raises import raises


# With one row and two replicas, one of them has nothing to do, and steps all the same.
@pytest.mark.parametrize("rows", [13, 1])
@pytest.mark.parametrize(
    ("dims", "schedule"),
    [("dp=1", "1f1b"), ("dp=2", "1f1b"), ("pp=2", "zb1p"), ("dp=2,pp=2", "1f1b")],
)
def test_inside_and_after_give_the_same_bits(dims, schedule, rows):
    on_ranks(dims, partial(train_both_ways, rows=rows, schedule=schedule), rendezvous=True)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved"])
def test_two_stages_on_a_rank(schedule):
    def body(mesh):
        for bucket_bytes in (1, 10**6):  # a bucket for each gradient, one for both stages
            train_both_ways(mesh, 13, schedule=schedule, num_stages=4, bucket_bytes=bucket_bytes)

    on_ranks("dp=2,pp=2", body, rendezvous=True)


@pytest.mark.parametrize(("kind", "failing"), [("F", 0), ("B", 3), ("B", 2)])
def test_a_failure_anywhere_leaves_all_parameters(kind, failing):
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        optimizer = optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        before = state_of(pipe)
        if mesh.rank == failing:
            # In the last backward, when the sums of others may have begun.
            traps[mesh.coord("pp")].arm(kind, 3)
        error = error_of(partial(train, *batch(1, 16)))
        assert type(error) is StageError
        assert f"rank {failing}" in str(error)
        assert_equal(state_of(pipe), before)
        assert_nothing_left(mesh)
        for trap in traps:
            trap.disarm()
        train(*batch(1, 16))
        assert any(np.any(state_of(pipe)[name] != before[name]) for name in before)
        pipe.check_replicas()

    on_ranks("dp=2,pp=2", body, rendezvous=True)


def test_an_optimizer_under_no_sync_is_refused_on_every_rank():
    def body(mesh):
        pipe = make_pipeline(mesh)
        optimizer = optim.SGD(pipe.parameters(), lr=0.1)
        before = state_of(pipe)
        train: Any = partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy)
        with pipe.no_sync(), raises(ModuleError, "no_sync", "optimizer="):
            train(optimizer=optimizer)
        for wrong in (3, optim.SGD):
            with raises(ModuleError, "optimizer=", "step()", getattr(wrong, "__name__", wrong)):
                train(optimizer=wrong)
        with raises(ModuleError, "loss=", "value_and_grad", "mm.nn.cross_entropy"):
            train(loss=lambda y, target: 0.0)
        assert_equal(state_of(pipe), before)
        with pipe.no_sync():
            train(denominator=32)
        train(denominator=32, optimizer=optimizer)
        assert any(np.any(state_of(pipe)[name] != before[name]) for name in before)

    on_ranks("dp=2,pp=2", body)


def test_an_optimizer_on_some_ranks_only_is_told():
    def body(mesh):
        pipe = make_pipeline(mesh)
        before = state_of(pipe)
        optimizer = optim.SGD(pipe.parameters(), lr=0.1) if mesh.rank else None
        with pytest.raises(MismatchError, match=r"then SGD\.step"):
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        assert_equal(state_of(pipe), before)

    on_ranks("dp=2,pp=2", body)


def test_data_parallel_takes_one_too():
    def body(mesh):
        states = []
        for inside in (True, False):
            model = mm.DataParallel(
                nn.Sequential(layers()), mesh, loss=nn.cross_entropy, dtype="float64"
            )
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            model.train_step(*batch(0, 13), optimizer=optimizer if inside else None)
            if not inside:
                optimizer.step()
            states.append(state_of(model))
        assert_equal(*states)

    on_ranks("dp=3", body)


def test_a_plan_starts_the_sums_of_each_trained_stage_and_leaves_steps_out():
    def body(mesh):
        stages = cut(4)
        for parameter in stages[0].parameters():
            parameter.requires_grad = False
        pipe = make_pipeline(mesh, 3, stages=stages, schedule="interleaved")
        plans = pipe._engine.plans
        plan = plans.plan(3, training=True, first_trained=1)
        sums = [one.stage for one in plan.actions if one.kind is ActionKind.REDUCE_GRAD]
        assert sorted(sums) == ([2] if mesh.rank == 0 else [1, 3])
        assert not any(one.kind is ActionKind.STEP for one in plan.actions)
        assert not any(one.kind.is_whole for one in plans.plan(3, training=False).actions)

    on_ranks("pp=2", body)


def test_the_sums_of_the_last_stage_start_while_the_first_still_runs_even_in_the_first_step():
    """On one rank stage 1 is done before stage 0, and its bucket need not wait for the end."""

    def body(mesh):
        started: list[bool] = []

        class Watch(nn.Module):
            def forward(self, x, ctx=None):
                return x

            def backward_input(self, dy, ctx):
                started.append(pipe.buckets.started)
                return dy

        stages = [
            mm.PipelineStage(number).add_layer(Watch()).add_layer(nn.Linear(*sizes))
            for number, sizes in enumerate([(6, 8), (8, 5)])
        ]
        pipe = make_pipeline(mesh, 2, stages=stages, schedule="interleaved")
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        assert pipe.schedule().to_string().endswith("1B0,0F1,0B0,1F1,1B1,0B1\n")
        assert started == [False, False, False, True]

    on_ranks("dp=2,pp=1", body)


def test_what_is_no_optimizer_is_refused():
    foreign: Any = type("Adam", (), {"__module__": "torch.optim.adam"})

    def body(mesh):
        pipe = make_pipeline(mesh)
        bad: list[tuple[Any, tuple[str, ...]]] = [
            (foreign(), ("torch.optim.adam.Adam", "mm.optim.Adam")),
            ([foreign()], ("torch.optim.adam.Adam", "mm.optim.Adam")),
            (None, ("optimizer", "mpimesh.optim", "NoneType")),
            ("adam", ("optimizer", "mpimesh.optim", "str")),
            ([], ("optimizer", "none")),
        ]
        for given, values in bad:
            with raises(ModuleError, "ParallelOptimizer", *values):
                mm.ParallelOptimizer(given, pipe)
        mm.ParallelOptimizer(optim.Adam(pipe.parameters()), pipe)

    on_ranks("dp=2", body)


def make(mesh, **options):
    pipe = make_pipeline(mesh)
    return pipe, mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe, **options)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2"])
def test_values_that_one_rank_has_replaced(dims, scaled):
    def body(mesh):
        pipe, optimizer = make(mesh, scaler=optim.LossScaler(2.0) if scaled else None)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        before = state_of(pipe)
        parameter = pipe.parameters()[0]
        own = parameter.data
        if mesh.rank == 1:
            parameter.data = own.copy()
        with raises(ModuleStateError, "rank 1", "'weight'", "parameter.data[...]"):
            optimizer.step()
        assert_equal(state_of(pipe), before)
        parameter.data = own
        optimizer.step()
        pipe.check_replicas()
        assert any((state_of(pipe)[name] != before[name]).any() for name in before)
        assert_nothing_left(mesh)

    on_ranks(dims, body, rendezvous=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2"])
def test_values_that_one_rank_has_replaced_before_a_step_with_the_optimizer_in_it(dims, scaled):
    """The status tells it: no gradient is summed, no step counted."""

    def body(mesh):
        pipe, optimizer = make(mesh, scaler=optim.LossScaler(2.0) if scaled else None)
        train = partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        train()
        before = state_of(pipe)
        parameter = pipe.parameters()[0]
        own = parameter.data
        if mesh.rank == 1:
            parameter.data = own.copy()
        refused = raises(ModuleStateError, "rank 1", "'weight'", "parameter.data[...]")
        with refused as caught:
            train()
        assert caught.value.agreed
        assert_equal(state_of(pipe), before)
        assert pipe.step == 1
        parameter.data = own
        train()
        assert pipe.step == 2
        pipe.check_replicas()
        assert_nothing_left(mesh)
        return str(caught.value)

    assert len(set(on_ranks(dims, body, rendezvous=True))) == 1


def test_gradients_that_one_rank_has_forgotten():
    def body(mesh):
        pipe, optimizer = make(mesh)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        if mesh.rank == 1:
            optimizer.zero_grad()
        with raises(ModuleStateError, "rank 1", "train_step()", "step()", "no_sync()"):
            optimizer.step()
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        pipe.check_replicas()

    on_ranks("dp=2,pp=2", body)


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_a_parameter_that_one_rank_has_frozen(zero):
    """The buckets stay as they were, and nobody trains on by others than its replicas."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        optimizer: Any = optim.Adam(pipe.parameters(), lr=0.01)
        if zero is not None:
            optimizer = mm.ParallelOptimizer(optimizer, pipe, zero=zero)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        parameter = pipe.parameters()[0]
        parameter.requires_grad = mesh.rank != 1
        with raises(MismatchError, "4.weight", "frozen", 1):
            pipe.rebuild_buckets()
        parameter.requires_grad = True
        train(*batch(1, 16))
        pipe.check_replicas()
        parameter.requires_grad = False
        if mesh.coord("pp") == 0:
            other = parameter.data.copy()
        pipe.rebuild_buckets()
        train(*batch(2, 16))
        pipe.check_replicas()
        if mesh.coord("pp") == 0:
            np.testing.assert_array_equal(parameter.data, other)

    on_ranks("dp=2,pp=2", body)


def test_no_step_after_buckets_that_could_not_be_made():
    def body(mesh):
        pipe = make_pipeline(mesh)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        engine: Any = pipe._engine

        def broken(plan):
            raise MemoryError("no room")

        engine._new_buckets = broken
        with pytest.raises(MemoryError):
            pipe.rebuild_buckets()
        with raises(ModuleStateError, f"rank {mesh.rank}", "buckets"):
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with raises(ModuleStateError, f"rank {mesh.rank}", "buckets"):
            pipe.rebuild_buckets()

    on_ranks("dp=2", body)


def test_groups_that_leave_out_steps_together():
    def body(mesh):
        with pytest.raises(MismatchError):
            make(mesh, group=mesh.group() if mesh.rank else mesh.group("dp"))
        with raises(ModuleError, "ParallelOptimizer", 4, "group 'pp'", 2):
            make(mesh, group=mesh.group("pp"))
        make(mesh, group=mesh.group())

    on_ranks("dp=2,pp=2", body)


@pytest.mark.parametrize("dims", ["dp=1", "dp=3", "dp=2,pp=2"])
@pytest.mark.parametrize("zero", [None, 0, 1])
def test_gradients_are_zeroed_before_each_step_as_in_pytorch(dims, zero):
    """Nothing changes: not the numbers, nor that reductions begin during the backward."""

    def train(mesh, zeroed):
        pipe = make_pipeline(mesh)
        if zeroed:
            pipe.zero_grad()
        inner = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer: Any = inner
        if zero is not None:
            optimizer = mm.ParallelOptimizer(inner, pipe, zero=zero)
        uses = []
        for step in range(3):
            if zeroed:
                pipe.zero_grad()
                inner.zero_grad()
                optimizer.zero_grad()
            pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
            uses.append([entry.uses for entry in pipe.buckets._entries.values()])
        return state_of(pipe), uses

    def body(mesh):
        one, other = train(mesh, False), train(mesh, True)
        assert_equal(one[0], other[0])
        assert one[1] == other[1]
        assert all(uses == 1 for uses in other[1][0])

    on_ranks(dims, body)
