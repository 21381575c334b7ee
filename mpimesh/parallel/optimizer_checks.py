"""Checks of a ParallelOptimizer's optimizers and gradients; first those that are local."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpimesh.arguments import digest_text, shown
from mpimesh.arrays import Array, namespace
from mpimesh.errors import MismatchError
from mpimesh.nn import Parameter
from mpimesh.optim import LossScaler, Optimizer
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.gradients.buckets import GradientBuckets
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = [
    "agree_optimizers",
    "difference",
    "is_finite",
    "problem_with",
    "why_no_step",
]

_BLOCK_ELEMENTS = 1 << 16
_OPTIMIZERS = "the optimizers"


def problem_with(
    optimizers: Sequence[object],
    engine: Engine,
    zero: object,
    scaler: object,
    group: object,
) -> str:
    """Say why these cannot train a model; empty if they can."""
    if not isinstance(zero, int) or zero not in (0, 1):
        return f"zero must be 0 or 1: other stages of ZeRO are not there, got {shown(zero)}"
    if scaler is not None and not isinstance(scaler, LossScaler):
        return f"scaler must be a LossScaler or None, got {shown(scaler)}"
    if not isinstance(group, ProcessGroup):
        return f"group must be a group of ranks, as mesh.group() gives, got {shown(group)}"
    together = set(engine.scope.ranks)
    if not together <= set(group.ranks):
        return (
            f"{len(together)} ranks step together, and group {group.name!r} has only "
            f"{len(together & set(group.ranks))} of them: they would not leave out the same steps"
        )
    if engine.optimizer is not None:
        return "the model has a ParallelOptimizer; give it several optimizers as a list"
    known = {id(parameter) for _, parameter in engine.named_parameters()}
    seen: set[int] = set()
    for one in optimizers:
        if not isinstance(one, Optimizer):
            kind = f"{type(one).__module__}.{type(one).__name__}"
            if kind.startswith("torch."):
                return (
                    f"{kind} of PyTorch cannot be divided among ranks; use an optimizer of "
                    "mpimesh.optim, such as mm.optim.Adam(model.parameters())"
                )
            return (
                f"optimizer must be of mpimesh.optim, or a list of such, got {type(one).__name__}"
            )
        if zero and not one.elementwise:
            return (
                f"{type(one).__name__} does not change each element by itself, so that ranks "
                "cannot divide parameters; use zero=0"
            )
        problem = _foreign(one.params, known, seen)
        if problem:
            return problem
    return "" if optimizers else "optimizer must be at least one, got none"


def _foreign(parameters: Sequence[Parameter], known: set[int], seen: set[int]) -> str:
    for parameter in parameters:
        if id(parameter) not in known:
            return f"{parameter!r} is none of model.parameters(), which an optimizer here takes"
        if id(parameter) in seen:
            return f"{parameter!r} belongs to two optimizers"
        seen.add(id(parameter))
    return ""


def why_no_step(buckets: GradientBuckets) -> str:
    """Say why the parameters of these buckets cannot be stepped; empty if they can."""
    if buckets.sums is None:
        return (
            "there are no sums of gradients to step by: call train_step() before each step(), the "
            "last time not under no_sync()"
        )
    for bucket in buckets.buckets:
        views = [] if bucket.shard is None else bucket.shard.views
        for parameter, view in zip(bucket.parameters, views, strict=False):
            if parameter.data is not view:
                return (
                    f"{parameter!r} has got another array for its values, and the replicas divide "
                    "those that it had: write into it, parameter.data[...] = "
                )
    return ""


def is_finite(x: Array) -> bool:
    """Tell whether no element is infinite or NaN."""
    xp = namespace(x)
    step = _BLOCK_ELEMENTS if xp is np else max(1, x.size)
    flat = x.reshape(-1)
    return all(bool(xp.isfinite(flat[at : at + step]).all()) for at in range(0, flat.size, step))


def agree_optimizers(optimizers: Sequence[Optimizer], engine: Engine) -> None:
    """Return if all replicas change each parameter by the same rule, and all parts of it.

    Collective over the ranks that step together.

    Raises:
        MismatchError: On every rank, naming the first optimizer or parameter that differs.

    Cost:
        Three exchanges of small texts.
    """
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    texts = [
        f"optimizer {number}: {type(one).__name__} of "
        + ", ".join(f"{name}={getattr(one, name)!r}" for name in one.numbers)
        for number, one in enumerate(optimizers)
    ]
    texts += [
        f"{names[id(parameter)]} of optimizer {number}, {'with' if decays else 'without'} decay"
        for number, one in enumerate(optimizers)
        for parameter, decays in zip(one.params, one.decays, strict=True)
    ]
    problem = None
    for group in (engine.data, engine.tensor.group):
        rows = "" if group is None else difference(texts, group, what=_OPTIMIZERS)
        if rows and group is not None:
            problem = MismatchError(
                f"the ranks of group {group.name!r} must have the same optimizers, with the same "
                f"numbers and the same decay_mask, but they have\n{rows}"
            )
    scope = engine.scope
    exchange(scope._core.progress, scope.communicator, None, what=_OPTIMIZERS, problem=problem)


def difference(texts: Sequence[str], group: ProcessGroup, *, what: str) -> str:
    """Return on every rank the first of these texts that is not alike. Collective over `group`.

    Returns:
        A row for each rank; empty if all are alike.

    Cost:
        One exchange of a digest; where it differs, another one of all texts.
    """
    if group.size == 1:
        return ""
    digest = digest_text("\n".join(texts).encode())
    progress, communicator = group._core.progress, group.communicator
    if len(set(exchange(progress, communicator, digest, what=what))) == 1:
        return ""
    everyone = exchange(progress, communicator, list(texts), what=what)
    for place in range(max(map(len, everyone))):
        found = [texts[place] if place < len(texts) else "nothing" for texts in everyone]
        if len(set(found)) > 1:
            break
    return "\n".join(
        f"  rank {rank}: {text}" for rank, text in zip(group.ranks, found, strict=True)
    )
