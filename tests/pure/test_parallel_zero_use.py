"""What a ParallelOptimizer refuses, and what is left when something fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import (
    BudgetError,
    MismatchError,
    ModuleError,
    ModuleStateError,
    ShapeError,
    StageError,
)
from tests.pure.parallel_models import assert_equal, batch, make_pipeline, on_ranks, state_of
from tests.pure.parallel_traps import assert_nothing_left, error_of, trapped_stages


def make(mesh, **options):
    pipe = make_pipeline(mesh)
    return pipe, mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe, **options)


@pytest.mark.parametrize(("kind", "failing"), [("F", 0), ("B", 3), ("B", 2)])
def test_a_failure_anywhere_leaves_all_parameters(kind, failing):
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        optimizer = mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.1), pipe)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        before = state_of(pipe), optimizer.state_dict()
        if mesh.rank == failing:
            # In the last backward, when the sums of others may have begun.
            traps[mesh.coord("pp")].arm(kind, 3)
        assert type(error_of(partial(train, *batch(1, 16)))) is StageError
        assert_equal(state_of(pipe), before[0])
        assert_nothing_left(mesh)
        for trap in traps:
            trap.disarm()
        with pytest.raises(ModuleStateError, match="no sums of gradients to step by"):
            optimizer.step()
        with pytest.raises(ModuleStateError, match="no sums of gradients to clip"):
            pipe.clip_grad_norm(1.0)
        train(*batch(1, 16))
        assert any(np.any(state_of(pipe)[name] != before[0][name]) for name in before[0])
        pipe.check_replicas()

    on_ranks("dp=2,pp=2", body, rendezvous=True)


class Breaks(optim.SGD):
    """Fails at one update of one rank."""

    left = -1

    def _update(self, *arguments):
        self.left -= 1
        if not self.left:
            raise FloatingPointError("broken")
        super()._update(*arguments)


def test_an_update_that_raises_keeps_nobody_waiting_and_the_replicas_equal():
    def body(mesh):
        pipe = make_pipeline(mesh)
        broken = Breaks(pipe.parameters(), lr=0.1)
        broken.left = 2 if mesh.rank == 1 else -1
        optimizer = mm.ParallelOptimizer(broken, pipe)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        if mesh.rank == 1:
            with pytest.raises(FloatingPointError):
                optimizer.step()
        else:
            optimizer.step()
        pipe.check_replicas()

    on_ranks("dp=3", body)


def test_a_budget_of_one_rank_is_told_when_the_step_is_done():
    def body(mesh):
        pipe, optimizer = make(mesh, scaler=optim.LossScaler(2.0))
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        if mesh.rank == 1:
            with mesh.budget(bytes=0), pytest.raises(BudgetError):
                optimizer.step()
        else:
            optimizer.step()
        pipe.check_replicas()
        pipe.train_step(*batch(1, 16), loss=nn.cross_entropy, optimizer=optimizer)
        pipe.check_replicas()

    on_ranks("dp=3", body)


def test_gradients_are_hidden_between_steps_and_states_say_when():
    def body(mesh):
        pipe, optimizer = make(mesh)
        with pytest.raises(ModuleStateError, match="call train_step"):
            optimizer.step()
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        optimizer.step()
        with pytest.raises(ModuleStateError, match="call train_step"):
            optimizer.step()
        with pipe.no_sync():
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
            with pytest.raises(ModuleStateError, match="not under no_sync"):
                optimizer.step()
            assert all(parameter.grad is not None for parameter in pipe.parameters())
        # What was added up is forgotten, and does not come into the next step.
        optimizer.zero_grad()
        before = state_of(pipe)
        pipe.train_step(*batch(1, 16), loss=nn.cross_entropy, denominator=1e300)
        assert pipe.clip_grad_norm(1.0) < 1e-290
        pipe.parameters()[0].data = pipe.parameters()[0].data.copy()
        with pytest.raises(ModuleStateError, match="another array for its values"):
            optimizer.step()
        assert_equal(state_of(pipe), before)
        assert optimizer.lr == 0.01
        assert "Adam" in repr(optimizer)
        with pytest.raises(ModuleStateError, match="was given to a ParallelOptimizer"):
            optimizer.optimizers[0].step()

    on_ranks("dp=2", body)


class WholeNorm(optim.SGD):
    elementwise = False


def test_wrong_arguments_are_refused():
    def body(mesh):
        pipe = make_pipeline(mesh)
        parameters = pipe.parameters()
        other = nn.Linear(2, 2)
        wrong: dict[str, tuple[Any, dict[str, Any]]] = {
            "zero must be 0 or 1": ([optim.SGD(parameters, lr=1)], {"zero": 2}),
            "does not change each element by itself": ([WholeNorm(parameters, lr=1)], {}),
            "none of model.parameters": ([optim.SGD(other.parameters(), lr=1)], {}),
            "belongs to two optimizers": ([optim.SGD(parameters, lr=1)] * 2, {}),
            "takes optimizers of mpimesh.optim, got str": (["adam"], {}),
            "at least one": ([], {}),
        }
        for message, (optimizers, options) in wrong.items():
            with pytest.raises(ModuleError, match=message):
                mm.ParallelOptimizer(optimizers, pipe, **options)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        plain = optim.SGD(parameters, lr=1)
        optimizer = mm.ParallelOptimizer(WholeNorm(parameters, lr=1), pipe, zero=0)
        with pytest.raises(ModuleError, match="the model has a ParallelOptimizer"):
            mm.ParallelOptimizer(plain, pipe)
        with pytest.raises(ModuleError, match="which alone knows"):
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=plain)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        with pytest.raises(ModuleError, match="max_norm must be above 0"):
            pipe.clip_grad_norm(0)

    on_ranks("dp=2", body)


def test_what_is_wrong_on_one_rank_is_told_on_all():
    def body(mesh):
        pipe = make_pipeline(mesh)
        with pytest.raises(MismatchError, match="zero must be 0 or 1"):
            mm.ParallelOptimizer(optim.Adam(pipe.parameters()), pipe, zero=1 + mesh.rank)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("zero", [0, 1])
def test_clipping_is_of_one_step_only(zero):
    """Also where buckets are made anew, whose sums are counted from the first again."""

    def body(mesh):
        states = []
        for then in ("", "other sums", "other buckets"):
            pipe = make_pipeline(mesh)
            sgd = optim.SGD(pipe.parameters(), lr=0.1)
            optimizer = mm.ParallelOptimizer(sgd, pipe, zero=zero)
            if then:
                pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
                pipe.clip_grad_norm(1e-3)
                pipe.step = 0
            if then == "other buckets":
                pipe.rebuild_buckets()
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
            optimizer.step()
            states.append(state_of(pipe))
        assert_equal(states[0], states[1])
        assert_equal(states[0], states[2])

    on_ranks("dp=2", body)


def test_gradients_under_way_are_not_divided():
    def body(mesh):
        pipe = make_pipeline(mesh)
        with pipe.no_sync():
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with pytest.raises(ModuleStateError, match="divide buckets between steps"):
            mm.ParallelOptimizer(optim.Adam(pipe.parameters()), pipe)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("what", ["kind", "zero", "order"])
def test_ranks_that_differ_are_told(what):
    def body(mesh):
        pipe = make_pipeline(mesh)
        odd = mesh.rank == 1
        kind = optim.AdamW if odd and what == "kind" else optim.Adam
        zero = 0 if odd and what == "zero" else 1
        parameters = pipe.parameters()
        # The same numbers of parameters, but others.
        at = 2 if odd and what == "order" else 4
        two = [kind(parameters[:at]), kind(parameters[at:])]
        with pytest.raises(MismatchError):
            mm.ParallelOptimizer(two, pipe, zero=zero)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_state_that_does_not_fit_changes_nothing(zero):
    def body(mesh):
        pipe = make_pipeline(mesh)
        parameters = pipe.parameters()
        two = [optim.Adam(parameters[:4], lr=0.01), optim.SGD(parameters[4:], lr=0.1, momentum=0.9)]
        optimizer = mm.ParallelOptimizer(two, pipe, zero=zero)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        good = optimizer.state_dict()
        good = [{**one, "params": [copied(state) for state in one["params"]]} for one in good]
        adam, sgd = good
        bad = [
            (ModuleError, [adam]),
            (ModuleError, [sgd, adam]),
            (ModuleError, [adam, {**sgd, "params": sgd["params"][1:]}]),
            (ModuleError, [{**adam, "lr": 0.5}, {**sgd, "lr": -1.0}]),
            (ShapeError, [adam, {**sgd, "params": sgd["params"][::-1]}]),
        ]
        for error, states in bad:
            with pytest.raises(error):
                optimizer.load_state_dict(states)
            assert two[0].lr == 0.01
            for one, before in zip(optimizer.state_dict(), good, strict=True):
                for state, expected in zip(one["params"], before["params"], strict=True):
                    assert_equal(state, expected)
        train(*batch(1, 16))
        pipe.check_replicas()

    on_ranks("dp=2", body)


def copied(state):
    return {name: np.copy(value) for name, value in state.items()}


def test_zero_grad_of_the_optimizer_that_was_given_does_no_harm():
    def body(mesh):
        states = []
        for zeroed in (False, True):
            pipe, optimizer = make(mesh)
            for step in range(2):
                if zeroed:
                    optimizer.optimizers[0].zero_grad()
                pipe.train_step(*batch(step, 16), loss=nn.cross_entropy, optimizer=optimizer)
            states.append(state_of(pipe))
        assert_equal(*states)

    on_ranks("dp=2", body)


def test_a_whole_model_loads_into_divided_memory():
    def body(mesh):
        pipe, optimizer = make(mesh)
        values = pipe.full_state_dict()
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        pipe.load_state_dict(values)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        other = make_pipeline(mesh)
        adam = optim.Adam(other.parameters(), lr=0.01)
        other.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=adam)
        other.load_state_dict(values)
        other.step = pipe.step - 1
        other.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=adam)
        assert_equal(state_of(pipe), state_of(other))

    on_ranks("dp=2,pp=2", body)


def test_stages_with_nothing_to_train():
    """One has no parameters, one frozen ones only."""

    def body(mesh):
        stages = [
            mm.PipelineStage(0).add_layer(nn.Linear(6, 8)),
            mm.PipelineStage(1).add_layer(nn.ReLU()),
            mm.PipelineStage(2).add_layer(nn.Linear(8, 5)),
        ]
        for parameter in stages[0].parameters():
            parameter.requires_grad = False
        pipe = make_pipeline(mesh, stages=stages)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer = mm.ParallelOptimizer(adam, pipe, scaler=optim.LossScaler(4.0))
        before = state_of(pipe)
        for step in range(2):
            pipe.train_step(*batch(step, 16), loss=nn.cross_entropy)
            assert pipe.clip_grad_norm(1.0) > 0
            optimizer.step()
            tuned = pipe.tune_buckets()
            assert (tuned is not None) == (mesh.coord("pp") == 2)
        changed = [bool((before[name] != values).any()) for name, values in state_of(pipe).items()]
        assert changed == [[False] * 2, [], [True] * 2][mesh.coord("pp")]
        optimizer.load_state_dict(optimizer.state_dict())
        pipe.check_replicas()

    on_ranks("dp=2,pp=3", body)
