"""Products of arrays summed over common axes: all of them are one rule, said by letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpimesh.errors import ShapeError, on_all_ranks
from mpimesh.layout.rules.elementwise import broadcast_shape
from mpimesh.layout.rules.pattern import KEEP, Linear, Pattern

__all__ = ["Contraction", "contraction", "einsum_pattern", "matmul_pattern"]

Shape = tuple[int, ...]


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
