"""Ordinary arrays on their way through the stage: whole, or a chunk of every block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpimesh.arrays.types import HostArray
from mpimesh.transport.team import Team

__all__ = ["Compartments", "stage"]

_LINE_BYTES = 64


def stage(team: Team, chunk: HostArray) -> None:
    """Stage a chunk for the next meeting."""
    team.inputs(chunk.dtype, chunk.size, coming=1)[team.rank][...] = chunk


class Compartments:
    """The stage cut into one room for each block of an array, of which each round fills a chunk.

    Args:
        team: The ranks, as many as there are blocks.
        counts: Elements of this rank's blocks, which follow each other.
        itemsize: Bytes of an element.
    """

    __slots__ = ("_counts", "_starts", "_team", "width")

    def __init__(self, team: Team, counts: Sequence[int], itemsize: int) -> None:
        self._team = team
        self._counts = counts
        self._starts = [0, *accumulate(counts)]
        lines = team.stage_bytes // (team.size * _LINE_BYTES)
        self.width = lines * _LINE_BYTES // itemsize

    def rounds(self, largest: int) -> int:
        """Return how many rounds blocks of up to `largest` elements take; at least one."""
        return max(1, -(-largest // self.width))

    def chunk(self, block: int, number: int) -> tuple[int, slice]:
        """Return where a block's chunk lies in the stage, and its elements in the block."""
        start = min(number * self.width, self._counts[block])
        stop = min(start + self.width, self._counts[block])
        return block * self.width, slice(start, stop)

    def stage(self, source: HostArray, number: int) -> None:
        """Stage a chunk of every block for the next meeting."""
        room = self._team.inputs(source.dtype, coming=1)[self._team.rank]
        for block, begin in enumerate(self._starts[:-1]):
            place, part = self.chunk(block, number)
            size = part.stop - part.start
            room[place : place + size] = source[begin + part.start : begin + part.stop]
