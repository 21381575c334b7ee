"""States of optimizers by the names of parameters, whole: they fit any mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpimesh.arrays import to_numpy
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.optim.state_checks import check_arrays, check_steps
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.gradients.held import Owned
from mpimesh.parallel.tensor.model import local_part
from mpimesh.runtime.agreement import exchange
from mpimesh.runtime.call import Call

__all__ = ["full_states", "local_states"]


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
    for stage in exchange(pipe.progress, pipe.communicator, mine, what=what):
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
