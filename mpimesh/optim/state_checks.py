"""Checks of a state of an optimizer, done before anything of it is taken over. Local.

Values of arrays are not looked at: a run that diverged has NaN in its state, and may be loaded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.nn.parameter import Parameter

__all__ = ["check_arrays", "check_layout", "check_names", "check_params", "check_steps"]

_MOST_STEPS = 1 << 53  # what a float can count


def check_layout(kind: str, state: Any, numbers: Sequence[str], num_params: int) -> None:
    """Check that a state is of an optimizer of this kind, of so many parameters.

    Args:
        kind: The name of the optimizer's class.
        state: The state.
        numbers: What it has beside the parameters.
        num_params: How many there are.

    Raises:
        ModuleError: If it is not, or lacks something.
    """
    if not isinstance(state, Mapping):
        raise ModuleError(
            f"state must be a dict as state_dict() of {kind} gives, got {type(state).__name__}"
        )
    params = state.get("params", ())
    by_name = any(isinstance(key, str) and key.startswith("params/") for key in state)
    if isinstance(params, Mapping) or by_name:
        raise ModuleError(
            f"this state has its parameters by name, as full_state_dict() of a ParallelOptimizer "
            f"gives; a plain {kind} takes them in the order of its parameters: load it into "
            "ParallelOptimizer(optimizer, model, zero=0), which steps as the plain one does"
        )
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise ModuleError(
            f"'params' of a state of {kind} is a list with a dict for each parameter, got "
            f"{type(params).__name__}"
        )
    missing = [name for name in ("optimizer", "params", *numbers) if name not in state]
    if missing or state["optimizer"] != kind or len(params) != num_params:
        raise ModuleError(
            f"this state does not fit {kind} of {num_params} parameters: it is of "
            f"{state.get('optimizer')} of {len(params)} parameters, "
            f"and lacks {missing or 'nothing'}"
        )


def check_params(
    parameters: Sequence[Parameter], states: Sequence[Any], names: Iterable[str]
) -> None:
    """Check the state of each parameter.

    Args:
        parameters: The parameters.
        states: What is to be the state of each.
        names: The arrays that one has which was stepped.

    Raises:
        ModuleError: If something is missing, or is no array or no count of steps.
        DTypeError: If an array is not of floating point.
        ShapeError: If an array has another shape than its parameter.
    """
    for place, (parameter, given) in enumerate(zip(parameters, states, strict=True)):
        who = f"parameter {place} ({parameter.name!r})"
        if check_steps(who, given):
            check_names(who, given, names)
        check_arrays(who, given, parameter.shape)


def check_steps(who: str, given: Any) -> int:
    """Return the count of steps in the state of a parameter.

    Raises:
        ModuleError: If there is none.
    """
    if not isinstance(given, Mapping):
        raise ModuleError(
            f"the state of {who} is a dict of 'steps' and of arrays, got {type(given).__name__}"
        )
    if "steps" not in given:
        raise ModuleError(
            f"the state of {who} lacks 'steps', how often it was stepped; it has {sorted(given)}"
        )
    value = given["steps"]
    try:
        steps = -1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        steps = -1
    if not 0 <= steps < _MOST_STEPS:
        raise ModuleError(
            f"'steps' in the state of {who} must be a whole number from 0 on, got {value!r}"
        )
    return steps


def check_names(who: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that the state of a parameter has these arrays.

    Raises:
        ModuleError: If one is missing.
    """
    missing = [name for name in names if name not in given]
    if missing:
        raise ModuleError(
            f"the state of {who} lacks {missing}, which one of {given['steps']} steps has; it has "
            f"{sorted(map(str, given))}"
        )


def check_arrays(who: str, given: Mapping[str, Any], shape: tuple[int, ...] | None) -> None:
    """Check the arrays in the state of a parameter; shapes not if `shape` is None.

    Raises:
        ModuleError: If one is no array.
        DTypeError: If one is not of floating point.
        ShapeError: If one has another shape.
    """
    for name, array in given.items():
        if name == "steps":
            continue
        if not hasattr(array, "shape") or not isinstance(getattr(array, "dtype", None), np.dtype):
            raise ModuleError(
                f"state {name!r} of {who} must be an array, got {type(array).__name__}"
            )
        if array.dtype.kind != "f":
            raise DTypeError(
                f"state {name!r} of {who} must be an array of floating point, got {array.dtype}"
            )
        if shape is not None and tuple(array.shape) != shape:
            raise ShapeError(
                f"state {name!r} of {who} must have its shape {shape}, got {tuple(array.shape)}; "
                "one that fits other stages and splits comes from "
                "ParallelOptimizer.full_state_dict()"
            )
