"""Operations element by element, with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpimesh.errors import ShapeError, on_all_ranks
from mpimesh.layout.rules.pattern import KEEP, Linear, Pattern

__all__ = ["broadcast_axes", "broadcast_shape", "elementwise_pattern"]

Shape = tuple[int, ...]


def broadcast_shape(shapes: Sequence[Shape], what: str = "operands") -> Shape:
    """Return the shape that arrays of `shapes` have together.

    Raises:
        ShapeError: If they do not fit.
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise on_all_ranks(
            ShapeError(
                f"{what} of shapes {', '.join(map(str, shapes))} do not broadcast: counted from "
                "the last, axes must be of one length, or of length 1"
            )
        ) from None


def broadcast_axes(shape: Shape, whole: Shape) -> tuple[int, ...]:
    """Return the letters of an operand: for each axis the one of the result that it runs with.

    An axis of length 1 that is stretched has none.
    """
    first = len(whole) - len(shape)
    return tuple(
        KEEP if length != whole[first + axis] else first + axis for axis, length in enumerate(shape)
    )


def elementwise_pattern(
    shapes: Sequence[Shape], whole: Shape, linear: tuple[Linear, ...] = ()
) -> Pattern:
    """Return the pattern of an operation on operands of `shapes`, whose result is `whole`.

    Example:
        >>> elementwise_pattern([(3, 1), (4,)], (3, 4)).inputs
        ((0, -1), (1,))
    """
    inputs = tuple(broadcast_axes(shape, whole) for shape in shapes)
    return Pattern(inputs, tuple(range(len(whole))), linear=linear)
