"""An operation, said by letters: which axes of its operands and of its result go together.

As in ``einsum("ik,kj->ij")``, axes of one letter are of one length and run together. A mesh dim
may split any letter: the operands that have it are split along that axis, those that do not have
it are whole along the dim. If the result has the letter, it is split there; if not, the result
waits for a reduction over the dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from mpimesh.errors import ShapeError, on_all_ranks

__all__ = [
    "KEEP",
    "Contraction",
    "Linear",
    "Pattern",
    "broadcast_axes",
    "broadcast_shape",
    "contraction",
    "einsum_pattern",
    "elementwise_pattern",
    "matmul_pattern",
    "reduced_shape",
    "reduction_pattern",
]

Shape: TypeAlias = tuple[int, ...]

KEEP = -1
"""In place of a letter: this axis is never split, such as one of length 1 that is broadcast."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Operands that may be summands, and the result then is.

    Attributes:
        operands: Their numbers. All of them are `Partial` together, and all others whole.
        ops: The reductions for which that is so.
    """

    operands: tuple[int, ...]
    ops: tuple[str, ...] = ("sum", "mean")


@dataclass(frozen=True, slots=True)
class Pattern:
    """An operation.

    Attributes:
        inputs: For each operand the letter of each of its axes, or :data:`KEEP`.
        output: The letter of each axis of the result, or :data:`KEEP`.
        op: The reduction over letters that the result lacks; empty if they must not be split.
        linear: Which operands may be `Partial`.
        counts_output: Whether the bytes count that a reduction of the result will move. Else a
            result that waits is free.
    """

    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    op: str = ""
    linear: tuple[Linear, ...] = ()
    counts_output: bool = False

    @property
    def letters(self) -> tuple[int, ...]:
        """The letters that may be split, those of the result first.

        One that stands twice in an operand, as in a diagonal, is none of them.
        """
        rows = (self.output, *self.inputs) if self.op else (self.output,)
        twice = {
            letter for row in (*self.inputs, self.output) for letter in row if row.count(letter) > 1
        }
        found = dict.fromkeys(letter for row in rows for letter in row)
        return tuple(letter for letter in found if letter != KEEP and letter not in twice)

    @property
    def is_elementwise(self) -> bool:
        """True if the result has all letters."""
        return all(letter in self.output for row in self.inputs for letter in row if letter != KEEP)


# -- element by element, with NumPy's broadcasting -----------------------------------------


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


# -- reductions of some axes: the others keep their letters, and those go ------------------


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


# -- products of arrays summed over common axes: all of them are one rule ------------------


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product of arrays.

    Attributes:
        pattern: Its letters.
        shape: The result's shape.
    """

    pattern: Pattern
    shape: Shape


def contraction(
    shapes: Sequence[Shape],
    rows: Sequence[Sequence[int]],
    output: Sequence[int],
    *,
    what: str,
    op: str = "sum",
    linear: bool = True,
) -> Contraction:
    """Return the contraction of operands whose axes have the letters `rows`.

    Axes of length 1 may run with longer ones.

    Raises:
        ShapeError: If the lengths of one letter disagree.
    """
    lengths: dict[int, int] = {}
    for shape, row in zip(shapes, rows, strict=True):
        for length, letter in zip(shape, row, strict=True):
            before = lengths.setdefault(letter, length)
            if before == 1:
                lengths[letter] = length
            elif length not in (1, before):
                raise on_all_ranks(
                    ShapeError(
                        f"{what} of shapes {', '.join(map(str, shapes))}: axes that run together "
                        f"have lengths {before} and {length}"
                    )
                )
    inputs = tuple(
        tuple(
            letter if length == lengths[letter] else KEEP
            for length, letter in zip(shape, row, strict=True)
        )
        for shape, row in zip(shapes, rows, strict=True)
    )
    stay = tuple(Linear((number,)) for number in range(len(shapes))) if linear else ()
    pattern = Pattern(inputs, tuple(output), op, stay, counts_output=True)
    return Contraction(pattern, tuple(lengths[letter] for letter in output))


