"""One exchange of a redistribution: every rank gets its tile of one tiling out of another.

Each rank holds one tile of the source, so between any two ranks there is one box at most. Who
takes what from whom follows from arithmetic that all ranks do alike, each for itself only.

Of several copies of a tile, a rank takes the one at its own coordinates along the dims
that the copies differ in: that is itself, if it has one, and it spreads the load. Ranks from
outside the source's mesh take turns. Where nodes are known, a copy on the same node comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import numpy as np

from mpimesh.layout.boxes import Box
from mpimesh.layout.tiling import Integers, Tiling, places_of

__all__ = ["GiveTable", "Need", "NeedTable", "Phase", "boxes_of", "counted", "ravel"]

_TABLE_ENTRIES = 1 << 20
"""Most entries of a table of ranks and copies that is looked through at a time."""


@dataclass(frozen=True, slots=True)
class Need:
    """One box that a rank gets.

    Attributes:
        box: The box of the whole array.
        ranks: Those that hold it; several hold summands of it, to be reduced in this order.
    """

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NeedTable:
    """All that a rank gets, as tables of one row for each tile of the source that it meets.

    Attributes:
        leaves: For each axis (rows,): the intervals of those tiles.
        starts: Where the boxes begin: (rows, axes).
        stops: Where they end: (rows, axes).
        ranks: Who holds them: (rows, summands).
    """

    leaves: list[Integers]
    starts: Integers
    stops: Integers
    ranks: Integers

    def needs(self) -> list[Need]:
        """Return the rows as values."""
        boxes = boxes_of(self.starts, self.stops)
        return [Need(box, tuple(who)) for box, who in zip(boxes, self.ranks.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class GiveTable:
    """All that other ranks take of a rank's tile, as tables of one row for each of them.

    Attributes:
        ranks: Who takes: (rows,).
        leaves: For each axis (rows,): the interval of the tile, the same in all rows.
        starts: Where the boxes begin: (rows, axes).
        stops: Where they end: (rows, axes).
    """

    ranks: Integers
    leaves: list[Integers]
    starts: Integers
    stops: Integers

    def gives(self) -> list[tuple[int, Box]]:
        """Return the rows as values."""
        return list(zip(self.ranks.tolist(), boxes_of(self.starts, self.stops), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """An exchange.

    Attributes:
        source: What the ranks hold.
        target: What they are to hold.
        op: The reduction over `partial`; empty for none.
        partial: The dims of the source's mesh along which ranks hold summands.
        kept_partial: Dims along which a rank takes only from ranks at its own coordinate.
        nodes: The node of each rank; empty if all count as near.
        inside: Whether nothing comes from other nodes, as who made it knows.
    """

    source: Tiling
    target: Tiling
    op: str = ""
    partial: tuple[int, ...] = ()
    kept_partial: tuple[int, ...] = ()
    nodes: tuple[int, ...] = field(default=(), repr=False)
    inside: bool = False

    in_place: ClassVar[bool] = False
    """Whether the ranks' source and target blocks share memory."""

    # -- one rank --------------------------------------------------------------------

    def takes(self, rank: int) -> list[Need]:
        """Return what `rank` gets, also from itself; in row-major order of the source's tiles."""
        table = self.need_table(rank)
        return [] if table is None else table.needs()

    def need_table(self, rank: int) -> NeedTable | None:
        """Return what :meth:`takes` does, as tables; None for nothing."""
        if not self.target.holds(rank):
            return None
        box = self.target.box(rank)
        grid = self.source.meeting(box)
        count = prod(len(axis) for axis in grid)
        if not count:
            return None
        leaves = [axis.reshape(-1) for axis in np.meshgrid(*grid, indexing="ij")] if grid else []
        coords = self.chosen(leaves, np.full(count, rank, np.int64))
        edges = np.empty((2, count, len(box)), np.int64)
        for axis, (bounds, leaf) in enumerate(zip(self.source.bounds, leaves, strict=True)):
            edges[0, :, axis] = np.maximum(bounds[leaf], box[axis][0])
            edges[1, :, axis] = np.minimum(bounds[leaf + 1], box[axis][1])
        return NeedTable(leaves, edges[0], edges[1], self._with_partial(coords))

    def gives(self, rank: int) -> list[tuple[int, Box]]:
        """Return which other ranks take what of the tile of `rank`, in the order of the target."""
        table = self.give_table(rank)
        return [] if table is None else table.gives()

    def give_table(self, rank: int) -> GiveTable | None:
        """Return what :meth:`gives` does, as tables; None for nothing."""
        if not self.source.holds(rank):
            return None
        box = self.source.box(rank)
        if any(start >= stop for start, stop in box):
            return None
        mine = self.source.mesh.coords_of(rank)
        coords = self._receivers(box, mine)
        receivers = places_of(self.target.mesh).ranks[ravel(coords, self.target.mesh.shape)]
        own = self.source.leaves_of(np.array([mine], np.int64).reshape(1, -1))
        leaves = [np.broadcast_to(leaf, len(receivers)) for leaf in own]
        chosen = self.chosen(leaves, receivers)
        asked = receivers != rank
        for dim in self.copies():
            asked &= chosen[:, dim] == mine[dim]
        receivers = receivers[asked]
        edges = np.empty((2, len(receivers), len(box)), np.int64)
        rows = zip(self.target.bounds, self.target.leaves_of(coords[asked]), strict=True)
        for axis, (bounds, leaf) in enumerate(rows):
            edges[0, :, axis] = np.maximum(bounds[leaf], box[axis][0])
            edges[1, :, axis] = np.minimum(bounds[leaf + 1], box[axis][1])
        return GiveTable(receivers, [leaf[asked] for leaf in leaves], edges[0], edges[1])

    # -- all ranks -------------------------------------------------------------------

    def received(self) -> tuple[Integers, Integers]:
        """Return how many elements, in how many messages, each rank of the target gets from others.

        In the row-major order of the target's mesh. A message is a box from one rank to another.
        """
        places = places_of(self.target.mesh)
        parts = prod(self.source.mesh.dims[dim].size for dim in self.partial)
        elements = np.full(self.target.mesh.size, parts, np.int64)
        messages = elements.copy()
        mine = places_of(self.source.mesh).offsets_of(places.ranks)
        own = self.source.leaves_of(places_of(self.source.mesh).coords[mine])
        own_elements = (mine >= 0).astype(np.int64)
        for axis, leaf in enumerate(self.target.leaves_of(places.coords)):
            bounds, source = self.target.bounds[axis], self.source.bounds[axis]
            start, stop = bounds[leaf], bounds[leaf + 1]
            elements *= stop - start
            full = counted(source)
            first = np.searchsorted(source, start, "right") - 1
            last = np.searchsorted(source, stop, "left")
            messages *= np.where(start < stop, full[np.maximum(first, last)] - full[first], 0)
            overlap = np.minimum(source[own[axis] + 1], stop) - np.maximum(source[own[axis]], start)
            own_elements *= np.maximum(overlap, 0)
        elements -= own_elements
        messages -= own_elements > 0
        for dim in self.target.first_only:
            elements[places.coords[:, dim] > 0] = 0
            messages[places.coords[:, dim] > 0] = 0
        return elements, messages

    # -- who takes from whom -----------------------------------------------------------

    def copies(self) -> list[int]:
        """Return the source's dims of which one coordinate has to be chosen."""
        return [dim for dim in self.source.free_dims if dim not in self.partial]

    def chosen(self, leaves: Sequence[Integers], receivers: Integers) -> Integers:
        """Return the coordinates of whom each receiver takes a tile from; 0 along partial dims.

        Shapes:
            leaves: For each axis (pairs,): the intervals of the source's tiles.
            receivers: (pairs,), ranks.
            result: (pairs, mesh dims).
        """
        mesh, copies = self.source.mesh, self.copies()
        coords = np.zeros((len(receivers), mesh.ndim), np.int64)
        for dim, column in self.source.coords_of_leaves(leaves).items():
            coords[:, dim] = column
        if not copies:
            return coords
        places = places_of(mesh)
        offsets = places.offsets_of(receivers)
        inside = offsets >= 0
        own = places.coords[offsets][:, copies]
        if not self.nodes and inside.all():
            coords[:, copies] = own
            return coords
        sizes = [mesh.dims[dim].size for dim in copies]
        turns = self._turns(leaves, receivers)
        by_turn = np.stack(np.unravel_index(turns % prod(sizes), sizes), axis=1)
        coords[:, copies] = np.where(inside[:, None], own, by_turn)
        if self.nodes and not self.partial:
            self._prefer_near(coords, receivers, turns)
        return coords

    def _turns(self, leaves: Sequence[Integers], receivers: Integers) -> Integers:
        """Return the place of each receiver among those that need the same tile."""
        target = self.target
        coords = places_of(target.mesh).coords[places_of(target.mesh).offsets_of(receivers)]
        turn = np.zeros(len(receivers), np.int64)
        rows = zip(target.leaves_of(coords), leaves, strict=True)
        for axis, (own, leaf) in enumerate(rows):
            bounds, source = target.bounds[axis], self.source.bounds[axis]
            first = np.searchsorted(bounds, source[leaf], "right") - 1
            last = np.searchsorted(bounds, source[leaf + 1], "left")
            full = counted(bounds)  # blocks without elements have no turn
            turn = turn * np.maximum(full[last] - full[first], 1) + full[own] - full[first]
        for dim in target.free_dims:
            turn = turn * target.mesh.dims[dim].size + coords[:, dim]
        return turn

    def _prefer_near(self, coords: Integers, receivers: Integers, turns: Integers) -> None:
        """Take a copy on the receiver's node where there is one, in place."""
        mesh = self.source.mesh
        places, node_of = places_of(mesh), np.array(self.nodes, np.int64)
        copies = [dim for dim in self.copies() if dim not in self.kept_partial]
        sizes = [mesh.dims[dim].size for dim in copies]
        choices = np.stack(np.unravel_index(np.arange(prod(sizes)), sizes or [1]), axis=1)
        chosen = places.ranks[ravel(coords, mesh.shape)]
        far = np.flatnonzero(node_of[chosen] != node_of[receivers])
        step = max(1, _TABLE_ENTRIES // len(choices))
        for rows in (far[at : at + step] for at in range(0, len(far), step)):
            base = coords[rows].copy()
            base[:, copies] = 0
            weights = np.array([mesh.strides[dim] for dim in copies], np.int64)
            offsets = ravel(base, mesh.shape)[:, None] + choices[:, : len(copies)] @ weights
            near = node_of[places.ranks[offsets]] == node_of[receivers[rows]][:, None]
            count = near.sum(axis=1)
            some = np.flatnonzero(count)
            # The turn-th of those that are near.
            nth = turns[rows[some]] % count[some]
            order = np.argsort(~near[some], axis=1, kind="stable")
            picked = order[np.arange(len(some)), nth]
            coords[rows[some][:, None], copies] = choices[picked][:, : len(copies)]

    def _with_partial(self, coords: Integers) -> Integers:
        """Return the ranks at `coords`, at all coordinates along partial dims: (pairs, parts)."""
        mesh = self.source.mesh
        offsets = ravel(coords, mesh.shape)
        sizes = [mesh.dims[dim].size for dim in self.partial]
        weights = np.array([mesh.strides[dim] for dim in self.partial], np.int64)
        parts = np.stack(np.unravel_index(np.arange(prod(sizes)), sizes or [1]), axis=1)
        steps = parts[:, : len(sizes)] @ weights
        return places_of(mesh).ranks[offsets[:, None] + steps]

    def _receivers(self, box: Box, giver: tuple[int, ...]) -> Integers:
        """Return the coordinates of the target's ranks whose tiles have an element of `box`."""
        target = self.target
        grid = target.meeting(box)
        free = [
            np.array([giver[dim]])
            if dim in self.kept_partial
            else np.arange(target.mesh.dims[dim].size)
            for dim in target.free_dims
        ]
        rows = [*grid, *free]
        if not rows:
            return np.zeros((1, target.mesh.ndim), np.int64)
        flat = [row.reshape(-1) for row in np.meshgrid(*rows, indexing="ij")]
        coords = np.zeros((len(flat[0]), target.mesh.ndim), np.int64)
        for dim, column in target.coords_of_leaves(flat[: len(grid)]).items():
            coords[:, dim] = column
        for dim, column in zip(target.free_dims, flat[len(grid) :], strict=True):
            coords[:, dim] = column
        return coords


def boxes_of(starts: Integers, stops: Integers) -> list[Box]:
    """Return the boxes that begin and end so: (rows, axes) each."""
    if not starts.shape[1]:
        return [()] * len(starts)
    axes = range(starts.shape[1])
    edges = [zip(starts[:, axis].tolist(), stops[:, axis].tolist(), strict=True) for axis in axes]
    return list(zip(*edges, strict=True))


def counted(bounds: Integers) -> Integers:
    """Return, for each interval and the end, how many before it have elements."""
    return np.concatenate([[0], np.cumsum(bounds[:-1] < bounds[1:])])


def ravel(coords: Integers, shape: Sequence[int]) -> Integers:
    """Return the row-major offsets of coordinates: (rows, dims) gives (rows,)."""
    offsets = np.zeros(len(coords), np.int64)
    for dim, size in enumerate(shape):
        offsets = offsets * size + coords[:, dim]
    return offsets
