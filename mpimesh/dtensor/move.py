"""Carry a redistribution plan out on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.errors import DTypeError
from mpimesh.layout import (
    ASSUMED_LINKS,
    Box,
    Exchange,
    Layout,
    Links,
    RedistributionPlan,
    plan_redistribution,
)
from mpimesh.layout import Take as Wanted
from mpimesh.mesh import Mesh
from mpimesh.transport import Communicator, Request, Steps, run_steps
from mpimesh.transport.boxes import volume
from mpimesh.transport.regions import Give, Part, Regions, Take

__all__ = ["Move", "Stage", "identity_of", "prepared_move"]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One exchange as a rank sees it.

    Attributes:
        regions: What it takes and gives.
        shape: The shape of what it takes into; None if it has no such array.
        in_place: Whether it takes into the array that it gives of.
    """

    regions: Regions
    shape: tuple[int, ...] | None
    in_place: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """One rank's work for a plan.

    Attributes:
        plan: The plan.
        rank: The rank.
        stages: Its exchanges, one after the other.
        moves: Whether any rank gets anything from another.
        sent_bytes: What others get from this rank.
        received: What this rank gets: the place of a rank, bytes and messages, one after the other.
    """

    plan: RedistributionPlan
    rank: int
    stages: tuple[Stage, ...]
    moves: bool
    sent_bytes: int
    received: tuple[int, ...]

    @property
    def block_shape(self) -> tuple[int, ...] | None:
        """The shape of the block in the end; None if this rank is to have none."""
        return self.stages[-1].shape

    def alone(
        self,
        block: HostArray | None,
        dtype: DType,
        empty: Callable[[Sequence[int], DType], HostArray],
    ) -> HostArray | None:
        """Do what needs no other rank: only if nothing moves."""
        held = block
        for number, stage in enumerate(self.stages):
            target = self._target(number, held, dtype, empty)
            for take in stage.regions.takes:
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
        last = len(self.stages) - 1
        held = block

        def exchange(number: int) -> Request | Steps:
            """Start one; what it takes into is `held` from then on, and the next one's source."""
            nonlocal held
            source, held = held, self._target(number, held, dtype, empty)
            regions = self.stages[number].regions
            return side.exchange_regions(source, held, regions, max_bytes=max_bytes)

        def steps() -> Steps:
            for number in range(last + 1):
                yield from run_steps(partial(exchange, number))
                self._reduced(number, held)

        if last:
            return steps, lambda: held
        return partial(exchange, 0), lambda: self._reduced(0, held)

    def _target(
        self,
        number: int,
        held: HostArray | None,
        dtype: DType,
        empty: Callable[[Sequence[int], DType], HostArray],
    ) -> HostArray | None:
        """Return what an exchange is to write into."""
        stage = self.stages[number]
        if stage.shape is None:
            return None
        if stage.in_place:
            return held
        target = empty(stage.shape, dtype)
        if self.plan.fill and number == self.plan.into_block:
            target[...] = identity_of(self.plan.fill, dtype)
        return target

    def _reduced(self, number: int, target: HostArray | None) -> HostArray | None:
        """Make the mean of what an exchange has summed."""
        divides = self.plan.divisor > 1 and number == self.plan.last_reduction
        if divides and target is not None:
            takes = self.stages[number].regions.takes
            # What a block is filled with is no sum, and must go on changing nothing.
            for box in [take.box for take in takes] if self.plan.fill else [...]:
                sums = target[box] if target.ndim else target
                np.divide(sums, self.plan.divisor, out=sums, casting="unsafe")
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
    links: Links = ASSUMED_LINKS,
    collectives: bool = False,
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
        links: How fast bytes get from rank to rank.
        collectives: Whether a collective of a group may do it.
    """
    plan = plan_redistribution(
        source, target, shape, itemsize, nodes=nodes, links=links, collectives=collectives
    )
    number_of = (lambda who: who) if numbering is None else numbering.offset_of
    stages = []
    block = plan.block(rank)
    for number, phase in enumerate(plan.phases):
        into = phase.target.box(rank) if phase.target.holds(rank) else None
        mine = phase.source.box(rank) if phase.source.holds(rank) else ()
        if number >= plan.into_block:
            into = block
        if phase.in_place and block is not None:
            mine = block
        takes = (
            []
            if into is None
            else [_take(plan, phase, take, into, number_of) for take in phase.takes(rank)]
        )
        gives = [Give(number_of(who), _inside(box, mine)) for who, box in phase.gives(rank)]
        shape_of = None if into is None else _extent(into)
        stages.append(Stage(Regions(tuple(takes), tuple(gives)), shape_of, phase.in_place))
    moves = plan.total_messages > 0
    exchanges = [stage.regions for stage in stages]
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


def _take(
    plan: RedistributionPlan,
    phase: Exchange,
    take: Wanted,
    into: Box,
    number_of: Callable[[int], int],
) -> Take:
    parts = []
    for who in take.ranks:
        held = plan.block(who) if phase.in_place else None
        tile = phase.source.box(who) if held is None else held
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
