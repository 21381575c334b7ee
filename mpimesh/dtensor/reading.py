"""Carry out on one rank what a plan says that it reads of the others' blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpimesh.arrays import HostArray
from mpimesh.layout import Box, Layout
from mpimesh.layout.reads import Reads
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.traffic import sparse
from mpimesh.transport import Request, Steps
from mpimesh.transport.regions import Give, Part, Regions, Take

__all__ = ["Reading", "slices"]


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple(slice(start, stop) for start, stop in box)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The elements that one rank takes and gives, prepared once and moved any number of times.

    Attributes:
        regions: What this rank takes and gives.
        moves: Whether any rank gets anything from another.
        given: How many elements others get from this rank.
        taken: The place of a rank, and how many elements come from there, for each that any do.
    """

    regions: Regions
    moves: bool
    given: int
    taken: tuple[tuple[int, int], ...]

    @classmethod
    def prepare(
        cls,
        rank: int,
        layout: Layout,
        reads: Reads,
        shape_of: Callable[[int], tuple[int, ...]],
        place_of: Callable[[int], tuple[int, ...]],
    ) -> Reading:
        """Prepare what a rank has to do.

        Args:
            rank: The rank; nothing if it is not in the mesh.
            layout: How the array lies.
            reads: Who reads what.
            shape_of: Gives the shape of the array in which a rank holds its block.
            place_of: Gives the element of the whole array that this array would begin with.
        """
        if not layout.mesh.contains_rank(rank):
            return cls(Regions(), False, 0, ())

        def within(box: Box, owner: int) -> tuple[slice, ...]:
            return slices(
                tuple(
                    (start - first, stop - first)
                    for (start, stop), first in zip(box, place_of(owner), strict=True)
                )
            )

        number_of = layout.mesh.offset_of
        takes = [
            Take(
                slices(read.into),
                (Part(number_of(read.rank), shape_of(read.rank), within(read.box, read.rank)),),
            )
            for read in reads.takes(rank)
        ]
        gives = [Give(number_of(who), within(box, rank)) for who, box in reads.gives(rank)]
        given = sum(_volume(give.box) for give in gives)
        taken: dict[int, int] = {}
        for take in takes:
            place = take.parts[0].rank
            if place != number_of(rank):
                taken[place] = taken.get(place, 0) + _volume(take.box)
        regions = Regions(tuple(takes), tuple(gives))
        return cls(regions, reads.moves, given, tuple(taken.items()))

    def start(
        self,
        name: str,
        mesh: DeviceMesh,
        rule: str,
        source: HostArray | None,
        target: HostArray | None,
        finish: Callable[[], Any],
        lock: HostArray | None,
    ) -> CollectiveTensor:
        """Start it. Collective over the mesh; a rank that is not in it takes no part.

        Args:
            name: What it is called in messages and counts.
            mesh: The live mesh.
            rule: What must agree over ranks.
            source: What others read of; C-contiguous; None on a rank that is not in the mesh.
            target: What is read into; it may be `source`, for nobody reads what is read into.
            finish: Makes the result.
            lock: The caller's array, which must not change meanwhile.
        """
        group = mesh.everyone.alone() if source is None else mesh.group()

        def alone() -> Steps:
            if source is not None and target is not None:
                for take in self.regions.takes:
                    target[take.box] = source[take.parts[0].box]
            yield from ()

        begin: Callable[[], Request | Steps] = alone
        if self.moves and group.size > 1:
            side = group.communicator
            begin = partial(side.exchange_regions, source, target, self.regions)
        size = 0 if source is None else source.itemsize
        # All that comes from a rank counts as one message.
        received = tuple(
            [number for place, count in self.taken for number in (place, count * size, 1)]
        )
        return group.compose(
            name,
            begin,
            rule=rule,
            nbytes=self.given * size,
            finish=finish,
            lock=lock,
            receives=(sparse, received) if received else None,
        )


def _volume(box: tuple[slice, ...]) -> int:
    size = 1
    for part in box:
        size *= part.stop - part.start
    return size
