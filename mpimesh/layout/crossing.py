"""The part of an exchange that comes from other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpimesh.layout.node_needs import node_needs
from mpimesh.layout.phase import Phase, ravel
from mpimesh.layout.places import Places, places_of
from mpimesh.layout.tiling import Tiling

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["crossing"]

_TABLE_ENTRIES = 1 << 15
"""Most pairs of ranks of a node that are looked at at a time."""


def crossing(phase: Phase) -> tuple[Integers, Integers]:
    """Return how many elements, in how many boxes, each rank gets from ranks of other nodes.

    In the row-major order of the target's mesh.

    Cost:
        O(ranks times ranks of a node) time, O(ranks) memory.
    """
    if not phase.nodes or phase.inside:
        nothing = np.zeros(phase.target.mesh.size, np.int64)
        return nothing, nothing.copy()
    if phase.partial:
        elements, boxes = phase.received()
        near = _from_near(phase)
        return elements - near[0], boxes - near[1]
    needs = node_needs(phase)
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
    found = np.zeros((2, target.mesh.size), np.int64)
    at = 0
    while at < len(count):
        stop = int(np.searchsorted(pairs, pairs[at] + _TABLE_ENTRIES, "right")) - 1
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
        for row, values in zip(found, (elements, elements > 0), strict=True):
            row[at:stop] = np.bincount(taker - at, values, stop - at)
        at = stop
    return found[0], found[1]


def _tiles(tiling: Tiling, places: Places) -> list[tuple[Integers, Integers]]:
    """Return for each axis where the tiles of all ranks of a mesh begin and end."""
    leaves = tiling.leaves_of(places.coords)
    return [(one[leaf], one[leaf + 1]) for one, leaf in zip(tiling.bounds, leaves, strict=True)]
