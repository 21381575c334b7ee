"""Layers that take as long as they are told, by a clock of their own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from mpimesh import nn

X = np.zeros((4, 3), np.float32)
NO_COST: dict[str, Any] = {"bytes_per_s": float("inf"), "latency_s": 0.0}


class Clock(threading.local):
    """A clock for each rank, which only the layers move on."""

    now_s = 0.0
    pace = 1

    def perf_counter(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += self.pace * seconds

    def __deepcopy__(self, memo: object) -> Clock:
        return self


def install_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let layers be timed by a clock that they move on themselves."""
    clock = Clock()
    monkeypatch.setattr("mpimesh.parallel.layer_costs.time", clock)
    return clock


class Timed(nn.Module):
    """The identity, taking given times; much more when it runs first, and once in between."""

    def __init__(self, clock, forward_s, input_s=0, weight_s=0, *, trains=True) -> None:
        self.clock = clock
        self.times = (forward_s, input_s, weight_s)
        self.runs = 0
        if trains:
            self.weight = nn.Parameter("weight", (2,), nn.Constant(1.0))

    def forward(self, x, ctx=None):
        self.runs += 1
        self.clock.pass_(self.times[0] + (1000 if self.runs in (1, 4) else 0))
        return x

    def backward_input(self, dy, ctx):
        self.clock.pass_(self.times[1])
        return dy

    def backward_weight(self, ctx):
        self.clock.pass_(self.times[2])


def wide_mlp():
    return [nn.Linear(3, 3), nn.Linear(3, 500), nn.Linear(500, 500), nn.Linear(500, 3), nn.ReLU()]
