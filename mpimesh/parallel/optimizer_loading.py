"""States that all ranks take over, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpimesh.arguments import digest_text
from mpimesh.arrays import Array, to_numpy
from mpimesh.errors import MismatchError, ModuleError, MpimeshError
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.gradients.pieces import HeldState, Owned, whole_states
from mpimesh.parallel.optimizer_checks import difference, raise_together
from mpimesh.parallel.optimizer_state import local_states, nested_states

__all__ = ["agree_states"]

_WHAT = "load_state_dict of the optimizer"


def agree_states(
    engine: Engine, owned: Sequence[Owned], state: Any
) -> tuple[tuple[HeldState, ...], int | None]:
    """Return states of whole parameters, if they fit on every rank and replicas have the same.

    Collective over the ranks that step together. With them comes the model's count of steps, if
    it is in the state.

    Args:
        engine: The model.
        owned: Its optimizers.
        state: A state or several, as users load them.

    Raises:
        MpimeshError: On every rank, if it is so on any.

    Cost:
        Three exchanges of small texts; with replicas, reading the state once.
    """
    problem: MpimeshError | None = None
    held: tuple[HeldState, ...] = ()
    step: int | None = None
    try:
        states, step = nested_states(state, len(owned))
        held = whole_states(owned, local_states(engine, owned, states))
    except MpimeshError as error:
        problem = error
    raise_together(engine.scope, problem, ModuleError, what=_WHAT)
    replicas = engine.data
    texts = [f"step {step}", *_texts(engine, owned, held)] if replicas.size > 1 else []
    rows = difference(texts, replicas, what=_WHAT)
    if rows:
        problem = MismatchError(
            f"the ranks of group {replicas.name!r} must load the same state, and nothing is "
            f"changed, as they have\n{rows}"
        )
    raise_together(engine.scope, problem, MismatchError, what=_WHAT)
    return held, step


def _texts(engine: Engine, owned: Sequence[Owned], held: Sequence[HeldState]) -> list[str]:
    """Return what replicas must have alike: the numbers, and digests of arrays."""
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    texts: list[str] = []
    for number, (one, state) in enumerate(zip(owned, held, strict=True)):
        texts += [
            f"{key} {state.numbers[key]!r} of optimizer {number}" for key in one.optimizer.numbers
        ]
        for parameter, given in zip(one.parameters, state.params, strict=True):
            name = names[id(parameter)]
            texts.append(f"{given.steps} steps of {name}")
            texts += [
                f"{key} of {name} with values {_digest(given.arrays[key])}"
                for key in sorted(given.arrays)
            ]
    return texts


def _digest(x: Array) -> str:
    values = np.ascontiguousarray(to_numpy(x)).reshape(-1)
    return digest_text(values.view(np.uint8).data)
