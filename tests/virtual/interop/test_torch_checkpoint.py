"""Modules and optimizers of PyTorch in checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mpimesh as mm  # noqa: E402
import mpimesh.interop.torch as mt  # noqa: E402
from mpimesh import nn, optim  # noqa: E402
from mpimesh.errors import ModuleError, ShapeError  # noqa: E402
from mpimesh.store.modules import take_torch_state, torch_state  # noqa: E402
from tests.helpers.parallel_models import on_ranks  # noqa: E402


def module(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 5)
    )
    return made.to(dtype)


def train(made, optimizer, first, steps):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 6, generator=generator).to(made[0].weight.dtype)
        optimizer.zero_grad()
        loss = made(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(
        [{"params": list(parameters), "weight_decay": 0.1}], lr=torch.tensor(0.01), betas=(0.8, 0.9)
    ),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps", [0, 2])
def test_training_goes_on_from_a_checkpoint(name, steps, tmp_path):
    made = module()
    optimizer = OPTIMIZERS[name](made.parameters())
    train(made, optimizer, 0, steps)
    mm.save(tmp_path / "c", {"module": made, "optimizer": optimizer, "note": "mine"})
    wanted = train(made, optimizer, steps, 2)

    other = module(seed=1)
    another = OPTIMIZERS[name](other.parameters())
    train(other, another, 7, 1)
    tree = mm.load(tmp_path / "c", {"module": other, "optimizer": another, "note": ""})
    assert tree["module"] is other
    assert tree["optimizer"] is another
    assert tree["note"] == "mine"
    assert train(other, another, steps, 2) == wanted
    for one, same in zip(made.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, same)
    plain = mm.load(tmp_path / "c", only="module.*")
    assert plain["module"]["0.weight"].shape == (8, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_each_dtype_comes_back_bit_for_bit(dtype, tmp_path):
    made = module(dtype)
    made[0].weight.data[0, 0] = float("nan")
    tree = {"module": made, "alone": torch.arange(6).to(dtype).reshape(2, 3).T}
    mm.save(tmp_path / "c", tree)
    other, alone = module(dtype, seed=4), torch.zeros(3, 2, dtype=dtype)
    mm.load(tmp_path / "c", {"module": other, "alone": alone})
    for one, same in zip(made.state_dict().values(), other.state_dict().values(), strict=True):
        assert one.dtype == same.dtype
        assert torch.equal(one.view(torch.uint8), same.view(torch.uint8)) if one.ndim else True
    assert torch.equal(alone, tree["alone"])


def test_arrays_are_the_memory_of_the_tensors():
    made = module(torch.bfloat16)
    tree = torch_state(made)
    tree["0.bias"][...] = 3
    assert made[0].bias.tolist() == [3.0] * 8
    assert tree["0.bias"].dtype.name == "bfloat16"
    narrow = torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)
    assert torch_state(narrow).astype("f4").tolist() == [1.0, 2.0]


def test_ranks_have_one_module_together(tmp_path):
    first, second = module(), module(seed=5)

    def save(mesh):
        made = copy.deepcopy(first)
        optimizer = OPTIMIZERS["adam"](made.parameters())
        losses = train(made, optimizer, 0, 2)
        mm.save(tmp_path / "c", {"module": made, "optimizer": optimizer}, mesh=mesh)
        return losses + train(made, optimizer, 2, 1)

    def load(mesh):
        made = copy.deepcopy(second)
        optimizer = OPTIMIZERS["adam"](made.parameters())
        mm.load(tmp_path / "c", {"module": made, "optimizer": optimizer}, mesh=mesh)
        return train(made, optimizer, 2, 1)

    wanted = on_ranks("dp=2", save)[0][2:]
    assert on_ranks("dp=3", load) == [wanted] * 3


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_replicas_of_a_module_are_saved_and_go_on(stage, tmp_path):
    sources = [
        torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Linear(9, 5))
        for _ in range(2)
    ]

    def make(mesh, number):
        made = copy.deepcopy(sources[number])
        model = mm.DataParallel(mt.wrap(made), mesh, loss=nn.cross_entropy)
        adam = optim.Adam(model.parameters(), lr=0.01)
        return made, model, mm.ParallelOptimizer(adam, model, zero=stage)

    def course(model, optimizer, first, steps):
        losses = []
        for step in range(first, first + steps):
            rng = np.random.default_rng(step)
            x, target = rng.normal(size=(8, 6)).astype("f4"), rng.integers(0, 5, 8)
            losses.append(float(model.train_step(x, target, optimizer=optimizer)))
        return losses

    def save(mesh):
        _, model, optimizer = make(mesh, 0)
        course(model, optimizer, 0, 2)
        mm.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
        return course(model, optimizer, 2, 2), model.full_state_dict()

    def load(mesh):
        made, model, optimizer = make(mesh, 1)
        mm.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
        losses = course(model, optimizer, 2, 2)
        values = model.full_state_dict()
        mesh.group().barrier()
        for value, tensor in zip(values.values(), made.parameters(), strict=True):
            np.testing.assert_array_equal(value, tensor.detach().numpy())
        return losses, values

    wanted, found = on_ranks("dp=2", save), on_ranks("dp=2", load)
    assert [one[0] for one in found] == [one[0] for one in wanted]


def test_what_does_not_fit_a_module_changes_nothing():
    made = module()
    before = copy.deepcopy(made.state_dict())
    state = torch_state(module(seed=3))
    change: Any
    for change, kind, words in [
        ({"0.weight": np.zeros((3, 3), "f4")}, ShapeError, "0.weight"),
        ({"0.weight": 3}, ShapeError, "0.weight"),
        ({"other": np.zeros(3)}, ModuleError, "unknown: \\['other'\\]"),
    ]:
        with pytest.raises(kind, match=words):
            take_torch_state(made, {**state, **change})
    with pytest.raises(ModuleError, match=r"missing: \['0.bias'\]"):
        take_torch_state(made, {key: state[key] for key in state if key != "0.bias"})
    with pytest.raises(ModuleError, match="is a dict"):
        take_torch_state(made, [1])
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name])
    optimizer = OPTIMIZERS["adam"](made.parameters())
    with pytest.raises(ModuleError, match="PyTorch refuses the state of Adam"):
        take_torch_state(optimizer, {"state": {}, "param_groups": []})


def test_tensors_that_cannot_be_saved_are_refused():
    with pytest.raises(ModuleError, match="dense"):
        torch_state(torch.eye(3).to_sparse())
    with pytest.raises(ModuleError, match="host's memory"):
        torch_state(torch.empty(3, device="meta"))


def test_a_tensor_that_pytorch_splits_over_ranks_is_refused(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    store = distributed.FileStore(str(tmp_path / "ranks"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        split = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(ModuleError, match="full_tensor"):
            torch_state(split)
    finally:
        distributed.destroy_process_group()
