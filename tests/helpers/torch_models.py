"""Models of PyTorch, batches, and what plain PyTorch makes of them: the oracle of the adapter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpimesh as mm

torch: Any = pytest.importorskip("torch")
mt: Any = pytest.importorskip("mpimesh.interop.torch")

torch.set_num_threads(1)

FEATURES = 6
CLASSES = 5


def make_model(dtype: Any = None) -> Any:
    """A classifier whose modules can be cut anywhere."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8),
        torch.nn.GELU(),
        torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.LayerNorm(7)),
        torch.nn.ReLU(),
        torch.nn.Linear(7, 8, bias=False),
        torch.nn.Linear(8, CLASSES),
    )
    return model.to(torch.float64 if dtype is None else dtype)


class Two(torch.nn.Module):
    """Takes two arrays; not all of its parameters are trained."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(FEATURES, CLASSES)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.full((CLASSES,), 0.5), requires_grad=False)

    def forward(self, x, mask):
        return self.a(x) * mask + self.frozen


def batch(step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, 78])
    return rng.normal(size=(rows, FEATURES)), rng.integers(0, CLASSES, rows)


@dataclass
class Trained:
    """The course of a training."""

    losses: list[float]
    state: dict[str, Any]


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train_alone(
    model: Any,
    batches: list[tuple[Any, Any]],
    optimizer: Callable[[Any], Any] = adamw,
    loss: Any = torch.nn.functional.cross_entropy,
) -> Trained:
    """Train `model` by plain PyTorch, on whole batches."""
    own = optimizer(model.parameters())
    losses = []
    for x, target in batches:
        own.zero_grad()
        value = loss(_call(model, x), torch.from_numpy(target))
        value.backward()
        own.step()
        losses.append(float(value.detach()))
    return Trained(losses, copy.deepcopy(model.state_dict()))


def _call(model: Any, x: Any) -> Any:
    if isinstance(x, tuple):
        return model(*map(torch.from_numpy, x))
    return model(torch.from_numpy(x))


def deal(layers: list[Any], num_stages: int, **options: Any) -> list[mm.PipelineStage]:
    """Deal layers to stages in order, as evenly as goes."""
    stages = [mm.PipelineStage(number, **options) for number in range(num_stages)]
    for place, layer in enumerate(layers):
        stages[place * num_stages // len(layers)].add_layer(layer)
    return stages


def assert_state(got: dict[str, Any], expected: dict[str, Any], *, rtol: float = 1e-9) -> None:
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(got[name], values, rtol=rtol, atol=1e-11, msg=name)
