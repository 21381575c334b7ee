"""Modules of PyTorch trained over virtual ranks, against plain PyTorch in one process."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import optim
from tests.pure.parallel_models import on_ranks
from tests.pure.torch_models import (
    adamw,
    assert_state,
    batch,
    deal,
    make_model,
    mt,
    torch,
    train_alone,
)

LOSS = mt.wrap_loss(torch.nn.functional.cross_entropy)


def own_adamw(parameters):
    return optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    ("dims", "schedule"),
    [
        ("dp=1,pp=1", "1f1b"),
        ("dp=3", "1f1b"),
        ("pp=2", "gpipe"),
        ("pp=3", "zb1p"),
        ("pp=2", "zbv"),
        ("dp=2,pp=2", "1f1b"),
        ("dp=2,pp=2", "interleaved"),
    ],
)
@pytest.mark.parametrize("by", ["torch", "mpimesh"])
def test_it_trains_like_plain_pytorch(dims, schedule, by):
    template = make_model()
    batches = [batch(step, 13) for step in range(3)]
    expected = train_alone(copy.deepcopy(template), batches)

    def body(mesh):
        model = copy.deepcopy(template)
        per_rank = 2 if schedule in ("zbv", "interleaved") else 1
        num_stages = per_rank * (mesh.dim_size("pp") if mesh.contains_dim("pp") else 1)
        stages = deal(mt.wrap_each(model), num_stages)
        pipe = mm.PipelineParallel(stages, 4, mesh=mesh, schedule=schedule, bucket_bytes=300)
        optimizer = adamw(mt.tensors(pipe)) if by == "torch" else own_adamw(pipe.parameters())
        losses = [pipe.train_step(*one, loss=LOSS, optimizer=optimizer) for one in batches]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        pipe.check_replicas()
        assert_state(mt.full_state_dict(pipe, model), expected.state)
        # In one pipeline the names are those of the torch Sequential.
        state = {name: torch.from_numpy(one) for name, one in pipe.full_state_dict().items()}
        assert_state(state, expected.state)

    on_ranks(dims, body, rendezvous=True)


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("by", ["torch", "mpimesh"])
def test_replicas_train_like_one_also_without_rows_of_their_own(rows, by):
    """With one row one replica has nothing to do, and PyTorch's zero_grad takes its gradients."""
    template = make_model()
    batches = [batch(step, rows) for step in range(3)]
    expected = train_alone(copy.deepcopy(template), batches)

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS, bucket_bytes=300)
        optimizer = adamw(model.parameters()) if by == "torch" else own_adamw(replicas.parameters())
        losses = []
        for one in batches:
            optimizer.zero_grad()
            losses.append(replicas.train_step(*one))
            optimizer.step()
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        replicas.check_replicas()
        assert_state(model.state_dict(), expected.state)
        y = replicas.forward(batch(9, 7)[0])
        with torch.no_grad():
            np.testing.assert_allclose(y, model(torch.from_numpy(batch(9, 7)[0])).numpy())

    on_ranks("dp=2", body)


@pytest.mark.parametrize("size", [1, 2])
def test_values_and_gradients_are_one_memory(size):
    template = make_model()

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        replicas.train_step(*batch(0, 6))
        flats = [bucket.flat for bucket in replicas.buckets.buckets]
        assert len(flats) == (size > 1)
        for parameter, tensor in zip(replicas.parameters(), model.parameters(), strict=True):
            assert tensor.data_ptr() == parameter.data.ctypes.data
            assert tensor.grad.data_ptr() == parameter.grad.ctypes.data
            assert size == 1 or np.shares_memory(flats[0], tensor.grad.numpy())

    on_ranks(f"dp={size}", body)


def test_gradients_of_several_steps_add_up():
    template = make_model()
    x, target = batch(0, 8)
    expected = copy.deepcopy(template)
    for part in (slice(0, 4), slice(4, 8)):
        y = expected(torch.from_numpy(x[part]))
        loss = torch.nn.functional.cross_entropy(y, torch.from_numpy(target[part]), reduction="sum")
        (loss / 8).backward()

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        with replicas.no_sync():
            replicas.train_step(x[:4], target[:4], denominator=8)
        replicas.train_step(x[4:], target[4:], denominator=8)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    on_ranks("dp=2", body)
