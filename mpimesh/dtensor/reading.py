"""Reads of the elements that a plan says, out of the blocks of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpimesh.arrays import HostArray
from mpimesh.comm import Request, Steps
from mpimesh.comm.regions import copy_own
from mpimesh.layout import Box, Regions
from mpimesh.layout.boxes import volume
from mpimesh.layout.reads import Reads
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.persistent import PersistentExchange
from mpimesh.runtime.traffic import Amount, Rule, sparse

__all__ = ["Reading"]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The elements that one rank takes and gives, prepared once and moved any number of times.

    Attributes:
        regions: What this rank takes and gives.
        moves: Whether any rank gets anything from another.
        sent: How many elements others get from this rank.
        received: The place of a rank, and how many elements come from there, for each that any do.
    """

    regions: Regions
    moves: bool
    sent: int
    received: tuple[tuple[int, int], ...]

    @classmethod
    def prepare(cls, rank: int, reads: Reads, block_of: Callable[[int], Box]) -> Reading:
        """Prepare what a rank has to do.

        Args:
            rank: The rank; nothing if it is not in the mesh.
            reads: Who reads what.
            block_of: Gives the box of the whole array that the array has in which a rank holds its
                block.
        """
        mesh = reads.tiling.mesh
        if not mesh.contains_rank(rank):
            return cls(Regions(), False, 0, ())
        regions = reads.regions(rank, block_of)
        received: dict[int, int] = {}
        for take in regions.takes:
            place = take.parts[0].rank
            if place != mesh.offset_of(rank):
                received[place] = received.get(place, 0) + volume(take.box)
        sent = sum(volume(give.box) for give in regions.gives)
        return cls(regions, reads.moves, sent, tuple(received.items()))

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
        begin: Callable[[], Request | Steps] = partial(self._alone, source, target)
        if self.moves and group.size > 1:
            side = group.communicator
            begin = partial(side.exchange_regions, source, target, self.regions)
        size = 0 if source is None else source.itemsize
        return group._core.compose(
            name,
            begin,
            rule=rule,
            nbytes=self.sent * size,
            finish=finish,
            lock=lock,
            receives=self._receives(size),
        )

    def planned(
        self,
        name: str,
        mesh: DeviceMesh,
        rule: str,
        source: HostArray | None,
        target: HostArray | None,
        lock: HostArray | None,
    ) -> PersistentExchange:
        """Plan it between the same arrays, to be started many times. Local.

        The result is `target`; the arguments are those of :meth:`start`.
        """
        group = mesh.everyone.alone() if source is None else mesh.group()
        size = 0 if source is None else source.itemsize

        def prepare() -> Callable[[], Request | Steps]:
            if not self.moves or group.size == 1:
                return partial(self._alone, source, target)
            return group.communicator.prepare("exchange_regions", (source, target, self.regions))

        return PersistentExchange(
            group._core,
            name,
            prepare,
            rule=rule,
            nbytes=self.sent * size,
            value=target,
            lock=lock,
            out=target,
            receives=self._receives(size),
        )

    def _alone(self, source: HostArray | None, target: HostArray | None) -> Steps:
        if source is not None and target is not None:
            copy_own(self.regions, source, target)
        yield from ()

    def _receives(self, size: int) -> tuple[Rule, Amount] | None:
        """Return how what comes is counted: all from one rank as one message."""
        received = tuple(
            [number for place, count in self.received for number in (place, count * size, 1)]
        )
        return (sparse, received) if received else None
