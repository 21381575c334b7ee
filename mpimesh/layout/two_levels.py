"""An exchange over nodes in two: what is remote comes to each node once, and is shared there.

First each rank takes what is on its node, and of what is remote its stretch. Then it takes from
its peers the stretches that they have, out of their new blocks, where these already lie at their
place. So a rank receives what it would receive at once, from nearer by, and needs no memory
besides.

*Peers* are the ranks of a node that are to have the same tile. What the node holds no copy of is
*remote*, and so it is for all of them. Each byte of it is fetched once: the remote boxes stand in
row-major order of the source's tiles, all their elements in one row, and each peer has an equal
stretch of that row. Where a stretch would end inside a box, it ends at the last slice of the
box before, slices being taken along its longest axis.

Nobody lists the remote boxes of others. A node holds few tiles, as many as it has ranks at most, so
where a remote box stands in the row is where it stands among all boxes, which is arithmetic, less
what the node holds before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeAlias

import numpy as np

from mpimesh.layout.boxes import Box
from mpimesh.layout.phase import GiveTable, Need, NeedTable, Phase, boxes_of, counted, ravel
from mpimesh.layout.tiling import Integers, Places, Tiling, places_of

__all__ = ["Exchange", "InterNode", "IntraNode", "can_share", "crossing"]

_TABLE_ENTRIES = 1 << 19
"""Most entries of a table of groups and tiles of their nodes that is looked through at a time."""

_PAIRS = 1 << 15
"""Most pairs of ranks of a node that are looked at at a time."""


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
class InterNode(_Half):
    """The first exchange: what is near as a whole, and each rank's part of what is remote."""

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
        remote = np.flatnonzero(_are_remote(needed, rank, self.nodes))
        keeps = _keep(_node_needs(self.whole), needed, remote, np.full(len(remote), rank))
        ranks = needed.ranks[keeps]
        return NeedTable(needed.leaves, needed.starts[keeps], needed.stops[keeps], ranks).needs()

    def gives(self, rank: int) -> list[tuple[int, Box]]:
        """Return which other ranks take what of the tile of `rank`."""
        gives = self.whole.give_table(rank)
        if gives is None:
            return []
        node_of = np.array(self.nodes, np.int64)
        # A near copy would have been chosen: who takes from afar has none.
        remote = np.flatnonzero(node_of[gives.ranks] != node_of[rank])
        keeps = _keep(_node_needs(self.whole), gives, remote, gives.ranks[remote])
        ranks = gives.ranks[keeps]
        return GiveTable(ranks, gives.leaves, gives.starts[keeps], gives.stops[keeps]).gives()

    def received(self) -> tuple[Integers, Integers]:
        """Return how many elements, in how many boxes, each rank of the target gets from others."""
        elements, boxes = self.whole.received()
        at_once, fetched = crossing(self.whole), crossing(self)
        return elements - at_once[0] + fetched[0], boxes - at_once[1] + fetched[1]


