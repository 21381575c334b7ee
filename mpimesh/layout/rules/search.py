"""For an operation said by letters: what each mesh dim does, so that the fewest bytes move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf, prod

from mpimesh.errors import LayoutError
from mpimesh.layout.layout import Layout
from mpimesh.layout.placement import Placement
from mpimesh.layout.plan import plan_redistribution
from mpimesh.layout.rule import Operand, OpRule
from mpimesh.layout.rules.patterns import Pattern
from mpimesh.layout.spec import Partial, PlacementSpec, Replicate, Shard
from mpimesh.mesh import Mesh

__all__ = ["rule_for"]

_MOST_TRIED = 150
"""Up to so many ways all are compared; of more, one dim after the other is bettered."""

_ROUNDS = 4
"""Number of times that every dim is looked at again."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of one mesh dim: a spec for each operand and for the result."""

    inputs: tuple[PlacementSpec, ...]
    output: PlacementSpec


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
        Some planning once; the answer is kept.
    """
    choices = [_choices(dim, operands, pattern, goal) for dim in range(mesh.ndim)]

    def price(picked: Sequence[_Choice]) -> _Price | None:
        return _price(mesh, operands, pattern, shape, itemsize, goal, _rule(operands, picked))

    if prod(map(len, choices)) <= _MOST_TRIED:
        found = _best(product(*choices), price)
    else:
        starts = [[row[0] for row in choices]]
        starts += [_kept(number, one, choices) for number, one in enumerate(operands)]
        found = _best([_bettered(start, choices, price) for start in starts], price)
    return _rule(operands, found)


def _best(
    ways: Iterable[Sequence[_Choice]], price: Callable[[Sequence[_Choice]], _Price | None]
) -> Sequence[_Choice]:
    """Return the first of the cheapest. There is one: whole operands on all ranks always fit."""
    best: Sequence[_Choice] = ()
    least: _Price = (inf, 0)
    for way in ways:
        found = price(way)
        if found is not None and found < least:
            best, least = way, found
            if not any(found):
                break
    return best


def _kept(number: int, operand: Operand, choices: Sequence[Sequence[_Choice]]) -> list[_Choice]:
    """Return what leaves one operand where it is, on all dims that can."""
    return [
        next((one for one in row if one.inputs[number] == spec), row[0])
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
    whole = (Replicate(),) * len(operands)
    specs = [operand.placement[dim] for operand in operands]
    found = [_Choice(whole, Replicate())]
    found += _summand_choices(specs, pattern)
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
                else Partial(pattern.op)
            )
            found.append(_Choice(inputs, output))
    return found


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
                inputs = tuple(
                    Partial(op) if number in linear.operands else Replicate()
                    for number in range(len(specs))
                )
                yield _Choice(inputs, Partial(op))


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
    found = dict.fromkeys(
        spec.sizes
        for spec, row in zip(specs, rows, strict=False)
        if isinstance(spec, Shard) and row[spec.axis] == letter
    )
    return list({**found, None: None})


def _rule(operands: Sequence[Operand], picked: Sequence[_Choice]) -> OpRule:
    return OpRule(
        tuple(
            Placement([choice.inputs[number] for choice in picked])
            for number in range(len(operands))
        ),
        Placement([choice.output for choice in picked]),
    )


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


@lru_cache(maxsize=8192)
def _moved(mesh: Mesh, operand: Operand, placement: Placement) -> int:
    before, after = Layout(mesh, operand.placement), Layout(mesh, placement)
    if before == after:
        return 0
    return plan_redistribution(before, after, operand.shape, operand.itemsize).total_bytes
