"""The simplest device communicator: it waits for the caller's stream and lets the host move.

For tests of what stands above communicators. It holds its callers to the contract: arrays of the
fake CuPy, flat and contiguous, that may only be read once the stream of the call has come so far,
and whose results are there for that stream only.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpimesh.arrays import StreamScope
from mpimesh.comm.algorithms import Algorithms, Row

__all__ = ["StandInCommunicator", "stand_in"]


class _Reached:
    def __init__(self, event: Any, host: Any) -> None:
        self._event = event
        self._host = host

    def test(self) -> bool:
        if self._event.done:
            return True
        self._host.stir()
        return False


class StandInCommunicator:
    """Moves arrays of the fake CuPy over a communicator of their own.

    Attributes:
        calls: What was called.
        torn: How many inputs were written before they were read for the last time.
    """

    def __init__(self, host: Any) -> None:
        self._host = host
        self._own: Any = None  # for collectives, which must not meet those of the host
        self._engine = host.engine
        self.calls: list[str] = []
        self.torn = 0

    def algorithms(self) -> Algorithms:
        return Algorithms([Row("*", "device", 0, "stand-in", "for tests")])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        alone = name in ("isend", "irecv")
        if not alone and self._own is None:
            self._own = self._host.split(0, self._host.rank)
        move = getattr(self._host if alone else self._own, name)

        def start(*args: Any) -> Any:
            self.calls.append(name)
            given = [self._memory(one) for one in args]
            scope = StreamScope()
            event = scope.mark()
            one_buffer = name in ("broadcast", "irecv")
            out = given[0 if one_buffer else 1]
            source = None if one_buffer else given[0]

            def steps() -> Any:
                yield _Reached(event, self._host)
                yield move(*given)
                if source is not None:
                    self._read_late(source, scope.stream)
                if isinstance(out, np.ndarray) and name != "isend":
                    _come_late(out, scope.stream)

            return self._engine.stage(object() if alone else self, steps())

        return start

    def _read_late(self, source: np.ndarray, stream: Any) -> None:
        """Look at an input once more, in the order of `stream`: it must be as it was."""
        before = source.copy()

        def look() -> None:
            self.torn += not np.array_equal(before, source)

        stream.delay(30)
        stream.put(look)

    @staticmethod
    def _memory(given: Any) -> Any:
        assert not isinstance(given, np.ndarray), "an array on the host was given to a device"
        if not isinstance(given, sys.modules["cupy"].ndarray):
            return given
        assert given.ndim == 1
        assert given.flags.c_contiguous
        return given.on_host


def _come_late(out: np.ndarray, stream: Any) -> None:
    """Let what came be there for who asks on `stream` only."""
    came = out.copy()
    out.reshape(-1).view(np.uint8)[...] = 0x5A
    stream.delay(30)
    stream.put(lambda: out.__setitem__(..., came))


def stand_in(communicator: Any, *, prefer: str = "") -> StandInCommunicator:
    """Return the device communicator of a communicator, made on first use."""
    found = getattr(communicator, "stand_in", None)
    if found is None:
        found = communicator.stand_in = StandInCommunicator(communicator)
    return found
