"""Comparison of what the ranks of a model have beside its batch, with ``MPIMESH_CHECKS`` on.

The options of its layers when it is made; and with each step by what each rank trains, by what it
divides the loss, which batch it was given, and which states it has loaded. Replicas are compared by
their values anyhow; these are for ranks that have other parts of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from mpimesh.arguments import plain_text
from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.nn.module import leaves
from mpimesh.optim.optimizer import Optimizer, numbers_text
from mpimesh.parallel.replicas import difference
from mpimesh.runtime.call import Call

if TYPE_CHECKING:
    from mpimesh.nn import Parameter
    from mpimesh.parallel.stage import PipelineStage
    from mpimesh.runtime import ProcessGroup

__all__ = ["CHECKED", "Trainer", "agree_options", "options_text"]

CHECKED = ("trained", "denominator", "origin", "loaded")
"""The facts of a step that are compared with checks on."""

_OF_A_RANK = frozenset({"self", "rank", "group", "device", "comm", "mesh"})
_PLAIN = (bool, int, float, complex, str, type(None), np.generic, np.dtype)


def agree_options(stages: Sequence[PipelineStage], scope: ProcessGroup) -> None:
    """Return if all ranks made their layers with the same options. Collective.

    Raises:
        MismatchError: On every rank, with the first layer that differs.
    """
    texts = [
        f"{options_text(leaf)}, in layer {place} of stage {stage.stage_id}"
        for stage in stages
        for place, layer in enumerate(stage.layers)
        for leaf in leaves(layer)
    ]
    differs = difference(texts, scope, Call("layers of a model", scope.name))
    if differs is not None:
        raise on_all_ranks(
            MismatchError(
                f"all ranks of group {scope.name!r} must make the layers of a model with the same "
                f"options, but one is\n{differs[1]}"
            )
        )


def options_text(thing: object) -> str:
    """Return the class of a layer or a loss, and the plain values that it was made with."""
    values = getattr(thing, "__dict__", {})
    inner = values.get("module", values.get("_module"))
    parts = [] if inner is None else [plain_text(repr(inner))]
    kind: Any = type(thing)
    for name in _option_names(kind):
        value = values.get(name, values.get(f"_{name}", thing))
        if value is not thing and all(isinstance(one, _PLAIN) for one in _flat(value)):
            parts.append(f"{name}={value!r}")
        elif value is not thing and type(value).__module__.startswith("mpimesh.nn"):
            parts.append(f"{name}={options_text(value)}")
    return f"{type(thing).__name__}({', '.join(parts)})"


@lru_cache(maxsize=1024)
def _option_names(kind: type) -> tuple[str, ...]:
    try:
        names = signature(kind).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in names if name not in _OF_A_RANK)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


class Trainer:
    """The one optimizer of a rank's parameters, and how often it has stepped since the last step.

    Where a rank's parameters have several optimizers, or one of another library, none is compared:
    so can a stage be given a rate of its own.
    """

    def __init__(self) -> None:
        self._last: tuple[ref[Optimizer], int] | None = None

    def text(self, whole: object, named: Iterable[tuple[str, Parameter]]) -> str | None:
        """Return what the ranks compare of it; None if there is nothing to compare. Local.

        Args:
            whole: The model's ParallelOptimizer; None if it has none.
            named: This rank's parameters.
        """
        found = _only_optimizer(whole, named)
        if found is None:
            return None
        steps = 0
        if self._last is not None and self._last[0]() is found:
            steps = found.calls - self._last[1]
        times = "" if found.is_lent else f", stepped {steps} times since the last train_step"
        return f"{type(found).__name__} with {numbers_text(found)}{times}"

    def note(self, whole: object, named: Iterable[tuple[str, Parameter]]) -> None:
        """Count from now on: a step of the model has gone well. Local."""
        found = _only_optimizer(whole, named)
        self._last = None if found is None else (ref(found), found.calls)


def _only_optimizer(whole: object, named: Iterable[tuple[str, Parameter]]) -> Optimizer | None:
    trained = [one for _, one in named if one.requires_grad]
    found: set[object] = {None if one.trainer is None else one.trainer() for one in trained}
    if whole is not None:
        found = set(getattr(whole, "optimizers", ()))
    only = found.pop() if len(found) == 1 else None
    return only if isinstance(only, Optimizer) else None
