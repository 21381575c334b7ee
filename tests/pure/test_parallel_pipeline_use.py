"""Gradients, records and wrong use of pipelines, on virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import ScheduleError, ShapeError, UnknownNameError
from mpimesh.parallel import PipelineParallel, PipelineStage
from mpimesh.schedule import gpipe, make_schedule
from tests.pure.parallel_models import (
    FEATURES,
    SEED,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    train_alone,
)
from tests.pure.parallel_schedules import halves

# -- gradients ------------------------------------------------------------------------------------


def gradients_alone(rows_of_steps, denominator):
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    for step, rows in enumerate(rows_of_steps):
        x, target = batch(step, rows)
        context = nn.Context(step=step)
        _, dy = nn.cross_entropy.value_and_grad(
            model.forward(x, context), target, denominator=denominator
        )
        model.backward(dy, context)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dims", ["dp=1", "dp=2", "dp=2,pp=2"])
def test_steps_without_sync_are_reduced_once(dims):
    rows = [8, 5, 3]
    expected = gradients_alone(rows, sum(rows))

    def body(mesh):
        pipe = make_pipeline(mesh)
        for _ in range(2):
            pipe.step = 0
            reduced = mesh.traffic().bytes.get("all_reduce", 0)
            with pipe.no_sync():
                for step in (0, 1):
                    pipe.train_step(*batch(step, rows[step]), loss=nn.cross_entropy, denominator=16)
            small = mesh.traffic().bytes.get("all_reduce", 0) - reduced
            assert small < 500  # headers and status, no gradients
            pipe.train_step(*batch(2, rows[2]), loss=nn.cross_entropy, denominator=16)
            for name, parameter in pipe.named_parameters():
                np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-10, atol=1e-15)

    on_ranks(dims, body)


def test_a_step_begins_with_gradients_of_zero():
    expected = gradients_alone([8], 8)

    def body(mesh):
        pipe = make_pipeline(mesh)
        for _ in range(3):
            pipe.step = 0
            pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
            for name, parameter in pipe.named_parameters():
                np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-10, atol=1e-15)
        pipe.zero_grad()
        assert not any(p.grad is not None and p.grad.any() for p in pipe.parameters())

    on_ranks("dp=2,pp=2", body)


def test_targets_that_are_ignored_do_not_count():
    loss = nn.CrossEntropy(ignore_index=-1)
    x, target = batch(0, 13)
    target[[0, 3, 4, 9, 12]] = -1
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    expected = loss(model.forward(x, nn.Context()), target)

    def body(mesh):
        return make_pipeline(mesh).train_step(x, target, loss=loss)

    np.testing.assert_allclose(on_ranks("dp=2,pp=2", body), [expected] * 4, rtol=1e-12)


@pytest.mark.parametrize("frozen", [[0], [0, 1], [1], [2], [0, 1, 2]])
def test_frozen_stages(frozen):
    """What is frozen stays; below the first stage that is trained there is no backward."""
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    x, target = batch(0, 12)
    context = nn.Context()
    _, dy = nn.cross_entropy.value_and_grad(model.forward(x, context), target, denominator=12)
    model.backward(dy, context)
    expected = {name: p.grad for name, p in model.named_parameters()}

    def body(mesh):
        stages = cut(3)
        for number in frozen:
            stages[number].freeze()
        pipe = make_pipeline(mesh, stages=stages)
        pipe.train_step(x, target, loss=nn.cross_entropy)
        for name, parameter in pipe.named_parameters():
            if mesh.coord("pp") in frozen:
                assert parameter.grad is None
            else:
                np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-9, atol=1e-15)
        # Freezing and unfreezing needs new buckets, and gets them.
        stages[0].unfreeze()
        stages[2].freeze()
        pipe.rebuild_buckets()
        pipe.step = 0
        pipe.train_step(x, target, loss=nn.cross_entropy)
        if mesh.coord("pp") == 0:
            for name, parameter in pipe.named_parameters():
                np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-9, atol=1e-15)

    on_ranks("dp=2,pp=3", body)


# -- what is recorded and kept ------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_trace_holds_every_action(schedule):
    def body(mesh):
        tracer = mm.Tracer(mesh.rank)
        pipe = make_pipeline(mesh, 4, schedule=schedule, tracer=tracer)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        events = tracer.events()
        computed = [e.name for e in events if e.category in ("forward", "backward")]
        assert computed == [str(action) for action in pipe.schedule().ranks[mesh.rank]]
        assert all(e.name == f"{e.stage}{e.name[1:]}" for e in events if e.stage is not None)
        return {
            category: sorted(e.name for e in events if e.category == category)
            for category in ("send", "recv")
        }

    first, middle, last = on_ranks("pp=3", body)
    assert first["send"] == [f"0SEND_F{m}" for m in range(4)]
    assert first["recv"] == [f"0RECV_B{m}" for m in range(4)]
    assert middle["send"] == [f"1SEND_{kind}{m}" for kind in "BF" for m in range(4)]
    assert last["recv"] == [f"2RECV_F{m}" for m in range(4)]


def test_slots_are_used_again():
    def body(mesh):
        pipe = make_pipeline(mesh, 8)
        sizes = []
        for step in range(4):
            pipe.train_step(*batch(step, 64), loss=nn.cross_entropy)
            pipe.forward(batch(step, 64)[0])
            sizes.append(pipe._engine.pool.nbytes)
        return sizes

    for sizes in on_ranks("pp=4", body):
        assert sizes[1:] == sizes[:1] * 3


def test_messages_are_counted():
    def body(mesh):
        pipe = make_pipeline(mesh, 4)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        traffic = mesh.traffic()
        return traffic.calls["pipeline send"], traffic.bytes["pipeline send"]

    # Stage 0 of 2 ends with the 7 features of its last layer.
    assert on_ranks("pp=2", body) == [(4, 16 * 7 * 8)] * 2


# -- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (list, {}, ScheduleError, "at least one stage"),
        (lambda: [PipelineStage(1), PipelineStage(0)], {}, ScheduleError, r"0 to 1.*\[1, 0\]"),
        (lambda: [PipelineStage(0), PipelineStage(0)], {}, ScheduleError, r"got \[0, 0\]"),
        (lambda: cut(3), {}, ScheduleError, "one stage on each rank, got 3 stages and 2 ranks"),
        (
            lambda: cut(3),
            {"schedule": gpipe},
            ScheduleError,
            "3 stages on 3 ranks, but the mesh has 2 .*pp=3",
        ),
        (
            lambda: cut(2),
            {"schedule": make_schedule("gpipe", 3, 4)},
            ScheduleError,
            "is for 3 stages, but there are 2",
        ),
        (lambda: cut(2), {"num_microbatches": 0}, ScheduleError, "at least 1, got 0"),
        (lambda: cut(2), {"schedule": "1f2b"}, UnknownNameError, "1f2b"),
        (lambda: cut(2), {"schedule": "forward"}, ScheduleError, "no backward"),
        (lambda: cut(2), {"dim": "qq"}, UnknownNameError, "no dim 'qq'"),
        (lambda: cut(2), {"data_dim": "qq"}, UnknownNameError, "no dim 'qq'"),
        (lambda: [nn.Linear(2, 2)], {}, ScheduleError, "PipelineStage objects, got Linear"),
    ],
)
def test_pipelines_that_cannot_be(make, options, error, message):
    def body(mesh):
        with pytest.raises(error, match=message):
            PipelineParallel(make(), **{"num_microbatches": 4, "mesh": mesh, **options})

    on_ranks("pp=2", body)


@pytest.mark.parametrize("stage_id", [-1, 1.0, True, "0"])
def test_a_stage_has_a_number(stage_id):
    with pytest.raises(ScheduleError, match="whole number"):
        PipelineStage(stage_id)


def test_a_stage_by_itself():
    stage = PipelineStage(4)
    x = np.ones((2, 3))
    assert stage.stage_id == 4
    assert stage.forward(x) is x
    assert stage.parameters() == []
    assert stage.add_layer(nn.Linear(3, 2)).add_layer(nn.ReLU()) is stage
    assert repr(stage) == "PipelineStage(4, Linear(3, 2), ReLU())"
    assert len(stage.parameters()) == 2


def test_a_batch_of_no_rows_cannot_be_trained():
    def body(mesh):
        pipe = make_pipeline(mesh)
        with pytest.raises(ShapeError, match="no rows"):
            pipe.train_step(*batch(0, 0), loss=nn.cross_entropy)
        return pipe.train_step(*batch(0, 12), loss=nn.cross_entropy)

    losses = on_ranks("dp=2,pp=2", body)
    np.testing.assert_allclose(losses, train_alone(1, 12).losses * 4, rtol=1e-12)


# -- layers of any kind ---------------------------------------------------------------------


class Doubled:
    """The least that a layer is: no base class, no halves, no memory to be made."""

    def __init__(self):
        self.factor = nn.Parameter("factor", (), nn.Constant(2.0))
        self.factor.materialize(seed=0, dtype=np.float64)

    def forward(self, x, ctx=None):
        if ctx is not None:
            ctx.save(self, x)
        return x * self.factor.data

    def backward(self, dy, ctx):
        (x,) = ctx.take(self)
        self.factor.accumulate(np.array((dy * x).sum()))
        return dy * self.factor.data

    def parameters(self):
        return [self.factor]


@pytest.mark.parametrize("schedule", ["1f1b", halves])
def test_a_layer_needs_three_methods(schedule):
    x, target = batch(0, 12)[0], np.ones((12, FEATURES))
    # loss = mean((8 x - 1)^2), where each of the three factors is 2.
    expected = np.mean((8 * x - 1) ** 2)
    gradient = np.mean(2 * (8 * x - 1) * 4 * x)

    def body(mesh):
        pipe = make_pipeline(mesh, stages=cut(3, [Doubled() for _ in range(3)]), schedule=schedule)
        assert pipe.train_step(x, target, loss=nn.mse) == pytest.approx(expected, rel=1e-12)
        (factor,) = pipe.parameters()
        assert factor.grad == pytest.approx(gradient, rel=1e-12)

    on_ranks("dp=2,pp=3", body)
