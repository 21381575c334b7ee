"""Arrays that another rank of the node reads where they lie, for as long as it wants.

A rank that *lends* an array writes a *ticket*: where in its arena the array begins, and where
the *cell* of this loan is. The ticket goes to the borrower as a message, which also
keeps the order of memory: what was written before it is there after it. The borrower gets an
array that cannot be written to. When nothing refers to that array any more, it
writes a zero into the cell, and the lender may use the memory again.

Neither waits for the other, and no byte of the array is copied. The lender keeps the
array alive as long as the loan lasts, be it for ever: what a borrower may still read, or
write a zero into, is never used for anything else.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.comm.arena import Arena
from mpimesh.errors import TransportError

__all__ = ["TICKET_BYTES", "Lending"]

TICKET_BYTES = 24
"""Size of a ticket: three numbers."""

_AT, _NBYTES, _CELL_AT = range(3)
_CELL_BYTES = 8
_CELLS_IN_BLOCK = 64


@dataclass(frozen=True, slots=True)
class _Loan:
    """A loan, as its lender sees it.

    Attributes:
        at: Where the cell is in the arena.
        cell: Not zero until the borrower gives the array back.
        array: What is lent.
    """

    at: int
    cell: memoryview[int]
    array: HostArray


class Lending:
    """The arrays that one rank lends to others of its node, and borrows from them.

    Args:
        arena: This rank's memory.
        memories: The memory of each rank that it can open, by rank.
        fence: Keeps what was read before apart from what is written after.
    """

    def __init__(
        self, arena: Arena, memories: Mapping[int, HostArray], fence: Callable[[], None]
    ) -> None:
        self._arena = arena
        self._fence = fence
        self._memories = dict(memories)
        # Through memoryviews, so that views of a borrowed array refer to it and not to the whole.
        self._buffers = {rank: memoryview(one) for rank, one in memories.items()}  # type: ignore[arg-type]
        self._free: list[tuple[int, memoryview[int]]] = []
        self._blocks: list[HostArray] = []
        self._loans: deque[_Loan] = deque()

    def reaches(self, rank: int) -> bool:
        """Tell whether `rank` reads this rank's memory, and the other way round."""
        return rank in self._memories

    # -- the lender ------------------------------------------------------------------

    def lend(self, array: HostArray) -> HostArray | None:
        """Lend a C-contiguous array; return the ticket, or None if it is not in the arena.

        Until it has come back nobody may write to it.

        Raises:
            TransportError: If there is no memory for the cell.
        """
        at = self._arena.find(array)
        if at < 0:
            return None
        cell_at, cell = self._free.pop() if self._free else self._new_cell()
        cell[0] = 1
        self._loans.append(_Loan(cell_at, cell, array))
        ticket: HostArray = np.array([at, array.nbytes, cell_at], np.int64).view(np.uint8)
        return ticket

    def sweep(self) -> None:
        """Let go of the arrays that have come back."""
        loans = self._loans
        for _ in range(len(loans)):
            loan = loans.popleft()
            if loan.cell[0]:
                loans.append(loan)
            else:
                self._free.append((loan.at, loan.cell))

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
            for memory in (*self._blocks, *(loan.array for loan in self._loans)):
                keep(memory)
        self._memories.clear()
        self._buffers.clear()

    def _new_cell(self) -> tuple[int, memoryview[int]]:
        block = self._arena.empty(_CELLS_IN_BLOCK * _CELL_BYTES)
        if block is None:
            raise TransportError("no memory is left that other ranks of the node can read")
        block[...] = 0
        self._blocks.append(block)
        start, numbers = self._arena.find(block), _numbers(block)
        self._free += [
            (start + _CELL_BYTES * place, numbers[place : place + 1])
            for place in range(_CELLS_IN_BLOCK)
        ]
        return self._free.pop()

    # -- the borrower ----------------------------------------------------------------

    def borrow(self, ticket: HostArray, rank: int) -> HostArray:
        """Return the bytes that `rank` lends by `ticket`; they go back when nobody refers to them.

        The array cannot be written to.
        """
        at, nbytes, _ = ticket.view(np.int64).tolist()
        part: HostArray = np.frombuffer(self._buffers[rank], np.uint8, nbytes, at)
        part.flags.writeable = False
        cell = self._cell(ticket, rank)
        weakref.finalize(part, _end, cell, self._fence, os.getpid()).atexit = False
        return part

    def give_back(self, ticket: HostArray, rank: int) -> None:
        """End a loan whose array nobody wants; a ticket of zeros is none."""
        if ticket.any():
            self._cell(ticket, rank)[0] = 0

    def _cell(self, ticket: HostArray, rank: int) -> memoryview[int]:
        at = int(ticket.view(np.int64)[_CELL_AT])
        return _numbers(self._memories[rank][at : at + _CELL_BYTES])


def _numbers(memory: HostArray) -> memoryview[int]:
    numbers: Any = memory.view(np.int64)
    return memoryview(numbers)


def _end(cell: memoryview[int], fence: Callable[[], None], pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the parent still reads the array
        fence()
        cell[0] = 0
