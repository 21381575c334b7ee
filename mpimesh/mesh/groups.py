"""Named groups of ranks, as records: what they are, not yet how they communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpimesh.arguments import as_int, as_items, shown
from mpimesh.errors import GroupError, RankError
from mpimesh.mesh.ids import DeviceIds

__all__ = ["WORLD", "GroupSpec", "check_group_name"]

_MOST_NAME = 200
"""Most characters of a group's name: it goes along with each message of the group."""

WORLD = "world"
"""Name of the group of all ranks."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A named group of ranks.

    Attributes:
        name: Its name, unique in a world.
        ranks: World ranks in group order: the place of a rank is its rank in the group.

    Raises:
        GroupError: If the name is no text or too long, or ranks are missing, repeated or negative.
    """

    name: str
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        check_group_name(self.name)
        object.__setattr__(self, "ranks", _checked_ranks(self.name, self.ranks))

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def in_group(self, rank: int) -> bool:
        """Tell whether world rank `rank` is a member."""
        return rank in self.ranks

    def group_rank(self, rank: int) -> int | None:
        """Return the place of world rank `rank` in the group, None if it is no member."""
        return self.ranks.index(rank) if rank in self.ranks else None

    def check_in_world(self, world_size: int) -> None:
        """Check that all ranks exist.

        Raises:
            RankError: Naming the highest rank, if it does not.
        """
        _, highest = _bounds(self.ranks)
        if highest >= world_size:
            raise RankError(
                f"Rank {highest} out of bounds for world size {world_size} in group {self.name!r}"
            )


def check_group_name(name: object) -> None:
    """Raise if no group may be called `name`.

    Raises:
        GroupError: If it is no printable text, or too long.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise GroupError(f"a group's name must be printable text, got {shown(name)}")
    if len(name) > _MOST_NAME:
        raise GroupError(
            f"a group's name must have at most {_MOST_NAME} characters, got {len(name)}: "
            f"{shown(name)}"
        )


def _checked_ranks(name: str, ranks: Sequence[int]) -> Sequence[int]:
    if not isinstance(ranks, range | DeviceIds):
        ranks = tuple(
            as_int(rank, f"a rank of group {name!r}")
            for rank in as_items(ranks, f"ranks of group {name!r}", GroupError)
        )
        if len(set(ranks)) != len(ranks):
            twice = next(rank for k, rank in enumerate(ranks) if rank in ranks[:k])
            raise GroupError(f"group {name!r} has rank {twice} twice: {ranks}")
    if not len(ranks):
        raise GroupError(f"group {name!r} has no ranks; give at least one")
    lowest, _ = _bounds(ranks)
    if lowest < 0:
        raise RankError(f"Rank {lowest} out of bounds in group {name!r}: ranks start at 0")
    return ranks


def _bounds(ranks: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest of `ranks`, without a walk where there is arithmetic."""
    if isinstance(ranks, DeviceIds):
        return ranks.smallest, ranks.largest
    ends = (ranks[0], ranks[-1]) if isinstance(ranks, range) else ranks
    return min(ends), max(ends)
