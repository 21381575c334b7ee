"""Reductions of some axes: the others keep their letters, and those go."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mpimesh.layout.rules.elementwise import broadcast_axes
from mpimesh.layout.rules.pattern import KEEP, Linear, Pattern

__all__ = ["reduced_shape", "reduction_pattern"]

Shape = tuple[int, ...]


def reduction_pattern(
    shape: Shape,
    axes: Collection[int],
    op: str,
    *,
    keepdims: bool = False,
    others: Sequence[Shape] = (),
    front: int = 0,
    linear: bool = True,
) -> Pattern:
    """Return the pattern of a reduction over `axes`.

    Args:
        shape: The operand's shape.
        axes: The axes that go, counted from 0.
        op: How the parts of a split axis go together, a reduction of :data:`PARTIAL_OPS`; empty
            if the axes must be whole.
        keepdims: Whether they stay, with length 1.
        others: The shapes of further operands, which broadcast to `shape`, such as a mask.
        front: How many new axes the result has before all others.
        linear: Whether a `Partial` operand of that `op` stays one.

    Example:
        >>> reduction_pattern((2, 3, 4), {1}, "sum").output
        (0, 2)
    """
    inputs = [tuple(range(len(shape)))] + [
        tuple(
            KEEP if length == 1 else letter  # whole, also where the array's axis is 1 and split
            for length, letter in zip(other, broadcast_axes(other, shape), strict=True)
        )
        for other in others
    ]
    kept = [
        KEEP if axis in axes else axis for axis in range(len(shape)) if keepdims or axis not in axes
    ]
    ops = {"sum": ("sum", "mean"), "": ()}.get(op, (op,))
    stay = (Linear((0,), ops),) if linear and ops else ()
    return Pattern(tuple(inputs), (*[KEEP] * front, *kept), op, stay)


def reduced_shape(shape: Shape, axes: Collection[int], *, keepdims: bool = False) -> Shape:
    """Return the shape of the result.

    Example:
        >>> reduced_shape((2, 3, 4), {1}, keepdims=True)
        (2, 1, 4)
    """
    return tuple(
        1 if axis in axes else length
        for axis, length in enumerate(shape)
        if keepdims or axis not in axes
    )
