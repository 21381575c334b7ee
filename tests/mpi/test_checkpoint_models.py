"""Models and optimizers in checkpoints over real MPI: saved on ranks, loaded on others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.runtime.agreement import agree
from tests.contract.shared_memory import nodes_of
from tests.helpers.parallel_models import SEED, batch, cut, layers


@pytest.fixture
def folder(comm, tmp_path_factory):
    """A folder that all ranks have."""
    mine = str(tmp_path_factory.mktemp("checkpoints"))
    with mm.DeviceMesh("all=-1", comm) as mesh:
        first = agree(mesh.group(), "folder", mine)[0]
    return Path(first)


@pytest.fixture
def apart(request):
    """Have so many ranks on a node, if asked to."""
    with nodes_of(request.param):
        yield


def make(mesh, stage, **options):
    count = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
    made = layers()
    made[0].freeze()
    model = mm.PipelineParallel(
        cut(count, made), 4, mesh=mesh, seed=SEED, dtype="float64", bucket_bytes=300
    )
    mm.fully_shard(model, mesh, stage=stage, **options)
    return model, mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=0.01), model)


def course(model, optimizer, first):
    losses = []
    for step in range(first, first + 2):
        x, target = batch(step, 13)
        loss = model.train_step(x, target, loss=nn.cross_entropy, optimizer=optimizer)
        losses.append(float(loss))
    return losses


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("apart", [0, 1, 2], indirect=True)
@pytest.mark.parametrize(
    ("stage", "hybrid"), [(0, False), (1, False), (2, False), (3, False), (3, True)]
)
def test_training_goes_on_on_the_same_mesh_and_on_another(comm, folder, apart, stage, hybrid):
    path = folder / f"step-{stage}"
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        model, optimizer = make(mesh, stage, hybrid=hybrid)
        course(model, optimizer, 0)
        mm.save(path, {"model": model, "optimizer": optimizer})
        values, state = model.full_state_dict(), optimizer.full_state_dict()
        wanted = course(model, optimizer, 2)

        model, optimizer = make(mesh, stage, hybrid=hybrid)
        course(model, optimizer, 7)
        mm.load(path, {"model": model, "optimizer": optimizer})
        model.check_replicas()
        assert model.step == 2
        assert course(model, optimizer, 2) == wanted
        mesh.barrier()
    with mm.DeviceMesh("pp=2,dp=-1", comm) as mesh:
        model, optimizer = make(mesh, 3 - stage)
        mm.load(path, {"model": model, "optimizer": optimizer})
        for name, value in model.full_state_dict().items():
            np.testing.assert_array_equal(value, values[name], strict=True)
        for name, value in optimizer.full_state_dict().items():
            np.testing.assert_array_equal(value, state[name], err_msg=name)
        np.testing.assert_allclose(course(model, optimizer, 2), wanted, rtol=1e-10)
        mesh.barrier()
    alone = mm.load(path, only="model.*")["model"]
    for name, value in values.items():
        np.testing.assert_array_equal(alone[name], value, strict=True)


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_saved_without_waiting_is_of_the_step_that_was_saved(comm, folder, stage):
    path = folder / f"later-{stage}"
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        model, optimizer = make(mesh, stage)
        course(model, optimizer, 0)
        saving = mm.save(path, {"model": model, "optimizer": optimizer}, wait=False)
        wanted = course(model, optimizer, 2)
        saving.resolve()
        mm.load(path, {"model": model, "optimizer": optimizer})
        assert course(model, optimizer, 2) == wanted
