"""Stages, replicas and the parts of split layers lie along dims of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MeshError, ModuleError, UnknownNameError
from tests.helpers.raises import raises

X = np.random.default_rng(0).normal(size=(8, 6))
TARGET = np.random.default_rng(1).normal(size=(8, 6))


def stages(mesh, count=2, split=""):
    layers: Any = [nn.Linear(6, 6) for _ in range(count)]
    if split:
        group = mesh.group() if split == "world" else mesh.group(split)
        layers = [mm.tensor_parallel(nn.FeedForward(6, 12), group) for _ in range(count)]
    return [mm.PipelineStage(n).add_layer(layer) for n, layer in enumerate(layers)]


def alone():
    """The same model in one process: its loss and its outputs."""
    with mm.DeviceMesh("dp=1") as mesh:
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model = mm.DataParallel(net, mesh, loss=nn.mse_loss, dtype="float64", seed=3)
        return model.train_step(X, TARGET), model.forward(X)


def test_stages_along_dp_have_no_replicas():
    def program():
        with mm.DeviceMesh("dp=2") as mesh:
            pipe = mm.PipelineParallel(
                stages(mesh), 4, mesh=mesh, dim="dp", loss=nn.mse_loss, dtype="float64", seed=3
            )
            batches = mm.data.Batches((X, TARGET), mesh, 8, shuffle=False, model=pipe)
            loss = pipe.train_step(*batches.next())
            batches.close()
            return loss, pipe.train_step(X, TARGET, loss=nn.mse_loss), pipe.forward(X)

    loss, outputs = alone()
    results = mm.run_virtual(2, program)
    for first, second, _ in results:
        np.testing.assert_allclose([first, second], loss, rtol=1e-12)
    np.testing.assert_allclose(results[1][2], outputs, rtol=1e-12)


def test_a_pipeline_takes_its_loss_as_other_models_do():
    """And without any a step is refused."""

    def program():
        with mm.DeviceMesh("pp=2") as mesh:
            options: dict[str, Any] = {
                "num_microbatches": 1,
                "mesh": mesh,
                "dtype": "float64",
                "seed": 3,
            }
            pipe = mm.PipelineParallel(stages(mesh), loss=nn.mse_loss, **options)
            losses = pipe.train_step(X, TARGET), pipe.evaluate(X, TARGET)
            with raises(ModuleError, "loss", "'mse'"):
                mm.PipelineParallel(stages(mesh), **{**options, "loss": "mse"})
            without = mm.PipelineParallel(stages(mesh), **options)
            with raises(ModuleError, "needs loss="):
                without.train_step(X, TARGET)
            return (*losses, without.evaluate(X, TARGET, loss=nn.mse_loss))

    loss, _ = alone()
    for losses in mm.run_virtual(2, program):
        np.testing.assert_allclose(losses, loss, rtol=1e-12)


@pytest.mark.parametrize(
    ("dims", "make"),
    [
        ("pp=2", lambda mesh: mm.PipelineParallel(stages(mesh), 2, mesh=mesh, data_dim="pp")),
        (
            "dp=2",
            lambda mesh: mm.PipelineParallel(stages(mesh), 2, mesh=mesh, dim="dp", data_dim="dp"),
        ),
        ("pp=2", lambda mesh: mm.PipelineParallel(stages(mesh, split="pp"), 2, mesh=mesh)),
        ("pp=2,dp=2", lambda mesh: mm.PipelineParallel(stages(mesh, split="dp"), 2, mesh=mesh)),
        ("pp=2,dp=2", lambda mesh: mm.PipelineParallel(stages(mesh, split="world"), 2, mesh=mesh)),
        ("dp=2", lambda mesh: mm.DataParallel(stages(mesh, split="dp")[0], mesh)),
        ("dp=2", lambda mesh: mm.DataParallel(stages(mesh, split="world")[0], mesh)),
        ("dp=2", lambda mesh: mm.fully_shard(stages(mesh, split="dp")[0], mesh)),
        ("tp=2", lambda mesh: mm.fully_shard(stages(mesh, split="tp")[0], mesh, "tp")),
    ],
)
def test_two_of_them_along_one_dim_are_refused(dims, make):
    def program():
        with mm.DeviceMesh(dims) as mesh:
            with raises(MeshError, "dim of the mesh", dims):
                make(mesh)
            mesh.barrier()

    mm.run_virtual(4 if "," in dims else 2, program)


def test_a_model_is_divided_along_the_dim_of_its_replicas():
    def program():
        with mm.DeviceMesh("dp=2,tp=2") as mesh:
            cases: Any = (("tp", ModuleError), ("nix", UnknownNameError), (3, MeshError))
            for given, error in cases:
                model = mm.DataParallel(nn.Linear(6, 6), mesh, loss=nn.mse_loss)
                with raises(error, str(given), "dp=2,tp=2"):
                    mm.fully_shard(model, mesh, given)
            assert mm.fully_shard(model, mesh, "dp") is model
            assert mm.fully_shard(nn.Linear(6, 6), mesh, "tp").num_replicas == 2
        with mm.DeviceMesh("pp=4") as mesh:
            pipe = mm.PipelineParallel(stages(mesh, 4), 2, mesh=mesh)
            with raises(ModuleError, "'pp'", "replicas"):
                mm.fully_shard(pipe, mesh, "pp")
            assert mm.fully_shard(pipe, mesh, "dp") is pipe

    mm.run_virtual(4, program)
