"""The note by which a failed rank ends the waits of the others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpimesh.comm import RecvRequest, Request
from mpimesh.parallel.tags import ALARM_TAG
from mpimesh.runtime import ProcessGroup

__all__ = ["Alarm", "AlarmedError"]


class AlarmedError(Exception):
    """Another rank has failed: leave the step."""


class Alarm:
    """The alarm of one step, over the ranks that leave it together.

    A rank that fails sounds it, once. It only wakes: what happened, and on which
    ranks, is exchanged afterwards, when all have come out of their waits.
    """

    def __init__(self, scope: ProcessGroup) -> None:
        self._scope = scope
        self._sends: list[Request] = []
        self.sounded = False

    def sound(self) -> None:
        """Tell all other ranks. Never waits."""
        if self.sounded:
            return
        self.sounded = True
        communicator = self._scope.communicator
        note = np.ones(1, np.uint8)
        self._sends = [
            communicator.isend(note, peer, ALARM_TAG)
            for peer in range(self._scope.size)
            if peer != self._scope.rank
        ]

    def look(self) -> None:
        """Raise AlarmedError if another rank has sounded the alarm."""
        if self._scope.size > 1 and self._scope.communicator.probe(ALARM_TAG) is not None:
            raise AlarmedError

    def collect(self, sounders: Iterable[int]) -> list[Request]:
        """Take in the notes of all `sounders`, so that none is left for a later step.

        Returns:
            What must be waited for, with this rank's own notes.
        """
        receives: list[RecvRequest] = [
            self._scope.communicator.irecv(np.empty(1, np.uint8), peer, ALARM_TAG)
            for peer in sounders
            if peer != self._scope.rank
        ]
        return [*receives, *self._sends]
