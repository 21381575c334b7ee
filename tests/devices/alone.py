"""A device communicator that has one strategy, for the tests of that strategy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.comm import Steps
from mpimesh.comm.device_communicator import DeviceCommunicator
from mpimesh.comm.device_strategy import DeviceStrategy
from mpimesh.comm.host_strategies import Staged

__all__ = ["Alone"]


class Alone(DeviceCommunicator):
    """Starts a strategy that talks on the ranks' own communicator.

    Its messages are those of the strategy if that has its own, as `Staged` does.
    """

    def __init__(self, communicator: Any, strategy: DeviceStrategy) -> None:
        super().__init__(communicator)
        self.strategy = strategy

    def _find(self) -> Steps:
        self._strategies = [self.strategy]
        yield from ()

    def cannot(self, operation: str, dtype: Any = None, op: str = "") -> str | None:
        return self.strategy.cannot(operation, dtype, op)

    def isend(self, buffer: Any, dest: int, tag: int) -> Any:
        strategy, data = self.strategy, buffer.view(np.uint8)
        if not isinstance(strategy, Staged):
            return super().isend(buffer, dest, tag)
        steps = strategy.stream.run(lambda: strategy.send(data, dest, tag))
        return self._engine.stage(object(), steps)

    def irecv(self, buffer: Any, source: int, tag: int) -> Any:
        strategy, data = self.strategy, buffer.view(np.uint8)
        if not isinstance(strategy, Staged):
            return super().irecv(buffer, source, tag)
        steps = strategy.stream.run(lambda: strategy.recv(data, source, tag))
        return self._engine.stage(object(), steps)

    def free(self, *, unended: bool = False) -> None:
        super().free(unended=unended)
        self.strategy.free()
