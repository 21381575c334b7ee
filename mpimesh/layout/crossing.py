"""What of an exchange comes from other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpimesh.layout.node_needs import node_needs
from mpimesh.layout.phase import Phase
from mpimesh.layout.places import places_of

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["crossing"]

_TABLE_ENTRIES = 1 << 18
"""Most pairs of ranks of a node that are looked at at a time."""


def crossing(phase: Phase) -> tuple[Integers, Integers]:
    """Return how many elements, in how many boxes, each rank gets from ranks of other nodes.

    In the row-major order of the target's mesh.

    Cost:
        O(ranks times ranks of a node) time, O(ranks) memory.
    """
    if not phase.nodes:
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
    """Return what each rank gets from others of its node: looked at pair by pair."""
    source, target = phase.source, phase.target
    givers, takers = places_of(source.mesh), places_of(target.mesh)
    node_of = np.array(phase.nodes, np.int64)
    held = ~givers.coords[:, list(source.first_only)].any(axis=1)
    offers = np.flatnonzero(held)
    offers = offers[np.argsort(node_of[givers.ranks[offers]], kind="stable")]
    of_offers = node_of[givers.ranks[offers]]
    nodes = node_of[takers.ranks]
    first = np.searchsorted(of_offers, nodes, "left")
    count = np.searchsorted(of_offers, nodes, "right") - first
    count[takers.coords[:, list(target.first_only)].any(axis=1)] = 0
    elements, boxes = np.zeros((2, target.mesh.size), np.int64)
    ends = np.cumsum(count)
    at = 0
    while at < len(count):
        stop = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + _TABLE_ENTRIES, "right"))
        stop = max(stop, at + 1)
        taker = np.repeat(np.arange(at, stop), count[at:stop])
        turn = np.arange(len(taker)) - np.repeat(
            ends[at:stop] - count[at:stop] - (ends[at - 1] if at else 0), count[at:stop]
        )
        giver = offers[first[taker] + turn]
        found = _overlap(phase, giver, taker)
        np.add.at(elements, taker, found)
        np.add.at(boxes, taker, found > 0)
        at = stop
    return elements, boxes


def _overlap(phase: Phase, giver: Integers, taker: Integers) -> Integers:
    """Return how many elements each of some ranks takes of another, given by their offsets."""
    givers, takers = places_of(phase.source.mesh), places_of(phase.target.mesh)
    coords = givers.coords[giver]
    leaves = phase.source.leaves_of(coords)
    asked = givers.ranks[giver] != takers.ranks[taker]
    chosen = phase.chosen(leaves, takers.ranks[taker])
    for dim in phase.copies():
        asked &= chosen[:, dim] == coords[:, dim]
    found: Integers = asked.astype(np.int64)
    rows = zip(leaves, phase.target.leaves_of(takers.coords[taker]), strict=True)
    for axis, (theirs, own) in enumerate(rows):
        source, target = phase.source.bounds[axis], phase.target.bounds[axis]
        start = np.maximum(source[theirs], target[own])
        found *= np.maximum(np.minimum(source[theirs + 1], target[own + 1]) - start, 0)
    return found
