"""A small GPT whose blocks keep their activations, or compute them again: time and memory.

One process. The memory is what Python's allocators and NumPy's have handed out, as tracemalloc
counts it: after the forward, and at most during forward and backward, beyond what there was before
the step. Gradients and losses are in the latter.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks.measure import FULL, TINY, Effort, in_turns
from benchmarks.rows import make_rows
from mpimesh import nn

__all__ = ["run"]

_SIZES, _TINY_SIZES = (4, 256, 8, 128, 8), (1, 32, 2, 16, 2)
_ROUNDS = 9
_MIB = 1 << 20


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way, with its memory."""
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    blocks, features, heads, tokens, rows = _TINY_SIZES if effort is TINY else _SIZES
    ids = np.random.default_rng(0).integers(0, 256, (rows, tokens + 1))
    ways: dict[str, Callable[[], float]] = {}
    losses = []
    for name, wrap in (("activations kept", _kept), ("each block in nn.Checkpoint", nn.Checkpoint)):
        layers = mm.parallel.gpt_layers(256, features, blocks, heads, max_tokens=tokens)
        made = [wrap(one) if isinstance(one, nn.GptBlock) else one for one in layers]
        model = nn.Sequential(made)
        model.materialize(seed=0, dtype=np.float32)
        step = _step(model, ids)
        losses.append(step(lambda: None))
        held, peak = _memory(step)
        label = f"{name}, {held / _MIB:.1f} MiB after forward, {peak / _MIB:.1f} MiB at most"
        ways[label] = lambda step=step: step(lambda: None)
    if losses[0] != losses[1]:
        raise SystemExit(f"the losses must be the same to the bit, got {losses}")
    rounds = min(_ROUNDS, effort.rounds)
    timings = in_turns(comm, ways, calls=1, rounds=rounds, clock=time.process_time)
    return make_rows(f"forward and backward, {blocks} blocks, {rows} x {tokens} tokens", timings)


def _kept(layer: nn.Module) -> nn.Module:
    return layer


def _step(model: nn.Sequential, ids: Any) -> Callable[[Callable[[], None]], float]:
    x, target = ids[:, :-1], ids[:, 1:]

    def step(between: Callable[[], None]) -> float:
        model.zero_grad()
        context = nn.Context()
        y = model.forward(x, context)
        between()
        loss, gradient = nn.cross_entropy.value_and_grad(y, target, denominator=len(x))
        model.backward(gradient, context)
        return loss

    return step


def _memory(step: Callable[[Callable[[], None]], float]) -> tuple[int, int]:
    """Return the bytes held after the forward, and the most, beyond those of before."""
    held: list[int] = []
    step(lambda: None)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        step(lambda: held.append(tracemalloc.get_traced_memory()[0] - before))
        return held[0], tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
