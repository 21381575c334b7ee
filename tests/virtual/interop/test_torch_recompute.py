"""A forward that runs again for its backward: the state of PyTorch's modules is as without."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import mpimesh as mm  # noqa: E402
import mpimesh.interop.torch as mt  # noqa: E402
from mpimesh import nn, optim  # noqa: E402
from tests.helpers.depth import deep  # noqa: E402
from tests.helpers.parallel_models import on_ranks  # noqa: E402

tn: Any = torch.nn


class Own(torch.nn.Module):
    """State of all kinds, which the output depends on."""

    scale: Any

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("cached", torch.zeros(4), persistent=False)
        self.calls = 0
        self.history: list[int] = []
        self.counts = {"rows": np.zeros(1)}
        self.generator = torch.Generator().manual_seed(3)
        self.rng = np.random.default_rng(4)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.history.append(len(x))
            self.counts["rows"] += len(x)
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
            self.cached.add_(1)
        noise = torch.rand(4, generator=self.generator) + float(self.rng.uniform())
        kept = noise * self.calls + float(self.counts["rows"][0]) + self.cached
        return x * self.scale + 0.01 * kept


LAYERS = {
    "batch norm": lambda: tn.BatchNorm1d(4),
    "spectral norm": lambda: tn.utils.parametrizations.spectral_norm(tn.Linear(4, 4)),
    "old spectral norm": lambda: tn.utils.spectral_norm(tn.Linear(4, 4)),
    "dropout": lambda: tn.Sequential(tn.Linear(4, 4), tn.Dropout(0.4)),
    "all": lambda: tn.Sequential(tn.BatchNorm1d(4), tn.Dropout(0.3), Own(), tn.BatchNorm1d(4)),
    "own": Own,
}


def state_of(module: Any) -> dict[str, Any]:
    found = {name: value.numpy().copy() for name, value in module.named_buffers()}
    for name, one in module.named_modules():
        if isinstance(one, Own):
            found |= {f"{name}.{key}": getattr(one, key) for key in ("calls", "history")}
            found[f"{name}.rows"] = one.counts["rows"]
            found[f"{name}.state"] = one.generator.get_state().numpy(), one.rng.random(2)
    return found


SCHEDULES = ["1f1b", *deep("zb1p", "zbv")]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LAYERS)
def test_state_losses_and_values_are_those_without(name, schedule):
    torch.manual_seed(0)
    source = tn.ModuleList([LAYERS[name]() for _ in range(4)])
    twice = name == "all" and schedule == "1f1b"
    wraps: list[Any] = [lambda layer: layer, nn.Checkpoint]
    wraps += [lambda layer: nn.Checkpoint(nn.Checkpoint(layer))] if twice else []
    rng = np.random.default_rng(0)
    x, y = rng.normal(3.0, 2.0, (8, 4)).astype("f4"), rng.normal(size=(8, 4)).astype("f4")

    def body(mesh, wrap):
        made = copy.deepcopy(source)
        stages = [mm.PipelineStage(at) for at in range(4)]
        for stage, one in zip(stages, made, strict=True):
            stage.add_layer(nn.Linear(4, 4)).add_layer(wrap(mt.wrap(one)))
        pipe = mm.PipelineParallel(
            stages,
            4,
            mesh=mesh,
            schedule=schedule,
            seed=1,
        )
        sgd = optim.SGD(pipe.parameters(), lr=0.001)
        losses = [pipe.train_step(x, y, loss=nn.mse_loss, optimizer=sgd) for _ in range(2)]
        pipe.evaluate(x, y, loss=nn.mse_loss)
        return losses, pipe.full_state_dict(), [state_of(one) for one in made]

    dims = "pp=2" if schedule in ("interleaved", "zbv", "looped_bfs") else "pp=4"
    plain, *again = [on_ranks(dims, partial(body, wrap=wrap)) for wrap in wraps]
    for found in again:
        np.testing.assert_equal(found, plain)
    assert plain[0][0][0] != plain[0][0][1]


def test_measuring_layers_leaves_their_state_alone():
    source = tn.Sequential(tn.BatchNorm1d(4), Own())

    def body(mesh):
        made = copy.deepcopy(source)
        before = copy.deepcopy(state_of(made))
        mm.parallel.measure_layers(
            nn.Sequential(mt.wrap_each(made)), np.ones((4, 4), "f4"), mesh=mesh, repeats=2
        )
        made[1].rng = np.random.default_rng(4)
        np.testing.assert_equal(state_of(made), before)
        return True

    assert on_ranks("pp=2", body) == [True] * 2
