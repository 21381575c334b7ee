"""Rules of operations on split arrays, and the placements that move the fewest bytes.

An operation is a *pattern*: letters that say which axes of its operands and of its result go
together. As in ``einsum("ik,kj->ij")``, axes of one letter are of one length and run together. A
mesh dim may split any letter: the operands that have it are split along that axis, the others are
whole along the dim. If the result has the letter, it is split there; if not, the result waits for a
reduction over the dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf, prod
from typing import TypeAlias

import numpy as np

from mpimesh.arguments import as_reduce_op
from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout.layout import Layout
from mpimesh.layout.placement import Partial, Placement, PlacementSpec, Replicate, Shard
from mpimesh.layout.redistribution import plan_redistribution
from mpimesh.mesh import Mesh

__all__ = [
    "KEEP",
    "Contraction",
    "Linearity",
    "OpRule",
    "Operand",
    "Pattern",
    "broadcast_axes",
    "broadcast_shape",
    "cheapest",
    "contraction",
    "einsum_pattern",
    "elementwise_pattern",
    "matmul_pattern",
    "reduced_shape",
    "reduction_pattern",
    "rule_for",
]


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that an operation is to work on, without its values.

    Attributes:
        shape: Its global shape.
        placement: Its placement on the mesh that all operands share.
        itemsize: Bytes of an element.
    """

    shape: tuple[int, ...]
    placement: Placement
    itemsize: int = 8

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class OpRule:
    """One way to do an operation block by block.

    With the operands placed as `inputs`, every rank calls the function on its own blocks, and what
    comes out are the blocks of a result that is placed as `output`.

    Attributes:
        inputs: One placement for each operand.
        output: The placement of the result.
    """

    inputs: tuple[Placement, ...]
    output: Placement


def cheapest(mesh: Mesh, operands: Sequence[Operand], rules: Iterable[OpRule]) -> OpRule:
    """Return the rule for which the fewest bytes move to bring the operands where it wants them.

    The first one of equals, so all ranks choose alike.

    Raises:
        LayoutError: If there are no rules.
    """
    best, least = None, -1
    for rule in rules:
        moved = sum(
            _moved(mesh, operand, placement)
            for operand, placement in zip(operands, rule.inputs, strict=True)
        )
        if best is None or moved < least:
            best, least = rule, moved
        if moved == 0:
            break
    if best is None:
        raise LayoutError(f"no way is known to do this with operands {list(operands)}")
    return best


@lru_cache(maxsize=8192)
def _moved(mesh: Mesh, operand: Operand, placement: Placement) -> int:
    if placement == operand.placement:
        return 0
    before, after = Layout(mesh, operand.placement), Layout(mesh, placement)
    return plan_redistribution(before, after, operand.shape, operand.itemsize).total_bytes


Shape: TypeAlias = tuple[int, ...]

KEEP = -1
"""In place of a letter: this axis is never split, such as one of length 1 that is broadcast."""


