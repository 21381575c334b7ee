"""Values of a saved state, put into the parameters' memory all together or not at all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpimesh.arrays import Array, namespace, to_numpy
from mpimesh.errors import DTypeError, ShapeError
from mpimesh.nn.parameter import Parameter

__all__ = ["check_shape", "load_values"]


def check_shape(name: str, shape: tuple[int, ...], value: Array) -> None:
    """Check that `value` can be that of a parameter of this shape.

    Raises:
        ShapeError: If its shape differs.
    """
    if np.shape(value) != shape:
        raise ShapeError(
            f"state of parameter {name!r} must have its shape {shape}, got {np.shape(value)}"
        )


def load_values(parameters: Mapping[str, Parameter], state: Mapping[str, Array]) -> None:
    """Copy ``state[name]`` into each parameter, rounded to its dtype. Changes all or none.

    Raises:
        ShapeError: If a shape differs.
        DTypeError: If values are no numbers.
        ModuleStateError: If a parameter has no memory yet.
    """
    ready: list[tuple[Array, Array]] = []
    for name, parameter in parameters.items():
        data = parameter.value()
        check_shape(name, parameter.shape, state[name])
        try:
            values = np.asarray(to_numpy(state[name]), dtype=data.dtype)
        except (TypeError, ValueError) as error:
            raise DTypeError(
                f"state of parameter {name!r} must be numbers of dtype {data.dtype}: {error}"
            ) from None
        ready.append((data, namespace(data).asarray(values)))
    for data, values in ready:
        data[...] = values
