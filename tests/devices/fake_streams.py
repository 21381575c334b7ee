"""Streams and events of a fake GPU: what is given to a stream happens later.

A stream is a queue of actions. One tick of the clock runs at most one action of each stream
that is not held up by an event. The clock ticks when somebody asks whether an event is done,
and while somebody waits for a stream. So a program that forgets to order two streams, or
takes a result before it is there, finds wrong data every time and not once in a while.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Clock", "Event", "Record", "Stream"]

_LIMIT_S = 30


class Record:
    """A place in a stream that an event stands for: reached, or not yet."""

    def __init__(self) -> None:
        self.reached = False


class Clock:
    """All streams of the process, and what is found by its pointer."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.objects: dict[int, Any] = {}
        self.current = threading.local()
        self.queries = 0
        # Whose turn it is where all streams share one queue of the device; None where none do.
        self.one_queue: deque[Stream] | None = None
        self._pointers = itertools.count(0x1000)

    def pointer(self, thing: Any) -> int:
        pointer = next(self._pointers)
        self.objects[pointer] = thing
        return pointer

    def tick(self) -> None:
        with self.lock:
            if self.one_queue is None:
                for stream in self.streams:
                    stream.step()
            elif self.one_queue and self.one_queue[0].step():
                self.one_queue.popleft()

    def device(self) -> int:
        """Return the number of the current device."""
        return int(getattr(self.current, "device", 0))

    def stream(self, device: int = -1) -> Stream:
        """Return the current stream; every thread has a default stream of its own."""
        device = self.device() if device < 0 else device
        found: Stream = self.streams_now().setdefault(device, self.stack(device)[0])
        return found

    def streams_now(self) -> dict[int, Stream]:
        """Return the current stream of each device."""
        if not hasattr(self.current, "now"):
            self.current.now = {}
        now: dict[int, Stream] = self.current.now
        return now

    def stack(self, device: int) -> list[Stream]:
        """Return the streams that ``with`` has made current on a device, the default one first."""
        if not hasattr(self.current, "stacks"):
            self.current.default = Stream(clock=self, device_id=-1)
            self.current.stacks = {}
            self.current.entered = []
        stacks: dict[int, list[Stream]] = self.current.stacks
        return stacks.setdefault(device, [self.current.default])


class Stream:
    """A queue of actions; an action returns False to be asked again at the next tick."""

    def __init__(self, *, clock: Clock, device_id: int = 0) -> None:
        self._clock = clock
        self._queue: deque[Callable[[], Any]] = deque()
        self.device_id = device_id
        self.ptr = clock.pointer(self)
        clock.streams.append(self)

    def put(self, action: Callable[[], Any]) -> None:
        """Let `action` happen after all that the stream was given so far."""
        with self._clock.lock:
            self._queue.append(action)
            if self._clock.one_queue is not None:
                self._clock.one_queue.append(self)

    def step(self) -> bool:
        """Run the next action; False if there is none, or it is held up."""
        if not self._queue or self._queue[0]() is False:
            return False
        self._queue.popleft()
        return True

    def delay(self, ticks: int) -> None:
        """Let the stream be busy for some ticks."""
        for _ in range(ticks):
            self.put(lambda: None)

    @property
    def done(self) -> bool:
        self._clock.tick()
        return not self._queue

    def synchronize(self) -> None:
        end_s = time.monotonic() + _LIMIT_S
        while not self.done:
            if time.monotonic() > end_s:
                raise RuntimeError("the fake stream is stuck: its event never comes")

    def wait_event(self, event: Event) -> None:
        record = event.record_now
        if record is not None:
            self.put(lambda: record.reached)

    def record(self, event: Event | None = None) -> Event:
        event = Event(clock=self._clock) if event is None else event
        event.record(self)
        return event

    def use(self) -> Stream:
        self._clock.streams_now()[self._device()] = self
        return self

    def __enter__(self) -> Stream:
        device = self._device()
        self._clock.stack(device).append(self)
        self._clock.current.entered.append(device)
        self._clock.streams_now()[device] = self
        return self

    def __exit__(self, *error: object) -> None:
        # As CuPy does: what `use` has made current meanwhile, or before, is forgotten.
        device = self._clock.current.entered.pop()
        stack = self._clock.stack(device)
        stack.pop()
        self._clock.streams_now()[device] = stack[-1]

    def _device(self) -> int:
        """Return the current device, which must be the stream's own."""
        current = self._clock.device()
        if self.device_id not in (-1, current):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with "
                f"the current device ({current})"
            )
        return current

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr


class Event:
    """A place in a stream, which is done some queries after the stream could have reached it."""

    def __init__(
        self,
        block: bool = False,
        disable_timing: bool = False,
        interprocess: bool = False,
        *,
        clock: Clock,
    ) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self._clock = clock
        self.interprocess = interprocess
        self.record_now: Record | None = None
        self.ptr = clock.pointer(self)

    def record(self, stream: Stream | None = None) -> None:
        stream = self._clock.stream() if stream is None else stream
        mine = self.record_now = Record()

        def reach() -> None:
            mine.reached = True

        stream.put(reach)

    @property
    def done(self) -> bool:
        self._clock.queries += 1
        self._clock.tick()
        return self.record_now is None or self.record_now.reached

    def synchronize(self) -> None:
        end_s = time.monotonic() + _LIMIT_S
        while not self.done:
            if time.monotonic() > end_s:
                raise RuntimeError("the fake event never comes")
