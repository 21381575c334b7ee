"""Optimizer state divided among replicas, over real MPI."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.parallel import DataParallel
from tests.helpers.depth import deep
from tests.helpers.parallel_models import (
    SEED,
    batch,
    check_replicas_train,
    layers,
    make_pipeline,
    state_of,
    zero_optimizer,
)

pytestmark = pytest.mark.usefixtures("stage")


@pytest.mark.parametrize("bucket_bytes", [300, *deep(1 << 20)])
def test_it_trains_like_one_process(comm, bucket_bytes):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model = DataParallel(
            nn.Sequential(layers()),
            mesh,
            loss=nn.cross_entropy,
            seed=SEED,
            dtype="float64",
            bucket_bytes=bucket_bytes,
        )
        optimizer = zero_optimizer(optim.Adam(model.parameters(), lr=0.01), model)
        check_replicas_train(model, optimizer)


@pytest.mark.nprocs(4, 8)
def test_a_pipeline_of_replicas_goes_on_from_its_state(comm):
    """Wide layers: buckets of several pages for each rank, and messages where they are small."""

    def wide(mesh):
        stages = [
            mm.PipelineStage(0).add_layer(nn.Linear(6, 700)).add_layer(nn.Linear(700, 9)),
            mm.PipelineStage(1).add_layer(nn.Linear(9, 300)).add_layer(nn.Linear(300, 5)),
        ]
        return make_pipeline(mesh, 2, stages=stages, bucket_bytes=20_000)

    with mm.DeviceMesh(f"dp={comm.size // 2},pp=2", comm) as mesh:
        whole, divided = wide(mesh), wide(mesh)
        adams = [optim.Adam(pipe.parameters(), lr=0.01) for pipe in (whole, divided)]
        optimizer = zero_optimizer(adams[1], divided)
        for step in range(4):
            if step == 2:
                state = optimizer.state_dict()
                optimizer.load_state_dict(state)
            for pipe, one in ((whole, adams[0]), (divided, optimizer)):
                pipe.train_step(*batch(step, 24), loss=nn.cross_entropy, optimizer=one)
        divided.check_replicas()
        expected = state_of(whole)
        for name, values in state_of(divided).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-10, atol=1e-12)


def test_all_ranks_leave_out_the_step_in_which_one_overflows(comm):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model = DataParallel(
            nn.Sequential(nn.Linear(3, 2)), mesh, loss=nn.mse_loss, dtype="float16"
        )
        scaler = optim.LossScaler(64.0, growth_interval=2)
        optimizer = zero_optimizer(optim.SGD(model.parameters(), lr=0.1), model, scaler=scaler)
        rows = 2 * comm.size
        x, target = np.ones((rows, 3), "float16"), np.zeros((rows, 2), "float16")
        scales = []
        for step in range(4):
            given = x.copy()
            if step == 1:
                given[-1] = 6e4  # in the rows of the last rank
            before = state_of(model)
            loss = model.train_step(given, target, optimizer=optimizer)
            same = all((before[name] == p.data).all() for name, p in model.named_parameters())
            assert same == (step == 1), loss
            scales.append(optimizer.loss_scale)
        assert scales == [64, 32, 32, 64]
        assert optimizer.skipped_steps == 1
        model.check_replicas()


def test_tuned_buckets_train_the_same(comm):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        states = []
        for tuned in (False, True):
            layers = [nn.Linear(6, 900), nn.ReLU(), nn.Linear(900, 40), nn.Linear(40, 5)]
            model = DataParallel(
                nn.Sequential(layers), mesh, loss=nn.cross_entropy, dtype="float64", seed=SEED
            )
            adam = optim.Adam(model.parameters(), lr=0.01)
            optimizer = zero_optimizer(adam, model)
            for step in range(4):
                model.train_step(*batch(step, 13), optimizer=optimizer)
                if tuned and step == 1:
                    assert (model.tune_buckets() is None) == (comm.size == 1)
            model.check_replicas()
            states.append(state_of(model))
        for name, values in states[0].items():
            np.testing.assert_allclose(values, states[1][name], rtol=1e-10, atol=1e-12)
