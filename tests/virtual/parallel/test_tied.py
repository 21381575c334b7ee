"""One parameter in several stages trains like the unsplit model, on virtual ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, ModuleStateError, StageError
from mpimesh.nn import Parameter
from mpimesh.parallel import DataParallel, GradientBuckets, PipelineParallel, PipelineStage
from tests.helpers.depth import deep
from tests.helpers.parallel_models import SEED, assert_same, cut, on_ranks
from tests.helpers.parallel_schedules import all_on_one, halves
from tests.helpers.parallel_tied import (
    FEATURES,
    SHARED,
    TOKENS,
    assert_gradients,
    assert_one_gradient,
    gradients_of,
    tied_alone,
    tied_batch,
    tied_layers,
    tied_pipeline,
    train_tied_alone,
    train_tied_on,
)
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of
from tests.helpers.raises import raises

# -- the same training ---------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, *deep(False)])
@pytest.mark.parametrize(
    ("dims", "schedule", "chunks"),
    [
        *deep(("dp=1,pp=1", "1f1b", 1)),
        ("dp=1,pp=1", all_on_one, 4),
        *deep(("dp=2,pp=1", all_on_one, 4), ("pp=2", "1f1b", 1)),
        ("pp=2", "zb1p", 1),
        *deep(("pp=2", "interleaved", 2), ("pp=2", "zbv", 2), ("pp=4", "1f1b", 1)),
        *deep(("pp=4", "gpipe", 1), ("pp=4", "zb1p", 1)),
        ("pp=4", "interleaved", 2),
        *deep(("pp=4", "zbv", 2)),
        ("dp=2,pp=2", "1f1b", 1),
        *deep(("dp=2,pp=2", "zb1p", 1), ("dp=2,pp=2", "interleaved", 2)),
        ("dp=2,pp=2", "zbv", 2),
        *deep(("dp=2,pp=4", "1f1b", 1), ("dp=2,pp=4", "zbv", 2)),
        ("dp=2,tp=2,pp=2", halves, 1),
    ],
)
def test_it_trains_like_the_unsplit_model(dims, schedule, chunks, overlap):
    """Losses, norms, values after three optimizer steps; 13 rows are uneven everywhere."""

    def body(mesh):
        return train_tied_on(mesh, 3, 13, schedule=schedule, chunks=chunks, overlap=overlap)

    parts = on_ranks(dims, body, rendezvous=True)
    for trained in parts:
        assert_same(trained, train_tied_alone(3, 13))
    if "pp=1" not in dims:
        assert_one_gradient([part.state for part in parts])


@pytest.mark.parametrize("rows", [1, 3])
def test_replicas_and_stages_without_rows(rows):
    """A replica that has no rows adds zeros, to the copies as well."""

    def body(mesh):
        return train_tied_on(mesh, 3, rows)

    for trained in on_ranks("dp=4,pp=2", body):
        assert_same(trained, train_tied_alone(3, rows))


def gradients_on(mesh: mm.DeviceMesh, **options: Any) -> dict[str, np.ndarray]:
    pipe = tied_pipeline(mesh, **options)
    for _ in range(2):  # the second one reduces while backward runs
        pipe.step = 0
        pipe.train_step(*tied_batch(0, 13), loss=nn.cross_entropy)
    assert_gradients(pipe, gradients_of(13))
    return {name: np.array(p.grad) for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("dims", ["pp=2", "pp=4", "dp=2,pp=4"])
def test_schedules_that_add_in_one_order_give_the_same_bits(dims):
    """One stage on each rank: its microbatches in order, then the stages."""
    known: dict[str, np.ndarray] = {}
    for schedule in ("1f1b", "gpipe", "zb1p", "zb2p"):
        parts = on_ranks(dims, partial(gradients_on, schedule=schedule))
        assert_one_gradient(parts)
        for part in parts:
            for name, gradient in part.items():
                np.testing.assert_array_equal(known.setdefault(name, gradient), gradient)


@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
def test_buckets_of_one_and_of_several(bucket_bytes):
    assert_one_gradient(on_ranks("dp=2,pp=4", partial(gradients_on, bucket_bytes=bucket_bytes)))


@pytest.mark.parametrize("dims", ["pp=4", "dp=2,pp=2"])
def test_steps_without_sync_are_reduced_once(dims):
    rows = [8, 5, 3]
    expected = gradients_of(*rows)

    def body(mesh):
        pipe = tied_pipeline(mesh)
        for _ in range(2):
            pipe.step = 0
            for step, count in enumerate(rows):
                before = mesh.traffic().bytes.get("all_reduce", 0)
                with pipe.no_sync() if step < 2 else nullcontext():
                    pipe.train_step(*tied_batch(step, count), loss=nn.cross_entropy, denominator=16)
                moved = mesh.traffic().bytes["all_reduce"] - before
                # Headers and status; in the last step the shared weights, too.
                reduced = step == 2 and bool(pipe.parameters())
                assert moved > 8 * FEATURES * FEATURES if reduced else moved < 300
            assert_gradients(pipe, expected)

    on_ranks(dims, body)


def test_a_gradient_is_complete_after_all_its_uses():
    """On one rank, buckets fill in two stages and are not reduced before the last use."""

    def body(mesh):
        tracer = mm.Tracer(mesh.rank)
        pipe = tied_pipeline(mesh, schedule=all_on_one, chunks=4, tracer=tracer, bucket_bytes=1)
        for _ in range(2):
            tracer.clear()
            pipe.step = 0
            pipe.train_step(*tied_batch(0, 16), loss=nn.cross_entropy)
        assert_gradients(pipe, gradients_of(16))
        starts = {e.name: e.start_s for e in tracer.events() if e.category == "collective"}
        last = max(e.start_s for e in tracer.events() if e.category == "backward")
        buckets = {
            name: number
            for number, bucket in enumerate(pipe.buckets.buckets)
            for name, p in pipe.named_parameters()
            if p is bucket.parameters[0]
        }
        for name in SHARED:
            assert starts[f"all_reduce bucket {buckets[name]}"] > last
        assert starts[f"all_reduce bucket {buckets['7.bias']}"] < last

    on_ranks("dp=2,pp=1", body)


# -- a whole layer in several places ---------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", halves])
@pytest.mark.parametrize("dims", ["pp=1", "pp=2", "dp=2,pp=3"])
def test_a_layer_in_every_stage(dims, schedule):
    """The first layer gives its input no gradient, unless it stands elsewhere, too."""
    x = np.random.default_rng(1).normal(size=(12, FEATURES))

    def made():
        shared, dropped = nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5)
        return [nn.Sequential(shared), dropped, shared, dropped, nn.Sequential(shared, nn.GELU())]

    model = nn.Sequential(made())
    model.materialize(seed=SEED, dtype=np.float64)
    context = nn.Context()
    loss, dy = nn.mse_loss.value_and_grad(model.forward(x, context), x, denominator=len(x))
    model.backward(dy, context)

    def body(mesh):
        pipe = tied_pipeline(mesh, layers=made(), schedule=schedule)
        assert pipe.train_step(x, x, loss=nn.mse_loss) == pytest.approx(loss, rel=1e-12)
        assert [name for name, _ in pipe.named_parameters()] == ["0.0.weight", "0.0.bias"]
        assert_gradients(pipe, {name: p.grad for name, p in model.named_parameters()})

    on_ranks(dims, body)


def test_replicas_of_a_model_that_uses_its_first_layer_twice():
    x = np.random.default_rng(1).normal(size=(12, FEATURES))

    def body(mesh):
        shared = nn.Linear(FEATURES, FEATURES)
        model = DataParallel(
            nn.Sequential(shared, nn.GELU(), shared), mesh, loss=nn.mse_loss, seed=1
        )
        return model.train_step(x.astype("float32"), x.astype("float32"))

    losses = on_ranks("dp=2", body)
    assert losses[0] == losses[1] > 0


# -- first values ------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["pp=1", "pp=2", "pp=4"])
def test_first_values_are_those_of_the_first_place(dims):
    model = tied_alone()
    apart = nn.Sequential(nn.Embedding(TOKENS, FEATURES), nn.Linear(FEATURES, FEATURES))
    apart.materialize(seed=SEED, dtype=np.float64)
    expected = {name: p.data for name, p in model.named_parameters()}
    for name in SHARED:
        np.testing.assert_array_equal(expected[name], dict(apart.named_parameters())[name].data)

    def body(mesh):
        pipe = tied_pipeline(mesh)
        for name, parameter in pipe.named_parameters():
            np.testing.assert_array_equal(parameter.data, expected[name], err_msg=name)
        names = {name for name, _ in pipe.named_parameters()}
        lent = [p for s in cut_of(pipe) for p in s.parameters() if p.data is not None]
        assert len({id(p) for p in lent}) == len(names)  # no other rank's memory stays
        return names

    parts = on_ranks(dims, body)
    assert set().union(*parts) == expected.keys()
    if len(parts) == 4:
        assert [sorted(part & set(SHARED)) for part in parts] == [
            ["0.weight", "1.weight"],
            [],
            ["1.weight"],
            ["0.weight", "1.weight"],
        ]


def cut_of(pipe: PipelineParallel) -> list[PipelineStage]:
    return [stage for n in range(pipe.num_stages) if (stage := pipe.stage(n)) is not None]


def test_values_that_are_there_already_are_kept():
    def body(mesh):
        layers = tied_layers()
        layers[7].weight.materialize(seed=99, dtype=np.float64)  # in a layer without a bias yet
        layers[4].weight.materialize(seed=98, dtype=np.float64)
        before = [np.array(layers[place].weight.data) for place in (0, 1)]
        pipe = tied_pipeline(mesh, layers=layers)
        mine = dict(pipe.named_parameters())
        for name, values in zip(SHARED, before, strict=True):
            np.testing.assert_array_equal(mine[name].data, values)

    on_ranks("pp=2", body)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("odd", ["seed", "dtype", "some have none", "frozen"])
def test_copies_that_differ_are_refused_on_all_ranks(odd, broadcast):
    def body(mesh):
        layers = tied_layers()
        shared = layers[0].weight
        last = mesh.coord("pp") == 3
        if odd == "frozen":
            pipe = tied_pipeline(mesh, layers=layers)
            shared.requires_grad = not last
            text = str(error_of(pipe.rebuild_buckets))
            shared.requires_grad = True
            # Nothing has changed: the buckets are as before.
            pipe.train_step(*tied_batch(0, 13), loss=nn.cross_entropy)
            assert_gradients(pipe, gradients_of(13))
            return text
        if not (odd == "some have none" and last):
            seed = 9 + (odd == "seed" and last)
            dtype = "float32" if odd == "dtype" and last else "float64"
            shared.materialize(seed=seed, dtype=dtype)
        error = error_of(partial(tied_pipeline, mesh, layers=layers, broadcast=broadcast))
        assert type(error) is MismatchError
        assert error.agreed
        return str(error)

    texts = on_ranks("dp=2,pp=4", body)
    assert len(set(texts)) == 1
    assert "'0.weight'" in texts[0]
    assert [f"rank {rank}: 0.weight ({TOKENS}, {FEATURES})" in texts[0] for rank in range(8)] == [
        True, False, False, True, True, False, False, True
    ]  # fmt: skip


def test_ranks_that_tie_differently_are_told():
    def body(mesh):
        layers = tied_layers()
        if mesh.rank == 1:
            layers[7] = nn.Linear(FEATURES, TOKENS)
        assert isinstance(error_of(partial(tied_pipeline, mesh, layers=layers)), MismatchError)

    on_ranks("pp=4", body)


# -- between the steps -----------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["pp=2", "dp=2,pp=4"])
def test_states_have_each_parameter_once_and_reach_all_copies(dims):
    source = tied_alone()
    expected = {name: np.array(p.data) + 1 for name, p in source.named_parameters()}

    def body(mesh):
        pipe = tied_pipeline(mesh)
        pipe.load_state_dict(expected)
        state = pipe.full_state_dict()
        assert list(state) == list(expected)
        for name, values in state.items():
            np.testing.assert_array_equal(values, expected[name])
        assert len({id(p) for p in pipe.parameters()}) == len(pipe.parameters())
        for name, parameter in pipe.named_parameters():
            np.testing.assert_array_equal(parameter.data, expected[name])
        pipe.check_replicas()
        # A copy that goes its own way is found.
        if mesh.coord("pp") == mesh.dim_size("pp") - 1:
            dict(pipe.named_parameters())["0.weight"].data[0, 0] += 1
        error = error_of(pipe.check_replicas)
        assert "tied parameter '0.weight'" in str(error)

    on_ranks(dims, body)


def test_optimizer_states_stay_equal():
    def body(mesh):
        pipe = tied_pipeline(mesh)
        optimizer = optim.AdamW(pipe.parameters(), lr=0.1)
        for step in range(3):
            pipe.train_step(*tied_batch(step, 13), loss=nn.cross_entropy)
            optimizer.step()
        named = zip(pipe.named_parameters(), optimizer.state_dict()["params"], strict=True)
        return {name: np.stack([s["mean"], s["square"], p.data]) for (name, p), s in named}

    assert_one_gradient(on_ranks("dp=2,pp=4", body))


@pytest.mark.parametrize("dims", ["pp=2", "dp=2,pp=2", "pp=4"])
def test_freezing_and_unfreezing(dims):
    expected = gradients_of(13)

    def body(mesh):
        layers = tied_layers()
        layers[0].weight.requires_grad = False
        pipe = tied_pipeline(mesh, layers=layers)
        pipe.train_step(*tied_batch(0, 13), loss=nn.cross_entropy)
        mine = dict(pipe.named_parameters())
        for name, parameter in mine.items():
            if name == "0.weight":
                assert parameter.grad is None
            else:
                np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-9, atol=1e-14)
        layers[0].weight.requires_grad = True
        if pipe.local_stages[0].stage_id == 0:
            with raises(ModuleStateError, f"rank {mesh.rank}", ["0.weight"]):
                pipe.zero_grad()
        pipe.rebuild_buckets()
        pipe.step = 0
        pipe.train_step(*tied_batch(0, 13), loss=nn.cross_entropy)
        assert_gradients(pipe, expected)
        layers[1].weight.requires_grad = False
        pipe.rebuild_buckets()
        pipe.step = 0
        pipe.train_step(*tied_batch(0, 13), loss=nn.cross_entropy)
        for name, parameter in mine.items():
            if name != "1.weight":
                np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-9, atol=1e-14)
        return pipe.clip_grad_norm(1e-3)

    norms = on_ranks(dims, body)
    rest = [grad for name, grad in expected.items() if name != "1.weight"]
    norm = np.sqrt(sum(float((grad**2).sum()) for grad in rest))
    np.testing.assert_allclose(norms, norm, rtol=1e-12)


def test_the_norm_counts_a_parameter_once_and_scales_all_copies():
    expected = gradients_of(13)
    norm = np.sqrt(sum(float((grad**2).sum()) for grad in expected.values()))

    def body(mesh):
        pipe = tied_pipeline(mesh)
        pipe.train_step(*tied_batch(0, 13), loss=nn.cross_entropy)
        assert pipe.clip_grad_norm(np.inf) == pytest.approx(norm, rel=1e-12)
        assert_gradients(pipe, expected)
        assert pipe.clip_grad_norm(norm / 4) == pytest.approx(norm, rel=1e-12)
        assert_gradients(pipe, {name: grad / 4 for name, grad in expected.items()})
        return {name: p.grad for name, p in pipe.named_parameters()}

    for dims in ("pp=4", "dp=2,pp=2"):
        assert_one_gradient(on_ranks(dims, body))


def test_two_pipelines_share_a_group():
    def body(mesh):
        groups = []
        for _ in range(2):
            pipe = tied_pipeline(mesh)
            pipe.train_step(*tied_batch(0, 13), loss=nn.cross_entropy)
            assert_gradients(pipe, gradients_of(13))
            groups.append(mesh.group_names)
        assert groups[0] == groups[1]
        return groups[0]

    assert on_ranks("pp=4", body)[0][-2:] == ["tied 0,3", "tied 0,2,3"]
    assert on_ranks("dp=2,pp=4", body)[1][-2:] == ["tied 0,3,4,7", "tied 0,2,3,4,6,7"]


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("stage", [0, *deep(1), 3])
@pytest.mark.parametrize("accumulated", [*deep(False), True])
def test_a_step_that_fails_leaves_nothing(kind, stage, accumulated):
    expected = gradients_of(16)

    def body(mesh):
        layers = tied_layers()
        places = {id(p): name for name, p in nn.Sequential(layers).named_parameters()}
        stages = cut(4, layers)
        trap = Trap()
        stages[stage].add_layer(trap)
        pipe = PipelineParallel(stages, 4, mesh=mesh, seed=SEED, dtype=np.float64, bucket_bytes=300)
        for attempt in range(3):
            if accumulated:
                with pipe.no_sync():
                    pipe.train_step(*tied_batch(1, 16), loss=nn.cross_entropy)
            if mesh.rank == 4 + stage:
                trap.arm(kind, min(attempt, 1))
            call = partial(pipe.train_step, *tied_batch(0, 16), loss=nn.cross_entropy)
            assert type(error_of(call)) is StageError
            trap.disarm()
            assert_nothing_left(mesh)
            assert not any(p.grad.any() for p in pipe.parameters() if p.grad is not None)
            pipe.step = 0
            pipe.train_step(*tied_batch(0, 16), loss=nn.cross_entropy)
            for parameter in pipe.parameters():
                gradient = expected[places[id(parameter)]]
                np.testing.assert_allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-14)
        pipe.check_replicas()
        return {name: p.grad for name, p in pipe.named_parameters()}

    assert_one_gradient(on_ranks("dp=2,pp=4", body))


@pytest.mark.parametrize("wrong", ["forward", "without sync"])
@pytest.mark.parametrize("dims", ["pp=2", "dp=2,pp=2"])
def test_ranks_that_do_different_things(dims, wrong):
    """The group of all that hold a parameter may be that of all ranks, which meet at the end."""

    def body(mesh):
        pipe = tied_pipeline(mesh)
        x, target = tied_batch(0, 16)
        call = partial(pipe.train_step, x, target, loss=nn.cross_entropy)
        call()
        odd = mesh.rank == 1
        if odd and wrong == "forward":
            call = partial(pipe.forward, x)
        with pipe.no_sync() if odd and wrong == "without sync" else nullcontext():
            assert type(error_of(call)) is MismatchError
        assert_nothing_left(mesh)
        pipe.step = 0
        pipe.train_step(x, target, loss=nn.cross_entropy)
        assert_gradients(pipe, gradients_of(16))

    on_ranks(dims, body)


# -- the buckets themselves --------------------------------------------------------------------


def test_buckets_over_more_ranks_than_the_replicas():
    def body(mesh):
        parameters = [Parameter(f"p{i}", (3,), nn.Constant(0.0)) for i in range(4)]
        for parameter in parameters:
            parameter.materialize(seed=0, dtype=np.float64)
        make = partial(GradientBuckets, parameters, mesh.group("dp"), mesh=mesh, bucket_bytes=40)
        with raises(ModuleError, "groups", 1, 4):
            make(groups=[mesh.group()])
        buckets = make(groups=[mesh.group(), None, mesh.group(), mesh.group("dp")])
        assert [bucket.parameters for bucket in buckets.buckets] == [
            (parameters[3],), (parameters[1],), (parameters[2],), (parameters[0],)
        ]  # fmt: skip
        for _ in range(2):
            buckets.zero_grad()
            for parameter in parameters:
                parameter.accumulate(np.full(3, 1.0 + mesh.rank))
            assert not any(bucket.handle for bucket in buckets.buckets[2:])
            buckets.synchronize()
            mine = 2.0 + 2 * mesh.coord("pp") + 2
            assert [p.grad[0] for p in parameters] == [10, mine, 10, mine]

    on_ranks("dp=2,pp=2", body)
