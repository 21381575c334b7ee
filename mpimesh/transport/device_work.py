"""Work on a stream of mpimesh's own, ordered with the caller's by events.

An operation on device memory takes its turn like this. At its start an event is recorded on the
stream that is current for the caller: all that the operation reads was made before. Its own work
goes to a stream of its own, which waits for that event on the device. At its end the caller's
stream is made to wait for an event of the own stream. The host never waits: where a step needs
bytes to be there (MPI is about to read them), it asks the event, again and again, in `test`.

Temporary memory is allocated, used and given back with the own stream current, so CuPy's pool
gives it out again in the order of that stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mpimesh.arrays.stream_scope import StreamScope, made_current
from mpimesh.errors import TransportError
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.engine import Steps

_SUCCESS, _NOT_READY = 0, 600
"""CUDA's answers when asked for an event."""

__all__ = ["AllDone", "EventDone", "Lane", "in_lane", "steps_in"]


class EventDone:
    """The request that is done when the device has come to an event."""

    __slots__ = ("_event", "_host")

    def __init__(self, event: Any, host: Communicator) -> None:
        self._event = event
        self._host = host

    def test(self) -> bool:
        """Ask the device; never waits for it.

        Raises:
            TransportError: If work on the device has failed: the event will never come.
        """
        code = sys.modules["cupy"].cuda.runtime.eventQuery(self._event.ptr)
        if code == _SUCCESS:
            return True
        if code != _NOT_READY:
            raise TransportError(
                f"work on the GPU of rank {self._host.rank} has failed with CUDA error {code}, and "
                "so the data of an operation will never be there"
            )
        self._host.stir()
        return False


class AllDone:
    """Several requests that are one step."""

    __slots__ = ("_requests",)

    def __init__(self, *requests: Request) -> None:
        self._requests = list(requests)

    def test(self) -> bool:
        """Move all along, and tell whether all are done."""
        self._requests = [request for request in self._requests if not request.test()]
        return not self._requests


class Lane:
    """A stream of mpimesh's own on the device that is current when it is made.

    Attributes:
        stream: CuPy's stream.
        cuda: The module `cupy.cuda`.
    """

    def __init__(self, host: Communicator) -> None:
        self.cupy: Any = sys.modules["cupy"]
        self.cuda: Any = self.cupy.cuda
        self.device: Any = self.cuda.Device()
        self.stream: Any = self.cuda.Stream(non_blocking=True)
        self._host = host

    def current(self) -> AbstractContextManager[None]:
        """Make device and stream current for a ``with`` block."""
        return made_current(self.device, self.stream)

    def mark(self) -> Any:
        """Return an event after all that the stream was given so far."""
        with self.device:
            event = self.cuda.Event(block=False, disable_timing=True)
            event.record(self.stream)
        return event

    def reached(self) -> EventDone:
        """Return the request that is done when all the stream was given so far has happened."""
        return EventDone(self.mark(), self._host)

    def copy(self, target_ptr: int, source_ptr: int, nbytes: int) -> None:
        """Copy bytes from anywhere to anywhere, on the stream."""
        if nbytes:
            runtime = self.cuda.runtime
            runtime.memcpyAsync(
                target_ptr, source_ptr, nbytes, runtime.memcpyDefault, self.stream.ptr
            )


def in_lane(lane: Lane, make: Callable[[], Steps]) -> Steps:
    """Return the steps of `make`, run on `lane` between two events of the caller's stream.

    Call it where the operation is called: it takes the current stream.
    """
    caller = StreamScope()
    return _run(lane, caller, caller.mark(), make)


def _run(lane: Lane, caller: StreamScope, start: Any, make: Callable[[], Steps]) -> Steps:
    lane.stream.wait_event(start)
    steps = make()
    while True:
        with lane.current():
            try:
                request = next(steps)
            except StopIteration:
                break
        yield request
    end = lane.mark()
    with caller.device:
        caller.stream.wait_event(end)


def steps_in(scope: StreamScope, steps: Steps) -> Steps:
    """Run each step in `scope`; between two steps the caller's device and stream are current."""
    while True:
        try:
            request = scope.call(lambda: next(steps))
        except StopIteration as stop:
            return stop.value
        yield request
