"""Collectives under way between virtual ranks: they gather until all have come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MpimeshError
from mpimesh.transport.mailbox import Mailbox
from mpimesh.transport.signatures import BOARD_BYTES, Signatures
from mpimesh.transport.virtual_moves import Contribution

__all__ = ["CollectiveRequest", "Context", "Slot"]


@dataclass(slots=True)
class Slot:
    """One collective: what each rank brought, until all have and the bytes are moved."""

    contributions: dict[int, Contribution] = field(default_factory=dict)
    done: bool = False
    error: MpimeshError | None = None
    outcome: object = None


@dataclass(slots=True)
class Context:
    """The state that the ranks of one communicator share."""

    messages: Mailbox
    slots: dict[int, Slot] = field(default_factory=dict)
    boards: dict[int, HostArray] = field(default_factory=dict)

    def signatures(self, rank: int, size: int) -> Signatures | None:
        """Return what the ranks compare with each other; None for a rank alone."""
        if size == 1:
            return None
        boards = [
            self.boards.setdefault(one, np.zeros(BOARD_BYTES, np.uint8)) for one in range(size)
        ]
        return Signatures(rank, range(size), boards, refuses=False)


class CollectiveRequest:
    """The request of one rank for one collective."""

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def test(self) -> bool:
        """Tell whether all ranks have joined and the bytes are moved."""
        if self._slot.error is not None:
            raise type(self._slot.error)(*self._slot.error.args)
        return self._slot.done
