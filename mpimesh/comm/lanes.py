"""Lanes between nodes, and what each carries.

The ranks with one number on their nodes are a *lane*. As many ranks of each node
are on one as its smallest node has: its workers. What crosses the network does so
once for each other node, side by side on the lanes.

Blocks that belong to ranks, as in an all-gather, travel on the lane of their rank.
Where a node has more ranks than another, the blocks of those beyond its workers are
carried by these, in further *waves*: with 2 workers, a node of 5 ranks has three.

```text
           lane 0  lane 1
node A:  0   1    | wave 0        node B:  5   6    | wave 0
         2   3    | wave 1
         4        | wave 2
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpimesh.errors import TransportError

if TYPE_CHECKING:
    from mpimesh.comm.over_nodes import Crossing

__all__ = ["NOBODY", "Fragment", "Lanes", "length", "windows"]

NOBODY = -1


class Lanes:
    """The nodes of a communicator as one of its ranks sees them, and its lane.

    Args:
        nodes: The ranks of each node, in order.
        rank: This one.

    Attributes:
        node: The number of this rank's node.
        here: The ranks on it.
        workers: How many lanes there are.
        waves: How many blocks of one node travel on a lane at most.
    """

    __slots__ = ("_crossing", "_node_of", "here", "node", "nodes", "waves", "workers")

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int) -> None:
        self.nodes = nodes
        self._node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        self.node = self._node_of[rank]
        self.here = nodes[self.node]
        self.workers = min(map(len, nodes))
        self.waves = -(-max(map(len, nodes)) // self.workers)
        self._crossing: Crossing | None = None

    @property
    def crossing(self) -> Crossing:
        """The ranks on this one's lane, in the order of the nodes.

        Raises:
            TransportError: If it is on none.
        """
        if self._crossing is None:
            raise TransportError("this rank is on no lane and has nothing to carry")
        return self._crossing

    @crossing.setter
    def crossing(self, crossing: Crossing) -> None:
        self._crossing = crossing

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._node_of[rank]

    def aboard(self, lane: int, wave: int) -> list[int]:
        """Return whose blocks travel on a lane in a wave: a rank of each node, or `NOBODY`."""
        place = wave * self.workers + lane
        return [ranks[place] if place < len(ranks) else NOBODY for ranks in self.nodes]

    def load(self, lane: int) -> list[list[int]]:
        """Return what :meth:`aboard` tells, wave by wave."""
        return [self.aboard(lane, wave) for wave in range(self.waves)]

    def arriving(self, place: int) -> list[int]:
        """Return whose blocks come to the rank at `place` of this node: of ranks on others."""
        if place >= self.workers:
            return []
        return [
            rank
            for wave in self.load(place)
            for number, rank in enumerate(wave)
            if number != self.node and rank != NOBODY
        ]

    def beyond(self, place: int) -> list[int]:
        """Return for whom else on this node the rank at `place` works."""
        return list(self.here[place + self.workers :: self.workers]) if place < self.workers else []


# -- a row of pieces, seen through a window that moves along it ------------------------


class Fragment(NamedTuple):
    """The part of a piece that lies in a window.

    Attributes:
        piece: Its number.
        part: The elements of it.
        at: Where they lie in the window.
    """

    piece: int
    part: slice
    at: int

    @property
    def place(self) -> slice:
        """Where they lie in the window, from the first to the last."""
        return slice(self.at, self.at + length(self.part))


def length(part: slice) -> int:
    """Return how many elements a part of an array has."""
    return int(part.stop - part.start)


def windows(lengths: Iterable[int], step: int) -> Iterator[list[Fragment]]:
    """Cut a row of pieces into windows of `step` elements, of which the last may be shorter."""
    window: list[Fragment] = []
    filled = 0
    for piece, size in enumerate(lengths):
        start = 0
        while start < size:
            stop = min(start + step - filled, size)
            window.append(Fragment(piece, slice(start, stop), filled))
            filled += stop - start
            start = stop
            if filled == step:
                yield window
                window, filled = [], 0
    if window:
        yield window
