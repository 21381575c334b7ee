"""Models cut into stages by what their layers take, on virtual ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import (
    MismatchError,
    ModuleError,
    ScheduleError,
    UnknownNameError,
)
from mpimesh.parallel import PipelineParallel, PipelineStage, measure_layers
from mpimesh.schedule import Costs, auto
from tests.helpers.parallel_models import (
    assert_same,
    batch,
    layers,
    on_ranks,
    train_alone,
    train_on,
)
from tests.helpers.raises import raises
from tests.helpers.timed_layers import NO_COST, Timed, X, install_clock, wide_mlp


@pytest.fixture
def clock(monkeypatch):
    return install_clock(monkeypatch)


def sizes(stages):
    return [len(stage) for stage in stages]


def test_layers_without_memory_stay_without():
    def body(mesh):
        model = nn.Sequential(layers())
        x = batch(0, 4)[0]
        stages = PipelineParallel.partition(model, 3, mesh=mesh, x=x, dtype=np.float64)
        assert [stage.stage_id for stage in stages] == [0, 1, 2]
        assert all(isinstance(stage, PipelineStage) for stage in stages)
        flat = [layer for stage in stages for layer in stage]
        assert all(one is other for one, other in zip(flat, model, strict=True))
        assert all(one.data is None and one.grad is None for one in model.parameters())
        assert model[0].input_grad

    on_ranks("pp=2", body)


# -- the cut ----------------------------------------------------------------------------------


def test_the_slowest_layer_stands_alone(clock):
    def body(mesh):
        made = [Timed(clock, seconds, seconds, seconds) for seconds in (1, 2, 9, 1, 1, 1)]
        return sizes(PipelineParallel.partition(made, 3, mesh=mesh, x=X, **NO_COST))

    assert on_ranks("dp=2,pp=2", body) == [[2, 1, 3]] * 4


@pytest.mark.parametrize(
    "times",
    [[1, 2, 3, 4, 5], np.array([1.0, 2, 3, 4, 5]), Costs.of(5, forward_s=[1, 2, 3, 4, 5])],
)
def test_times_that_are_known(times):
    def body(mesh):
        stages = PipelineParallel.partition(wide_mlp(), 2, mesh=mesh, times=times)
        return sizes(stages)

    assert on_ranks("pp=2", body) == [[3, 2]] * 2


def test_known_messages_move_the_cut():
    costs = Costs.of(5, forward_s=[1, 2, 3, 4, 5], message_s=[0, 0, 10, 0])  # without: 3 and 2

    def body(mesh):
        return sizes(PipelineParallel.partition(wide_mlp(), 2, mesh=mesh, times=costs))

    assert on_ranks("pp=2", body) == [[2, 3]] * 2


@pytest.mark.parametrize("dims", ["pp=3", "dp=2,pp=2"])
def test_any_cut_trains_the_same(dims):
    """By a schedule that was made for the measured times."""

    def body(mesh):
        num_stages = mesh.dim_size("pp")
        made = layers()
        costs = measure_layers(made, batch(0, 3)[0], mesh=mesh, dtype=np.float64)
        stages = PipelineParallel.partition(made, num_stages, mesh=mesh, times=costs)
        schedule = functools.partial(auto, **costs.joined(sizes(stages)).as_arguments())
        return train_on(mesh, 2, 13, stages=stages, schedule=schedule)

    for trained in on_ranks(dims, body):
        assert_same(trained, train_alone(2, 13))


# -- ranks that are told different things, or wrong ones ---------------------------------------


@pytest.mark.parametrize(
    ("other", "values"),
    [
        ({"layers": wide_mlp()[:4]}, ("5 layers", "4 layers")),
        ({"layers": [nn.Linear(3, 4), *wide_mlp()[1:]]}, ("5 layers", "digest")),
        ({"num_stages": 3}, ("2 stages", "3 stages", (0, 1, 3, 5))),
        ({"times": [1, 1, 1, 1, 9]}, ("2 stages", (0, 4, 5))),
        ({"times": None, "x": X}, ("2 stages", "measure")),
        ({"times": None}, ("times=", "x=")),
    ],
)
def test_ranks_that_are_given_different_things(other, values):
    def body(mesh):
        given = {"layers": wide_mlp(), "num_stages": 2, "times": [1, 1, 1, 1, 1]}
        if mesh.rank:
            given.update(other)
        cut = functools.partial(PipelineParallel.partition, mesh=mesh)
        with raises(MismatchError, "rank 0", (0, 2, 5), "rank 1", *values) as caught:
            cut(given.pop("layers"), given.pop("num_stages"), **given)
        assert caught.value.agreed

    on_ranks("pp=2", body)


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        ({"times": [1, 1]}, ScheduleError, ("times", 5, 2)),
        ({"times": 3}, ScheduleError, ("times", 3)),
        ({"times": [1, 1, 1, 1, -1]}, ScheduleError, ("layer_s", -1, 4)),
        ({"times": [1] * 5, "num_stages": 6}, ScheduleError, ("5 layers", "num_stages 6")),
        ({"x": X, "num_stages": 6}, ScheduleError, ("5 layers", "num_stages 6")),
        ({"x": X, "num_stages": 0}, ScheduleError, ("num_stages", 1, 0)),
        ({"x": X, "times": [1] * 5}, ScheduleError, ("times=", "x=", "both")),
        ({}, ScheduleError, ("times=", "x=", "neither")),
        ({"x": X, "repeats": 0}, ScheduleError, ("repeats", 1, 0)),
        ({"x": X, "bytes_per_s": 0}, ScheduleError, ("bytes_per_s", 0)),
        ({"x": X, "latency_s": -1}, ScheduleError, ("latency_s", 0, -1)),
        ({"x": X, "layers": []}, ScheduleError, ("no layers",)),
        ({"x": X, "layers": [nn.ReLU(), 3]}, ModuleError, ("forward", "backward", "parameters", 3)),
        ({"x": X, "dim": "stages"}, UnknownNameError, ("pp=2", "'stages'", "dim=")),
    ],
)
def test_what_cannot_be_cut_is_refused_on_all_ranks(given, kind, values):
    def body(mesh):
        options = {"layers": wide_mlp(), "num_stages": 2, **given}
        with raises(kind, *values) as caught:
            PipelineParallel.partition(
                options.pop("layers"), options.pop("num_stages"), mesh=mesh, **options
            )
        assert caught.value.agreed or kind is UnknownNameError
        mesh.barrier()

    on_ranks("pp=2", body)