@dataclass(frozen=True, slots=True)
class Linearity:
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
    linear: tuple[Linearity, ...] = ()
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
        letters = dict.fromkeys(letter for row in rows for letter in row)
        return tuple(letter for letter in letters if letter != KEEP and letter not in twice)

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
        raise ShapeError.everywhere(
            f"{what} of shapes {', '.join(map(str, shapes))} do not broadcast: counted from "
            "the last, axes must be of one length, or of length 1"
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
    shapes: Sequence[Shape], whole: Shape, linear: tuple[Linearity, ...] = ()
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
    stays = [
        KEEP if axis in axes else axis for axis in range(len(shape)) if keepdims or axis not in axes
    ]
    ops = {"sum": ("sum", "mean"), "": ()}.get(op, (op,))
    stay = (Linearity((0,), ops),) if linear and ops else ()
    return Pattern(tuple(inputs), (*[KEEP] * front, *stays), op, stay)


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
                raise ShapeError.everywhere(
                    f"{what} of shapes {', '.join(map(str, shapes))}: axes that run together "
                    f"have lengths {before} and {length}"
                )
    inputs = tuple(
        tuple(
            letter if length == lengths[letter] else KEEP
            for length, letter in zip(shape, row, strict=True)
        )
        for shape, row in zip(shapes, rows, strict=True)
    )
    stay = tuple(Linearity((number,)) for number in range(len(shapes))) if linear else ()
    pattern = Pattern(inputs, tuple(output), op, stay, counts_output=True)
    return Contraction(pattern, tuple(lengths[letter] for letter in output))


@lru_cache(maxsize=4096)
def matmul_pattern(a: Shape, b: Shape, *, op: str = "sum", linear: bool = True) -> Contraction:
    """Return the matrix product of arrays of two shapes, as :func:`numpy.matmul` has it.

    Example:
        >>> matmul_pattern((5, 2, 3), (3, 4)).shape
        (5, 2, 4)

    Raises:
        ShapeError: If they do not fit, or one has no axes.
    """
    if not a or not b:
        raise ShapeError.everywhere(
            f"a matrix product needs arrays with axes, got shapes {a} and {b}; use *"
        )
    inner = b[-2] if len(b) > 1 else b[-1]
    if a[-1] != inner:
        raise ShapeError.everywhere(
            f"a matrix product of shapes {a} and {b} needs axes of one length: the last of the "
            f"first has {a[-1]}, and axis {max(len(b) - 2, 0)} of the second {inner}"
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
    inputs_text, arrow, result = text.partition("->")
    terms = inputs_text.split(",")
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
    for shape, row in zip(shapes, rows, strict=True):
        if len(set(zip(row, shape, strict=True))) > len(set(row)):
            raise _wrong(subscripts, f"a letter stands twice at axes of other lengths of {shape}")
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
    return ShapeError.everywhere(f"einsum cannot do {subscripts!r}: {why}")


_MOST_TRIED = 150
"""Up to so many ways all are compared; of more, one dim after the other is bettered."""

_ROUNDS = 4
"""Number of times that every dim is looked at again."""


_Choice: TypeAlias = tuple[PlacementSpec, ...]
"""The choice of one mesh dim: a spec for each operand, and at last for the result."""

_Price = tuple[float, int]


@lru_cache(maxsize=4096)
def rule_for(
    mesh: Mesh,
    operands: tuple[Operand, ...],
    pattern: Pattern,
    shape: tuple[int, ...],
    itemsize: int,
    goal: Placement | None = None,
) -> OpRule:
    """Return the way to do an operation for which the fewest bytes move.

    Of equals the one that leaves most operands as they are, then the first, so that all ranks
    choose alike.

    Args:
        mesh: The mesh of all operands.
        operands: What is known of them.
        pattern: The operation.
        shape: The result's global shape.
        itemsize: Bytes of an element of the result.
        goal: Where the result is wanted, if that is known: to bring it there counts, too.

    Cost:
        Some planning once; the answer is cached.
    """
    choices, count = [_choices(d, operands, pattern, goal) for d in range(mesh.ndim)], len(operands)

    def price(picked: Sequence[_Choice]) -> _Price | None:
        return _price(mesh, operands, pattern, shape, itemsize, goal, _picked_rule(picked, count))

    if prod(map(len, choices)) <= _MOST_TRIED:
        best = _best(product(*choices), price)
    else:
        starts = [[row[0] for row in choices]]
        starts += [_kept(number, one, choices) for number, one in enumerate(operands)]
        best = _best([_bettered(start, choices, price) for start in starts], price)
    return _picked_rule(best, count)


def _best(
    ways: Iterable[Sequence[_Choice]], price: Callable[[Sequence[_Choice]], _Price | None]
) -> Sequence[_Choice]:
    """Return the first of the cheapest. There is one: whole operands on all ranks always fit."""
    best: Sequence[_Choice] = ()
    least: _Price = (inf, 0)
    for way in ways:
        cost = price(way)
        if cost is not None and cost < least:
            best, least = way, cost
            if not any(cost):
                break
    return best


def _kept(number: int, operand: Operand, choices: Sequence[Sequence[_Choice]]) -> list[_Choice]:
    """Return what leaves one operand where it is, on all dims that can."""
    return [
        next((one for one in row if one[number] == spec), row[0])
        for row, spec in zip(choices, operand.placement, strict=True)
    ]


def _bettered(
    best: list[_Choice],
    choices: Sequence[Sequence[_Choice]],
    price: Callable[[Sequence[_Choice]], _Price | None],
) -> list[_Choice]:
    """Better one dim after the other, until none can be."""
    for _ in range(_ROUNDS):
        before = best
        for dim, row in enumerate(choices):
            ways = [[*best[:dim], one, *best[dim + 1 :]] for one in row]
            best = list(_best([best, *ways], price)) or best
        if best == before:
            break
    return best


def _choices(
    dim: int, operands: Sequence[Operand], pattern: Pattern, goal: Placement | None
) -> list[_Choice]:
    """Return what one mesh dim could do; first that all is whole."""
    specs = [operand.placement[dim] for operand in operands]
    choices: list[_Choice] = [(Replicate(),) * (len(operands) + 1)]
    choices += _summand_choices(specs, pattern)
    ends = [] if goal is None else [goal[dim]]
    for letter in _letters_in_use(operands, pattern, goal):
        for sizes in _sizes(letter, [*specs, *ends], [*pattern.inputs, pattern.output]):
            inputs = tuple(
                Shard(row.index(letter), sizes=sizes) if letter in row else Replicate()
                for row in pattern.inputs
            )
            output = (
                Shard(pattern.output.index(letter), sizes=sizes)
                if letter in pattern.output
                else Partial(as_reduce_op(pattern.op))
            )
            choices.append((*inputs, output))
    return choices


def _summand_choices(specs: Sequence[PlacementSpec], pattern: Pattern) -> Iterator[_Choice]:
    """Yield the ways in which summands stay summands. What is split is not made one."""
    for linear in pattern.linear:
        group = [specs[number] for number in linear.operands]
        ops = dict.fromkeys(spec.op for spec in group if isinstance(spec, Partial))
        others = [spec for number, spec in enumerate(specs) if number not in linear.operands]
        if any(isinstance(spec, Shard) for spec in group):
            continue
        if not pattern.counts_output and not all(isinstance(spec, Replicate) for spec in others):
            continue  # as many bytes would move as to sum them up
        for op in ops:
            if op in linear.ops:
                summand = Partial(as_reduce_op(op))
                inputs = [
                    summand if number in linear.operands else Replicate()
                    for number in range(len(specs))
                ]
                yield (*inputs, summand)


def _letters_in_use(
    operands: Sequence[Operand], pattern: Pattern, goal: Placement | None
) -> tuple[int, ...]:
    """Return the letters to try.

    Where nothing is reduced, no other one can be better than those that are split already.
    """
    specs = [spec for operand in operands for spec in operand.placement]
    if not pattern.is_elementwise or any(isinstance(spec, Partial) for spec in specs):
        return pattern.letters
    placements = [operand.placement for operand in operands] + ([goal] if goal else [])
    used = {
        row[spec.axis]
        for placement, row in zip(placements, [*pattern.inputs, pattern.output], strict=False)
        for spec in placement
        if isinstance(spec, Shard)
    }
    return tuple(letter for letter in pattern.letters if letter in used)


def _sizes(
    letter: int, specs: Sequence[PlacementSpec], rows: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...] | None]:
    """Return the sizes of parts to try: those that operands have, and even ones."""
    letters = dict.fromkeys(
        spec.sizes
        for spec, row in zip(specs, rows, strict=False)
        if isinstance(spec, Shard) and row[spec.axis] == letter
    )
    return list({**letters, None: None})


def _picked_rule(picked: Sequence[_Choice], count: int) -> OpRule:
    """Return the rule for `count` operands by the choices of all dims."""
    *inputs, output = (Placement([one[number] for one in picked]) for number in range(count + 1))
    return OpRule(tuple(inputs), output)


def _price(
    mesh: Mesh,
    operands: Sequence[Operand],
    pattern: Pattern,
    shape: tuple[int, ...],
    itemsize: int,
    goal: Placement | None,
    rule: OpRule,
) -> _Price | None:
    """Return (bytes that move, operands that are brought elsewhere); None if it does not fit."""
    changed, moved = 0, 0
    try:
        Layout(mesh, rule.output).tiling(shape)
        for operand, placement in zip(operands, rule.inputs, strict=True):
            changed += operand.placement != placement
            moved += _moved(mesh, operand, placement)
        if goal is not None:
            moved += _moved(mesh, Operand(shape, rule.output, itemsize), goal)
        elif pattern.counts_output:
            parts = prod(
                dim.size
                for dim, spec in zip(mesh.dims, rule.output, strict=True)
                if isinstance(spec, Partial)
            )
            moved += (parts - 1) * prod(shape) * itemsize
    except LayoutError:
        return None  # several reductions, or sizes that fit only behind another split
    return moved, changed
