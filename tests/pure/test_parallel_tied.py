"""One parameter in several stages trains like the unsplit model, on virtual ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.parallel import DataParallel
from tests.pure.parallel_models import SEED, assert_same, on_ranks
from tests.pure.parallel_schedules import all_on_one, halves
from tests.pure.parallel_tied import (
    FEATURES,
    SHARED,
    assert_gradients,
    assert_one_gradient,
    gradients_of,
    tied_batch,
    tied_pipeline,
    train_tied_alone,
    train_tied_on,
)

# -- the same training ---------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("dims", "schedule", "chunks"),
    [
        ("dp=1,pp=1", "1f1b", 1),
        ("dp=1,pp=1", all_on_one, 4),
        ("dp=2,pp=1", all_on_one, 4),
        ("pp=2", "1f1b", 1),
        ("pp=2", "zb1p", 1),
        ("pp=2", "interleaved", 2),
        ("pp=2", "zbv", 2),
        ("pp=4", "1f1b", 1),
        ("pp=4", "gpipe", 1),
        ("pp=4", "zb1p", 1),
        ("pp=4", "interleaved", 2),
        ("pp=4", "zbv", 2),
        ("dp=2,pp=2", "1f1b", 1),
        ("dp=2,pp=2", "zb1p", 1),
        ("dp=2,pp=2", "interleaved", 2),
        ("dp=2,pp=2", "zbv", 2),
        ("dp=2,pp=4", "1f1b", 1),
        ("dp=2,pp=4", "zbv", 2),
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
    loss, dy = nn.mse.value_and_grad(model.forward(x, context), x, denominator=len(x))
    model.backward(dy, context)

    def body(mesh):
        pipe = tied_pipeline(mesh, layers=made(), schedule=schedule)
        assert pipe.train_step(x, x, loss=nn.mse) == pytest.approx(loss, rel=1e-12)
        assert [name for name, _ in pipe.named_parameters()] == ["0.0.weight", "0.0.bias"]
        assert_gradients(pipe, {name: p.grad for name, p in model.named_parameters()})

    on_ranks(dims, body)


def test_replicas_of_a_model_that_uses_its_first_layer_twice():
    x = np.random.default_rng(1).normal(size=(12, FEATURES))

    def body(mesh):
        shared = nn.Linear(FEATURES, FEATURES)
        model = DataParallel(nn.Sequential(shared, nn.GELU(), shared), mesh, loss=nn.mse, seed=1)
        return model.train_step(x.astype("float32"), x.astype("float32"))

    losses = on_ranks("dp=2", body)
    assert losses[0] == losses[1] > 0
