"""Preparations of an exchange of regions, made once for arrays of one kind.

Who reads of whom, what is copied before others read it, and the calls of NumPy that read, as
far as they are the same again: arrays come and go, but the places where they lie come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from math import prod

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MismatchError
from mpimesh.transport.board import Note
from mpimesh.transport.boxes import view, volume
from mpimesh.transport.region_moves import Blocks
from mpimesh.transport.region_work import Piece, piece_work, pieces_of
from mpimesh.transport.regions import Regions, raw_dtype
from mpimesh.transport.team import Team
from mpimesh.transport.team_regions import (
    Copies,
    CopyRule,
    Fill,
    Offer,
    compare,
    copied_boxes,
    described,
    size_told,
)
from mpimesh.transport.team_work import Work

__all__ = ["Ready"]

_MOST_WORK = 64
"""So many pieces of work are kept for one kind of exchange: addresses come again and again."""

_MOST_PIECES = 64
"""Of larger exchanges, working the pieces out costs nothing beside reading them."""

_AT_ONCE_BYTES = 256 * 1024
"""Size up to which all is read at once."""


class Ready:
    """The constant part of an exchange of some regions between arrays of one kind.

    Args:
        team: The ranks.
        regions: What this rank takes and gives.
        source: An array of the kind of this rank's block; nothing of it is kept.
        target: One of the kind of what it takes into.

    Attributes:
        regions: As given.
        told: What this rank says of its arrays.
        owners: The ranks that this one reads of.
        owner_boards: Their boards.
        owner_bells: Their bells.
        reader_boards: The boards of the ranks that read of this one.
        reader_bells: Their bells.
    """

    __slots__ = (
        "_at_once",
        "_boxes",
        "_fills",
        "_given_bytes",
        "_groups",
        "_nbytes",
        "_team",
        "_wholes",
        "_work",
        "owner_bells",
        "owner_boards",
        "owners",
        "reader_bells",
        "reader_boards",
        "regions",
        "told",
    )

    def __init__(
        self, team: Team, regions: Regions, source: HostArray | None, target: HostArray | None
    ) -> None:
        self._team = team
        self.regions = regions
        self.told = described(source, target)
        taken = {part.rank for take in regions.takes for part in take.parts if volume(part.box)}
        given = {give.rank for give in regions.gives if volume(give.box)}
        self.owners = sorted(taken - {team.rank})
        readers = sorted(given - {team.rank})
        self.owner_boards = team.board.of(self.owners)
        self.owner_bells = team.bells_of(self.owners)
        self.reader_boards = team.board.of(readers)
        self.reader_bells = team.bells_of(readers)
        self._boxes = copied_boxes(regions, source.shape) if readers and source is not None else ()
        self._nbytes = self._given_bytes = 0
        if source is not None:
            self._nbytes = source.nbytes
            self._given_bytes = source.itemsize * sum(map(volume, self._boxes))
        self._fills: dict[tuple[int, int], Fill] = {}
        # Pieces of the same ranks in a row: their work depends on where these ranks' blocks lie.
        self._groups: list[tuple[tuple[int, ...], list[Piece]]] = []
        if target is not None and target.nbytes:
            itemsize = target.dtype.itemsize
            pieces = pieces_of(regions, range(len(regions.takes)), team.rank + 1, itemsize)
            self._groups = [(ranks, list(row)) for ranks, row in groupby(pieces, _ranks_of)]
        self._at_once = target is not None and target.nbytes <= _AT_ONCE_BYTES
        self._wholes: dict[tuple[object, ...], list[Work]] = {}
        self._work: dict[tuple[int, ...], list[Work]] | None = None
        if sum(len(row) for _, row in self._groups) <= _MOST_PIECES:
            self._work = {}

    def offer(self, copies: Copies, source: HostArray | None, at: int, rule: CopyRule) -> Offer:
        """Offer this rank's block, which begins at `at` of its arena, to its readers."""
        return copies.offer(
            source,
            self._boxes,
            self.reader_boards,
            at=at,
            copied=rule.copies(self._nbytes, self._given_bytes),
            kept=self._fills,
        )

    def work(
        self,
        notes: Sequence[Note],
        source: HostArray | None,
        source_at: int,
        target: HostArray | None,
        target_at: int,
    ) -> list[Work]:
        """Return what to read, once the owners have said where their blocks lie.

        Raises:
            MismatchError: On this rank alone, if a block has another dtype, or not the size that it
                takes of.
        """
        key = (source_at, target_at, *notes)
        whole = self._wholes.get(key)
        if whole is None:
            self.compare(notes)
            whole = self._of_all(notes, source, source_at, target, target_at)
            if self._at_once and whole:
                whole = [tuple(chain.from_iterable(whole))]
            if target_at >= 0 and (source_at >= 0 or source is None) and self._work is not None:
                if len(self._wholes) >= _MOST_WORK:
                    self._wholes.clear()
                self._wholes[key] = whole
        return whole

    def compare(self, notes: Sequence[Note]) -> None:
        """See whether the owners' arrays have the dtype of this rank's.

        Raises:
            MismatchError: If not.
        """
        told = {owner: note[2] for owner, note in zip(self.owners, notes, strict=True)}
        compare({self._team.rank: self.told, **told})

    def _of_all(
        self,
        notes: Sequence[Note],
        source: HostArray | None,
        source_at: int,
        target: HostArray | None,
        target_at: int,
    ) -> list[Work]:
        """Return all pieces of work, of which those that came before are not made again."""
        if target is None:
            return []
        team = self._team
        places = {owner: note[1] for owner, note in zip(self.owners, notes, strict=True)}
        told = {owner: note[2] for owner, note in zip(self.owners, notes, strict=True)}
        places[team.rank], told[team.rank] = source_at, 0
        work: list[Work] = []
        kept = self._work if target_at >= 0 else None
        for number, (ranks, pieces) in enumerate(self._groups):
            if kept is None or (source_at < 0 and team.rank in ranks):
                work += self._of(pieces, told, places, source, target)
                continue
            key = (number, target_at, *[places[rank] for rank in ranks])
            key += tuple([told[rank] for rank in ranks])
            found = kept.get(key)
            if found is None:
                # Only of memory in the arena: nothing that is kept refers to the arrays themselves.
                mine = self._reached(target, target_at)
                own = source
                if source is not None and team.rank in ranks:
                    own = self._reached(source, source_at)
                found = self._of(pieces, told, places, own, mine)
                if len(kept) >= _MOST_WORK:
                    kept.clear()
                kept[key] = found
            work += found
        return work

    def _reached(self, array: HostArray, at: int) -> HostArray:
        """Return an array of this rank's arena as one that does not keep it alive."""
        team = self._team
        return team.view(team.rank, at, array.nbytes, array.dtype).reshape(array.shape)

    def _of(
        self,
        pieces: Sequence[Piece],
        told: dict[int, int],
        places: dict[int, int],
        source: HostArray | None,
        target: HostArray,
    ) -> list[Work]:
        team = self._team
        dtype, raw = target.dtype, raw_dtype(target.dtype)
        raw_target = target.view(raw)
        blocks: dict[tuple[int, tuple[int, ...]], HostArray] = {}

        def block(rank: int, shape: tuple[int, ...]) -> HostArray:
            found = blocks.get((rank, shape))
            if found is None:
                if rank == team.rank and source is not None:
                    found = source
                else:
                    nbytes = self._expected(rank, shape, told[rank], target)
                    found = team.view(rank, places[rank], nbytes, dtype).reshape(shape)
                blocks[rank, shape] = found
            return found

        work: list[Work] = []
        for op, box, parts in pieces:
            if op:
                sources = [view(block(rank, shape), there) for rank, shape, there in parts]
                work.append(piece_work(op, view(target, box), sources, dtype, team.scratch))
            else:
                rank, shape, there = parts[0]
                what = view(block(rank, shape).view(raw), there)
                work.append((partial(np.copyto, view(raw_target, box), what),))
        return work

    def _expected(self, rank: int, shape: tuple[int, ...], told: int, target: HostArray) -> int:
        """Return how many bytes the block of a rank is taken to have.

        Raises:
            MismatchError: If it has another size.
        """
        nbytes = prod(shape) * target.itemsize
        if size_told(told) != nbytes:
            raise MismatchError(
                f"rank {self._team.rank} takes of a block of shape {shape} of rank {rank}, "
                f"{nbytes} bytes of dtype {target.dtype}, but that block has {size_told(told)}"
            )
        return nbytes

    def near(
        self, notes: Sequence[Note], source: HostArray | None, target: HostArray | None
    ) -> Blocks:
        """Return what gives the blocks that this rank reads where they lie, though not all do."""
        like: HostArray = np.empty(0, np.uint8) if target is None else target
        blocks: dict[int, Callable[[tuple[int, ...]], HostArray]] = {}
        for owner, (_, at, told) in zip(self.owners, notes, strict=True):
            if at >= 0:
                blocks[owner] = partial(self._near, owner, at, told, like)
        if source is not None:
            blocks[self._team.rank] = lambda shape: source
        return blocks

    def _near(
        self, owner: int, at: int, told: int, like: HostArray, shape: tuple[int, ...]
    ) -> HostArray:
        nbytes = self._expected(owner, shape, told, like)
        return self._team.view(owner, at, nbytes, like.dtype).reshape(shape)


def _ranks_of(piece: Piece) -> tuple[int, ...]:
    return tuple([rank for rank, _, _ in piece[2]])
