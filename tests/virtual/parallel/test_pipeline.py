"""Pipelines on virtual ranks, against the unsplit model in one process."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import ScheduleError, ShapeError, UnknownNameError
from mpimesh.parallel import PipelineParallel, PipelineStage
from mpimesh.schedule import gpipe, make_schedule, validate
from tests.helpers.depth import deep, deep_but
from tests.helpers.parallel_models import (
    CLASSES,
    FEATURES,
    SEED,
    assert_same,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    train_alone,
    train_on,
)
from tests.helpers.parallel_schedules import all_on_one, halves, looped
from tests.helpers.raises import raises

MESHES = ["dp=1", "pp=2", "pp=3", "pp=4", "dp=2", "dp=4", "dp=2,pp=2", "dp=2,pp=4", "dp=3,pp=2"]


# -- the same training on every mesh ------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", *deep("gpipe")])
@pytest.mark.parametrize("dims", deep_but(MESHES, "pp=4", "dp=4", "dp=3,pp=2"))
# 32 divides by everything, 13 by nothing; 3 are fewer than microbatches, 1 than replicas.
@pytest.mark.parametrize("rows", [*deep(32), 13, *deep(3), 1])
def test_every_mesh_trains_the_same(dims, schedule, rows):
    def body(mesh):
        return train_on(mesh, 3, rows, schedule=schedule)

    for trained in on_ranks(dims, body, rendezvous=True):
        assert_same(trained, train_alone(3, rows))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 32, 100])
def test_any_number_of_microbatches_trains_the_same(num_microbatches):
    def body(mesh):
        return train_on(mesh, 2, 13, num_microbatches=num_microbatches)

    for trained in on_ranks("dp=2,pp=3", body):
        assert_same(trained, train_alone(2, 13))


def test_other_dims_repeat_the_work():
    def body(mesh):
        return train_on(mesh, 2, 13)

    for trained in on_ranks("other=2,pp=2", body):
        assert_same(trained, train_alone(2, 13))


def test_names_of_dims_are_free():
    def body(mesh):
        pipe = PipelineParallel(
            cut(2), 4, mesh=mesh, dim="rows", data_dim="cols", seed=SEED, dtype="float64"
        )
        return pipe.train_step(*batch(0, 12), loss=nn.cross_entropy)

    losses = on_ranks("cols=2,rows=2", body)
    np.testing.assert_allclose(losses, train_alone(1, 12).losses * 4, rtol=1e-12)


# -- schedules of other shapes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "schedule", "num_stages"),
    [
        ("pp=2", looped, 4),
        ("dp=2,pp=2", looped, 5),
        ("dp=1", all_on_one, 3),
        ("dp=2", all_on_one, 4),
        ("pp=3", halves, 3),
        ("dp=2,pp=2", halves, 2),
    ],
)
@pytest.mark.parametrize("rows", [13, 2])
def test_a_schedule_is_data(dims, schedule, num_stages, rows):
    validate(schedule(num_stages, 4))

    def body(mesh):
        return train_on(mesh, 3, rows, schedule=schedule, stages=cut(num_stages))

    for trained in on_ranks(dims, body, rendezvous=True):
        assert_same(trained, train_alone(3, rows))


def test_a_schedule_for_one_number_of_microbatches():
    def body(mesh):
        pipe = make_pipeline(mesh, 4, schedule=make_schedule("gpipe", 2, 4))
        loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with raises(ScheduleError, "gpipe", 4, 3):
            pipe.train_step(*batch(0, 3), loss=nn.cross_entropy)
        return loss

    losses = on_ranks("pp=2", body)
    np.testing.assert_allclose(losses, train_alone(1, 16).losses * 2, rtol=1e-12)


# -- who is given what ------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["pp=3", "dp=2,pp=2"])
def test_ranks_need_only_what_they_use(dims):
    def body(mesh):
        pipe = make_pipeline(mesh)
        stage, last = mesh.coord("pp"), mesh.dim_size("pp") - 1
        losses = []
        for step in range(3):
            x, target = batch(step, 13 + step)
            losses.append(
                pipe.train_step(
                    x if stage == 0 else None,
                    target if stage == last else None,
                    loss=nn.cross_entropy,
                )
            )
        y = pipe.forward(batch(9, 5)[0] if stage == 0 else None)
        assert (y is None) == (stage != last)
        return losses

    expected = []
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    for step in range(3):
        x, target = batch(step, 13 + step)
        expected.append(nn.cross_entropy(model.forward(x, nn.Context(step=step)), target))
    for losses in on_ranks(dims, body, rendezvous=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_only_the_own_stage_has_memory():
    def body(mesh):
        pipe = make_pipeline(mesh)
        for number in range(3):
            here = number == mesh.coord("pp")
            stage = pipe.stage(number)
            assert stage is not None
            assert stage.parameters()
            assert all((p.data is not None) == here for p in stage.parameters())
        assert pipe.local_stages == (pipe.stage(mesh.coord("pp")),)
        assert pipe.parameters() == pipe.local_stages[0].parameters()
        assert pipe.num_stages == 3
        assert pipe.stage(3) is None
        assert pipe.stage(-1) is None
        return [name for name, _ in pipe.named_parameters()]

    names = [name for part in on_ranks("pp=3", body) for name in part]
    assert names == [name for name, _ in nn.Sequential(layers()).named_parameters()]


# -- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["dp=1", "pp=3", "dp=3", "dp=2,pp=2"])
@pytest.mark.parametrize("rows", [0, *deep(1, 2), 7, *deep(24)])
def test_forward_gives_the_rows_in_order(dims, rows):
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    x = batch(5, rows)[0]
    expected = model.forward(x)

    def body(mesh):
        pipe = make_pipeline(mesh)
        last = not mesh.contains_dim("pp") or mesh.coord("pp") == mesh.dim_size("pp") - 1
        for _ in range(2):
            y = pipe(x)
            assert (y is not None) == last
            if last:
                np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
            y = pipe.forward(x, everywhere=True)
            assert y.shape == (rows, CLASSES)
            np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)

    on_ranks(dims, body, rendezvous=True)


def test_inputs_of_another_shape_are_another_kind():
    """Rows may grow and shrink from batch to batch: sequences of other lengths."""

    def made():
        return [nn.Embedding(9, 4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)]

    model = nn.Sequential(made())
    model.materialize(seed=SEED, dtype=np.float64)

    def body(mesh):
        pipe = make_pipeline(mesh, stages=cut(2, made()))
        rng = np.random.default_rng(1)
        for length in (5, 3, 5, 8, 3):
            tokens = rng.integers(0, 9, (6, length))
            target = rng.integers(0, 3, (6, length))
            loss = pipe.train_step(tokens, target, loss=nn.cross_entropy)
            assert loss == pytest.approx(nn.cross_entropy(model.forward(tokens), target), rel=1e-12)
            y = pipe.forward(tokens, everywhere=True)
            np.testing.assert_allclose(y, model.forward(tokens), rtol=1e-12)

    on_ranks("pp=2", body)


def test_integers_pass_between_stages():
    """The first stage hands its tokens on: nothing there to train, so no gradient comes back."""
    stages = [
        lambda: PipelineStage(0),
        lambda: PipelineStage(1).add_layer(nn.Embedding(9, 4)).add_layer(nn.Linear(4, 3)),
    ]
    model = nn.Sequential(*stages[1]().layers)
    model.materialize(seed=0, dtype=np.float64)
    tokens = np.arange(9)

    def body(mesh):
        pipe = PipelineParallel([make() for make in stages], 4, mesh=mesh, dtype="float64")
        before = mesh.traffic().calls.get("pipeline send", 0)
        loss = pipe.train_step(tokens, tokens % 3, loss=nn.cross_entropy)
        assert loss == pytest.approx(nn.cross_entropy(model.forward(tokens), tokens % 3))
        return mesh.traffic().calls.get("pipeline send", 0) - before

    assert on_ranks("pp=2", body) == [3, 0]


@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_auto_trains_batches_of_any_size(rows):
    """Also those that give replicas other numbers of microbatches."""

    def body(mesh):
        return train_on(mesh, 2, rows, stages=cut(4), schedule="auto")

    for trained in on_ranks("dp=2,pp=2", body):
        assert_same(trained, train_alone(2, rows))


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
    """Frozen values stay; below the first stage that is trained there is no backward."""
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
        assert computed == [str(action) for action in pipe.schedule().ranks[mesh.coord("pp")]]
        assert all(e.name == f"{e.stage}{e.name[1:]}" for e in events if e.stage is not None)
        names = {
            category: sorted(e.name for e in events if e.category == category)
            for category in ("send", "recv")
        }
        return names, [(e.category, e.message) for e in events if e.message]

    results = on_ranks("dp=2,pp=3", body)
    first, middle, last = [names for names, _ in results[:3]]
    # Both ends of a message have one text, which no other message has.
    messages = [one for _, ends in results for one in ends]
    sent = [text for category, text in messages if category == "send"]
    assert len(set(sent)) == len(sent) == 2 * 4 * 4
    assert sorted(sent) == sorted(text for category, text in messages if category == "recv")
    assert {text[:3] for text in sent} == {"0>1", "1>2", "2>1", "1>0", "3>4", "4>5", "5>4", "4>3"}
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
    ("make", "options", "error", "values"),
    [
        (list, {}, ScheduleError, ("stage", "none")),
        (lambda: [PipelineStage(1), PipelineStage(0)], {}, ScheduleError, ([1, 0],)),
        (lambda: [PipelineStage(0), PipelineStage(0)], {}, ScheduleError, ([0, 0],)),
        (
            lambda: cut(3),
            {},
            ScheduleError,
            ("1f1b", "num_stages 3", "num_ranks 2", "interleaved"),
        ),
        (lambda: cut(3), {"schedule": gpipe}, ScheduleError, ("gpipe", "3 stages", 2, "pp=3")),
        (
            lambda: cut(2),
            {"schedule": make_schedule("gpipe", 3, 4)},
            ScheduleError,
            ("gpipe", "3 stages", 2),
        ),
        (lambda: cut(2), {"num_microbatches": 0}, ScheduleError, ("num_microbatches", 1, 0)),
        (lambda: cut(2), {"schedule": "1f2b"}, UnknownNameError, ("'1f2b'", "1f1b", "gpipe")),
        (lambda: cut(2), {"schedule": "forward"}, ScheduleError, ("forward", "backward")),
        (lambda: cut(2), {"dim": "qq"}, UnknownNameError, ("pp=2", "'qq'")),
        (lambda: cut(2), {"data_dim": "qq"}, UnknownNameError, ("pp=2", "'qq'")),
        (lambda: [nn.Linear(2, 2)], {}, ScheduleError, ("PipelineStage(i).add_layer", "Linear")),
    ],
)
def test_pipelines_that_cannot_be(make, options, error, values):
    def body(mesh):
        with raises(error, *values):
            PipelineParallel(make(), **{"num_microbatches": 4, "mesh": mesh, **options})

    on_ranks("pp=2", body)


@pytest.mark.parametrize("stage_id", [-1, 1.0, True, "0"])
def test_a_stage_has_a_number(stage_id):
    with raises(ScheduleError, "stage_id", 0, repr(stage_id)):
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
        with raises(ShapeError, "rank 0", "mean", "no rows"):
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
        assert pipe.train_step(x, target, loss=nn.mse_loss) == pytest.approx(expected, rel=1e-12)
        (factor,) = pipe.parameters()
        assert factor.grad == pytest.approx(gradient, rel=1e-12)

    on_ranks("dp=2,pp=3", body)
