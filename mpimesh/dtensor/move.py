"""Carry a redistribution plan out on one rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.errors import DTypeError
from mpimesh.layout import Box, Layout, Phase, RedistributionPlan, plan_redistribution
from mpimesh.layout import Take as Wanted
from mpimesh.mesh import Mesh
from mpimesh.transport import Communicator, Request, Steps
from mpimesh.transport.boxes import volume
from mpimesh.transport.regions import Give, Part, Regions, Take

__all__ = ["Move", "identity_of", "prepared_move"]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What one rank has to do for a plan.

    Attributes:
        plan: The plan.
        rank: The rank.
        stages: For each exchange what it takes and gives, and the shape of what it takes into; a
            rank that takes nothing has no shape.
        kept: Where what this rank contributes lies in its last block; None for all of it.
        moves: Whether any rank gets anything from another.
        sent_bytes: What others get from this rank.
        received: What this rank gets: the place of a rank, bytes and messages, one after the other.
    """

    plan: RedistributionPlan
    rank: int
    stages: tuple[tuple[Regions, tuple[int, ...] | None], ...]
    moves: bool
    sent_bytes: int
    received: tuple[int, ...]

    @property
    def block_shape(self) -> tuple[int, ...] | None:
        """The shape of the block in the end; None if this rank is to have none."""
        return self.stages[-1][1]

    def alone(
        self,
        block: HostArray | None,
        dtype: DType,
        empty: Callable[[Sequence[int], DType], HostArray],
    ) -> HostArray | None:
        """Do what needs no other rank: only if nothing moves."""
        held = block
        for number, (regions, shape) in enumerate(self.stages):
            target = self._target(number, shape, dtype, empty)
            for take in regions.takes:
                if target is not None and held is not None:
                    target[take.box] = held[take.parts[0].box]
            held = self._reduced(number, target)
        return held

    def begin(
        self,
        side: Communicator,
        block: HostArray | None,
        dtype: DType,
        empty: Callable[[Sequence[int], DType], HostArray],
        max_bytes: int,
    ) -> tuple[Callable[[], Request | Steps], Callable[[], HostArray | None]]:
        """Return what starts it, and what gives this rank's new block when it is done.

        Args:
            side: The ranks, numbered as in the regions.
            block: This rank's block, C-contiguous; None if it has none.
            dtype: The dtype of all blocks.
            empty: Gives memory that the ranks of the node can reach.
            max_bytes: Most packed bytes at a time; 0 for no limit.
        """
        if len(self.stages) == 1 and not self.plan.fill and self.plan.divisor == 1:
            # Most moves are one exchange and nothing else.
            regions, shape = self.stages[0]
            target = None if shape is None else empty(shape, dtype)
            only = partial(side.exchange_regions, block, target, regions, max_bytes=max_bytes)
            return only, lambda: target
        targets = [
            self._target(number, shape, dtype, empty)
            for number, (_, shape) in enumerate(self.stages)
        ]

        def exchange(number: int) -> Request | Steps:
            held = block if number == 0 else self._reduced(number - 1, targets[number - 1])
            regions, _ = self.stages[number]
            return side.exchange_regions(held, targets[number], regions, max_bytes=max_bytes)

        def steps() -> Steps:
            for number in range(len(targets)):
                started = exchange(number)
                if isinstance(started, Generator):
                    yield from started
                else:
                    yield started

        last = len(targets) - 1
        start = partial(exchange, 0) if last == 0 else steps
        return start, lambda: self._reduced(last, targets[last])

    def _target(
        self,
        number: int,
        shape: tuple[int, ...] | None,
        dtype: DType,
        empty: Callable[[Sequence[int], DType], HostArray],
    ) -> HostArray | None:
        """Return what an exchange is to write into."""
        if shape is None:
            return None
        target = empty(shape, dtype)
        if self.plan.fill and number + 1 == len(self.stages):
            target[...] = identity_of(self.plan.fill, dtype)
        return target

    def _reduced(self, number: int, target: HostArray | None) -> HostArray | None:
        """Make the mean of what an exchange has summed."""
        if number == 0 and self.plan.divisor > 1 and target is not None:
            np.divide(target, self.plan.divisor, out=target, casting="unsafe")
        return target


def identity_of(op: str, dtype: DType) -> object:
    """Return the value that changes nothing in a reduction by ``sum``, ``prod``, ``min``, ``max``.

    Raises:
        DTypeError: If the dtype has none.
    """
    kind = np.dtype(dtype)
    if (op in ("sum", "prod") and kind.kind in "iufc") or kind.kind == "V":
        return kind.type(op == "prod")
    if kind.kind == "b":
        return op == "min"  # "and"
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return limits.max if op == "min" else limits.min
    if kind.kind == "f":
        return np.inf if op == "min" else -np.inf
    raise DTypeError(f"arrays of {kind} cannot wait for {op!r}: there is no value without effect")


@lru_cache(maxsize=256)
def prepared_move(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    rank: int,
    numbering: Mesh | None,
    nodes: tuple[int, ...],
) -> Move:
    """Return what `rank` has to do; the same object for the same question.

    Args:
        source: The layout that the array has.
        target: The layout that it is to have.
        shape: Its global shape.
        itemsize: Bytes of an element.
        rank: This rank.
        numbering: The mesh whose offsets are the communicator's ranks; None if the ranks are.
        nodes: The node of each rank.
    """
    plan = plan_redistribution(source, target, shape, itemsize, nodes=nodes)
    number_of = (lambda who: who) if numbering is None else numbering.offset_of
    stages = []
    for phase in plan.phases:
        into = phase.target.box(rank) if phase.target.holds(rank) else None
        if phase is plan.phases[-1]:
            into = plan.block(rank)
        mine = phase.source.box(rank) if phase.source.holds(rank) else ()
        takes = (
            []
            if into is None
            else [_take(phase, take, into, number_of) for take in phase.takes(rank)]
        )
        gives = [Give(number_of(who), _inside(box, mine)) for who, box in phase.gives(rank)]
        shape_of = None if into is None else _extent(into)
        stages.append((Regions(tuple(takes), tuple(gives)), shape_of))
    moves = bool(plan.traffic()[1].any())
    exchanges = [regions for regions, _ in stages]
    sent = itemsize * sum(volume(give.box) for regions in exchanges for give in regions.gives)
    place = number_of(rank) if numbering is None or numbering.contains_rank(rank) else -1
    received = _received(exchanges, itemsize, place)
    return Move(plan, rank, tuple(stages), moves, sent, received)


def _received(stages: Iterable[Regions], itemsize: int, place: int) -> tuple[int, ...]:
    """Return from which places, but this one, how many bytes come, in how many messages."""
    rows: list[int] = []
    for take in chain.from_iterable(regions.takes for regions in stages):
        nbytes = itemsize * volume(take.box)
        for part in take.parts:
            if part.rank != place:
                rows += part.rank, nbytes, 1
    return tuple(rows)


def _take(phase: Phase, take: Wanted, into: Box, number_of: Callable[[int], int]) -> Take:
    parts = []
    for who in take.ranks:
        tile = phase.source.box(who)
        parts.append(Part(number_of(who), _extent(tile), _inside(take.box, tile)))
    return Take(_inside(take.box, into), tuple(parts), phase.op if len(parts) > 1 else "")


def _inside(box: Box, block: Box) -> tuple[slice, ...]:
    """Return where `box` lies in `block`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, block, strict=True)
    )


def _extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
