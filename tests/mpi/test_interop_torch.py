"""Modules of PyTorch trained over real MPI, against plain PyTorch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import StageError
from tests.helpers.raises import raises
from tests.helpers.torch_models import adamw, assert_state, deal, mt, torch, train_alone

DIMS = {1: "dp=1,pp=1", 2: "dp=1,pp=2", 3: "dp=3,pp=1", 4: "dp=2,pp=2", 8: "dp=2,pp=4"}
WIDTH = 256


def make_model():
    """Wide enough that what passes between stages is read where it lies."""
    torch.manual_seed(2)
    sizes = [16, *[WIDTH] * 3, 5]
    pairs = pairwise(sizes)
    modules = [one for a, b in pairs for one in (torch.nn.Linear(a, b), torch.nn.Tanh())]
    return torch.nn.Sequential(*modules[:-1]).double()


def batch(step):
    rng = np.random.default_rng([step, 81])
    return rng.normal(size=(201, 16)), rng.integers(0, 5, 201)


# PyTorch's optimizers import much when the first one is made, on each rank.
@pytest.mark.limit(180)
@pytest.mark.parametrize("by", ["torch", "mpimesh"])
def test_it_trains_like_plain_pytorch(comm, by):
    batches = [batch(step) for step in range(3)]
    expected = train_alone(make_model(), batches)
    with mm.DeviceMesh(DIMS.get(comm.size, f"dp={comm.size},pp=1"), comm) as mesh:
        model = make_model()
        stages = deal(mt.wrap_each(model), mesh.dim_size("pp"))
        pipe = mm.PipelineParallel(stages, 4, mesh=mesh, bucket_bytes=100_000)
        if by == "torch":
            optimizer = adamw(mt.tensors(pipe))
        else:
            optimizer = mm.optim.AdamW(pipe.parameters(), lr=0.01, weight_decay=0.1)
        loss = mt.wrap_loss(torch.nn.CrossEntropyLoss())
        losses = [pipe.train_step(*one, loss=loss, optimizer=optimizer) for one in batches]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-10)
        pipe.check_replicas()
        assert_state(mt.full_state_dict(pipe, model), expected.state, rtol=1e-6)
        with raises(StageError, "mat1 and mat2"):
            pipe.train_step(batches[0][0][:, 1:], batches[0][1], loss=loss)
        model.load_state_dict(mt.full_state_dict(pipe, model))
        y = pipe.forward(batches[0][0], everywhere=True)
        with torch.no_grad():
            np.testing.assert_allclose(y, model(torch.from_numpy(batches[0][0])).numpy())
