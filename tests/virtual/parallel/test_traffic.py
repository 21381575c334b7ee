"""Traffic of pipelines and data parallelism, and budgets on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from mpimesh import nn, optim
from mpimesh.errors import BudgetError
from mpimesh.parallel import DataParallel, ParallelOptimizer
from tests.helpers.parallel_models import batch, layers, make_pipeline, on_ranks
from tests.helpers.raises import raises

WIDTH = 7  # of what stage 0 of two gives to stage 1


def step(pipe, rows=10, **options):
    return pipe.train_step(*batch(0, rows), loss=nn.cross_entropy, **options)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_pipeline_receives_activations_and_their_gradients(microbatches):
    def body(mesh):
        pipe = make_pipeline(mesh, microbatches)
        step(pipe)
        before = mesh.traffic().snapshot()
        step(pipe)
        traffic = mesh.traffic() - before
        other = 1 - mesh.rank
        (peer,) = traffic.by_peer("pipeline recv").items()
        assert peer[0] == other
        assert peer[1].received_bytes == 10 * WIDTH * 8
        assert peer[1].received_messages == microbatches
        assert traffic.calls["pipeline recv"] == traffic.calls["pipeline send"] == microbatches
        assert traffic.bytes["pipeline recv"] == 0

    on_ranks("pp=2", body)


def test_a_pipeline_forward_receives_activations_only():
    def body(mesh):
        pipe = make_pipeline(mesh)
        pipe.forward(batch(0, 10)[0])
        return mesh.traffic().by_peer("pipeline recv")

    first, last = on_ranks("pp=2", body)
    assert not first
    assert last[0].received_bytes == 10 * WIDTH * 8


@pytest.mark.parametrize("size", [1, 2, 4])
def test_replicas_receive_what_all_reduces_do(size):
    def body(mesh):
        model = DataParallel(nn.Sequential(layers()), mesh, dtype=np.float64, bucket_bytes=300)
        parameters = sum(parameter.data.nbytes for parameter in model.parameters())
        before = mesh.traffic().snapshot()
        with model.no_sync():
            step(model)
        small = mesh.traffic() - before
        before = mesh.traffic().snapshot()
        step(model)
        whole = mesh.traffic() - before
        if size == 1:  # it agrees with nobody
            assert not small.calls
            assert not whole.calls
            return
        for traffic in (small, whole):
            # All arrays are of float64 or int64, which four ranks share evenly.
            assert traffic.received_bytes * size == 2 * (size - 1) * traffic.bytes["all_reduce"]
            messages = 2 * (size - 1) * traffic.calls["all_reduce"]
            assert traffic.received_messages == messages
        assert whole.bytes["all_reduce"] - small.bytes["all_reduce"] == parameters

    on_ranks(f"dp={size}", body)


@pytest.mark.parametrize(
    ("way", "collectives"),
    [
        # The status and the bucket.
        ("plain", {"all_reduce": 2}),
        # Two buckets may start before the status, so there is a header.
        ("two buckets", {"all_reduce": 4}),
        # Whether all replicas have rows of their own, and how many.
        ("own rows", {"all_reduce": 4}),
        # Whether all have done the update.
        ("zero=0", {"all_reduce": 3}),
        # The sums of each rank's part; its new values.
        ("zero=1", {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}),
        # No gradient that is infinite or NaN on any rank.
        ("scaled", {"all_reduce": 4}),
    ],
)
def test_the_collectives_of_a_step(way, collectives):
    def body(mesh):
        net = nn.Sequential(layers())
        count = sum(parameter.size for parameter in net.parameters())
        most = 8 * count - (way == "two buckets")
        model = DataParallel(net, mesh, dtype=np.float64, bucket_bytes=most)
        optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
        if way.startswith(("zero", "scaled")):
            optimizer = ParallelOptimizer(
                optimizer,
                model,
                zero=int(way == "zero=1"),
                scaler=optim.LossScaler(2.0) if way == "scaled" else None,
            )
        train = partial(model.train_step, *batch(0, 10), loss=nn.cross_entropy, optimizer=optimizer)
        if way == "own rows":
            train = partial(train, rows="local")
        train()
        before = mesh.traffic().snapshot()
        train()
        assert (mesh.traffic() - before).calls == collectives

    on_ranks("dp=3", body)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("where", ["all ranks", "rank 3"])
def test_a_step_over_its_budget_ends_alike_on_all_ranks(where, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def body(mesh):
        expected = step(make_pipeline(mesh))
        pipe = make_pipeline(mesh)
        optimizer = optim.SGD(pipe.parameters(), lr=0.1)
        values = {name: p.data.copy() for name, p in pipe.named_parameters()}
        nbytes = 1000 if where == "all ranks" or mesh.rank == 3 else None
        too_much = raises(BudgetError, "1000 bytes")
        with mesh.budget(bytes=nbytes) as budget, too_much as caught:
            step(pipe, optimizer=optimizer)
        assert caught.value.agreed
        assert budget.used_bytes > 0
        for name, parameter in pipe.named_parameters():
            np.testing.assert_array_equal(parameter.data, values[name])
        assert pipe.step == 0
        assert step(pipe, optimizer=optimizer) == pytest.approx(expected, rel=1e-12)
        assert pipe.step == 1
        return str(caught.value)

    texts = on_ranks("dp=2,pp=2", body)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 3: " if where == "rank 3" else "rank 0: ")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["all ranks", "rank 1"])
def test_a_sum_over_a_budget_is_refused_before_it_starts(where, stage):
    def body(mesh):
        model = DataParallel(nn.Sequential(layers()), mesh, dtype=np.float64)
        optimizer = ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model, zero=stage)
        expected = step(model, optimizer=optimizer)
        values = model.full_state_dict()
        nbytes = 300 if where == "all ranks" or mesh.rank == 1 else None
        too_much = raises(BudgetError, "300 bytes", "sum of the gradients")
        with mesh.budget(bytes=nbytes) as budget, too_much as caught:
            step(model, optimizer=optimizer)
        assert caught.value.agreed
        assert 0 < budget.used_bytes < 300
        for name, value in model.full_state_dict().items():
            np.testing.assert_array_equal(value, values[name])
        assert model.step == 1
        with mesh.budget() as needed:
            assert step(model, optimizer=optimizer) < expected
        with mesh.budget(bytes=needed.used_bytes, messages=needed.used_messages):
            step(model, optimizer=optimizer)
        assert model.step == 3
        return str(caught.value)

    texts = on_ranks("dp=3", body)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1: " if where == "rank 1" else "rank 0: ")


def test_a_step_that_needs_just_what_it_may_goes_well():
    def body(mesh):
        pipe = make_pipeline(mesh)
        with mesh.budget() as needed:
            step(pipe)
        with mesh.budget(bytes=2 * needed.used_bytes, messages=2 * needed.used_messages) as both:
            step(pipe)
            step(pipe)
        assert both.used_bytes == 2 * needed.used_bytes
        # The last bytes tell all ranks that the step went well: it has, when they are too much.
        too_much = raises(BudgetError, "'step status'", f"{needed.used_bytes - 1} bytes")
        with mesh.budget(bytes=needed.used_bytes - 1), too_much:
            step(pipe)
        assert pipe.step == 4
        step(pipe)

    on_ranks("dp=2,pp=2", body)
