"""Operations on device memory: all their own work stays on the stream they were called on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from mpimesh.arrays import StreamScope
from mpimesh.runtime.call import Call
from mpimesh.runtime.work import Operation, Owner
from mpimesh.transport import Request, Steps
from mpimesh.transport.device_strategy import steps_in

__all__ = ["DeviceOperation", "begin_in"]


class DeviceOperation(Operation):
    """An operation that reads its input, and makes its result, in the order of a stream.

    Its result is finished (divided, converted, unpacked) on the stream that was current when
    it was called. Whoever takes it works on the stream that is current then: that one is made
    to wait for the other, on the device and not on the host. The same holds for writing the input
    again.
    """

    __slots__ = ("_event", "_result", "_scope")

    def __init__(
        self,
        scope: StreamScope,
        group: Owner,
        call: Call,
        request: Request,
        finish: Callable[[], Any] | None,
        unlock: Callable[[], None] | None = None,
        value: Any = None,
    ) -> None:
        self._scope = scope
        self._event: Any = None
        super().__init__(group, call, request, finish, unlock, value)

    @property
    def value(self) -> Any:
        """The result, for the stream that is current where it is asked for."""
        if self._event is not None:
            self._scope.follow(self._event)
        return self._result

    @value.setter
    def value(self, result: Any) -> None:
        self._result = result

    def settle(self) -> None:
        """Take the result of the finished request, and let go of the buffers."""
        with self._scope.current():
            super().settle()
        # An array on the host is there by now. Without any, the input may still be read.
        if not isinstance(self._result, np.ndarray):
            self._event = self._scope.mark()


def begin_in(
    scope: StreamScope, begin: Callable[[], Request | Steps]
) -> Callable[[], Request | Steps]:
    """Return `begin`, to be called and to go on in `scope` wherever that is done."""

    def started() -> Any:
        request = scope.call(begin)
        return steps_in(scope, request) if isinstance(request, Generator) else request

    return started
