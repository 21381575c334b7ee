"""Buckets cut by measured times: the same training, and a cut that all ranks agree on."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn import Constant, Parameter
from mpimesh.parallel import GradientBuckets, bucket_plan
from mpimesh.parallel.bucket_plan import BucketTuning, Reduction, measure_reduction
from tests.helpers.depth import deep
from tests.helpers.parallel_models import assert_equal, batch, make_pipeline, on_ranks, state_of
from tests.helpers.raises import raises


def set_link(monkeypatch, latency_s, bytes_per_s):
    """Pretend that reductions take so long."""

    def measured(mesh, group, nbytes, *, xp, divided):
        return Reduction(latency_s, bytes_per_s)

    monkeypatch.setattr(bucket_plan, "measure_reduction", measured)


@pytest.mark.parametrize("zero", [*deep(0), 1])
@pytest.mark.parametrize("dims", [*deep("dp=1", "dp=3"), "dp=2,pp=2"])
@pytest.mark.parametrize("latency_s", [0.0, 1e3, None])
def test_training_goes_on_the_same(monkeypatch, dims, zero, latency_s):
    if latency_s is not None:
        set_link(monkeypatch, latency_s, 1e12)

    def body(mesh):
        states = []
        for tuned in (False, True):
            pipe = make_pipeline(mesh)
            adam = optim.Adam(pipe.parameters(), lr=0.01)
            optimizer = mm.ParallelOptimizer(adam, pipe, zero=zero)
            for step in range(4):
                pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
                if tuned and step == 1:
                    found = pipe.tune_buckets()
                    cuts = [len(bucket.parameters) for bucket in pipe.buckets.buckets]
                    if mesh.dim_size("dp") == 1:
                        assert found is None
                    else:
                        assert found is not None
                        assert found.buckets == len(cuts)
                        assert sum(cuts) == len(pipe.parameters())
                        if latency_s is not None:
                            assert len(cuts) == (1 if latency_s else 2)  # the last comes alone
                        assert found.end_s <= found.before_end_s * (1 + 1e-12)
                        assert found.end_s >= found.last_ready_s
                        assert str(found).startswith(f"{len(cuts)} bucket")
            pipe.check_replicas()
            states.append(state_of(pipe))
        assert_equal(*states)
        return mesh.coord("pp") if "pp" in dims else 0, str(found)

    told = on_ranks(dims, body)
    assert len(set(told)) == len({stage for stage, _ in told})


def test_a_parameter_that_no_backward_touches_comes_last(monkeypatch):
    set_link(monkeypatch, 1e-9, 1e12)

    class Idle(nn.Linear):
        def forward(self, x, ctx=None):
            return x

        def backward_input(self, dy, ctx):
            return dy

        def backward_weight(self, ctx):
            pass

    def body(mesh):
        idle = Idle(6, 6)
        model = mm.DataParallel(
            nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), idle), mesh, loss=nn.mse_loss
        )
        x = np.ones((4, 6), "float32")
        model.train_step(x, x)
        model.tune_buckets()
        assert set(idle.parameters()) <= {*model.buckets.buckets[-1].parameters}

    on_ranks("dp=2", body)


def test_times_are_needed_on_all_ranks():
    def body(mesh):
        pipe = make_pipeline(mesh)
        with raises(ModuleStateError, "train_step()", "tune_buckets()"):
            pipe.tune_buckets()
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        pipe.tune_buckets()

    on_ranks("dp=2,pp=2", body)


def test_a_replica_that_never_had_rows_leaves_it_to_the_others():
    def body(mesh):
        pipe = make_pipeline(mesh)
        for step in range(2):
            pipe.train_step(*batch(step, 1), loss=nn.cross_entropy)
        found = pipe.tune_buckets()
        pipe.train_step(*batch(2, 1), loss=nn.cross_entropy)
        pipe.check_replicas()
        return str(found)

    assert len({*on_ranks("dp=3", body)}) == 1


def test_a_measured_reduction_has_a_latency_and_a_rate():
    def body(mesh):
        measure = partial(measure_reduction, mesh, mesh.group("dp"), 1 << 18, xp=np)
        return measure(divided=False), measure(divided=True)

    found = on_ranks("dp=2", body)
    assert found[0] == found[1]
    for one in found[0]:
        assert one.latency_s >= 0
        assert one.bytes_per_s > 0
        assert 0 <= one.busy <= 1


@pytest.mark.parametrize("plan", [[[0]], [[0, 1], [1]], [[0, 2], [1]], [[0, 1, 2]]])
def test_a_plan_has_each_parameter_once_and_one_dtype(plan):
    def body(mesh):
        parameters = [Parameter("weight", (2,), Constant(0.0)) for _ in range(3)]
        for place, parameter in enumerate(parameters):
            parameter.materialize(seed=0, dtype="float32" if place < 2 else "float64")
        with raises(ModuleError, 3, tuple(map(tuple, plan))):
            GradientBuckets(parameters, mesh.group("dp"), mesh=mesh, plan=plan)

    on_ranks("dp=2", body)


def test_what_was_found_reads_well():
    found = BucketTuning(Reduction(116e-6, math.inf, 1.0), 1, 3, 2.5e-3, 4e-3, 1e-3)
    assert str(found) == (
        "1 bucket, before 3 buckets: gradients are summed 2.5 ms after the first one came, before "
        "4 ms; the last one came after 1 ms. A sum takes 116 us, whatever its size; computing "
        "hides none of it"
    )
    found = BucketTuning(Reduction(20e-6, 3e9, 0.25), 2, 1, 2.5e-3, 4e-3, 1e-3)
    assert str(found).endswith(
        "A sum takes 20 us and its bytes at 3 GB/s; computing hides 75% of it"
    )
