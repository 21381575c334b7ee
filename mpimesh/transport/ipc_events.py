"""Interprocess events: each rank records its own, the streams of all others wait for them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpimesh.errors import TransportError
from mpimesh.transport.device_work import Lane

__all__ = ["EVENT", "NAMES", "OwnEvents", "PeerEvents"]

NAMES = ("ready", "read")

EVENT = np.dtype(
    [("process", np.int64), ("pointer", np.int64), ("handle", np.uint8, 64), ("good", np.uint8)]
)
"""Fields that another process needs to open an event; within one process, its pointer."""


class OwnEvents:
    """The events of this rank.

    Args:
        process: What tells this process from all others of the node.
    """

    def __init__(self, *, process: int) -> None:
        cuda: Any = sys.modules["cupy"].cuda
        self.events = {name: cuda.Event(False, True, interprocess=True) for name in NAMES}
        self.records = np.zeros(len(NAMES), EVENT)
        for record, event in zip(self.records, self.events.values(), strict=True):
            record["process"], record["pointer"] = process, event.ptr
            handle = cuda.runtime.ipcGetEventHandle(event.ptr)
            record["handle"], record["good"] = np.frombuffer(handle, np.uint8), 1


class PeerEvents:
    """The events of all ranks.

    Args:
        own: Those of this rank.
        records: Those of all ranks, one row for each.
        rank: This rank.
        process: What tells this process from all others of the node.

    Raises:
        TransportError: If one cannot be opened.
    """

    def __init__(self, own: OwnEvents, records: Any, rank: int, *, process: int) -> None:
        self._own = own
        self._runtime: Any = sys.modules["cupy"].cuda.runtime
        self._opened: list[int] = []
        self._others: dict[str, list[int]] = {name: [] for name in NAMES}
        for peer, row in enumerate(records):
            for name, record in zip(NAMES, row, strict=True):
                if peer != rank:
                    self._others[name].append(self._open(record, process))

    def record(self, name: str, lane: Lane) -> None:
        """Record this rank's event on the lane."""
        with lane.device:
            self._own.events[name].record(lane.stream)

    def wait(self, name: str, lane: Lane) -> None:
        """Let the lane wait for the events of all other ranks."""
        for event in self._others[name]:
            self._runtime.streamWaitEvent(lane.stream.ptr, event)

    def close(self) -> None:
        """Give the opened events back. A second call does nothing."""
        self._others = {name: [] for name in NAMES}
        while self._opened:
            self._runtime.eventDestroy(self._opened.pop())

    def _open(self, record: Any, process: int) -> int:
        if record["process"] == process:
            return int(record["pointer"])
        try:
            event: int = self._runtime.ipcOpenEventHandle(record["handle"].tobytes())
        except self._runtime.CUDARuntimeError as error:
            raise TransportError(f"CUDA cannot open the event of another rank: {error}") from None
        self._opened.append(event)
        return event
