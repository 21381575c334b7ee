"""When a model may start no step, and what the ranks must give alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleStateError, StageError
from tests.helpers.parallel_models import batch, cut, make_pipeline, on_ranks, train_alone
from tests.helpers.parallel_traps import Reshaped, Trap, error_of
from tests.helpers.raises import names, raises


class Nested(nn.Module):
    """Calls the model that it is part of."""

    num_layers = 0
    call: Any = None

    def forward(self, x, ctx=None):
        if self.call is not None:
            self.call()
        return x

    def backward_input(self, dy, ctx):
        return dy


@pytest.mark.parametrize("stage", [0, 1])
def test_a_layer_must_not_call_its_own_model(stage):
    def body(mesh):
        layer = Nested()
        stages = cut(2)
        stages[stage].add_layer(layer)
        pipe = make_pipeline(mesh, stages=stages)
        layer.call = partial(pipe.forward, batch(0, 4)[0])
        error = error_of(partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy))
        assert type(error) is StageError
        names(str(error).splitlines()[0], f"stage {stage}", "ModuleStateError", "step")
        layer.call = None
        loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert loss == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)

    on_ranks("pp=2", body)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_after_a_step_that_one_rank_left_none_is_started(error):
    """The others may be in it still, and whatever this rank sends would meet what they do."""

    def body(mesh):
        trap = Trap()
        stages = cut(1)
        stages[0].add_layer(trap)
        pipe = make_pipeline(mesh, stages=stages)
        optimizer = mm.ParallelOptimizer(optim.SGD(pipe.parameters(), lr=0.1), pipe)
        trap.arm("F", 1, error=error())
        with pytest.raises(error):
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        trap.disarm()
        for call in (
            partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy),
            partial(pipe.forward, batch(0, 4)[0]),
            partial(pipe.evaluate, *batch(0, 16), loss=nn.cross_entropy),
            partial(pipe.clip_grad_norm, 1.0),
            optimizer.step,
            partial(optimizer.clip_grad_norm, 1.0),
            optimizer.state_dict,
            optimizer.full_state_dict,
            pipe.check_replicas,
            pipe.full_state_dict,
            pipe.rebuild_buckets,
            pipe.tune_buckets,
        ):
            with raises(ModuleStateError, "rank 0", error.__name__):
                call()

    on_ranks("dp=1", body)


def test_all_ranks_must_want_the_outputs_everywhere_or_none():
    def body(mesh):
        pipe = make_pipeline(mesh)
        x = batch(0, 16)[0]
        with raises(MismatchError, 0, "forward everywhere", 1, "forward of", 4):
            pipe.forward(x, everywhere=mesh.rank == 0)
        assert pipe.forward(x, everywhere=True).shape[0] == 16

    on_ranks("pp=2", body)


@pytest.mark.parametrize("place", [0, 1])
def test_outputs_may_be_written_whoever_made_them(place):
    """Also where the last stage hands through what it got, which is another rank's."""

    def body(mesh):
        stages = cut(1, [nn.Linear(6, 5)])
        passing = type(stages[0])(1)
        pipe = make_pipeline(mesh, stages=[*stages, passing], num_microbatches=1)
        return [pipe.forward(batch(0, 3)[0], everywhere=bool(place)) for _ in range(2)]

    for one, other in on_ranks("pp=2", body)[1:]:
        one += 1
        np.testing.assert_allclose(one, other + 1)


def test_what_comes_from_another_rank_cannot_be_written():
    """Where ranks share memory it is the other's own; so it is the same everywhere."""

    def body(mesh):
        def double(x):
            x *= 2
            return x

        stages = cut(2)
        stages[1] = type(stages[1])(1).add_layer(Reshaped(double))
        for layer in cut(2)[1].layers:
            stages[1].add_layer(layer)
        pipe = make_pipeline(mesh, stages=stages)
        error = error_of(partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy))
        assert "read-only" in str(error)

    on_ranks("pp=2", body)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_the_batch_is_read_for_comparison_only_with_checks(monkeypatch, checks):
    """To read all of it takes longer than to hand it over."""
    read = []

    def checksum(arrays, *, whole):
        read.append(whole)
        return ""

    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    monkeypatch.setattr("mpimesh.parallel.batch._checksum", checksum)
    on_ranks(
        "pp=2",
        lambda mesh: make_pipeline(mesh).train_step(*batch(0, 8), loss=nn.cross_entropy),
    )
    assert sum(read) == (4 if checks == "1" else 0)  # x and target on both ranks
