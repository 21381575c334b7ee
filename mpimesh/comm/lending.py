"""Arrays that another rank of the node reads where they lie, for as long as it wants.

A *row* goes from one rank, the lender, to another, the borrower. Of each array the lender writes an
*entry* into its own arena: where the array begins, how long it is, and where the row's next entry
will be. The entry's *state* is written last. The borrower, which knows where the first entry is,
looks at the state of the next one: once it is not zero, the array may be read. It gets an array
that cannot be written to. When nothing refers to that array any more, it writes into the state that
the loan has ended, and the lender may use the memory, and the entry, again.

No message passes, neither waits for the other, and no byte of the array is copied. The lender keeps
the array alive as long as the loan lasts, be it for ever: what a borrower may still read, or
write a state into, is never used for anything else.

Order
1. *An entry that is seen is whole, and so is the array.* The state is stored after all of it, and
   loaded before all of it. Loads and stores of x86-64 keep that order; on other processors the
   fence stands in between on both sides.
2. *The next entry has no state when its place is told*: the lender sets it to zero before it stores
   the state of the entry that names it, and nobody else writes to an entry that is not lent.
3. *An entry is used again only after the loan has ended*, and by then the borrower has read from it
   where the next one is.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import DType, HostArray
from mpimesh.comm.arena import Arena, door_of
from mpimesh.errors import TransportError

__all__ = ["Borrowing", "Lending", "LendingRow"]

_STATE, _AT, _NBYTES, _NEXT = range(4)
_FREE, _LENT, _NOTE, _ENDED = range(4)
_NUMBER_BYTES = 8
_ENTRY_NUMBERS = 4
_ENTRIES_IN_BLOCK = 64


class Lending:
    """The arrays that one rank lends to others of its node, and borrows from them.

    Args:
        arena: This rank's memory.
        memories: The memory of each rank that it can open, by rank.
        fence: Keeps what was read before apart from what is written after.

    Attributes:
        fence: The same.
        numbers: This rank's memory as numbers of eight bytes.
    """

    def __init__(
        self, arena: Arena, memories: Mapping[int, HostArray], fence: Callable[[], None]
    ) -> None:
        self.fence = fence
        self.numbers = _numbers(arena.memory)
        self._arena = arena
        self._memories = dict(memories)
        self._free: list[int] = []
        self._blocks: list[HostArray] = []
        self._loans: deque[tuple[int, HostArray]] = deque()

    def reaches(self, rank: int) -> bool:
        """Tell whether `rank` reads this rank's memory, and the other way round."""
        return rank in self._memories

    def row(self, rank: int) -> LendingRow:
        """Return a new row of what this rank lends to `rank`. Local.

        Raises:
            TransportError: If there is no memory for its first entry.
        """
        return LendingRow(self, door_of(self._memories[rank]).ring)

    def borrowing(self, rank: int, start: int) -> Borrowing:
        """Return the other end of the row of `rank` that begins at `start`. Local."""
        return Borrowing(self._memories[rank], start, self.fence)

    def find(self, array: HostArray) -> int:
        """Return where an array begins in this rank's arena; -1 for an ordinary one."""
        return self._arena.find(array)

    def sweep(self) -> None:
        """Let go of the arrays that have come back."""
        loans, numbers = self._loans, self.numbers
        for _ in range(len(loans)):
            loan = loans.popleft()
            if numbers[loan[0]] == _ENDED:
                self._free.append(loan[0])
            else:
                loans.append(loan)

    @property
    def num_lent(self) -> int:
        """Number of arrays that have not come back."""
        self.sweep()
        return len(self._loans)

    def close(self, keep: Callable[[HostArray], None]) -> None:
        """Lend no more.

        Args:
            keep: Called with each piece of memory that a borrower may still look at.
        """
        self.sweep()
        if self._loans:
            for memory in (*self._blocks, *(array for _, array in self._loans)):
                keep(memory)
        self._memories.clear()

    # -- for rows --------------------------------------------------------------------

    def new_entry(self) -> int:
        """Return the place of an entry without a state, counted in numbers.

        Raises:
            TransportError: If there is no memory for it.
        """
        if not self._free:
            self.sweep()
        if not self._free:
            block = self._arena.empty(_ENTRIES_IN_BLOCK * _ENTRY_NUMBERS * _NUMBER_BYTES)
            if block is None:
                raise TransportError("no memory is left that other ranks of the node can read")
            self._blocks.append(block)
            start = self._arena.find(block) // _NUMBER_BYTES
            self._free = [start + _ENTRY_NUMBERS * place for place in range(_ENTRIES_IN_BLOCK)]
        entry = self._free.pop()
        self.numbers[entry] = _FREE
        return entry

    def keep(self, entry: int, array: HostArray) -> None:
        """Keep an array alive until its loan has ended."""
        self._loans.append((entry, array))


