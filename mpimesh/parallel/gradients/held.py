"""A rank's part of the states of optimizers: for each parameter the state of some elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.arrays import Array, moved
from mpimesh.nn import Parameter
from mpimesh.optim import Optimizer
from mpimesh.parallel.gradients.runs import Run
from mpimesh.parallel.gradients.shard import Shard
from mpimesh.parallel.gradients.spans import overlap

__all__ = ["Held", "HeldState", "Owned", "own_state", "parts_of", "whole_states"]


@dataclass(frozen=True, slots=True)
class Owned:
    """An optimizer that is lent, and what it was given.

    Attributes:
        optimizer: It steps pieces now.
        parameters: Its parameters, whole.
        decays: For each whether weight decay is for it.
    """

    optimizer: Optimizer
    parameters: tuple[Parameter, ...]
    decays: tuple[bool, ...]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Owned:
        """Return what an optimizer has before it is lent."""
        return cls(optimizer, tuple(optimizer.params), tuple(optimizer.decays))


@dataclass(frozen=True, slots=True)
class Held:
    """The state of neighbouring elements of one parameter; there may be none.

    Attributes:
        steps: How often the parameter was stepped.
        start: The first of them, counted in the flat parameter.
        arrays: Flat arrays of their state, by name.
    """

    steps: int
    start: int
    arrays: Mapping[str, Array]

    @classmethod
    def whole(cls, state: Mapping[str, Any]) -> Held:
        """Return the state of all elements."""
        arrays = {name: array.reshape(-1) for name, array in state.items() if name != "steps"}
        return cls(int(state["steps"]), 0, arrays)

    def shaped(self, parameter: Parameter) -> dict[str, Any]:
        """Return the state of all elements as optimizers have it."""
        arrays = {name: array.reshape(parameter.shape) for name, array in self.arrays.items()}
        return {"steps": self.steps, **arrays}


@dataclass(frozen=True, slots=True)
class HeldState:
    """This rank's part of the state of one optimizer.

    Attributes:
        numbers: What is of no parameter.
        params: For each parameter that it was given what is held of its state.
    """

    numbers: Mapping[str, Any]
    params: Sequence[Held]


def whole_states(
    owned: Sequence[Owned], states: Sequence[Mapping[str, Any]]
) -> tuple[HeldState, ...]:
    """Return states of whole parameters as what a rank holds.

    Raises:
        ModuleError: As :meth:`mpimesh.optim.Optimizer.check_state`; so with all errors.
    """
    found = []
    for one, state in zip(owned, states, strict=True):
        one.optimizer.check_state(state, one.parameters)
        numbers = {name: value for name, value in state.items() if name != "params"}
        found.append(HeldState(numbers, [Held.whole(given) for given in state["params"]]))
    return tuple(found)


def own_state(run: Run, shard: Shard, held: Sequence[Held]) -> dict[str, Any]:
    """Cut this rank's part out of what is held of a run's parameters."""
    inside = run.within(shard.part)
    first = held[run.places[0]]
    own: dict[str, Any] = {"steps": first.steps}
    for name in first.arrays:
        # A state that was made without master values has none for any parameter of a dtype.
        if any(name not in held[place].arrays for place in run.places):
            continue
        parts: list[Array] = []
        for at, place in enumerate(run.places):
            begin, end = overlap(run.span_of(at), (inside.start, inside.stop))
            if begin < end:
                offset = run.starts[at] + held[place].start
                values = moved(held[place].arrays[name], np)
                parts.append(values[begin - offset : end - offset])
        own[name] = np.concatenate(parts) if parts else np.empty(0)
    return own


def parts_of(run: Run, shard: Shard, own: Mapping[str, Any]) -> dict[int, Held]:
    """Return by place what this rank holds of a run's parameters: views of its part's state."""
    inside = run.within(shard.part)
    found: dict[int, Held] = {}
    for at, place in enumerate(run.places):
        begin, end = overlap(run.span_of(at), (inside.start, inside.stop))
        arrays = {
            name: array[begin - inside.start : end - inside.start]
            for name, array in own.items()
            if name != "steps"
        }
        found[place] = Held(int(own["steps"]), begin - run.starts[at], arrays)
    return found
