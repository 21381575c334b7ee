"""Divided state over real MPI: gradients of another dtype, cut anew, put together, and refused."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleStateError
from mpimesh.parallel import DataParallel
from tests.helpers.parallel_models import SEED, Total, batch, state_of, zero_optimizer
from tests.helpers.raises import raises

pytestmark = pytest.mark.usefixtures("stage")


def wide(mesh, **options):
    made = [nn.Linear(6, 900), nn.ReLU(), nn.Linear(900, 40), nn.Linear(40, 5)]
    model = DataParallel(
        nn.Sequential(made),
        mesh,
        loss=nn.cross_entropy,
        seed=SEED,
        bucket_bytes=50_000,
        **{"dtype": "float64", **options},
    )
    adam = optim.AdamW(model.parameters(), lr=0.01, decay_mask=lambda one: len(one.shape) > 1)
    return model, zero_optimizer(adam, model)


def test_sums_of_float16_in_float32(comm):
    """Three rows of each replica add 60000: float16 cannot hold the sum of two."""
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model = DataParallel(
            nn.Sequential(nn.Linear(1, 70, bias=False)),
            mesh,
            loss=Total(),
            num_microbatches=3,
            dtype="float16",
            grad_dtype="float32",
        )
        (weight,) = model.parameters()
        weight.data[...] = 0
        sgd = optim.SGD(model.parameters(), lr=2.0**-13)
        optimizer = zero_optimizer(sgd, model)
        x = np.full((3 * comm.size, 1), 60000, "float16")
        model.train_step(x, x, optimizer=optimizer)
        expected = np.float16(-60000 * 3 * comm.size * 2.0**-13)
        np.testing.assert_array_equal(weight.data, np.full((70, 1), expected))
        model.check_replicas()


def test_buckets_cut_anew_keep_the_state(comm):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model, optimizer = wide(mesh)
        rng = np.random.default_rng(1)
        for step in range(3):
            model.train_step(*batch(step, 13), optimizer=optimizer)
            before = state_of(model), optimizer.full_state_dict()
            plan = [one.tolist() for one in np.split(rng.permutation(6), rng.integers(1, 6, 1))]
            with mesh.budget() as moved:
                model._engine.rebuild_buckets(plan)
            arrays = [one for key, one in before[1].items() if key.endswith(("/mean", "/square"))]
            state = sum(one.nbytes for one in arrays)
            assert moved.used_bytes <= state / comm.size + 4096
            after = optimizer.full_state_dict()
            for name, values in state_of(model).items():
                np.testing.assert_array_equal(values, before[0][name])
            assert len(arrays) == 12
            assert after.keys() == before[1].keys()
            for name, value in after.items():
                np.testing.assert_array_equal(value, before[1][name], err_msg=name)
        model.check_replicas()


@pytest.mark.nprocs(2, 3, 4)
def test_what_one_rank_cannot_do_is_told_on_all(comm):
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model, optimizer = wide(mesh)
        model.train_step(*batch(0, 13))
        parameter = model.parameters()[2]
        own = parameter.data
        if mesh.rank == 1:
            parameter.data = own.copy()
        with raises(ModuleStateError, "rank 1", "'weight'", "another array"):
            optimizer.step()
        parameter.data = own
        optimizer.step()
        parameter.requires_grad = mesh.rank != 1
        with raises(MismatchError, "2.weight", "ranks [1]"):
            model.rebuild_buckets()
        parameter.requires_grad = True
        model.zero_grad()
        model.train_step(*batch(1, 13), optimizer=optimizer)
        model.check_replicas()


@pytest.mark.nprocs(2, 4)
def test_a_state_goes_from_stages_to_replicas_and_split_layers(comm):
    def make(mesh):
        tp = mesh.group("tp") if mesh.contains_dim("tp") else None
        layers = mm.parallel.gpt_layers(
            13, num_layers=1, max_tokens=8, features=8, num_heads=4, dropout=0.0, tp=tp
        )
        stages = [mm.PipelineStage(0)]
        if mesh.contains_dim("pp"):
            stages.append(mm.PipelineStage(1))
        for number, layer in enumerate(layers):
            stages[number * len(stages) // len(layers)].add_layer(layer)
        model = mm.PipelineParallel(stages, 2, mesh=mesh, seed=SEED, dtype="float64")
        adam = optim.AdamW(model.parameters(), lr=0.01)
        return model, zero_optimizer(adam, model)

    def same(state, other):
        assert state.keys() == other.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)

    ids = np.random.default_rng(0).integers(0, 13, (4, 9))
    rest = "" if comm.size == 2 else ",dp=2"
    with mm.DeviceMesh(f"pp=2{rest}", comm) as mesh:
        model, optimizer = make(mesh)
        model.train_step(ids[:, :-1], ids[:, 1:], loss=nn.cross_entropy, optimizer=optimizer)
        values, state = model.full_state_dict(), optimizer.full_state_dict()
    for dims in (f"dp={comm.size}", f"tp=2{rest}"):
        with mm.DeviceMesh(dims, comm) as mesh:
            model, optimizer = make(mesh)
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
            same(optimizer.full_state_dict(), state)
