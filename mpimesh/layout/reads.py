"""Reads of ranks from each other's blocks, where they are a question of each axis by itself.

A halo, or a shifted array: along each axis every block reads some runs of elements, of its own
block and of others, whatever the other axes do. So what a rank reads is the product of the runs
of its axes, and who reads of it is found the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.layout.boxes import Box, volume
from mpimesh.layout.layout import Layout
from mpimesh.layout.places import places_of
from mpimesh.layout.regions import Regions, local_regions
from mpimesh.layout.tiling import Tiling

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["Read", "Reads", "Run", "cut_runs", "shift_reads", "wrapped_runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of one axis that one block reads of another, or of itself.

    Attributes:
        at: Where they go, counted in what the reader fills.
        length: How many they are.
        start: Where they lie in the array.
        leaf: The interval of the axis that they lie in.
    """

    at: int
    length: int
    start: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Read:
    """A box that a rank reads.

    Attributes:
        rank: Who has it.
        box: Where it lies in the array.
        into: Where it goes, counted in what the reader fills.
    """

    rank: int
    box: Box
    into: Box


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """All that the ranks of a mesh read.

    Of several copies of a block a rank reads the one at its own coordinates.

    Attributes:
        tiling: The blocks that there are.
        runs_of: For each axis what gives the runs that the block of an interval reads.
        skip: Tells of a run for each axis and of the reader's intervals that nothing is read.
    """

    tiling: Tiling
    runs_of: tuple[Callable[[int], tuple[Run, ...]], ...]
    skip: Callable[[tuple[Run, ...], tuple[int, ...]], bool] = field(
        default=lambda runs, own: False
    )

    def takes(self, rank: int) -> list[Read]:
        """Return what `rank` reads, of others and of itself, in row-major order of its runs."""
        own = self._leaves(rank)
        reads = []
        for runs in product(*(of(leaf) for of, leaf in zip(self.runs_of, own, strict=True))):
            if not self.skip(runs, own):
                owner = self._rank_at(tuple(run.leaf for run in runs), rank)
                reads.append(Read(owner, _boxes(runs), _targets(runs)))
        return reads

    def gives(self, rank: int) -> list[tuple[int, Box]]:
        """Return which other ranks read what of `rank`: for each of them in the order it reads."""
        own = self._leaves(rank)
        rows = [
            [(leaf, run) for leaf in range(len(bounds) - 1) for run in of(leaf) if run.leaf == mine]
            for of, bounds, mine in zip(self.runs_of, self.tiling.bounds, own, strict=True)
        ]
        given = []
        for row in product(*rows):
            leaves, runs = tuple(leaf for leaf, _ in row), tuple(run for _, run in row)
            reader = self._rank_at(leaves, rank)
            if reader != rank and not self.skip(runs, leaves):
                given.append((reader, _boxes(runs)))
        return given

    def regions(self, rank: int, block_of: Callable[[int], Box]) -> Regions:
        """Return what `rank` takes and gives, with ranks numbered by their places in the mesh.

        Args:
            rank: The rank.
            block_of: Gives the box of the whole array that the array has in which a rank holds its
                block; it may go over the ends.
        """
        takes = [(read.into, read.box, (read.rank,)) for read in self.takes(rank)]
        number_of = self.tiling.mesh.offset_of
        return local_regions(takes, self.gives(rank), rank, block_of, number_of)

    def received(self, rank: int) -> tuple[int, int]:
        """Return how many elements, in how many boxes, `rank` reads of others."""
        foreign = [read for read in self.takes(rank) if read.rank != rank]
        return sum(volume(read.box) for read in foreign), len(foreign)

    @property
    def moves(self) -> bool:
        """Whether along any axis a block reads of another: the same on all ranks."""
        return any(
            run.leaf != leaf
            for of, bounds in zip(self.runs_of, self.tiling.bounds, strict=True)
            for leaf in range(len(bounds) - 1)
            for run in of(leaf)
        )

    def _leaves(self, rank: int) -> tuple[int, ...]:
        coords = np.array([self.tiling.mesh.coords_of(rank)], np.int64).reshape(1, -1)
        return tuple(int(leaf[0]) for leaf in self.tiling.leaves_of(coords))

    def _rank_at(self, leaves: tuple[int, ...], near: int) -> int:
        """Return who holds the tile of these intervals, at the coordinates of `near` else."""
        mesh = self.tiling.mesh
        coords = list(mesh.coords_of(near))
        for dims, leaf in zip(self.tiling.axis_dims, leaves, strict=True):
            for dim in reversed(dims):
                leaf, coords[dim] = divmod(leaf, mesh.dims[dim].size)
        offset = 0
        for size, place in zip(mesh.shape(), coords, strict=True):
            offset = offset * size + place
        return int(places_of(mesh).ranks[offset])


def cut_runs(bounds: Iterable[int], pieces: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Cut (at, length, start) where the intervals of an axis end; leave out what is empty."""
    edges = np.asarray(bounds)
    runs = []
    for at, length, start in pieces:
        while length > 0:
            leaf = int(np.searchsorted(edges, start, "right")) - 1
            part = min(length, int(edges[leaf + 1]) - start)
            runs.append(Run(at, part, start, leaf))
            at, length, start = at + part, length - part, start + part
    return tuple(runs)


def wrapped_runs(start: int, stop: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Return (at, length, start) of elements `start` to `stop` of an axis that repeats itself.

    Example:
        >>> list(wrapped_runs(-1, 4, 3))
        [(0, 1, 2), (1, 3, 0), (4, 1, 0)]
    """
    at = start
    while at < stop:
        part = min(stop - at, length - at % length)
        yield at - start, part, at % length
        at += part


def once(function: Callable[[int], tuple[Run, ...]]) -> Callable[[int], tuple[Run, ...]]:
    """Keep what a function gives for each interval."""
    return lru_cache(maxsize=None)(function)


def _boxes(runs: tuple[Run, ...]) -> Box:
    return tuple((run.start, run.start + run.length) for run in runs)


def _targets(runs: tuple[Run, ...]) -> Box:
    return tuple((run.at, run.at + run.length) for run in runs)


# -- a shifted array -----------------------------------------------------------------------


def shift_reads(layout: Layout, shape: Sequence[int], steps: Sequence[int], wrap: bool) -> Reads:
    """Plan who reads what if element i of the result is element ``i - steps`` of the array.

    Args:
        layout: How the array lies, and the result, too.
        shape: Its global shape.
        steps: For each axis how far it is shifted; negative for towards its beginning.
        wrap: Whether what leaves an end comes back at the other. If not, nothing is read for it.

    Raises:
        LayoutError: If the layout does not fit `shape`.
    """
    tiling = layout.tiling(shape)
    runs_of = tuple(
        once(partial(_runs, bounds, step, wrap))
        for bounds, step in zip(tiling.bounds, steps, strict=True)
    )
    return Reads(tiling, runs_of)


def _runs(bounds: Integers, step: int, wrap: bool, leaf: int) -> tuple[Run, ...]:
    length, start, stop = int(bounds[-1]), int(bounds[leaf]), int(bounds[leaf + 1])
    if start == stop:
        return ()
    first, last = start - step, stop - step
    if wrap:
        return cut_runs(bounds, wrapped_runs(first, last, length))
    inside = max(first, 0), min(last, length)
    return cut_runs(bounds, [(inside[0] - first, inside[1] - inside[0], inside[0])])
