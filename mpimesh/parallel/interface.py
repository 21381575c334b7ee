"""What a stage gives to the next one, and how both come to know it.

How large a message is both ends must know before it moves. A stage's *interface* is
the shape of a row of its output, and the dtype; the gradient that comes back has
the same. The first time a kind of batch passes, the sender announces the interface
before its first activation. From then on both ends know it, and only the number of rows differs
from message to message. An output that does not keep to it is refused where it was made.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np

from mpimesh.arrays import Array, DType, HostArray
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.errors import ModuleStateError, ShapeError

__all__ = ["ANNOUNCEMENT_BYTES", "Interface", "check_gradient", "check_output"]

ANNOUNCEMENT_BYTES = 2048
"""Room for an interface as a message."""


@dataclass(frozen=True, slots=True)
class Interface:
    """The outputs of a stage.

    Attributes:
        row_shape: The shape of a row.
        dtype: The dtype.
    """

    row_shape: tuple[int, ...]
    dtype: DType

    def nbytes(self, rows: int) -> int:
        """Return the bytes of so many rows."""
        return rows * math.prod(self.row_shape) * self.dtype.itemsize

    def to_bytes(self) -> HostArray:
        """Return the interface as a message."""
        text = json.dumps([self.row_shape, dtype_to_json(self.dtype)]).encode()
        return np.frombuffer(text, np.uint8).copy()

    @classmethod
    def from_bytes(cls, message: HostArray) -> Interface:
        """Read what :meth:`to_bytes` wrote."""
        row_shape, dtype = json.loads(bytes(message))
        return cls(tuple(row_shape), dtype_from_json(dtype))

    def __str__(self) -> str:
        return f"rows of shape {self.row_shape} and dtype {self.dtype}"


def check_output(y: Array, *, stage: int, rows: slice, interface: Interface | None) -> Interface:
    """Hold the output of a stage to its interface; return the interface.

    Args:
        y: The output.
        stage: The stage that made it.
        rows: The microbatch that it is of.
        interface: What the next stage expects; None if it does not know yet.

    Raises:
        ShapeError: If `y` has other rows, or another shape or dtype than expected.
    """
    shape, count = tuple(y.shape), rows.stop - rows.start
    if not shape or shape[0] != count:
        raise ShapeError(
            f"stage {stage} made an output of shape {shape} from an input of {count} rows: a stage "
            "gives one row for each that it gets"
        )
    got = Interface(shape[1:], np.dtype(y.dtype))
    if interface is not None and interface != got:
        raise ShapeError(
            f"stage {stage} made {got} for stage {stage + 1}, which expects {interface} as before"
        )
    return got


def check_gradient(dx: Array | None, *, stage: int, rows: slice, interface: Interface) -> None:
    """Hold the gradient that a stage gives back to the interface of the stage before it.

    Raises:
        ModuleStateError: If there is none.
        ShapeError: If it has another shape or dtype than that stage's output.
    """
    if dx is None:
        raise ModuleStateError(
            f"stage {stage} gives no gradient for its input, so stage {stage - 1} before it would "
            "never be trained: put the layer that gives none into the first stage"
        )
    expected = (rows.stop - rows.start, *interface.row_shape)
    if tuple(dx.shape) != expected or dx.dtype != interface.dtype:
        raise ShapeError(
            f"stage {stage} made a gradient of shape {tuple(dx.shape)} and dtype {dx.dtype} for "
            f"stage {stage - 1}, whose output had shape {expected} and dtype {interface.dtype}"
        )