@dataclass(frozen=True, slots=True, eq=False)
class IntraNode(_Half):
    """The second exchange: each rank takes from its peers what these have fetched."""

    in_place: ClassVar[bool] = True

    @property
    def source(self) -> Tiling:
        """The tiling that the ranks hold a part of."""
        return self.whole.target

    def takes(self, rank: int) -> list[Need]:
        """Return what `rank` gets, from one peer after the other."""
        peers = [peer for peer in self._peers(rank) if peer != rank]
        stretches = zip(peers, self._stretches(rank, peers), strict=True)
        return [Need(box, (peer,)) for peer, boxes in stretches for box in boxes]

    def gives(self, rank: int) -> list[tuple[int, Box]]:
        """Return which peers take what of the tile of `rank`."""
        peers = [peer for peer in self._peers(rank) if peer != rank]
        if not peers:
            return []
        (boxes,) = self._stretches(rank, [rank])
        return [(peer, box) for peer in peers for box in boxes]

    def received(self) -> tuple[Integers, Integers]:
        """Return how many elements, in how many boxes, each rank of the target gets from others."""
        needs = _node_needs(self.whole)
        elements, boxes = needs.fetched()
        members = needs.groups >= 0
        groups = needs.groups[members]
        of_group = np.zeros((2, len(needs.elements)), np.int64)
        for total, mine in zip(of_group, (elements[members], boxes[members]), strict=True):
            total += np.bincount(groups, mine, len(total)).astype(np.int64)
        elements[members] = of_group[0, groups] - elements[members]
        boxes[members] = of_group[1, groups] - boxes[members]
        return elements, boxes

    def _peers(self, rank: int) -> list[int]:
        """Return the ranks of the node with the same tile, `rank` among them."""
        if not self.target.holds(rank):
            return []
        needs, places = _node_needs(self.whole), places_of(self.target.mesh)
        group = needs.groups[places.offsets[rank]]
        peers = needs.peers[needs.first[group] : needs.first[group + 1]]
        return [int(peer) for peer in places.ranks[peers]]

    def _stretches(self, rank: int, peers: list[int]) -> list[list[Box]]:
        """Return what each of some peers of `rank` fetches of the tile that they are to have."""
        needed = self.whole.need_table(rank)
        if needed is None:
            return [[] for _ in peers]
        needs = _node_needs(self.whole)
        remote = np.flatnonzero(_are_remote(needed, rank, self.nodes))
        offsets = places_of(self.target.mesh).offsets
        groups = np.full(len(remote), needs.groups[offsets[rank]])
        marks = needs.marks(groups, [leaf[remote] for leaf in needed.leaves])
        stretches = []
        for peer in peers:
            starts, stops = needed.starts[remote], needed.stops[remote]
            places = np.full(len(remote), needs.places[offsets[peer]])
            has = needs.pieces(groups, places, marks, starts, stops)
            stretches.append(boxes_of(starts[has], stops[has]))
        return stretches


def _are_remote(needed: NeedTable, rank: int, nodes: tuple[int, ...]) -> Integers:
    """Tell which boxes a rank has to take from other nodes."""
    node_of = np.array(nodes, np.int64)
    remote: Integers = node_of[needed.ranks[:, 0]] != node_of[rank]
    return remote


def _keep(
    needs: _NodeNeeds, table: NeedTable | GiveTable, remote: Integers, ranks: Integers
) -> Integers:
    """Cut remote boxes to what `ranks` fetch of them, in place; tell which of all boxes stay."""
    offsets = places_of(needs.phase.target.mesh).offsets[ranks]
    groups = needs.groups[offsets]
    marks = needs.marks(groups, [leaf[remote] for leaf in table.leaves])
    starts, stops = table.starts[remote], table.stops[remote]
    keeps = np.ones(len(table.starts), bool)
    keeps[remote] = needs.pieces(groups, needs.places[offsets], marks, starts, stops)
    table.starts[remote], table.stops[remote] = starts, stops
    return keeps


Exchange: TypeAlias = Phase | InterNode | IntraNode


# -- the stretches of peers ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Marks:
    """Places of remote boxes in the row of all, one entry for each of them.

    Attributes:
        begins: How many remote elements stand before.
        axes: Their longest axis.
        lengths: How long that is.
        slices: The elements of a slice across it.
    """

    begins: Integers
    axes: Integers
    lengths: Integers
    slices: Integers