def matmul_pattern(a: Shape, b: Shape, *, op: str = "sum", linear: bool = True) -> Contraction:
    """Return the matrix product of arrays of two shapes, as :func:`numpy.matmul` has it.

    Example:
        >>> matmul_pattern((5, 2, 3), (3, 4)).shape
        (5, 2, 4)

    Raises:
        ShapeError: If they do not fit, or one has no axes.
    """
    if not a or not b:
        raise on_all_ranks(
            ShapeError(f"a matrix product needs arrays with axes, got shapes {a} and {b}; use *")
        )
    inner = b[-2] if len(b) > 1 else b[-1]
    if a[-1] != inner:
        raise on_all_ranks(
            ShapeError(
                f"a matrix product of shapes {a} and {b} needs axes of one length: the last of the "
                f"first has {a[-1]}, and axis {max(len(b) - 2, 0)} of the second {inner}"
            )
        )
    batch = broadcast_shape([a[:-2], b[:-2]], "batches of a matrix product")
    row, column, between = len(batch), len(batch) + 1, len(batch) + 2
    rows = [
        [*range(len(batch) - len(a[:-2]), len(batch)), row, between] if len(a) > 1 else [between],
        [*range(len(batch) - len(b[:-2]), len(batch)), between, column] if b[1:] else [between],
    ]
    output = [*range(len(batch)), *[row] * (len(a) > 1), *[column] * (len(b) > 1)]
    return contraction([a, b], rows, output, what="a matrix product", op=op, linear=linear)


def einsum_pattern(
    subscripts: str, shapes: Sequence[Shape], *, op: str = "sum", linear: bool = True
) -> Contraction:
    """Return the contraction that `subscripts` say, as :func:`numpy.einsum` reads them.

    Raises:
        ShapeError: If they cannot be read, or do not fit the operands.
    """
    text = subscripts.replace(" ", "")
    given, arrow, result = text.partition("->")
    terms = given.split(",")
    if len(terms) != len(shapes):
        raise _wrong(subscripts, f"it has {len(terms)} operands, and got {len(shapes)}")
    for term in [*terms, result]:
        rest = term.replace("...", "", 1)
        if rest and not (rest.isascii() and rest.isalpha()):
            raise _wrong(subscripts, f"{term!r} is not made of letters and one ellipsis")
    parts = [_axes(term, len(shape), subscripts) for term, shape in zip(terms, shapes, strict=True)]
    most = max((count for _, count, _ in parts), default=0)
    rows = [
        [*map(ord, before), *range(most - count, most), *map(ord, after)]
        for before, count, after in parts
    ]
    if arrow:
        before, dots, after = result.partition("...")
        if most and not dots:
            raise _wrong(subscripts, "the ellipsis of the operands is missing in the result")
        output = [*map(ord, before), *(range(most) if dots else ()), *map(ord, after)]
    else:
        names = [letter for row in rows for letter in row if letter >= most]
        output = [*range(most), *sorted(one for one in set(names) if names.count(one) == 1)]
    known = {letter for row in rows for letter in row}
    if len(set(output)) < len(output) or not known.issuperset(output):
        raise _wrong(subscripts, "each letter of the result stands there once, and in an operand")
    return contraction(shapes, rows, output, what=f"einsum {subscripts!r}", op=op, linear=linear)


def _axes(term: str, ndim: int, subscripts: str) -> tuple[str, int, str]:
    """Return the letters before the ellipsis, how many axes it is, and the letters after it."""
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after)
    if count < 0 or (count > 0 and not dots):
        raise _wrong(subscripts, f"{term!r} is of an array of {ndim} axes")
    return before, count, after


def _wrong(subscripts: str, why: str) -> ShapeError:
    return on_all_ranks(ShapeError(f"einsum cannot do {subscripts!r}: {why}"))
