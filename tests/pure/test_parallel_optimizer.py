"""A step of training with the optimizer in it: the same bits, and nothing if anything failed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, StageError
from mpimesh.schedule import ActionKind
from tests.pure.parallel_models import (
    assert_equal,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    state_of,
    train_both_ways,
)
from tests.pure.parallel_traps import assert_nothing_left, error_of, trapped_stages


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
        with pipe.no_sync(), pytest.raises(ModuleError, match="no_sync leaves gradients"):
            train(optimizer=optimizer)
        for wrong in (3, optim.SGD):
            with pytest.raises(ModuleError, match=r"needs an object with a method step\(\), got"):
                train(optimizer=wrong)
        with pytest.raises(ModuleError, match="needs a method value_and_grad"):
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
        bad: list[tuple[Any, str]] = [
            (foreign(), "torch.optim.adam.Adam of PyTorch cannot be divided .* mm.optim.Adam"),
            ([foreign()], "cannot be divided"),
            (None, "takes optimizers of mpimesh.optim, got NoneType"),
            ("adam", "takes optimizers of mpimesh.optim, got str"),
            ([], "at least one optimizer"),
        ]
        for given, text in bad:
            with pytest.raises(ModuleError, match=text):
                mm.ParallelOptimizer(given, pipe)
        mm.ParallelOptimizer(optim.Adam(pipe.parameters()), pipe)

    on_ranks("dp=2", body)
