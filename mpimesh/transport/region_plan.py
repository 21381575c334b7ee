"""Messages that carry regions from rank to rank: worked out once for an exchange."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from mpimesh.transport.boxes import Box, extent, flat_fragments, run_start, volume
from mpimesh.transport.regions import Regions

__all__ = ["MovePlan", "Pair", "move_plan"]


@dataclass(frozen=True, slots=True)
class Pair:
    """The boxes that one rank sends to another, as one of the two sees them.

    Attributes:
        rank: The other.
        boxes: The boxes on this side, in their order; none is empty.
        items: The take and the part that each is; only where they are received.
        ends: How many elements have gone after each.
        run: Where they begin in the block, if they are one run there; -1 if not.
    """

    rank: int
    boxes: tuple[Box, ...]
    items: tuple[tuple[int, int], ...]
    ends: tuple[int, ...]
    run: int

    @property
    def size(self) -> int:
        """Number of their elements."""
        return self.ends[-1]

    def fragments(self, start: int, stop: int) -> list[tuple[int, int, Box]]:
        """Return what elements `start` to `stop` are: number of the box, their own, part of it."""
        found = []
        for number, (box, end) in enumerate(zip(self.boxes, self.ends, strict=True)):
            begin = end - volume(box)
            first, last = max(start, begin), min(stop, end)
            if first < last:
                at = first
                for part in flat_fragments(extent(box), first - begin, last - begin):
                    found.append((number, at - start, part))
                    at += volume(part)
        return found


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The sends and receives of one rank.

    Attributes:
        sends: What goes to other ranks, step by step.
        receives: What comes from others, step by step.
        near: Takes of which no part is received.
        mixed: Takes of several parts, of which some are.
    """

    sends: tuple[Pair, ...]
    receives: tuple[Pair, ...]
    near: tuple[int, ...]
    mixed: tuple[int, ...]


def move_plan(
    regions: Regions,
    rank: int,
    size: int,
    near: frozenset[int],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> MovePlan:
    """Return who talks to whom.

    Args:
        regions: What this rank takes and gives.
        rank: This rank.
        size: How many there are.
        near: The ranks that read each other's memory, this one among them.
        shapes: Those of its source and its target.
    """
    gone: dict[int, list[Box]] = {}
    for give in regions.gives:
        if give.rank != rank and give.rank not in near and volume(give.box):
            gone.setdefault(give.rank, []).append(give.box)
    come: dict[int, list[tuple[int, int]]] = {}
    home: list[int] = []
    mixed: list[int] = []
    for number, take in enumerate(regions.takes):
        if not volume(take.box):
            continue
        far = [place for place, part in enumerate(take.parts) if part.rank not in near]
        for place in far:
            come.setdefault(take.parts[place].rank, []).append((number, place))
        if not far:
            home.append(number)
        elif take.reduces:
            mixed.append(number)
    sends = []
    receives = []
    for step in range(1, size):
        after, before = (rank + step) % size, (rank - step) % size
        if after in gone:
            boxes = gone[after]
            run = run_start(boxes[0], shapes[0]) if len(boxes) == 1 else -1
            sends.append(_pair(after, boxes, (), run))
        if before in come:
            items = come[before]
            boxes = [regions.takes[number].box for number, _ in items]
            alone = len(items) == 1 and not regions.takes[items[0][0]].reduces
            run = run_start(boxes[0], shapes[1]) if alone else -1
            receives.append(_pair(before, boxes, tuple(items), run))
    return MovePlan(tuple(sends), tuple(receives), tuple(home), tuple(mixed))


def _pair(rank: int, boxes: list[Box], items: tuple[tuple[int, int], ...], run: int) -> Pair:
    return Pair(rank, tuple(boxes), items, tuple(accumulate(map(volume, boxes))), run)