class LendingRow:
    """The lender's end of the arrays that one rank lends to another, in order.

    Attributes:
        start: Where its first entry is in the lender's arena, for the borrower.
    """

    __slots__ = ("_fence", "_lending", "_next", "_numbers", "_ring", "start")

    def __init__(self, lending: Lending, ring: Callable[[], None] | None) -> None:
        self._lending = lending
        self._numbers = lending.numbers
        self._fence = lending.fence
        self._ring = ring
        self._next = self.start = lending.new_entry()

    def lend(self, array: HostArray, at: int, *, is_note: bool = False) -> None:
        """Lend a C-contiguous array that begins at `at` of the arena.

        Until it has come back nobody may write to it.

        Args:
            array: The array.
            at: Where it begins, as :meth:`Lending.find` tells.
            is_note: Whether the borrower is to see that it is no array like the others.

        Raises:
            TransportError: If there is no memory for the row's next entry; then it is not lent.
        """
        lending, numbers, entry = self._lending, self._numbers, self._next
        following = lending.new_entry()
        numbers[entry + _AT] = at
        numbers[entry + _NBYTES] = array.nbytes
        numbers[entry + _NEXT] = following
        lending.keep(entry, array)
        self._next = following
        self._fence()
        numbers[entry] = _NOTE if is_note else _LENT
        if self._ring is not None:
            self._ring()


class Borrowing:
    """The borrower's end of the arrays that one rank lends to another, in order.

    Args:
        memory: The lender's arena, as this process has it mapped.
        start: Where the row's first entry is in it.
        fence: As for :class:`Lending`.
    """

    __slots__ = ("_buffer", "_entry", "_fence", "_numbers")

    def __init__(self, memory: HostArray, start: int, fence: Callable[[], None]) -> None:
        # By a memoryview, so that views of a borrowed array refer to it and not to the whole.
        self._buffer = memoryview(memory).toreadonly()  # type: ignore[arg-type]
        self._numbers = _numbers(memory)
        self._entry = start
        self._fence = fence

    def has_come(self) -> bool:
        """Tell whether there is a next array."""
        return self._numbers[self._entry] != _FREE

    @property
    def nbytes(self) -> int:
        """Bytes of the next array, which has come; -1 for a note."""
        self._fence()
        entry = self._entry
        return -1 if self._numbers[entry] == _NOTE else self._numbers[entry + _NBYTES]

    def take(self, shape: Sequence[int], dtype: DType) -> HostArray:
        """Borrow the next array, which has come; it goes back when nobody refers to it.

        It cannot be written to.
        """
        numbers, entry = self._numbers, self._entry
        self._fence()
        # Not np.ndarray, which refers to what lies behind the memoryview.
        part: HostArray = np.frombuffer(
            self._buffer, np.uint8, numbers[entry + _NBYTES], numbers[entry + _AT]
        )
        self._entry = numbers[entry + _NEXT]
        loan = _Loan(part, _end)
        loan.numbers, loan.entry, loan.fence, loan.pid = numbers, entry, self._fence, os.getpid()
        _BORROWED[id(loan)] = loan
        return part.view(dtype).reshape(shape)

    def take_note(self) -> HostArray:
        """Borrow the next array, which has come and is a note, as bytes."""
        return self.take((self._numbers[self._entry + _NBYTES],), _BYTES)

    def skip(self) -> None:
        """End the loan of the next array, which has come and which nobody wants."""
        numbers, entry = self._numbers, self._entry
        self._fence()
        self._entry = numbers[entry + _NEXT]
        numbers[entry] = _ENDED


class _Loan(weakref.ref[HostArray]):
    """A borrowed array, and where the end of the loan is told."""

    __slots__ = ("entry", "fence", "numbers", "pid")

    numbers: memoryview[int]
    entry: int
    fence: Callable[[], None]
    pid: int


_BORROWED: dict[int, _Loan] = {}
"""All arrays that are borrowed by this process, whoever has let go of the rows by now."""

_BYTES: DType = np.dtype(np.uint8)


def _end(loan: Any) -> None:
    """Tell that a loan has ended: nothing refers to its array any more."""
    if sys.is_finalizing():
        return  # MPI, whose fence it may be, has ended
    _BORROWED.pop(id(loan), None)
    if os.getpid() == loan.pid:  # in a forked child the parent still reads the array
        loan.fence()
        loan.numbers[loan.entry] = _ENDED


def _numbers(memory: HostArray) -> memoryview[int]:
    numbers: Any = memory[: memory.nbytes // _NUMBER_BYTES * _NUMBER_BYTES].view(np.int64)
    return memoryview(numbers)