@dataclass(frozen=True, slots=True, eq=False)
class _NodeNeeds:
    """The remote boxes of one exchange that reduces nothing.

    Peers form a *group*. Whoever holds nothing is in none.

    Attributes:
        phase: The exchange.
        groups: The group of each rank of the target's mesh, in its order; -1 for none.
        places: Its place among its peers.
        peers: The peers of all groups one after the other, as offsets in the target's mesh.
        first: Where those of a group begin, and at last the end.
        starts: Where the tile of each group begins: (groups, axes).
        stops: Where it ends.
        near: The source's tiles that a group's node holds: (groups, most of a node, axes) is
            ``tiles[node_of_group]``.
        elements: How many remote elements a group has.
        boxes: How many remote boxes.
    """

    phase: Phase
    groups: Integers
    places: Integers
    peers: Integers
    first: Integers
    starts: Integers
    stops: Integers
    elements: Integers
    boxes: Integers
    _node_of: Integers
    _kept_partial_of: Integers
    _tiles: Integers
    _kept_partial: Integers

    # -- groups --------------------------------------------------------------------------

    def counts(self, groups: Integers) -> Integers:
        """Return how many peers groups have."""
        return self.first[groups + 1] - self.first[groups]

    # -- remote boxes -------------------------------------------------------------------------

    def marks(self, groups: Integers, leaves: Sequence[Integers]) -> _Marks:
        """Return where remote boxes stand.

        Shapes:
            groups: (boxes,): who lacks each.
            leaves: For each axis (boxes,): the intervals of the source's tiles.
        """
        begins, lengths = self._stand(groups, leaves)
        elements = lengths.prod(axis=-1)
        before, _ = self._near_before(groups, begins)
        # An array without axes is one slice.
        axes = lengths.argmax(axis=-1) if lengths.shape[-1] else np.zeros(len(groups), np.int64)
        longest = lengths.max(axis=-1, initial=1)
        return _Marks(begins - before, axes, longest, elements // np.maximum(longest, 1))

    def pieces(
        self, groups: Integers, places: Integers, marks: _Marks, starts: Integers, stops: Integers
    ) -> Integers:
        """Cut remote boxes to what peers fetch of them, in place; tell which have anything.

        Shapes:
            groups: (boxes,).
            places: (boxes,): of the peer.
            starts: (boxes, axes).
            stops: (boxes, axes).
            result: (boxes,) of bool.
        """
        rows = np.arange(len(groups))
        count = np.maximum(self.counts(groups), 1)
        cuts = [
            np.clip(
                (place * self.elements[groups] // count - marks.begins) // marks.slices,
                0,
                marks.lengths,
            )
            for place in (places, places + 1)
        ]
        if starts.shape[1]:
            begin = starts[rows, marks.axes]
            starts[rows, marks.axes], stops[rows, marks.axes] = begin + cuts[0], begin + cuts[1]
        has: Integers = cuts[0] < cuts[1]
        return has

    def fetched(self) -> tuple[Integers, Integers]:
        """Return how many remote elements, in how many boxes, each rank of the target fetches.

        In the row-major order of the mesh.
        """
        members = np.flatnonzero(self.groups >= 0)
        groups, places = self.groups[members], self.places[members]
        elements = np.zeros(len(self.groups), np.int64)
        boxes = elements.copy()
        begin, first, _ = self._cut(groups, places)
        end, _, last = self._cut(groups, places + 1)
        elements[members] = end - begin
        boxes[members] = np.where(end > begin, last - first, 0)
        return elements, boxes

    def count(self) -> None:
        """Work out how much each group lacks, once."""
        groups = np.arange(len(self.elements))
        self.elements[...] = (self.stops - self.starts).prod(axis=1)
        self.boxes[...] = 1
        for axis, bounds in enumerate(self.phase.source.bounds):
            low, high, _ = self._meets(bounds, self.starts[:, axis], self.stops[:, axis])
            self.boxes[...] *= high - low
        for rows in self._steps(groups):
            _, near = self._near_tiles(groups[rows])
            self.elements[rows] -= near.sum(axis=1)
            self.boxes[rows] -= (near > 0).sum(axis=1)
        self.boxes[self.elements == 0] = 0

    # -- arithmetic ------------------------------------------------------------------------

    def _stand(self, groups: Integers, leaves: Sequence[Integers]) -> tuple[Integers, Integers]:
        """Return what stands before tiles in the boxes of groups, and how long they are there.

        Shapes:
            result: as `leaves`, and with the axes at the end.
        """
        shape = np.broadcast_shapes(groups.shape, *(leaf.shape for leaf in leaves))
        begins: Integers = np.zeros(shape, np.int64)
        slab = np.ones_like(begins)
        lengths: Integers = np.ones((*shape, len(leaves)), np.int64)
        rest = self._rest
        for axis, leaf in enumerate(leaves):
            bounds = self.phase.source.bounds[axis]
            start, stop = self.starts[groups, axis], self.stops[groups, axis]
            first = np.maximum(bounds[leaf], start)
            lengths[..., axis] = np.maximum(np.minimum(bounds[leaf + 1], stop) - first, 0)
            begins += (first - start) * slab * rest[groups, axis]
            slab *= lengths[..., axis]
        return begins, lengths

    @property
    def _rest(self) -> Integers:
        """For each group and axis the elements of a slice of one along it and those before."""
        lengths = self.stops - self.starts
        behind = np.cumprod(lengths[:, ::-1], axis=1)[:, ::-1]
        return np.concatenate([behind[:, 1:], np.ones((len(lengths), 1), np.int64)], axis=1)

    def _near_tiles(self, groups: Integers) -> tuple[Integers, Integers]:
        """Return where the tiles that groups' nodes hold stand, in order, and their elements.

        Shapes:
            result: (groups, most tiles of a node) each; those without elements stand last.
        """
        nodes = self._node_of[groups]
        tiles = self._tiles[nodes]
        leaves = [tiles[..., axis] for axis in range(tiles.shape[-1])]
        begins, lengths = self._stand(groups[:, None], leaves)
        if not leaves:
            begins, lengths = (
                np.broadcast_to(one, tiles.shape[:2] + one.shape[2:]) for one in (begins, lengths)
            )
        elements = np.where(
            self._kept_partial[nodes] == self._kept_partial_of[groups][:, None],
            lengths.prod(axis=-1),
            0,
        )
        begins = np.where(elements > 0, begins, np.iinfo(np.int64).max)
        order = np.argsort(begins, axis=1, kind="stable")
        return np.take_along_axis(begins, order, 1), np.take_along_axis(elements, order, 1)

    def _near_tiles_of_all(self, groups: Integers) -> tuple[Integers, Integers]:
        """Return the same, worked out once for each group however often it is there."""
        unique, inverse = np.unique(groups, return_inverse=True)
        where, elements = self._near_tiles(unique)
        return where[inverse.reshape(-1)], elements[inverse.reshape(-1)]

    def _near_before(self, groups: Integers, begins: Integers) -> tuple[Integers, Integers]:
        """Return the elements, and the boxes, that nodes hold before `begins`."""
        totals = np.zeros((2, len(groups)), np.int64)
        for rows in self._steps(groups):
            where, elements = self._near_tiles_of_all(groups[rows])
            before = (where < begins[rows][:, None]) & (elements > 0)
            totals[:, rows] = (elements * before).sum(axis=1), before.sum(axis=1)
        return totals[0], totals[1]

    def _cut(self, groups: Integers, places: Integers) -> tuple[Integers, Integers, Integers]:
        """Return where the stretches of peers begin, in remote elements and in remote boxes.

        Returns:
            The elements before; the boxes that end before; those that begin before.
        """
        totals = np.zeros((3, len(groups)), np.int64)
        for rows in self._steps(groups):
            totals[:, rows] = self._cut_rows(groups[rows], places[rows])
        return totals[0], totals[1], totals[2]

    def _cut_rows(self, groups: Integers, places: Integers) -> tuple[Integers, ...]:
        source = self.phase.source
        total = self.elements[groups]
        at = places * total // np.maximum(self.counts(groups), 1)
        where, elements = self._near_tiles_of_all(groups)
        # Where the row of remote elements is interrupted by each tile that the node holds.
        breaks = where - (np.cumsum(elements, axis=1) - elements)
        passed = (breaks <= at[:, None]) & (elements > 0)
        skipped, near = (elements * passed).sum(axis=1), passed.sum(axis=1)
        left = at + skipped
        index, slab = np.zeros_like(at), np.ones_like(at)
        lengths = np.ones((len(at), max(1, len(source.bounds))), np.int64)
        rest = self._rest
        for axis, bounds in enumerate(source.bounds):
            start, stop = self.starts[groups, axis], self.stops[groups, axis]
            unit = np.maximum(slab * rest[groups, axis], 1)
            leaf = np.searchsorted(bounds, start + left // unit, "right") - 1
            leaf = np.clip(leaf, 0, len(bounds) - 2)
            first = np.maximum(bounds[leaf], start)
            lengths[:, axis] = np.minimum(bounds[leaf + 1], stop) - first
            left -= (first - start) * unit
            slab *= lengths[:, axis]
            low, high, full = self._meets(bounds, start, stop)
            index = index * (high - low) + full[leaf] - low
        box = slab // np.maximum(lengths.max(axis=1), 1)
        inside = left // np.maximum(box, 1) * box
        begun = index - near
        is_end = at >= total
        return (
            np.where(is_end, total, at - left + inside),
            np.where(is_end, self.boxes[groups], begun),
            np.where(is_end, self.boxes[groups], begun + (inside > 0)),
        )

    @staticmethod
    def _meets(bounds: Integers, start: Integers, stop: Integers) -> tuple[Integers, ...]:
        """Return the first interval with elements that is met, that after the last, all counts."""
        full = counted(bounds)
        low = full[np.searchsorted(bounds, start, "right") - 1]
        return low, np.maximum(full[np.searchsorted(bounds, stop, "left")], low), full

    def _steps(self, groups: Integers) -> list[slice]:
        step = max(1, _TABLE_ENTRIES // max(1, self._tiles.shape[1]))
        return [slice(at, at + step) for at in range(0, len(groups), step)]


def can_share(phase: Phase) -> bool:
    """Tell whether an exchange has any remote box that several ranks of a node can fetch."""
    needs = _node_needs(phase)
    return bool(((np.diff(needs.first) > 1) & (needs.elements > 0)).any())


@lru_cache(maxsize=64)
def _node_needs(phase: Phase) -> _NodeNeeds:
    """Work out what the nodes need of each other in an exchange that reduces nothing.

    Cost:
        O(ranks) integers, and O(ranks of a node) for each group while it is looked at.
    """
    source, target = phase.source, phase.target
    node_of = np.array(phase.nodes, np.int64)
    _, numbers = np.unique(node_of, return_inverse=True)
    numbers = numbers.reshape(-1)
    givers, takers = places_of(source.mesh), places_of(target.mesh)

    # The tiles that each node holds: rows of node, coordinates along dims that stay partial, and
    # intervals.
    holds = ~givers.coords[:, list(source.first_only)].any(axis=1)
    sizes = [source.mesh.dims[dim].size for dim in phase.kept_partial]
    kept_partial = ravel(givers.coords[:, list(phase.kept_partial)], sizes)
    rows = np.stack([numbers[givers.ranks], kept_partial, *source.leaves_of(givers.coords)], axis=1)
    rows = np.unique(rows[holds], axis=0)
    nodes, begins, counts = np.unique(rows[:, 0], return_index=True, return_counts=True)
    places = np.arange(len(rows)) - np.repeat(begins, counts)
    most = int(counts.max(initial=0))
    tiles = np.zeros((len(node_of), most, rows.shape[1] - 2), np.int64)[: numbers.max() + 1]
    kept_partial_of_tiles = np.full(tiles.shape[:2], -1, np.int64)
    of_rows = np.repeat(nodes, counts)
    tiles[of_rows, places] = rows[:, 2:]
    kept_partial_of_tiles[of_rows, places] = rows[:, 1]

    # The peers: ranks alike in node, coordinates along dims that stay partial, and intervals.
    has = np.flatnonzero(~takers.coords[:, list(target.first_only)].any(axis=1))
    coords = takers.coords[has]
    same = ravel(coords[:, list(phase.kept_partial)], sizes)
    leaves = target.leaves_of(coords)
    keys = np.stack([numbers[takers.ranks[has]], same, *leaves], axis=1)
    unique, index, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], np.arange(len(unique) + 1))
    groups = np.full(target.mesh.size, -1, np.int64)
    groups[has] = group
    place = np.zeros(target.mesh.size, np.int64)
    place[has[order]] = np.arange(len(has)) - first[group[order]]
    edges = np.empty((2, len(unique), len(leaves)), np.int64)
    for axis, (bounds, leaf) in enumerate(zip(target.bounds, leaves, strict=True)):
        edges[:, :, axis] = bounds[leaf[index]], bounds[leaf[index] + 1]
    nothing = np.zeros(len(unique), np.int64)
    needs = _NodeNeeds(
        phase, groups, place, has[order], first, edges[0], edges[1], nothing, nothing.copy(),
        unique[:, 0], unique[:, 1], tiles, kept_partial_of_tiles,
    )  # fmt: skip
    needs.count()
    return needs


# -- what comes from other nodes -----------------------------------------------------------


def crossing(phase: Exchange) -> tuple[Integers, Integers]:
    """Return how many elements, in how many boxes, each rank gets from ranks of other nodes.

    In the row-major order of the target's mesh.

    Cost:
        O(ranks times ranks of a node) time, O(ranks) memory.
    """
    if isinstance(phase, InterNode):
        return _node_needs(phase.whole).fetched()
    if isinstance(phase, IntraNode) or not phase.nodes or phase.inside:
        nothing = np.zeros(phase.target.mesh.size, np.int64)
        return nothing, nothing.copy()
    if phase.partial:
        elements, boxes = phase.received()
        near = _from_near(phase)
        return elements - near[0], boxes - near[1]
    needs = _node_needs(phase)
    has = needs.groups >= 0
    groups = needs.groups[has]
    elements, boxes = np.zeros((2, len(has)), np.int64)
    elements[has], boxes[has] = needs.elements[groups], needs.boxes[groups]
    return elements, boxes


def _from_near(phase: Phase) -> tuple[Integers, Integers]:
    """Return what each rank gets from others of its node: looked at pair by pair.

    Where all takers are in the source's mesh, they take from ranks at their own coordinates along
    the dims of copies, so only such pairs are looked at.
    """
    source, target = phase.source, phase.target
    givers, takers = places_of(source.mesh), places_of(target.mesh)
    copies = phase.copies()
    mine = givers.offsets_of(takers.ranks)
    lanes = ravel(givers.coords[:, copies], [source.mesh.dims[dim].size for dim in copies])
    if mine.min(initial=0) < 0:
        lanes[...] = 0  # those from outside take turns
    node_of = np.array(phase.nodes, np.int64) * (lanes.max(initial=0) + 1)
    of_givers = node_of[givers.ranks] + lanes
    of_takers = node_of[takers.ranks] + lanes[mine]
    order = np.argsort(of_givers, kind="stable")
    order = order[~givers.coords[order][:, list(source.first_only)].any(axis=1)]
    first = np.searchsorted(of_givers[order], of_takers, "left")
    count = np.searchsorted(of_givers[order], of_takers, "right") - first
    count[takers.coords[:, list(target.first_only)].any(axis=1)] = 0
    pairs = np.concatenate([[0], np.cumsum(count)])
    boxes = _tiles(source, givers), _tiles(target, takers)
    totals = np.zeros((2, target.mesh.size), np.int64)
    at = 0
    while at < len(count):
        stop = int(np.searchsorted(pairs, pairs[at] + _PAIRS, "right")) - 1
        stop = max(stop, at + 1)
        here = count[at:stop]
        taker = np.repeat(np.arange(at, stop), here)
        turn = np.arange(len(taker)) - np.repeat(pairs[at:stop] - pairs[at], here)
        giver = order[first[taker] + turn]
        elements = (givers.ranks[giver] != takers.ranks[taker]).astype(np.int64)
        if copies and mine.min(initial=0) < 0:
            leaves = [leaf[giver] for leaf in source.leaves_of(givers.coords)]
            chosen = phase.chosen(leaves, takers.ranks[taker])
            elements *= (chosen[:, copies] == givers.coords[giver][:, copies]).all(axis=1)
        for theirs, own in zip(*boxes, strict=True):
            starts = np.maximum(theirs[0][giver], own[0][taker])
            elements *= np.maximum(np.minimum(theirs[1][giver], own[1][taker]) - starts, 0)
        for row, values in zip(totals, (elements, elements > 0), strict=True):
            row[at:stop] = np.bincount(taker - at, values, stop - at)
        at = stop
    return totals[0], totals[1]


def _tiles(tiling: Tiling, places: Places) -> list[tuple[Integers, Integers]]:
    """Return for each axis where the tiles of all ranks of a mesh begin and end."""
    leaves = tiling.leaves_of(places.coords)
    return [(one[leaf], one[leaf + 1]) for one, leaf in zip(tiling.bounds, leaves, strict=True)]
