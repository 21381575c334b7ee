"""Names of PyTorch on models, optimizers and losses: the thing, or a word on where it is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import ModuleError
from tests.helpers.parallel_models import batch, cut, make_pipeline, on_ranks, train_alone


def make_net():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def make_model(mesh, **options):
    return mm.DataParallel(make_net(), mesh, loss=nn.cross_entropy, **options)


def data(rows=6):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 5)).astype("float32"), rng.integers(0, 3, rows)


def refused(obj, name, *words):
    """Check that an attribute is refused with these words, and is not there in any other way."""
    assert not hasattr(obj, name)
    assert name not in dir(obj)
    with pytest.raises(AttributeError) as caught:
        getattr(obj, name)
    text = str(caught.value)
    assert all(word in text for word in (type(obj).__name__, repr(name), *words)), text
    assert "\n" not in text


@pytest.mark.parametrize("stage", [0, 3])
def test_the_state_of_replicas_is_the_whole_one(stage):
    def body(mesh):
        model = mm.fully_shard(make_model(mesh), mesh, stage=stage)
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(2):
            model.train_step(*data(), optimizer=optimizer)
        state, whole = model.state_dict(), model.full_state_dict()
        assert list(state) == list(whole)
        assert all(np.array_equal(state[name], whole[name]) for name in whole)
        copies = {name: array.copy() for name, array in state.items()}
        model.train_step(*data(), optimizer=optimizer)
        model.load_state_dict(copies)
        mesh.barrier()
        assert all(np.array_equal(array, whole[name]) for name, array in state.items())  # alive

    mm.run_virtual(2, lambda: on_mesh("dp=2", body))


def on_mesh(dims, body):
    with mm.DeviceMesh(dims) as mesh:
        body(mesh)


def test_the_state_of_a_stage_is_that_of_its_rank():
    def body(mesh):
        pipe = make_pipeline(mesh, stages=cut(2))
        state, whole = pipe.state_dict(), pipe.full_state_dict()
        assert state.keys() == dict(pipe.named_parameters()).keys() < whole.keys()
        with pytest.raises(ModuleError, match=r"full_state_dict"):
            pipe.load_state_dict(state)
        refused(pipe, "module", "local_stages")

    on_ranks("pp=2", body)


def test_a_model_under_torch_s_names():
    with mm.DeviceMesh("dp=1") as mesh:
        net = make_net()
        model = mm.DataParallel(net, mesh, loss=nn.cross_entropy)
        assert model.module is model.inner is net
        assert "module" in dir(model)
        model.zero_grad(set_to_none=True)
        refused(model, "backward", "train_step(")
        for name in ("to", "cuda", "cpu"):
            refused(model, name, "xp=")
        for name in ("half", "bfloat16", "float", "double"):
            refused(model, name, "dtype=")
        for name in ("set_requires_gradient_sync", "require_backward_grad_sync"):
            refused(model, name, "no_sync()")
        for name in ("modules", "named_modules", "children", "named_children"):
            refused(model, name, "parameters()")
        for name in ("unshard", "reshard", "summon_full_params"):
            refused(model, name, "full_state_dict()")
        refused(model, "requires_grad_", "freeze()", "rebuild_buckets()")
        refused(model, "register_comm_hook", "grad_dtype=")
        refused(model, "join", "train_step")
        refused(model, "optim_state_dict", "optimizer.full_state_dict()")
        with pytest.raises(AttributeError, match=r"^'DataParallel' object has no attribute 'tr'"):
            _ = model.tr  # type: ignore[attr-defined]


@pytest.mark.parametrize("parallel", [False, True])
def test_an_optimizer_under_torch_s_names(parallel):
    with mm.DeviceMesh("dp=1") as mesh:
        model = make_model(mesh)
        optimizer: Any = optim.AdamW(model.parameters(), lr=0.1)
        if parallel:
            optimizer = mm.ParallelOptimizer(optimizer, model)
        model.train_step(*data())
        optimizer.zero_grad(set_to_none=True)
        refused(optimizer, "param_groups", "optimizer.lr")
        refused(optimizer, "add_param_group", "ParallelOptimizer([one, another], model)")
        refused(optimizer, "state", "state_dict()")
        refused(optimizer, "defaults", "optimizer.lr")
        rates = optim.LRScheduler(optimizer, optim.CosineLR(10))
        refused(rates, "get_last_lr", "lrs")
        refused(rates, "get_lr", "lrs")
        refused(rates, "last_epoch", "num_steps")
        refused(rates, "base_lrs", "state_dict()")


def test_a_loss_is_a_float_that_says_it_is_no_tensor():
    with mm.DeviceMesh("dp=1") as mesh:
        model = make_model(mesh)
        x, target = data()
        accumulation = mm.parallel.Accumulation(
            model, 1, optimizer=optim.SGD(model.parameters(), lr=0.1)
        )
        losses: list[Any] = [
            nn.cross_entropy(model(x), target),
            nn.mse_loss(model(x), np.zeros((6, 3), "float32")),
            model.train_step(x, target),
            model.evaluate(x, target),
            accumulation.train_step(x, target),
        ]
        for loss in losses:
            assert type(loss.item()) is float
            assert loss.item() == loss
            assert repr(loss) == repr(float(loss)) == json.dumps(loss)
            assert isinstance(loss, float)
            refused(loss, "backward", "train_step(", "value_and_grad")
            refused(loss, "detach", "number")
            refused(loss, "cpu", "number")


def test_the_loss_of_a_pipeline_is_one_too():
    def body(mesh):
        pipe = make_pipeline(mesh, stages=cut(2))
        loss: Any = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert loss.item() == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)

    on_ranks("pp=2", body)
