"""Sharded training over real MPI: memory that a node's ranks have once, and nodes apart."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from tests.contract.shared_memory import nodes_of
from tests.helpers.parallel_models import (
    SEED,
    batch,
    check_replicas_train,
    layers,
    make_pipeline,
    state_of,
    train_alone,
)


def trained(mesh, stage, **options):
    model = mm.fully_shard(
        nn.Sequential(layers()),
        mesh,
        stage=stage,
        loss=nn.cross_entropy,
        seed=SEED,
        dtype="float64",
        bucket_bytes=300,
        **options,
    )
    adam = optim.Adam(model.parameters(), lr=0.01)
    check_replicas_train(model, mm.ParallelOptimizer(adam, model))
    return model


def test_what_one_rank_writes_at_stage_3_all_ranks_of_the_node_read(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        model = trained(mesh, 3)
        for number, parameter in enumerate(model.parameters()):
            if number % comm.size == comm.rank:
                parameter.data[...] = number
        mesh.barrier()
        for number, parameter in enumerate(model.parameters()):
            assert (parameter.data == number).all()
        mesh.barrier()


@pytest.fixture
def nodes_of_two():
    with nodes_of(2):
        yield


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_nodes_have_all_values_once_each(comm, stage, nodes_of_two):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        model = trained(mesh, stage, hybrid=stage == 3)
        whole = [bucket.shard.is_whole for bucket in model.buckets.buckets]
        assert set(whole) == {stage == 3 and comm.size == 2}
        mesh.barrier()
        parameter = model.parameters()[0]
        if comm.rank % 2 == 0:
            parameter.data[...] = comm.rank
        mesh.barrier()
        shared = stage == 3
        assert (parameter.data == comm.rank - comm.rank % 2).all() == (shared or comm.rank % 2 == 0)
        mesh.barrier()


@pytest.mark.nprocs(3, 4, 8)
def test_over_nodes_each_rank_has_its_part(comm, nodes_of_two):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        model = trained(mesh, 3)
        assert all(parameter.data is None for parameter in model.parameters())
        parts = [bucket.shard.own.size for bucket in model.buckets.buckets]
        sizes = [bucket.size for bucket in model.buckets.buckets]
        assert comm.allreduce(sum(parts)) == sum(sizes)
        inner = model.into_inner()
        np.testing.assert_allclose(
            inner.parameters()[0].data, train_alone(3, 13).state["0.weight"], rtol=1e-8, atol=1e-11
        )


@pytest.mark.nprocs(4, 8)
@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "gpipe"])
def test_a_pipeline_of_replicas(comm, schedule):
    with mm.DeviceMesh(f"dp={comm.size // 2},pp=2", comm) as mesh:
        courses = []
        for stage in (0, 3):
            pipe = make_pipeline(mesh, 4, schedule=schedule)
            mm.fully_shard(pipe, mesh, stage=stage)
            optimizer = mm.ParallelOptimizer(optim.AdamW(pipe.parameters(), lr=0.01), pipe)
            losses = [
                pipe.train_step(*batch(step, 24), loss=nn.cross_entropy, optimizer=optimizer)
                for step in range(3)
            ]
            pipe.check_replicas()
            courses.append((losses, state_of(pipe)))
        np.testing.assert_allclose(courses[1][0], courses[0][0], rtol=1e-12)
        for name, values in courses[0][1].items():
            np.testing.assert_allclose(courses[1][1][name], values, rtol=1e-10, atol=1e-12)


def test_memory_of_buckets_made_anew_is_given_back(comm):
    """Which others read until all have moved to the new ones."""
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        model = mm.fully_shard(
            nn.Sequential([nn.Linear(300, 300) for _ in range(4)]),
            mesh,
            loss=nn.mse_loss,
            bucket_bytes=300_000,
        )
        optimizer = mm.ParallelOptimizer(optim.AdamW(model.parameters()), model)
        x = np.ones((comm.size, 300), np.float32)
        used = []
        for _ in range(5):
            model.train_step(x, x, optimizer=optimizer)
            model.check_replicas()
            before = state_of(model)
            model.rebuild_buckets()
            for name, values in state_of(model).items():
                np.testing.assert_array_equal(values, before[name])
            node = model._engine.data._core.context.world.node
            used.append(0 if node is None or node.arena is None else node.arena.used_bytes)
        assert max(used[1:]) <= used[0] + 100_000


def test_a_model_that_is_given_back_is_this_ranks_alone(comm):
    """And lives on where other ranks have dropped it."""
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        x = np.ones((2, 40), np.float32)
        for number in range(3):
            model = mm.fully_shard(
                nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 40)),
                mesh,
                loss=nn.mse_loss,
                seed=number,
                bucket_bytes=20_000,
            )
            if number == 0:
                kept = model.into_inner()
                expected = kept.forward(x).copy()
                if comm.rank:
                    for parameter in kept.parameters():
                        parameter.data[...] = 7
                    del kept
            del model
        mesh.barrier()
        if not comm.rank:
            np.testing.assert_array_equal(kept.forward(x), expected)


def test_values_live_as_long_as_any_rank_has_them(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        net = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 40))
        model = mm.fully_shard(net, mesh, loss=nn.mse_loss, bucket_bytes=20_000)
        x = np.ones((2, 40), np.float32)
        expected = net.forward(x).copy()
        mesh.barrier()
        if comm.rank:
            del net, model
        taken = [mesh.shared_empty(12_000, np.float32) for _ in range(8)]
        for one in taken:
            one[...] = 3
        mesh.barrier()
        if not comm.rank:
            np.testing.assert_array_equal(net.forward(x), expected)
