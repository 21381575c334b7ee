"""A step of a small GPT on one rank beside the same model in PyTorch with one thread.

Both begin with the same weights and train on the same tokens: forward, cross-entropy, backward and
AdamW, in float32. PyTorch has its fastest ways: attention and AdamW that are one kernel each. Both
are one process with one thread, so the processor's time counts, which other programs on the
machine disturb less than the clock. That both do the same sums is checked: the losses of the first
steps must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks import gloo
from benchmarks.measure import FULL, TINY, Effort, in_turns
from benchmarks.rows import make_rows
from mpimesh import nn, optim

__all__ = ["available", "run"]

TOLERANCE = 1e-4
_LR, _DECAY = 1e-3, 0.01
_ROUNDS = 9
_COMPARED_STEPS = 3

available = gloo.available


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a GPT and of its batch."""

    blocks: int = 4
    features: int = 256
    heads: int = 8
    tokens: int = 128
    rows: int = 8
    vocabulary: int = 256


_TINY_SIZES = Sizes(blocks=1, features=32, heads=2, tokens=16, rows=2)


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way; none without PyTorch."""
    if available():
        return []
    import torch

    torch.set_num_threads(1)
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    sizes = _TINY_SIZES if effort is TINY else Sizes()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, sizes.vocabulary, (sizes.rows, sizes.tokens + 1))
    model = nn.Sequential(
        mm.parallel.gpt_layers(
            sizes.vocabulary,
            sizes.features,
            sizes.blocks,
            sizes.heads,
            max_tokens=sizes.tokens,
        )
    )
    model.materialize(seed=0, dtype=np.float32)
    replica = _Torch(torch, sizes, model.state_dict())
    ways = {"PyTorch": replica.stepper(ids), "mpimesh": _own(model, ids)}
    for number in range(_COMPARED_STEPS):
        expected, found = (step() for step in ways.values())
        if not abs(found - expected) <= TOLERANCE:
            raise SystemExit(
                f"step {number}: mpimesh has the loss {found}, PyTorch {expected}; these must "
                f"agree to {TOLERANCE}"
            )
    rounds = min(_ROUNDS, effort.rounds)
    timings = in_turns(comm, ways, calls=1, rounds=rounds, clock=time.process_time)
    number = sum(parameter.size for parameter in model.parameters())
    what = f"a step, {number:,} parameters, {sizes.rows} x {sizes.tokens} tokens"
    return make_rows(what, timings)


def _own(model: nn.Sequential, ids: Any) -> Callable[[], float]:
    x, target = ids[:, :-1], ids[:, 1:]
    optimizer = optim.AdamW(model.parameters(), lr=_LR, weight_decay=_DECAY)

    def step() -> float:
        context = nn.Context()
        optimizer.zero_grad()
        y = model.forward(x, context)
        loss, gradient = nn.cross_entropy.value_and_grad(y, target, denominator=len(x))
        model.backward(gradient, context)
        optimizer.step()
        return loss

    return step


class _Torch:
    """The model of PyTorch's functions, with weights that are called as mpimesh calls its own."""

    def __init__(self, torch: Any, sizes: Sizes, state: Any) -> None:
        self._torch = torch
        self._sizes = sizes
        self._weights = {
            name: torch.tensor(values, requires_grad=True) for name, values in state.items()
        }

    def stepper(self, ids: Any) -> Callable[[], float]:
        torch = self._torch
        x, target = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
        optimizer = torch.optim.AdamW(
            self._weights.values(), lr=_LR, weight_decay=_DECAY, fused=True
        )

        def step() -> float:
            optimizer.zero_grad()
            logits = self._forward(x)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step

    def _forward(self, x: Any) -> Any:
        sizes, weights = self._sizes, self._weights
        functions = self._torch.nn.functional
        y = functions.embedding(x, weights["0.weight"]) + weights["1.weight"]
        for place in range(3, 3 + sizes.blocks):
            y = y + self._attention(f"{place}.attention", self._norm(f"{place}.attention_norm", y))
            inner = self._linear(f"{place}.mlp.up", self._norm(f"{place}.mlp_norm", y))
            inner = functions.gelu(inner, approximate="tanh")
            y = y + self._linear(f"{place}.mlp.down", inner)
        # The last layer has the embedding's weight.
        return functions.linear(self._norm(str(3 + sizes.blocks), y), weights["0.weight"])

    def _attention(self, name: str, x: Any) -> Any:
        q, k, v = (
            self._linear(f"{name}.{part}", x).unflatten(-1, (self._sizes.heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        attend = self._torch.nn.functional.scaled_dot_product_attention
        read = attend(q, k, v, is_causal=True)
        return self._linear(f"{name}.output", read.transpose(1, 2).flatten(2))

    def _linear(self, name: str, x: Any) -> Any:
        weights = self._weights
        return self._torch.nn.functional.linear(
            x, weights[f"{name}.weight"], weights[f"{name}.bias"]
        )

    def _norm(self, name: str, x: Any) -> Any:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return self._torch.nn.functional.layer_norm(x, weight.shape, weight, bias)
