"""A rank's knowledge in one step of the arrays that pass between the stages.

Two modes. Where a batch is given whole, a stage has one interface for all microbatches: it is
announced once, kept for the next steps, and what drifts from it is refused. Where a batch is given
as microbatches, their shapes are *free*: each has interfaces of its own, every activation is
announced, and the announcement also tells which rows of the batch come, as ranks in the middle
of the pipeline were not given any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import ModuleStateError, TransportError
from mpimesh.parallel.interface import Interface

__all__ = ["FIRST_PIECE_BYTES", "Known", "length_of", "pieces"]

FIRST_PIECE_BYTES = 2048
"""Room for the first piece of an announcement, nearly always all of it."""

_MARK = b"mpimesh\0"
_LENGTH = np.dtype("<u8")


class Known:
    """The interfaces of stages, and the rows of microbatches.

    Args:
        interfaces: The interfaces that are known, by stage; completed here, but not where shapes
            are free.
        microbatches: The rows of each microbatch, counted in the global batch; None where that is
            not known.
        free: Whether each microbatch has shapes of its own.
    """

    def __init__(
        self,
        interfaces: dict[int, Interface],
        microbatches: Sequence[slice | None],
        *,
        free: bool = False,
    ) -> None:
        self.free = free
        self._interfaces = interfaces
        self._of_microbatches: dict[tuple[int, int], Interface] = {}
        self._spans = list(microbatches)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages whose interface is known for all microbatches."""
        return () if self.free else tuple(self._interfaces)

    def span(self, microbatch: int) -> slice:
        """Return the rows of a microbatch, counted in the global batch.

        Raises:
            ModuleStateError: If it has not been announced.
        """
        span = self._spans[microbatch]
        if span is None:
            raise ModuleStateError(f"nothing is known of the rows of microbatch {microbatch}")
        return span

    def rows(self, microbatch: int) -> int:
        """Return the number of rows of a microbatch."""
        span = self.span(microbatch)
        return int(span.stop - span.start)

    def interface(self, stage: int, microbatch: int) -> Interface | None:
        """Return the interface of a stage for a microbatch, None if it is not known yet."""
        if self.free:
            return self._of_microbatches.get((stage, microbatch))
        return self._interfaces.get(stage)

    def told(self, stage: int, microbatch: int) -> Interface:
        """Return the interface of a stage for a microbatch that has passed it.

        Raises:
            ModuleStateError: If it is not known.
        """
        interface = self.interface(stage, microbatch)
        if interface is None:
            raise ModuleStateError(f"nothing is known of the output of stage {stage}")
        return interface

    def learn(self, stage: int, microbatch: int, interface: Interface) -> None:
        """Note the interface of a stage, of all microbatches or of one."""
        if self.free:
            self._of_microbatches[stage, microbatch] = interface
        else:
            self._interfaces[stage] = interface

    def announcement(self, stage: int, microbatch: int) -> list[HostArray]:
        """Return the messages by which another rank learns an interface."""
        interface = self.told(stage, microbatch)
        span = self.span(microbatch)
        rows = [span.start, span.stop] if self.free else None
        return pieces(json.dumps([interface.to_json(), rows]).encode())

    def hear(self, stage: int, microbatch: int, text: HostArray) -> None:
        """Take in what :meth:`announcement` said."""
        interface, rows = json.loads(bytes(text))
        self.learn(stage, microbatch, Interface.from_json(interface))
        if rows is not None and self._spans[microbatch] is None:
            self._spans[microbatch] = slice(*rows)


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
