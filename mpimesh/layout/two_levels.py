"""An exchange over nodes in two: what is far comes to each node once, and is shared there.

First each rank takes what is near, and of what is far its stretch (see `node_needs`). Then it
takes from its mates the stretches that they have, out of their new blocks, where these already
lie at their place. So a rank receives what it would receive at once, from nearer by, and needs no
memory besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpimesh.layout.boxes import Box
from mpimesh.layout.node_needs import NodeNeeds, node_needs
from mpimesh.layout.phase import GiveTable, Need, NeedTable, Phase, boxes_of
from mpimesh.layout.places import places_of
from mpimesh.layout.tiling import Tiling

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["Fetching", "Sharing"]


@dataclass(frozen=True, slots=True, eq=False)
class _Half:
    """One of two exchanges.

    Attributes:
        whole: The exchange at once, which reduces nothing.
    """

    whole: Phase

    op: ClassVar[str] = ""
    partial: ClassVar[tuple[int, ...]] = ()

    @property
    def target(self) -> Tiling:
        """The tiling that the ranks are to hold in the end."""
        return self.whole.target

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        return self.whole.nodes


@dataclass(frozen=True, slots=True, eq=False)
class Fetching(_Half):
    """The first exchange: what is near as a whole, and each rank's part of what is far."""

    in_place: ClassVar[bool] = False

    @property
    def source(self) -> Tiling:
        """The tiling that the ranks hold."""
        return self.whole.source

    def takes(self, rank: int) -> list[Need]:
        """Return what `rank` gets, also from itself."""
        needed = self.whole.need_table(rank)
        if needed is None:
            return []
        far = np.flatnonzero(_are_far(needed, rank, self.nodes))
        keeps = _keep(node_needs(self.whole), needed, far, np.full(len(far), rank))
        ranks = needed.ranks[keeps]
        return NeedTable(needed.leaves, needed.starts[keeps], needed.stops[keeps], ranks).needs()

    def gives(self, rank: int) -> list[tuple[int, Box]]:
        """Return which other ranks take what of the tile of `rank`."""
        given = self.whole.give_table(rank)
        if given is None:
            return []
        node_of = np.array(self.nodes, np.int64)
        # A near copy would have been chosen: who takes from afar has none.
        far = np.flatnonzero(node_of[given.ranks] != node_of[rank])
        keeps = _keep(node_needs(self.whole), given, far, given.ranks[far])
        ranks = given.ranks[keeps]
        return GiveTable(ranks, given.leaves, given.starts[keeps], given.stops[keeps]).gives()

    def received(self) -> tuple[Integers, Integers]:
        """Return how many elements, in how many boxes, each rank of the target gets from others."""
        all_elements, all_boxes = self.whole.received()
        far = self.whole.crossing()
        mine = self.crossing()
        return all_elements - far[0] + mine[0], all_boxes - far[1] + mine[1]

    def crossing(self) -> tuple[Integers, Integers]:
        """Return how much of that comes from other nodes."""
        return node_needs(self.whole).fetched()


@dataclass(frozen=True, slots=True, eq=False)
class Sharing(_Half):
    """The second exchange: each rank takes from its mates what these have fetched."""

    in_place: ClassVar[bool] = True

    @property
    def source(self) -> Tiling:
        """The tiling that the ranks hold a part of."""
        return self.whole.target

    def takes(self, rank: int) -> list[Need]:
        """Return what `rank` gets, from one mate after the other."""
        mates = [mate for mate in self._mates(rank) if mate != rank]
        stretches = zip(mates, self._stretches(rank, mates), strict=True)
        return [Need(box, (mate,)) for mate, boxes in stretches for box in boxes]

    def gives(self, rank: int) -> list[tuple[int, Box]]:
        """Return which mates take what of the tile of `rank`."""
        mates = [mate for mate in self._mates(rank) if mate != rank]
        if not mates:
            return []
        (boxes,) = self._stretches(rank, [rank])
        return [(mate, box) for mate in mates for box in boxes]

    def received(self) -> tuple[Integers, Integers]:
        """Return how many elements, in how many boxes, each rank of the target gets from others."""
        needs = node_needs(self.whole)
        elements, boxes = needs.fetched()
        held = needs.groups >= 0
        groups = needs.groups[held]
        of_group = np.zeros((2, len(needs.elements)), np.int64)
        for total, mine in zip(of_group, (elements[held], boxes[held]), strict=True):
            total += np.bincount(groups, mine, len(total)).astype(np.int64)
        elements[held] = of_group[0, groups] - elements[held]
        boxes[held] = of_group[1, groups] - boxes[held]
        return elements, boxes

    def crossing(self) -> tuple[Integers, Integers]:
        """Return that nothing comes from other nodes."""
        nothing = np.zeros(self.target.mesh.size, np.int64)
        return nothing, nothing.copy()

    def _mates(self, rank: int) -> list[int]:
        """Return the ranks of the node with the same tile, `rank` among them."""
        if not self.target.holds(rank):
            return []
        needs, places = node_needs(self.whole), places_of(self.target.mesh)
        group = needs.groups[places.offsets[rank]]
        mates = needs.mates[needs.first[group] : needs.first[group + 1]]
        return [int(mate) for mate in places.ranks[mates]]

    def _stretches(self, rank: int, mates: list[int]) -> list[list[Box]]:
        """Return what each of some mates of `rank` fetches of the tile that they are to have."""
        needed = self.whole.need_table(rank)
        if needed is None:
            return [[] for _ in mates]
        needs = node_needs(self.whole)
        far = np.flatnonzero(_are_far(needed, rank, self.nodes))
        offsets = places_of(self.target.mesh).offsets
        groups = np.full(len(far), needs.groups[offsets[rank]])
        marks = needs.marks(groups, [leaf[far] for leaf in needed.leaves])
        stretches = []
        for mate in mates:
            starts, stops = needed.starts[far], needed.stops[far]
            places = np.full(len(far), needs.places[offsets[mate]])
            has = needs.pieces(groups, places, marks, starts, stops)
            stretches.append(boxes_of(starts[has], stops[has]))
        return stretches


def _are_far(needed: NeedTable, rank: int, nodes: tuple[int, ...]) -> Integers:
    """Tell which boxes a rank has to take from other nodes."""
    node_of = np.array(nodes, np.int64)
    far: Integers = node_of[needed.ranks[:, 0]] != node_of[rank]
    return far


def _keep(
    needs: NodeNeeds, table: NeedTable | GiveTable, far: Integers, ranks: Integers
) -> Integers:
    """Cut far boxes to what `ranks` fetch of them, in place; tell which of all boxes stay."""
    offsets = places_of(needs.phase.target.mesh).offsets[ranks]
    groups = needs.groups[offsets]
    marks = needs.marks(groups, [leaf[far] for leaf in table.leaves])
    starts, stops = table.starts[far], table.stops[far]
    keeps = np.ones(len(table.starts), bool)
    keeps[far] = needs.pieces(groups, needs.places[offsets], marks, starts, stops)
    table.starts[far], table.stops[far] = starts, stops
    return keeps
