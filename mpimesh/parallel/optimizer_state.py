"""States of optimizers by the names of parameters, whole: they fit any mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count as count_up
from itertools import takewhile
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, shown
from mpimesh.arrays import to_numpy
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.optim.state_checks import check_arrays, check_steps
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.gradients.pieces import Owned
from mpimesh.parallel.tensor.model import local_part
from mpimesh.runtime.agreement import exchange
from mpimesh.runtime.call import Call

__all__ = ["flat_state", "full_states", "local_states", "nested_states"]

_PARAMS = "params/"


def full_states(
    engine: Engine, owned: Sequence[Owned], states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the states of all parameters of a model, by name. Collective over its ranks.

    Args:
        engine: The model.
        owned: The optimizers.
        states: Their states, of this rank's whole parameters.

    Cost:
        Two broadcasts for each array, over the stages; and an all-gather of what is split.
    """
    places = _places(owned)
    # Of the ranks that hold a tied parameter, the first one gives it.
    copies = {id(parameter) for parameter in engine.ties.copies}
    mine: dict[str, tuple[int, int, list[str]]] = {}
    for name, parameter in engine.named_parameters():
        if id(parameter) in places and id(parameter) not in copies:
            number, place = places[id(parameter)]
            given = states[number]["params"][place]
            mine[name] = number, int(given["steps"]), sorted(given.keys() - {"steps"})
    pipe = engine.pipe
    what = Call("full_state_dict", pipe.name)
    told: dict[str, tuple[int, int, list[str]]] = {}
    for stage in exchange(pipe._core.progress, pipe.communicator, mine, what=what):
        told |= stage
    params: list[dict[str, dict[str, Any]]] = [{} for _ in owned]
    for name, parameter in engine.named_parameters(everywhere=True):
        if name not in told:
            continue
        number, steps, arrays = told[name]
        params[number][name] = {"steps": steps}
        for array in arrays:
            part = None
            if name in mine:
                place = places[id(parameter)][1]
                part = engine.tensor.whole(parameter, states[number]["params"][place][array])
            label = f"{array} of {name}"
            whole = pipe.broadcast(part, root=None, label=label).resolve()
            params[number][name][array] = to_numpy(whole)
    return [{**state, "params": own} for state, own in zip(states, params, strict=True)]


def local_states(
    engine: Engine, owned: Sequence[Owned], states: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return what this rank holds of states by name; others are returned as they are. Local.

    Raises:
        ModuleError: If names are missing, or there are others than the model has, or something
            is no array or no count of steps.
        DTypeError: If an array is not of floating point.
        ShapeError: If an array has another shape than its whole parameter.
    """
    return [
        _local_state(engine, one, state)
        if isinstance(state, Mapping) and isinstance(state.get("params"), Mapping)
        else state
        for one, state in zip(owned, states, strict=True)
    ]


def flat_state(states: Sequence[Mapping[str, Any]], step: int, *, single: bool) -> dict[str, Any]:
    """Return states by name as one dict of arrays, numbers and texts. Local.

    Args:
        states: What :func:`full_states` gave.
        step: The model's count of steps.
        single: Whether there is one optimizer, not a list of them.
    """
    flat: dict[str, Any] = {"step": step}
    for number, state in enumerate(states):
        prefix = "" if single else f"{number}/"
        for name, value in state.items():
            if name != "params":
                flat[prefix + name] = np.array(value) if isinstance(value, tuple) else value
        for name, own in state["params"].items():
            flat |= {f"{prefix}{_PARAMS}{name}/{key}": value for key, value in own.items()}
    return flat


def nested_states(state: Any, count: int) -> tuple[list[Any], int | None]:
    """Return the state of each optimizer, and the model's count of steps, if it is there. Local.

    Args:
        state: A state or a list of them, nested or flat, as users load them.
        count: The number of optimizers.

    Raises:
        ModuleError: If there are more or less, or it is no state, or 'step' no count.
    """
    if isinstance(state, Mapping) and "params" not in state:
        given = {str(key): _plain(state[key]) for key in state}
        numbered = map("{}/".format, count_up())
        prefixes = [*takewhile(lambda prefix: f"{prefix}optimizer" in given, numbered)]
        states: list[Any] = [_nested(given, prefix) for prefix in prefixes or [""]]
        if prefixes and "step" in given:
            states[0]["step"] = given["step"]
    elif isinstance(state, Mapping):
        states = [state]
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        states = list(state)
    else:
        raise ModuleError(
            "state must be a dict as state_dict() or full_state_dict() gives, or a list of them "
            f"for a list of optimizers, got {shown(state)}"
        )
    if len(states) != count:
        raise ModuleError(f"state is of {len(states)} optimizers, and there are {count}")
    steps = [one["step"] for one in states if isinstance(one, Mapping) and "step" in one]
    step = as_int(steps[0], "'step' in state", ModuleError, least=0) if steps else None
    return [
        {key: one[key] for key in one if key != "step"} if isinstance(one, Mapping) else one
        for one in states
    ], step


def _nested(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the state of one optimizer out of a flat one."""
    state: dict[str, Any] = {"params": {}}
    for key, value in flat.items():
        if not key.startswith(prefix):
            continue
        own = key.removeprefix(prefix)
        if own.startswith(_PARAMS):
            name, _, what = own.removeprefix(_PARAMS).rpartition("/")
            state["params"].setdefault(name, {})[what] = value
        else:
            state[own] = tuple(value.tolist()) if isinstance(value, np.ndarray) else value
    return state


def _plain(value: Any) -> Any:
    """Return what np.load gives for a number or a text as that; arrays as they are."""
    return value.item() if isinstance(value, np.ndarray) and not value.shape else value


def _local_state(engine: Engine, owned: Owned, state: Mapping[str, Any]) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    known = {name for name, _ in engine.named_parameters(everywhere=True)}
    mine = [names[id(parameter)] for parameter in owned.parameters]
    given = state["params"]
    missing = sorted(set(mine) - given.keys())
    unknown = sorted(given.keys() - known)
    foreign = sorted((given.keys() & set(names.values())) - set(mine))
    if missing or unknown or foreign:
        raise ModuleError(
            f"a full state of {type(owned.optimizer).__name__} has all parameters that it was "
            f"given, by their names in the whole model; missing: {missing or 'none'}, not in the "
            f"model: {unknown or 'none'}, not of this optimizer: {foreign or 'none'}"
        )
    params: list[dict[str, Any]] = []
    for name, parameter in zip(mine, owned.parameters, strict=True):
        own: dict[str, Any] = {}
        who = f"parameter {name!r}"
        check_steps(who, given[name])
        check_arrays(who, given[name], None)  # it may have a part of the shape here
        for key, value in given[name].items():
            try:
                own[key] = value if key == "steps" else local_part(name, parameter, value)
            except ShapeError as error:
                raise ShapeError(f"{key!r} of the optimizer: {error}") from None
        params.append(own)
    return {**state, "params": params}


def _places(owned: Sequence[Owned]) -> dict[int, tuple[int, int]]:
    """Return by its id the optimizer of each parameter and its place there."""
    return {
        id(parameter): (number, place)
        for number, one in enumerate(owned)
        for place, parameter in enumerate(one.parameters)
    }
