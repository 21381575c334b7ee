"""Notes of the ranks of a node about an operation, told without waiting.

Whether an operation can work in place depends on where all ranks' arrays lie, and a
rank knows only its own. So each posts a note on its *board*: where its arrays are, or
that one of them is an ordinary array. Who posted the latter need not look at the
other notes: all will take another way, and it can do so at once. The others
wait until they have seen an ordinary array, or the notes of all.

Order, on which this rests
1. Notes have numbers, in the order of the operations, which is the same on all ranks.
   The number is written last: where it stands, the note is whole.
2. Note s stands in slot ``s % SLOTS``. It is written over by note ``s + SLOTS``, once every
   rank has said that it is through with note s of all others.
3. A rank says so of note s once it has looked at all notes s that it needs, and for an exchange of
   regions once it has read what lies where they say. It is through with all earlier ones by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["BOARD_NUMBERS", "SLOTS", "Board", "Boards", "Entry", "Note", "Room"]

Boards: TypeAlias = tuple[memoryview, ...]
"""The boards of some ranks, in their order."""

Note: TypeAlias = tuple[int, int, int]
"""An operation's number, and where its input and its result begin, or what else they stand for."""

SLOTS = 64
"""Number of operations by which a rank may be ahead of another."""

_THROUGH = 0
_SLOTS_AT = 8
"""In numbers of 8 bytes: what changes with every operation has a cache line of its own."""

_WHAT, _SOURCE, _TARGET, _NUMBER = range(4)
_SLOT_NUMBERS = 4
BOARD_NUMBERS = _SLOTS_AT + SLOTS * _SLOT_NUMBERS


@dataclass(frozen=True, slots=True)
class Entry:
    """The notes of all members at the beginning of an operation.

    Attributes:
        what: Which operation it is.
        sources: Where their inputs begin in their arenas; -1 for an ordinary array.
        targets: Where their results begin.
        counts: What each sends to each, and what each receives from each; empty if not asked for.
    """

    what: list[int]
    sources: list[int]
    targets: list[int]
    counts: list[list[int]] = field(default_factory=list)


class Board:
    """The boards of all ranks of a team, of which this rank writes its own.

    Args:
        rank: This rank's place.
        boards: `BOARD_NUMBERS` numbers of each rank, zero at first.
        fence: Keeps what was written before apart from what comes after.

    Attributes:
        posted: The number of this rank's last note.
    """

    def __init__(
        self, rank: int, boards: Sequence[memoryview[int]], fence: Callable[[], None]
    ) -> None:
        self.posted = 0
        self._boards = boards
        self._mine = boards[rank]
        self._others = [board for place, board in enumerate(boards) if place != rank]
        self._fence = fence
        self._through = 0

    def has_room(self) -> bool:
        """Tell whether the next note may be written."""
        if self.posted < self._through + SLOTS:
            return True
        self._through = min((board[_THROUGH] for board in self._others), default=self.posted)
        self._fence()
        return self.posted < self._through + SLOTS

    def of(self, places: Iterable[int]) -> Boards:
        """Return the boards of some ranks."""
        return tuple([self._boards[place] for place in places])

    def are_through(self, number: int, of: Boards) -> bool:
        """Tell whether these ranks are through with the notes up to this number."""
        for board in of:
            if board[_THROUGH] < number:
                return False
        self._fence()
        return True

    def have_posted(self, number: int, of: Boards) -> bool:
        """Tell whether these ranks have posted their notes of this number, whatever they say."""
        at = _at(number) + _NUMBER
        for board in of:
            if abs(board[at]) != number:
                return False
        self._fence()
        return True

    def notes(self, number: int, of: Boards) -> list[Note]:
        """Return the notes of ranks that have posted them, and that this one is not through with.

        The operation is -1 for a rank that has declined to say.
        """
        at = _at(number)
        return [
            (
                board[at + _WHAT] if board[at + _NUMBER] == number else -1,
                board[at + _SOURCE],
                board[at + _TARGET],
            )
            for board in of
        ]

    def post(self, number: int, what: int, source: int, target: int) -> None:
        """Post where this rank's arrays lie. A second call with the same number changes nothing.

        Args:
            number: The next one.
            what: The operation.
            source: Where the input begins in this rank's arena.
            target: The same for its result, if others are to write it.
        """
        mine = self._mine
        at = _at(number)
        mine[at + _WHAT] = what
        mine[at + _SOURCE] = source
        mine[at + _TARGET] = target
        self._fence()
        mine[at + _NUMBER] = number
        self.posted = number

    def decline(self) -> None:
        """Post that this rank has an ordinary array, and will not look at the others' notes."""
        number = self.posted + 1
        self._mine[_at(number) + _NUMBER] = -number
        self._mine[_THROUGH] = number
        self.posted = number

    def read(self, number: int) -> bool | None:
        """Tell whether all ranks have posted where their arrays lie; None if it is too early."""
        at = _at(number) + _NUMBER
        answer: bool | None = True
        for board in self._others:
            found = board[at]
            if found == -number:
                return False
            if found != number:
                answer = None
        self._fence()
        return answer

    def told(self, number: int) -> tuple[int, ...]:
        """Return the notes of all ranks in a row, once :meth:`read` is True."""
        at = _at(number)
        places = (at + _WHAT, at + _SOURCE, at + _TARGET)
        return tuple([board[place] for board in self._boards for place in places])

    def entry(self, number: int) -> Entry:
        """Return what all ranks have posted, once :meth:`read` is True."""
        at = _at(number)
        boards = self._boards
        return Entry(
            [board[at + _WHAT] for board in boards],
            [board[at + _SOURCE] for board in boards],
            [board[at + _TARGET] for board in boards],
        )

    def pass_by(self, number: int) -> None:
        """Say that this rank needs the notes of this number no more."""
        self._fence()
        self._mine[_THROUGH] = number


class Room:
    """The request that is done when there is room for a note."""

    __slots__ = ("_board", "_look_elsewhere")

    def __init__(self, board: Board, look_elsewhere: Callable[[], None]) -> None:
        self._board = board
        self._look_elsewhere = look_elsewhere

    def test(self) -> bool:
        """Tell whether there is."""
        if self._board.has_room():
            return True
        self._look_elsewhere()
        return False


def _at(number: int) -> int:
    return _SLOTS_AT + number % SLOTS * _SLOT_NUMBERS
