"""Values of a saved state, put into the parameters' memory all together or not at all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import Array, namespace, to_numpy
from mpimesh.arrays.reduction import is_half
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.nn.parameter import Parameter

__all__ = ["check_shape", "check_state", "check_values", "load_values"]

_VOID = np.dtype("V2")


def check_shape(name: str, shape: tuple[int, ...], value: Array) -> None:
    """Check that `value` can be that of a parameter of this shape.

    Raises:
        ShapeError: If its shape differs.
    """
    if np.shape(value) != shape:
        raise ShapeError(
            f"state of parameter {name!r} must have its shape {shape}, got {np.shape(value)}"
        )


def check_state(state: object) -> None:
    """Check that `state` is a dict, or a file of arrays that is like one.

    Raises:
        ModuleError: If it is not.
    """
    if not isinstance(state, Mapping):
        raise ModuleError(
            "state must be a dict of arrays by the names of parameters, or what np.load gives of "
            f"such a file, got {shown(state)}"
        )


def check_values(
    parameters: Mapping[str, Parameter], state: Mapping[str, Array]
) -> list[tuple[Array, Array]]:
    """Return the memory of each parameter and what is to be copied there.

    Raises:
        ShapeError: If a shape differs.
        DTypeError: If values are no real numbers.
        ModuleStateError: If a parameter has no memory yet.
    """
    ready: list[tuple[Array, Array]] = []
    for name, parameter in parameters.items():
        data = parameter.value()
        check_shape(name, parameter.shape, state[name])
        values = np.asarray(to_numpy(state[name]))
        if values.dtype == _VOID and is_half(data.dtype):
            values = values.view(data.dtype)  # np.load knows no bfloat16
        if values.dtype.kind not in "biuf" and not is_half(values.dtype):
            raise DTypeError(
                f"state of parameter {name!r} must be real numbers, as its dtype is {data.dtype}, "
                f"got {values.dtype}"
            )
        ready.append((data, namespace(data).asarray(values.astype(data.dtype, copy=False))))
    return ready


def load_values(parameters: Mapping[str, Parameter], state: Mapping[str, Array]) -> None:
    """Copy ``state[name]`` into each parameter, rounded to its dtype. Changes all or none.

    Raises:
        ShapeError: If a shape differs.
        DTypeError: If values are no real numbers.
        ModuleStateError: If a parameter has no memory yet.
    """
    for data, values in check_values(parameters, state):
        data[...] = values
