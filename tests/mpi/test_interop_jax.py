"""Functions of JAX trained over real MPI, against plain JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm

jax: Any = pytest.importorskip("jax")
mj: Any = pytest.importorskip("mpimesh.interop.jax")

DIMS = {1: "dp=1,pp=1", 2: "dp=1,pp=2", 3: "dp=3,pp=1", 4: "dp=2,pp=2", 8: "dp=2,pp=4"}
WIDTH, LAYERS, RATE, STEPS = 256, 4, 0.1, 3


def layer(params, x):
    return jax.numpy.tanh(x @ params["w"] + params["b"])


def mean_square(y, target):
    return ((y - target) ** 2).mean()


def values():
    rng = np.random.default_rng(5)
    return [
        {"w": rng.normal(size=(WIDTH, WIDTH)) / 16, "b": np.zeros(WIDTH)} for _ in range(LAYERS)
    ]


def batch(step):
    """Wide enough that what passes between stages is read where it lies."""
    return np.random.default_rng([step, 82]).normal(size=(2, 101, WIDTH))


def train_alone():
    def loss(params, x, target):
        for one in params:
            x = layer(one, x)
        return mean_square(x, target)

    params, losses = values(), []
    compute = jax.jit(jax.value_and_grad(loss))
    for step in range(STEPS):
        value, gradients = compute(params, *batch(step))
        losses.append(float(value))
        params = jax.tree_util.tree_map(lambda a, b: a - RATE * b, params, gradients)
    return losses, params


@pytest.mark.limit(180)
def test_it_trains_like_plain_jax(comm):
    jax.config.update("jax_enable_x64", True)
    try:
        losses, params = train_alone()
        with mm.DeviceMesh(DIMS.get(comm.size, f"dp={comm.size},pp=1"), comm) as mesh:
            stages = [mm.PipelineStage(number) for number in range(mesh.dim_size("pp"))]
            for place, one in enumerate(values()):
                stages[place * len(stages) // LAYERS].add_layer(mj.wrap(layer, one))
            pipe = mm.PipelineParallel(stages, 4, mesh=mesh, bucket_bytes=600_000)
            optimizer = mm.optim.SGD(pipe.parameters(), lr=RATE)
            loss = mj.wrap_loss(mean_square)
            for step in range(STEPS):
                got = pipe.train_step(*batch(step), loss=loss, optimizer=optimizer)
                assert got == pytest.approx(losses[step], rel=1e-10)
            pipe.check_replicas()
            state = pipe.full_state_dict()
            for place, one in enumerate(params):
                np.testing.assert_allclose(state[f"{place}.w"], one["w"], rtol=1e-8, atol=1e-12)
    finally:
        jax.config.update("jax_enable_x64", False)
