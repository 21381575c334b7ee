"""What a ParallelOptimizer asks of its optimizers and of gradients. Local."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpimesh.arrays import Array, namespace
from mpimesh.nn import Parameter
from mpimesh.optim import Optimizer
from mpimesh.parallel.engine import Engine

__all__ = ["is_finite", "problem_with"]

_BLOCK_ELEMENTS = 1 << 16


def problem_with(optimizers: Sequence[object], engine: Engine, zero: object) -> str:
    """Say why these cannot train a model; empty if they can."""
    if zero not in (0, 1):
        return f"zero must be 0 or 1: other stages of ZeRO are not there, got {zero!r}"
    if engine.optimizer is not None:
        return "the model has a ParallelOptimizer; give it several optimizers as a list"
    known = {id(parameter) for _, parameter in engine.named_parameters()}
    seen: set[int] = set()
    for one in optimizers:
        if not isinstance(one, Optimizer):
            return f"it takes optimizers of mpimesh.optim, got {type(one).__name__}"
        if zero and not one.elementwise:
            return (
                f"{type(one).__name__} does not change each element by itself, so that ranks "
                "cannot divide parameters; use zero=0"
            )
        problem = _foreign(one.params, known, seen)
        if problem:
            return problem
    return "" if optimizers else "it takes at least one optimizer"


def _foreign(parameters: Sequence[Parameter], known: set[int], seen: set[int]) -> str:
    for parameter in parameters:
        if id(parameter) not in known:
            return f"{parameter!r} is none of model.parameters(), which an optimizer here takes"
        if id(parameter) in seen:
            return f"{parameter!r} belongs to two optimizers"
        seen.add(id(parameter))
    return ""


def is_finite(x: Array) -> bool:
    """Tell whether no element is infinite or NaN."""
    xp = namespace(x)
    step = _BLOCK_ELEMENTS if xp is np else max(1, x.size)
    flat = x.reshape(-1)
    return all(bool(xp.isfinite(flat[at : at + step]).all()) for at in range(0, flat.size, step))
