"""The device and stream on which one operation works, from its start until its result is taken.

CuPy works on the device and the stream that are current in a thread. An operation that
waits in a queue goes on under whatever is current where somebody waits, maybe in
another thread. So it takes along what was current when it was called, and does all its own work
there: its temporary memory is made, used and given back in the order of one stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from mpimesh.arrays.namespace import is_cupy
from mpimesh.arrays.types import Array
from mpimesh.errors import DTypeError

__all__ = ["StreamScope", "check_current", "device_ready", "made_current"]

_PER_THREAD = 2
"""The pointer that stands for another stream in each thread."""

R = TypeVar("R")


def device_ready() -> bool:
    """Tell whether CuPy is in use in this process and has a device."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    runtime = cupy.cuda.runtime
    try:
        return int(runtime.getDeviceCount()) > 0
    except runtime.CUDARuntimeError:  # there is no driver
        return False


@contextmanager
def made_current(device: Any, stream: Any) -> Iterator[None]:
    """Make a device and one of its streams current, and afterwards those that were so before.

    CuPy's own ``with stream:`` goes back to the stream of the ``with`` around it, and so forgets
    one that a program has chosen by ``stream.use()``: its next kernels would go astray.
    """
    with device:
        before = sys.modules["cupy"].cuda.get_current_stream()
        stream.use()
        try:
            yield
        finally:
            before.use()


class StreamScope:
    """A device and one of its streams.

    Attributes:
        device: CuPy's device.
        stream: CuPy's stream.
    """

    __slots__ = ("_cuda", "device", "stream")

    def __init__(self) -> None:
        """Take what is current in this thread; CuPy must be in use."""
        self._cuda: Any = sys.modules["cupy"].cuda
        self.device: Any = self._cuda.Device()
        self.stream: Any = self._cuda.get_current_stream()

    @classmethod
    def of(cls, x: Array) -> StreamScope | None:
        """Return the current scope if `x` is a CuPy array on a device, None for any other."""
        return cls() if is_cupy(x) and device_ready() else None

    @property
    def per_thread(self) -> bool:
        """True if the stream is the default one of each thread, and so another one in each."""
        return bool(self.stream.ptr == _PER_THREAD)

    def current(self) -> AbstractContextManager[None]:
        """Make the device and the stream current for a ``with`` block."""
        return made_current(self.device, self.stream)

    def call(self, function: Callable[[], R]) -> R:
        """Return what `function` returns, called on the device and stream."""
        with self.current():
            return function()

    def mark(self) -> Any:
        """Return an event after all that the stream was given so far."""
        with self.device:
            event = self._cuda.Event(block=False, disable_timing=True)
            event.record(self.stream)
        return event

    def follow(self, event: Any) -> None:
        """Let the current stream of this thread wait for an event of this scope's stream."""
        with self.device:
            current = self._cuda.get_current_stream()
            if current != self.stream or self.per_thread:
                current.wait_event(event)


def check_current(x: Array) -> None:
    """Refuse a CuPy array that lies on another device than the current one.

    Raises:
        DTypeError: If it does: CuPy would work on it across devices, or not at all.
    """
    current = sys.modules["cupy"].cuda.runtime.getDevice()
    if x.device.id != current:
        raise DTypeError(
            f"an array on GPU {x.device.id} was given while GPU {current} is current; make its GPU "
            "current before its arrays are made (mesh.use_device(), or `with x.device:`)"
        )
