"""What a rank knows in one step of the arrays that pass between the stages."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import TransportError
from mpimesh.parallel.interface import Interface

__all__ = ["FIRST_PIECE_BYTES", "Known", "length_of", "pieces"]

FIRST_PIECE_BYTES = 2048
"""Room for the first piece of an announcement, nearly always all of it."""

_MARK = b"mpimesh\0"
_LENGTH = np.dtype("<u8")


class Known:
    """The interfaces of stages, and the rows of microbatches.

    Args:
        interfaces: The interfaces that are known, by stage; completed here.
        microbatches: The rows of each microbatch, counted in the global batch.
    """

    def __init__(self, interfaces: dict[int, Interface], microbatches: Sequence[slice]) -> None:
        self._interfaces = interfaces
        self._microbatches = microbatches

    def span(self, microbatch: int) -> slice:
        """Return the rows of a microbatch, counted in the global batch."""
        return self._microbatches[microbatch]

    def rows(self, microbatch: int) -> int:
        """Return the number of rows of a microbatch."""
        span = self.span(microbatch)
        return int(span.stop - span.start)

    def interface(self, stage: int) -> Interface | None:
        """Return the interface of a stage, None if it is not known yet."""
        return self._interfaces.get(stage)

    def learn(self, stage: int, interface: Interface) -> None:
        """Note the interface of a stage."""
        self._interfaces[stage] = interface

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages whose interface is known."""
        return tuple(self._interfaces)

    def announcement(self, stage: int) -> list[HostArray]:
        """Return the messages by which another rank learns a stage's interface."""
        return pieces(json.dumps(self._interfaces[stage].to_json()).encode())

    def hear(self, stage: int, text: HostArray) -> None:
        """Take in what :meth:`announcement` said."""
        self._interfaces[stage] = Interface.from_json(json.loads(bytes(text)))


def pieces(text: bytes) -> list[HostArray]:
    """Return a text of any length as messages: its length and beginning, then what is left."""
    data = _MARK + np.array(len(text), _LENGTH).tobytes() + text
    cut = np.split(np.frombuffer(data, np.uint8).copy(), [FIRST_PIECE_BYTES])
    return [piece for piece in cut if piece.size]


def length_of(first: HostArray) -> tuple[int, HostArray]:
    """Return the bytes of a text that are still to come after its first piece, and that part.

    Raises:
        TransportError: If this is no first piece, but data of ranks that were given another kind of
            batch.
    """
    start = len(_MARK) + _LENGTH.itemsize
    if bytes(first[: len(_MARK)]) != _MARK or first.size < start:
        raise TransportError("data came where an announcement of its shape was expected")
    total = int(first[len(_MARK) : start].view(_LENGTH)[0])
    return total - (first.size - start), first[start:]
